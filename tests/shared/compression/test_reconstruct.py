"""The prompt's repetition before a compression: what its passes attend to, and the scores that follow."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest.compression import compress_layer, formats_for, make_inputs
from kvtest.families import FAMILIES
from kvtest.transformers_model import greedy, prompt_of
from torch import Tensor

from kvferry.models import DEMO_MODEL
from kvferry.shared.compression.formats import compresses_heads_apart, num_observed_queries
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Budget, CompressionPlan, Part, ResolvedPlan, repeats_prompt
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.reconstruct import chunk_tokens, reconstruct
from kvferry.shared.compression.resolve import check_plan, resolve_plan
from kvferry.shared.compression.scorers import ReconstructionScorer
from kvferry.shared.errors import Cancelled, InvalidRequest
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator

METHODS = ("kvzip", "kvzip-rdkv")
BUDGET = Budget(tokens=5)


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return load_model(DEMO_MODEL, name="demo", device="cpu")


def resolved_for(
    model: TransformersModel, num_tokens: int, *, method: str = "kvzip-rdkv", **overrides: int
) -> ResolvedPlan:
    """The plan of a prompt, which is compressed where it has more than one token."""
    spec = model.spec
    return resolve_plan(
        plan_for(method, budget=Budget(tokens=1), overrides=overrides),
        num_prompt_tokens=num_tokens,
        max_new_tokens=4,
        num_layers=spec.num_layers,
        head_dim=spec.head_dim,
        layers=spec.layers,
    )


def repeated(model: TransformersModel, captured: CapturedPrompt, resolved: ResolvedPlan) -> list[LayerInputs]:
    return reconstruct(model, resolved, captured.layers, token_ids=captured.token_ids, states=captured.states)


def plain_attention(
    model: TransformersModel, prompt: list[int], *, chunk: int, lead: int, sinks: int
) -> dict[int, Tensor]:
    """Each layer's r: one prefill of the prompt and what repeats a chunk, then one softmax at a time."""
    generator, num_tokens = OneProcessGenerator(model), len(prompt)
    found: dict[int, list[Tensor]] = {layer: [] for layer in model.spec.row_layers}
    for begin in range(0, num_tokens, chunk):
        end = min(begin + chunk, num_tokens)
        own = [*prompt[:begin][-lead:], *prompt[begin:end]] if lead else prompt[begin:end]
        whole = generator.capture([*prompt, *own])
        for inputs in whole.layers:
            num_kv_heads, group = inputs.queries.shape[:2]
            most = torch.zeros(num_kv_heads, end - begin)
            first = range(min(sinks, begin))
            for head in range(num_kv_heads):
                for member in range(group):
                    for i in range(len(own)):
                        seen = [*first, *range(begin, end), *range(num_tokens, num_tokens + i + 1)]
                        query = inputs.queries[head, member, num_tokens + i]
                        weights = torch.softmax(inputs.keys[head, seen] @ query * inputs.scaling, 0)
                        most[head] = torch.maximum(most[head], weights[len(first) :][: end - begin])
            found[inputs.layer].append(most)
    return {layer: torch.cat(parts, 1) for layer, parts in found.items()}


@pytest.mark.parametrize(
    ("num_tokens", "chunk", "lead", "sinks"),
    [
        (2, 2048, 8, 8),
        (23, 2048, 8, 8),  # one chunk
        (24, 12, 3, 2),  # chunks end with the prompt
        (25, 12, 3, 8),  # a chunk of one token
        (9, 1, 4, 3),  # the lead is longer than a chunk
        (31, 10, 0, 0),
    ],
)
@torch.inference_mode()
def test_attention_is_that_of_a_pass_over_the_prompt_and_its_chunk(
    model: TransformersModel, num_tokens: int, chunk: int, lead: int, sinks: int
) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    captured = OneProcessGenerator(model).capture(prompt)
    resolved = resolved_for(model, num_tokens, chunk_tokens=chunk, lead_tokens=lead, sinks=sinks)
    expected = plain_attention(model, prompt, chunk=chunk, lead=lead, sinks=sinks)
    for inputs, given in zip(repeated(model, captured, resolved), captured.layers, strict=True):
        assert inputs.repeated is not None
        assert inputs.repeated.dtype is torch.float32
        torch.testing.assert_close(inputs.repeated, expected[inputs.layer], atol=1e-4, rtol=1e-3)
        assert inputs.keys is given.keys
        assert inputs.queries is given.queries


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "gemma2", "granitemoeshared", "deepseek_v3"])
@torch.inference_mode()
def test_models_with_states_windows_and_latent_rows(family: str, tmp_path: Path) -> None:
    """Each pass continues the state after the prompt; layers with a window are not scored."""
    model = load_model(FAMILIES[family].save(tmp_path), device="cpu")
    prompt = prompt_of(45, seed=3)
    captured = OneProcessGenerator(model).capture(prompt)
    before = {
        layer: {name: tensor.clone() for name, tensor in of.items()} for layer, of in captured.states.items()
    }
    resolved = resolved_for(model, 45, method="kvzip", chunk_tokens=20, lead_tokens=3)
    expected = plain_attention(model, prompt, chunk=20, lead=3, sinks=8)
    for inputs in repeated(model, captured, resolved):
        if model.spec.layer(inputs.layer).window:
            assert inputs.repeated is None
            continue
        assert inputs.repeated is not None
        torch.testing.assert_close(inputs.repeated, expected[inputs.layer], atol=1e-3, rtol=1e-2)
    for layer, of in before.items():
        assert all(torch.equal(tensor, captured.states[layer][name]) for name, tensor in of.items())


def test_skipped_layers_are_not_scored(model: TransformersModel) -> None:
    resolved = resolve_plan(
        plan_for("kvzip", budget=BUDGET, skip_layers=(1,)),
        num_prompt_tokens=30, max_new_tokens=4, num_layers=model.spec.num_layers,
        head_dim=model.spec.head_dim,
    )  # fmt: skip
    captured = OneProcessGenerator(model).capture(prompt_of(30, seed=1))
    found = repeated(model, captured, resolved)
    assert [inputs.layer for inputs in found if inputs.repeated is None] == [1]


@pytest.mark.parametrize(
    ("max_model_len", "num_tokens", "chunk"),
    [
        (9999, 3000, 2048),
        (9999, 2000, 2000),
        (4096, 2048, 2048),  # all of it fits behind the prompt
        (4095, 2048, 2039),  # but for one token, so there is a lead
        (1000, 928, 64),
        (100, 50, 50),
        (2, 1, 1),
    ],
)
def test_a_chunk_is_as_long_as_the_models_window_has_room_for(
    max_model_len: int, num_tokens: int, chunk: int
) -> None:
    assert chunk_tokens(plan_of(num_tokens), max_model_len) == chunk


@pytest.mark.parametrize(
    ("max_model_len", "num_tokens", "room", "least"), [(1000, 929, 71, 72), (99, 50, 49, 50), (60, 60, 0, 60)]
)
def test_a_prompt_that_leaves_no_room_is_refused(
    max_model_len: int, num_tokens: int, room: int, least: int
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chunk_tokens(plan_of(num_tokens), max_model_len)
    assert caught.value.param == "kv_compression.method"
    assert "'kvzip-rdkv' repeats the prompt" in caught.value.message
    assert f"after {num_tokens} tokens the model's window of {max_model_len}" in caught.value.message
    assert f"has room for {room}, and it must be at least {least}" in caught.value.message


def plan_of(num_tokens: int) -> ResolvedPlan:
    return resolve_plan(
        plan_for("kvzip-rdkv", budget=Budget(tokens=5)), num_prompt_tokens=num_tokens, max_new_tokens=1,
        num_layers=1, head_dim=8,
    )  # fmt: skip


def test_chunks_of_a_full_window_are_shorter_and_give_scores_of_every_token() -> None:
    model = load_model(DEMO_MODEL, name="demo", device="cpu", max_model_len=222)
    captured, begins = OneProcessGenerator(model).capture(prompt_of(150, seed=2)), []
    found = reconstruct(
        model, resolved_for(model, 150), captured.layers, token_ids=captured.token_ids,
        before_chunk=begins.append,
    )  # fmt: skip
    assert begins == [0, 64, 128]
    assert all(inputs.repeated is not None and inputs.repeated.shape[1] == 150 for inputs in found)


def test_a_caller_may_end_it_before_any_chunk(model: TransformersModel) -> None:
    captured, begins = OneProcessGenerator(model).capture(prompt_of(50, seed=1)), list[int]()

    def third(begin: int) -> None:
        begins.append(begin)
        if len(begins) == 3:
            raise Cancelled("the client left")

    with pytest.raises(Cancelled, match="the client left"):
        reconstruct(
            model, resolved_for(model, 50, chunk_tokens=15), captured.layers, token_ids=captured.token_ids,
            before_chunk=third,
        )  # fmt: skip
    assert begins == [0, 15, 30]


# ---- the scorer ------------------------------------------------------------------------------------------


def plan_params(**changes: int) -> dict[str, Any]:
    return {"chunk_tokens": 2048, "lead_tokens": 8, "sinks": 8, "recents": 4, **changes}


def scorer(rows: int, **changes: int) -> ReconstructionScorer:
    return ReconstructionScorer.from_params(plan_params(**changes), rows)


@pytest.mark.parametrize("num_tokens", [13, 14, 40, 97])
def test_scores_are_z_scores_of_logarithms_between_the_protected_tokens(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens)
    assert inputs.repeated is not None
    inputs.repeated[1, 8] = 0.0
    found = scorer(20)(inputs)
    assert found.dtype is torch.float32
    assert found.isinf().tolist() == [[t < 8 or t >= num_tokens - 4 for t in range(num_tokens)]] * 2
    for head in range(2):
        logs = [math.log(max(float(weight), 1e-12)) for weight in inputs.repeated[head, 8 : num_tokens - 4]]
        mean = sum(logs) / len(logs)
        std = max(math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs)), 1e-6)
        expected = torch.tensor([(log - mean) / std for log in logs])
        torch.testing.assert_close(found[head, 8 : num_tokens - 4], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 1), (3, 2), (12, 12), (30, 3)])
def test_of_few_rows_the_last_are_protected_first(num_tokens: int, rows: int) -> None:
    recents = min(4, rows)
    found = scorer(rows)(make_inputs(num_tokens))[0].isinf().tolist()
    first = min(8, rows - recents)
    assert found == [t < first or t >= num_tokens - recents for t in range(num_tokens)]


def test_rows_are_selected_by_the_most_attention() -> None:
    """Deviation: every head retains as many rows; the paper has one threshold for all."""
    inputs = make_inputs(203)
    assert inputs.repeated is not None
    plan = plan_for("kvzip", budget=Budget(tokens=40))
    resolved = resolve_plan(plan, num_prompt_tokens=203, max_new_tokens=4, num_layers=1, head_dim=8)
    index = compress_layer(resolved, inputs)["index"]
    for head in range(2):
        best = (inputs.repeated[head, 8:199].topk(28).indices + 8).tolist()
        assert index[head].tolist() == sorted([*range(8), *best, *range(199, 203)])


# ---- plans -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_is_repeated_where_something_is_left_out_of_it(method: str) -> None:
    def resolved(plan: CompressionPlan, num_tokens: int = 100) -> ResolvedPlan:
        return resolve_plan(plan, num_prompt_tokens=num_tokens, max_new_tokens=4, num_layers=2, head_dim=8)

    plan = plan_for(method)
    assert repeats_prompt(resolved(plan))
    assert not repeats_prompt(resolved(plan_for(method, budget=Budget(retention=1.0))))
    assert not repeats_prompt(resolved(plan, 1))
    for other in ("full", "compactor", "keydiff-rdkv"):
        assert not repeats_prompt(resolved(plan_for(other)))
    inputs = make_inputs(100)
    formats = formats_for(resolved(plan), inputs)
    assert num_observed_queries(resolved(plan), formats) == (1 if method == "kvzip" else 32)
    assert not compresses_heads_apart(resolved(plan), formats)  # the lead repeats the prompt


def test_layers_that_are_measured_in_the_pass_are_refused() -> None:
    measured = Part(name="attention_variance", params={"normalisation": "mean"})
    plan = dataclasses.replace(plan_for("kvzip"), layer_allocation=measured)
    with pytest.raises(
        InvalidRequest, match="'reconstruction' does not go with layer_allocation 'attention_"
    ):
        check_plan(plan, 3)


def test_generated_tokens_are_not_repeated() -> None:
    part = Part(name="reconstruction", params=plan_params(rebudget_tokens=16))
    plan = dataclasses.replace(plan_for("kvzip"), generated=part)
    with pytest.raises(InvalidRequest, match="scorer 'reconstruction' needs the queries of all tokens, or a"):
        check_plan(plan, 3)
    check_plan(plan_for("kvzip", overrides={"rebudget_tokens": 64}), 3)  # by the last queries' attention


@pytest.mark.parametrize(
    "overrides", [{"chunk_tokens": 0}, {"lead_tokens": -1}, {"sinks": 5000}, {"recents": 1.5}]
)
def test_parameters_out_of_range_are_refused(overrides: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(overrides))):
        check_plan(plan_for("kvzip", overrides=dict(overrides)), 3)


# ---- one process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_captured_prompt_is_repeated_once_for_all_its_budgets(
    model: TransformersModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, prompt, passes = OneProcessGenerator(model), prompt_of(90, seed=4), list[int]()
    captured, run = generator.capture(prompt), model.prefill

    def prefill(token_ids: Tensor, **options: Any) -> Tensor:
        passes.append(options["start"])
        return run(token_ids, **options)

    monkeypatch.setattr(model, "prefill", prefill)
    for tokens in (9, 20):
        plan = plan_for(method, budget=Budget(tokens=tokens), overrides={"chunk_tokens": 40})
        continuation = generator.compress(captured, plan=plan, max_new_tokens=6)
        assert captured.logits is not None
        found = [int(captured.logits.argmax())]
        while len(found) < 6:
            found.append(int(continuation.step(found[-1]).argmax()))
        assert passes == [90, 90, 90]
        expected = OneProcessGenerator(model).generate(prompt, plan=plan, sampling=greedy(6))
        assert found == [token.token_id for token in expected]
        del passes[3:]
    # the first tokens alone are another prompt
    generator.compress(captured.prefix(70), plan=plan, max_new_tokens=6)
    assert passes == [90, 90, 90, 70, 70]
