"""Greedy output over three processes, sockets and blocks equals the one-process output, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from kvtest.lanes import some
from transformers import AutoModelForCausalLM

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams
from kvferry.tools.oracle import OneProcessGenerator

PROMPT_WORDS = (1, 2, 3, 7, 16, 31, 32, 33, 50, 64, 97, 128, 200, 255, 256, 400, 513, 700, 900, 1200)
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def prompts(make_document: Callable[..., object], tokenizer: ChatTokenizer) -> list[list[int]]:
    """20 prompts of 1 to 1,200 tokens and their ids; the longer ones are chats that end in a question."""
    out = []
    for seed, num_words in enumerate(PROMPT_WORDS):
        document = make_document(seed, num_words=num_words, num_facts=1 + seed % 6)
        question = document.questions[0][0]
        words = (document.text + " " + question).split()
        if num_words <= 3:
            out.append(tokenizer.encode(" ".join(words[:num_words])))
        else:
            out.append(tokenizer.render([{"role": "user", "content": " ".join(words[-num_words:])}]))
    return out


@pytest.fixture(scope="module")
def reference_tokens(prompts: list[list[int]], demo_model_dir: Path) -> list[list[int]]:
    """What transformers' own `generate` says, greedily."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    answers = []
    for ids in prompts:
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(output[0, len(ids) :].tolist())
    return answers


def texts(tokenizer: ChatTokenizer, token_ids: list[int]) -> list[str]:
    """What each token adds to the completion's text; the demo tokenizer gives every id a text of its own."""
    assembler = TextAssembler(tokenizer)
    return [assembler.push(token_id).token_text for token_id in token_ids]


def complete(base_url: str, ids: list[int], *, stream: bool, **fields: object) -> list[str]:
    """One greedy completion; returns the tokens' strings as the logprobs report them."""
    body = {
        "model": "demo",
        "prompt": ids,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "stream": stream,
        **fields,
    }
    with httpx.Client(base_url=base_url, timeout=120) as client:
        if not stream:
            response = client.post("/v1/completions", json=body)
            response.raise_for_status()
            return response.json()["choices"][0]["logprobs"]["tokens"]
        tokens: list[str] = []
        with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += (choice.get("logprobs") or {}).get("tokens", [])
        return tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_full_equals_transformers_generate(
    stack: Any,
    prompts: list[list[int]],
    reference_tokens: list[list[int]],
    tokenizer: ChatTokenizer,
    stream: bool,
    concurrency: int,
) -> None:
    compression = {"method": "full"}
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(
            pool.map(
                lambda ids: complete(stack.base_url, ids, stream=stream, kv_compression=compression), prompts
            )
        )
    for tokens, expected in zip(answers, reference_tokens, strict=True):
        assert tokens == texts(tokenizer, expected)


@pytest.mark.parametrize(
    "method",
    some(
        [
            *("rocketkv", "compactor-kivi", "compactor-rdkv", "rdkv-union", "rdkv-draft"),
            "kvzip-rdkv",
            "keydiff",
        ],
        *("rocketkv", "compactor-kivi", "rdkv-draft", "kvzip-rdkv"),
    ),
)
def test_answers_whose_tokens_are_compacted_equal_their_one_process_selves(
    stack: Any, prompts: list[list[int]], tokenizer: ChatTokenizer, demo_model_dir: Path, method: str
) -> None:
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    parameters = {"rebudget_tokens": 16}
    plan = plan_for(method, budget=Budget(tokens=24), overrides=dict(parameters))
    compression = {"method": method, "token_budget": 24, "parameters": parameters}
    sampling = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)

    def answer(ids: list[int]) -> list[str]:
        fields = {"max_tokens": 48, "ignore_eos": True, "kv_compression": compression}
        return complete(stack.base_url, ids, stream=False, **fields)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(answer, prompts[12:16]))
    for ids, tokens in zip(prompts[12:16], answers, strict=True):
        expected = OneProcessGenerator(model).generate(ids, plan=plan, sampling=sampling)
        assert tokens == texts(tokenizer, [token.token_id for token in expected])


def test_choices_decode_from_the_prompt_and_not_from_its_draft(
    stack: Any, prompts: list[list[int]], tokenizer: ChatTokenizer, demo_model_dir: Path
) -> None:
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    expected = OneProcessGenerator(model).generate(
        prompts[14],
        plan=plan_for("rdkv-draft", budget=Budget(tokens=24)),
        sampling=sampling,
        has_siblings=True,
    )
    body = {
        **{"model": "demo", "prompt": prompts[14], "max_tokens": MAX_TOKENS, "n": 2},
        **{"temperature": 0, "logprobs": 0, "ignore_eos": True},
        "kv_compression": {"method": "rdkv-draft", "token_budget": 24},
    }
    answer = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    of_choices = [choice["logprobs"]["tokens"] for choice in answer["choices"]]
    assert of_choices == [texts(tokenizer, [token.token_id for token in expected])] * 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["rocketkv", "snapkv", "d2o"])
@pytest.mark.parametrize("budget", [48, 256])
def test_compressed_methods_equal_their_one_process_selves(
    stack: Any,
    prompts: list[list[int]],
    tokenizer: ChatTokenizer,
    demo_model_dir: Path,
    method: str,
    budget: int,
) -> None:
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    generator = OneProcessGenerator(model)
    plan = plan_for(method, budget=Budget(tokens=budget))
    compression = {"method": method, "token_budget": budget}
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda ids: complete(stack.base_url, ids, stream=True, kv_compression=compression), prompts
            )
        )
    for ids, tokens in zip(prompts, answers, strict=True):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        expected = generator.generate(ids, plan=plan, sampling=sampling)
        assert tokens == texts(tokenizer, [token.token_id for token in expected])


def test_answers_of_min_tokens_equal_their_one_process_selves_beside_others(
    stack: Any, prompts: list[list[int]], tokenizer: ChatTokenizer, demo_model_dir: Path
) -> None:
    model = load_model(str(demo_model_dir), name="demo", device="cpu", dtype="float32", max_model_len=0)
    given = [(ids, min_tokens) for ids in prompts[8:12] for min_tokens in (0, 2, 11)]

    def answer(one: tuple[list[int], int]) -> list[str]:
        fields = {"min_tokens": one[1], "kv_compression": {"method": "full"}}
        return complete(stack.base_url, one[0], stream=True, **fields)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(answer, given))
    for (ids, min_tokens), tokens in zip(given, answers, strict=True):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, min_tokens=min_tokens, temperature=0.0)
        expected = OneProcessGenerator(model).generate(ids, plan=plan_for("full"), sampling=sampling)
        assert tokens == texts(tokenizer, [token.token_id for token in expected])
        assert len(tokens) > min_tokens
    assert any(len(tokens) < 11 for tokens in answers)
