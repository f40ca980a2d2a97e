"""top_k and top_p: which of a row's weights may be drawn, without sorting the whole vocabulary. With top_k,
the largest weights are sorted, as many as `most` says. With top_p alone, the smallest weight that is selected
is searched for: on CUDA digit by digit in a fixed number of launches, so that a step can be captured; on a
CPU among the largest 1,024 first, where a trained model's nucleus nearly always ends, then by dividing those
that are left at one of them. Does not draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.kernels.decoder_ops import nucleus

_HEAD = 1024
"""More weights than a trained model's nucleus has, nearly always."""
_FEW = 512
"""This many weights or fewer are sorted rather than divided."""
_SAMPLES = 33


def truncated(weights: Tensor, top_k: Tensor, top_p: Tensor, *, most: int, nuclei: bool) -> Tensor:
    """Set the weights that top_k and top_p exclude to zero. The largest one is never excluded; of equal ones,
    that of the lowest index.

    Args:
        weights: float64 `[B, V]`, not normalised, at least 0; top_k, top_p `[B, 1]`, 0 and 1 for none.
        most, nuclei: see `Flavour`.
    """
    total = weights.cumsum(1)[:, -1:]
    least = torch.full_like(top_p, -1.0)
    number = torch.full_like(top_p, weights.shape[1], dtype=torch.int64)
    if most:
        of_top_k = _of_largest(weights, most, total, top_k, top_p)
        least, number = _replaced((least, number), top_k > 0, of_top_k)
    if nuclei:
        searched = (top_k == 0) & (top_p < 1.0)
        of_top_p = (_nuclei_on_cpu if weights.is_cpu else _nuclei)(weights, total, top_p, searched)
        least, number = _replaced((least, number), searched, of_top_p)
    above, equal = weights > least, weights == least
    first = equal.cumsum(1, dtype=torch.int32) <= number - above.sum(1, keepdim=True)
    return torch.where(above | (equal & first), weights, 0.0)


_Cut = tuple[Tensor, Tensor]
"""The smallest weight that is selected `[B, 1]`, and how many are, int64 `[B, 1]`."""


def _replaced(cut: _Cut, where: Tensor, other: _Cut) -> _Cut:
    return torch.where(where, other[0], cut[0]), torch.where(where, other[1], cut[1])


def _of_largest(weights: Tensor, count: int, total: Tensor, top_k: Tensor, top_p: Tensor) -> _Cut:
    """Return the cut of rows that select no more than `count`."""
    ordered = weights.topk(min(count, weights.shape[1]), dim=1).values
    number = _num_inside(ordered, total, top_k, top_p)
    return ordered.gather(1, number - 1), number


def _num_inside(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return how many of the largest weights top_k and top_p select, int64 `[B, 1]`: at least 1, at most n.

    Args: ordered: float64 `[B, n]`, descending; total: of all weights, `[B, 1]`.
    """
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    counted = (rank < top_k) | (top_k == 0)
    ordered = torch.where(counted, ordered, 0.0)
    reached = ordered.cumsum(1)
    total = torch.where(top_k > 0, reached[:, -1:], total)
    inside = (reached - ordered < top_p * total) | (top_p >= 1.0)
    return (inside & counted).sum(1, keepdim=True).clamp(min=1)


def _nuclei(weights: Tensor, total: Tensor, top_p: Tensor, searched: Tensor) -> _Cut:
    """Find cuts on a device, without reads on the host. Args: searched: bool `[B, 1]`, rows that have a
    result."""
    goal = top_p * total
    least = nucleus(weights, goal)
    above = weights > least
    before = torch.where(above, weights, 0.0).sum(1, keepdim=True)
    # among equal weights, those before which the goal is not reached
    equals = ((goal - before) / least).ceil().clamp(1, weights.shape[1]).nan_to_num(1.0).long()
    return least, above.sum(1, keepdim=True) + equals


def _nuclei_on_cpu(weights: Tensor, total: Tensor, top_p: Tensor, searched: Tensor) -> _Cut:
    none = torch.zeros_like(top_p)
    least, number = _of_largest(weights, _HEAD, total, none, top_p)
    if weights.shape[1] > _HEAD:
        for row in (searched & (number == _HEAD))[:, 0].nonzero()[:, 0].tolist():
            goal = float(top_p[row] * total[row])
            least[row], number[row] = _divided(weights[row], goal)
    return least, number


def _divided(weights: Tensor, goal: float) -> tuple[float, int]:
    """Find a row's cut: its weights are divided at one of them, then again the part that has the cut."""
    left, reached, num_above = weights, 0.0, 0
    while len(left) > _FEW:
        step = len(left) // _SAMPLES
        pivot = left[: step * _SAMPLES : step].median()
        larger = left[left > pivot]
        sum_larger = reached + float(larger.sum())
        if sum_larger >= goal:
            left = larger
            continue
        reached, num_above = sum_larger, num_above + len(larger)
        smaller = left[left < pivot]
        num_equal = len(left) - len(larger) - len(smaller)
        with_equal = reached + num_equal * float(pivot)
        if with_equal >= goal or not len(smaller):
            left = pivot.expand(num_equal)
            break
        left, reached, num_above = smaller, with_equal, num_above + num_equal
    ordered = left.sort(descending=True).values
    before = reached + (ordered.cumsum(0) - ordered)
    number = max(int((before < goal).sum()), 1)
    return float(ordered[number - 1]), num_above + number
