"""Prompts are compressed to the bytes that they hold, also where those are known only afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvtest.methods import PRESETS

from kvferry.shared.model.bridge import TransformersModel
from kvferry.tools.evaluation.compressor import Compressor
from kvferry.tools.evaluation.config import EvalConfig
from kvferry.tools.evaluation.experiment import Contender, Experiment, read_experiment
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS


@pytest.fixture(scope="module")
def captured(model: TransformersModel) -> CapturedPrompt:
    prompt = TASKS["multi_key_8"].example(num_tokens=256, seed=3).prompt_token_ids
    return OneProcessGenerator(model).capture(prompt)


def compressor(model: TransformersModel, **options: object) -> tuple[Compressor, tuple[Contender, ...]]:
    wanted: Experiment = read_experiment(EvalConfig(**options))
    return Compressor(model, OneProcessGenerator(model), wanted), wanted.contenders


@pytest.mark.parametrize("match", ["kept", "read"])
def test_packed_prompts_come_close_to_the_target_and_never_exceed_it(
    model: TransformersModel, captured: CapturedPrompt, match: str
) -> None:
    made, contenders = compressor(model, methods="rdkv", budgets="40%,15%", match=match)
    for contender in contenders:
        assert contender.target is not None
        continuation = made.compress(captured, contender, max_new_tokens=4)
        assert continuation is not None
        sizes = made.sizes(continuation)
        target = contender.target.size_bytes(
            replace(model.spec, dtype="float16", checkpoint_dtype=None), len(captured.token_ids)
        )
        held = {"kept": sizes.kept, "read": sizes.read}[match]
        assert 0.9 * target <= held <= target
        assert held == sum(
            tensor.nbytes
            for layer in continuation.compressed
            for name, tensor in layer.items()
            if name != "layout"
        )


@pytest.mark.parametrize("method", PRESETS)
def test_every_method_holds_at_most_the_target_and_not_nothing(
    model: TransformersModel, captured: CapturedPrompt, method: str
) -> None:
    made, contenders = compressor(model, methods=method, budgets="60%")
    for contender in contenders:
        continuation = made.compress(captured, contender, max_new_tokens=4)
        if continuation is None:  # it keeps every token, and more beside them
            assert contender.plan.scorer is None
            continue
        sizes = made.sizes(continuation)
        assert 0.05 * sizes.full < sizes.read <= max(sizes.kept, sizes.full)
        assert 0.1 * sizes.full < sizes.kept
        if contender.target is not None:
            assert sizes.kept <= 0.6 * sizes.full


def test_a_packed_prompt_that_cannot_be_so_small_is_none(
    model: TransformersModel, captured: CapturedPrompt
) -> None:
    made, (contender,) = compressor(model, methods="rdkv", budgets="64B")
    assert made.compress(captured, contender, max_new_tokens=4) is None


@pytest.mark.parametrize(("kv_dtype", "element_bytes"), [("auto", 2), ("float32", 4), ("bfloat16", 2)])
def test_rows_are_counted_in_the_dtype_asked_for(
    model: TransformersModel, captured: CapturedPrompt, kv_dtype: str, element_bytes: int
) -> None:
    made, contenders = compressor(
        model, methods="full,snapkv", budgets="50t", match="given", kv_dtype=kv_dtype
    )
    full, snapkv = (made.compress(captured, contender, max_new_tokens=4) for contender in contenders)
    assert full is not None
    assert snapkv is not None
    spec = model.spec
    row_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes
    assert made.sizes(full).full == made.sizes(full).kept == row_bytes * len(captured.token_ids)
    positions = 50 * 4 * spec.num_layers * spec.num_kv_heads
    assert made.sizes(snapkv).kept == 50 * row_bytes + positions


def test_a_parameter_that_is_a_list_is_written_with_plus_signs(model: TransformersModel) -> None:
    _, (contender,) = compressor(model, methods="rdkv:widths=0+4+16", budgets="60%")
    assert contender.plan.representation.params["widths"] == "0,4,16"
