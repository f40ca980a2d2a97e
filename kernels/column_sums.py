"""Column sums: how much a prompt's queries attend to each token, and how unevenly.

`window_scores` is of the last W queries: the first step of SnapKV's and RocketKV's scoring. `column_sums` is
of all queries: D2O's and H2O's accumulated attention score; D2O's layer budgets come from the variances. Each
is called once per layer while the prompt is prefilled. `column_maxima` is of a prompt's repetition, KVzip's
score, called once per layer and chunk. Never stores a T x T matrix: in torch at most `MAX_LOGITS` float32
logits exist at a time, in Triton (`kernels/attention_mass.py`) none. Does not pool, does not select, and does
not drop the window's own columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_scores, check_size, path_for, scores_problem
from kvferry.kernels.quarantine import attempt

MAX_LOGITS = 1 << 24
"""float32 logits at a time (64 MiB); one query's G * T logits are always allowed."""
MAX_CHUNK_QUERIES = 256
"""A chunk computes its whole diagonal block, half of it unused: short chunks limit that."""


class ColumnSums(NamedTuple):
    """Accumulated attention of one layer.

    Attributes:
        sums: float32 `[H_kv, T]`, over queries and over the group's query heads.
        variances: float32 `[H_kv, G]`, of each query head's own column sums over the T columns (population
            variance: one column has none).
    """

    sums: Tensor
    variances: Tensor


def window_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """Sum the columns of the window's causal attention: `s_t = sum_{g, i} softmax(q_{g,i} K^T * scaling)_t`.

    Args: as `column_sums`; the window's queries are T_new = W.
    Returns: float32 `[H_kv, T]`; each row sums to G * W.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    check_scores(queries, keys, rows="W")
    check_size("the window's queries", queries.shape[2], 1, keys.shape[1])
    in_torch = partial(column_sums_torch, queries, keys, scaling)
    if path_for("window_scores", keys.device, partial(scores_problem, queries, keys)) == "torch":
        return in_torch().sums
    in_triton = partial(_attention_mass, queries, keys, scaling, per_query_head=False)
    return attempt("window_scores", in_triton, lambda: in_torch().sums)


def column_sums(queries: Tensor, keys: Tensor, *, scaling: float) -> ColumnSums:
    """Compute `c_{g,t} = sum_i softmax(q_{g,i} K^T * scaling)_t`, causal; `sums_t = sum_g c_{g,t}` (D2O,
    Eq. 6) and `variances_g = Var_t(c_{g,t})` (D2O, Eq. 4).

    Args:
        queries: post-RoPE `[H_kv, G, T_new, D]`; query i is at position T - T_new + i and sees no later
            token. T_new == T for a first turn; with history, older queries are not known and not summed.
        keys: post-RoPE `[H_kv, T, D]`, T >= T_new >= 1, same dtype and device as `queries`.
        scaling: softmax scale.

    Returns: each row of `sums` sums to G * T_new.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    check_scores(queries, keys, rows="T_new")
    if not 1 <= queries.shape[2] <= keys.shape[1]:
        raise ValueError(f"there are {queries.shape[2]} queries; there must be 1 to {keys.shape[1]} (T)")
    in_torch = partial(column_sums_torch, queries, keys, scaling)
    if path_for("column_sums", keys.device, partial(scores_problem, queries, keys)) == "torch":
        return in_torch()

    def in_triton() -> ColumnSums:
        columns = _attention_mass(queries, keys, scaling, per_query_head=True)
        return ColumnSums(columns.sum(dim=1), columns.var(dim=-1, correction=0))

    return attempt("column_sums", in_triton, in_torch)


def _attention_mass(queries: Tensor, keys: Tensor, scaling: float, *, per_query_head: bool) -> Tensor:
    # a CPU install has no Triton
    from kvferry.kernels.attention_mass import attention_mass

    return attention_mass(queries, keys, scaling=scaling, per_query_head=per_query_head)


def column_sums_torch(queries: Tensor, keys: Tensor, scaling: float) -> ColumnSums:
    """Run `column_sums` in torch, a chunk of queries of one KV head at a time. Arguments are not checked."""
    num_kv_heads, group = queries.shape[:2]
    num_tokens = keys.shape[1]
    sums = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    variances = torch.empty(num_kv_heads, group, dtype=torch.float32, device=keys.device)
    for head in range(num_kv_heads):
        columns = torch.zeros(group, num_tokens, dtype=torch.float32, device=keys.device)
        for weights in _weights(queries[head], keys[head], scaling):
            columns[:, : weights.shape[2]] += weights.sum(1)
        sums[head] = columns.sum(0)
        variances[head] = columns.var(-1, correction=0)
    return ColumnSums(sums, variances)


def column_maxima(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """Compute `m_t = max_{g, i} softmax(q_{g,i} K^T * scaling)_t`, causal: the largest attention of any query
    to a token. In torch on every device.

    Args: as `column_sums`.
    Returns: float32 `[H_kv, T]`, 0 to 1.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    check_scores(queries, keys, rows="T_new")
    check_size("the number of queries", queries.shape[2], 1, keys.shape[1])
    maxima = torch.zeros(*keys.shape[:2], dtype=torch.float32, device=keys.device)
    for head in range(keys.shape[0]):
        for weights in _weights(queries[head], keys[head], scaling):
            columns = maxima[head, : weights.shape[2]]
            torch.maximum(columns, weights.amax((0, 1)), out=columns)
    return maxima


def _weights(queries: Tensor, keys: Tensor, scaling: float) -> Iterator[Tensor]:
    """Yield the causal attention of one KV head, a chunk of queries at a time: float32 `[G, n, visible]`.

    Args: queries `[G, T_new, D]`, keys `[T, D]`.
    """
    (group, num_queries, head_dim), num_tokens = queries.shape, keys.shape[0]
    history = num_tokens - num_queries
    chunk = min(max(1, MAX_LOGITS // (group * num_tokens)), MAX_CHUNK_QUERIES, num_queries)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=keys.device).triu(1)
    head_keys = keys.float()
    for begin in range(0, num_queries, chunk):
        count = min(chunk, num_queries - begin)
        visible = history + begin + count
        rows = queries[:, begin : begin + count].reshape(group * count, head_dim).float() * scaling
        logits = (rows @ head_keys[:visible].T).view(group, count, visible)
        # only the chunk's own columns can be after a query
        logits[:, :, visible - count :].masked_fill_(future[:count, :count], float("-inf"))
        # softmax's own exponential makes no subnormal numbers, which take many times as long
        yield torch.softmax(logits, -1, out=logits)
