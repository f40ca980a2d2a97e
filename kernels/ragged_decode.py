"""Decode attention where every KV head of a layer has its own number of rows: AdaKV.

Called by the decode engine for layers whose prompt has ragged heads. Heads' rows follow one another without
padding; the rows of new tokens, equally many for every head, are separate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_same_kind, path_for


def ragged_decode(
    queries: Tensor,
    head_rows: Sequence[int],
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """Compute softmax(scaling * q K^T) V of each head over its own rows and the new ones.

    Heads are a loop, not a padded batch: padding would copy all rows at every step.

    Args: as in `kernels`.
        head_rows: n_h for each KV head, each at least 0; n is their sum.
        keys, values: `[n, D]`: head 0's rows, head 1's, ... Values of latent rows have fewer channels.
    """
    num_kv_heads, group_size, head_dim = queries.shape
    value_dim = min(head_dim, values.shape[-1])
    rows, new = (sum(head_rows),), (num_kv_heads, new_keys.shape[1])
    expected = ((*rows, head_dim), (*rows, value_dim), (*new, head_dim), (*new, value_dim))
    shapes = tuple(tuple(t.shape) for t in (keys, values, new_keys, new_values))
    if len(head_rows) != num_kv_heads or min(head_rows) < 0 or shapes != expected:
        raise ValueError(
            f"K, V and new K, V are {shapes}, rows of each head {list(head_rows)}; they must be "
            f"{expected} for {num_kv_heads} heads"
        )
    check_same_kind(queries=queries, keys=keys, values=values, new_keys=new_keys, new_values=new_values)
    if min(head_rows) + new_keys.shape[1] == 0:
        raise ValueError("a head has neither a row of the prompt nor a new one; it must have one")
    path_for("ragged_decode", queries.device)
    output = queries.new_empty(num_kv_heads, group_size, value_dim)
    new_logits = queries @ new_keys.mT
    pieces = zip(*(torch.split(tensor, list(head_rows)) for tensor in (keys, values)), strict=True)
    for head, (head_keys, head_values) in enumerate(pieces):
        logits = torch.cat([queries[head] @ head_keys.T, new_logits[head]], dim=1).float()
        probabilities = (logits * scaling).softmax(dim=-1).to(queries.dtype)
        output[head] = probabilities[:, : len(head_keys)] @ head_values
        output[head].addmm_(probabilities[:, len(head_keys) :], new_values[head])
    return output
