"""The draft before a compression: its tokens, their queries and keys, and what RDKV makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest.compression import formats_for
from kvtest.families import FAMILIES, WINDOW
from kvtest.transformers_model import greedy, prompt_of
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels import dispatch
from kvferry.models import DEMO_MODEL
from kvferry.shared.compression.draft import greedy as greedily
from kvferry.shared.compression.draft import run_draft
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.compression.interface import Ahead, LayerInputs
from kvferry.shared.compression.plan import MOST_DRAFT_TOKENS, Budget, CompressionPlan, num_draft_tokens
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.rdkv.allocation import allocate
from kvferry.shared.compression.rdkv.compress import allocate_layer, channel_weights, token_weights
from kvferry.shared.compression.resolve import resolve_plan
from kvferry.shared.errors import Cancelled
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator
from kvferry.tools.recall.tasks import TASKS


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return load_model(DEMO_MODEL, name="demo", device="cpu")


def draft(model: TransformersModel, captured: CapturedPrompt, num_draft: int) -> tuple[LayerInputs, ...]:
    assert captured.logits is not None
    draw = greedily(model.spec, num_draft)
    return run_draft(model, captured.layers, logits=captured.logits, draw=draw, states=captured.states).layers


def full_answer(model: TransformersModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = OneProcessGenerator(model).generate(prompt, plan=plan_for("full"), sampling=greedy(num_tokens))
    return [token.token_id for token in tokens]


@contextmanager
def kernels_in(mode: dispatch.KernelMode) -> Iterator[None]:
    dispatch.configure(mode, torch.device("cpu"))
    yield
    dispatch.configure("auto", torch.device("cpu"))


def assert_ahead_is(found: tuple[LayerInputs, ...], expected: CapturedPrompt, num_ahead: int) -> None:
    """Args: expected: the capture of the prompt and the draft's tokens."""
    for layer, whole in zip(found, expected.layers, strict=True):
        assert layer.ahead is not None
        torch.testing.assert_close(
            layer.ahead.queries, whole.queries[:, :, -num_ahead:], atol=1e-3, rtol=1e-3
        )
        torch.testing.assert_close(layer.ahead.keys, whole.keys[:, -num_ahead:], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(layer.ahead.values, whole.values[:, -num_ahead:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 2, 203])
def test_the_draft_is_the_full_kvs_greedy_answer(model: TransformersModel, num_tokens: int) -> None:
    generator, prompt = OneProcessGenerator(model), prompt_of(num_tokens, seed=num_tokens)
    answer = full_answer(model, prompt, 7)
    captured = generator.capture(prompt)
    found = draft(model, captured, 5)
    assert_ahead_is(found, generator.capture([*prompt, *answer[:5]]), 5)
    for layer, given in zip(found, captured.layers, strict=True):
        assert layer.keys is given.keys
        assert layer.queries is given.queries


@pytest.mark.parametrize(
    "family",
    [*("qwen3_next", "falcon_h1", "gemma2", "granitemoeshared"), "gpt_oss", "llama4_text", "deepseek_v3"],
)
@pytest.mark.parametrize("from_host", [False, True])
def test_drafts_of_models_with_states_windows_and_latent_rows(
    family: str, from_host: bool, tmp_path: Path
) -> None:
    model = load_model(FAMILIES[family].save(tmp_path), device="cpu")
    # the draft is in two chunks of a layer with chunks
    generator, prompt = OneProcessGenerator(model), prompt_of(3 * WINDOW - 2, seed=3)
    answer = full_answer(model, prompt, 6)
    captured = generator.capture(prompt)
    before = {
        layer: {name: tensor.clone() for name, tensor in of.items()} for layer, of in captured.states.items()
    }
    expected = generator.capture([*prompt, *answer[:4]])
    if from_host:
        model.device = torch.device("cpu", 0)  # another device than that of the rows, as torch compares them
    assert_ahead_is(draft(model, captured, 4), expected, 4)
    for layer, of in before.items():
        assert all(torch.equal(tensor, captured.states[layer][name]) for name, tensor in of.items())


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text"])
@pytest.mark.covering(1)
def test_kernels_attend_for_a_draft(family: str, tmp_path: Path) -> None:
    model = load_model(FAMILIES[family].save(tmp_path), device="cpu")
    captured = OneProcessGenerator(model).capture(prompt_of(3 * WINDOW - 2, seed=3))
    expected = draft(model, captured, 4)
    with kernels_in("triton"):
        found = draft(model, captured, 4)
    for layer, of_torch in zip(found, expected, strict=True):
        assert layer.ahead is not None
        assert of_torch.ahead is not None
        for name, rows in vars(layer.ahead).items():
            torch.testing.assert_close(rows, getattr(of_torch.ahead, name), atol=1e-3, rtol=1e-3)


class LargeTensors(TorchDispatchMode):
    """Counts the operations that make a tensor of at least so many elements.

    Attributes: made: their names.
    """

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self._num_elements = num_elements
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if (
            isinstance(result, torch.Tensor)
            and result.numel() >= self._num_elements
            and result.untyped_storage().data_ptr() not in given  # no view
        ):
            self.made.append(str(func))
        return result


@pytest.mark.parametrize("kernels", ["auto", "torch", "triton"])
@torch.inference_mode()
def test_a_tokens_row_is_written_behind_the_others_and_nothing_is_copied_again(
    model: TransformersModel, kernels: dispatch.KernelMode
) -> None:
    captured = OneProcessGenerator(model).capture(prompt_of(1500, seed=4))
    assert captured.logits is not None
    seen, made = LargeTensors(captured.layers[0].keys.numel()), list[int]()
    with kernels_in(kernels), seen:
        drafted = run_draft(
            model,
            captured.layers,
            logits=captured.logits,
            draw=greedily(model.spec, 5),
            before_token=lambda: made.append(len(seen.made)),
        )
    assert len(drafted.tokens) == 5
    assert made[0] == 0
    assert made[1:] == [made[1]] * 4, seen.made
    assert len(seen.made) == made[1] >= 1, seen.made  # the memory that the first token makes


def test_a_draft_has_the_tokens_of_an_answer_from_the_full_kv(model: TransformersModel) -> None:
    example = TASKS["single_needle"].example(num_tokens=300, seed=1)
    prompt = list(example.prompt_token_ids)
    captured = OneProcessGenerator(model).capture(prompt)
    assert captured.logits is not None
    for num_tokens in (1, len(example.answer_token_ids) - 1):
        drafted = run_draft(
            model, captured.layers, logits=captured.logits, draw=greedily(model.spec, num_tokens)
        )
        answer = full_answer(model, prompt, num_tokens + 1)
        assert [token.token_id for token in drafted.tokens] == answer[:num_tokens]
        assert int(drafted.tokens[-1].logits.argmax()) == answer[num_tokens]


def test_a_draft_has_so_many_tokens_at_most(model: TransformersModel) -> None:
    captured = OneProcessGenerator(model).capture(prompt_of(40, seed=1))
    assert captured.logits is not None
    drafted = run_draft(model, captured.layers, logits=captured.logits, draw=lambda logits: 10)
    assert len(drafted.tokens) == MOST_DRAFT_TOKENS


def test_a_draft_ends_before_the_end_of_the_sequence(model: TransformersModel) -> None:
    example = TASKS["single_needle"].example(num_tokens=300, seed=1)
    prompt, answer = list(example.prompt_token_ids), list(example.answer_token_ids)
    (end,) = model.spec.eos_token_ids
    assert answer[-1] == end
    generator = OneProcessGenerator(model)
    found = draft(model, generator.capture(prompt), len(answer) + 9)
    assert_ahead_is(found, generator.capture([*prompt, *answer[:-1]]), len(answer) - 1)
    ended = draft(model, generator.capture([*prompt, *answer[:-1]]), 4)
    assert all(layer.ahead is None for layer in ended)


def test_a_draft_ends_at_the_end_of_the_models_window() -> None:
    model = load_model(DEMO_MODEL, name="demo", device="cpu", max_model_len=64)
    found = draft(model, OneProcessGenerator(model).capture(prompt_of(61, seed=2)), 8)
    assert {layer.ahead.keys.shape[1] for layer in found if layer.ahead is not None} == {3}


def test_a_caller_may_end_it_before_any_token(model: TransformersModel) -> None:
    captured, calls = OneProcessGenerator(model).capture(prompt_of(40, seed=1)), []
    assert captured.logits is not None

    def third() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Cancelled("the client left")

    draw = greedily(model.spec, 8)
    with pytest.raises(Cancelled, match="the client left"):
        run_draft(model, captured.layers, logits=captured.logits, draw=draw, before_token=third)
    assert len(calls) == 3


def make_inputs(num_tokens: int, num_ahead: int, group: int) -> LayerInputs:
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return LayerInputs(
        layer=0,
        queries=3 * draw(2, group, num_tokens, 8),
        keys=draw(2, num_tokens, 8),
        values=draw(2, num_tokens, 8),
        scaling=0.3,
        ahead=Ahead(
            queries=3 * draw(2, group, num_ahead, 8), keys=draw(2, num_ahead, 8), values=draw(2, num_ahead, 8)
        ),
    )


def reference_weights(inputs: LayerInputs, window: int, kernel_size: int) -> torch.Tensor:
    """Each query's softmax over the prompt and the draft's tokens up to its own, of which the prompt's part
    is summed and pooled."""
    assert inputs.ahead is not None
    keys = torch.cat([inputs.keys, inputs.ahead.keys], 1)
    num_tokens, num_ahead = inputs.keys.shape[1], inputs.ahead.keys.shape[1]
    window = min(window, num_tokens)
    sums = torch.zeros(2, num_tokens)
    for head in range(2):
        for group in range(inputs.queries.shape[1]):
            for at in range(num_tokens - window, num_tokens + num_ahead):
                query = (
                    inputs.queries[head, group, at]
                    if at < num_tokens
                    else inputs.ahead.queries[head, group, at - num_tokens]
                )
                shares = torch.softmax(keys[head, : at + 1] @ query * inputs.scaling, 0)
                sums[head, : min(at + 1, num_tokens)] += shares[:num_tokens]
    half = kernel_size // 2
    if num_tokens <= half:
        return sums
    at = torch.arange(-half, num_tokens + half).abs()
    at = torch.where(at < num_tokens, at, 2 * (num_tokens - 1) - at)
    return sums[:, at].unfold(1, kernel_size, 1).mean(2)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("num_tokens", "num_ahead", "window"),
    [(1, 1, 8), (2, 5, 1), (5, 1, 8), (97, 8, 8), (33, 3, 1), (40, 7, 64)],
)
def test_weights_are_those_of_the_equation_over_window_and_draft(
    num_tokens: int, num_ahead: int, window: int, group: int
) -> None:
    inputs = make_inputs(num_tokens, num_ahead, group)
    assert inputs.ahead is not None
    found = token_weights(
        torch.cat([inputs.queries[:, :, -window:], inputs.ahead.queries], 2),
        torch.cat([inputs.keys, inputs.ahead.keys], 1),
        scaling=inputs.scaling,
        kernel_size=9,
        num_ahead=num_ahead,
    )
    torch.testing.assert_close(found, reference_weights(inputs, window, 9), atol=1e-5, rtol=1e-5)


def resolved_for(plan: CompressionPlan, inputs: LayerInputs):
    return resolve_plan(
        plan, num_prompt_tokens=inputs.keys.shape[1], max_new_tokens=9, num_layers=1, head_dim=8
    )


def test_tokens_of_the_draft_get_no_bits_and_tokens_that_they_attend_to_get_more() -> None:
    inputs = make_inputs(211, 6, 2)
    assert inputs.ahead is not None
    wanted = 37
    inputs.keys[:, wanted] *= 2  # so that no other key has a greater product with it
    queries = (10 * inputs.keys[:, wanted])[:, None, None].expand(2, 2, 6, 8)
    pointed = replace(inputs, ahead=replace(inputs.ahead, queries=queries))
    plan = plan_for("rdkv-draft", budget=Budget(tokens=5))
    settings = rdkv_of(plan, inputs).settings
    before, after = (allocate_layer(settings, layer_inputs) for layer_inputs in (inputs, pointed))
    assert after.values.shape == before.values.shape == (2, 211)
    near = slice(wanted - 2, wanted + 3)
    assert (after.values[:, near].sum(1) > before.values[:, near].sum(1)).all()
    assert not torch.equal(after.values, before.values)


def test_bits_that_the_draft_leaves_go_to_tokens_that_the_question_attends_to() -> None:
    """A prompt was smaller than its budget, because tokens without a weight got no bits."""
    inputs = make_inputs(211, 6, 2)
    assert inputs.ahead is not None
    inputs.keys[:, 37] *= 9
    queries = (90 * inputs.keys[:, 37])[:, None, None].expand(2, 2, 6, 8)
    inputs.queries[:, :, -1] = queries[:, :, 0]
    pointed = replace(inputs, ahead=replace(inputs.ahead, queries=queries))
    bits = allocate_layer(rdkv_of(plan_for("rdkv-draft", budget=Budget(tokens=20)), inputs).settings, pointed)
    # 8 values of a token, and a header of 32 bits below 16
    spent = 8 * bits.values.long() + 32 * ((bits.values > 0) & (bits.values < 16))
    assert (spent.sum(1) > 16 * 20 * 8 - (4 * 8 + 32)).all()
    # no token has more than the kernel's five, and the others are those of the question's attention
    others = torch.cat([bits.values[:, :35], bits.values[:, 40:]], 1)
    assert (bits.values[:, 35:40].amin(1) >= others.amax(1)).all()
    weights = token_weights(inputs.queries[:, :, -32:], inputs.keys, scaling=inputs.scaling, kernel_size=9)
    weights[:, 35:40] = 0
    for head in range(2):
        num_others = int((bits.values[head] > 0).sum()) - 5
        assert num_others > 10
        chosen = set(bits.values[head].nonzero()[:, 0].tolist()) - set(range(35, 40))
        assert chosen == set(weights[head].topk(num_others).indices.tolist())


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("num_tokens", "num_ahead"), [(5, 1), (33, 3), (97, 8)])
def test_the_draft_weighs_most_and_the_question_three_hundredths(
    num_tokens: int, num_ahead: int, group: int
) -> None:
    inputs = make_inputs(num_tokens, num_ahead, group)
    settings = rdkv_of(plan_for("rdkv-draft", budget=Budget(tokens=2)), inputs).settings
    window = min(32, num_tokens)
    empty = inputs.keys[:, :0]
    none = replace(inputs, ahead=Ahead(queries=inputs.queries[:, :, :0], keys=empty, values=empty))
    drafted = reference_weights(inputs, 1, 5) / (1 + num_ahead)
    weights = drafted + 0.03 * reference_weights(none, window, 9) / window
    assert inputs.ahead is not None
    queries = torch.cat([inputs.queries[:, :, -1:], inputs.ahead.queries], 2)
    expected = allocate(
        weights,
        channel_weights(queries, inputs.keys),
        budget_tokens=2,
        table=settings.table,
        widths=(0, 4, 8, 16),
    )
    found = allocate_layer(settings, inputs)
    assert torch.equal(found.keys, expected.keys)
    # of two tokens with nearly equal weights either may be the last one
    assert (found.values != expected.values).sum() <= 4


def rdkv_of(plan: CompressionPlan, inputs: LayerInputs) -> Rdkv:
    (fmt,) = formats_for(resolved_for(plan, inputs), inputs)
    assert isinstance(fmt, Rdkv)
    return fmt


def test_an_empty_draft_leaves_the_window() -> None:
    inputs = make_inputs(120, 4, 2)
    plan = plan_for("rdkv-draft", budget=Budget(tokens=12))
    same = plan_for("rdkv", budget=Budget(tokens=12), overrides={"widths": "0,4,8,16"})
    none = replace(inputs, ahead=None)
    first = allocate_layer(rdkv_of(plan, inputs).settings, none)
    second = allocate_layer(rdkv_of(same, inputs).settings, none)
    assert torch.equal(first.values, second.values)
    assert torch.equal(first.keys, second.keys)


def test_plans_draft_where_layers_are_packed() -> None:
    inputs = make_inputs(120, 4, 2)
    drafting = plan_for("rdkv-draft", budget=Budget(tokens=12))
    assert num_draft_tokens(resolved_for(drafting, inputs)) == 8
    for plan in (plan_for("rdkv", budget=Budget(tokens=12)), plan_for("snapkv"), plan_for("full")):
        assert num_draft_tokens(resolved_for(plan, inputs)) == 0
    whole = plan_for("rdkv-draft", budget=Budget(tokens=120))
    assert num_draft_tokens(resolved_for(whole, inputs)) == 0


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_listing_is_answered_at_a_hundredth_of_its_bytes(model: TransformersModel, seed: int) -> None:
    """A finding: the question names one of two assignments, and the answer leads to the other."""
    example = TASKS["code_listing"].example(num_tokens=1024, seed=seed)
    prompt, answer = list(example.prompt_token_ids), list(example.answer_token_ids)
    generator = OneProcessGenerator(model)
    plan = plan_for("rdkv-draft", budget=Budget(tokens=8))
    captured = generator.capture(prompt)
    continuation = generator.compress(captured, plan=plan, max_new_tokens=len(answer))
    counted = replace(model.spec, dtype="float16", checkpoint_dtype=None)
    formats = make_formats(counted, continuation.resolved)
    kept = sum(
        fmt.kept_bytes(fmt.prompt_bytes(tensors))
        for fmt, tensors in zip(formats, continuation.compressed, strict=True)
    )
    assert kept <= math.ceil(0.01 * counted.full_bytes(len(prompt)))
    tokens = generator.generate(prompt, plan=plan, sampling=greedy(len(answer)))
    assert [token.token_id for token in tokens] == answer
