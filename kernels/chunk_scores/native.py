"""Chunk scores in C, for CPUs. The code is `kernels/native/chunks.c`."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from kvferry.kernels.native.library import library


def chunk_scores(queries: Tensor, keys: Tensor, *, chunk_tokens: int, scaling: float, shared: bool) -> Tensor:
    """Compute `chunk_scores` of CPU tensors, in as many threads as torch has; arguments are not checked.

    Raises: MemoryError: there is no memory for a chunk's logits.
    """
    queries, keys = _with_whole_rows(queries), _with_whole_rows(keys)
    num_kv_heads, group_size, num_queries, head_dim = queries.shape
    num_tokens = keys.shape[1]
    scores = torch.empty(num_kv_heads, num_tokens)
    strides = (ctypes.c_int64 * 5)(*queries.stride()[:3], *keys.stride()[:2])
    call: partial[int] = partial(
        library().kvferry_chunk_scores,
        *(queries.data_ptr(), keys.data_ptr(), strides),
        *(group_size, num_queries, num_tokens, head_dim, chunk_tokens, shared),
    )
    num_chunks = num_kv_heads * -(-num_tokens // chunk_tokens)
    num_threads = max(1, min(torch.get_num_threads(), num_chunks))
    spans = list(pairwise(i * num_chunks // num_threads for i in range(num_threads + 1)))

    def score(span: tuple[int, int]) -> int:
        return call(*span, scaling, scores.data_ptr())

    if num_threads == 1:
        failed = score(spans[0])
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            failed = max(pool.map(score, spans))
    if failed:
        raise MemoryError(f"there is no memory for the logits of {chunk_tokens} tokens")
    return scores


def _with_whole_rows(rows: Tensor) -> Tensor:
    """Return the rows as float32 with contiguous elements; a copy only where they are not."""
    rows = rows.float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()
