"""What pages say about methods, models and vLLM is what the code does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.services.launcher import other_servers
from kvferry.services.router.completion.engine_fields import KvCompression
from kvferry.services.router.completion.refused_fields import OF_CHATS
from kvferry.services.router.completion.requests import ChatRequest
from kvferry.services.router.completion.texts import TextRequest
from kvferry.services.router.config import RouterConfig
from kvferry.shared.compression.applicable import applicable_methods
from kvferry.shared.compression.formats import compresses_heads_apart, make_formats
from kvferry.shared.compression.plan import Budget, CompressionPlan, num_draft_tokens, repeats_prompt
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.compression.resolve import check_plan, resolve_plan
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import LayerSpec
from kvferry.tools.plan.model import ModelCost, read_model
from kvferry.tools.plan.sizes import sizes_of

DOCS = Path(__file__).parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
MAX_LIMITS_LINES = 60
NUM_TOKENS = 4096
OWN_FIELDS = {
    *("model", "messages", "prompt", "best_of", "session_id", "session_mode", "session_ttl_s", "session_pin"),
    *("document_ids", "kv_compression", "kv_kept_bins"),
    # Dynamo's, and SGLang's
    *("nvext", "separate_reasoning", "no_stop_trim", "extra_key", "json_schema", "regex", "ebnf"),
}
"""Fields of requests that are not vLLM's."""


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    text = page(name).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, heading
    return text


def rows(text: str) -> list[list[str]]:
    """The cells of the tables' rows, without their headings."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in found if "---" not in cells[0]]


def test_the_limits_are_read_in_one_go() -> None:
    assert len(page("limits").splitlines()) <= MAX_LIMITS_LINES


# ---- methods ---------------------------------------------------------------------------------------------


def test_the_default_method_and_its_budget_are_those_of_the_code() -> None:
    default = RouterConfig().default_method
    assert f"**The default method is `{default}`**" in README
    assert f"**The default method is `{default}`**" in page("index")
    budget = preset(default).budget.tokens
    assert f"uses `{default}`, the server's default, with the memory of {budget} tokens" in page(
        "choose-a-method"
    )


def chosen() -> list[Any]:
    lines = re.findall(r"^```json\n(.*?)^```$", page("choose-a-method"), re.MULTILINE | re.DOTALL)
    return [pytest.param(json.loads(line), id=line.strip()) for line in lines]


@pytest.mark.parametrize("line", chosen())
def test_each_line_of_json_is_a_plan(line: Mapping[str, Any]) -> None:
    assert line.keys() == {"kv_compression"}
    wanted = KvCompression.model_validate(line["kv_compression"])
    assert wanted.method is not None
    plan = plan_for(
        wanted.method,
        budget=Budget(tokens=wanted.token_budget, retention=wanted.retention),
        overrides=wanted.parameters,
    )
    resolved = resolve_plan(plan, num_prompt_tokens=NUM_TOKENS, max_new_tokens=64, num_layers=4, head_dim=64)
    assert resolved.method == wanted.method


def goes_with(method: str) -> list[str]:
    """One method's row of the table."""
    plan = plan_for(method, budget=Budget(tokens=256) if preset(method).takes_budget else None)
    spec = read_model("demo", dtype="float32").spec
    resolved = resolve_plan(
        plan,
        num_prompt_tokens=NUM_TOKENS,
        max_new_tokens=64,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
    )
    formats = make_formats(spec, resolved)
    whole = num_draft_tokens(resolved) or repeats_prompt(resolved)
    is_yes = (
        all(fmt.is_plain for fmt in formats),
        method in applicable_methods((LayerSpec(has_plain_softmax=False),)),
        method in applicable_methods((LayerSpec(latent_dim=64),)),
        takes(method, "wire_bits", 8),
        takes(method, "rebudget_tokens", 256),
        compresses_heads_apart(resolved, formats) and not whole,
    )
    return [f"`{method}`", *("yes" if yes else "" for yes in is_yes)]


def takes(method: str, parameter: str, value: int) -> bool:
    try:
        plan: CompressionPlan = plan_for(method, overrides={parameter: value})
        check_plan(plan, 4)
    except InvalidRequest:
        return False
    return True


def test_the_table_says_what_goes_with_what() -> None:
    expected = [goes_with(method) for method in method_names()]
    text = "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in expected)
    text = text.replace("|  |", "| |")
    table = section("methods", "What goes with what")
    assert text in table, f"the table must be\n{text}"
    assert len(re.findall(r"^\| `", table, re.MULTILINE)) == len(expected)


# ---- sizes -----------------------------------------------------------------------------------------------


SHAPES = {
    "8B": (36, 4096, 12288, 32),
    "14B": (40, 5120, 17408, 40),
    "32B": (64, 5120, 25600, 64),
}
"""Qwen3's layers, hidden size, MLP and heads; all have 8 KV heads of 128."""


def shaped(folder: Path, size: str) -> ModelCost:
    layers, hidden, inner, heads = SHAPES[size]
    folder.mkdir()
    config = {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"},
        **{"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner},
        **{"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128},
        **{"vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 131072},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(str(folder))


@pytest.mark.parametrize("size", SHAPES)
def test_sizes_of_the_gpu_box_are_those_of_the_plan(size: str, tmp_path: Path) -> None:
    model = shaped(tmp_path / size, size)
    cells = [size, f"{model.weights_bytes / 1e9:.1f}", f"{model.spec.kv_token_bytes / 1024:.0f} KiB"]
    for num_tokens in (32_768, 131_072):
        sizes = sizes_of(model.spec, plan_for("full"), num_prompt_tokens=num_tokens, max_new_tokens=1)
        cells += [f"{sizes.full / 1e9:.1f}", f"{sizes.full / 1e10:.2f}"]
    assert cells in rows(section("gpu-box", "4. Memory"))


# ---- vLLM ------------------------------------------------------------------------------------------------


def test_flags_become_what_the_page_says() -> None:
    expected = {
        **{flag: f"`{ours}`" for flag, ours in other_servers._SAME.items()},
        **{flag: f"left out: {why}" for flag, why in other_servers._NEEDLESS.items()},
        **{flag: f"left out with its value: {why}" for flag, why in other_servers._DECIDED.items()},
        **{flag: f"refused: {why}" for flag, why in other_servers._REFUSED.items()},
    }
    table = rows(section("coming-from-vllm", "Flags").partition("\n\nllama.cpp")[0])[3:]
    found = {flag: meaning for flags, meaning in table for flag in re.findall(r"`(-[^`]+)`", flags)}
    flags_of = {
        meaning: [flag for flag in expected if expected[flag] == meaning] for meaning in expected.values()
    }
    text = [
        f"| {', '.join(f'`{flag}`' for flag in flags)} | {meaning} |" for meaning, flags in flags_of.items()
    ]
    assert found == expected, "the rows after that of --host must be\n" + "\n".join(text)


def test_fields_are_supported_or_refused_as_the_page_says() -> None:
    supported, _, refused = section("coming-from-vllm", "Fields").partition("A chat with one of these")
    named = {name for _, cell in rows(supported)[1:] for name in re.findall(r"`(\w+)`", cell)}
    fields = {*ChatRequest.model_fields, *TextRequest.model_fields}
    assert named - {"continuous_usage_stats"} == fields - OWN_FIELDS
    assert fields >= OWN_FIELDS
    listed = refused.partition("\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == OF_CHATS.keys()
