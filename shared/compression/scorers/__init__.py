"""Scorers by name, for the `scorer` part of a plan.

Adding one is one file and one entry of the registry, or an entry point of another package (`installed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.shared.compression.installed import find_part
from kvferry.shared.compression.interface import Scorer, ScorerFactory
from kvferry.shared.compression.plan import Part
from kvferry.shared.compression.scorers.accumulated_attention import AccumulatedAttentionScorer
from kvferry.shared.compression.scorers.compactor import CompactorScorer
from kvferry.shared.compression.scorers.window_attention import WindowAttentionScorer
from kvferry.shared.errors import ConfigurationError

SCORERS: Mapping[str, ScorerFactory] = {
    "window_attention": WindowAttentionScorer.from_params,
    "heavy_hitters": AccumulatedAttentionScorer.heavy_hitters,
    "accumulated_attention": AccumulatedAttentionScorer.from_params,
    "compactor": CompactorScorer.from_params,
}


def make_scorer(part: Part, *, rows: int) -> Scorer:
    """The scorer that a plan names.

    Args: rows: rows to select per KV head; the scorer protects no more than that.
    Raises:
        InvalidRequest: an unknown name or bad parameters.
        ConfigurationError: an installed method brings a scorer whose name is taken.
    """
    scorer = find_part("scorer", part.name, SCORERS)(part.params, rows)
    stated = ("observed_queries", "protected_rows", "depends_on_rows", "scores_heads_apart")
    missing = [name for name in stated if not hasattr(scorer, name)]
    if missing:
        raise ConfigurationError(
            f"scorer {part.name!r} does not say {' and '.join(missing)}; `interface.Scorer` explains them"
        )
    return scorer
