"""Chunk scores: how much the tokens of a chunk are attended within it, without the causal mask.

First step of Compactor's attention scores, called once a layer while the prompt is prefilled. Does not pool,
does not weigh by values, does not select. The torch path holds at most `MAX_LOGITS` float32 logits at a time,
however long the prompt is; the Triton kernel none.
"""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.chunk_scores.torch_path import chunk_scores_torch, shared_chunk_scores_torch
from kvferry.kernels.descriptors import alignment_problem, shape_problem
from kvferry.kernels.dispatch import path_for


def chunk_scores(queries: Tensor, keys: Tensor, *, chunk_tokens: int, scaling: float) -> Tensor:
    """Column sums of each chunk's own attention: `a_t = mean_g sum_{i in chunk} softmax(q_{g,i} K_chunk^T *
    scaling)_t`; the last chunk is as short as it is.

    Args:
        queries: `[H_kv, G, T, D]`; query t is of the token of key t.
        keys: `[H_kv, T, D]`, same dtype and device as `queries`. T may be 0.
        chunk_tokens: c, at least 1.
        scaling: softmax scale.

    Returns: float32 `[H_kv, T]`; each chunk sums to its length.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    _check(queries, keys, chunk_tokens)
    if queries.shape[2] != keys.shape[1]:
        raise ValueError(f"there are {queries.shape[2]} queries and {keys.shape[1]} keys; must be as many")
    if path_for("chunk_scores", keys.device, _unsupported(queries, keys)) != "torch":
        # Here, because a CPU install has no Triton.
        from kvferry.kernels.chunk_scores import triton_kernel

        return triton_kernel.chunk_scores(
            queries, keys, chunk_tokens=chunk_tokens, scaling=scaling, shared=False
        )
    return chunk_scores_torch(queries, keys, chunk_tokens, scaling)


def shared_chunk_scores(queries: Tensor, keys: Tensor, *, chunk_tokens: int, scaling: float) -> Tensor:
    """The same where the chunks' own queries are not at hand: every chunk is attended by the same M queries,
    `a_t = (chunk's length / M) * mean_g sum_i softmax(q_{g,i} K_chunk^T * scaling)_t`.

    Args: queries: `[H_kv, G, M, D]`, M >= 1. The rest as in `chunk_scores`.
    Returns: float32 `[H_kv, T]`; each chunk sums to its length.

    Raises:
        ValueError: shapes, dtypes or devices disagree.
    """
    _check(queries, keys, chunk_tokens)
    if queries.shape[2] < 1:
        raise ValueError("there are 0 queries; there must be at least 1")
    if path_for("chunk_scores", keys.device, _unsupported(queries, keys)) != "torch":
        # Here, because a CPU install has no Triton.
        from kvferry.kernels.chunk_scores import triton_kernel

        return triton_kernel.chunk_scores(
            queries, keys, chunk_tokens=chunk_tokens, scaling=scaling, shared=True
        )
    return shared_chunk_scores_torch(queries, keys, chunk_tokens, scaling)


def _check(queries: Tensor, keys: Tensor, chunk_tokens: int) -> None:
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")
    if queries.ndim != 4 or keys.ndim != 3:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "expected [H_kv, G, T, D] and [H_kv, T, D]"
        )
    if keys.shape[0] != queries.shape[0] or keys.shape[2] != queries.shape[3]:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)}; expected [{queries.shape[0]}, T, {queries.shape[3]}] to "
            "match queries"
        )
    if queries.dtype != keys.dtype or queries.device != keys.device:
        raise ValueError(
            f"queries are {queries.dtype} on {queries.device}, keys {keys.dtype} on {keys.device}; "
            "they must agree"
        )


def _unsupported(queries: Tensor, keys: Tensor) -> str | None:
    problem = shape_problem(queries.dtype, 1, queries.shape[3])
    return problem or alignment_problem(keys=keys)
