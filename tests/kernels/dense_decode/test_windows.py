"""Windows, soft-capping and sinks in the kernel of dense decode, in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference.dense import softmax_decode
from kvtest.triton_guard import guarded
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import BatchShape, NewTokens, WindowRows
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.dense_decode.batch import WindowBatch
from kvferry.kernels.softmax import Softmax

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
pytestmark = pytest.mark.usefixtures("interpreter")


def softmax_of(kind: str, num_kv_heads: int, group_size: int, dtype: torch.dtype) -> Softmax:
    """Sinks that outweigh every row, some that count like one, and some that are nothing."""
    sinks = torch.linspace(-30, 30, num_kv_heads * group_size).view(num_kv_heads, group_size).to(dtype)
    return Softmax(
        scaling=0.7, softcap=1.5 if "cap" in kind else 0.0, sinks=sinks if "sinks" in kind else None
    )


@pytest.mark.parametrize("kind", ["cap", "sinks", "cap and sinks"])
@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "group_size", "length", "head_dim"),
    [
        (torch.float32, 2, 3, 600, 16),
        (torch.float16, 1, 16, 1, 64),
        (torch.bfloat16, 1, 4, 300, 96),
    ],
)
def test_one_sequence_equals_the_reference(
    kind: str, dtype: torch.dtype, num_kv_heads: int, group_size: int, length: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(length)
    queries = torch.randn(num_kv_heads, group_size, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, num_kv_heads, length, head_dim, generator=generator).to(dtype)
    softmax = softmax_of(kind, num_kv_heads, group_size, dtype)
    before = dispatch.calls().get(("dense_decode", "interpreter"), 0)
    result = dense_decode(queries, keys, values, scaling=softmax)
    assert dispatch.calls()["dense_decode", "interpreter"] == before + 1
    expected = softmax_decode(queries, keys, values, softmax=softmax)
    assert (result.float() - expected).norm() < TOLERANCE[dtype] * expected.norm() + 1e-9


def test_capped_logits_may_be_as_large_as_they_like() -> None:
    queries, keys = torch.full((1, 2, 16), 1e4), torch.full((1, 40, 16), 1e4)
    keys[:, ::2] *= -1
    values = torch.randn(1, 40, 16)
    softmax = Softmax(scaling=0.25, softcap=30.0)
    result = dense_decode(queries, keys, values, scaling=softmax)
    torch.testing.assert_close(result, softmax_decode(queries, keys, values, softmax=softmax))


WINDOWS = (
    # window, tokens before the first row (of chunks), rows before the first step
    (290, None, 700),
    (1, None, 40),
    (24, 10, 37),
    (300, 24, 275),
)
STEPS = 2
"""The second begins a chunk of the last two."""


def shape_of(dtype: torch.dtype) -> BatchShape:
    return BatchShape(
        num_layers=1, num_slots=len(WINDOWS) + 1, num_kv_heads=1, group_size=3, head_dim=16, dtype=dtype,
        device=CPU,
    )  # fmt: skip


def visible(window: int, before: int | None, length: int) -> range:
    """Which of `length` rows the last attends to, by the definition."""
    position = (before or 0) + length - 1
    first = position - window + 1 if before is None else position // window * window
    return range(max(first - (before or 0), 0), length)


def window_batch(shape: BatchShape, seed: int) -> tuple[WindowBatch, list[Tensor]]:
    """One slot is empty. Rows that are never attended to are NaN."""
    capacity = max(length for *_, length in WINDOWS) + STEPS
    arena = torch.full((len(WINDOWS), 2, 1, capacity, 16), torch.nan).to(shape.dtype)
    generator = torch.Generator().manual_seed(seed)
    batch = WindowBatch(shape, arena.view(-1))
    for slot, (window, before, length) in enumerate(WINDOWS):
        keys, values = arena[slot]
        first = visible(window, before, length + 1).start
        arena[slot, :, :, first:length] = torch.randn(2, 1, length - first, 16, generator=generator).to(
            shape.dtype
        )
        rows = WindowRows(keys=keys, values=values, length=length, window=window, rows_before=before)
        batch.place(slot, {0: rows})
    return batch, list(arena)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("plain", torch.float16), ("cap", torch.float32), ("sinks", torch.bfloat16)]
)
def test_a_batch_of_windows_equals_the_reference_step_by_step(kind: str, dtype: torch.dtype) -> None:
    shape = shape_of(dtype)
    batch, caches = window_batch(shape, seed=1)
    scaling = 0.25 if kind == "plain" else softmax_of(kind, 1, 3, dtype)
    scratch = batch.scratch(shape.num_slots)
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        queries = torch.randn(shape.num_slots, 1, 3, 16, generator=generator).to(dtype)
        keys, values = torch.randn(2, shape.num_slots, 1, 16, generator=generator).to(dtype)
        output = batch.attend_launched(0, NewTokens(queries, keys, values, scaling), scratch)
        for slot, (window, before, length) in enumerate(WINDOWS):
            seen = visible(window, before, length + step + 1)
            of_slot = [cache[:, seen.start : seen.stop] for cache in caches[slot]]
            softmax = scaling if isinstance(scaling, Softmax) else Softmax(scaling=scaling)
            expected = softmax_decode(queries[slot], *of_slot, softmax=softmax)
            error = (output[slot].float() - expected).norm()
            assert error < TOLERANCE[dtype] * expected.norm() + 1e-9, (slot, step)
        assert not output[len(WINDOWS)].any(), "an empty slot"
        batch.advance(torch.ones(shape.num_slots, dtype=torch.int64))


def test_the_torch_path_attends_to_the_same_windows() -> None:
    shape = shape_of(torch.float32)
    (batch, _), (other, _) = window_batch(shape, seed=1), window_batch(shape, seed=1)
    scratch, softmax = batch.scratch(shape.num_slots), softmax_of("sinks", 1, 3, torch.float32)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        queries = torch.randn(shape.num_slots, 1, 3, 16, generator=generator)
        new = NewTokens(queries, *torch.randn(2, shape.num_slots, 1, 16, generator=generator), softmax)
        torch.testing.assert_close(
            batch.attend_launched(0, new, scratch), other.attend_slots(0, new, {}), rtol=1e-4, atol=1e-5
        )
        for each in (batch, other):
            each.advance(torch.ones(shape.num_slots, dtype=torch.int64))


@pytest.mark.parametrize("length", [30, 600])
def test_a_window_of_w_rows_is_all_that_is_read(length: int) -> None:
    """K and V of min(W, n) rows: as many elements whatever the length."""
    window, head_dim = 24, 16
    shape = BatchShape(
        num_layers=1, num_slots=1, num_kv_heads=1, group_size=1, head_dim=head_dim, dtype=torch.float32,
        device=CPU,
    )  # fmt: skip
    cache = torch.randn(2, 1, length + 1, head_dim)
    batch = WindowBatch(shape, cache.view(-1))
    rows = WindowRows(keys=cache[0], values=cache[1], length=length, window=window, rows_before=None)
    batch.place(0, {0: rows})
    new = NewTokens(torch.randn(1, 1, 1, head_dim), *torch.randn(2, 1, 1, head_dim), 0.3)
    with guarded(seed=4) as guard:
        guard.watch(cache)
        batch.attend_launched(0, new, batch.scratch(1))
    assert guard.loaded.total() == 2 * window * head_dim * cache.element_size()
