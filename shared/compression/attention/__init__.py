"""Decode attentions by name: a plan's `attention` part is looked up here, and a layer's with its sizes.

Adding one is one file and one entry of `ATTENTIONS`. Sizes travel as a `Part` (the kind's name and its
integer sizes), so wire and control know no kind by name.
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
"""Attentions that evict a row at each step (`formats/evicting.py`), and the scorer that each goes with: it
divides the prompt's rows as eviction goes on to divide them."""
PACKED_ATTENTIONS = ("dense", "hsa")
"""Those that go with a packed representation."""


def packed_attention(kind: AttentionKind) -> PackedAttention:
    """A packed layer's attention as what it is there."""
    assert isinstance(kind, Dense | Hsa), kind  # PACKED_ATTENTIONS
    return kind


def chooses_rows(part: Part) -> bool:
    """Whether a plan's attention reads some of the rows at a step, where others read every one."""
    return part.name != "dense" and part.name not in EVICTIONS


def check_attention(part: Part, *, scorer: Part | None) -> None:
    """Whether a plan's attention can be sized, and goes with its scorer.

    Every kind but "dense" takes `dense_layers` (int, 0 by default): the first layers that attend densely.

    Raises: InvalidRequest: unknown name or bad parameters.
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
    """A plan's attention made exact for one layer: the kind's name and sizes.

    Args: part: as `check_attention` accepts; layer: its index in the model; the rest as
    `SizedAttentionKind.sized`.
    """
    if part.name == "dense" or layer < int(part.params.get("dense_layers", 0)):
        return Part(name="dense")
    if part.name in EVICTIONS:
        return Part(name=part.name)
    kind = ATTENTIONS[part.name].sized(cap=cap, budget=budget, head_dim=head_dim)
    return Part(name=part.name, params=dict(asdict(kind)))


def spread_pages(sized: Part, *, rows: int, tokens: int) -> Part:
    """An attention sized for so many rows, over more tokens in the memory of those rows: no more pages, and
    so no more bytes of extremes to keep and to read, each of more tokens."""
    page_size = sized.params.get("page_size")
    if page_size is None:
        return sized
    return replace(sized, params={**sized.params, "page_size": -(-int(page_size) * tokens // rows)})


def make_attention(sized: Part) -> AttentionKind:
    """The attention that a resolved layer names.

    Raises: InvalidRequest: unknown name, or sizes that this kind does not have.
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
