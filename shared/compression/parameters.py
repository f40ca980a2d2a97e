"""Checks the parameters of one part of a plan. Used by scorers and allocations when they are made."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.shared.compression.plan import ParamValue
from kvferry.shared.errors import InvalidRequest


def check_params(name: str, params: Mapping[str, ParamValue], expected: Mapping[str, type]) -> None:
    """Raises InvalidRequest unless `params` has exactly the names of `expected`, each of its type.

    Types are exact: a bool is no int, an int is no float.
    """
    if set(params) == set(expected) and all(type(params[k]) is t for k, t in expected.items()):
        return
    takes = ", ".join(f"{k} ({t.__name__})" for k, t in expected.items()) or "no parameters"
    raise InvalidRequest(f"{name} was given {dict(params)}; it takes {takes}", param="kv_compression")
