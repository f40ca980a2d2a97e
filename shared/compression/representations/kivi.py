"""Rows quantised in groups, attended as they lie (KIVI), or quantised for the wire alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.kernels.kivi import (
    GROUP_TOKENS,
    KiviRows,
    kivi_decode,
    kivi_dequantise,
    kivi_quantise,
    kivi_shapes,
)
from kvferry.kernels.quantise import WIDTHS
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.parameters import check_params
from kvferry.shared.compression.plan import ParamValue
from kvferry.shared.compression.representations.interface import (
    PromptShape,
    Specs,
    check_index,
    gather_rows,
    index_spec,
)
from kvferry.shared.compression.select import select_rows
from kvferry.shared.errors import InvalidRequest

_PLAIN_BITS = 16
_SCALE_BITS = 64
"""A float32 scale and a float32 minimum."""


@dataclass(frozen=True, kw_only=True)
class KiviPrompt:
    """Implements `StoredPrompt`. `index` is None where every token is kept."""

    rows: KiviRows
    index: Tensor | None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        index = {} if self.index is None else {"index": self.index}
        rows = self.rows
        return {**index, "codes": rows.codes, "scales": rows.scales, "keys": rows.keys, "values": rows.values}

    def check(self, num_tokens: int) -> None:
        """Refuse positions out of order and scales that dequantise to what is not finite."""
        if self.index is not None:
            check_index(self.index, num_tokens)
        head_dim = self.rows.keys.shape[2]
        key_scales, key_minima, value_scales, value_minima = torch.split(
            self.rows.scales, [head_dim, head_dim, GROUP_TOKENS, GROUP_TOKENS], dim=2
        )
        levels = (1 << self.rows.bits) - 1
        for scales, minima in ((key_scales, key_minima), (value_scales, value_minima)):
            finite = minima.isfinite() & (scales * levels + minima).isfinite()
            if not bool((finite & (scales > 0)).all()):
                raise ValueError("scales must be finite and positive, and minima finite")

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor, *, scaling: float) -> Tensor:
        return kivi_decode(queries, self.rows, new_keys, new_values, scaling=scaling)

    def dequantised(self) -> tuple[Tensor, Tensor]:
        """K and V `[H_kv, n, D]` in the model's dtype, as whoever receives the codes comes to them."""
        return kivi_dequantise(self.rows)


@dataclass(frozen=True, kw_only=True)
class Kivi:
    """Implements `Representation` by `kernels.kivi`."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise InvalidRequest(
                f"bits is {self.bits}; it must be one of {', '.join(map(str, WIDTHS))}",
                param="kv_compression.bits",
            )

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue]) -> Kivi:
        check_params("representation 'kivi'", params, {"bits": int})
        return cls(bits=int(params["bits"]))

    def rows_within(self, budget_rows: int, *, num_tokens: int, head_dim: int) -> int:
        row_bits = 2 * head_dim * _PLAIN_BITS
        codes, scales, _ = kivi_shapes(GROUP_TOKENS, num_kv_heads=1, head_dim=head_dim, bits=self.bits)
        group_bits = 8 * codes[2] + _SCALE_BITS * scales[2] // 2
        budget_bits = budget_rows * row_bits
        groups = min(budget_bits // group_bits, num_tokens // GROUP_TOKENS)
        left = (budget_bits - groups * group_bits) // row_bits
        return groups * GROUP_TOKENS + min(left, GROUP_TOKENS - 1, num_tokens - groups * GROUP_TOKENS)

    def specs(self, shape: PromptShape) -> Specs:
        codes, scales, left = kivi_shapes(
            shape.rows, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, bits=self.bits
        )
        rows = TensorSpec(shape=left, dtype=shape.dtype)
        return {
            **index_spec(shape),
            "codes": TensorSpec(shape=codes, dtype=torch.uint8),
            "scales": TensorSpec(shape=scales, dtype=torch.float32),
            "keys": rows,
            "values": rows,
        }

    def store(self, inputs: LayerInputs, *, rows: int, scores: Tensor | None) -> KiviPrompt:
        if scores is None:
            return self.quantise(inputs.keys, inputs.values, None)
        index = select_rows(scores, rows)
        return self.quantise(gather_rows(inputs.keys, index), gather_rows(inputs.values, index), index)

    def quantise(self, keys: Tensor, values: Tensor, index: Tensor | None) -> KiviPrompt:
        """Rows `[H_kv, n, D]` that were selected already. Raises: ValueError: one is not finite."""
        return KiviPrompt(rows=kivi_quantise(keys, values, self.bits), index=index)

    def view(self, tensors: Mapping[str, Tensor]) -> KiviPrompt:
        rows = {name: tensors[name] for name in ("codes", "scales", "keys", "values")}
        return KiviPrompt(rows=KiviRows(bits=self.bits, **rows), index=tensors.get("index"))
