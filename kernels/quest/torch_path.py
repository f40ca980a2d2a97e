"""Quest's decode attention in vectorised torch: no loop over heads, tokens or pages. Arguments are checked by
the dispatch in `__init__.py`; shapes are as documented there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.dense_decode.torch_path import dense_decode
from kvferry.kernels.top_tokens import attend_tokens, top_tokens


def token_scores(
    queries: Tensor, page_max: Tensor, page_min: Tensor, *, length: int, page_size: int, scaling: float
) -> Tensor:
    """The mean over the group of each head's bounded softmax over tokens: float32 `[H_kv, n]`."""
    q = queries.float() * scaling
    # max(q Kmax, q Kmin) is q Kmax where q is positive, q Kmin where it is not
    logits = torch.matmul(q.clamp(min=0), page_max.float().transpose(1, 2))
    logits += torch.matmul(q.clamp(max=0), page_min.float().transpose(1, 2))  # [H_kv, G, pages]

    # softmax over tokens: a page's term counts once for each token it holds
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    num_pages = page_max.shape[1]
    counts = torch.full((num_pages,), float(page_size), device=q.device)
    counts[-1] = length - (num_pages - 1) * page_size
    scores = (weights / (weights @ counts)[..., None]).mean(1)
    return scores.repeat_interleave(page_size, dim=1)[:, :length]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_max: Tensor,
    page_min: Tensor,
    *,
    page_size: int,
    num_tokens: int,
    scaling: float,
) -> Tensor:
    """Over exactly the rows and pages given."""
    length = keys.shape[1]
    if length <= num_tokens:
        return dense_decode(queries, keys, values, scaling=scaling)
    scores = token_scores(queries, page_max, page_min, length=length, page_size=page_size, scaling=scaling)
    return attend_tokens(queries, keys, values, top_tokens(scores, num_tokens), scaling=scaling)
