"""The self-test's cases: every Triton kernel at a model's shapes against the same op in torch.

A case is small: three sequences or a few hundred tokens, at odd lengths, once as they are and once with NaN
in one sequence (or head), whose neighbours must not notice. Inputs are made anew for each side from one seed,
because decode attention writes rows. Nothing here counts calls, falls back or quarantines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels import decoder_ops, hsa
from kvferry.kernels.chunk_scores import chunk_scores_torch, shared_chunk_scores_torch
from kvferry.kernels.column_sums import column_sums_torch
from kvferry.kernels.decode_batch import BatchShape, CachedRows, NewTokens, SlotBatch, WindowRows
from kvferry.kernels.dense_decode.batch import DenseBatch, WindowBatch
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.kernels.dispatch import shape_problem
from kvferry.kernels.hsa.batch import HsaBatch, SparseRows
from kvferry.kernels.kivi.batch import KiviBatch, QuantisedRows
from kvferry.kernels.kivi.rows import WORD_BITS, kivi_quantise
from kvferry.kernels.knapsack import take_increments_torch
from kvferry.kernels.packed.check import BAD_POSITIONS, BAD_SCALES
from kvferry.kernels.packed.layer import view_packed_layer
from kvferry.kernels.packed.layout import packed_bound
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer
from kvferry.kernels.quantise import WIDTHS
from kvferry.kernels.quarantine import Reason
from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.kernels.trizone.batch import PackedRows, TriZoneBatch

SPOILT = 1
"""The slot, or head, with NaN."""
LENGTHS = (36, 131, 333)
"""Rows before the first step, by slot: no multiple of a tile, and of a page of four in one slot only."""
CAPACITY = 400
PROMPT_TOKENS, LATER_TURN, WINDOW, CHUNK = 333, 77, 31, 96
VOCABULARY = 700
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Norm of the difference, relative to the reference's. Torch rounds probabilities to the rows' dtype."""
_HSA_SIZES = ((1, 25), (4, 17))
"""Page size, and tokens chosen: the newest, and whole pages."""


@dataclass(frozen=True, kw_only=True)
class OpCheck:
    """One case. Both functions return float32 `[parts, n]`; a part is a sequence or a head.

    Attributes:
        launch: runs the kernel on inputs of its own.
        expected: the same in torch.
        spoilt: a part that is not compared.
    """

    op: str
    name: str
    launch: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    tolerance: float
    spoilt: int | None = None

    def problem(self, result: Tensor) -> tuple[Reason, str] | None:
        """Why a result of `launch` is wrong, None if it is right."""
        expected = self.expected()
        parts = [part for part in range(len(expected)) if part != self.spoilt]
        result, expected = result[parts], expected[parts]
        if not bool(result.isfinite().all()):
            count = int((~result.isfinite()).sum())
            return "nan", f"{self.name}: {count} of {result.numel()} values are not finite"
        error = (result - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-6)
        if float(error.max()) > self.tolerance:
            worst = f"{float(error.max()):.2e} relative to torch, allowed {self.tolerance:.0e}"
            return "wrong_result", f"{self.name}: the error is {worst}"
        return None


def op_checks(op: str, shape: BatchShape) -> Iterator[OpCheck]:
    """The cases of one op; none if it has no kernel for this shape.

    Args: shape: of the model; its layers and slots do not matter.
    """
    if op in _CASES and shape_problem(shape.dtype, shape.group_size, shape.head_dim, shape.device) is None:
        yield from _CASES[op](shape)


# ---- decode ----------------------------------------------------------------------------------------------


class _Inputs:
    """Three sequences of one layer in an arena, and the tokens of two steps."""

    def __init__(self, shape: BatchShape, *, has_nan: bool) -> None:
        self.shape = BatchShape(
            num_layers=1,
            num_slots=len(LENGTHS),
            num_kv_heads=shape.num_kv_heads,
            group_size=shape.group_size,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=shape.device,
        )
        self._generator = torch.Generator().manual_seed(7)
        heads, head_dim, slots = shape.num_kv_heads, shape.head_dim, len(LENGTHS)
        # K, V, both extremes of K's pages, and room for packed bytes
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
        self.has_nan = has_nan
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
        """The part of a slot's memory behind K and V."""
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
        """Two steps' outputs and what they wrote, by slot."""
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
            torch.stack([its.keys, its.values])[:, :, its.length : its.length + 2].flatten().float()
            for its in rows.values()
        ]
        return torch.cat([*outputs, torch.stack(written)], dim=1)


def _decode_cases(
    op: str,
    shape: BatchShape,
    make: Callable[[_Inputs], tuple[SlotBatch[Any, Any], dict[int, Any]]],
    name: str,
    *,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> Iterator[OpCheck]:
    for has_nan in (False, True):

        def run(has_nan: bool, *, launched: bool) -> Tensor:
            inputs = _Inputs(shape, has_nan=has_nan)
            made = make(inputs)
            return inputs.outputs(*made, launched=launched, softcap=softcap, has_sinks=has_sinks)

        yield OpCheck(
            op=op,
            name=f"{name}, one sequence with NaN" if has_nan else name,
            launch=partial(run, has_nan, launched=True),
            expected=partial(run, has_nan, launched=False),
            tolerance=max(TOLERANCES[shape.dtype], 5e-3 if op == "trizone" else 0.0),
            spoilt=SPOILT if has_nan else None,
        )


def _dense_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def make(inputs: _Inputs) -> tuple[DenseBatch, dict[int, CachedRows]]:
        rows = {}
        for slot, length in enumerate(LENGTHS):
            keys, values = inputs.keys_values(slot)
            rows[slot] = CachedRows(keys=keys, values=values, length=length)
        return DenseBatch(inputs.shape, inputs.arena.view(-1)), rows

    def make_windows(inputs: _Inputs) -> tuple[WindowBatch, dict[int, WindowRows]]:
        # all rows, a window that slides, and a chunk that the second step begins
        windows = (CAPACITY, None), (57, None), (57, 57 * 6 - 1 - LENGTHS[2])
        rows = {}
        for slot, (window, before) in enumerate(windows):
            keys, values = inputs.keys_values(slot)
            rows[slot] = WindowRows(
                keys=keys, values=values, length=LENGTHS[slot], window=window, rows_before=before
            )
        return WindowBatch(inputs.shape, inputs.arena.view(-1)), rows

    for name, softmax in _softmaxes(shape):
        yield from _decode_cases("dense_decode", shape, make, f"rows of any lengths{name}", **softmax)
        if shape.has_windows:
            yield from _decode_cases("dense_decode", shape, make_windows, f"windows{name}", **softmax)


def _softmaxes(shape: BatchShape) -> list[tuple[str, dict[str, Any]]]:
    """What a model may have, for names and for `_decode_cases`."""
    if shape.has_plain_softmax:
        return [("", {})]
    return [(", capped", {"softcap": 2.0}), (", sinks", {"has_sinks": True})]


def _hsa_cases(shape: BatchShape) -> Iterator[OpCheck]:
    for page_size, num_tokens in _HSA_SIZES:

        def make(
            inputs: _Inputs, page_size: int = page_size, num_tokens: int = num_tokens
        ) -> tuple[HsaBatch, dict[int, SparseRows]]:
            rows = {}
            heads, head_dim, pages = shape.num_kv_heads, shape.head_dim, -(-CAPACITY // page_size)
            # a channel's pages start at a multiple of so many
            aligned = ALIGNMENT_BYTES // inputs.arena.element_size()
            stride = -(-pages // aligned) * aligned
            for slot, length in enumerate(LENGTHS):
                keys, values = inputs.keys_values(slot)
                page_max = page_min = keys
                if page_size > 1:
                    size = 2 * heads * head_dim * stride
                    extremes = inputs.rest(slot)[:size].view(2, heads, head_dim, stride)
                    page_max, page_min = extremes[..., :pages].mT
                    hsa.page_extremes(keys, page_max, page_min, length=length, page_size=page_size)
                rows[slot] = SparseRows(
                    keys=keys,
                    values=values,
                    length=length,
                    page_max=page_max,
                    page_min=page_min,
                    page_size=page_size,
                    num_channels=head_dim // 2,
                    # the third slot's are all
                    num_tokens=num_tokens if slot < 2 else CAPACITY,
                )
            return HsaBatch(inputs.shape, inputs.arena.view(-1)), rows

        for name, softmax in _softmaxes(shape):
            yield from _decode_cases("hsa", shape, make, f"pages of {page_size}{name}", **softmax)


def _trizone_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def make(inputs: _Inputs) -> tuple[TriZoneBatch, dict[int, PackedRows]]:
        rows = {}
        for slot, length in enumerate(LENGTHS):
            keys, values = inputs.keys_values(slot)
            prompt = torch.randn(2, *keys[:, :length].shape, generator=torch.Generator().manual_seed(slot))
            prompt_keys, prompt_values = prompt.to(shape.device)
            packed = indexed_layer(prompt_keys, prompt_values, *_bits(shape, length))
            fill_in_torch(packed, prompt_keys, prompt_values)
            buffer = inputs.rest(slot).view(torch.uint8)[: packed.layout.size_bytes]
            buffer.copy_(packed.buffer)
            packed = view_packed_layer(packed.layout, buffer)
            rows[slot] = PackedRows(keys=keys, values=values, length=length, packed=packed)
        arena = inputs.arena.view(-1)
        return TriZoneBatch(inputs.shape, arena, arena.view(torch.uint8)), rows

    yield from _decode_cases("trizone", shape, make, "packed prompts and new rows")


def _kivi_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def make(inputs: _Inputs) -> tuple[KiviBatch, dict[int, QuantisedRows]]:
        # of the widths with whole words a token; 8 bits always have them
        widths = [bits for bits in WIDTHS if shape.head_dim * bits % WORD_BITS == 0]
        rows = {}
        for slot, length in enumerate(LENGTHS):
            bits = widths[slot % len(widths)]
            keys, values = inputs.keys_values(slot)
            prompt = torch.randn(2, *keys[:, :length].shape, generator=torch.Generator().manual_seed(slot))
            prompt_keys, prompt_values = prompt.to(shape.device, shape.dtype)
            quantised = kivi_quantise(prompt_keys, prompt_values, bits)
            rest, parts = inputs.rest(slot).view(torch.uint8), dict[str, Any]()
            for name in ("codes", "scales", "keys", "values"):
                of_prompt = getattr(quantised, name)
                size = of_prompt.numel() * of_prompt.element_size()
                parts[name] = rest[:size].view(of_prompt.dtype).view(of_prompt.shape).copy_(of_prompt)
                rest = rest[-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]
            # no new row, one and two before the first step
            rows[slot] = QuantisedRows(
                keys=keys, values=values, length=slot, quantised=replace(quantised, **parts)
            )
        arena = inputs.arena.view(-1)
        return KiviBatch(inputs.shape, arena, arena.view(torch.uint8)), rows

    yield from _decode_cases("kivi", shape, make, "quantised prompts of each width and new rows")


def _bits(shape: BatchShape, length: int) -> tuple[Tensor, Tensor]:
    """Widths of channels and tokens, different from head to head."""
    generator = torch.Generator().manual_seed(length)
    widths = torch.tensor([0, 2, 2, 4, 4, 8, 16], dtype=torch.uint8)
    channels, tokens = (
        widths[torch.randint(len(widths), (shape.num_kv_heads, count), generator=generator)]
        for count in (shape.head_dim, length)
    )
    return channels.to(shape.device), tokens.to(shape.device)


def _decoder_cases(shape: BatchShape) -> Iterator[OpCheck]:
    kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    heads = kv_heads * shape.group_size

    def run(name: str, *, launched: bool) -> Tensor:
        ops: Any = decoder_ops
        if launched:
            # a CPU install has no Triton
            from kvferry.kernels.decoder_ops import triton_kernel

            ops = triton_kernel
        generator = torch.Generator().manual_seed(23)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(shape.device, shape.dtype)

        suffix = "" if launched else "_torch"
        # as products of weights that lie side by side give them
        units = [its * head_dim for its in (heads, kv_heads, kv_heads)]
        queries, keys, values = torch.split(random(3, sum(units)), units, dim=1)
        cos, sin = random(2, 3, head_dim)
        if name == "add_norm":
            hidden, residual = random(2, *queries.shape)
            results = getattr(ops, name + suffix)(hidden, residual, hidden[0], 1e-5)
        elif name == "nucleus":
            weights = torch.rand(3, VOCABULARY, generator=generator, dtype=torch.float64).to(shape.device)
            weights = weights.pow(9)
            least = getattr(ops, name + suffix)(weights, 0.7 * weights.sum(1, keepdim=True))
            results = (torch.where(weights >= least, weights, 0.0),)
        elif name == "silu_product":
            results = (getattr(ops, name + suffix)(*random(3, 2 * units[0]).chunk(2, dim=1)),)
        else:
            norms = (random(head_dim), random(head_dim), 1e-5) if name == "rotate after norms" else None
            results = getattr(ops, "rotate" + suffix)(queries, keys, values, cos, sin, norms)
        return torch.cat([its.flatten(1) for its in results], 1).float()

    for name in ("add_norm", "rotate", "rotate after norms", "silu_product", "nucleus"):
        yield OpCheck(
            op="decoder_ops",
            name=name,
            launch=partial(run, name, launched=True),
            expected=partial(run, name, launched=False),
            tolerance=TOLERANCES[shape.dtype],
        )


# ---- prefill ---------------------------------------------------------------------------------------------


def _prompt(shape: BatchShape, num_queries: int, *, has_nan: bool = False) -> tuple[Tensor, Tensor]:
    """Queries `[H_kv, G, num_queries, D]` and keys `[H_kv, T, D]`."""
    generator = torch.Generator().manual_seed(11)
    size = (shape.num_kv_heads, shape.group_size, num_queries, shape.head_dim)
    queries = torch.randn(*size, generator=generator)
    keys = torch.randn(shape.num_kv_heads, PROMPT_TOKENS, shape.head_dim, generator=generator)
    if has_nan:
        keys[SPOILT, 17, 3] = torch.nan
    return queries.to(shape.device, shape.dtype), keys.to(shape.device, shape.dtype)


def _scores_cases(
    op: str,
    shape: BatchShape,
    name: str,
    num_queries: int,
    launch: Callable[[Tensor, Tensor, float], Tensor],
    expected: Callable[[Tensor, Tensor, float], Tensor],
) -> Iterator[OpCheck]:
    for has_nan in (False, True) if shape.num_kv_heads > SPOILT else (False,):
        inputs = partial(_prompt, shape, num_queries, has_nan=has_nan)

        def run(side: Callable[[Tensor, Tensor, float], Tensor], inputs: Any = inputs) -> Tensor:
            queries, keys = inputs()
            return side(queries, keys, shape.head_dim**-0.5).flatten(1).float()

        yield OpCheck(
            op=op,
            name=f"{name}, one head with NaN" if has_nan else name,
            launch=partial(run, launch),
            expected=partial(run, expected),
            tolerance=TOLERANCES[shape.dtype],
            spoilt=SPOILT if has_nan else None,
        )


def _mass(queries: Tensor, keys: Tensor, scaling: float, *, per_query_head: bool) -> Tensor:
    # a CPU install has no Triton
    from kvferry.kernels.attention_mass import attention_mass

    sums: Tensor = attention_mass(queries, keys, scaling=scaling, per_query_head=per_query_head)
    return sums.sum(1) if per_query_head else sums


def _sums_in_torch(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    return column_sums_torch(queries, keys, scaling).sums


def _window_cases(shape: BatchShape) -> Iterator[OpCheck]:
    launch = partial(_mass, per_query_head=False)
    yield from _scores_cases("window_scores", shape, "a window", WINDOW, launch, _sums_in_torch)


def _column_cases(shape: BatchShape) -> Iterator[OpCheck]:
    launch = partial(_mass, per_query_head=True)
    for name, num_queries in (("a first turn", PROMPT_TOKENS), ("a later turn", LATER_TURN)):
        yield from _scores_cases("column_sums", shape, name, num_queries, launch, _sums_in_torch)


def _chunk_cases(shape: BatchShape) -> Iterator[OpCheck]:
    for shared, num_queries in ((False, PROMPT_TOKENS), (True, WINDOW)):

        def launch(queries: Tensor, keys: Tensor, scaling: float, shared: bool = shared) -> Tensor:
            # a CPU install has no Triton
            from kvferry.kernels.chunk_scores import triton_kernel

            scores: Tensor = triton_kernel.chunk_scores(
                queries, keys, chunk_tokens=CHUNK, scaling=scaling, shared=shared
            )
            return scores

        def expected(queries: Tensor, keys: Tensor, scaling: float, shared: bool = shared) -> Tensor:
            in_torch = shared_chunk_scores_torch if shared else chunk_scores_torch
            return in_torch(queries, keys, CHUNK, scaling)

        name = "shared queries" if shared else "chunks"
        yield from _scores_cases("chunk_scores", shape, name, num_queries, launch, expected)


def _pack_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def run(*, launched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(13)
        size = (shape.num_kv_heads, PROMPT_TOKENS, shape.head_dim)
        keys, values = torch.randn(2, *size, generator=generator).to(shape.device, shape.dtype)
        bits = _bits(shape, PROMPT_TOKENS)
        bound = packed_bound(
            num_tokens=PROMPT_TOKENS,
            budget_tokens=PROMPT_TOKENS,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        if launched:
            # a CPU install has no Triton
            from kvferry.kernels.packed import triton_kernel

            _, buffer = triton_kernel.pack(keys, values, *bits, None, bound)
        else:
            packed = indexed_layer(keys, values, *bits)
            fill_in_torch(packed, keys, values)
            buffer = torch.zeros(bound.size_bytes, dtype=torch.uint8, device=keys.device)
            buffer[: packed.layout.size_bytes] = packed.buffer
        return buffer[None].float()

    yield OpCheck(
        op="pack",
        name="a prompt, byte by byte",
        launch=partial(run, launched=True),
        expected=partial(run, launched=False),
        tolerance=0.0,
    )


def _knapsack_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def run(*, launched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(17)
        weights = torch.rand(shape.num_kv_heads, PROMPT_TOKENS, dtype=torch.float64, generator=generator)
        # some weigh nothing, some the same
        weights = ((weights - 0.2).clamp(min=0) * 50).floor()
        gains = weights[:, None] * torch.tensor([3.0, 1.0, 0.25], dtype=torch.float64)[:, None]
        gained, order = gains.flatten(1).sort(dim=1, descending=True, stable=True)
        budgets = torch.arange(shape.num_kv_heads) * 701 % 3000
        device, steps = shape.device, torch.tensor([2, 2, 12])
        arguments = order.to(device), gained.to(device), steps.to(device), budgets.to(device)
        if launched:
            # a CPU install has no Triton
            from kvferry.kernels.knapsack import triton_kernel

            return triton_kernel.take_increments(*arguments, PROMPT_TOKENS).float()
        return take_increments_torch(*arguments, PROMPT_TOKENS).float()

    yield OpCheck(
        op="knapsack",
        name="bits of a prompt's tokens",
        launch=partial(run, launched=True),
        expected=partial(run, launched=False),
        tolerance=0.0,
    )


def _packed_check_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def run(*, launched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(19)
        size = (shape.num_kv_heads, PROMPT_TOKENS, shape.head_dim)
        keys, values = torch.randn(2, *size, generator=generator).to(shape.device, shape.dtype)
        packed = indexed_layer(keys, values, *_bits(shape, PROMPT_TOKENS))
        fill_in_torch(packed, keys, values)
        expected = torch.zeros(2, shape.num_kv_heads, device=shape.device)
        # faults in the last head, which the second result has
        head = packed.heads[-1]
        found = []
        for spoilt in (False, True):
            if spoilt:
                head.positions[-1] = head.positions[-2]
                head.value_minima[0] = torch.inf
                expected[1, -1] = BAD_POSITIONS | BAD_SCALES
            if launched:
                # a CPU install has no Triton
                from kvferry.kernels.packed import check_kernel

                its = check_kernel.begin(packed, PROMPT_TOKENS).cpu()
                found.append(check_kernel.faults(its)[:, 0].float())
        result = torch.stack(found).to(shape.device) if launched else expected
        return result.view(1, -1)

    yield OpCheck(
        op="packed_check",
        name="a packed prompt with and without faults",
        launch=partial(run, launched=True),
        expected=partial(run, launched=False),
        tolerance=0.0,
    )


_CASES: dict[str, Callable[[BatchShape], Iterator[OpCheck]]] = {
    "chunk_scores": _chunk_cases,
    "column_sums": _column_cases,
    "decoder_ops": _decoder_cases,
    "dense_decode": _dense_cases,
    "hsa": _hsa_cases,
    "kivi": _kivi_cases,
    "knapsack": _knapsack_cases,
    "pack": _pack_cases,
    "packed_check": _packed_check_cases,
    "trizone": _trizone_cases,
    "window_scores": _window_cases,
}
