"""Decode attentions by name, for the `attention` part of a plan and of a resolved layer.

Adding one is one file and one entry of `ATTENTIONS`. A resolved attention is a `Part` with the kind's name
and its integer sizes, so the wire and the control calls need no code for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace

from kvferry.shared.compression.attention.dense import Dense
from kvferry.shared.compression.attention.exact_topk import ExactTopK
from kvferry.shared.compression.attention.interface import AttentionKind, PackedAttention, SizedAttentionKind
from kvferry.shared.compression.attention.paged import Hsa, Quest
from kvferry.shared.compression.attention.sparq import SparQ
from kvferry.shared.compression.plan import Part
from kvferry.shared.errors import InvalidRequest

ATTENTIONS: Mapping[str, type[SizedAttentionKind]] = {
    "dense": Dense,
    "hsa": Hsa,
    "quest": Quest,
    "sparq": SparQ,
    "exact_topk": ExactTopK,
}
EVICTIONS: Mapping[str, str] = {"evict": "heavy_hitters", "merge": "accumulated_attention"}
"""Attentions that evict a row at each step (`formats/evicting.py`), each with the scorer that it requires:
the scorer divides the prompt's rows into the same zones as eviction does."""
PACKED_ATTENTIONS = ("dense", "hsa")
"""The attentions that can read packed K and V."""


def packed_attention(kind: AttentionKind) -> PackedAttention:
    """The attention of a packed layer, with its type narrowed."""
    assert isinstance(kind, Dense | Hsa), kind  # PACKED_ATTENTIONS
    return kind


def chooses_rows(part: Part) -> bool:
    """Whether a plan's attention reads only some of the rows at each step."""
    return part.name != "dense" and part.name not in EVICTIONS


def check_attention(part: Part, *, scorer: Part | None) -> None:
    """Check the name and parameters of a plan's attention, and that the plan's scorer goes with it.

    Every kind except "dense" takes `dense_layers` (int, 0 by default): the number of first layers that attend
    densely.

    Raises: InvalidRequest: an unknown name, bad parameters, or another scorer than an eviction requires.
    """
    if part.name not in ATTENTIONS and part.name not in EVICTIONS:
        raise InvalidRequest(
            f"the plan's attention is {part.name!r}; it must be one of "
            f"{', '.join((*ATTENTIONS, *EVICTIONS))}",
            param="kv_compression",
        )
    wanted = EVICTIONS.get(part.name)
    if wanted is not None and (scorer is None or scorer.name != wanted):
        raise InvalidRequest(
            f"attention {part.name!r} goes with scorer {wanted!r}; the plan's scorer is "
            f"{'none' if scorer is None else repr(scorer.name)}",
            param="kv_compression",
        )
    allowed = set() if part.name == "dense" else {"dense_layers"}
    count = part.params.get("dense_layers", 0)
    if set(part.params) - allowed or type(count) is not int or count < 0:
        raise InvalidRequest(
            f"attention {part.name!r} was given {part.params}; it takes "
            + ("dense_layers (int, at least 0)" if allowed else "no parameters"),
            param="kv_compression",
        )


def size_attention(part: Part, *, layer: int, cap: int, budget: int, head_dim: int) -> Part:
    """The attention of one layer: the kind's name and its sizes.

    Args:
        part: a plan's attention, as `check_attention` accepts it.
        layer: its index in the model.
        cap, budget, head_dim: as in `SizedAttentionKind.sized`.
    """
    if part.name == "dense" or layer < int(part.params.get("dense_layers", 0)):
        return Part(name="dense")
    if part.name in EVICTIONS:
        return Part(name=part.name)
    kind = ATTENTIONS[part.name].sized(cap=cap, budget=budget, head_dim=head_dim)
    return Part(name=part.name, params=dict(asdict(kind)))


def spread_pages(sized: Part, *, rows: int, tokens: int) -> Part:
    """Enlarge the pages of an attention sized for `rows` rows so that they cover `tokens` packed tokens.

    There are then no more pages than before, and no more bytes of extremes to store and to read.
    """
    page_size = sized.params.get("page_size")
    if page_size is None:
        return sized
    return replace(sized, params={**sized.params, "page_size": -(-int(page_size) * tokens // rows)})


def make_attention(sized: Part) -> AttentionKind:
    """The attention that a resolved layer names.

    Raises: InvalidRequest: an unknown name, or sizes that do not belong to this kind.
    """
    kind = ATTENTIONS.get(sized.name)
    names = {field.name for field in fields(kind)} if kind else set()
    sizes: dict[str, int] = {
        k: v for k, v in sized.params.items() if isinstance(v, int) and not isinstance(v, bool) and v >= 1
    }
    if kind is None or set(sized.params) != names or len(sizes) != len(names):
        raise InvalidRequest(
            f"a layer's attention is {sized.name!r} with {sized.params}; it must be one of "
            f"{', '.join(ATTENTIONS)} with its sizes as positive integers",
            param="kv_compression",
        )
    return kind(**sizes)
