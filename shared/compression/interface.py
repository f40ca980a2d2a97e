"""What a compression method sees of a layer, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvferry.kernels.column_sums import ColumnSums, column_sums
from kvferry.kernels.packed import PackedLayer
from kvferry.shared.compression.plan import CompressionPlan, ParamValue


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """One layer of one prompt, as prefill has it.

    Attributes:
        queries: post-RoPE `[H_kv, G, T_new, D]`, the tokens run in this turn.
        keys, values: `[H_kv, T, D]`, history and new tokens; keys post-RoPE. T >= T_new >= 1.
        scaling: the model's softmax scale.
        unrotate: turns this layer's post-RoPE keys `[H_kv, n, D]` at positions 0 to n - 1 into pre-RoPE ones,
            float32; None where there is no model to ask.
        sums: accumulated attention, once it has been computed; see `with_sums`.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    unrotate: Callable[[Tensor], Tensor] | None = None
    sums: ColumnSums | None = None

    def with_sums(self) -> LayerInputs:
        """The same with `sums` there, computed from all queries unless it is."""
        if self.sums is not None:
            return self
        return replace(self, sums=column_sums(self.queries, self.keys, scaling=self.scaling))

    def pre_rope_keys(self) -> Tensor:
        """`keys` without their positions, float32 `[H_kv, T, D]`; computed at each call.

        Raises: UnsupportedModel where the model's rotation cannot be undone.
        """
        assert self.unrotate is not None, "a scorer asks for pre-RoPE keys, which its caller does not have"
        return self.unrotate(self.keys)


class StoredPrompt(Protocol):
    """One layer's prompt in a representation of `representations/`: neither plain rows nor packed by RDKV."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Contiguous; names, shapes and dtypes are those of `Representation.specs`."""
        ...

    def check(self, num_tokens: int) -> None:
        """Refuse what `store` never makes. Args: num_tokens: T. Raises: ValueError."""
        ...

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor, *, scaling: float) -> Tensor:
        """Attention of one token, `[H_kv, G, D]` to the same, over the prompt and new rows `[H_kv, m, D]`."""
        ...


@dataclass(frozen=True, kw_only=True)
class CompressedLayer:
    """What is kept of a layer: rows in position order, or a prompt stored otherwise and no rows.

    Attributes:
        keys, values: `[H_kv, n, D]`, contiguous, compute dtype.
        positions: int32 `[H_kv, n]`, ascending and unique per head; None where every token is kept.
        packed: the layer packed, n = 0 then; None where it is not.
        stored: the layer stored as neither rows nor packed, n = 0 then; None where it is either.
        wire: the rows as they travel, where that is not as they are; `keys` and `values` are then what the
            receiver makes of it.
        state: float32, flat: what the layer's decode attention is to be loaded with (`AttentionKind.load`);
            None where it needs nothing.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | None = None
    packed: PackedLayer | None = None
    stored: StoredPrompt | None = None
    wire: StoredPrompt | None = None
    state: Tensor | None = None

    def positions_by_head(self) -> tuple[Tensor | None, ...]:
        """The kept tokens of each KV head, integers `[n_h]` in no particular order; None where all are."""
        if self.packed is not None:
            return tuple(head.positions for head in self.packed.heads)
        parts = self.stored.tensors if self.stored is not None else {}
        if "head_rows" in parts:
            return torch.split(parts["index"], parts["head_rows"].tolist())
        positions = parts.get("index", self.positions)
        return (None,) * self.keys.shape[0] if positions is None else tuple(positions)


class Scorer(Protocol):
    """Scores every token of every KV head; higher is kept."""

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`; +inf marks tokens that must be kept."""
        ...


ScorerFactory = Callable[[Mapping[str, ParamValue], int], Scorer]
"""(a plan's parameters, rows to be kept per KV head) -> scorer; raises InvalidRequest on bad parameters."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method from outside the package: what an entry point of the group `kvferry.methods` names.

    Attributes:
        plan: the preset; `plan.method` is the entry point's own name.
        scorer: makes the scorer that `plan.scorer` names, where that is none of the package's.
    """

    plan: CompressionPlan
    scorer: ScorerFactory | None = None
