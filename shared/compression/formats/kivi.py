"""Rows quantised in groups: attended as codes (KIVI), or quantised for the wire only (`Rows.wire_bits`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerShape,
    Specs,
    Tensors,
    check_index,
    gather_rows,
    select_rows,
)
from kvferry.shared.compression.formats.stored import StoredFormat
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, check_params
from kvferry.shared.errors import InvalidRequest

_PLAIN_BITS = 16
_SCALE_BITS = 64
"""A float32 scale and a float32 minimum."""


@dataclass(frozen=True, kw_only=True)
class KiviPrompt:
    """Implements `StoredPrompt` with quantised rows.

    Attributes:
        index: selected positions, int32 `[H_kv, n]`; None if every token is selected.
    """

    rows: KiviRows
    index: Tensor | None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        index = {} if self.index is None else {"index": self.index}
        rows = self.rows
        return {**index, "codes": rows.codes, "scales": rows.scales, "keys": rows.keys, "values": rows.values}

    def check(self, num_tokens: int) -> None:
        """Check that positions ascend, scales are positive and every code dequantises to a finite value.

        Raises: InvalidTensors: otherwise.
        """
        if self.index is not None:
            check_index(self.index, num_tokens, reason="packed")
        head_dim = self.rows.keys.shape[2]
        key_scales, key_minima, value_scales, value_minima = torch.split(
            self.rows.scales, [head_dim, head_dim, GROUP_TOKENS, GROUP_TOKENS], dim=2
        )
        levels = (1 << self.rows.bits) - 1
        for scales, minima in ((key_scales, key_minima), (value_scales, value_minima)):
            finite = minima.isfinite() & (scales * levels + minima).isfinite()
            if not bool((finite & (scales > 0)).all()):
                raise InvalidTensors("scales must be finite and positive, and minima finite", reason="packed")

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor, *, scaling: float) -> Tensor:
        return kivi_decode(queries, self.rows, new_keys, new_values, scaling=scaling)

    def dequantised(self) -> tuple[Tensor, Tensor]:
        """K and V `[H_kv, n, D]` in the model's dtype, restored from the codes."""
        return kivi_dequantise(self.rows)


@dataclass(frozen=True, kw_only=True)
class Kivi(StoredFormat):
    """Rows quantised by `kernels.kivi`: K per channel in groups of tokens, V per token.

    Attributes:
        bits: width of a code.
    """

    name: ClassVar[str] = "kivi"
    kinds: ClassVar[Mapping[str, str]] = {
        "index": "index", "codes": "codes", "scales": "scales", "keys": "rows", "values": "rows"
    }  # fmt: skip
    bits: int

    @classmethod
    def _params(cls, part: Part) -> int:
        check_params("representation 'kivi'", part.params, {"bits": int})
        bits = int(part.params["bits"])
        if bits not in WIDTHS:
            raise InvalidRequest(
                f"bits is {bits}; it must be one of {', '.join(map(str, WIDTHS))}",
                param="kv_compression.bits",
            )
        return bits

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Kivi:
        return cls(shape=shape, rows=layer.rows, bits=cls._params(layer.representation))

    @classmethod
    def rows_within(cls, part: Part, budget_rows: int, *, num_tokens: int, head_dim: int) -> int:
        row_bits = 2 * head_dim * _PLAIN_BITS
        codes, scales, _ = kivi_shapes(
            GROUP_TOKENS, num_kv_heads=1, head_dim=head_dim, bits=cls._params(part)
        )
        group_bits = 8 * codes[2] + _SCALE_BITS * scales[2] // 2
        budget_bits = budget_rows * row_bits
        groups = min(budget_bits // group_bits, num_tokens // GROUP_TOKENS)
        left = (budget_bits - groups * group_bits) // row_bits
        return groups * GROUP_TOKENS + min(left, GROUP_TOKENS - 1, num_tokens - groups * GROUP_TOKENS)

    def tensors(self) -> Specs:
        codes, scales, left = kivi_shapes(
            self.rows,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            bits=self.bits,
        )
        rows = TensorSpec(shape=left, dtype=self.shape.dtype)
        return {
            **self.shape.index_spec(self.rows),
            "codes": TensorSpec(shape=codes, dtype=torch.uint8),
            "scales": TensorSpec(shape=scales, dtype=torch.float32),
            "keys": rows,
            "values": rows,
        }

    def store(self, inputs: LayerInputs, scores: Tensor | None) -> KiviPrompt:
        keys, values, index = inputs.keys, inputs.values, None
        if scores is not None:
            index = select_rows(scores, self.rows)
            keys, values = gather_rows(keys, index), gather_rows(values, index)
        return KiviPrompt(rows=kivi_quantise(keys, values, self.bits), index=index)

    def prompt(self, tensors: Tensors) -> KiviPrompt:
        rows = {name: tensors[name] for name in ("codes", "scales", "keys", "values")}
        return KiviPrompt(rows=KiviRows(bits=self.bits, **rows), index=tensors.get("index"))
