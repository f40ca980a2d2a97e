"""RDKV: bits allocated to K channels and V tokens, packed in one buffer that decode attends as it is.

New tokens stay rows, or are packed in segments as the prompt was (streaming re-budgeting, the paper's future
work):

    keys, values      | 0 ... R - 1: rows of the current segment |   when it is full and one more row comes:
    segments          | segment 0 | segment 1 | ...              | ◄── packed after the others
    segment_queries   | the last W queries of the current segment   |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import CachedRows
from kvferry.kernels.packed import (
    LAYOUT_VERSION,
    HeadCounts,
    PackedLayer,
    PackedLayout,
    check_packed_layer,
    max_packed_bytes,
    packed_layout,
    view_packed_layer,
)
from kvferry.kernels.packed.layout import Kind
from kvferry.kernels.trizone.batch import PackedRows
from kvferry.shared.compression.attention import (
    PACKED_ATTENTIONS,
    make_attention,
    packed_attention,
    size_attention,
    spread_pages,
)
from kvferry.shared.compression.attention.dense import Dense
from kvferry.shared.compression.attention.interface import AttentionKind, TensorSpec
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerCache,
    LayerFormat,
    LayerShape,
    Sizing,
    Specs,
    Tensors,
    on_host,
)
from kvferry.shared.compression.formats.rdkv_naive import NaivePacked
from kvferry.shared.compression.formats.rows import Rows
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, ParamValue, Part, check_params
from kvferry.shared.compression.rdkv.compress import (
    RdkvSettings,
    Rebudgeting,
    compress_layer_rdkv,
    rdkv_settings,
)
from kvferry.shared.compression.rdkv.epsilon import WIDTHS
from kvferry.shared.errors import InvalidRequest, KvferryError

_TOKENS_PER_BUDGET_TOKEN = 8
"""The most tokens that can share the V bits of one full-precision token: 16 bits, at least 2 each."""
_HEAD_COUNTS = 8
_KINDS: Mapping[str, Kind] = {"codes": "codes", "scales": "scales", "rows": "rows", "index": "index"}
"""The tensors of a packed buffer, in their order in the buffer."""


@dataclass(frozen=True, kw_only=True)
class Rdkv(LayerFormat):
    """A packed prompt.

    Tensors: layout int32 `[1 + 8 H_kv]` (LAYOUT_VERSION, then for each KV head the number of channels of 2,
    4, 8, 16 bits and the number of tokens of 2, 4, 8, 16 bits), then the parts of the packed buffer as bytes.

    Attributes:
        rows: the most prompt tokens that a head retains.
        attention: dense or HSA, over packed bytes.
        rebudgeting: how new tokens are packed; None if they stay rows.
    """

    name: ClassVar[str] = "rdkv"
    kinds: ClassVar[Mapping[str, str]] = {
        "layout": "manifest", "codes": "codes", "scales": "scales", "rows": "rows", "index": "index"
    }  # fmt: skip
    attention: AttentionKind
    settings: RdkvSettings
    rebudgeting: Rebudgeting | None

    # ---- planning ----------------------------------------------------------------------------------------

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        part = plan.representation
        rdkv_settings(part, budget_tokens=1)
        if plan.attention.name not in PACKED_ATTENTIONS:
            raise _unfit("attention", plan.attention.name, " or ".join(map(repr, PACKED_ATTENTIONS)))
        if plan.attention.name != "dense" and part.params["rebudget_tokens"]:
            raise InvalidRequest(
                f"representation 'rdkv' packs generated tokens (rebudget_tokens "
                f"{part.params['rebudget_tokens']}), which does not go with attention "
                f"{plan.attention.name!r}; rebudget_tokens must be 0",
                param="kv_compression",
            )
        for what, given, allowed in (
            ("scorer", plan.scorer.name if plan.scorer is not None else "none", "none"),
            ("layer_allocation", plan.layer_allocation.name, "uniform"),
        ):
            if given != allowed:
                raise _unfit(what, given, f"{allowed!r} only")

    @classmethod
    def plan_layer(cls, plan: CompressionPlan, sizing: Sizing) -> LayerPlan:
        """B_tok, the most tokens that a head can retain with it, and how generated tokens are packed.

        Raises: InvalidRequest: the budget does not suffice for the least width for every token.
        """
        budget, num_tokens, part = sizing.packed_budget, sizing.num_prompt_tokens, plan.representation
        if budget >= num_tokens:
            return Rows.plan_layer(plan, sizing)
        least = rdkv_settings(part, budget_tokens=budget).widths[0]
        if least * num_tokens > WIDTHS[-1] * budget:
            raise InvalidRequest(
                f"widths {part.params['widths']!r} of representation 'rdkv' give each of {num_tokens} tokens "
                f"{least} bits at least; that takes a budget of "
                f"{-(-least * num_tokens // WIDTHS[-1])} tokens or more, not {budget}",
                param="kv_compression",
            )
        sizes: dict[str, ParamValue] = {"budget_tokens": budget}
        segment = int(part.params["rebudget_tokens"])
        # the prompt's bits per token, rounded up so that a segment never gets fewer
        share = -(-segment * budget // num_tokens)
        if (
            segment
            and _num_segments(segment, sizing.max_new_tokens)
            and _saves(segment, share, sizing.head_dim)
        ):
            sizes |= {"segment_tokens": segment, "segment_budget_tokens": share}
        rows = min(num_tokens, _TOKENS_PER_BUDGET_TOKEN * budget)
        attention = size_attention(
            plan.attention, layer=sizing.layer, cap=sizing.cap, budget=sizing.budget, head_dim=sizing.head_dim
        )
        spread = spread_pages(attention, rows=sizing.cap, tokens=rows + sizing.max_new_tokens)
        return LayerPlan(rows=rows, attention=spread, representation=Part(name="rdkv", params=sizes))

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Rdkv:
        params = layer.representation.params
        segments = ("segment_tokens", "segment_budget_tokens") if "segment_tokens" in params else ()
        check_params("a layer of 'rdkv'", params, dict.fromkeys(("budget_tokens", *segments), int))
        sizes, rebudgeting = {name: int(value) for name, value in params.items()}, None
        if segments:
            segment, share = sizes["segment_tokens"], sizes["segment_budget_tokens"]
            rebudgeting = Rebudgeting(
                segment_tokens=segment,
                max_segments=_num_segments(segment, shape.max_new_tokens),
                limit_bytes=max_packed_bytes(
                    num_tokens=segment,
                    budget_tokens=share,
                    num_kv_heads=shape.num_kv_heads,
                    head_dim=shape.head_dim,
                ),
                settings=rdkv_settings(plan.representation, budget_tokens=share),
            )
        return cls(
            shape=shape,
            rows=layer.rows,
            attention=make_attention(layer.attention),
            settings=rdkv_settings(plan.representation, budget_tokens=sizes["budget_tokens"]),
            rebudgeting=rebudgeting,
        )

    # ---- prefill -----------------------------------------------------------------------------------------

    @property
    def observed_queries(self) -> int:
        return self.settings.window

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        packed = compress_layer_rdkv(self.settings, inputs).packed
        counts = [count for head in packed.layout.heads for count in (*head.channels, *head.tokens)]
        tensors = {"layout": torch.tensor([LAYOUT_VERSION, *counts], dtype=torch.int32)}
        for name, kind in _KINDS.items():
            start, size_bytes = packed.layout.kinds[kind]
            tensors[name] = packed.buffer[start : start + size_bytes]
        return tensors

    def positions_by_head(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        return tuple(head.positions for head in self.packed(tensors).heads)

    # ---- decode ------------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int:
        """The largest possible size of the packed prompt."""
        return max_packed_bytes(
            num_tokens=self.shape.num_prompt_tokens,
            budget_tokens=self.settings.budget_tokens,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
        )

    @property
    def num_rows(self) -> int:
        """The most new tokens that are rows at the same time."""
        num_new = self.shape.num_new_rows
        return num_new if self.rebudgeting is None else min(num_new, self.rebudgeting.segment_tokens)

    def tensors(self) -> Specs:
        """The layout only: the other sizes depend on the prompt; `receive` checks their sum."""
        return {"layout": TensorSpec(shape=(1 + _HEAD_COUNTS * self.shape.num_kv_heads,), dtype=torch.int32)}

    def regions(self) -> Specs:
        rows, growth = self.shape.row_spec(self.num_rows), self.rebudgeting
        specs = {
            "packed": TensorSpec(shape=(self.limit_bytes,), dtype=torch.uint8),
            "keys": rows,
            "values": rows,
            **self._auxiliary(self.num_rows),
        }
        if growth is not None:
            specs["segments"] = TensorSpec(
                shape=(growth.max_segments * growth.limit_bytes,), dtype=torch.uint8
            )
            specs["segment_queries"] = self._queries(growth)
        return specs

    def _auxiliary(self, num_rows: int) -> dict[str, TensorSpec]:
        specs = packed_attention(self.attention).packed_specs(
            num_kv_heads=self.shape.num_kv_heads,
            num_tokens=self.rows + num_rows,
            head_dim=self.shape.head_dim,
            dtype=self.shape.dtype,
        )
        return {f"auxiliary_{i}": its for i, its in enumerate(specs)}

    def _queries(self, growth: Rebudgeting) -> TensorSpec:
        shape = (self.shape.num_kv_heads, self.shape.group_size, growth.window, self.shape.head_dim)
        return TensorSpec(shape=shape, dtype=self.shape.dtype)

    def receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        sizes = {name: its.shape for name, its in header.items() if name != "layout"}
        is_bytes = all(
            len(size) == 1 and size[0] >= 0 and header[name].dtype == torch.uint8
            for name, size in sizes.items()
        )
        self.check_header({n: s for n, s in header.items() if n == "layout"}, self.tensors())
        total = sum(its[0] for its in sizes.values() if its)
        if [*header] != ["layout", *_KINDS] or not is_bytes or total > self.limit_bytes:
            raise InvalidTensors(
                f"its tensors are {', '.join(header)} of {total} packed bytes; layout, "
                f"{', '.join(_KINDS)} of at most {self.limit_bytes} are expected",
                reason="layer_header",
            )
        places, offset = {"layout": torch.empty(header["layout"].shape, dtype=torch.int32)}, 0
        for name, (size_bytes,) in sizes.items():
            places[name] = regions["packed"][offset : offset + size_bytes]
            offset += size_bytes
        return places

    def _receive(self, header: Specs, regions: Tensors) -> dict[str, Tensor]:
        raise AssertionError("`receive` is this format's own")

    def open(self, regions: Tensors, tensors: Tensors) -> RdkvCache:
        layout = self._layout(tensors)
        packed = view_packed_layer(layout, regions["packed"][: layout.size_bytes])
        try:
            check_packed_layer(packed, self.shape.num_prompt_tokens)
        except ValueError as error:
            raise InvalidTensors(str(error), reason="packed") from error
        return RdkvCache(self, regions, packed)

    def _layout(self, tensors: Tensors) -> PackedLayout:
        """The offsets of the packed buffer's parts.

        Raises: InvalidTensors: another layout version, impossible counts, or tensors of other sizes than the
            counts give.
        """
        version, *counts = tensors["layout"].tolist()
        if version != LAYOUT_VERSION:
            raise InvalidTensors(
                f"it is packed in layout version {version}; this side reads {LAYOUT_VERSION}",
                reason="layout_version",
            )
        try:
            heads = tuple(
                HeadCounts(channels=tuple(counts[i : i + 4]), tokens=tuple(counts[i + 4 : i + 8]))
                for i in range(0, len(counts), _HEAD_COUNTS)
            )
            layout = packed_layout(heads, self.shape.head_dim)
        except ValueError as error:
            raise InvalidTensors(f"LAYOUT: {error}", reason="layout") from error
        sizes = {name: layout.kinds[kind][1] for name, kind in _KINDS.items()}
        sent = {name: tensors[name].numel() for name in _KINDS}
        most = max(head.num_tokens for head in heads)
        if most > self.shape.num_prompt_tokens or sizes != sent or layout.size_bytes > self.limit_bytes:
            raise InvalidTensors(
                f"LAYOUT: heads keep {[head.num_tokens for head in heads]} tokens in {sizes} bytes; at most "
                f"{self.shape.num_prompt_tokens} tokens and the {sent} bytes that were announced are allowed",
                reason="layout",
            )
        return layout

    def packed(self, tensors: Tensors) -> PackedLayer:
        """The packed layer, in new memory."""
        return view_packed_layer(self._layout(tensors), torch.cat([tensors[name] for name in _KINDS]))

    # ---- accounting --------------------------------------------------------------------------------------

    def prompt_bytes(self, tensors: Tensors) -> int:
        return sum(tensors[name].numel() for name in _KINDS)

    def used_bytes(self, num_appended: int, prompt_bytes: int | None = None) -> int:
        """See `LayerFormat.used_bytes`, without packed segments; `RdkvCache.used_bytes` adds those."""
        growth, num_rows = self.rebudgeting, num_appended
        if growth is not None and num_appended:
            num_rows = (num_appended - 1) % growth.segment_tokens + 1
        queries = self._queries(growth).size_bytes if growth is not None else 0
        beside = sum(its.size_bytes for its in self._auxiliary(num_rows).values())
        packed_bytes = self.limit_bytes if prompt_bytes is None else prompt_bytes
        return packed_bytes + 2 * self.shape.row_spec(num_rows).size_bytes + beside + queries

    def kept_bytes(self, prompt_bytes: int | None = None) -> int:
        return self.used_bytes(0, prompt_bytes)

    def read_bytes(self, prompt_bytes: int | None = None) -> int:
        return packed_attention(self.attention).read_packed_bytes(
            num_tokens=self.rows,
            num_kv_heads=self.shape.num_kv_heads,
            packed_bytes=self.limit_bytes if prompt_bytes is None else prompt_bytes,
            head_dim=self.shape.head_dim,
            element_bytes=self.shape.dtype.itemsize,
        )

    def naive(self, tensors: Tensors) -> NaivePacked:
        return NaivePacked(self.attention, self.rebudgeting, self.packed(tensors))


class RdkvCache(LayerCache):
    """A packed prompt in the arena, rows of new tokens, and packed segments of earlier new tokens.

    Attributes:
        segments: the packed segments, oldest first.
    """

    format: Rdkv

    def __init__(self, fmt: Rdkv, regions: Tensors, packed: PackedLayer) -> None:
        super().__init__(fmt, regions)
        self.packed = packed
        self.keys, self.values = regions["keys"], regions["values"]
        self.auxiliary = tuple(region for name, region in regions.items() if name.startswith("auxiliary_"))
        self.segments: list[PackedLayer] = []
        self._segment_rows: list[tuple[Tensor, Tensor]] = []
        packed_attention(fmt.attention).build_packed(packed, self.auxiliary)

    @property
    def name(self) -> str:
        if self.format.rebudgeting is not None:
            return "segments"
        return f"packed_{self.format.attention.name}"

    def append_and_attend(
        self, queries: Tensor, key: Tensor, value: Tensor, *, num_appended: int, scaling: float
    ) -> Tensor:
        growth, position = self.format.rebudgeting, num_appended
        if growth is not None:
            position = self._make_room(growth, queries, num_appended, scaling)
        packed, kind = [self.packed, *self.segments], packed_attention(self.format.attention)
        kind.append_packed(packed, self.keys, self.values, self.auxiliary, key, value, position=position)
        return kind.attend_packed(
            queries, packed, self.keys, self.values, self.auxiliary, length=position + 1, scaling=scaling
        )

    def batched(self, num_appended: int) -> CachedRows | None:
        is_dense = type(self.format.attention) is Dense
        if self.format.rebudgeting is not None or not is_dense or num_appended >= self.keys.shape[1]:
            return None
        return PackedRows(keys=self.keys, values=self.values, length=num_appended, packed=self.packed)

    def used_bytes(self, num_appended: int) -> int:
        segments = sum(segment.layout.size_bytes for segment in self.segments)
        return self.format.used_bytes(num_appended, self.packed.layout.size_bytes) + segments

    def generated_rows(self, num_appended: int) -> tuple[Tensor, Tensor]:
        num_packed = sum(keys.shape[1] for keys, _ in self._segment_rows)
        keys, values = (on_host(its[:, : num_appended - num_packed]) for its in (self.keys, self.values))
        return (
            torch.cat([*(rows for rows, _ in self._segment_rows), keys], 1),
            torch.cat([*(rows for _, rows in self._segment_rows), values], 1),
        )

    def _make_room(self, growth: Rebudgeting, queries: Tensor, num_appended: int, scaling: float) -> int:
        """Pack the rows if they fill a segment; returns the row number of the next token.

        Raises: KvferryError: K or V are not finite, or out of range for a packed layer.
        """
        row = num_appended - len(self.segments) * growth.segment_tokens
        if row == growth.segment_tokens:
            self._pack_segment(growth, scaling)
            row = 0
        beyond = row - (growth.segment_tokens - growth.window)
        if beyond >= 0:
            self.regions["segment_queries"][:, :, beyond] = queries
        return row

    def _pack_segment(self, growth: Rebudgeting, scaling: float) -> None:
        inputs = LayerInputs(
            layer=0,
            queries=self.regions["segment_queries"],
            keys=self.keys,
            values=self.values,
            scaling=scaling,
        )
        try:
            packed = compress_layer_rdkv(growth.settings, inputs).packed
        except ValueError as error:
            raise KvferryError(f"generated tokens cannot be packed: {error}", reason="packing") from error
        start = sum(segment.layout.size_bytes for segment in self.segments)
        place = self.regions["segments"][start : start + packed.layout.size_bytes]
        place.copy_(packed.buffer)
        if self.format.shape.returns_generated:
            self._segment_rows.append((on_host(self.keys), on_host(self.values)))
        self.segments.append(view_packed_layer(packed.layout, place))


def _num_segments(segment_tokens: int, max_new_tokens: int) -> int:
    """The segments that a completion of this length packs.

    A segment is packed when one more row comes, and the last token of a completion never gets a row.
    """
    return max(max_new_tokens - 2, 0) // segment_tokens


def _saves(segment_tokens: int, budget_tokens: int, head_dim: int) -> bool:
    """Whether a packed segment of the largest possible size is smaller than its rows at 16 bits."""
    limit_bytes = max_packed_bytes(
        num_tokens=segment_tokens, budget_tokens=budget_tokens, num_kv_heads=1, head_dim=head_dim
    )
    return limit_bytes < 4 * segment_tokens * head_dim


def _unfit(what: str, given: str, takes: str) -> InvalidRequest:
    return InvalidRequest(
        f"representation 'rdkv' does not go with {what} {given!r}; it takes {takes}", param="kv_compression"
    )
