"""Merges evicted rows into the retained rows that are most similar to them: D2O section 4.2.2.

`merge_prompt` runs after selection while a prompt is prefilled. `EvictingCache` applies the same rules to one
row at each decode step. All arithmetic is float32. This module does not choose the evicted rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvferry.shared.compression.interface import gather_rows

SMOOTHING = 0.7
"""beta of Eq. 10."""
MAX_SIMILARITIES = 1 << 24
"""The most float32 similarities in memory at a time (64 MiB); one evicted row per head is always allowed."""
_SMALLEST_NORM = 1e-12


@dataclass(frozen=True, kw_only=True)
class MergedRows:
    """One layer's retained rows after merging.

    Attributes:
        keys, values: `[H_kv, S, D]`, the inputs' dtype, in position order.
        thresholds: float32 `[H_kv]`, tau_0; NaN (unset) if nothing was evicted.
    """

    keys: Tensor
    values: Tensor
    thresholds: Tensor


def cosine_similarities(evicted_keys: Tensor, kept_keys: Tensor) -> Tensor:
    """Compute `u_ij = k_i . k_j / (|k_i| |k_j|)` (Eq. 9); 0 for a zero key.

    Args: evicted_keys: `[H_kv, E, D]`; kept_keys: `[H_kv, S, D]`, the retained rows' keys.
    Returns: float32 `[H_kv, E, S]`.
    """
    evicted, kept = normalize(evicted_keys.float(), dim=-1), kept_keys.float()
    # a decode step has many retained rows and few products, so the products are divided, not the rows
    norms = kept.norm(dim=-1).clamp_min(_SMALLEST_NORM)
    return torch.bmm(evicted, kept.transpose(1, 2)).div_(norms[:, None])


def next_threshold(threshold: Tensor, similarity: Tensor) -> Tensor:
    """Compute `tau_t = beta u + (1 - beta) tau_{t-1}` (Eq. 10, t > 0).

    Deviation: if the prompt evicted nothing, tau is unset and takes the first eviction's u, so that row is
    merged.

    Args:
        threshold: float32 `[H_kv]`, NaN where unset.
        similarity: float32 `[H_kv]`, u of the evicted row.
    """
    # lerp gives exactly tau where u == tau, so that rounding never drops a row whose u equals tau
    return torch.where(threshold.isnan(), similarity, torch.lerp(threshold, similarity, SMOOTHING))


def merge_weight(similarity: Tensor, threshold: Tensor) -> Tensor:
    """Compute an evicted row's weight before division by D_j (Eq. 12): `e^u` if u >= tau, else 0 (dropped).

    The retained row's own weight is e, because its similarity to itself is 1.
    """
    return torch.where(similarity >= threshold, similarity.exp(), 0.0)


def merge_prompt(keys: Tensor, values: Tensor, positions: Tensor) -> MergedRows:
    """Gather a layer's retained rows and merge the evicted rows into them.

    `tau_0 = mean_i u_i` (Eq. 10, t = 0); then with `D_j = e + sum_{i -> j} e^{u_ij}` over the evicted i whose
    nearest row is j and whose u reaches tau: `k_j <- (e k_j + sum e^{u_ij} k_i) / D_j`, and the same weights
    for V. Rows into which nothing is merged do not change, bit for bit.

    Deviation: Eq. 12 as printed gives every evicted row the weight of all of them together; here the weights
    sum to one. tau is per KV head.

    The T x S matrix of similarities is never made.

    Args:
        keys, values: `[H_kv, T, D]`, keys post-RoPE; not changed.
        positions: int `[H_kv, S]`, the retained tokens, ascending and unique per head.
    """
    num_kv_heads, num_tokens, _ = keys.shape
    kept_keys, kept_values = gather_rows(keys, positions), gather_rows(values, positions)
    evicted = _others(positions, num_tokens)
    if evicted.shape[1] == 0:
        unset = torch.full((num_kv_heads,), torch.nan, dtype=torch.float32, device=keys.device)
        return MergedRows(keys=kept_keys, values=kept_values, thresholds=unset)
    chunk = max(1, MAX_SIMILARITIES // positions.numel())
    parts = [evicted[:, begin : begin + chunk] for begin in range(0, evicted.shape[1], chunk)]
    nearest = [cosine_similarities(gather_rows(keys, part), kept_keys).max(dim=-1) for part in parts]
    similarity = torch.cat([found.values for found in nearest], 1)
    # summed in float64, so that the mean of equal similarities is exactly that similarity
    thresholds = similarity.double().mean(dim=1).float()
    merges = [
        (part, found.indices, merge_weight(found.values, thresholds[:, None]))
        for part, found in zip(parts, nearest, strict=True)
    ]
    return MergedRows(
        keys=_merged(keys, kept_keys, merges),
        values=_merged(values, kept_values, merges),
        thresholds=thresholds,
    )


def _merged(rows: Tensor, kept: Tensor, merges: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Apply Eq. 11 to K or V: merge rows `[H_kv, T, D]` into the retained rows `[H_kv, S, D]`.

    Args: merges: the evicted tokens, the retained rows into which they are merged, and weights, each
        `[H_kv, E]`.
    """
    num_kv_heads, num_kept, head_dim = kept.shape
    sums = kept.float().reshape(-1, head_dim) * math.e
    weights = torch.full_like(sums[:, :1], math.e)
    touched = torch.zeros_like(weights, dtype=torch.bool)
    first_row = torch.arange(num_kv_heads, device=kept.device)[:, None] * num_kept
    for sources, targets, of_sources in merges:
        index = (first_row + targets).reshape(-1)
        weight = of_sources.reshape(-1, 1)
        _add_rows(weights, index, weight)
        _add_rows(sums, index, weight * gather_rows(rows, sources).float().reshape(-1, head_dim))
        touched[index[weight[:, 0] > 0]] = True
    merged = (sums / weights).to(kept.dtype)
    return torch.where(touched, merged, kept.reshape(-1, head_dim)).view_as(kept)


def _others(positions: Tensor, num_tokens: int) -> Tensor:
    """Return the evicted tokens: int64 `[H_kv, T - S]`, ascending."""
    evicted = torch.ones(positions.shape[0], num_tokens, dtype=torch.bool, device=positions.device)
    evicted.scatter_(1, positions.to(torch.int64), False)
    return evicted.nonzero()[:, 1].view(positions.shape[0], num_tokens - positions.shape[1])


def _add_rows(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows to `sums[index]`, always in the same order. Args: `[N, D]`, `[E]`, `[E, D]`."""
    if sums.is_cuda:
        # index_add_ adds by atomics there, in any order; this sorts the index first
        sums.index_put_((index,), rows, accumulate=True)
    else:
        sums.index_add_(0, index, rows)
