"""Cases of decode's kernels: three sequences at odd lengths, for two steps (`cases.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels import decoder_ops, hsa, packed_hsa
from kvferry.kernels.case import SPOILT, TOLERANCES, OpCheck, bits_of
from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewTokens, SlotBatch, WindowRows
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.dispatch import launch
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.kivi.rows import WORD_BITS, kivi_quantise
from kvferry.kernels.packed.layer import PackedLayer, view_packed_layer
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer
from kvferry.kernels.packed_hsa import PageCodes
from kvferry.kernels.packed_hsa.batch import PackedHsaBatch, SparsePackedRows
from kvferry.kernels.quantise import WIDTHS
from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch

LENGTHS = (36, 131, 333)
"""Rows before the first step, by slot: no multiple of a tile, and of a page of four in one slot only."""
CAPACITY = 400
VOCABULARY = 700
_HSA_SIZES = ((1, 25), (4, 17))
"""Page size, and tokens chosen: the newest, and whole pages."""


class _Inputs:
    """Three sequences of one layer in an arena, and the tokens of two steps."""

    def __init__(self, shape: BatchShape, *, has_nan: bool) -> None:
        self.shape = replace(shape, num_layers=1, num_slots=len(LENGTHS))
        self._generator = torch.Generator().manual_seed(7)
        heads, head_dim, slots = shape.num_kv_heads, shape.head_dim, len(LENGTHS)
        # K, V, both extremes of K's pages, and space for packed bytes
        self._rows = heads * CAPACITY * head_dim
        self.arena = torch.zeros(slots, 6 * self._rows + 4096, dtype=shape.dtype, device=shape.device)
        # query heads of a group resemble one another, so that the tokens that HSA chooses are clear
        common = self.random(slots, heads, 1, head_dim)
        self.queries = common + 0.3 * self.random(slots, heads, shape.group_size, head_dim)
        self.new = self.random(2, 2, slots, heads, head_dim)
        for slot in range(slots):
            keys, values = self.keys_values(slot)
            keys.copy_(self.random(*keys.shape) * 0.05)
            values.copy_(self.random(*values.shape))
            # every third page of four matters
            token = torch.arange(CAPACITY, device=shape.device)
            keys += 0.5 * common[slot] * ((token // 4 % 3 == 1) & (token < 48))[None, :, None].to(shape.dtype)
        if has_nan:
            self.keys_values(SPOILT)[0][0, 17, 3] = torch.nan
            self.new[:, :, SPOILT] = torch.nan

    def random(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator)
        return drawn.to(self.shape.dtype).to(self.shape.device)

    def keys_values(self, slot: int) -> tuple[Tensor, Tensor]:
        shape = (self.shape.num_kv_heads, CAPACITY, self.shape.head_dim)
        keys, values = self.arena[slot, : 2 * self._rows].view(2, *shape)
        return keys, values

    def rest(self, slot: int) -> Tensor:
        """Return the part of a slot's memory behind K and V."""
        return self.arena[slot, 2 * self._rows :]

    def outputs(
        self,
        batch: SlotBatch[Any, Any],
        rows: Mapping[int, CachedRows],
        *,
        launched: bool,
        softcap: float,
        has_sinks: bool,
    ) -> Tensor:
        """Return two steps' outputs and what they wrote, by slot."""
        for slot, of_slot in rows.items():
            batch.place(slot, {0: of_slot})
        scratch = batch.scratch(len(rows)) if launched else None
        active = torch.ones(len(rows), dtype=torch.int64, device=self.shape.device)
        outputs = []
        scale = self.shape.head_dim**-0.5
        scaling: Scaling = scale
        if softcap or has_sinks:
            # a sink outweighs all rows, another none
            sinks = torch.linspace(-2, 8, self.queries[0, :, :, 0].numel(), device=self.shape.device)
            sinks = sinks.view(self.queries.shape[1:3]).to(self.shape.dtype)
            scaling = Softmax(scaling=scale, softcap=softcap, sinks=sinks if has_sinks else None)
        for keys, values in self.new:
            step = NewTokens(self.queries, keys, values, scaling)
            if launched:
                output = batch.attend_launched(0, step, scratch).clone()
            else:
                errors: dict[int, Exception] = {}
                output = batch.attend_slots(0, step, errors)
                for error in errors.values():
                    raise error
            outputs.append(output.flatten(1).float())
            batch.advance(active)
        written = [
            torch.stack([cached.keys, cached.values])[:, :, cached.length : cached.length + 2]
            .flatten()
            .float()
            for cached in rows.values()
        ]
        return torch.cat([*outputs, torch.stack(written)], dim=1)


def _decode_cases(
    op: str,
    shape: BatchShape,
    batch: Callable[..., SlotBatch[Any, Any]],
    make: Callable[[_Inputs, int, Tensor, Tensor], CachedRows],
    name: str,
    *,
    reads_codes: bool = False,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> Iterator[OpCheck]:
    """Yield two cases. Args: make: a slot's rows, with this K and V; reads_codes: as of decode's `Kernel`."""
    for has_nan in (False, True):

        def run(has_nan: bool, *, launched: bool) -> Tensor:
            inputs = _Inputs(shape, has_nan=has_nan)
            rows = {slot: make(inputs, slot, *inputs.keys_values(slot)) for slot in range(len(LENGTHS))}
            arena = inputs.arena.view(-1)
            made = batch(inputs.shape, arena, *([arena.view(torch.uint8)] if reads_codes else []))
            return inputs.outputs(made, rows, launched=launched, softcap=softcap, has_sinks=has_sinks)

        yield OpCheck(
            op=op,
            name=f"{name}, one sequence with NaN" if has_nan else name,
            launch=partial(run, has_nan, launched=True),
            expected=partial(run, has_nan, launched=False),
            tolerance=max(TOLERANCES[shape.dtype], 5e-3 if op == "trizone" else 0.0),
            spoilt=SPOILT if has_nan else None,
        )


def dense_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def make(inputs: _Inputs, slot: int, keys: Tensor, values: Tensor) -> CachedRows:
        return CachedRows(keys=keys, values=values, length=LENGTHS[slot])

    def make_window(inputs: _Inputs, slot: int, keys: Tensor, values: Tensor) -> WindowRows:
        # all rows, a window that slides, and a chunk that the second step begins
        window, before = ((CAPACITY, None), (57, None), (57, 57 * 6 - 1 - LENGTHS[2]))[slot]
        return WindowRows(keys=keys, values=values, length=LENGTHS[slot], window=window, rows_before=before)

    op = "dense_decode"
    for name, softmax in _softmaxes(shape):
        yield from _decode_cases(op, shape, DenseBatch, make, f"rows of any lengths{name}", **softmax)
        if shape.has_windows:
            yield from _decode_cases(op, shape, WindowBatch, make_window, f"windows{name}", **softmax)


def _softmaxes(shape: BatchShape) -> list[tuple[str, dict[str, Any]]]:
    """Return the softmaxes that a model may have: a name, and the options of `_decode_cases`."""
    if shape.has_plain_softmax:
        return [("", {})]
    return [(", capped", {"softcap": 2.0}), (", sinks", {"has_sinks": True})]


def hsa_cases(shape: BatchShape) -> Iterator[OpCheck]:
    for page_size, num_tokens in _HSA_SIZES:
        make = partial(_sparse_rows, page_size=page_size, num_tokens=num_tokens)
        for name, softmax in _softmaxes(shape):
            yield from _decode_cases("hsa", shape, HsaBatch, make, f"pages of {page_size}{name}", **softmax)


def _sparse_rows(
    inputs: _Inputs, slot: int, keys: Tensor, values: Tensor, *, page_size: int, num_tokens: int
) -> SparseRows:
    heads, head_dim, pages = len(keys), keys.shape[2], -(-CAPACITY // page_size)
    # a channel's pages start at a multiple of this
    aligned = ALIGNMENT_BYTES // inputs.arena.element_size()
    stride = -(-pages // aligned) * aligned
    page_max = page_min = keys
    if page_size > 1:
        extremes = inputs.rest(slot)[: 2 * heads * head_dim * stride].view(2, heads, head_dim, stride)
        page_max, page_min = extremes[..., :pages].mT
        hsa.page_extremes(keys, page_max, page_min, length=LENGTHS[slot], page_size=page_size)
    return SparseRows(
        keys=keys,
        values=values,
        length=LENGTHS[slot],
        page_max=page_max,
        page_min=page_min,
        page_size=page_size,
        num_channels=head_dim // 2,
        # all of the third slot's tokens
        num_tokens=num_tokens if slot < 2 else CAPACITY,
    )


def _packed(inputs: _Inputs, slot: int) -> tuple[PackedLayer, Tensor]:
    """Return a packed prompt as long as the slot's rows, and the bytes behind it."""
    shape, length = inputs.shape, LENGTHS[slot]
    size = (2, shape.num_kv_heads, length, shape.head_dim)
    keys, values = torch.randn(*size, generator=torch.Generator().manual_seed(slot)).to(shape.device)
    packed = indexed_layer(keys, values, *bits_of(shape, length))
    fill_in_torch(packed, keys, values)
    rest, size_bytes = inputs.rest(slot).view(torch.uint8), packed.layout.size_bytes
    return view_packed_layer(packed.layout, rest[:size_bytes].copy_(packed.buffer)), rest[size_bytes:]


def trizone_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def make(inputs: _Inputs, slot: int, keys: Tensor, values: Tensor) -> PackedRows:
        packed, _ = _packed(inputs, slot)
        return PackedRows(keys=keys, values=values, length=LENGTHS[slot], packed=packed)

    name = "packed prompts and new rows"
    yield from _decode_cases("trizone", shape, TriZoneBatch, make, name, reads_codes=True)


def packed_hsa_cases(shape: BatchShape) -> Iterator[OpCheck]:
    """Yield the cases of packed HSA; it has only C code."""
    page_size, num_pages = 3, CAPACITY // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def make(inputs: _Inputs, slot: int, keys: Tensor, values: Tensor) -> SparsePackedRows:
        packed, rest = _packed(inputs, slot)
        size = (2, shape.num_kv_heads, shape.head_dim)
        ranges, codes, _ = rest.tensor_split((4 * math.prod(size), (4 + num_pages) * math.prod(size)))
        ranges = ranges.view(torch.float32).view(size)
        pages = PageCodes(*codes.view(*size, num_pages).mT, *ranges)
        packed_hsa.page_extremes(packed, pages, page_size=page_size)
        # no new row, one and two before the first step
        for row in range(slot):
            packed_hsa.append_key(packed, pages, keys[:, row], num_new=row, page_size=page_size)
        return SparsePackedRows(
            keys=keys,
            values=values,
            length=slot,
            packed=packed,
            pages=pages,
            page_size=page_size,
            num_channels=shape.head_dim // 2,
            # all of the second slot's tokens
            num_tokens=CAPACITY if slot == 1 else LENGTHS[slot] // 3,
        )

    name = "pages of packed prompts and new rows"
    yield from _decode_cases("packed_hsa", shape, PackedHsaBatch, make, name, reads_codes=True)


def kivi_cases(shape: BatchShape) -> Iterator[OpCheck]:
    # the widths at which a token has whole words; 8 bits always do
    widths = [bits for bits in WIDTHS if shape.head_dim * bits % WORD_BITS == 0]

    def make(inputs: _Inputs, slot: int, keys: Tensor, values: Tensor) -> QuantisedRows:
        size, generator = (2, *keys[:, : LENGTHS[slot]].shape), torch.Generator().manual_seed(slot)
        prompt_keys, prompt_values = torch.randn(*size, generator=generator).to(shape.device, shape.dtype)
        quantised = kivi_quantise(prompt_keys, prompt_values, widths[slot % len(widths)])
        rest, parts = inputs.rest(slot).view(torch.uint8), dict[str, Any]()
        for name in ("codes", "scales", "keys", "values"):
            of_prompt = getattr(quantised, name)
            size_bytes = of_prompt.nbytes
            parts[name] = rest[:size_bytes].view(of_prompt.dtype).view(of_prompt.shape).copy_(of_prompt)
            rest = rest[-(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]
        # no new row, one and two before the first step
        return QuantisedRows(keys=keys, values=values, length=slot, quantised=replace(quantised, **parts))

    name = "quantised prompts of each width and new rows"
    yield from _decode_cases("kivi", shape, KiviBatch, make, name, reads_codes=True)


def decoder_cases(shape: BatchShape) -> Iterator[OpCheck]:
    kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    heads = kv_heads * shape.group_size

    def run(name: str, *, launched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(23)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(shape.device, shape.dtype)

        # laid out as by a product of weights that are adjacent in memory
        units = [num_heads * head_dim for num_heads in (heads, kv_heads, kv_heads)]
        queries, keys, values = torch.split(random(3, sum(units)), units, dim=1)
        cos, sin = random(2, 3, head_dim)
        weights = torch.rand(3, VOCABULARY, generator=generator, dtype=torch.float64).to(shape.device).pow(9)
        hidden, residual = random(2, *queries.shape)
        norms = (random(head_dim), random(head_dim), 1e-5)
        op, *arguments = {
            "add_norm": ("add_norm", hidden, residual, hidden[0], 1e-5),
            "nucleus": ("nucleus", weights, 0.7 * weights.sum(1, keepdim=True)),
            "silu_product": ("silu_product", *random(3, 2 * units[0]).chunk(2, dim=1)),
            "rotate": ("rotate", queries, keys, values, cos, sin, None),
            "rotate after norms": ("rotate", queries, keys, values, cos, sin, norms),
        }[name]
        in_torch = partial(getattr(decoder_ops, f"{op}_torch"), *arguments)
        results: Any = launch(f"decoder_ops.triton_kernel.{op}", in_torch) if launched else in_torch()
        if op == "nucleus":
            results = torch.where(weights >= results, weights, 0.0)
        return torch.cat(
            [result.flatten(1) for result in ([results] if isinstance(results, Tensor) else results)], 1
        ).float()

    for name in ("add_norm", "rotate", "rotate after norms", "silu_product", "nucleus"):
        yield OpCheck(
            op="decoder_ops",
            name=name,
            launch=partial(run, name, launched=True),
            expected=partial(run, name, launched=False),
            tolerance=TOLERANCES[shape.dtype],
        )
