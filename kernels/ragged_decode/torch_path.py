"""Ragged attention in torch: a matrix product over each head's rows where they lie, new rows of all heads at
once. Arguments are checked by the dispatch in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    """As `kernels.ragged_decode.ragged_decode`; the softmax in float32.

    Heads are looped over rather than padded: padding would copy all rows at every step, and rows that do not
    fit one rectangle have no view as one.
    """
    output = torch.empty_like(queries)
    new_logits = queries @ new_keys.mT
    pieces = zip(*(torch.split(rows, list(head_rows)) for rows in (keys, values)), strict=True)
    for head, (its_keys, its_values) in enumerate(pieces):
        logits = torch.cat([queries[head] @ its_keys.T, new_logits[head]], dim=1).float()
        probabilities = (logits * scaling).softmax(dim=-1).to(queries.dtype)
        output[head] = probabilities[:, : len(its_keys)] @ its_values
        output[head].addmm_(probabilities[:, len(its_keys) :], new_values[head])
    return output
