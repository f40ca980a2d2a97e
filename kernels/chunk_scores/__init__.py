"""Chunk scores: how much the tokens of a chunk are attended within it, without the causal mask.

First step of Compactor's attention scores, called once per layer while the prompt is prefilled. Does not
pool, does not weight by values, does not select. In torch the float32 logits of one chunk exist at a time,
and with shared queries those of as many chunks as fit into `MAX_LOGITS`. The C code stores those of a few
queries, the Triton kernel none.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_scores, check_size, launch, path_for, scores_problem, uses_native
from kvferry.kernels.quarantine import attempt

MAX_LOGITS = 1 << 24
"""float32 logits at a time (64 MiB); those of one query, or of one chunk pair, are always allowed."""


def chunk_scores(
    queries: Tensor, keys: Tensor, *, chunk_tokens: int, scaling: float, shared: bool = False
) -> Tensor:
    """Compute the column sums of each chunk's own attention: `a_t = mean_g sum_{i in chunk} softmax(q_{g,i}
    K_chunk^T * scaling)_t`; the last chunk may be shorter.

    Where the chunks' own queries are not known, the same M queries attend to every chunk (`shared`): `a_t =
    (chunk's length / M) * mean_g sum_i softmax(q_{g,i} K_chunk^T * scaling)_t`.

    Args:
        queries: `[H_kv, G, T, D]`, query t of the token of key t; or shared, `[H_kv, G, M, D]`, M >= 1.
        keys: `[H_kv, T, D]`, same dtype and device as `queries`. T may be 0.
        chunk_tokens: c, at least 1.
        scaling: softmax scale.

    Returns: float32 `[H_kv, T]`; each chunk sums to its length.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    check_size("chunk_tokens", chunk_tokens, 1)
    check_scores(queries, keys, rows="M" if shared else "T")
    if shared and queries.shape[2] < 1:
        raise ValueError("there are 0 queries; there must be at least 1")
    if not shared and queries.shape[2] != keys.shape[1]:
        raise ValueError(
            f"there are {queries.shape[2]} queries and {keys.shape[1]} keys; they must be as many"
        )
    call = partial(in_torch, queries, keys, chunk_tokens=chunk_tokens, scaling=scaling, shared=shared)
    # the C code takes any shapes and strides
    problem = None if uses_native("chunk_scores", keys.device) else partial(scores_problem, queries, keys)
    path = path_for("chunk_scores", keys.device, problem)
    if path == "torch":
        return call()
    if path == "native":
        return launch("chunk_scores.native.chunk_scores", call)
    return attempt("chunk_scores", lambda: launch("chunk_scores.triton_kernel.chunk_scores", call), call)


def in_torch(queries: Tensor, keys: Tensor, *, chunk_tokens: int, scaling: float, shared: bool) -> Tensor:
    """Compute `chunk_scores` in torch; arguments are not checked."""
    scores = shared_chunk_scores_torch if shared else chunk_scores_torch
    return scores(queries, keys, chunk_tokens, scaling)


def chunk_scores_torch(queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float) -> Tensor:
    """Compute `chunk_scores` in torch, one chunk of one KV head at a time: a CPU core's cache holds its
    logits, so a pass is about three times as fast as with many chunks together. Arguments are not checked."""
    num_kv_heads, group, num_tokens, head_dim = queries.shape
    scores = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    buffer = torch.empty(group * chunk_tokens**2, dtype=torch.float32, device=keys.device)
    for head in range(num_kv_heads):
        columns = (keys[head].float() * scaling).T.contiguous()
        for begin in range(0, num_tokens, chunk_tokens):
            chunk = slice(begin, min(begin + chunk_tokens, num_tokens))
            rows = queries[head, :, chunk].float().reshape(-1, head_dim)
            num_rows, size = len(rows), chunk.stop - begin
            logits = torch.mm(rows, columns[:, chunk], out=buffer[: num_rows * size].view(num_rows, size))
            scores[head, chunk] = torch.softmax(logits, dim=-1, out=logits).sum(dim=0) / group
    return scores


def shared_chunk_scores_torch(queries: Tensor, keys: Tensor, chunk_tokens: int, scaling: float) -> Tensor:
    """Compute `chunk_scores` of shared queries in torch; arguments are not checked."""
    num_kv_heads, num_tokens, _ = keys.shape
    num_rows = queries.shape[1] * queries.shape[2]
    scores = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    spans = _spans(num_tokens, chunk_tokens, MAX_LOGITS // (num_rows * chunk_tokens))
    for head in range(num_kv_heads):
        rows = queries[head].flatten(0, 1).float() * scaling
        for begin, end, size in spans:
            logits = (rows @ keys[head, begin:end].float().mT).view(num_rows, -1, size)  # [G M, n, c]
            scores[head, begin:end] = logits.softmax(dim=-1).mean(dim=0).flatten() * size
    return scores


def _spans(num_tokens: int, chunk_tokens: int, max_chunks: int) -> list[tuple[int, int, int]]:
    """Return runs of equal chunks, each of 1 to `max_chunks` chunks, as (begin, end, tokens of a chunk)."""
    step = chunk_tokens * max(1, max_chunks)
    num_whole = num_tokens // chunk_tokens * chunk_tokens
    spans = [(begin, min(begin + step, num_whole), chunk_tokens) for begin in range(0, num_whole, step)]
    if num_whole < num_tokens:
        spans.append((num_whole, num_tokens, num_tokens - num_whole))
    return spans
