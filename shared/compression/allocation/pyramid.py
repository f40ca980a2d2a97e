"""PyramidKV's layer budgets (Cai et al. 2024): many rows in the first layers, few in the last."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from kvferry.shared.compression.plan import ParamValue, check_params
from kvferry.shared.errors import InvalidRequest


def pyramid(params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """`W + b_l` rows in layer l, with b falling linearly from `2m - m/beta` to `m/beta`, `m = B - W`.

    If the first layer would get more rows than the prompt has, it gets T and the slope is less steep; the
    mean of b stays m. Fractions are rounded by largest remainder (the lower layer first), so that the total
    is exactly B x L. The arithmetic is exact, so every worker gets the same numbers. If the budget does not
    exceed the window, every layer gets B.

    Args: params: `window` (int, W, at least 1) and `beta` (int, at least 1; the paper's 20).

    Raises: InvalidRequest: parameters are missing, unknown or out of range.
    """
    check_params("pyramid", params, {"window": int, "beta": int})
    window, beta = int(params["window"]), int(params["beta"])
    for name, value in (("window", window), ("beta", beta)):
        if value < 1:
            raise InvalidRequest(f"{name} is {value}; it must be at least 1", param=f"kv_compression.{name}")
    mean = rows - window
    if mean <= 0 or num_layers < 2:
        return [rows] * num_layers
    last = Fraction(mean, beta)
    first = 2 * mean - last
    if first > num_tokens - window:
        first = Fraction(num_tokens - window)
        last = 2 * mean - first
    step = (first - last) / (num_layers - 1)
    exact = [first - step * layer for layer in range(num_layers)]
    floors = [int(share) for share in exact]
    missing = mean * num_layers - sum(floors)
    by_remainder = sorted(range(num_layers), key=lambda layer: (floors[layer] - exact[layer], layer))
    for layer in by_remainder[:missing]:
        floors[layer] += 1
    return [window + share for share in floors]
