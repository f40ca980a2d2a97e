"""Compares the C code of attention with torch, on a few small inputs, before it is used."""

from __future__ import annotations

import ctypes

import torch

from kvferry.kernels.native.library import KINDS, attend, attend_packed
from kvferry.kernels.packed.layer import packed_entries
from kvferry.kernels.packed.packing import fill_in_torch, indexed_layer
from kvferry.kernels.trizone import torch_path


def errors_of(loaded: ctypes.CDLL) -> dict[str, float]:
    """The greatest differences from torch, by what is computed."""
    errors = {"attention": _of_attention(loaded)}
    if loaded.kvferry_kinds() >> KINDS[torch.float16] & 1:
        errors["attention to packed rows"] = _of_packed(loaded)
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
    attend(loaded, torch.tensor(rows), base, queries, new_keys, new_values, scaling=0.3, output=output)
    error = 0.0
    for i, length in enumerate(lengths):
        weights = (0.3 * queries[i] @ keys[i, :length].T).softmax(-1)
        error = max(error, float((weights @ values[i, :length] - output[i]).abs().max()))
    return error


def _of_packed(loaded: ctypes.CDLL) -> float:
    """Two heads with all widths, a full block of tokens and a part of one, and a new row."""
    generator = torch.Generator().manual_seed(5)
    num_heads, group_size, head_dim, num_tokens = 2, 5, 32, 150
    keys, values = torch.randn(2, num_heads, num_tokens, head_dim, generator=generator)
    channels, tokens = (
        (torch.tensor([0, 2, 4, 8, 16], dtype=torch.uint8)[torch.arange(num_heads * count) % 5]).view(
            num_heads, count
        )
        for count in (head_dim, num_tokens)
    )
    packed = indexed_layer(keys, values, channels, tokens)
    fill_in_torch(packed, keys, values)
    queries = 2 * torch.randn(num_heads, group_size, head_dim, generator=generator)
    new_keys, new_values = torch.randn(2, num_heads, 1, head_dim, generator=generator)
    base = torch.full((2 * num_heads * head_dim,), torch.nan)
    heads = torch.tensor([(h * head_dim, (num_heads + h) * head_dim, 1) for h in range(num_heads)])
    output = torch.full_like(queries, torch.nan)
    attend_packed(
        loaded,
        heads,
        base,
        packed_entries([packed], packed.buffer)[0],
        packed.buffer,
        queries,
        new_keys,
        new_values,
        scaling=0.3,
        output=output,
    )
    expected = torch_path.trizone_decode_segments(queries, [packed], new_keys, new_values, scaling=0.3)
    return float((output - expected).abs().max())
