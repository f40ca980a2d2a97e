"""Rows packed at one width for K and one for V: any scorer's rows, with float16 scales.

K is quantised per channel and 64 retained rows of a head (`kernels/packed/key_words.py`), V per token. KIVI
(Liu et al. 2024) has the same two directions, but a scale for every 32 rows of a channel.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.packed.layout import Bound, HeadCounts, PackedLayout, packed_layout
from kvferry.kernels.packed.packing import Packing, begin_packing
from kvferry.kernels.quantise import WIDTHS
from kvferry.shared.compression.attention import make_attention, size_attention
from kvferry.shared.compression.formats.interface import InvalidTensors, Specs, Tensors, select_rows
from kvferry.shared.compression.formats.packed import PackedFormat
from kvferry.shared.compression.interface import LayerInputs, LayerShape, Sizing, TensorSpec
from kvferry.shared.compression.plan import Allowed, CompressionPlan, LayerPlan


@dataclass(frozen=True, kw_only=True)
class Uniform(PackedFormat):
    """A packed prompt in which every retained row has the same widths, and each head as many rows.

    Attributes:
        k_bits, v_bits: widths of the codes of K and V: 2, 4 or 8.
    """

    name: ClassVar[str] = "packed"
    heads_apart: ClassVar[bool] = True
    allowed: ClassVar[Allowed] = {"k_bits": WIDTHS, "v_bits": WIDTHS}
    takes_measured: ClassVar[bool] = False
    scored: ClassVar[bool | None] = True
    compacts: ClassVar[bool] = True
    k_bits: int
    v_bits: int

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        """Plan as many rows as fit in the bytes of `sizing.rows` plain rows; see `rows_within`."""
        if sizing.rows == sizing.num_prompt_tokens and plan.attention.name == "dense":
            return LayerPlan(rows=sizing.rows)
        head_dim, num_tokens = sizing.head_dim, sizing.num_prompt_tokens
        widths = cls.params(plan.representation)
        rows = max(rows_within(sizing.rows, num_tokens, head_dim, **widths), 1)
        packed_bytes = _packed_bytes(rows, num_tokens, head_dim, **widths)
        per_row = Fraction(rows * _row_bytes(head_dim), packed_bytes)
        attention = size_attention(plan.attention, sizing, cap=rows, packed_per_row=per_row)
        return LayerPlan(rows=rows, attention=attention, representation=plan.representation)

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Uniform:
        attention = make_attention(layer.attention)
        return cls(shape=shape, rows=layer.rows, attention=attention, **cls.params(layer.representation))

    def begin(self, inputs: LayerInputs, scores: Tensor | None) -> Packing:
        num_kv_heads, num_tokens, head_dim = inputs.keys.shape
        value_bits = torch.zeros(num_kv_heads, num_tokens, dtype=torch.uint8, device=inputs.keys.device)
        if scores is None:
            value_bits.fill_(self.v_bits)
        else:
            value_bits.scatter_(1, select_rows(scores, self.rows).long(), self.v_bits)
        key_bits = torch.full_like(value_bits[:, :1], self.k_bits).expand(-1, head_dim)
        bound = Bound(tokens=self.rows, size_bytes=self.limit_bytes)
        return begin_packing(inputs.keys, inputs.values, key_bits, value_bits, bound=bound)

    @cached_property
    def _expected(self) -> PackedLayout:
        head = _head_counts(self.rows, self.shape.head_dim, k_bits=self.k_bits, v_bits=self.v_bits)
        heads = (head,) * self.shape.num_kv_heads
        return packed_layout(heads, self.shape.head_dim, num_tokens=self.shape.num_prompt_tokens)

    @cached_property
    def limit_bytes(self) -> int:
        return self._expected.size_bytes

    def tensors(self) -> Specs:
        specs = dict(super().tensors())
        for name, (_, size_bytes) in self._expected.kinds.items():
            specs[name] = TensorSpec(shape=(size_bytes,), dtype=torch.uint8)
        return specs

    def _layout(self, tensors: Tensors) -> PackedLayout:
        layout = super()._layout(tensors)
        if layout != self._expected:
            raise InvalidTensors(
                f"LAYOUT: heads are {list(layout.heads)}; {self._expected.heads[0]} of each is expected",
                reason="layout",
            )
        return layout


@lru_cache(maxsize=256)
def rows_within(budget_rows: int, num_tokens: int, head_dim: int, *, k_bits: int, v_bits: int) -> int:
    """Return the most rows, at most T, whose packed bytes fit in those of `budget_rows` 16-bit rows.

    Everything that is stored counts: codes, scales, minima, positions, channel numbers and padding.
    """

    def size_bytes(rows: int) -> int:  # it grows with the rows, from 0
        return _packed_bytes(rows, num_tokens, head_dim, k_bits=k_bits, v_bits=v_bits)

    return bisect_right(range(num_tokens + 1), budget_rows * _row_bytes(head_dim), key=size_bytes) - 1


def _row_bytes(head_dim: int) -> int:
    """Count the bytes of K and V of a token in one head, as budgets count them: 16 bits a value."""
    return 4 * head_dim


def _packed_bytes(rows: int, num_tokens: int, head_dim: int, *, k_bits: int, v_bits: int) -> int:
    head = _head_counts(rows, head_dim, k_bits=k_bits, v_bits=v_bits)
    return packed_layout((head,), head_dim, num_tokens=num_tokens).size_bytes


def _head_counts(rows: int, head_dim: int, *, k_bits: int, v_bits: int) -> HeadCounts:
    """Return the counts of a head with `rows` rows. Without rows there are no channels either."""
    channels, tokens = [0] * 4, [0] * 4
    channels[WIDTHS.index(k_bits)] = head_dim if rows else 0
    tokens[WIDTHS.index(v_bits)] = rows
    two, four, eight, sixteen = channels
    return HeadCounts(
        channels=(two, four, eight, sixteen), tokens=(tokens[0], tokens[1], tokens[2], tokens[3])
    )
