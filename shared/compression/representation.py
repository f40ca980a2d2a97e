"""How a layer's K and V are represented from prefill to decode: as rows, packed by RDKV, or stored as one of
`representations/`.

A plan's `representation` part is looked up here; a resolved layer's has its sizes. Sizes are bounds that
router, prefill and decode compute alike before any bit is allocated. Packs nothing (`rdkv/`), and knows no
wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from kvferry.kernels.packed import max_packed_bytes
from kvferry.kernels.quantise import WIDTHS as CODE_WIDTHS
from kvferry.shared.compression.attention import ATTENTIONS, PACKED_ATTENTIONS
from kvferry.shared.compression.measured import MEASURED_ALLOCATIONS
from kvferry.shared.compression.parameters import check_params
from kvferry.shared.compression.plan import (
    Budget,
    CompressionPlan,
    LayerPlan,
    ParamValue,
    Part,
    ResolvedPlan,
)
from kvferry.shared.compression.rdkv.compress import RdkvSettings
from kvferry.shared.compression.rdkv.epsilon import WIDTHS, find_table, table_names
from kvferry.shared.compression.rdkv.weights import ChannelWeights
from kvferry.shared.compression.representations import STORED, stored_representation, wire_representation
from kvferry.shared.compression.representations.interface import PromptShape, Specs, zone_bytes
from kvferry.shared.errors import InvalidRequest

REPRESENTATIONS = ("rows", "rdkv", *STORED)
_RDKV_PARAMS = {
    "epsilon_table": str,
    "window": int,
    "kernel_size": int,
    "channel_weights": str,
    "widths": str,
    "rebudget_tokens": int,
}
_WHOLE_BITS = 16
"""`wire_bits` of rows that travel as they are."""
_MAX_WINDOW = 1024
_MAX_KERNEL_SIZE = 255
_MAX_REBUDGET_TOKENS = 1 << 20
_TOKENS_PER_BUDGET_TOKEN = 8
"""Tokens that the V bits of one token in full precision keep at most: 16 bits, 2 each."""


def check_representation(plan: CompressionPlan) -> None:
    """Whether a plan's representation exists and goes with its other parts.

    "rows" takes `wire_bits` (int): 16, or 8, 4 or 2 to quantise rows for the wire alone.
    "rdkv" takes `epsilon_table` (str, a name that `rdkv.epsilon.find_table` knows), `window` (int),
    `kernel_size` (odd int), `channel_weights` ("norms" or "mean_squares"), `widths` (those that tokens and
    channels may have, "0,2,4,8,16" or some of them) and `rebudget_tokens` (how many generated tokens are
    packed together; 0 leaves them as rows).

    Raises: InvalidRequest.
    """
    part = plan.representation
    if part.name == "rows":
        _check_wire(plan)
        return
    if part.name in STORED:
        _check_stored(plan)
        return
    if part.name != "rdkv":
        raise InvalidRequest(
            f"the plan's representation is {part.name!r}; it must be one of {', '.join(REPRESENTATIONS)}",
            param="kv_compression",
        )
    rdkv_settings(part, budget_tokens=1)
    if plan.attention.name not in PACKED_ATTENTIONS:
        raise _unfit("attention", plan.attention.name, " or ".join(map(repr, PACKED_ATTENTIONS)))
    if plan.attention.name != "dense" and part.params["rebudget_tokens"]:
        raise InvalidRequest(
            f"representation 'rdkv' packs generated tokens (rebudget_tokens "
            f"{part.params['rebudget_tokens']}), which attention {plan.attention.name!r} does not go with; "
            "rebudget_tokens must be 0",
            param="kv_compression",
        )
    for what, given, allowed in (
        ("scorer", plan.scorer.name if plan.scorer is not None else "none", "none"),
        ("layer_allocation", plan.layer_allocation.name, "uniform"),
    ):
        if given != allowed:
            raise _unfit(what, given, f"{allowed!r} only")


def _check_wire(plan: CompressionPlan) -> None:
    part = plan.representation
    check_params("representation 'rows'", part.params, {"wire_bits": int} if part.params else {})
    bits, allowed = part.params.get("wire_bits", _WHOLE_BITS), (*CODE_WIDTHS, _WHOLE_BITS)
    if bits not in allowed:
        raise InvalidRequest(
            f"wire_bits is {bits}; it must be one of {', '.join(map(str, allowed))}",
            param="kv_compression.wire_bits",
        )
    if bits != _WHOLE_BITS and ATTENTIONS[plan.attention.name].evicts:
        raise InvalidRequest(
            f"wire_bits {bits} does not go with attention {plan.attention.name!r}, which changes its rows",
            param="kv_compression.wire_bits",
        )


def _check_stored(plan: CompressionPlan) -> None:
    """Stored prompts are attended densely; without a scorer they keep every row, and take no budget."""
    name, attention, scorer = plan.representation.name, plan.attention.name, plan.scorer
    stored_representation(plan.representation)
    if attention != "dense":
        raise InvalidRequest(
            f"representation {name!r} does not go with attention {attention!r}; it takes 'dense' only",
            param="kv_compression",
        )
    if plan.layer_allocation.name in MEASURED_ALLOCATIONS:
        raise InvalidRequest(
            f"representation {name!r} does not go with layer_allocation {plan.layer_allocation.name!r}; its "
            "sizes must be known before the prompt is run",
            param="kv_compression",
        )
    if scorer is None and name == "ragged":
        raise InvalidRequest(
            "representation 'ragged' does not go without a scorer: it shares rows between heads by their "
            "scores",
            param="kv_compression",
        )
    if scorer is None and plan.budget != Budget():
        raise InvalidRequest(
            f"method {plan.method!r} keeps every token and takes no budget; the size of representation "
            f"{name!r} follows from its parameters",
            param="kv_compression",
        )


def unsized_layer_plan(plan: CompressionPlan, *, num_tokens: int) -> LayerPlan:
    """A layer where no budget is short: whole, but for what a plan does to rows without dropping any."""
    keeps_all = plan.scorer is None and plan.representation.name in STORED
    if keeps_all or _quantises_wire(plan):
        return LayerPlan(rows=num_tokens, representation=plan.representation)
    return LayerPlan(rows=num_tokens)


def sized_layer_plan(plan: CompressionPlan, *, rows: int, num_tokens: int, head_dim: int) -> LayerPlan:
    """A layer that may take as many bytes as `rows` plain rows of 16-bit values."""
    representation = stored_representation(plan.representation)
    if rows == num_tokens or representation is None:
        part = plan.representation if _quantises_wire(plan) else Part(name="rows")
        return LayerPlan(rows=rows, representation=part)
    within = representation.rows_within(rows, num_tokens=num_tokens, head_dim=head_dim)
    return LayerPlan(rows=max(within, 1), representation=plan.representation)


def _quantises_wire(plan: CompressionPlan) -> bool:
    part = plan.representation
    return part.name == "rows" and part.params.get("wire_bits", _WHOLE_BITS) != _WHOLE_BITS


def stored_specs(layer: LayerPlan, shape: PromptShape) -> Specs:
    """The tensors that a resolved layer travels as; none where it is plain rows or RDKV's."""
    representation = stored_representation(layer.representation) or wire_representation(layer)
    return {} if representation is None else representation.specs(shape)


def rdkv_settings(part: Part, *, budget_tokens: int) -> RdkvSettings:
    """RDKV's parameters as a plan's representation has them.

    Raises: InvalidRequest: unknown, missing or out of range.
    """
    check_params("representation 'rdkv'", part.params, _RDKV_PARAMS)
    table, window, kernel_size, variant, widths, rebudget = (part.params[name] for name in _RDKV_PARAMS)
    assert isinstance(window, int)
    assert isinstance(kernel_size, int)
    assert isinstance(rebudget, int)
    if table not in table_names():
        raise _out_of_range("epsilon_table", table, ", ".join(table_names()))
    if not 1 <= window <= _MAX_WINDOW:
        raise _out_of_range("window", window, f"1 to {_MAX_WINDOW}")
    if not 1 <= kernel_size <= _MAX_KERNEL_SIZE or kernel_size % 2 == 0:
        raise _out_of_range("kernel_size", kernel_size, f"odd, 1 to {_MAX_KERNEL_SIZE}")
    if not 0 <= rebudget <= _MAX_REBUDGET_TOKENS:
        raise _out_of_range("rebudget_tokens", rebudget, f"0 to {_MAX_REBUDGET_TOKENS}")
    weights: dict[object, ChannelWeights] = {name: name for name in get_args(ChannelWeights)}
    if variant not in weights:
        raise _out_of_range("channel_weights", variant, ", ".join(get_args(ChannelWeights)))
    return RdkvSettings(
        budget_tokens=budget_tokens,
        table=find_table(str(table)),
        window=window,
        kernel_size=kernel_size,
        channel_weights=weights[variant],
        widths=_widths(str(widths)),
    )


def packed_layer_plan(
    part: Part, *, budget_tokens: int, num_prompt_tokens: int, max_new_tokens: int, head_dim: int
) -> LayerPlan:
    """A layer packed by RDKV: B_tok, and the most tokens that a head can keep with it; and, where generated
    tokens are to be packed too, how many at a time, with what budget.

    Args: part: a plan's representation, as `check_representation` accepts.

    Raises: InvalidRequest: the budget is below the least width of every token.
    """
    least = rdkv_settings(part, budget_tokens=budget_tokens).widths[0]
    if least * num_prompt_tokens > WIDTHS[-1] * budget_tokens:
        raise InvalidRequest(
            f"widths {part.params['widths']!r} of representation 'rdkv' give each of {num_prompt_tokens} "
            f"tokens {least} bits at least; that takes a budget of "
            f"{-(-least * num_prompt_tokens // WIDTHS[-1])} tokens or more, not {budget_tokens}",
            param="kv_compression",
        )
    sizes: dict[str, ParamValue] = {"budget_tokens": budget_tokens}
    segment = int(part.params["rebudget_tokens"])
    # at the prompt's bits a token, rounded up so that no segment is packed to less than that
    share = -(-segment * budget_tokens // num_prompt_tokens)
    if segment and _num_segments(segment, max_new_tokens) and _saves(segment, share, head_dim):
        sizes |= {"segment_tokens": segment, "segment_budget_tokens": share}
    return LayerPlan(
        rows=min(num_prompt_tokens, _TOKENS_PER_BUDGET_TOKEN * budget_tokens),
        representation=Part(name="rdkv", params=sizes),
    )


@dataclass(frozen=True, kw_only=True)
class Rebudgeting:
    """How a packed layer's generated tokens are packed: the paper names it as future work.

    Deviation: a segment is weighed by itself. Its last queries' softmax (Eq. 3) goes over the segment's own
    tokens, not over all that come before, so a segment's bits do not depend on how much attention the prompt
    takes from it, and its budget is its own share of tokens, not what the prompt left over.

    Attributes:
        segment_tokens: R, tokens of a segment; so many rows at most stay unpacked.
        max_segments: as many as a completion of the plan's length fills.
        limit_bytes: the most bytes that a segment packs to.
        settings: of a segment's packing.
    """

    segment_tokens: int
    max_segments: int
    limit_bytes: int
    settings: RdkvSettings

    @property
    def window(self) -> int:
        """Queries of a segment's last tokens that its packing looks at."""
        return min(self.settings.window, self.segment_tokens)


def rebudgeting(
    resolved: ResolvedPlan, layer: LayerPlan, *, num_kv_heads: int, head_dim: int
) -> Rebudgeting | None:
    """How a resolved layer packs generated tokens; None where it leaves them as rows."""
    sizes = layer.representation.params
    if "segment_tokens" not in sizes:
        return None
    segment, share = int(sizes["segment_tokens"]), int(sizes["segment_budget_tokens"])
    return Rebudgeting(
        segment_tokens=segment,
        max_segments=_num_segments(segment, resolved.max_new_tokens),
        limit_bytes=max_packed_bytes(
            num_tokens=segment, budget_tokens=share, num_kv_heads=num_kv_heads, head_dim=head_dim
        ),
        settings=rdkv_settings(resolved.plan.representation, budget_tokens=share),
    )


def _num_segments(segment_tokens: int, max_new_tokens: int) -> int:
    """Segments that a completion fills before its last row: a segment is packed when one more row comes, and
    the last token of a completion never gets one."""
    return max(max_new_tokens - 2, 0) // segment_tokens


def _saves(segment_tokens: int, budget_tokens: int, head_dim: int) -> bool:
    """Whether a packed segment is smaller than its rows at 16 bits, scales and indexes at their most."""
    limit_bytes = max_packed_bytes(
        num_tokens=segment_tokens, budget_tokens=budget_tokens, num_kv_heads=1, head_dim=head_dim
    )
    return limit_bytes < 4 * segment_tokens * head_dim


def budget_tokens(layer: LayerPlan) -> int:
    """B_tok of a resolved packed layer."""
    tokens = layer.representation.params["budget_tokens"]
    assert isinstance(tokens, int)
    return tokens


def packed_limit_bytes(
    layer: LayerPlan, *, num_prompt_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """The most bytes that a resolved layer's prompt is stored in; 0 where it is rows.

    Args: dtype: of K and V.
    """
    if layer.representation.name == "rows":
        return 0
    if layer.representation.name in STORED:
        shape = PromptShape(
            rows=layer.rows,
            num_tokens=num_prompt_tokens,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        return zone_bytes(stored_specs(layer, shape))
    return max_packed_bytes(
        num_tokens=num_prompt_tokens,
        budget_tokens=budget_tokens(layer),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def packed_limits(
    resolved: ResolvedPlan, *, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """`packed_limit_bytes` of every layer; nothing at all where all layers are rows."""
    limits = tuple(
        packed_limit_bytes(
            layer,
            num_prompt_tokens=resolved.num_prompt_tokens,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        for layer in resolved.layers
    )
    return limits if any(limits) else ()


def _widths(text: str) -> tuple[int, ...]:
    chosen = [entry.strip() for entry in text.split(",")]
    widths = tuple(width for width in WIDTHS if str(width) in chosen)
    if len(widths) != len(chosen) or widths == (0,):
        raise _out_of_range(
            "widths", text, f"some of {','.join(map(str, WIDTHS))}, each once, one above 0 among them"
        )
    return widths


def _unfit(what: str, given: str, takes: str) -> InvalidRequest:
    return InvalidRequest(
        f"representation 'rdkv' does not go with {what} {given!r}; it takes {takes}", param="kv_compression"
    )


def _out_of_range(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(
        f"representation 'rdkv' was given {name} {value!r}; it must be {allowed}", param="kv_compression"
    )
