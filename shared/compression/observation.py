"""How many of a prompt's queries a method looks at: the seam between compression and prefix sharing.

Prefill asks before it continues a prompt from KV of another session: the queries of reused tokens are not
computed again, so those that the method reads must be among the tokens that are run. Scores nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kvferry.shared.compression.attention import make_attention
from kvferry.shared.compression.measured import is_measured
from kvferry.shared.compression.plan import LayerPlan, ResolvedPlan

Reads = Literal["none", "window"]
"""What a part reads of the queries: none, or the last ones, as many as its parameter `window` says."""

_SCORERS: Mapping[str, Reads] = {"streaming": "none", "random": "none", "window_attention": "window"}
_REPRESENTATIONS: Mapping[str, Reads] = {
    "rows": "none",
    "ragged": "none",
    "kivi": "none",
    "rdkv": "window",
    "think": "window",
}


def num_observed_queries(resolved: ResolvedPlan) -> int | None:
    """How many of the prompt's last queries decide what is kept of it, and how.

    Returns: at least 1, for the last token is always run; None where all queries do, or where a part is not
        known here, as a scorer of another package.
    """
    plan, layers = resolved.plan, resolved.layers
    if is_measured(resolved) or any(make_attention(layer.attention).evicts for layer in layers):
        return None  # layers' budgets, or what decode evicts by, come of all queries' attention
    if all(_is_whole(layer, resolved) for layer in layers):
        return 1
    parts = [(plan.representation, _REPRESENTATIONS)]
    if plan.scorer is not None:
        parts.append((plan.scorer, _SCORERS))
    needs = [1]
    for part, known in parts:
        reads = known.get(part.name)
        if reads is None:
            return None
        if reads == "window":
            needs.append(int(part.params["window"]))
    return max(needs)


def _is_whole(layer: LayerPlan, resolved: ResolvedPlan) -> bool:
    return layer.representation.name == "rows" and layer.rows == resolved.num_prompt_tokens
