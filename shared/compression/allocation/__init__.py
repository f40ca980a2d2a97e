"""Layer allocations by name: how a plan's `layer_allocation` part divides the retained rows among layers.

"attention_variance" is measured: here every layer gets the mean, and `compress.py` gives each layer its own.

Allocation comes before scoring, so every scorer works with every allocation. Adding one is one file and one
entry of `ALLOCATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.shared.compression.allocation.attention_variance import attention_variance
from kvferry.shared.compression.allocation.pyramid import pyramid
from kvferry.shared.compression.plan import ParamValue, Part, check_params
from kvferry.shared.errors import InvalidRequest


def uniform(params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """The mean in every layer; see `LayerAllocation`. Raises InvalidRequest on any parameter."""
    check_params("uniform", params, {})
    return [rows] * num_layers


LayerAllocation = Callable[[Mapping[str, ParamValue], int, int, int], list[int]]
"""(params, mean rows, number of layers, tokens of the prompt) -> rows of each layer, with just that mean."""

ALLOCATIONS: Mapping[str, LayerAllocation] = {
    "uniform": uniform,
    "pyramid": pyramid,
    "attention_variance": attention_variance,
}


def allocate_layers(part: Part, *, rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """Rows of each of `num_layers` layers, `rows` on average.

    Args:
        rows: B, 1 to `num_tokens`.
        num_layers: the number of layers that share rows; skipped layers do not.
        num_tokens: T, the most rows that a layer can retain.

    Returns: `num_layers` numbers of 1 to T; their sum is `rows * num_layers`.

    Raises: InvalidRequest: an unknown name or bad parameters.
    """
    allocation = ALLOCATIONS.get(part.name)
    if allocation is None:
        raise InvalidRequest(
            f"the plan's layer_allocation is {part.name!r}; it must be one of {', '.join(ALLOCATIONS)}",
            param="kv_compression",
        )
    return allocation(part.params, rows, num_layers, num_tokens)
