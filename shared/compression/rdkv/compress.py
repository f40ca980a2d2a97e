"""RDKV's compression of one layer, whole: weights, allocation, packing (Algorithm 1).

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
    """RDKV's parameters, defaults as the paper's.

    Attributes:
        budget_tokens: B_tok, tokens' worth of K and V in full precision per KV head.
        window: queries of the prompt's end that the weights come from.
        kernel_size: of the average pooling of token weights.
        widths: those that tokens and channels may have.
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

    Deviation: a segment is weighed by itself. Its last queries' softmax (Eq. 3) goes over the segment's own
    tokens, not over all that come before, so a segment's bits do not depend on how much attention the prompt
    takes from it, and its budget is its own share of tokens, not what the prompt left over.

    Attributes:
        segment_tokens: R, tokens of a segment; at most this many rows stay unpacked.
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


@dataclass(frozen=True, kw_only=True)
class RdkvLayer:
    """A layer packed, and the allocation behind it."""

    packed: PackedLayer
    allocation: LayerAllocation


def compress_layer_rdkv(settings: RdkvSettings, inputs: LayerInputs) -> RdkvLayer:
    """Allocate bits to one layer's tokens and channels and pack it.

    The window is the last min(window, T_new) queries.

    Raises:
        KvferryError: weights are not finite.
        ValueError: K or V of a kept token are not finite, in float16 where they are kept at 16 bits.
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
    """RDKV's parameters as a plan's representation has them.

    Raises: InvalidRequest: unknown, missing or out of range.
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
