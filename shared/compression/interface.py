"""The interface of a compression method: a layer's shape and inputs, scorers, methods of other packages.

Those are entry points of the group `kvferry.methods`:

    [project.entry-points."kvferry.methods"]
    every-other = "some_package:METHOD"        # a `Method`

They are loaded once, when a method is first looked up; importing this module loads nothing. Router and
workers must have the same packages installed: a worker refuses a method that it does not know.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kvferry.kernels.column_sums import ColumnSums, column_sums, window_scores
from kvferry.kernels.descriptors import ALIGNMENT_BYTES
from kvferry.shared.compression.plan import METHOD_GROUP, CompressionPlan, ParamValue
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.question import Question
from kvferry.shared.model.spec import StateSpec, row_names

if TYPE_CHECKING:
    from kvferry.shared.compression.attention import AttentionKind
    from kvferry.shared.compression.formats.interface import LayerFormat

_BROUGHT = {
    "scorer": "scorer",
    "representation": "format",
    "attention": "attention",
    "layer_allocation": "allocation",
}
"""The parts of a plan that a `Method` may bring, and what it calls them."""
_LEAST_WINDOW = 8
"""Queries of a window whose question is shorter. One token alone says little of what is asked."""
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor that needs room.

    Attributes:
        aligned: whether kernels read the last dimension in pieces of ALIGNMENT_BYTES. Each slice along it
            then begins at a multiple of that, and the padding between slices is not used.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool = False

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the tensor without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """The shape with padding for alignment; the tensor itself comes first in each dimension."""
        if not self.aligned:
            return self.shape
        *outer, length = self.shape
        piece = max(ALIGNMENT_BYTES // self.dtype.itemsize, 1)
        return (*outer, -(-length // piece) * piece)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a layer's sizes depend on, besides its plan.

    Attributes:
        num_prompt_tokens: T, history included.
        max_new_tokens: N; the last new token never gets a KV row.
        group_size: G, query heads per KV head.
        dtype: of K and V.
        latent_dim: as in `LayerSpec`.
        returns_generated: whether K and V of new tokens are wanted at the end, unmerged and in order.
        fingerprint: of the served model.
        state: as in `LayerSpec`; such a layer has nothing else.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    dtype: torch.dtype
    latent_dim: int = 0
    returns_generated: bool = False
    fingerprint: str = ""
    state: tuple[StateSpec, ...] = ()

    @property
    def num_new_rows(self) -> int:
        return max(self.max_new_tokens - 1, 0)

    @property
    def value_dim(self) -> int:
        """Channels of a value, D unless rows are latent."""
        return self.latent_dim or self.head_dim

    @cached_property
    def row_names(self) -> tuple[str, ...]:
        """The tensors of rows: "keys" and "values", or of latent rows "keys" alone."""
        return row_names(self.latent_dim)

    def row_specs(self, num_rows: int) -> dict[str, TensorSpec]:
        rows = TensorSpec(shape=(self.num_kv_heads, num_rows, self.head_dim), dtype=self.dtype)
        return dict.fromkeys(self.row_names, rows)

    def row_tensors(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return rows as they are stored, contiguous. Args: K and V of any rows, D channels last."""
        return {name: rows.contiguous() for name, rows in zip(self.row_names, (keys, values), strict=False)}

    def rows_of(self, tensors: Mapping[str, Tensor], prefix: str = "") -> tuple[Tensor, Tensor]:
        """Return K and V of stored rows; of latent rows V is a view of K."""
        keys = tensors[f"{prefix}keys"]
        values = keys[..., : self.latent_dim] if self.latent_dim else tensors[f"{prefix}values"]
        return keys, values

    def rows_bytes(self, num_rows: int) -> int:
        """Count the bytes of `num_rows` rows per KV head, K and V."""
        return len(self.row_names) * self.num_kv_heads * num_rows * self.head_dim * self.dtype.itemsize

    def index_spec(self, num_rows: int) -> dict[str, TensorSpec]:
        """Return the selected positions, int32 `[H_kv, n]`; empty if every token is selected."""
        if num_rows == self.num_prompt_tokens:
            return {}
        return {"index": TensorSpec(shape=(self.num_kv_heads, num_rows), dtype=torch.int32)}


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The budget of one layer, from which its format computes exact sizes.

    Attributes:
        layer: its index in the model.
        rows: the layer's budget as prompt rows per KV head; decode's attention chooses from them.
        budget: t, the plan's budget in tokens.
        latent_dim: as in `LayerSpec`.
    """

    layer: int
    rows: int
    budget: int
    num_prompt_tokens: int
    max_new_tokens: int
    head_dim: int
    latent_dim: int = 0

    @property
    def row_dim(self) -> int:
        """Channels that a row stores in one KV head: 2 d for K and V, d of a latent row."""
        return self.head_dim if self.latent_dim else 2 * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """One layer of tokens that a draft has after the prompt.

    Attributes: queries: post-RoPE `[H_kv, G, n, D]`; keys, values: `[H_kv, n, D]`, keys post-RoPE; n >= 1.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor

    def followed_by(self, other: Ahead) -> Ahead:
        """Return these tokens, then the other's."""
        return Ahead(
            queries=torch.cat([self.queries, other.queries], 2),
            keys=torch.cat([self.keys, other.keys], 1),
            values=torch.cat([self.values, other.values], 1),
        )


class Observing(NamedTuple):
    """Queries by whose attention a prompt is scored.

    Attributes: queries: `[H_kv, G, W, D]`, W >= 1; num_after: tokens of the prompt after them.
    """

    queries: Tensor
    num_after: int


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """One layer of one prompt, as prefill computed it.

    Attributes:
        queries: post-RoPE `[H_kv, G, T_new, D]`, of the tokens run in this turn, or of the last of them if
            the method observes no more.
        keys, values: `[H_kv, T, D]`, history and new tokens; keys post-RoPE. T >= T_new >= 1. Of latent rows
            values are a view of the keys' first channels, and queries are absorbed (`model/adapters/latent`).
        scaling: the model's softmax scale.
        unrotate: turns this layer's post-RoPE keys `[H_kv, n, D]` at positions 0 to n - 1 into pre-RoPE keys,
            float32; None if there is no model.
        sums: accumulated attention; None until it has been computed, see `with_sums`.
        ahead: of the draft's tokens; None if there is no draft.
        question: where the prompt has it; None if that is not known.
        repeated: float32 `[H_kv, T]`, the most attention that each token gets while the prompt is repeated
            (`reconstruct.py`); None if it is not.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    unrotate: Callable[[Tensor], Tensor] | None = None
    sums: ColumnSums | None = None
    ahead: Ahead | None = None
    question: Question | None = None
    repeated: Tensor | None = None

    @classmethod
    def of(
        cls,
        pre_rope_keys: Callable[[int, Tensor], Tensor],
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        question: Question | None = None,
    ) -> LayerInputs:
        """Return what a model tells the observer of its pass of a layer.

        Args:
            pre_rope_keys: the model's.
            layer, queries, keys, values, scaling: as in `PrefillObserver.layer_done`.
            question: the prompt's.
        """
        return cls(
            layer=layer,
            queries=queries,
            keys=keys,
            values=values,
            scaling=scaling,
            unrotate=partial(pre_rope_keys, layer),
            question=question,
        )

    def observing(self, window: int) -> Observing:
        """Return the queries that a method with this window observes: the question's last ones, without those
        of the template's tokens after it.

        They are at most `window`, and no more than the question has, or 8 if it has fewer; fewer if fewer
        were run. If the question is not known, or nothing of it was run, they are the prompt's last ones.

        Deviation: the papers' windows are the prompt's last queries, whatever these ask. A window that
        reaches from a short question into the text before it selects for that text, too.
        """
        num_queries, num_after = self.queries.shape[2], 0
        if self.question is not None and self.question.num_after < num_queries:
            num_after = self.question.num_after
            window = min(window, max(self.question.num_tokens, _LEAST_WINDOW))
        end = num_queries - num_after
        return Observing(self.queries[:, :, max(end - window, 0) : end], num_after)

    def window_sums(self, window: int) -> Tensor:
        """Sum the columns of causal attention: `s_t = sum_{g, i} softmax(q_{g,i} K^T * scaling)_t`, i over
        the queries of `observing(window)`. These do not see the tokens after them, for which i is over the
        queries of those tokens.

        Returns: float32 `[H_kv, T]`.
        """
        queries, num_after = self.observing(window)
        end = self.keys.shape[1] - num_after
        sums = window_scores(queries, self.keys[:, :end], scaling=self.scaling)
        if not num_after:
            return sums
        later = window_scores(self.queries[:, :, -num_after:], self.keys, scaling=self.scaling)
        return torch.cat([sums, later[:, end:]], dim=1)

    def with_sums(self) -> LayerInputs:
        """Return these inputs with `sums`, which is computed from all queries if it is missing."""
        if self.sums is not None:
            return self
        return replace(self, sums=column_sums(self.queries, self.keys, scaling=self.scaling))

    def pre_rope_keys(self) -> Tensor:
        """Compute `keys` without their positions, float32 `[H_kv, T, D]`, at each call.

        Raises: UnsupportedModel: the model's rotation cannot be undone.
        """
        assert self.unrotate is not None, "a scorer asks for pre-RoPE keys, which its caller does not have"
        return self.unrotate(self.keys)


def gather_rows(rows: Tensor, positions: Tensor) -> Tensor:
    """Gather rows `[H_kv, T, D]` at positions `[H_kv, n]`: `[H_kv, n, D]`, contiguous."""
    return rows.gather(1, positions.to(torch.int64)[:, :, None].expand(-1, -1, rows.shape[2]))


class Scorer(Protocol):
    """Scores every token of every KV head; the tokens with the highest scores are selected."""

    @property
    def observed_queries(self) -> int | None:
        """The number of the prompt's last queries that the scores depend on, without those after the question
        (see `LayerInputs.observing`); None: all of them."""

    @property
    def protected_rows(self) -> int:
        """The number of rows per KV head that the scores mark with +inf; a smaller budget is raised to it."""

    @property
    def depends_on_rows(self) -> bool:
        """Say whether scores depend on the number of selected rows, apart from protecting fixed tokens."""

    @property
    def scores_heads_apart(self) -> bool:
        """Say whether a KV head's scores are the same whichever others are scored with it. Then each rank of
        a worker with several ranks compresses its heads itself."""

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Return float32 `[H_kv, T]`; +inf marks tokens that must be selected."""


ScorerFactory = Callable[[Mapping[str, ParamValue], int], Scorer]
"""(a plan's parameters, rows to select per KV head) -> scorer; raises InvalidRequest on bad parameters."""
LayerAllocation = Callable[[Mapping[str, ParamValue], int, int, int], list[int]]
"""(params, mean rows, number of layers, tokens of the prompt) -> rows of each layer, with just that mean.
Raises InvalidRequest: parameters are missing, unknown or out of range."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of another package, named by an entry point of the group `kvferry.methods`.

    Attributes:
        plan: the preset; `plan.method` is the entry point's name.
        scorer: makes the scorer that `plan.scorer` names; None if that is one of kvferry's.
        format: the format that `plan.representation` names; None if that is one of kvferry's.
        attention: the decode attention that `plan.attention` names; None if that is one of kvferry's.
        allocation: the layer allocation that `plan.layer_allocation` names; None if that is one of kvferry's.
    """

    plan: CompressionPlan
    scorer: ScorerFactory | None = None
    format: type[LayerFormat] | None = None
    attention: type[AttentionKind] | None = None
    allocation: LayerAllocation | None = None


@functools.cache
def installed_methods() -> Mapping[str, Method]:
    """Return the installed methods by name.

    Raises: ConfigurationError: an entry point cannot be loaded, is not a `Method`, or its name is taken.
    """
    methods: dict[str, Method] = {}
    for entry in entry_points(group=METHOD_GROUP):
        method = _load(entry)
        if methods.setdefault(entry.name, method) is not method:
            raise ConfigurationError(f"two entry points of {METHOD_GROUP} are named {entry.name!r}")
    return methods


@functools.cache
def installed_parts(part: str) -> Mapping[str, Any]:
    """Return what installed methods bring for a part of a plan, by the name that plans use.

    Args: part: an attribute of `CompressionPlan`, one of `_BROUGHT`.
    Raises: ConfigurationError: as `installed_methods`; or two methods bring different parts of one name.
    """
    what, found = _BROUGHT[part], dict[str, Any]()
    for method, definition in installed_methods().items():
        named, entry = getattr(definition.plan, part), getattr(definition, what)
        if named is not None and entry is not None and found.setdefault(named.name, entry) is not entry:
            raise ConfigurationError(
                f"method {method!r} brings a {what} {named.name!r}; another method does too"
            )
    return found


def with_installed(
    what: str, own: Mapping[str, _Entry], installed: Mapping[str, _Entry]
) -> Mapping[str, _Entry]:
    """Return the package's entries of a registry, then those of installed packages.

    Raises: ConfigurationError: an installed package uses a name of the package.
    """
    if taken := sorted(set(own) & set(installed)):
        raise ConfigurationError(f"installed packages name {what} {', '.join(taken)}; the package has them")
    return {**own, **installed}


def _load(entry: EntryPoint) -> Method:
    try:
        method = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"entry point {entry.name!r} of {METHOD_GROUP} cannot be loaded: {error}"
        ) from error
    if not isinstance(method, Method) or method.plan.method != entry.name:
        raise ConfigurationError(
            f"entry point {entry.name!r} of {METHOD_GROUP} is {entry.value}; it must be a Method whose plan "
            "has the entry point's name"
        )
    return method
