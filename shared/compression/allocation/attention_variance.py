"""D2O's layer budgets as an allocation: more rows where a layer attends evenly (section 4.1).

The shares depend on the prompt: prefill measures them (`compress.py`) and sends them to decode in the
manifest. Before that only their mean is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args

from kvferry.shared.compression.d2o.layer_budgets import Normalisation
from kvferry.shared.compression.plan import ParamValue, check_params
from kvferry.shared.errors import InvalidRequest


def attention_variance(
    params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int
) -> list[int]:
    """See `LayerAllocation`: the mean in every layer, because the prompt has not been run yet.

    Args: params: `normalisation` ("mean", "raw" or "minmax"; see `layer_budgets`).

    Raises: InvalidRequest: parameters are missing, unknown or out of range.
    """
    variance_normalisation(params)
    return [rows] * num_layers


def variance_normalisation(params: Mapping[str, ParamValue]) -> Normalisation:
    """The allocation's one parameter. Raises InvalidRequest as `attention_variance`."""
    check_params("attention_variance", params, {"normalisation": str})
    normalisation = params["normalisation"]
    if normalisation not in get_args(Normalisation):
        raise InvalidRequest(
            f"normalisation is {normalisation!r}; it must be one of {', '.join(get_args(Normalisation))}",
            param="kv_compression.normalisation",
        )
    return cast(Normalisation, normalisation)
