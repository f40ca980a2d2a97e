"""Compactor (papers/compactor.txt): scores that do not depend on the question.

Called per layer while the prompt is prefilled. A token scores high if nearby tokens attend to it, or if its
key points in a direction that few other keys share. The format selects the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvferry.kernels.chunk_scores import chunk_scores
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.leverage import Sketch, Solver, leverage_scores
from kvferry.shared.compression.plan import Allowed, Between, ParamValue, read_params

_MIN_STD = 1e-6
_POOL = 3
_ALLOWED: Allowed = {
    "sketch": get_args(Sketch),
    "sketch_columns": Between(1, 1024),
    "solver": get_args(Solver),
    "centered": bool,
    "seed": Between(0, 2**31 - 1),
    "chunk_tokens": Between(1, 4096),
    "scaled": bool,
    "leverage_weight": Between(0.0, 1e6),
    "sinks": Between(0, 4096),
    "recents": Between(0, 4096),
}


@dataclass(frozen=True, kw_only=True)
class CompactorScorer:
    """`s = z(a) + lambda z(o)` (equation 6) for the tokens between the sinks and the recents, which score
    +inf. z is the z-score per KV head, population std, at least 1e-6.

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
        sinks, recents: the numbers of first and last tokens of the prompt that are always selected.
        rows: rows to select per KV head; if they are fewer than sinks and recents, recents come first.
    """

    observed_queries: ClassVar[None] = None
    depends_on_rows: ClassVar[bool] = False
    scores_heads_apart: ClassVar[bool] = True
    sketch: Sketch
    sketch_columns: int
    solver: Solver
    centered: bool
    seed: int
    chunk_tokens: int
    scaled: bool
    leverage_weight: float
    sinks: int
    recents: int
    rows: int

    @classmethod
    def from_params(cls, params: Mapping[str, ParamValue], rows: int) -> CompactorScorer:
        """From a plan's `Part.params`; raises as `read_params`."""
        return cls(**read_params("compactor", params, _ALLOWED), rows=rows)

    @property
    def protected_rows(self) -> int:
        return self.sinks + self.recents

    def __call__(self, inputs: LayerInputs) -> Tensor:
        """Returns float32 `[H_kv, T]`, +inf on sinks and recents."""
        num_kv_heads, num_tokens, _ = inputs.keys.shape
        recents = min(self.recents, self.rows)
        begin, end = min(self.sinks, self.rows - recents), num_tokens - recents
        scores = inputs.keys.new_full((num_kv_heads, num_tokens), torch.inf, dtype=torch.float32)
        if begin < end:
            blend = _z_scores(self._attention(inputs, begin, end))
            if self.leverage_weight > 0:
                blend += self.leverage_weight * _z_scores(self._leverage(inputs, begin, end))
            scores[:, begin:end] = blend
        return scores

    def _leverage(self, inputs: LayerInputs, begin: int, end: int) -> Tensor:
        return leverage_scores(
            inputs.pre_rope_keys()[:, begin:end],
            sketch=self.sketch,
            num_columns=self.sketch_columns,
            solver=self.solver,
            centered=self.centered,
            seed=self.seed,
        )

    def _attention(self, inputs: LayerInputs, begin: int, end: int) -> Tensor:
        """a of the tokens `begin` to `end`: float32 `[H_kv, end - begin]`."""
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


def _z_scores(scores: Tensor) -> Tensor:
    """Each head's scores in population standard deviations from their mean."""
    std, mean = torch.std_mean(scores, dim=1, correction=0, keepdim=True)
    return (scores - mean) / std.clamp_min(_MIN_STD)
