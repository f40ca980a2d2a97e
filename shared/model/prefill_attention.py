"""Prefill's attention: new tokens attend to the history and, causally, to one another.

Called by `bridge.py` in every layer. Without windows, soft-capping and sinks torch's own attention runs;
otherwise some queries at a time. All operations are short, so that another prompt can run between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from kvferry.kernels.softmax import Scaling, Softmax, attend_softmax, scale_of
from kvferry.shared.model.adapters.latent import Latent
from kvferry.shared.model.spec import LayerSpec

_CHUNK_TOKENS = 256
_BLOCK_QUERIES = 2048
_EXPANDED_CHANNELS = 1 << 26
"""Channels of expanded keys of latent rows that are in memory at a time."""
_CPU_PAIRS, _CUDA_PAIRS = 1 << 23, 1 << 36
"""Pairs of a query and a key, over all heads, that one operation may compute: up to about 0.05 s."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The function that torch's attention runs on a CPU. It also returns the softmax's log-sum, `[B, H, T]`."""


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, layer: LayerSpec
) -> Tensor:
    """Compute the attention of a layer's new tokens.

    Args: query `[1, H, T, D]`; key and value `[1, H_kv, S, D]`, S >= T, from the prompt's first token on.
    Returns: `[1, H, T, D]`.
    """
    if not isinstance(scaling, Softmax) and layer.first_visible(key.shape[2] - 1) == 0:
        return causal_attention(query, key, value, scaling)
    return _masked_attention(query, key, value, scaling, layer)


def _masked_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, layer: LayerSpec
) -> Tensor:
    """Compute the same for any layer and softmax, one chunk of queries at a time, with that chunk's mask."""
    softmax = scaling if isinstance(scaling, Softmax) else None
    num_kv_heads, num_keys = key.shape[1:3]
    group, start = query.shape[1] // num_kv_heads, num_keys - query.shape[2]
    positions = torch.arange(num_keys, device=query.device)
    output = torch.empty_like(query)
    for begin in range(start, num_keys, _CHUNK_TOKENS):
        end = min(begin + _CHUNK_TOKENS, num_keys)
        rows, seen = slice(begin - start, end - start), slice(layer.first_visible(begin), end)
        mask = layer.visible(positions[begin:end, None], positions[None, seen])
        pairs = group * (end - begin) * (seen.stop - seen.start)
        step = max(1, _CPU_PAIRS // pairs) if not query.is_cuda else num_kv_heads
        for first in range(0, num_kv_heads, step):
            heads, kv = slice(first * group, (first + step) * group), slice(first, first + step)
            keys, values = key[:, kv, seen], value[:, kv, seen]
            if softmax is None:
                output[:, heads, rows] = scaled_dot_product_attention(
                    query[:, heads, rows],
                    keys,
                    values,
                    attn_mask=mask,
                    scale=scale_of(scaling),
                    enable_gqa=True,
                )
            else:
                new = query[0, heads, rows]
                grouped = new.reshape(-1, group, *new.shape[1:])
                attended = attend_softmax(
                    grouped, keys[0], values[0], softmax.heads(first, first + step), mask=mask
                )
                output[0, heads, rows] = attended.flatten(0, 1)
    return output


def expanded_attention(
    query: Tensor, rows: Tensor, latent: Latent, scaling: Scaling, layer: LayerSpec
) -> Tensor:
    """Compute `prefill_attention` to latent rows' expanded keys and values, of some heads at a time.

    Keys and values may have different numbers of channels; the narrower get zeros.

    Args: query `[1, H, T, D]`, rows `[S, R + P]`. Returns: `[1, H, T, V]`.
    """
    num_heads, key_dim = query.shape[1], query.shape[3]
    step = max(1, _EXPANDED_CHANNELS // (len(rows) * key_dim))
    parts = []
    for first in range(0, num_heads, step):
        heads = slice(first, first + step)
        key, value = latent.expand(rows, heads)
        queries, value_dim = query[:, heads], value.shape[2]
        if key_dim < value_dim:
            queries, key = (pad(tensor, (0, value_dim - key_dim)) for tensor in (queries, key))
        elif value_dim < key_dim:
            value = pad(value, (0, key_dim - value_dim))
        attended = prefill_attention(queries, key[None], value[None], scaling, layer)
        parts.append(attended[..., :value_dim])
    return torch.cat(parts, 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Compute softmax(scaling * Q K^T) V, the last query attending to every key, without a T x S mask or
    score matrix. Use several operations if it takes long, so that another prompt can run between them.

    Args: query `[1, H, T, D]`; key and value `[1, H_kv, S, D]`, S >= T.
    Returns: `[1, H, T, D]`.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == 1:
        return scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    if not query.is_cuda:
        return _cpu_attention(query, key, value, scaling)
    # Only the 16-bit kernels support grouped heads without computing full score matrices.
    if query.dtype is torch.float32:
        return _masked_attention(query, key, value, scaling, LayerSpec())
    if num_queries == num_keys:
        return _attention_by_heads(query, key, value, is_causal=True, scale=scaling)
    bias = causal_lower_right(num_queries, num_keys)
    return _attention_by_heads(query, key, value, attn_mask=bias, scale=scaling)


def _attention_by_heads(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute attention in one call, or if that takes long, in several for some KV heads each."""
    num_kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    step = max(1, _CUDA_PAIRS // (group * query.shape[2] * key.shape[2]))
    if step >= num_kv_heads:
        return scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    output = torch.empty_like(query)
    for begin in range(0, num_kv_heads, step):
        kv, heads = slice(begin, begin + step), slice(begin * group, (begin + step) * group)
        output[:, heads] = scaled_dot_product_attention(
            query[:, heads], key[:, kv], value[:, kv], enable_gqa=True, **options
        )
    return output


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Compute attention in one call, or of a block of queries and one KV head at a time, or one head if long.

    A block attends to the keys before it and, causally, to its own. The two are joined by their shares of the
    softmax's sum, `e^lse`. With a mask instead, torch's kernel would take half as long again.
    """
    (num_heads, num_queries), num_keys = query.shape[1:3], key.shape[2]
    if num_queries == num_keys and num_heads * num_keys**2 <= _CPU_PAIRS:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    group, history = num_heads // key.shape[1], num_keys - num_queries
    block = min(num_queries, _BLOCK_QUERIES)
    step = group if group * block * num_keys <= _CPU_PAIRS else 1
    output = torch.empty_like(query)
    for head in range(0, num_heads, step):
        keys, values = (tensor[:, head // group, None].expand(-1, step, -1, -1) for tensor in (key, value))
        for begin in range(0, num_queries, block):
            rows, own = slice(begin, begin + block), slice(history + begin, history + begin + block)
            queries = query[:, head : head + step, rows]
            attended, lse = _flash(queries, keys[:, :, own], values[:, :, own], is_causal=True, scale=scaling)
            if own.start:
                earlier = slice(0, own.start)
                before, lse_before = _flash(
                    queries, keys[:, :, earlier], values[:, :, earlier], scale=scaling
                )
                share = torch.sigmoid(lse_before - lse)[..., None]
                attended = torch.lerp(attended, before, share.to(before.dtype))
            output[:, head : head + step, rows] = attended
    return output
