"""Scorers: every token's score in every KV head; a format selects the rows with the highest.

Called per layer while the prompt is prefilled. `SCORERS` are the package's by name, for the `scorer` part of
a plan. Adding one is one class and one entry, or an entry point of another package (`interface.Method`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.chunk_scores import chunk_scores
from kvferry.shared.compression.d2o.eviction import Zones, half_zones, protected, zones
from kvferry.shared.compression.interface import (
    LayerInputs,
    Scorer,
    ScorerFactory,
    installed_parts,
    with_installed,
)
from kvferry.shared.compression.leverage import Sketch, Solver, leverage_scores
from kvferry.shared.compression.plan import (
    RECONSTRUCTION,
    Allowed,
    Between,
    ParamValue,
    Part,
    look_up,
    read_params,
)
from kvferry.shared.errors import ConfigurationError

_WINDOW_PARAMS: Allowed = {
    "window": Between(1, 4096),
    "pooling": ("avg", "max"),
    "kernel_size": Between(1, 4095, odd=True),
    "recents": Between(0, 4096),
}
_BETWEEN_PARAMS: Allowed = {"sinks": Between(0, 4096), "recents": Between(0, 4096)}
_COMPACTOR_PARAMS: Allowed = {
    "sketch": get_args(Sketch),
    "sketch_columns": Between(1, 1024),
    "solver": get_args(Solver),
    "centered": bool,
    "seed": Between(0, 2**31 - 1),
    "chunk_tokens": Between(1, 4096),
    "scaled": bool,
    "leverage_weight": Between(0.0, 1e6),
    **_BETWEEN_PARAMS,
}
_RECONSTRUCTION_PARAMS: Allowed = {
    "chunk_tokens": Between(1, 1 << 20),
    "lead_tokens": Between(0, 4096),
    **_BETWEEN_PARAMS,
}
_MIN_STD = 1e-6
_LEAST_ATTENTION = 1e-12
"""Less than any float16 or bfloat16 attention shows; its logarithm is finite."""
_POOL = 3


@dataclass(frozen=True, kw_only=True)
class WindowAttentionScorer:
    """Scores by the attention of the question's last queries: SnapKV, and RocketKV's first stage.

    `s = pool(sum_g sum_i softmax(q_{g,i} K^T * scaling))` over the columns before the protected ones.

    The window is `LayerInputs.observing`. The last p = min(recents, max(rows // 4, 1)) columns are left out
    of the pooling and score +inf, so they are always selected. Pooling comes after the sums, with stride 1
    and padding of kernel_size // 2: "avg" counts the padding's zeros, "max" ignores them. The papers have
    "avg" 7 or 5 (SnapKV, Li et al. 2024) and "max" 63 (RocketKV section 3.3).

    Deviation: the papers protect every column of the window. At small budgets nothing else would be selected,
    so the window observes, and only a few recent rows are protected; its other columns compete by their
    scores.

    Attributes:
        window: the most queries that observe.
        recents: the most last tokens that are protected.
        rows: rows to select per KV head; at most a quarter of them is protected, but the newest always is.
    """

    depends_on_rows: ClassVar[bool] = False
    scores_heads_apart: ClassVar[bool] = True
    window: int
    pooling: Literal["avg", "max"]
    kernel_size: int
    recents: int
    rows: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> WindowAttentionScorer:
        """Make the scorer from a plan's `Part.params`; raise as `read_params`."""
        return cls(**read_params("window_attention", params, _WINDOW_PARAMS), rows=rows)

    @property
    def observed_queries(self) -> int:
        return self.window

    @property
    def protected_rows(self) -> int:
        return min(self.recents, max(self.rows // 4, 1))

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Return float32 `[H_kv, T]`, +inf on the protected columns."""
        num_tokens = inputs.keys.shape[1]
        scores = inputs.keys.new_full((inputs.keys.shape[0], num_tokens), torch.inf, dtype=torch.float32)
        before = num_tokens - min(self.protected_rows, num_tokens)
        if before > 0:
            scores[:, :before] = self._pool(inputs.window_sums(self.window)[:, :before])
        return scores

    def _pool(self, sums: Tensor) -> Tensor:
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(sums[:, None], self.kernel_size, stride=1, padding=self.kernel_size // 2)[:, 0]


@dataclass(frozen=True, kw_only=True)
class AccumulatedAttentionScorer:
    """Scores by accumulated attention, beside sinks and recents: H2O (Zhang et al. 2023), D2O section 4.2.1.

    `s_t = sum_g sum_i softmax(q_{g,i} K^T * scaling)_t` over all available queries, causal; sinks and recents
    score +inf. The decode attentions "evict" and "merge" continue with the same sums and the same zones.

    Deviation: with history, the queries are those of the turn's new tokens, because older queries are not
    stored. Sums run over the group, so that all query heads of a KV head share one selection.

    Attributes:
        layer_zones: how the selected rows of a KV head divide into sinks, important rows and recents.
    """

    observed_queries: ClassVar[None] = None
    depends_on_rows: ClassVar[bool] = True
    scores_heads_apart: ClassVar[bool] = True
    layer_zones: Zones

    @classmethod
    def heavy_hitters(cls, params: Mapping[str, ParamValue], rows: int) -> AccumulatedAttentionScorer:
        """Use H2O's zones: half the rows, rounded up, are recents. Raise InvalidRequest on any parameter."""
        read_params("heavy_hitters", params, {})
        return cls(layer_zones=half_zones(rows))

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> AccumulatedAttentionScorer:
        """Use D2O's zones: 4 sinks, then three important rows per recent one. Raise as `heavy_hitters`."""
        read_params("accumulated_attention", params, {})
        return cls(layer_zones=zones(rows))

    @property
    def protected_rows(self) -> int:
        return self.layer_zones.num_sinks + self.layer_zones.num_recents

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Return float32 `[H_kv, T]`, +inf on sinks and recents."""
        sums = inputs.with_sums().sums
        assert sums is not None
        return protected(sums.sums, self.layer_zones)


@dataclass(frozen=True, kw_only=True)
class _BetweenScorer(ABC):
    """Scores the tokens between the first and the last ones, which score +inf.

    Attributes:
        sinks, recents: the numbers of first and last tokens of the prompt that are always selected.
        rows: rows to select per KV head; if they are fewer than sinks and recents, recents come first.
    """

    depends_on_rows: ClassVar[bool] = False
    sinks: int
    recents: int
    rows: int

    @property
    def protected_rows(self) -> int:
        return self.sinks + self.recents

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Return float32 `[H_kv, T]`, +inf on sinks and recents."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        recents = min(self.recents, self.rows)
        begin, end = min(self.sinks, self.rows - recents), num_tokens - recents
        scores = inputs.keys.new_full((num_kv_heads, num_tokens), torch.inf, dtype=torch.float32)
        if begin < end:
            scores[:, begin:end] = self._between(inputs, begin, end)
        return scores

    @abstractmethod
    def _between(self, inputs: LayerInputs, begin: int, end: int) -> Tensor:
        """Return the scores of the tokens `begin` to `end`: float32 `[H_kv, end - begin]`."""


@dataclass(frozen=True, kw_only=True)
class CompactorScorer(_BetweenScorer):
    """Compactor (papers/compactor.txt): scores that do not depend on the question. A token scores high if
    nearby tokens attend to it, or if its key points in a direction that few other keys share.

    `s = z(a) + lambda z(o)` (equation 6) for the tokens between the sinks and the recents, which score +inf.
    z is the z-score per KV head, population std, at least 1e-6.

    o: leverage of pre-RoPE keys (`leverage.py`), history included.
    a: attention in chunks of c tokens without a causal mask (equation 5), column sums, mean over the group,
    times the value's norm, then average-pooled by 3; the padding's zeros count.

    Deviation: tokens of the history have no queries in this turn. Chunks start at fixed positions (the first
    one after the sinks). A chunk with history tokens in it is scored by the turn's last c queries instead, as
    if they were the chunk's own. The paper wants the likelihood that a future token attends to a token, and
    for history those queries are such future tokens; without a, the paper's ablation loses most of the score
    at small budgets. So in a turn with history the scores do depend on the question; without history they do
    not.

    Of latent rows the value is the latent, and the leverage is that of the keys of all heads side by side.

    Attributes:
        sketch, sketch_columns (k), solver, centered, seed: see `leverage_scores`.
        chunk_tokens: c.
        scaled: multiply logits by the model's softmax scale; the authors' code does not.
        leverage_weight: lambda.
    """

    observed_queries: ClassVar[None] = None
    scores_heads_apart: ClassVar[bool] = True
    sketch: Sketch
    sketch_columns: int
    solver: Solver
    centered: bool
    seed: int
    chunk_tokens: int
    scaled: bool
    leverage_weight: float

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> CompactorScorer:
        """Make the scorer from a plan's `Part.params`; raise as `read_params`."""
        return cls(**read_params("compactor", params, _COMPACTOR_PARAMS), rows=rows)

    def _between(self, inputs: LayerInputs, begin: int, end: int) -> Tensor:
        blend = _z_scores(self._attention(inputs, begin, end))
        if self.leverage_weight > 0:
            blend += self.leverage_weight * _z_scores(
                leverage_scores(
                    inputs.pre_rope_keys()[:, begin:end],
                    sketch=self.sketch,
                    num_columns=self.sketch_columns,
                    solver=self.solver,
                    centered=self.centered,
                    seed=self.seed,
                )
            )
        return blend

    def _attention(self, inputs: LayerInputs, begin: int, end: int) -> Tensor:
        """Compute a of the tokens `begin` to `end`: float32 `[H_kv, end - begin]`."""
        scaling = inputs.scaling if self.scaled else 1.0
        num_history = inputs.keys.shape[1] - inputs.queries.shape[2]
        # from here on, every token of a chunk has a query
        first_own = min(begin + -(-max(num_history - begin, 0) // self.chunk_tokens) * self.chunk_tokens, end)
        earlier = chunk_scores(
            inputs.queries[:, :, -self.chunk_tokens :],
            inputs.keys[:, begin:first_own],
            chunk_tokens=self.chunk_tokens,
            scaling=scaling,
            shared=True,
        )
        own = chunk_scores(
            inputs.queries[:, :, first_own - num_history : end - num_history],
            inputs.keys[:, first_own:end],
            chunk_tokens=self.chunk_tokens,
            scaling=scaling,
        )
        sums = torch.cat([earlier, own], dim=1)
        weighted = sums * inputs.values[:, begin:end].float().norm(dim=2)
        return F.avg_pool1d(weighted[:, None], _POOL, stride=1, padding=_POOL // 2)[:, 0]


@dataclass(frozen=True, kw_only=True)
class ReconstructionScorer(_BetweenScorer):
    """KVzip (Kim et al. 2025): a token scores high if the model reads it to write the prompt down again. So
    the scores do not depend on the question.

    `s = z(log r)` for the tokens between the sinks and the recents, which score +inf. r is the most attention
    that a token gets while the prompt is repeated (`reconstruct.py`). z is the z-score per KV head,
    population std, at least 1e-6.

    Deviation: the paper's scores are r. The order is the same, but r spans orders of magnitude: a few of its
    z-scores would be so high that format "rdkv", which weighs tokens by them, would give those all bits.

    Deviation: the paper retains what is above one threshold for all layers and heads. Here a plan's format
    and allocation share rows, and those of the presets give each head as many. The paper retains the system
    prompt, too; here the sinks stand for it.

    Attributes:
        chunk_tokens, lead_tokens: c and l of `reconstruct`.
        sinks: these are also the first tokens in the softmax of `reconstruct`.
    """

    observed_queries: ClassVar[int] = 0
    scores_heads_apart: ClassVar[bool] = False
    """Only the leading rank has the whole prompt, which it repeats after the pass."""
    chunk_tokens: int
    lead_tokens: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> ReconstructionScorer:
        """Make the scorer from a plan's `Part.params`; raise as `read_params`."""
        return cls(**read_params(RECONSTRUCTION, params, _RECONSTRUCTION_PARAMS), rows=rows)

    def _between(self, inputs: LayerInputs, begin: int, end: int) -> Tensor:
        assert inputs.repeated is not None, "a scorer asks for a repetition that its caller has not run"
        return _z_scores(inputs.repeated[:, begin:end].clamp_min(_LEAST_ATTENTION).log())


@dataclass(frozen=True, kw_only=True)
class KeyDiffScorer(_BetweenScorer):
    """KeyDiff (Park et al. 2025): a token scores high if its key differs from most others. No query is read,
    so the scores do not depend on the question, and they cost next to nothing.

    `s_t = z(-cos(k_t, mean_i k_i / |k_i|))` for the tokens between the sinks and the recents, which score
    +inf. Keys are post-RoPE, as they are stored; the mean is over all T of a head. z is the z-score per KV
    head, population std, at least 1e-6; the order is that of the paper's scores.

    Deviation: the paper evicts after each block of a long prompt, and protects no token. Here the whole
    prompt is scored once.
    """

    observed_queries: ClassVar[int] = 0
    scores_heads_apart: ClassVar[bool] = True

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> KeyDiffScorer:
        """Make the scorer from a plan's `Part.params`; raise as `read_params`."""
        return cls(**read_params("keydiff", params, _BETWEEN_PARAMS), rows=rows)

    def _between(self, inputs: LayerInputs, begin: int, end: int) -> Tensor:
        directions = F.normalize(inputs.keys.float(), dim=2)
        anchor = F.normalize(directions.mean(dim=1, keepdim=True), dim=2)
        return _z_scores(-(directions[:, begin:end] @ anchor.mT)[:, :, 0])


def _z_scores(scores: Tensor) -> Tensor:
    """Express each head's scores in population standard deviations from their mean."""
    std, mean = torch.std_mean(scores, dim=1, correction=0, keepdim=True)
    return (scores - mean) / std.clamp_min(_MIN_STD)


SCORERS: Mapping[str, ScorerFactory] = {
    "window_attention": WindowAttentionScorer.from_params,
    "heavy_hitters": AccumulatedAttentionScorer.heavy_hitters,
    "accumulated_attention": AccumulatedAttentionScorer.from_params,
    "compactor": CompactorScorer.from_params,
    RECONSTRUCTION: ReconstructionScorer.from_params,
    "keydiff": KeyDiffScorer.from_params,
}


def make_scorer(part: Part, *, rows: int) -> Scorer:
    """Make the scorer that a plan names.

    Args: rows: rows to select per KV head; the scorer protects no more than that.
    Raises:
        InvalidRequest: an unknown name or bad parameters.
        ConfigurationError: an installed method brings a scorer whose name is taken.
    """
    known: Mapping[str, ScorerFactory] = with_installed("scorers", SCORERS, installed_parts("scorer"))
    scorer = look_up("scorer", part.name, known)(part.params, rows)
    stated = ("observed_queries", "protected_rows", "depends_on_rows", "scores_heads_apart")
    missing = [name for name in stated if not hasattr(scorer, name)]
    if missing:
        raise ConfigurationError(
            f"scorer {part.name!r} does not say {' and '.join(missing)}; `interface.Scorer` explains them"
        )
    return scorer
