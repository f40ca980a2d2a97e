"""Exact top-k decode attention in vectorised torch; the dispatch in `__init__.py` checks arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.torch_path import dense_decode
from kvferry.kernels.top_tokens import attend_tokens, top_tokens


def token_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """The mean over the group of each head's softmax over tokens: float32 `[H_kv, n]`."""
    logits = torch.matmul(queries.float() * scaling, keys.float().transpose(1, 2))
    return logits.softmax(dim=-1).mean(1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, num_tokens: int, scaling: float) -> Tensor:
    """Over exactly the rows given."""
    if keys.shape[1] <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    tokens = top_tokens(token_scores(queries, keys, scaling=scaling), num_tokens)
    return attend_tokens(queries, keys, values, tokens, scaling=scaling)
