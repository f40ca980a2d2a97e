"""Rows: K and V of the selected tokens in the model's dtype, for every attention that does not evict.

They may be quantised for the wire only (`WireRows`); the receiver then restores rows from the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.hsa.batch import SparseRows, is_too_long
from kvferry.kernels.kivi.rows import kivi_dequantise
from kvferry.kernels.quantise import WIDTHS
from kvferry.kernels.softmax import Scaling
from kvferry.shared.compression.attention import (
    EVICTIONS,
    AttentionKind,
    CacheView,
    Dense,
    Hsa,
    make_attention,
    size_attention,
)
from kvferry.shared.compression.formats.evicting import Evicting
from kvferry.shared.compression.formats.interface import (
    LayerCache,
    LayerFormat,
    NaiveLayer,
    Specs,
    Tensors,
    check_index,
)
from kvferry.shared.compression.formats.kivi import Kivi
from kvferry.shared.compression.interface import LayerInputs, LayerShape, Sizing
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, read_params
from kvferry.shared.errors import InvalidRequest

_PLAIN_BITS = 16
"""`wire_bits` of rows that are sent unquantised."""


@dataclass(frozen=True, kw_only=True)
class Rows(LayerFormat):
    """K and V `[H_kv, n, D]`, post-RoPE, in position order.

    Attributes:
        attention: decode's attention, which may store auxiliary tensors beside K and V.
    """

    name: ClassVar[str] = "rows"
    heads_apart: ClassVar[bool] = True
    compacts: ClassVar[bool] = True
    takes_any_softmax: ClassVar[bool] = True
    takes_latent_rows: ClassVar[bool] = True
    attention: AttentionKind

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        params = plan.representation.params
        allowed = {"wire_bits": (*WIDTHS, _PLAIN_BITS)} if params else {}
        bits = read_params("format 'rows'", params, allowed).get("wire_bits", _PLAIN_BITS)
        if bits != _PLAIN_BITS and plan.attention.name in EVICTIONS:
            raise InvalidRequest(
                f"wire_bits {bits} does not go with attention {plan.attention.name!r}, which changes its "
                "rows",
                param="kv_compression.wire_bits",
            )

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        attention = size_attention(plan.attention, sizing, cap=sizing.rows)
        return LayerPlan(rows=sizing.rows, attention=attention, representation=_wire_part(plan))

    @classmethod
    def plan_whole(cls, plan: CompressionPlan, num_prompt_tokens: int) -> LayerPlan:
        return LayerPlan(rows=num_prompt_tokens, representation=_wire_part(plan))

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> LayerFormat:
        if layer.attention.name in EVICTIONS:
            return Evicting.of(plan, layer, shape)
        attention = make_attention(layer.attention)
        bits = int(layer.representation.params.get("wire_bits", _PLAIN_BITS))
        if bits == _PLAIN_BITS:
            return Rows(shape=shape, rows=layer.rows, attention=attention)
        return WireRows(shape=shape, rows=layer.rows, attention=attention, wire_bits=bits)

    @cached_property
    def is_plain(self) -> bool:
        return self.segments is None

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        index, keys, values = self.selected(inputs, scores)
        return {**index, **self.shape.row_tensors(keys, values)}

    def tensors(self) -> Specs:
        return {**self.shape.index_spec(self.rows), **self.shape.row_specs(self.rows)}

    def placed(self, num_new: int) -> Specs:
        num_rows = self.rows + num_new
        return {**self.shape.row_specs(num_rows), **self.attention.regions(self.shape, num_rows)}

    def open(self, regions: Tensors, tensors: Tensors) -> RowsCache:
        index = check_index(tensors, self.shape.num_prompt_tokens, reason="index")
        cache = RowsCache(self, regions, index)
        self.attention.build(cache.view, length=self.rows)
        return cache

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.attention.read_bytes(self.shape, self.rows)

    def naive(self, tensors: Tensors) -> NaiveRows:
        return NaiveRows(self, *self.shape.rows_of(tensors))


@dataclass(frozen=True, kw_only=True)
class WireRows(Rows):
    """Rows that are quantised for the wire as KIVI does and restored on arrival.

    Attributes:
        wire_bits: the width of a code.
    """

    kinds: ClassVar[Mapping[str, str]] = Kivi.kinds
    wire_bits: int

    @cached_property
    def is_plain(self) -> bool:
        return False

    @cached_property
    def _sent(self) -> Kivi:
        return Kivi(shape=self.shape, rows=self.rows, bits=self.wire_bits)

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        return self._sent.compress(inputs, scores)

    def tensors(self) -> Specs:
        return self._sent.tensors()

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        device = regions["keys"].device
        return {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for name, spec in header.items()
        }

    def open(self, regions: Tensors, tensors: Tensors) -> RowsCache:
        self._sent.check_content(tensors)
        for name, rows in self._restored(tensors).items():
            regions[name][:, : self.rows] = rows
        return super().open(regions, tensors)

    def naive(self, tensors: Tensors) -> NaiveRows:
        return super().naive(self._restored(tensors))

    def _restored(self, tensors: Tensors) -> dict[str, Tensor]:
        keys, values = kivi_dequantise(self._sent.quantised(tensors))
        return self.shape.row_tensors(keys, values)


class RowsCache(LayerCache):
    """A layer of rows in the arena.

    Args:
        index: the prompt rows' tokens; None if every token is selected.

    Attributes:
        keys, values: `[H_kv, cap, D]`.
        view: the same with the attention's auxiliary tensors.
    """

    format: Rows

    def __init__(self, fmt: Rows, regions: Tensors, index: Tensor | None) -> None:
        super().__init__(fmt, regions)
        self.positions = None if index is None else index.cpu().numpy()

    def bind(self) -> None:
        self.view = CacheView.of(self.format.shape, self.regions)
        self.keys, self.values = self.view.keys, self.view.values

    @property
    def name(self) -> str:
        return f"{'latent_' if self.format.shape.latent_dim else ''}{self.format.attention.name}"

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: Scaling
    ) -> Tensor:
        attention, position = self.format.attention, self.format.rows + num_appended
        attention.append(self.view, key, value, position=position)
        return attention.attend(queries, self.view, length=position + 1, scaling=scaling)

    def batched(self, num_appended: int) -> CachedRows | None:
        attention, length = self.format.attention, self.format.rows + num_appended
        shape = self.format.shape
        if length >= self.keys.shape[1] or shape.latent_dim:
            return None  # no room: `append_and_attend` then fails for this sequence only
        if type(attention) is Dense:
            return CachedRows(keys=self.keys, values=self.values, length=length)
        if type(attention) is not Hsa:
            return None
        page_max, page_min = attention.extremes(self.view)
        rows = SparseRows(
            keys=self.keys,
            values=self.values,
            length=length,
            page_max=page_max,
            page_min=page_min,
            page_size=attention.page_size,
            num_channels=attention.num_channels,
            num_tokens=attention.num_tokens,
        )
        return None if is_too_long(rows) else rows

    def new_rows(self) -> tuple[Tensor, Tensor]:
        return self.keys[:, self.format.rows :], self.values[:, self.format.rows :]

    def new_rows_changed(self, num_rows: int) -> None:
        self.format.attention.build_again(self.view, length=self.format.rows + num_rows)


class NaiveRows(NaiveLayer):
    """The prompt's rows and the new ones; the attention's auxiliary tensors are rebuilt at every step."""

    def __init__(self, fmt: Rows, keys: Tensor, values: Tensor) -> None:
        self._format = fmt
        self._prompt = keys, values

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: Scaling, dense: bool = False
    ) -> Tensor:
        keys, values = self._every_row(key, value)
        if dense:
            return dense_decode(queries, keys, values, scaling=scaling)
        attention = self._format.attention
        view = attention.rebuilt(self._format.shape, keys, values)
        return attention.attend(queries, view, length=keys.shape[1], scaling=scaling)

    def _every_row(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append a row; return K and V of all rows, this one included."""
        new = self.appended(key, value)
        keys, values = (torch.cat(parts, 1) for parts in zip(self._prompt, new, strict=True))
        return keys, values


def _wire_part(plan: CompressionPlan) -> Part:
    """Return a resolved layer's part "rows"; it has `wire_bits` only if rows are quantised for the wire."""
    part = plan.representation
    quantised = part.name == "rows" and part.params.get("wire_bits", _PLAIN_BITS) != _PLAIN_BITS
    return part if quantised else Part(name="rows")
