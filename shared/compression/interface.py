"""The interface of a compression method: a layer's inputs, the scorer, and methods of other packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from kvferry.kernels.column_sums import ColumnSums, column_sums
from kvferry.shared.compression.plan import CompressionPlan, ParamValue

if TYPE_CHECKING:
    from kvferry.shared.compression.formats.interface import LayerFormat


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """One layer of one prompt, as prefill computed it.

    Attributes:
        queries: post-RoPE `[H_kv, G, T_new, D]`, of the tokens run in this turn.
        keys, values: `[H_kv, T, D]`, history and new tokens; keys post-RoPE. T >= T_new >= 1.
        scaling: the model's softmax scale.
        unrotate: turns this layer's post-RoPE keys `[H_kv, n, D]` at positions 0 to n - 1 into pre-RoPE keys,
            float32; None if there is no model.
        sums: accumulated attention; None until it has been computed, see `with_sums`.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    unrotate: Callable[[Tensor], Tensor] | None = None
    sums: ColumnSums | None = None

    def with_sums(self) -> LayerInputs:
        """These inputs with `sums`, which is computed from all queries if it is missing."""
        if self.sums is not None:
            return self
        return replace(self, sums=column_sums(self.queries, self.keys, scaling=self.scaling))

    def pre_rope_keys(self) -> Tensor:
        """`keys` without their positions, float32 `[H_kv, T, D]`; computed at each call.

        Raises: UnsupportedModel: the model's rotation cannot be undone.
        """
        assert self.unrotate is not None, "a scorer asks for pre-RoPE keys, which its caller does not have"
        return self.unrotate(self.keys)


class Scorer(Protocol):
    """Scores every token of every KV head; the tokens with the highest scores are selected."""

    @property
    def observed_queries(self) -> int | None:
        """How many of the prompt's last queries the scores depend on; None: all of them."""
        ...

    @property
    def depends_on_rows(self) -> bool:
        """Whether scores depend on the number of selected rows, apart from protecting fixed tokens."""
        ...

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`; +inf marks tokens that must be selected."""
        ...


ScorerFactory = Callable[[Mapping[str, ParamValue], int], Scorer]
"""(a plan's parameters, rows to select per KV head) -> scorer; raises InvalidRequest on bad parameters."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of another package, named by an entry point of the group `kvferry.methods`.

    Attributes:
        plan: the preset; `plan.method` is the entry point's name.
        scorer: makes the scorer that `plan.scorer` names; None if that is one of kvferry's.
        format: the format that `plan.representation` names; None if that is one of kvferry's.
    """

    plan: CompressionPlan
    scorer: ScorerFactory | None = None
    format: type[LayerFormat] | None = None
