"""The step of drafts: captured once, as a GPU captures, and right for every later prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvtest.families import FAMILIES, WINDOW
from kvtest.lanes import some
from kvtest.steps import interpreter as interpreter  # a fixture
from kvtest.transformers_model import prompt_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvferry.kernels import dispatch, quarantine
from kvferry.models import DEMO_MODEL
from kvferry.shared.compression import draft_rows, draft_steps
from kvferry.shared.compression.draft import Drafted, greedy, run_draft
from kvferry.shared.compression.draft_steps import DraftSteps
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.device.step_device import StepDevice
from kvferry.shared.errors import Cancelled
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.tools.oracle import CapturedPrompt, OneProcessGenerator

Call = Callable[[], Any]


class Tape(TorchDispatchMode):
    """Records torch's operations, and launches that are given to it.

    Attributes: calls: each does one again, into the tensors that it made when it was recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))

        def again() -> None:
            for made, new in zip(
                tree_leaves(result), tree_leaves(func(*args, **(kwargs or {}))), strict=True
            ):
                if isinstance(made, torch.Tensor) and made.data_ptr() != new.data_ptr():
                    made.copy_(new)

        if "empty" not in str(func):
            self.calls.append(again)
        return result


class TapeDevice(StepDevice):
    """Captures as a GPU does: what is replayed are operations and launches over the same tensors, no Python.

    Attributes: num_captures: so far; tape: that is recorded now; fails: whether captures fail.
    """

    captures = True

    def __init__(self) -> None:
        self.num_captures = 0
        self.tape: Tape | None = None
        self.fails = False

    def capture(self, run: Call) -> Call:
        self.num_captures += 1
        run()
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.tape = tape = Tape()
        try:
            with tape:
                run()
        finally:
            self.tape = None

        def replay() -> None:
            for call in tape.calls:
                call()

        return replay


@pytest.fixture
def device(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[TapeDevice]:
    from triton.runtime.interpreter import GridExecutor

    device, launch = TapeDevice(), GridExecutor.__call__

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if device.tape is not None:
            device.tape.calls.append(lambda: launch(*args, **kwargs))
        return launch(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    yield device
    quarantine.state.by_op = {}


@pytest.fixture(autouse=True)
def full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for rows is as a former prompt may have left it."""
    memory = draft_rows._memory

    def filled(*args: Any) -> Any:
        base, parts = memory(*args)
        return base.fill_(torch.nan), parts

    monkeypatch.setattr(draft_rows, "_memory", filled)


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    return load_model(DEMO_MODEL, name="demo", device="cpu")


def captured_of(model: TransformersModel, num_tokens: int) -> CapturedPrompt:
    return OneProcessGenerator(model).capture(prompt_of(num_tokens, seed=num_tokens))


def draft(
    model: TransformersModel,
    captured: CapturedPrompt,
    num_tokens: int,
    steps: DraftSteps | None = None,
    before_token: Callable[[], None] = lambda: None,
) -> Drafted:
    assert captured.logits is not None
    left = iter(range(num_tokens))
    return run_draft(
        model,
        captured.layers,
        logits=captured.logits,
        draw=lambda logits: None if next(left, None) is None else int(logits.argmax()),
        states=captured.states,
        before_token=before_token,
        steps=steps,
    )


def assert_same(found: Drafted, expected: Drafted, *, atol: float = 0.0) -> None:
    assert [token.token_id for token in found.tokens] == [token.token_id for token in expected.tokens]
    for token, other in zip(found.tokens, expected.tokens, strict=True):
        torch.testing.assert_close(token.logits, other.logits, atol=atol, rtol=0)
    for layer, alike in zip(found.layers, expected.layers, strict=True):
        assert (layer.ahead is None) == (alike.ahead is None)
        if layer.ahead is not None:
            for name, tensor in vars(layer.ahead).items():
                assert tensor.is_contiguous()
                torch.testing.assert_close(tensor, getattr(alike.ahead, name), atol=atol, rtol=0)


def tensors_of(step: Any) -> dict[str, int]:
    """Where the tensors of a step are."""
    tensors = {name: value for name, value in vars(step).items() if isinstance(value, torch.Tensor)}
    for number, (batch, _) in enumerate(step._batches):
        owners = {"": batch, "tables": batch._tables}
        for owner, of in owners.items():
            named = {name: value for name, value in vars(of).items() if isinstance(value, torch.Tensor)}
            tensors |= {f"{number} {owner} {name}": value for name, value in named.items()}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_one_captured_step_serves_prompts_of_any_lengths(
    model: TransformersModel, device: TapeDevice
) -> None:
    steps, places = DraftSteps(model, device), list[dict[str, int]]()

    def look() -> None:
        places.append(tensors_of(steps._step) if steps._step else {})

    for num_tokens, num_draft in ((43, 3), (7, 4), (120, 2), (1, 1), (43, 3)):
        captured = captured_of(model, num_tokens)
        expected = draft(model, captured, num_draft)
        found = draft(model, captured, num_draft, steps, look)
        assert len(found.tokens) == num_draft
        assert_same(found, expected)
        assert steps.is_captured
    assert device.num_captures == 1
    assert all(place == places[-1] for place in places[1:])  # there is none before the first token
    assert len(places[-1]) > 10


def test_a_replay_reads_nothing_of_a_former_prompt(model: TransformersModel, device: TapeDevice) -> None:
    """Of a prompt whose tensors are gone, whatever is in their memory."""
    steps, captured = DraftSteps(model, device), captured_of(model, 9)
    draft(model, captured_of(model, 50), 2, steps)
    assert steps._step is not None
    assert steps._step._placed is None
    assert all(batch._tables._table.sum() == 0 for batch, _ in steps._step._batches)
    assert_same(draft(model, captured, 3, steps), draft(model, captured, 3))


@pytest.mark.parametrize("family", some(["gemma2", "gpt_oss", "llama4_text"], "gpt_oss"))
def test_layers_with_windows_are_captured(family: str, tmp_path: Path, device: TapeDevice) -> None:
    model = load_model(FAMILIES[family].save(tmp_path), device="cpu")
    steps = DraftSteps(model, device)
    for num_tokens in (3 * WINDOW - 2, WINDOW - 1):
        captured = captured_of(model, num_tokens)
        assert_same(draft(model, captured, 4, steps), draft(model, captured, 4))
    assert device.num_captures == 1
    assert steps.is_captured


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "deepseek_v3"])
@pytest.mark.covering(1)
def test_models_with_states_and_latent_rows_are_not(family: str, tmp_path: Path, device: TapeDevice) -> None:
    dispatch.configure("auto", torch.device("cpu"))  # latent rows have no kernel
    model = load_model(FAMILIES[family].save(tmp_path), device="cpu")
    steps = DraftSteps(model, device)
    for num_tokens in (20, 11):
        captured = captured_of(model, num_tokens)
        found, expected = draft(model, captured, 3, steps), draft(model, captured, 3)
        assert_same(found, expected)
        for token, other in zip(found.tokens, expected.tokens, strict=True):
            for layer, state in other.states.items():
                assert all(torch.equal(token.states[layer][name], state[name]) for name in state)
    assert device.num_captures == 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_device_that_does_not_capture_runs_the_same_steps(
    model: TransformersModel, kernels: dispatch.KernelMode
) -> None:
    dispatch.configure(kernels, torch.device("cpu"))
    steps = DraftSteps(model)
    for num_tokens, num_draft in ((60, 3), (5, 2), (300, 4)):
        captured = captured_of(model, num_tokens)
        assert_same(draft(model, captured, num_draft, steps), draft(model, captured, num_draft))
    assert not steps.is_captured
    dispatch.configure("auto", torch.device("cpu"))
    assert quarantine.quarantined() == {}


def test_a_prompt_with_layers_on_the_host_runs_eagerly_and_the_next_is_replayed(
    model: TransformersModel, device: TapeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, captured = DraftSteps(model, device), captured_of(model, 30)
    expected = draft(model, captured, 3)
    assert_same(draft(model, captured, 3, steps), expected)
    monkeypatch.setattr(model, "device", torch.device("cpu", 0))  # another than the rows', as torch compares
    with dispatch.recording() as calls:
        assert_same(draft(model, captured, 3, steps), expected)
    assert calls["dense_decode", "interpreter"] == 3 * model.spec.num_layers


@pytest.mark.parametrize("on_host", [False, True])
def test_a_draft_between_two_tokens_of_another_changes_neither(
    model: TransformersModel, device: TapeDevice, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    """Args: on_host: whether the layers of the other wait there, so that the step is captured between."""
    outer, inner = captured_of(model, 40), captured_of(model, 25)
    expected = draft(model, outer, 4), draft(model, inner, 2)
    steps, found, count = DraftSteps(model, device), list[Drafted](), list[int]()
    here = model.device
    if on_host:
        monkeypatch.setattr(
            model, "device", torch.device("cpu", 0)
        )  # another than the rows', as torch compares

    def between() -> None:
        count.append(1)
        if len(count) in (2, 4):
            monkeypatch.setattr(model, "device", here)
            found.append(draft(model, inner, 2, steps))

    assert_same(draft(model, outer, 4, steps, between), expected[0])
    assert device.num_captures == 1
    assert len(found) == 2
    for each in found:
        assert_same(each, expected[1])


@pytest.mark.parametrize("captures", [True, False])
def test_the_next_draft_is_right_after_one_that_was_ended(
    model: TransformersModel, device: TapeDevice, captures: bool
) -> None:
    steps, captured = DraftSteps(model, device if captures else None), captured_of(model, 21)
    left = iter(range(2))

    def third() -> None:
        if next(left, None) is None:
            raise Cancelled("the client left")

    with pytest.raises(Cancelled, match="the client left"):
        draft(model, captured_of(model, 64), 5, steps, third)
    assert_same(draft(model, captured, 3, steps), draft(model, captured, 3))


def test_the_next_draft_is_right_after_an_error_within_a_step(
    model: TransformersModel, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, captured = DraftSteps(model), captured_of(model, 21)
    attend, numbers = draft_steps._Step.__call__, iter(range(10**6))

    def fails(self: Any, *args: Any) -> torch.Tensor:
        if next(numbers) == model.spec.num_layers + 1:
            raise RuntimeError("no memory")
        return attend(self, *args)

    monkeypatch.setattr(draft_steps._Step, "__call__", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        draft(model, captured_of(model, 64), 5, steps)
    assert steps._step is not None
    assert steps._step._placed is None
    assert_same(draft(model, captured, 3, steps), draft(model, captured, 3))


def test_a_quarantine_ends_replays_in_mid_draft(model: TransformersModel, device: TapeDevice) -> None:
    steps, captured, count = DraftSteps(model, device), captured_of(model, 33), list[int]()
    expected = draft(model, captured, 5)

    def between() -> None:
        count.append(1)
        if len(count) == 4:
            assert steps.is_captured
            quarantine.quarantine("dense_decode", "wrong_result")

    assert_same(draft(model, captured, 5, steps, between), expected, atol=1e-4)
    assert not steps.is_captured
    with dispatch.recording() as calls:
        assert_same(draft(model, captured, 5, steps), expected, atol=1e-4)
    assert calls["dense_decode", "torch"] == 5 * model.spec.num_layers
    assert device.num_captures == 1


def test_a_step_is_captured_again_without_a_kernel_that_is_not_used_any_more(
    model: TransformersModel, device: TapeDevice
) -> None:
    steps, captured = DraftSteps(model, device), captured_of(model, 33)
    expected = draft(model, captured, 3)
    assert_same(draft(model, captured, 3, steps), expected)
    quarantine.quarantine("decoder_ops", "wrong_result")
    assert not steps.is_captured
    assert_same(draft(model, captured, 3, steps), expected, atol=1e-4)
    assert steps.is_captured
    assert device.num_captures == 2


def test_a_step_that_cannot_be_captured_runs_eagerly_and_is_tried_twice(
    model: TransformersModel, device: TapeDevice
) -> None:
    reasons: list[str] = []
    steps, captured = DraftSteps(model, device, warn=reasons.append), captured_of(model, 16)
    device.fails = True
    expected = draft(model, captured, 2)
    for _ in range(3):
        assert_same(draft(model, captured, 2, steps), expected)
    assert device.num_captures == 2
    assert reasons == ["RuntimeError: operation not permitted when stream is capturing"] * 2
    assert not steps.is_captured


def test_a_replay_counts_the_calls_of_its_kernels(model: TransformersModel, device: TapeDevice) -> None:
    steps, captured = DraftSteps(model, device), captured_of(model, 16)
    draft(model, captured, 1, steps)
    before = dispatch.calls()["dense_decode", "interpreter"]
    draft(model, captured, 3, steps)
    assert dispatch.calls()["dense_decode", "interpreter"] - before == 3 * model.spec.num_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "num_heads"), [(8, 2), (7, 3), (6, 1)])
def test_rows_are_copied_whatever_their_layout(dtype: torch.dtype, head_dim: int, num_heads: int) -> None:
    tokens_first = torch.randn(11, num_heads, head_dim).to(dtype)
    keys, values = tokens_first.transpose(0, 1), torch.randn(num_heads, 11, head_dim + 1).to(dtype)[..., 1:]
    inputs = LayerInputs(
        layer=0, queries=keys[:, None], keys=keys, values=values, scaling=1.0, unrotate=lambda rows: rows
    )
    spec = load_model(DEMO_MODEL, name="demo", device="cpu").spec
    rows = draft_rows.DraftRows(spec, [inputs], {}, torch.device("cpu"), room=2).rows(0)
    assert rows.keys.shape == (num_heads, 13, head_dim)
    assert torch.equal(rows.keys[:, : rows.length], keys)
    assert torch.equal(rows.values[:, : rows.length], values)


def test_greedy_drafts_end_early_and_the_next_is_right(model: TransformersModel, device: TapeDevice) -> None:
    steps, captured = DraftSteps(model, device), captured_of(model, 12)
    assert captured.logits is not None
    (end,) = model.spec.eos_token_ids
    certain = torch.zeros_like(captured.logits)
    certain[end] = 1.0
    draw = greedy(model.spec, 4)
    ended = run_draft(model, captured.layers, logits=certain, draw=draw, steps=steps)
    assert ended.tokens == ()
    assert all(layer.ahead is None for layer in ended.layers)
    assert_same(draft(model, captured, 2, steps), draft(model, captured, 2))
