"""Rows with a different number for each KV head, by the layer's scores (AdaKV, Feng et al. 2024).

A layer always has H_kv * B rows; the number per head depends on the scores and is sent with the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.ragged_decode import ragged_decode
from kvferry.shared.compression.formats.interface import InvalidTensors, Specs, Tensors
from kvferry.shared.compression.formats.stored import PromptAttention, StoredFormat
from kvferry.shared.compression.interface import LayerInputs, Sizing, TensorSpec
from kvferry.shared.compression.plan import Allowed, Between, Part


@dataclass(frozen=True, kw_only=True)
class Ragged(StoredFormat):
    """The heads' rows one after another without padding, `H_kv * rows` in all.

    Tensors: head_rows int32 `[H_kv]`, index int32 `[n]`, ascending within a head, keys and values `[n, D]`.

    Attributes:
        floor: fraction of an equal share of the contested rows that every head gets; see `head_budgets`.
    """

    name: ClassVar[str] = "ragged"
    heads_apart: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, str]] = {**StoredFormat.kinds, "head_rows": "index"}
    allowed: ClassVar[Allowed] = {"floor": Between(0.0, 1.0)}
    takes_latent_rows: ClassVar[bool] = True
    scored: ClassVar[bool | None] = True
    divides: ClassVar[bool] = False
    floor: float

    @classmethod
    def rows_within(cls, part: Part, sizing: Sizing) -> int:
        return min(sizing.rows, sizing.num_prompt_tokens)

    def positions_by_head(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        return torch.split(tensors["index"], tensors["head_rows"].tolist())

    def tensors(self) -> Specs:
        num_rows = self.rows * self.shape.num_kv_heads
        rows = TensorSpec(shape=(num_rows, self.shape.head_dim), dtype=self.shape.dtype)
        return {
            "head_rows": TensorSpec(shape=(self.shape.num_kv_heads,), dtype=torch.int32),
            "index": TensorSpec(shape=(num_rows,), dtype=torch.int32),
            **dict.fromkeys(self.shape.row_names, rows),
        }

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        assert scores is not None, "the heads of a whole prompt are not ragged"
        budgets = head_budgets(scores, rows=self.rows, window=_window(scores, self.rows), floor=self.floor)
        heads, positions = select_ragged_rows(scores, budgets)
        return {
            "head_rows": budgets.to(torch.int32),
            "index": positions.to(torch.int32),
            **self.shape.row_tensors(inputs.keys[heads, positions], inputs.values[heads, positions]),
        }

    def check_content(self, tensors: Tensors) -> None:
        """Check that the counts sum to n and that positions ascend within 0 to T - 1 for each head."""
        index, num_tokens, counts = tensors["index"], self.shape.num_prompt_tokens, _counts(tensors)
        if min(counts) < 0 or max(counts) > num_tokens or sum(counts) != len(index):
            raise InvalidTensors(
                f"heads have {counts} rows; each must have 0 to {num_tokens}, all {len(index)}",
                reason="packed",
            )
        heads = torch.split(index.long(), counts)
        ascending = all(bool((head.diff() > 0).all()) for head in heads)
        if not ascending or bool(((index < 0) | (index >= num_tokens)).any()):
            raise InvalidTensors(
                f"kept positions must ascend within 0 to {num_tokens - 1} for each KV head", reason="packed"
            )

    def attention(self, tensors: Tensors) -> PromptAttention:
        counts, rows = _counts(tensors), self.shape.rows_of(tensors)
        return lambda queries, keys, values, scaling: ragged_decode(
            queries, counts, *rows, keys, values, scaling=scaling
        )


def _counts(tensors: Tensors) -> list[int]:
    """Return the rows of each head, on the host."""
    return tensors["head_rows"].tolist()


def select_ragged_rows(scores: Tensor, head_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Select rows as `interface.select_rows` does, but each head has its own number of rows.

    Args: scores: float32 `[H_kv, T]`; head_rows: integers `[H_kv]`, each 0 to T.
    Returns: two int64 `[n]`: head numbers, ascending, and positions, ascending and unique per head.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    ranks = torch.arange(scores.shape[1], device=scores.device)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, ranks < head_rows[:, None])
    heads, positions = kept.nonzero(as_tuple=True)
    return heads, positions


def _window(scores: Tensor, rows: int) -> int:
    """Count the last columns that score +inf in every head: heads do not compete for them."""
    protected = (scores == torch.inf).all(dim=0)
    return min(int(protected.flip(0).long().cumprod(0).sum()), rows)


def head_budgets(scores: Tensor, *, rows: int, window: int, floor: float = 0.2) -> Tensor:
    """Split a layer's H_kv * B rows over its heads as one top-k over all heads would.

    Every head gets the window and its own best `floor(f (B - W))` rows, f being `floor`. The rest of the
    H_kv (B - W) rows go to the highest remaining scores of all heads. Among equal scores the lowest
    (head, position) wins, so that `select_rows` selects the same tokens with a head's budget.

    Deviation: the paper takes 0.8 of each head's share of a plain top-k plus 0.2 of B - W, rounded. A floor
    of 0.2 (as in kvpress, which however includes the window) needs no rounding and preserves the total.

    Args:
        scores: float32 `[H_kv, T]`; the last `window` columns are the window's and are not read.
        rows: B, the mean rows per head, `window` to T.
        window: W, at least 0.
        floor: f, the fraction of B - W that every head gets at least, in [0, 1].

    Returns:
        int64 `[H_kv]`, window included: each `W + floor(f (B - W))` to T, their sum exactly H_kv * B.
    """
    num_kv_heads, num_tokens = scores.shape
    assert 0 <= window <= rows <= num_tokens, f"window {window}, rows {rows}, tokens {num_tokens}"
    assert 0 <= floor <= 1, f"floor is {floor}; it must be in [0, 1]"
    # the shortest decimal that gives this float is what the plan says: 0.29 of 100 is 29
    guaranteed = math.floor(Fraction(repr(floor)) * (rows - window))
    ranked = scores[:, : num_tokens - window].sort(dim=1, descending=True, stable=True).values
    contested = ranked[:, guaranteed:]
    num_contested = contested.shape[1]
    num_free = num_kv_heads * (rows - window - guaranteed)
    if num_free == 0:
        return torch.full((num_kv_heads,), rows, dtype=torch.int64, device=scores.device)
    # heads in order, each by descending score: a stable sort keeps a head's winners a prefix of its ranking
    winners = contested.flatten().sort(descending=True, stable=True).indices[:num_free]
    won = torch.bincount(winners // num_contested, minlength=num_kv_heads)
    return won + (window + guaranteed)
