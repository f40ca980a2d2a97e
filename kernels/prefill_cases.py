"""Cases of prefill's kernels and of packing: a few hundred tokens (`cases.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvferry.kernels import chunk_scores
from kvferry.kernels.case import SPOILT, TOLERANCES, OpCheck, bits_of
from kvferry.kernels.column_sums import column_sums_torch
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.dispatch import launch
from kvferry.kernels.knapsack import take_increments_torch
from kvferry.kernels.packed.check import BAD_POSITIONS, BAD_SCALES
from kvferry.kernels.packed.layout import packed_bound
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer

PROMPT_TOKENS, LATER_TURN, WINDOW, CHUNK = 333, 77, 31, 96


def _prompt(shape: BatchShape, num_queries: int, *, has_nan: bool = False) -> tuple[Tensor, Tensor]:
    """Make queries `[H_kv, G, num_queries, D]` and keys `[H_kv, T, D]`."""
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
    launched: Callable[..., Tensor],
    expected: Callable[..., Tensor],
) -> Iterator[OpCheck]:
    for has_nan in (False, True) if shape.num_kv_heads > SPOILT else (False,):
        inputs = partial(_prompt, shape, num_queries, has_nan=has_nan)

        def run(side: Callable[..., Tensor], inputs: Any = inputs) -> Tensor:
            return side(*inputs(), scaling=shape.head_dim**-0.5).flatten(1).float()

        yield OpCheck(
            op=op,
            name=f"{name}, one head with NaN" if has_nan else name,
            launch=partial(run, launched),
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


def window_cases(shape: BatchShape) -> Iterator[OpCheck]:
    launched = partial(_mass, per_query_head=False)
    yield from _scores_cases("window_scores", shape, "a window", WINDOW, launched, _sums_in_torch)


def column_cases(shape: BatchShape) -> Iterator[OpCheck]:
    launched = partial(_mass, per_query_head=True)
    for name, num_queries in (("a first turn", PROMPT_TOKENS), ("a later turn", LATER_TURN)):
        yield from _scores_cases("column_sums", shape, name, num_queries, launched, _sums_in_torch)


def chunk_cases(
    shape: BatchShape, function: str = "chunk_scores.triton_kernel.chunk_scores"
) -> Iterator[OpCheck]:
    """Yield the cases. Args: function: as of `dispatch.launch`."""

    def launched(queries: Tensor, keys: Tensor, **sizes: Any) -> Tensor:
        return launch(function, partial(chunk_scores.in_torch, queries, keys, **sizes))

    for name, shared, num_queries in (("chunks", False, PROMPT_TOKENS), ("shared queries", True, WINDOW)):
        sizes: dict[str, Any] = {"chunk_tokens": CHUNK, "shared": shared}
        sides = partial(launched, **sizes), partial(chunk_scores.in_torch, **sizes)
        yield from _scores_cases("chunk_scores", shape, name, num_queries, *sides)


def _exact(op: str, name: str, run: Callable[..., Tensor]) -> OpCheck:
    """Make a case whose two sides must be equal. Args: run: the kernel if `launched`, else torch."""
    sides = partial(run, launched=True), partial(run, launched=False)
    return OpCheck(op=op, name=name, launch=sides[0], expected=sides[1], tolerance=0.0)


def pack_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def run(*, launched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(13)
        size = (shape.num_kv_heads, PROMPT_TOKENS, shape.head_dim)
        keys, values = torch.randn(2, *size, generator=generator).to(shape.device, shape.dtype)
        bits = bits_of(shape, PROMPT_TOKENS)
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

    yield _exact("pack", "a prompt, byte by byte", run)


def knapsack_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def run(*, launched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(17)
        weights = torch.rand(shape.num_kv_heads, PROMPT_TOKENS, dtype=torch.float64, generator=generator)
        # some weigh nothing, some the same
        weights = ((weights - 0.2).clamp(min=0) * 50).floor()
        gains = weights[:, None] * torch.tensor([3.0, 1.0, 0.25], dtype=torch.float64)[:, None]
        gained, order = gains.flatten(1).sort(dim=1, descending=True, stable=True)
        budgets = torch.arange(shape.num_kv_heads) * 701 % 3000
        device = shape.device
        arguments = order.to(device), gained.to(device), (2, 2, 12), budgets.to(device)
        in_torch = partial(take_increments_torch, *arguments, PROMPT_TOKENS)
        return (
            launch("knapsack.triton_kernel.take_increments", in_torch) if launched else in_torch()
        ).float()

    yield _exact("knapsack", "bits of a prompt's tokens", run)


def packed_check_cases(shape: BatchShape) -> Iterator[OpCheck]:
    def run(*, launched: bool) -> Tensor:
        generator = torch.Generator().manual_seed(19)
        size = (shape.num_kv_heads, PROMPT_TOKENS, shape.head_dim)
        keys, values = torch.randn(2, *size, generator=generator).to(shape.device, shape.dtype)
        packed = indexed_layer(keys, values, *bits_of(shape, PROMPT_TOKENS))
        fill_in_torch(packed, keys, values)
        expected = torch.zeros(2, shape.num_kv_heads, device=shape.device)
        # the second result has faults in the last head
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

                report = check_kernel.begin(packed, PROMPT_TOKENS).cpu()
                found.append(check_kernel.faults(report).float())
        result = torch.stack(found).to(shape.device) if launched else expected
        return result.view(1, -1)

    yield _exact("packed_check", "a packed prompt with and without faults", run)
