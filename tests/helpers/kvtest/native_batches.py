"""Sequences of one batch for C code, in memory that is NaN wherever there is nothing: it must attend to them
as torch does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvferry.kernels import dispatch
from kvferry.kernels.decode_batch import BatchShape, NewTokens
from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer
from kvferry.kernels.quarantine import quarantined, state

HEADS = 2
WIDTHS = torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8)


def batch_shape(num_slots: int, *, group_size: int, head_dim: int) -> BatchShape:
    """Of one layer, float32 on the CPU."""
    return BatchShape(
        num_layers=1,
        num_slots=num_slots,
        num_kv_heads=HEADS,
        group_size=group_size,
        head_dim=head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


class Sequences:
    """What all kinds of caches share; a kind sets `op`, the `rows` of each slot and the `batch` over them."""

    op: str
    rows: list[Any]
    batch: Any

    def __init__(self, num_slots: int, *, group_size: int, head_dim: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.shape = batch_shape(num_slots, group_size=group_size, head_dim=head_dim)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def packed_layer(self, num_tokens: int) -> PackedLayer:
        """Random K and V, each channel and token of which has a width of its own."""
        head_dim = self.shape.head_dim
        keys, values = self.random(2, HEADS, num_tokens, head_dim)
        bits = [
            WIDTHS[torch.randint(len(WIDTHS), (HEADS, count), generator=self._generator)]
            for count in (head_dim, num_tokens)
        ]
        layer = indexed_layer(keys, values, *bits)
        fill_in_torch(layer, keys, values)
        return layer

    def place(self, slots: list[int] | None = None) -> None:
        for slot in range(self.shape.num_slots) if slots is None else slots:
            self.batch.place(slot, {0: self.rows[slot]})

    def step(self) -> NewTokens:
        slots, head_dim = self.shape.num_slots, self.shape.head_dim
        queries = 2 * self.random(slots, HEADS, self.shape.group_size, head_dim)
        keys, values = self.random(2, slots, HEADS, head_dim)
        return NewTokens(queries, keys, values, head_dim**-0.5)

    def attend(self, step: NewTokens) -> Tensor:
        output = self.batch.attend(0, step, errors={}, scratch=self.batch.scratch(len(step.queries)))
        assert self.batch.is_launched
        return output.clone()


def assert_steps_are_torch_s(
    mine: Sequences, plain: Sequences, active: Tensor, *, num_steps: int, rtol: float, atol: float
) -> None:
    """Step two batches of the same, one by one in C code and in torch. Args: active: slot 2 is not."""
    mine.place()
    plain.place()
    mine.batch.show(active)
    before = dispatch.calls().get((mine.op, "native"), 0)
    for _ in range(num_steps):
        step = mine.step()
        output, expected = mine.attend(step), plain.batch.attend_slots(0, step, errors={})
        torch.testing.assert_close(output[active > 0], expected[active > 0], rtol=rtol, atol=atol)
        assert not output[2].any(), "it is not active"
        mine.batch.advance(active)
        plain.batch.advance(active)
    assert dispatch.calls()[mine.op, "native"] == before + num_steps


def assert_refused_and_torch_goes_on(spoilt: Sequences, plain: Sequences) -> None:
    """Step two batches of the same, one of which has a table that points outside of its arena."""
    plain.place()
    step = spoilt.step()
    try:
        output = spoilt.batch.attend(0, step, errors={}, scratch=spoilt.batch.scratch(len(step.queries)))
        assert "outside of the arena" in quarantined()[spoilt.op].detail
        assert not spoilt.batch.is_launched
    finally:
        state.by_op = {}
    torch.testing.assert_close(output, plain.batch.attend_slots(0, step, errors={}), rtol=0, atol=0)
