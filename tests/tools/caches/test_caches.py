"""Compressed caches in transformers' own `generate`, against the one-process generator of the same method."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kvtest.documents import make_document
from kvtest.stack import serving
from kvtest.tiny_models import make_config

import kvferry
from kvferry.models import DEMO_MODEL
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from kvferry.shared.model.checkpoint import quiet_libraries
from kvferry.shared.model.loading import load_model
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

NUM_NEW = 12


def load_theirs(path: Path) -> Any:
    with quiet_libraries():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return load_theirs(DEMO_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def oracle() -> OneProcessGenerator:
    return OneProcessGenerator(load_model(DEMO_MODEL, device="cpu"))


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> torch.Tensor:
    document = make_document(31, num_words=300, num_facts=4)
    text = f"{document.text} {document.questions[0][0]}"
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


def test_the_lines_that_a_kvpress_script_changes_run_as_the_documentation_has_them(
    model: Any, tokenizer: Any
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text(encoding="utf-8")
    diff = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    added = [line[1:] for line in diff if line.startswith("+")]
    assert len(added) == 3
    text = make_document(31, num_words=300, num_facts=4).text
    inputs = tokenizer(text, return_tensors="pt")
    script: dict[str, Any] = {"model": model, "inputs": inputs}
    exec("\n".join(added), script)
    num_prompt, output = inputs.input_ids.shape[1], script["output"]
    assert torch.equal(output[0, :num_prompt], inputs.input_ids[0])
    assert output.shape[1] > num_prompt + 1
    assert script["cache"].size_bytes < 0.3 * script["cache"].full_bytes


def generate(model: Any, cache: Any, num_new: int = NUM_NEW) -> list[int]:
    """The tokens after the prompt."""
    given = cache.input_ids
    with quiet_libraries():
        output = model.generate(
            given,
            past_key_values=cache,
            max_new_tokens=num_new - 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token_id) for token_id in output[0, given.shape[1] - 1 :]]


@pytest.mark.parametrize("method", method_names())
def test_greedy_output_is_the_one_process_output(
    model: Any, oracle: OneProcessGenerator, prompt: torch.Tensor, method: str
) -> None:
    budget = 64 if preset(method).takes_budget else None
    # a model in memory does not say of which checkpoint it is, so its own table is not found
    parameters = {"epsilon_table": "LLaMA-3.1-8B"} if preset(method).representation.name == "rdkv" else {}
    cache = kvferry.compress(
        model, prompt, method=method, token_budget=budget, max_new_tokens=NUM_NEW, **parameters
    )
    plan = plan_for(method, budget=Budget(tokens=budget), overrides=parameters)
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    # what follows a cache is not known: it ends with the prompt, as that of several completions does
    expected = oracle.generate(prompt[0].tolist(), plan=plan, sampling=sampling, has_siblings=True)
    assert generate(model, cache) == [token.token_id for token in expected]
    assert cache.get_seq_length() == prompt.shape[1] + NUM_NEW - 1
    assert cache.method == method


def test_full_kv_is_transformers_own_output(model: Any, prompt: torch.Tensor) -> None:
    cache = kvferry.compress(model, prompt, method="full")
    plain = load_theirs(DEMO_MODEL)
    with quiet_libraries():
        options: Any = {
            "max_new_tokens": NUM_NEW,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        ours = model.generate(prompt, **options)  # without a cache of ours the model is as before
        theirs = plain.generate(prompt, **options)
    assert generate(model, cache) == theirs[0, prompt.shape[1] :].tolist()
    assert ours.tolist() == theirs.tolist()


def test_a_saved_cache_and_a_fork_continue_alike(model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    cache = kvferry.compress(model, prompt, method="rdkv", token_budget=48)
    cache.save(tmp_path / "prompt.safetensors")
    fork = cache.fork()
    expected = generate(model, cache)
    assert generate(model, fork) == expected
    again = kvferry.load(model, tmp_path / "prompt.safetensors")
    assert again.size_bytes == cache.size_bytes < cache.full_bytes / 4
    assert generate(model, again) == expected


def test_a_question_after_the_compression_is_answered(model: Any, tokenizer: Any) -> None:
    document = make_document(33, num_words=200, num_facts=2)
    ids = tokenizer(document.text, return_tensors="pt").input_ids
    cache = kvferry.compress(model, ids, method="full")
    question = tokenizer(f" {document.questions[0][0]}", return_tensors="pt").input_ids
    whole = torch.cat([ids, question], 1)
    with quiet_libraries():
        options: Any = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        answers = [model.generate(whole, past_key_values=past, **options).tolist() for past in (cache, None)]
    assert answers[0] == answers[1]


def test_what_is_no_prompt_or_no_file_is_refused(model: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    for wrong in ([], prompt.repeat(2, 1), prompt.float()):
        with pytest.raises(InvalidRequest, match="input_ids"):
            kvferry.compress(model, wrong, method="full")
    with pytest.raises(InvalidRequest, match="snapkw"):
        kvferry.compress(model, prompt, method="snapkw")
    with pytest.raises(InvalidRequest, match="exclude"):
        kvferry.compress(model, prompt, method="rdkv", token_budget=5, retention=0.5)
    with pytest.raises(ContextLengthExceeded):
        kvferry.compress(model, prompt.repeat(1, 60), method="full")
    other = tmp_path / "other.safetensors"
    with pytest.raises(InvalidRequest, match="other"):
        kvferry.load(model, other)
    other.write_bytes(b"12345678901234567890")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        kvferry.load(model, other)
    cache = kvferry.compress(model, prompt, method="streamingllm", token_budget=48)
    with pytest.raises(InvalidRequest, match="has one"):
        generate_beams(model, cache)


def generate_beams(model: Any, cache: Any) -> None:
    with quiet_libraries():
        model.generate(cache.input_ids, past_key_values=cache, max_new_tokens=3, num_beams=2, pad_token_id=0)


@pytest.mark.parametrize("family", ["llama-dynamic", "stablelm"])
def test_a_model_that_must_be_changed_is_refused_and_stays_as_it_is(family: str) -> None:
    if family == "stablelm":
        sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
        heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
        config: Any = transformers.StableLmConfig(**sizes, **heads)
    else:
        config = make_config(family)
    with quiet_libraries():
        model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match="kvferry serve only"):
        kvferry.compress(model, [1, 2, 3], method="full")
    assert model.config._attn_implementation != "kvferry_cache"
    with pytest.raises(InvalidRequest, match=r"model\.eval"):
        kvferry.compress(model.train(), [1, 2, 3], method="full")


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with serving("--in-process") as stack:
        yield stack.base_url


def test_a_prompts_text_becomes_a_document_of_a_server(model: Any, tokenizer: Any, base_url: str) -> None:
    import httpx

    text = make_document(34, num_words=120, num_facts=2).text
    cache = kvferry.compress(
        model, tokenizer(text, return_tensors="pt").input_ids, method="snapkv", token_budget=40
    )
    assert cache.insert(base_url, text, id="report", api_key="k") == "report"
    document = httpx.get(f"{base_url}/v1/documents/report", headers={"Authorization": "Bearer k"}).json()
    assert document["kv_compression"] == {"method": "snapkv", "token_budget": 40}
    with pytest.raises(InvalidRequest, match="the server refused"):
        cache.insert(base_url, "", id="report")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, kvferry; print(kvferry.__version__); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, kvferry.__version__)
    with pytest.raises(AttributeError):
        _ = kvferry.nothing  # type: ignore[attr-defined]
