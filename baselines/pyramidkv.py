"""PyramidKV (Cai et al. 2024): SnapKV with many rows in the first layers and few in the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from kvferry.shared.compression.interface import Method
from kvferry.shared.compression.plan import Allowed, Between, ParamValue, Part, read_params
from kvferry.shared.compression.presets import PRESETS

_PYRAMID: Allowed = {"window": Between(1, 4096), "beta": Between(1, 4096)}


def pyramid(params: Mapping[str, ParamValue], rows: int, num_layers: int, num_tokens: int) -> list[int]:
    """Give layer l `W + b_l` rows, with b falling linearly from `2m - m/beta` to `m/beta`, `m = B - W`.

    If the first layer would get more rows than the prompt has, it gets T and the slope is less steep; the
    mean of b stays m. Fractions are rounded by largest remainder (the lower layer first), so that the total
    is exactly B x L. If the budget does not exceed the window, every layer gets B.

    Args: params: `window` (W) and `beta` (the paper's 20).
    """
    window, beta = read_params("pyramid", params, _PYRAMID).values()
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


METHOD = Method(
    plan=replace(
        PRESETS["snapkv"],
        method="pyramidkv",
        layer_allocation=Part(name="pyramid", params={"window": 32, "beta": 20}),
    ),
    allocation=pyramid,
)
