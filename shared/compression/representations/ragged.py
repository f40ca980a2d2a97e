"""Rows, as many of each KV head as the layer's scores ask for (AdaKV, Feng et al. 2024).

A layer keeps H_kv * B rows whatever the scores; how many each head has of them is data and travels with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvferry.kernels.ragged_decode import ragged_decode
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.head_budgets import head_budgets
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.parameters import check_params
from kvferry.shared.compression.plan import ParamValue
from kvferry.shared.compression.representations.interface import PromptShape, Specs
from kvferry.shared.compression.select import select_ragged_rows
from kvferry.shared.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class RaggedPrompt:
    """Implements `StoredPrompt`: heads one after another, padded to nothing.

    Attributes:
        head_rows: int32 `[H_kv]`, rows of each head; their sum is n.
        index: int32 `[n]`, positions, ascending within a head.
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
        """Refuse counts that are not of this many rows, and positions that no selection makes."""
        num_rows = len(self.index)
        if min(self.counts) < 0 or max(self.counts) > num_tokens or sum(self.counts) != num_rows:
            raise ValueError(
                f"heads have {list(self.counts)} rows; each must have 0 to {num_tokens}, all {num_rows}"
            )
        heads = torch.split(self.index.long(), list(self.counts))
        ascending = all(bool((its.diff() > 0).all()) for its in heads)
        if not ascending or bool(((self.index < 0) | (self.index >= num_tokens)).any()):
            raise ValueError(f"kept positions must ascend within 0 to {num_tokens - 1} for each KV head")

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor, *, scaling: float) -> Tensor:
        return ragged_decode(
            queries, self.counts, self.keys, self.values, new_keys, new_values, scaling=scaling
        )


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Implements `Representation`.

    Attributes:
        floor: part of its equal share of the contested rows that a head has at least, `head_budgets`.
    """

    floor: float

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise InvalidRequest(f"floor is {self.floor}; it must be in [0, 1]", param="kv_compression.floor")

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue]) -> Ragged:
        check_params("representation 'ragged'", params, {"floor": float})
        return cls(floor=float(params["floor"]))

    def rows_within(self, budget_rows: int, *, num_tokens: int, head_dim: int) -> int:
        return min(budget_rows, num_tokens)

    def specs(self, shape: PromptShape) -> Specs:
        num_rows = shape.num_kv_heads * shape.rows
        rows = TensorSpec(shape=(num_rows, shape.head_dim), dtype=shape.dtype)
        return {
            "head_rows": TensorSpec(shape=(shape.num_kv_heads,), dtype=torch.int32),
            "index": TensorSpec(shape=(num_rows,), dtype=torch.int32),
            "keys": rows,
            "values": rows,
        }

    def store(self, inputs: LayerInputs, *, rows: int, scores: Tensor | None) -> RaggedPrompt:
        assert scores is not None, "ragged heads keep all rows of no prompt"
        budgets = head_budgets(scores, rows=rows, window=_window(scores, rows), floor=self.floor)
        heads, positions = select_ragged_rows(scores, budgets)
        return RaggedPrompt(
            head_rows=budgets.to(torch.int32),
            index=positions.to(torch.int32),
            keys=inputs.keys[heads, positions],
            values=inputs.values[heads, positions],
        )

    def view(self, tensors: Mapping[str, Tensor]) -> RaggedPrompt:
        return RaggedPrompt(**tensors)


def _window(scores: Tensor, rows: int) -> int:
    """The last columns that every head must keep: no head competes for them."""
    protected = (scores == torch.inf).all(dim=0)
    return min(int(protected.flip(0).long().cumprod(0).sum()), rows)
