"""The Triton kernels in the interpreter against the reference: append, select, attend."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize(
    ("num_channels", "length", "is_folded"), [(32, 601, False), (9, 600, True), (9, 512, False)]
)
def test_the_newest_page_is_scored_with_a_key_that_memory_may_lack(
    num_channels: int, length: int, is_folded: bool
) -> None:
    """Several programs a head; another one may have folded the key into its page by then."""
    head_dim, group_size, page_size, padded = 32, 3, 2, 304
    generator = torch.Generator().manual_seed(length)
    queries = torch.randn(1, 1, group_size, head_dim, generator=generator)
    keys = torch.randn(1, length, head_dim, generator=generator)
    arena = torch.full((2 * (length * head_dim + head_dim * padded),), torch.nan)
    rows = arena[: 2 * length * head_dim].view(2, 1, length, head_dim)
    rows[0, :, :-1] = keys[:, :-1]
    rows[1, :, :-1] = 0.0
    extremes = arena[2 * length * head_dim :].view(2, 1, head_dim, padded).mT
    num_pages = hsa.num_pages(length, page_size)
    written = length if is_folded else length - 1
    hsa.page_extremes(
        keys, extremes[0][:, :num_pages], extremes[1][:, :num_pages], length=written, page_size=page_size
    )
    places = [each.storage_offset() for each in (*rows, *extremes)]
    table = [[*places[:2], length, *places[2:], padded, page_size, num_channels, 16]]
    size = SparseSize(
        max_pages=512, max_tokens=16, max_channels=num_channels, pages_of_one=False, larger_pages=True
    )
    scratch = HsaScratch.of(size, torch.empty(1, group_size, head_dim))
    triton_kernel.score_pages(
        queries, arena, torch.tensor(table), scratch, scaling=0.3, new_keys=keys[None, :, -1].contiguous(),
        new_values=torch.zeros(1, 1, head_dim),
    )  # fmt: skip
    expected_max, expected_min = reference.page_extremes(keys, page_size=page_size)
    torch.testing.assert_close(extremes[0][:, :num_pages], expected_max)
    torch.testing.assert_close(extremes[1][:, :num_pages], expected_min)
    q = queries[0, 0]
    channels = q.abs().sum(0).topk(num_channels).indices
    kept = torch.zeros(head_dim).index_fill_(0, channels, 1.0)
    estimate = torch.where(q.sum(0) >= 0, expected_max, expected_min)[0]
    temperature = ((q * kept).abs().sum(1) / q.abs().sum(1)).sqrt()
    expected = (q * kept) @ estimate.T * (0.3 / math.log(2)) / temperature[:, None]
    torch.testing.assert_close(scratch.scores[0, :, :num_pages], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("levels", [1, 5, 1000])
@pytest.mark.parametrize("num_tokens", [1, 2, 49, 200, 650])
def test_the_best_pages_are_taken_whole_and_the_next_in_part(
    page_size: int, levels: int, num_tokens: int
) -> None:
    """Equal scores are won by the lowest pages; a score that is not a number is the lowest."""
    length = 40 * page_size + 2
    num_pages = hsa.num_pages(length, page_size)
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (num_pages,), generator=generator) / levels
    size = SparseSize(
        max_pages=128, max_tokens=1024, max_channels=16, pages_of_one=page_size == 1, larger_pages=True
    )
    scratch = HsaScratch.of(size, torch.empty(1, 2, 16))
    scratch.scores.fill_(torch.nan)
    scratch.tokens.fill_(-1)
    scratch.scores[0, :, :num_pages] = logits
    scratch.partial[0, 0] = torch.tensor([1.0, length])
    lost = 4
    scratch.scores[0, 1, lost] = torch.nan
    logits[lost] = -torch.inf
    table = torch.zeros(1, FIELDS, dtype=torch.int64)
    table[0, [2, 6, 8]] = torch.tensor([length, page_size, num_tokens])
    triton_kernel.select_tokens(table, scratch)
    count = min(num_tokens, length)
    of_token = logits.repeat_interleave(page_size)[: length - 1]
    best = of_token.argsort(descending=True, stable=True)[: count - 1]
    assert scratch.counts.tolist() == [count]
    tokens = scratch.tokens[0].tolist()
    assert tokens[count - 1] == length - 1
    assert sorted(tokens[: count - 1]) == sorted(best.tolist())
    assert set(tokens[count:]) <= {-1}
