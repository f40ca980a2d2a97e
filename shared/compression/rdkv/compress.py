"""RDKV's compression of one layer: weights, allocation, packing (Algorithm 1).

Called by prefill between two layers of a prompt: full K and V in, packed bytes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kvferry.kernels.packed import PackedLayer, pack_layer
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import Part, check_params
from kvferry.shared.compression.rdkv.allocation import LayerAllocation, allocate
from kvferry.shared.compression.rdkv.epsilon import WIDTHS, EpsilonTable, find_table, table_names
from kvferry.shared.compression.rdkv.weights import ChannelWeights, channel_weights, token_weights
from kvferry.shared.errors import InvalidRequest

_PARAMS = {
    "epsilon_table": str,
    "window": int,
    "kernel_size": int,
    "channel_weights": str,
    "widths": str,
    "rebudget_tokens": int,
}
_MAX_WINDOW = 1024
_MAX_KERNEL_SIZE = 255
_MAX_REBUDGET_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RdkvSettings:
    """RDKV's parameters, with the paper's defaults.

    Attributes:
        budget_tokens: B_tok per KV head: the bits of K and V of this many tokens in full precision.
        table: the distortion of each width.
        window: how many of the prompt's last queries the weights use.
        kernel_size: kernel of the average pooling of token weights.
        channel_weights: the formula of the channel weights, see `weights.channel_weights`.
        widths: the widths that tokens and channels may have.
    """

    budget_tokens: int
    table: EpsilonTable
    window: int = 32
    kernel_size: int = 5
    channel_weights: ChannelWeights = "norms"
    widths: tuple[int, ...] = WIDTHS


@dataclass(frozen=True, kw_only=True)
class Rebudgeting:
    """How a packed layer's generated tokens are packed.

    Deviation: the weights of a segment use only the segment. The softmax of its last queries (Eq. 3) covers
    the segment's own tokens, not all earlier tokens, so a segment's bits do not depend on how much attention
    the prompt takes from it. Its budget is its share of tokens, not what the prompt left over.

    Attributes:
        segment_tokens: R, tokens of a segment; there are never more unpacked rows than this.
        max_segments: the segments that a completion of the plan's length packs.
        limit_bytes: the largest possible size of a packed segment.
        settings: settings for packing a segment.
    """

    segment_tokens: int
    max_segments: int
    limit_bytes: int
    settings: RdkvSettings

    @property
    def window(self) -> int:
        """How many of a segment's last queries its weights use."""
        return min(self.settings.window, self.segment_tokens)


@dataclass(frozen=True, kw_only=True)
class RdkvLayer:
    """A packed layer and its allocation."""

    packed: PackedLayer
    allocation: LayerAllocation


def compress_layer_rdkv(settings: RdkvSettings, inputs: LayerInputs) -> RdkvLayer:
    """Allocate bits to one layer's tokens and channels and pack it.

    The window is the last min(window, T_new) queries.

    Raises:
        KvferryError: weights are not finite.
        ValueError: K or V of a retained token are not finite, in float16 if they are stored at 16 bits.
    """
    window = min(settings.window, inputs.queries.shape[2])
    queries = inputs.queries[:, :, -window:]
    allocation = allocate(
        token_weights(queries, inputs.keys, scaling=inputs.scaling, kernel_size=settings.kernel_size),
        channel_weights(queries, inputs.keys, variant=settings.channel_weights),
        budget_tokens=settings.budget_tokens,
        table=settings.table,
        widths=settings.widths,
    )
    packed = pack_layer(inputs.keys, inputs.values, allocation.keys.bits, allocation.values.bits)
    return RdkvLayer(packed=packed, allocation=allocation)


def rdkv_settings(part: Part, *, budget_tokens: int) -> RdkvSettings:
    """RDKV's settings from the `representation` part of a plan.

    Raises: InvalidRequest: a parameter is unknown, missing or out of range.
    """
    check_params("representation 'rdkv'", part.params, _PARAMS)
    table, window, kernel_size, variant, widths, rebudget = (part.params[name] for name in _PARAMS)
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


def _widths(text: str) -> tuple[int, ...]:
    chosen = [entry.strip() for entry in text.split(",")]
    widths = tuple(width for width in WIDTHS if str(width) in chosen)
    if len(widths) != len(chosen) or widths == (0,):
        raise _out_of_range(
            "widths", text, f"some of {','.join(map(str, WIDTHS))}, each once, one above 0 among them"
        )
    return widths


def _out_of_range(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(
        f"representation 'rdkv' was given {name} {value!r}; it must be {allowed}", param="kv_compression"
    )
