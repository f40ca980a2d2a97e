"""RDKV's compression of one layer, whole: weights, allocation, packing (Algorithm 1).

Called by prefill between two layers of a prompt: full K and V in, packed bytes out. Knows no plan, wire or
model.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.kernels.packed import PackedLayer, pack_layer
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.rdkv.allocation import LayerAllocation, allocate
from kvferry.shared.compression.rdkv.epsilon import WIDTHS, EpsilonTable
from kvferry.shared.compression.rdkv.weights import ChannelWeights, channel_weights, token_weights


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
