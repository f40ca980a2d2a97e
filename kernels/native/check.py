"""Compares the C code of attention and scores with torch, on a few small inputs, before it is used."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvferry.kernels.chunk_scores import chunk_scores_torch, shared_chunk_scores_torch
from kvferry.kernels.chunk_scores import native as chunks
from kvferry.kernels.decode_batch import NewTokens, attend_in_c
from kvferry.kernels.hsa import num_pages as count_pages
from kvferry.kernels.hsa import torch_path as hsa_torch_path
from kvferry.kernels.hsa import write_page_extremes
from kvferry.kernels.native.library import KINDS, register_check
from kvferry.kernels.packed.layer import packed_entries
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer
from kvferry.kernels.packed_hsa import PageCodes, append_key, page_extremes
from kvferry.kernels.packed_hsa import attend as packed_hsa_attend
from kvferry.kernels.trizone import torch_path


@register_check
def errors_of(loaded: ctypes.CDLL) -> dict[str, float]:
    """The greatest differences from torch, by what is computed."""
    errors = {
        "attention": _of_attention(loaded),
        "sparse attention": _of_sparse(loaded),
        "chunk scores": _of_chunks(loaded),
    }
    if loaded.kvferry_kinds() >> KINDS[torch.float16] & 1:
        errors["attention to packed rows"] = _of_packed(loaded)
        errors["sparse attention to packed rows"] = _of_sparse_packed(loaded)
    return errors


def _of_attention(loaded: ctypes.CDLL) -> float:
    generator = torch.Generator().manual_seed(3)
    group_size, head_dim, lengths = 7, 24, (19, 2)
    keys, values = torch.randn(2, len(lengths), max(lengths), head_dim, generator=generator)
    queries = 2 * torch.randn(len(lengths), group_size, head_dim, generator=generator)
    base = torch.cat([keys.flatten(), values.flatten()])
    rows = [(i * keys[0].numel(), keys.numel() + i * keys[0].numel(), its) for i, its in enumerate(lengths)]
    new_keys, new_values = (
        torch.stack([rows[length - 1] for rows, length in zip(its, lengths, strict=True)])
        for its in (keys, values)
    )
    output = torch.full_like(queries, torch.nan)
    step = NewTokens(queries, new_keys, new_values, 0.3)
    attend_in_c(loaded.kvferry_attend, torch.tensor(rows), base, step, output)
    error = 0.0
    for i, length in enumerate(lengths):
        weights = (0.3 * queries[i] @ keys[i, :length].T).softmax(-1)
        error = max(error, float((weights @ values[i, :length] - output[i]).abs().max()))
    return error


def _of_chunks(loaded: ctypes.CDLL) -> float:
    """Whole chunks and a part of one, with their own queries and with shared ones; in units of a token."""
    generator = torch.Generator().manual_seed(6)
    queries = 2 * torch.randn(2, 3, 75, 24, generator=generator)
    keys = torch.randn(2, 75, 24, generator=generator)
    error = 0.0
    for used, is_shared, in_torch in (
        (queries, False, chunk_scores_torch),
        (queries[:, :, :5], True, shared_chunk_scores_torch),
    ):
        scores = chunks.chunk_scores(
            used, keys, chunk_tokens=34, scaling=0.3, shared=is_shared, function=loaded.kvferry_chunk_scores
        )
        error = max(error, float((scores - in_torch(used, keys, 34, 0.3)).abs().max()))
    return error


def _of_sparse(loaded: ctypes.CDLL) -> float:
    """Pages of one token and of three, with a new row in a page that others have begun."""
    generator = torch.Generator().manual_seed(4)
    group_size, head_dim, length, num_tokens = 5, 24, 71, 11
    keys, values = torch.randn(2, 1, length, head_dim, generator=generator)
    queries = 2 * torch.randn(1, group_size, head_dim, generator=generator)
    sizes: dict[str, Any] = {"num_channels": 7, "num_tokens": num_tokens}
    error = 0.0
    for page_size in (1, 3):
        pages = -(-length // page_size)
        extremes = torch.empty(2, 1, head_dim, pages)
        write_page_extremes(keys[:, :-1], *extremes.mT, page_size=page_size)
        base = torch.cat([its.flatten() for its in (keys, values, extremes)])
        size, at = keys.numel(), 2 * keys.numel()
        head = [0, size, length, at, at + head_dim * pages, pages, page_size, *sizes.values()]
        output = torch.full_like(queries, torch.nan)
        step = NewTokens(queries, keys[:, -1].contiguous(), values[:, -1].contiguous(), 0.3)
        attend_in_c(loaded.kvferry_attend_sparse, torch.tensor([head]), base, step, output)
        page_max, page_min = (keys, keys) if page_size == 1 else base[at:].view(2, 1, head_dim, pages).mT
        expected = hsa_torch_path.attend(
            queries, keys, values, page_max, page_min, page_size=page_size, scaling=0.3, **sizes
        )
        error = max(error, float((output - expected).abs().max()))
    return error


def _of_packed(loaded: ctypes.CDLL) -> float:
    """Two heads with all widths, a full block of tokens and a part of one, and a new row."""
    its = _Packed()
    output = torch.full_like(its.queries, torch.nan)
    entries = packed_entries([its.layer], its.layer.buffer)[0]
    attend_in_c(
        loaded.kvferry_attend_packed, its.heads, its.base, its.step, output, entries, its.layer.buffer
    )
    expected = torch_path.trizone_decode_segments(its.queries, [its.layer], *its.rows, scaling=0.3)
    return float((output - expected).abs().max())


def _of_sparse_packed(loaded: ctypes.CDLL) -> float:
    """The same heads, with the extremes of pages of three tokens."""
    its = _Packed()
    (num_heads, _, head_dim), packed = its.queries.shape, its.layer
    sizes: dict[str, Any] = {"page_size": 3, "num_channels": 9, "num_tokens": 40}
    num_pages = count_pages(packed.heads[0].counts.num_tokens + 1, 3)
    extremes = torch.zeros(2, num_heads, head_dim, num_pages, dtype=torch.uint8)
    codes = torch.cat([packed.buffer, extremes.flatten()])
    at = packed.layout.size_bytes
    extremes = codes[at:].view_as(extremes)
    pages = PageCodes(*extremes.mT, *torch.zeros(2, num_heads, head_dim))
    page_extremes(packed, pages, page_size=3)
    append_key(packed, pages, its.step.keys[:, 0], num_new=0, page_size=3)
    expected = packed_hsa_attend(its.queries, packed, *its.rows, pages, scaling=0.3, **sizes)
    base = torch.cat([its.base, pages.low.flatten(), pages.step.flatten()])
    heads = [
        [
            *its.heads[h].tolist(),
            *(at + (part * num_heads + h) * head_dim * num_pages for part in range(2)),
            num_pages,
            *sizes.values(),
            *(its.base.numel() + (part * num_heads + h) * head_dim for part in range(2)),
        ]
        for h in range(num_heads)
    ]
    output = torch.full_like(its.queries, torch.nan)
    entries = packed_entries([packed], packed.buffer)[0]
    attend_in_c(
        loaded.kvferry_attend_packed_sparse, torch.tensor(heads), base, its.step, output, entries, codes
    )
    return float((output - expected).abs().max())


class _Packed:
    """Two packed heads with tokens and channels of all widths, and a new row of each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        num_heads, group_size, head_dim, num_tokens = 2, 5, 32, 150
        keys, values = torch.randn(2, num_heads, num_tokens, head_dim, generator=generator)
        channels, tokens = (
            (torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8)[torch.arange(num_heads * count) % 5]).view(
                num_heads, count
            )
            for count in (head_dim, num_tokens)
        )
        self.layer = indexed_layer(keys, values, channels, tokens)
        fill_in_torch(self.layer, keys, values)
        self.queries = 2 * torch.randn(num_heads, group_size, head_dim, generator=generator)
        new_keys, new_values = torch.randn(2, num_heads, 1, head_dim, generator=generator)
        self.rows = new_keys, new_values
        self.step = NewTokens(self.queries, new_keys, new_values, 0.3)
        self.base = torch.full((2 * num_heads * head_dim,), torch.nan)
        self.heads = torch.tensor([(h * head_dim, (num_heads + h) * head_dim, 1) for h in range(num_heads)])
