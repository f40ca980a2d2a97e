"""Rows: K and V of the selected tokens in the model's dtype, for every attention that does not evict.

They may be quantised for the wire only (`wire_bits`); the receiver then restores rows from the codes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.dense_decode import dense_decode
from kvferry.kernels.hsa.batch import SparseRows, is_too_long
from kvferry.kernels.quantise import WIDTHS as CODE_WIDTHS
from kvferry.shared.compression.attention import EVICTIONS, make_attention, size_attention
from kvferry.shared.compression.attention.dense import Dense
from kvferry.shared.compression.attention.interface import AttentionKind, TensorSpec
from kvferry.shared.compression.attention.paged import Hsa
from kvferry.shared.compression.formats.evicting import Evicting
from kvferry.shared.compression.formats.interface import (
    LayerCache,
    LayerFormat,
    LayerShape,
    NaiveLayer,
    Sizing,
    Specs,
    Tensors,
    check_index,
    gather_rows,
    on_host,
    select_rows,
)
from kvferry.shared.compression.formats.kivi import Kivi, KiviPrompt
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, check_params
from kvferry.shared.errors import InvalidRequest

PLAIN_BITS = 16
"""`wire_bits` of rows that are sent unquantised."""


@dataclass(frozen=True, kw_only=True)
class Rows(LayerFormat):
    """K and V `[H_kv, n, D]`, post-RoPE, in position order.

    Attributes:
        attention: decode's attention, which may store auxiliary tensors beside K and V.
        wire_bits: 16, or the width to which rows are quantised for the wire.
    """

    name: ClassVar[str] = "rows"
    kinds: ClassVar[Mapping[str, str]] = {
        "index": "index", "keys": "rows", "values": "rows", "codes": "codes", "scales": "scales"
    }  # fmt: skip
    attention: AttentionKind
    wire_bits: int = PLAIN_BITS

    @property
    def is_plain(self) -> bool:
        return self.wire_bits == PLAIN_BITS

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        part = plan.representation
        check_params("representation 'rows'", part.params, {"wire_bits": int} if part.params else {})
        bits, allowed = part.params.get("wire_bits", PLAIN_BITS), (*CODE_WIDTHS, PLAIN_BITS)
        if bits not in allowed:
            raise InvalidRequest(
                f"wire_bits is {bits}; it must be one of {', '.join(map(str, allowed))}",
                param="kv_compression.wire_bits",
            )
        if bits != PLAIN_BITS and plan.attention.name in EVICTIONS:
            raise InvalidRequest(
                f"wire_bits {bits} does not go with attention {plan.attention.name!r}, which changes its "
                "rows",
                param="kv_compression.wire_bits",
            )

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        attention = size_attention(
            plan.attention,
            layer=sizing.layer,
            cap=sizing.cap,
            budget=sizing.budget,
            head_dim=sizing.head_dim,
        )
        return LayerPlan(rows=sizing.rows, attention=attention, representation=_wire_part(plan))

    @classmethod
    def plan_whole(cls, plan: CompressionPlan, num_prompt_tokens: int) -> LayerPlan:
        return LayerPlan(rows=num_prompt_tokens, representation=_wire_part(plan))

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> LayerFormat:
        if layer.attention.name in EVICTIONS:
            return Evicting.of(plan, layer, shape)
        bits = int(layer.representation.params.get("wire_bits", PLAIN_BITS))
        return cls(shape=shape, rows=layer.rows, attention=make_attention(layer.attention), wire_bits=bits)

    @property
    def capacity(self) -> int:
        """The number of rows for which there is room."""
        return self.rows + self.shape.num_new_rows

    @property
    def _quantiser(self) -> Kivi | None:
        return None if self.is_plain else Kivi(shape=self.shape, rows=self.rows, bits=self.wire_bits)

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        quantiser = self._quantiser
        if quantiser is not None:
            return quantiser.compress(inputs, scores)
        if scores is None:
            return {"keys": inputs.keys.contiguous(), "values": inputs.values.contiguous()}
        index = select_rows(scores, self.rows)
        keys, values = gather_rows(inputs.keys, index), gather_rows(inputs.values, index)
        return {"index": index, "keys": keys, "values": values}

    def tensors(self) -> Specs:
        quantiser = self._quantiser
        if quantiser is not None:
            return quantiser.tensors()
        rows = self.shape.row_spec(self.rows)
        return {**self.shape.index_spec(self.rows), "keys": rows, "values": rows}

    def regions(self) -> Specs:
        rows = self.shape.row_spec(self.capacity)
        return {"keys": rows, "values": rows, **self._auxiliary(self.capacity)}

    def _auxiliary(self, num_rows: int) -> Specs:
        specs = self.attention.auxiliary_specs(
            num_kv_heads=self.shape.num_kv_heads,
            num_rows=num_rows,
            head_dim=self.shape.head_dim,
            dtype=self.shape.dtype,
        )
        return {f"auxiliary_{i}": its for i, its in enumerate(specs)}

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        device = regions["keys"].device
        if not self.is_plain:
            return {
                name: torch.empty(its.shape, dtype=its.dtype, device=device) for name, its in header.items()
            }
        places = {name: regions[name][:, : self.rows] for name in ("keys", "values")}
        return {
            name: places[name] if name in places else torch.empty(its.shape, dtype=its.dtype)
            for name, its in header.items()
        }

    def open(self, regions: Tensors, tensors: Tensors) -> RowsCache:
        index = tensors.get("index")
        if not self.is_plain:
            quantised = self._quantised(tensors)
            quantised.check(self.shape.num_prompt_tokens)
            for name, rows in zip(("keys", "values"), quantised.dequantised(), strict=True):
                regions[name][:, : self.rows] = rows
        elif index is not None:
            check_index(index, self.shape.num_prompt_tokens, reason="index")
        cache = RowsCache(self, regions, positions=None if index is None else index.cpu().numpy())
        self.attention.build(cache.keys, cache.values, cache.auxiliary, length=self.rows)
        return cache

    def _quantised(self, tensors: Tensors) -> KiviPrompt:
        """The received codes of rows that were quantised for the wire."""
        quantiser = self._quantiser
        assert quantiser is not None
        return quantiser.prompt(tensors)

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        num_rows = self.rows + num_appended
        beside = sum(its.size_bytes for its in self._auxiliary(num_rows).values())
        return 2 * self.shape.row_spec(num_rows).size_bytes + beside

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.shape.num_kv_heads * self.attention.read_bytes(
            num_rows=self.rows, head_dim=self.shape.head_dim, element_bytes=self.shape.dtype.itemsize
        )

    def naive(self, tensors: Tensors) -> NaiveRows:
        if self.is_plain:
            return NaiveRows(self.attention, tensors["keys"], tensors["values"])
        return NaiveRows(self.attention, *self._quantised(tensors).dequantised())


class RowsCache(LayerCache):
    """A layer of rows in the arena.

    Attributes:
        keys, values: `[H_kv, cap, D]`.
        auxiliary: the attention's auxiliary tensors.
        positions: the prompt rows' tokens, int32 `[H_kv, n]` on the host; None if every token is selected.
    """

    format: Rows

    def __init__(self, fmt: Rows, regions: Tensors, *, positions: npt.NDArray[np.int32] | None) -> None:
        super().__init__(fmt, regions)
        self.keys, self.values = regions["keys"], regions["values"]
        self.auxiliary = tuple(region for name, region in regions.items() if name.startswith("auxiliary_"))
        self.positions = positions

    @property
    def name(self) -> str:
        return self.format.attention.name

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: float
    ) -> Tensor:
        attention, position = self.format.attention, self.format.rows + num_appended
        attention.append(self.keys, self.values, self.auxiliary, key, value, position=position)
        return attention.attend(
            queries, self.keys, self.values, self.auxiliary, length=position + 1, scaling=scaling
        )

    def batched(self, num_appended: int) -> CachedRows | None:
        attention, length = self.format.attention, self.format.rows + num_appended
        if length >= self.keys.shape[1]:
            return None  # no room: `append_and_attend` then fails for this sequence only
        if type(attention) is Dense:
            return CachedRows(keys=self.keys, values=self.values, length=length)
        if type(attention) is not Hsa:
            return None
        page_max, page_min = attention.extremes(self.keys, self.auxiliary)
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

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        new = slice(self.format.rows, self.format.rows + num_appended)
        return on_host(self.keys[:, new]), on_host(self.values[:, new])


class NaiveRows(NaiveLayer):
    """K and V by concatenation; the attention's auxiliary tensors are rebuilt at every step."""

    def __init__(self, attention: AttentionKind, keys: Tensor, values: Tensor) -> None:
        self._attention = attention
        self._keys, self._values = keys, values

    def attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, scaling: float, dense: bool = False
    ) -> Tensor:
        self._keys = torch.cat([self._keys, key[:, None]], 1)
        self._values = torch.cat([self._values, value[:, None]], 1)
        if dense:
            return dense_decode(queries, self._keys, self._values, scaling=scaling)
        num_kv_heads, length, head_dim = self._keys.shape
        auxiliary = empty_tensors(
            self._attention.auxiliary_specs(
                num_kv_heads=num_kv_heads, num_rows=length, head_dim=head_dim, dtype=self._keys.dtype
            ),
            self._keys.device,
        )
        self._attention.build(self._keys, self._values, auxiliary, length=length)
        return self._attention.attend(
            queries, self._keys, self._values, auxiliary, length=length, scaling=scaling
        )

    def fork(self) -> NaiveRows:
        return copy.copy(self)


def empty_tensors(specs: tuple[TensorSpec, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Uninitialised tensors, with room for alignment."""
    return tuple(torch.empty(its.placed_shape, dtype=its.dtype, device=device) for its in specs)


def _wire_part(plan: CompressionPlan) -> Part:
    """The part "rows" of a resolved layer; it has `wire_bits` only if the rows are quantised for the wire."""
    part = plan.representation
    quantised = part.name == "rows" and part.params.get("wire_bits", PLAIN_BITS) != PLAIN_BITS
    return part if quantised else Part(name="rows")
