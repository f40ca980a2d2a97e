"""Column sums in Triton: two passes over K (`kernels/attention_mass.py`), no probability in memory."""

from __future__ import annotations

from torch import Tensor

from kvferry.kernels.attention_mass import attention_mass


def column_sums(queries: Tensor, keys: Tensor, *, scaling: float) -> tuple[Tensor, Tensor]:
    """Sums `[H_kv, T]` and variances `[H_kv, G]` of `ColumnSums`; the dispatch in `__init__.py` checks."""
    columns = attention_mass(queries, keys, scaling=scaling, per_query_head=True)
    return columns.sum(dim=1), columns.var(dim=-1, correction=0)
