"""Decode attention to selected rows in plain float32, written like the papers. For tests only.

HSA first, beside RocketKV's Algorithm 1; then Quest, SparQ and exact top-k, which score tokens otherwise.

Legend: H_kv KV heads, G query heads per KV head, n cached tokens, D head_dim, P page_size, k1 num_channels,
k2 num_tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvferry.kernels.packed.layer import PackedLayer
from kvtest.packed import unpack_layer
from kvtest.reference.dense import dense_decode


def page_extremes(keys: Tensor, *, page_size: int) -> tuple[Tensor, Tensor]:
    """Step 1: elementwise maximum and minimum of each page of P tokens; the last page may be partial.

    Args: keys `[H_kv, n, D]`. Returns: Kmax and Kmin `[H_kv, ceil(n / P), D]`.
    """
    num_tokens = keys.shape[1]
    pages = [keys[:, i : min(i + page_size, num_tokens)] for i in range(0, num_tokens, page_size)]
    return torch.stack([p.amax(1) for p in pages], 1), torch.stack([p.amin(1) for p in pages], 1)


def hsa_scores(
    queries: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    length: int,
    page_size: int,
    num_channels: int,
    scaling: float,
) -> Tensor:
    """Step 2: the mean over a group of each head's estimated softmax over tokens.

    Deviation: the paper's temperature is `sqrt(D |q_i1|_1 / |q|_1)`; the model's own softmax scale, which is
    1/sqrt(D) in most models, stands for its D.

    Args:
        queries: `[H_kv, G, D]`.
        page_max, page_min: `[H_kv, ceil(length / P), D]`.

    Returns:
        float32 `[H_kv, length]`.
    """
    num_kv_heads, group_size, _ = queries.shape
    scores = torch.zeros(num_kv_heads, length)
    for h in range(num_kv_heads):
        q = queries[h].float()
        # i1 <- argtopk(sum(|q|, group), k1), the lowest index first among equals
        i1 = torch.sort(q.abs().sum(0), descending=True, stable=True).indices[:num_channels]
        # P <- Kmax[i: g_i >= 0], Kmin[i: g_i < 0] with g = sign(sum(q[i1], group))
        positive = q.sum(0)[i1] >= 0
        estimate = torch.where(positive, page_max[h].float()[:, i1], page_min[h].float()[:, i1])
        for g in range(group_size):
            # SparQ's temperature makes up for the channels left out
            l1_all, l1_kept = q[g].abs().sum(), q[g, i1].abs().sum()
            temperature = math.sqrt(float(l1_kept / l1_all)) if l1_kept > 0 else 1.0
            page_logits = scaling * (estimate @ q[g, i1]) / temperature
            token_logits = torch.stack([page_logits[i // page_size] for i in range(length)])
            scores[h] += torch.softmax(token_logits, dim=0) / group_size
    return scores


def select_tokens(scores: Tensor, *, num_tokens: int) -> Tensor:
    """i2 <- argtopk(s1, k2) with the newest token always inside, the lowest index first among equals.

    Deviation: the paper forces no token; a token that cannot see itself degrades short generations.

    Args: scores `[H_kv, n]`, n > k2. Returns: int64 `[H_kv, k2]`, ascending.
    """
    length = scores.shape[1]
    selected = []
    for row in scores:
        older = torch.sort(row[: length - 1], descending=True, stable=True).indices[: num_tokens - 1]
        selected.append(torch.cat([older.sort().values, torch.tensor([length - 1])]))
    return torch.stack(selected)


def attend_selected(
    queries: Tensor, keys: Tensor, values: Tensor, selected: Tensor, *, scaling: float
) -> Tensor:
    """attn(q, K[i], V[i]) of each head's selected tokens int64 `[H_kv, k]`: float32 `[H_kv, G, D]`."""
    heads = torch.arange(keys.shape[0])[:, None]
    return dense_decode(queries, keys[heads, selected], values[heads, selected], scaling=scaling)


def hsa_attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """Steps 2 and 3: y <- attn(q, K[i2], V[i2]).

    Args: keys and values `[H_kv, n, D]`, page extremes `[H_kv, ceil(n / P), D]`. Returns: float32
    `[H_kv, G, D]`.
    """
    length = keys.shape[1]
    if length <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = hsa_scores(
        queries,
        page_max,
        page_min,
        length=length,
        page_size=page_size,
        num_channels=num_channels,
        scaling=scaling,
    )
    i2 = select_tokens(scores, num_tokens=num_tokens)
    return attend_selected(queries, keys, values, i2, scaling=scaling)


def packed_hsa_attend(
    queries: Tensor,
    packed: PackedLayer,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    page_size: int,
    num_channels: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """As `kernels.packed_hsa.attend`: HSA of each head over its dequantised tokens and the new rows, with
    estimates from keys of 8 bits."""
    outputs = []
    for h, (kept_keys, kept_values, _) in enumerate(unpack_layer(packed)):
        keys = torch.cat([kept_keys, new_keys[h].float()])[None]
        coded = in_8_bits(keys[0], kept_keys)[None]
        values = torch.cat([kept_values, new_values[h].float()])[None]
        outputs.append(
            hsa_attend(
                queries[h : h + 1].float(),
                keys,
                values,
                *page_extremes(coded, page_size=page_size),
                page_size=page_size,
                num_channels=num_channels,
                num_tokens=num_tokens,
                scaling=scaling,
            )
        )
    return torch.cat(outputs)


def in_8_bits(keys: Tensor, kept: Tensor) -> Tensor:
    """Keys `[n, D]` rounded to 256 even steps over each channel's range among the kept ones `[k, D]`."""
    low, high = kept.double().amin(0), kept.double().amax(0)
    step = (high - low) / 255
    codes = ((keys.double() - low) / step.where(step > 0, 1.0)).round().clamp(0, 255)
    return (low + step * codes).float()


def exact_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """`s_t = 1/G sum_g softmax(scaling * q_g K^T)_t`: float32 `[H_kv, n]`."""
    num_kv_heads, group_size, _ = queries.shape
    scores = torch.zeros(num_kv_heads, keys.shape[1])
    for h in range(num_kv_heads):
        for g in range(group_size):
            logits = scaling * (keys[h].float() @ queries[h, g].float())
            scores[h] += torch.softmax(logits, dim=0) / group_size
    return scores


def exact_attend(queries: Tensor, keys: Tensor, values: Tensor, *, num_tokens: int, scaling: float) -> Tensor:
    """y <- attn(q, K[top-k s], V[top-k s]), the newest token among them: float32 `[H_kv, G, D]`."""
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    chosen = select_tokens(exact_scores(queries, keys, scaling=scaling), num_tokens=num_tokens)
    return attend_selected(queries, keys, values, chosen, scaling=scaling)


def quest_scores(queries: Tensor, keys: Tensor, *, page_size: int, scaling: float) -> Tensor:
    """`u_{g,p} = sum_d max(q_gd Kmax_pd, q_gd Kmin_pd)`; `s_t = 1/G sum_g softmax_t(scaling * u_{g,p(t)})`.

    Args: queries `[H_kv, G, D]`, keys `[H_kv, n, D]`. Returns: float32 `[H_kv, n]`.
    """
    num_kv_heads, group_size, _ = queries.shape
    page_max, page_min = page_extremes(keys.float(), page_size=page_size)
    scores = torch.zeros(num_kv_heads, keys.shape[1])
    for h in range(num_kv_heads):
        for g in range(group_size):
            q = queries[h, g].float()
            bounds = [
                torch.maximum(q * high, q * low).sum()
                for high, low in zip(page_max[h], page_min[h], strict=True)
            ]
            logits = torch.stack([scaling * bounds[t // page_size] for t in range(keys.shape[1])])
            scores[h] += torch.softmax(logits, dim=0) / group_size
    return scores


def quest_attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, page_size: int, num_tokens: int, scaling: float
) -> Tensor:
    """y <- attn(q, K[top-k s], V[top-k s]), the newest token among them: float32 `[H_kv, G, D]`."""
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = quest_scores(queries, keys, page_size=page_size, scaling=scaling)
    return attend_selected(
        queries, keys, values, select_tokens(scores, num_tokens=num_tokens), scaling=scaling
    )


def sparq_scores(queries: Tensor, keys: Tensor, *, num_channels: int, scaling: float) -> Tensor:
    """SparQ's Algorithm 1, steps 1 and 2: `s_g = softmax(q_g[i1] . K[i1] / tau_g)`,
    `tau_g = sqrt(|q_g[i1]|_1 / |q_g|_1) / scaling`.

    Args: queries `[H_kv, G, D]`, keys `[H_kv, n, D]`. Returns: float32 `[H_kv, G, n]`.
    """
    num_kv_heads, group_size, _ = queries.shape
    scores = torch.zeros(num_kv_heads, group_size, keys.shape[1])
    for h in range(num_kv_heads):
        q = queries[h].float()
        # i1 <- argtopk(sum(|q|, group), r), the lowest index first among equals
        i1 = torch.sort(q.abs().sum(0), descending=True, stable=True).indices[:num_channels]
        for g in range(group_size):
            l1_all, l1_kept = float(q[g].abs().sum()), float(q[g, i1].abs().sum())
            tau = math.sqrt(l1_kept / l1_all) / scaling if l1_kept > 0 else 1.0
            scores[h, g] = torch.softmax(keys[h].float()[:, i1] @ q[g, i1] / tau, dim=0)
    return scores


def sparq_attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, num_channels: int, num_tokens: int, scaling: float
) -> Tensor:
    """Step 3: `y_g = alpha_g attn(q_g, K[i2], V[i2]) + (1 - alpha_g) mean(V)`: float32 `[H_kv, G, D]`."""
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = sparq_scores(queries, keys, num_channels=num_channels, scaling=scaling)
    i2 = select_tokens(scores.mean(1), num_tokens=num_tokens)
    exact = attend_selected(queries, keys, values, i2, scaling=scaling)
    output = torch.zeros(queries.shape)
    for h in range(keys.shape[0]):
        mean = values[h].float().mean(0)
        for g in range(queries.shape[1]):
            alpha = scores[h, g, i2[h]].sum()
            output[h, g] = alpha * exact[h, g] + (1 - alpha) * mean
    return output
