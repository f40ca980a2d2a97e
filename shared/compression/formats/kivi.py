"""Rows quantised in groups: attended as codes (KIVI), or quantised for the wire only (`WireRows`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.kivi import kivi_decode
from kvferry.kernels.kivi.batch import QuantisedRows
from kvferry.kernels.kivi.rows import GROUP_TOKENS, KiviRows, kivi_quantise, kivi_shapes
from kvferry.kernels.quantise import WIDTHS
from kvferry.shared.compression.formats.interface import InvalidTensors, Specs, Tensors, check_index
from kvferry.shared.compression.formats.stored import PromptAttention, StoredFormat
from kvferry.shared.compression.interface import LayerInputs, Sizing, TensorSpec
from kvferry.shared.compression.plan import Allowed, Part

_PLAIN_BITS = 16
"""Bits of a row's value; a scale or a minimum has as many."""


@dataclass(frozen=True, kw_only=True)
class Kivi(StoredFormat):
    """KIVI (Liu et al. 2024) of every whole group: K per channel in groups of tokens, V per token.

    Deviation: the paper does not cover latent rows. They are quantised as K, and their values are read from
    the same codes.

    Attributes:
        bits: width of a code.
    """

    name: ClassVar[str] = "kivi"
    heads_apart: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, str]] = {**StoredFormat.kinds, "codes": "codes", "scales": "scales"}
    allowed: ClassVar[Allowed] = {"bits": WIDTHS}
    takes_latent_rows: ClassVar[bool] = True
    bits: int

    @classmethod
    def rows_within(cls, part: Part, sizing: Sizing) -> int:
        row_bits, num_tokens = sizing.row_dim * _PLAIN_BITS, sizing.num_prompt_tokens
        codes, scales, _ = kivi_shapes(
            GROUP_TOKENS,
            num_kv_heads=1,
            head_dim=sizing.head_dim,
            bits=cls.params(part)["bits"],
            is_latent=bool(sizing.latent_dim),
        )
        group_bits = 8 * codes[2] + _PLAIN_BITS * scales[2]
        budget_bits = sizing.rows * row_bits
        groups = min(budget_bits // group_bits, num_tokens // GROUP_TOKENS)
        left = (budget_bits - groups * group_bits) // row_bits
        return groups * GROUP_TOKENS + min(left, GROUP_TOKENS - 1, num_tokens - groups * GROUP_TOKENS)

    def tensors(self) -> Specs:
        codes, scales, left = kivi_shapes(
            self.rows,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            bits=self.bits,
            is_latent=bool(self.shape.latent_dim),
        )
        rows = TensorSpec(shape=left, dtype=self.shape.dtype)
        return {
            **self.shape.index_spec(self.rows),
            "codes": TensorSpec(shape=codes, dtype=torch.uint8),
            "scales": TensorSpec(shape=scales, dtype=torch.float16),
            **dict.fromkeys(self.shape.row_names, rows),
        }

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        index, keys, values = self.selected(inputs, scores)
        rows = kivi_quantise(keys, values, self.bits, latent_dim=self.shape.latent_dim)
        left = self.shape.row_tensors(rows.keys, rows.values)
        return {**index, "codes": rows.codes, "scales": rows.scales, **left}

    def quantised(self, tensors: Tensors) -> KiviRows:
        """Return the rows that these tensors store."""
        keys, values = self.shape.rows_of(tensors)
        return KiviRows(
            bits=self.bits,
            codes=tensors["codes"],
            scales=tensors["scales"],
            keys=keys,
            values=values,
            latent_dim=self.shape.latent_dim,
        )

    def check_content(self, tensors: Tensors) -> None:
        """Check that positions ascend, scales and minima are finite and scales positive. No code times a
        float16 scale is beyond float32, so the restored values are finite, too."""
        check_index(tensors, self.shape.num_prompt_tokens, reason="packed")
        head_dim = self.shape.head_dim
        of_values = 0 if self.shape.latent_dim else GROUP_TOKENS
        headers = tensors["scales"]
        key_scales, _, value_scales, _ = torch.split(
            headers, [head_dim, head_dim, of_values, of_values], dim=2
        )
        if not bool(headers.isfinite().all() & (key_scales > 0).all() & (value_scales > 0).all()):
            raise InvalidTensors("scales must be finite and positive, and minima finite", reason="packed")

    def attention(self, tensors: Tensors) -> PromptAttention:
        rows = self.quantised(tensors)
        return lambda queries, keys, values, scaling: kivi_decode(
            queries, rows, keys, values, scaling=scaling
        )

    def batched(self, prompt: Tensors, keys: Tensor, values: Tensor, *, length: int) -> CachedRows | None:
        """See `StoredFormat.batched`. Latent rows run alone, and V if a token's codes are not whole words."""
        rows = self.quantised(prompt)
        if rows.problem is not None:
            return None
        return QuantisedRows(keys=keys, values=values, length=length, quantised=rows)
