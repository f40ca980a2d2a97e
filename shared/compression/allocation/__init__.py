"""Layer allocations by name: how a plan's `layer_allocation` part shares the kept rows between layers.

"attention_variance" is measured: here it gives every layer the mean, and `compress.py` each its own.

Applied before any scorer, so every scorer works with every allocation. Adding one is one file and one entry
of `ALLOCATIONS`. Knows nothing of what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.shared.compression.allocation.attention_variance import attention_variance
from kvferry.shared.compression.allocation.pyramid import pyramid
from kvferry.shared.compression.plan import ParamValue, Part, check_params
from kvferry.shared.errors import InvalidRequest


def uniform(params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """See `LayerAllocation`. Raises InvalidRequest where any parameter is given."""
    check_params("uniform", params, {})
    return [rows] * num_layers


LayerAllocation = Callable[[Mapping[str, ParamValue], int, int, int], list[int]]
"""(params, mean rows, number of layers, tokens of the prompt) -> rows of each layer, of that mean exactly."""

ALLOCATIONS: Mapping[str, LayerAllocation] = {
    "uniform": uniform,
    "pyramid": pyramid,
    "attention_variance": attention_variance,
}


def allocate_layers(part: Part, *, rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """Rows of each of `num_layers` layers, `rows` on average.

    Args:
        rows: B, 1 to `num_tokens`.
        num_layers: the layers that share; skipped ones do not.
        num_tokens: T, the most that a layer can keep.

    Returns: `num_layers` numbers of 1 to T; their sum is `rows * num_layers`.

    Raises: InvalidRequest: unknown name or bad parameters.
    """
    allocation = ALLOCATIONS.get(part.name)
    if allocation is None:
        raise InvalidRequest(
            f"the plan's layer_allocation is {part.name!r}; it must be one of {', '.join(ALLOCATIONS)}",
            param="kv_compression",
        )
    return allocation(part.params, rows, num_layers, num_tokens)
