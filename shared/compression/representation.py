"""How a layer's K and V are represented from prefill to decode: as rows, or packed by RDKV.

A plan's `representation` part is looked up here; a resolved layer's has its sizes. Sizes are bounds that
router, prefill and decode compute alike before any bit is allocated. Packs nothing (`rdkv/`), and knows no
wire.
"""

from __future__ import annotations

from typing import get_args

from kvferry.kernels.packed import max_packed_bytes
from kvferry.shared.compression.parameters import check_params
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, ResolvedPlan
from kvferry.shared.compression.rdkv.compress import RdkvSettings
from kvferry.shared.compression.rdkv.epsilon import find_table, table_names
from kvferry.shared.compression.rdkv.weights import ChannelWeights
from kvferry.shared.errors import InvalidRequest

REPRESENTATIONS = ("rows", "rdkv")
_RDKV_PARAMS = {"epsilon_table": str, "window": int, "kernel_size": int, "channel_weights": str}
_MAX_WINDOW = 1024
_MAX_KERNEL_SIZE = 255
_TOKENS_PER_BUDGET_TOKEN = 8
"""Tokens that the V bits of one token in full precision keep at most: 16 bits, 2 each."""


def check_representation(plan: CompressionPlan) -> None:
    """Whether a plan's representation exists and goes with its other parts.

    "rdkv" takes `epsilon_table` (str, a name that `rdkv.epsilon.find_table` knows), `window` (int),
    `kernel_size` (odd int) and `channel_weights` ("norms" or "mean_squares").

    Raises: InvalidRequest.
    """
    part = plan.representation
    if part.name == "rows":
        check_params("representation 'rows'", part.params, {})
        return
    if part.name != "rdkv":
        raise InvalidRequest(
            f"the plan's representation is {part.name!r}; it must be one of {', '.join(REPRESENTATIONS)}",
            param="kv_compression",
        )
    rdkv_settings(part, budget_tokens=1)
    for what, given, allowed in (
        ("scorer", plan.scorer.name if plan.scorer is not None else "none", "none"),
        ("attention", plan.attention.name, "dense"),
        ("layer_allocation", plan.layer_allocation.name, "uniform"),
    ):
        if given != allowed:
            raise InvalidRequest(
                f"representation 'rdkv' does not go with {what} {given!r}; it takes {allowed!r} only",
                param="kv_compression",
            )


def rdkv_settings(part: Part, *, budget_tokens: int) -> RdkvSettings:
    """RDKV's parameters as a plan's representation has them.

    Raises: InvalidRequest: unknown, missing or out of range.
    """
    check_params("representation 'rdkv'", part.params, _RDKV_PARAMS)
    table, window, kernel_size, variant = (part.params[name] for name in _RDKV_PARAMS)
    assert isinstance(window, int)
    assert isinstance(kernel_size, int)
    if table not in table_names():
        raise _out_of_range("epsilon_table", table, ", ".join(table_names()))
    if not 1 <= window <= _MAX_WINDOW:
        raise _out_of_range("window", window, f"1 to {_MAX_WINDOW}")
    if not 1 <= kernel_size <= _MAX_KERNEL_SIZE or kernel_size % 2 == 0:
        raise _out_of_range("kernel_size", kernel_size, f"odd, 1 to {_MAX_KERNEL_SIZE}")
    weights: dict[object, ChannelWeights] = {name: name for name in get_args(ChannelWeights)}
    if variant not in weights:
        raise _out_of_range("channel_weights", variant, ", ".join(get_args(ChannelWeights)))
    return RdkvSettings(
        budget_tokens=budget_tokens,
        table=find_table(str(table)),
        window=window,
        kernel_size=kernel_size,
        channel_weights=weights[variant],
    )


def packed_layer_plan(*, budget_tokens: int, num_prompt_tokens: int) -> LayerPlan:
    """A layer packed by RDKV: B_tok, and the most tokens that a head can keep with it."""
    return LayerPlan(
        rows=min(num_prompt_tokens, _TOKENS_PER_BUDGET_TOKEN * budget_tokens),
        representation=Part(name="rdkv", params={"budget_tokens": budget_tokens}),
    )


def budget_tokens(layer: LayerPlan) -> int:
    """B_tok of a resolved packed layer."""
    tokens = layer.representation.params["budget_tokens"]
    assert isinstance(tokens, int)
    return tokens


def packed_limit_bytes(layer: LayerPlan, *, num_prompt_tokens: int, num_kv_heads: int, head_dim: int) -> int:
    """The most bytes that a resolved layer packs to; 0 where it is rows."""
    if layer.representation.name == "rows":
        return 0
    return max_packed_bytes(
        num_tokens=num_prompt_tokens,
        budget_tokens=budget_tokens(layer),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def packed_limits(resolved: ResolvedPlan, *, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """`packed_limit_bytes` of every layer; nothing at all where no layer is packed."""
    limits = tuple(
        packed_limit_bytes(
            layer, num_prompt_tokens=resolved.num_prompt_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        for layer in resolved.layers
    )
    return limits if any(limits) else ()


def _out_of_range(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(
        f"representation 'rdkv' was given {name} {value!r}; it must be {allowed}", param="kv_compression"
    )
