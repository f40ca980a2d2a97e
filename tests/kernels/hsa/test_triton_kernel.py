"""The Triton kernels in the interpreter against the reference: append, select, attend."""

from __future__ import annotations

import pytest
import torch
from kvtest.reference import sparse as reference
from torch import Tensor

from kvferry.kernels import hsa
from kvferry.kernels.hsa import triton_kernel
from kvferry.kernels.hsa.batch import FIELDS, HsaScratch, SparseSize


def channel_major(num_kv_heads: int, num_pages: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Poisoned page extremes that lie channel by channel, padded so that channels are aligned."""
    padded = torch.full((num_kv_heads, head_dim, -(-num_pages // 8) * 8), torch.nan, dtype=dtype)
    return padded[:, :, :num_pages].mT


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("dtype", "group_size", "length", "head_dim", "page_size", "num_channels", "num_tokens"),
    [
        (torch.float32, 4, 301, 64, 3, 20, 50),
        (torch.float16, 16, 150, 96, 4, 48, 33),
        (torch.bfloat16, 1, 40, 128, 2, 64, 64),
        (torch.float32, 2, 300, 32, 1, 7, 9),
        (torch.float32, 2, 1, 64, 4, 8, 1),
        (torch.float32, 3, 13, 64, 4, 64, 1),
        (torch.float16, 16, 37, 256, 1, 256, 11),
        (torch.bfloat16, 7, 29, 256, 4, 130, 29),
    ],
)
def test_attention_equals_the_reference(
    dtype: torch.dtype,
    group_size: int,
    length: int,
    head_dim: int,
    page_size: int,
    num_channels: int,
    num_tokens: int,
) -> None:
    generator = torch.Generator().manual_seed(length)
    queries = torch.randn(2, group_size, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, length + 5, head_dim, generator=generator).to(dtype)
    keys[:, length:] = values[:, length:] = torch.nan
    num_pages = hsa.num_pages(length + 5, page_size)
    page_max, page_min = keys, keys
    if page_size > 1:
        page_max, page_min = (channel_major(2, num_pages, head_dim, dtype) for _ in range(2))
        hsa.page_extremes(keys, page_max, page_min, length=length, page_size=page_size)
    result = hsa.attend(
        queries,
        keys,
        values,
        page_max,
        page_min,
        length=length,
        page_size=page_size,
        num_channels=num_channels,
        num_tokens=num_tokens,
        scaling=head_dim**-0.5,
    )
    used = hsa.num_pages(length, page_size)
    expected = reference.hsa_attend(
        queries.float(),
        keys[:, :length].float(),
        values[:, :length].float(),
        page_max[:, :used].float(),
        page_min[:, :used].float(),
        page_size=page_size,
        num_channels=num_channels,
        num_tokens=num_tokens,
        scaling=head_dim**-0.5,
    )
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (result.float() - expected).norm() < tolerance * expected.norm()


def test_a_batch_of_other_sizes_appends_selects_and_attends_in_one_go() -> None:
    """Other lengths, page sizes and budgets; one starts a page with its new row, one is empty, one's keys are
    its pages' extremes."""
    head_dim, group_size, capacity = 32, 2, 72
    sizes = [(61, 4, 10, 9), (16, 5, 32, 40), (0, 1, 1, 1), (1, 2, 3, 2), (50, 1, 12, 8)]  # length, P, k1, k2
    generator = torch.Generator().manual_seed(3)
    arena = torch.full((len(sizes), 6 * capacity * head_dim), torch.nan)
    queries = torch.randn(len(sizes), 1, group_size, head_dim, generator=generator)
    new = torch.randn(2, len(sizes), 1, head_dim, generator=generator)
    table, caches = [], []
    for sequence, (length, page_size, num_channels, num_tokens) in enumerate(sizes):
        keys, values = arena[sequence, : 2 * capacity * head_dim].view(2, 1, capacity, head_dim)
        page_max, page_min = (
            arena[sequence, (2 + 2 * i) * capacity * head_dim :][: capacity * head_dim]
            .view(1, head_dim, capacity)
            .mT
            for i in range(2)
        )
        num_pages = hsa.num_pages(capacity, page_size)
        page_max, page_min = page_max[:, :num_pages], page_min[:, :num_pages]
        if page_size == 1:
            page_max = page_min = keys
        if length > 1:
            keys[:, : length - 1] = torch.randn(length - 1, head_dim, generator=generator)
            values[:, : length - 1] = torch.randn(length - 1, head_dim, generator=generator)
            if page_size > 1:
                hsa.page_extremes(keys, page_max, page_min, length=length - 1, page_size=page_size)
        places = [tensor.storage_offset() for tensor in (keys, values)]
        extremes = [tensor.storage_offset() for tensor in (page_max, page_min)]
        apart = page_max.stride(2)
        table.append([*places, length, *extremes, apart, page_size, num_channels, num_tokens])
        caches.append((keys, values, page_max, page_min))
    assert len(table[0]) == FIELDS
    output = torch.full_like(queries, torch.nan)
    size = SparseSize(
        max_pages=capacity, max_tokens=capacity, max_channels=32, pages_of_one=True, larger_pages=True
    )
    scratch = HsaScratch.of(size, output)
    assert scratch.num_splits == 2
    scratch.scores.fill_(torch.nan)
    scratch.partial.fill_(torch.nan)
    triton_kernel.append_and_attend_batch(
        queries,
        arena.view(-1),
        torch.tensor(table),
        scratch,
        scaling=0.2,
        output=output,
        new_keys=new[0],
        new_values=new[1],
    )
    assert not output[2].any()
    for sequence, (length, page_size, num_channels, num_tokens) in enumerate(sizes):
        if length == 0:
            continue
        keys, values, page_max, page_min = caches[sequence]
        torch.testing.assert_close(keys[:, length - 1], new[0, sequence])
        torch.testing.assert_close(values[:, length - 1], new[1, sequence])
        expected_max, expected_min = reference.page_extremes(keys[:, :length], page_size=page_size)
        used = expected_max.shape[1]
        torch.testing.assert_close(page_max[:, :used], expected_max)
        torch.testing.assert_close(page_min[:, :used], expected_min)
        expected = reference.hsa_attend(
            queries[sequence],
            keys[:, :length],
            values[:, :length],
            expected_max,
            expected_min,
            page_size=page_size,
            num_channels=num_channels,
            num_tokens=num_tokens,
            scaling=0.2,
        )
        torch.testing.assert_close(output[sequence], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("interpreter")
def test_equal_scores_are_won_by_the_lowest_index() -> None:
    """All keys alike, so every page scores the same: the first tokens and the newest are attended."""
    queries, keys = torch.ones(1, 2, 16), torch.ones(1, 30, 16)
    values = torch.arange(30.0)[None, :, None].expand(1, 30, 16).contiguous()
    page_max, page_min = torch.ones(2, 1, 16, 12).mT[:, :, :10]
    result = hsa.attend(
        queries, keys, values, page_max, page_min,
        length=30, page_size=3, num_channels=4, num_tokens=6, scaling=1.0,
    )  # fmt: skip
    torch.testing.assert_close(result, torch.full_like(result, (0 + 1 + 2 + 3 + 4 + 29) / 6))
