"""The same number of rows in every layer."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.shared.compression.parameters import check_params
from kvferry.shared.compression.plan import ParamValue


def uniform(params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """See `LayerAllocation`. Raises InvalidRequest where any parameter is given."""
    check_params("uniform", params, {})
    return [rows] * num_layers
