"""Rows per layer by how unevenly the layer attends: D2O section 4.1.

Computed between a prompt's pass and its compression, because it needs the variances of *all* layers' column
sums. The result depends on floating-point measurements, so only prefill computes it; the manifest carries the
counts to decode. Pure Python on L numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvferry.shared.errors import KvferryError

Normalisation = Literal["mean", "raw", "minmax"]
LOWEST_RETENTION = 0.01
_ROUNDING = 1e-6


def attention_variance(variances: Tensor, *, normalisation: Normalisation = "mean") -> Tensor:
    """Compute F_l of one layer (Eq. 4): the mean over query heads of the variance of a head's column sums.

    Deviation: the paper shows one head; the mean over query heads is from the authors' code. With "minmax"
    the heads' variances are first scaled to [0, 1], as in that code: `(F_h - min F) / (max F - min F)`, 0 if
    all are equal.

    Args: variances: float32 `[H_kv, G]`, from `kernels.column_sums`.
    Returns: float64 `[]`, on the device of `variances`; nothing waits for it.
    """
    per_head = variances.double()
    if normalisation == "minmax":
        low, high = per_head.min(), per_head.max()
        # low - low where all are equal; NaN stays
        per_head = (per_head - low) / torch.where(high == low, 1.0, high - low)
    return per_head.mean()


def layer_retentions(
    variances: Sequence[float],
    *,
    retention: float,
    normalisation: Normalisation = "mean",
    lowest: float = LOWEST_RETENTION,
) -> tuple[float, ...]:
    """Compute alpha of each layer (Eq. 5): `alpha_l = clip(e^mu softmax(-F)_l, lo, 1)`, `sum alpha = L rho`.

    Deviation: the paper's `softmax(-F) L rho` can exceed 1, and on real prompts it gives next to nothing to
    all layers but one (F grows with T). So F is divided by its mean over layers ("mean"; "raw" and "minmax"
    use F unchanged), alpha is clipped to [lo, 1], lo = min(lowest, rho), and a factor e^mu, the same for all
    layers, restores the sum after clipping. The presets use "minmax", under which layers differ by a factor
    of at most e; with "mean" a layer with sharp attention can get next to nothing.

    Args:
        variances: F of each layer, L >= 1, at least 0; for "minmax" computed with the same normalisation.
        retention: rho, in (0, 1].
        lowest: in (0, 1].

    Returns: float64, in layer order; a layer with a larger F never gets more than one with a smaller F.

    Raises: KvferryError: a variance is not a finite number of at least 0.
    """
    assert variances, "there must be at least one layer"
    assert 0 < retention <= 1, f"retention is {retention}; it must be in (0, 1]"
    assert 0 < lowest <= 1, f"lowest is {lowest}; it must be in (0, 1]"
    for layer, variance in enumerate(variances):
        if not (math.isfinite(variance) and variance >= 0):
            raise KvferryError(
                f"the attention variance of layer {layer} is {variance}; it must be a finite number of at "
                "least 0"
            )
    mean = math.fsum(variances) / len(variances) if normalisation == "mean" else 1.0
    # the softmax's denominator is the same for all layers, so it is part of mu
    logits = [-variance / mean if mean > 0 else 0.0 for variance in variances]
    return _water_fill(logits, retention=retention, low=min(lowest, retention))


def _water_fill(logits: Sequence[float], *, retention: float, low: float) -> tuple[float, ...]:
    """Compute `clip(e^(mu + logit), low, 1)` with the mu for which the mean is `retention`, by bisection.

    The mean grows with mu, from `low`, where every layer is clipped to it, to 1, where every layer is. The
    computation is in logarithms, so that no logits overflow.
    """
    log_low = math.log(low)
    target = len(logits) * retention

    def filled(mu: float) -> list[float]:
        exponents = (min(max(mu + logit, log_low), 0.0) for logit in logits)
        # exp(log(low)) may differ from low by rounding
        return [min(max(math.exp(exponent), low), 1.0) for exponent in exponents]

    below, above = log_low - max(logits), -min(logits)
    while True:
        middle = below + (above - below) / 2
        if not below < middle < above:
            return tuple(filled(above))
        if math.fsum(filled(middle)) < target:
            below = middle
        else:
            above = middle


def layer_budgets(
    variances: Sequence[float],
    *,
    num_tokens: int,
    rows: int,
    normalisation: Normalisation = "mean",
    exempt_layers: Collection[int] = (),
    least_rows: int = 1,
) -> tuple[int, ...]:
    """Compute S_l of each layer (Eq. 5), in tokens per KV head: `alpha_l * T`, rounded by largest remainder.

    Exempt layers retain every token; the other L' layers share L' * rows. (The authors' code exempts the
    first two and the last layer.)

    Args:
        variances: F of each layer, exempt layers included; see `layer_retentions`.
        num_tokens: T, at least 1.
        rows: 1 to T, what each layer would get under uniform budgets.
        least_rows: 1 to `rows`, the least that any layer gets.

    Returns: `least_rows` to T for each layer; the sum over layers that are not exempt is L' * rows. Among
        equal remainders the layer with the smaller F is rounded up, then the lowest layer.

    Raises: KvferryError: as `layer_retentions`, for layers that are not exempt.
    """
    assert 1 <= rows <= num_tokens, f"rows is {rows}; it must be 1 to {num_tokens}"
    assert 1 <= least_rows <= rows, f"least_rows is {least_rows}; it must be 1 to {rows}"
    shared = [layer for layer in range(len(variances)) if layer not in exempt_layers]
    budgets = [num_tokens] * len(variances)
    if not shared:
        return tuple(budgets)
    shared_variances = [variances[layer] for layer in shared]
    retentions = layer_retentions(
        shared_variances,
        retention=rows / num_tokens,
        normalisation=normalisation,
        lowest=max(LOWEST_RETENTION, least_rows / num_tokens),
    )
    shares = [alpha * num_tokens for alpha in retentions]
    counts = _whole_tokens(shares, len(shared) * rows, order=shared_variances)
    for layer, count in zip(shared, counts, strict=True):
        budgets[layer] = count
    return tuple(budgets)


def _whole_tokens(shares: Sequence[float], total: int, *, order: Sequence[float]) -> list[int]:
    """Round shares so that they sum to `total`; among equal remainders the lowest in `order` gets more."""
    # a share that differs from an integer only by rounding counts as that integer
    counts = [math.floor(share + _ROUNDING) for share in shares]
    ranked = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], order[i], i))
    missing = total - sum(counts)
    assert 0 <= missing <= len(counts), (missing, shares)
    for i in ranked[:missing]:
        counts[i] += 1
    return counts
