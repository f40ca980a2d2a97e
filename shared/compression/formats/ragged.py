"""Rows with a different number for each KV head, by the layer's scores (AdaKV, Feng et al. 2024).

A layer always has H_kv * B rows; the number per head depends on the scores and is sent with the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.ragged_decode import ragged_decode
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerShape,
    Specs,
    Tensors,
    select_ragged_rows,
)
from kvferry.shared.compression.formats.stored import StoredFormat
from kvferry.shared.compression.head_budgets import head_budgets
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, check_params
from kvferry.shared.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class RaggedPrompt:
    """Implements `StoredPrompt`: the heads' rows one after another, without padding.

    Attributes:
        head_rows: int32 `[H_kv]`, rows of each head; their sum is n.
        index: int32 `[n]`, selected positions, ascending within a head.
        keys, values: `[n, D]`.
    """

    head_rows: Tensor
    index: Tensor
    keys: Tensor
    values: Tensor

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """`head_rows` on the host."""
        return tuple(self.head_rows.tolist())

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {"head_rows": self.head_rows, "index": self.index, "keys": self.keys, "values": self.values}

    def check(self, num_tokens: int) -> None:
        """Check that the counts sum to n and that positions ascend within 0 to T - 1 for each head.

        Raises: InvalidTensors: otherwise.
        """
        num_rows = len(self.index)
        if min(self.counts) < 0 or max(self.counts) > num_tokens or sum(self.counts) != num_rows:
            raise InvalidTensors(
                f"heads have {list(self.counts)} rows; each must have 0 to {num_tokens}, all {num_rows}",
                reason="packed",
            )
        heads = torch.split(self.index.long(), list(self.counts))
        ascending = all(bool((its.diff() > 0).all()) for its in heads)
        if not ascending or bool(((self.index < 0) | (self.index >= num_tokens)).any()):
            raise InvalidTensors(
                f"kept positions must ascend within 0 to {num_tokens - 1} for each KV head", reason="packed"
            )

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor, *, scaling: float) -> Tensor:
        return ragged_decode(
            queries, self.counts, self.keys, self.values, new_keys, new_values, scaling=scaling
        )


@dataclass(frozen=True, kw_only=True)
class Ragged(StoredFormat):
    """The heads' rows one after another, `H_kv * rows` in all.

    Attributes:
        floor: fraction of an equal share of the contested rows that every head gets; see `head_budgets`.
    """

    name: ClassVar[str] = "ragged"
    kinds: ClassVar[Mapping[str, str]] = {
        "head_rows": "index", "index": "index", "keys": "rows", "values": "rows"
    }  # fmt: skip
    floor: float

    @classmethod
    def _params(cls, part: Part) -> float:
        check_params("representation 'ragged'", part.params, {"floor": float})
        floor = float(part.params["floor"])
        if not 0 <= floor <= 1:
            raise InvalidRequest(f"floor is {floor}; it must be in [0, 1]", param="kv_compression.floor")
        return floor

    @classmethod
    def check(cls, plan: CompressionPlan) -> None:
        if plan.scorer is None:
            raise InvalidRequest(
                "representation 'ragged' does not go without a scorer: it shares rows between heads by their "
                "scores",
                param="kv_compression",
            )
        super().check(plan)

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Ragged:
        return cls(shape=shape, rows=layer.rows, floor=cls._params(layer.representation))

    @classmethod
    def rows_within(cls, part: Part, budget_rows: int, *, num_tokens: int, head_dim: int) -> int:
        return min(budget_rows, num_tokens)

    def positions_by_head(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        return torch.split(tensors["index"], tensors["head_rows"].tolist())

    def tensors(self) -> Specs:
        num_rows = self.shape.num_kv_heads * self.rows
        rows = TensorSpec(shape=(num_rows, self.shape.head_dim), dtype=self.shape.dtype)
        return {
            "head_rows": TensorSpec(shape=(self.shape.num_kv_heads,), dtype=torch.int32),
            "index": TensorSpec(shape=(num_rows,), dtype=torch.int32),
            "keys": rows,
            "values": rows,
        }

    def store(self, inputs: LayerInputs, scores: Tensor | None) -> RaggedPrompt:
        assert scores is not None, "ragged heads keep all rows of no prompt"
        budgets = head_budgets(scores, rows=self.rows, window=_window(scores, self.rows), floor=self.floor)
        heads, positions = select_ragged_rows(scores, budgets)
        return RaggedPrompt(
            head_rows=budgets.to(torch.int32),
            index=positions.to(torch.int32),
            keys=inputs.keys[heads, positions],
            values=inputs.values[heads, positions],
        )

    def prompt(self, tensors: Tensors) -> RaggedPrompt:
        return RaggedPrompt(**tensors)


def _window(scores: Tensor, rows: int) -> int:
    """The number of last columns that score +inf in every head: heads do not compete for them."""
    protected = (scores == torch.inf).all(dim=0)
    return min(int(protected.flip(0).long().cumprod(0).sum()), rows)
