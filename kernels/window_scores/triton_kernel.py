"""Window scores in Triton: two passes over K (`kernels/attention_mass.py`), no probability in memory."""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.attention_mass import attention_mass


def window_scores(queries: Tensor, keys: Tensor, *, scaling: float) -> Tensor:
    """As `kernels.window_scores.window_scores`; arguments are checked by the dispatch in `__init__.py`."""
    return attention_mass(queries, keys, scaling=scaling, per_query_head=False)
