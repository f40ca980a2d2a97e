"""K with fewer channels, V whole (ThinK, Xu et al. 2024).

Each KV head retains the K channels to which the prompt's last queries give the most weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.pruned_decode import pruned_decode
from kvferry.shared.compression.attention.interface import TensorSpec
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    LayerShape,
    Specs,
    Tensors,
    check_index,
    gather_rows,
    select_rows,
)
from kvferry.shared.compression.formats.stored import StoredFormat
from kvferry.shared.compression.interface import LayerInputs
from kvferry.shared.compression.plan import CompressionPlan, LayerPlan, Part, check_params
from kvferry.shared.compression.rdkv.weights import channel_weights
from kvferry.shared.errors import InvalidRequest

_MAX_WINDOW = 1024


@dataclass(frozen=True, kw_only=True)
class ThinkPrompt:
    """Implements `StoredPrompt`.

    Attributes:
        channels: int16 `[H_kv, C]`, ascending.
        keys: `[H_kv, n, C]`.
        values: `[H_kv, n, D]`.
        index: selected positions, int32 `[H_kv, n]`; None if every token is selected.
    """

    channels: Tensor
    keys: Tensor
    values: Tensor
    index: Tensor | None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        index = {} if self.index is None else {"index": self.index}
        return {"channels": self.channels, **index, "keys": self.keys, "values": self.values}

    def check(self, num_tokens: int) -> None:
        """Check that channels and positions ascend and are in range. Raises: InvalidTensors: otherwise."""
        if self.index is not None:
            check_index(self.index, num_tokens, reason="packed")
        channels, head_dim = self.channels, self.values.shape[2]
        ascending = bool((channels[:, 1:] > channels[:, :-1]).all())
        if not ascending or bool(((channels < 0) | (channels >= head_dim)).any()):
            raise InvalidTensors(
                f"kept channels must ascend within 0 to {head_dim - 1} for each KV head", reason="packed"
            )

    def attend(self, queries: Tensor, new_keys: Tensor, new_values: Tensor, *, scaling: float) -> Tensor:
        return pruned_decode(
            queries, self.channels, self.keys, self.values, new_keys, new_values, scaling=scaling
        )


@dataclass(frozen=True, kw_only=True)
class Think(StoredFormat):
    """Selects channels by `|Q_c| |K_c|` (ThinK, Eq. 5, without its square).

    Q_c covers the last `window` queries and the group; K_c covers all tokens of the prompt, also those that
    are not selected.

    Attributes:
        channel_retention: fraction of K's channels that are retained; their number is rounded up.
        window: how many of the prompt's last queries choose the channels.
    """

    name: ClassVar[str] = "think"
    kinds: ClassVar[Mapping[str, str]] = {
        "channels": "index", "index": "index", "keys": "rows", "values": "rows"
    }  # fmt: skip
    channel_retention: float
    window: int

    @classmethod
    def _params(cls, part: Part) -> tuple[float, int]:
        check_params("representation 'think'", part.params, {"channel_retention": float, "window": int})
        retention, window = float(part.params["channel_retention"]), int(part.params["window"])
        if not 0 < retention <= 1:
            raise InvalidRequest(
                f"channel_retention is {retention}; it must be in (0, 1]",
                param="kv_compression.channel_retention",
            )
        if not 1 <= window <= _MAX_WINDOW:
            raise InvalidRequest(
                f"window is {window}; it must be 1 to {_MAX_WINDOW}", param="kv_compression.window"
            )
        return retention, window

    @classmethod
    def of(cls, plan: CompressionPlan, layer: LayerPlan, shape: LayerShape) -> Think:
        retention, window = cls._params(layer.representation)
        return cls(shape=shape, rows=layer.rows, channel_retention=retention, window=window)

    @classmethod
    def rows_within(cls, part: Part, budget_rows: int, *, num_tokens: int, head_dim: int) -> int:
        channels = num_channels(cls._params(part)[0], head_dim)
        return min((budget_rows * 2 * head_dim - channels) // (head_dim + channels), num_tokens)

    @property
    def observed_queries(self) -> int:
        return self.window

    def tensors(self) -> Specs:
        channels = num_channels(self.channel_retention, self.shape.head_dim)
        rows = (self.shape.num_kv_heads, self.rows)
        return {
            "channels": TensorSpec(shape=(self.shape.num_kv_heads, channels), dtype=torch.int16),
            **self.shape.index_spec(self.rows),
            "keys": TensorSpec(shape=(*rows, channels), dtype=self.shape.dtype),
            "values": TensorSpec(shape=(*rows, self.shape.head_dim), dtype=self.shape.dtype),
        }

    def store(self, inputs: LayerInputs, scores: Tensor | None) -> ThinkPrompt:
        window = min(self.window, inputs.queries.shape[2])
        weights = channel_weights(inputs.queries[:, :, -window:], inputs.keys)
        channels = select_rows(weights, num_channels(self.channel_retention, inputs.keys.shape[2]))
        keys, values, index = inputs.keys, inputs.values, None
        if scores is not None:
            index = select_rows(scores, self.rows)
            keys, values = gather_rows(keys, index), gather_rows(values, index)
        return ThinkPrompt(
            channels=channels.to(torch.int16),
            keys=keys.gather(2, channels.long()[:, None].expand(-1, keys.shape[1], -1)),
            values=values.contiguous(),
            index=index,
        )

    def prompt(self, tensors: Tensors) -> ThinkPrompt:
        parts = {name: tensors[name] for name in ("channels", "keys", "values")}
        return ThinkPrompt(**parts, index=tensors.get("index"))


def num_channels(retention: float, head_dim: int) -> int:
    """C, the number of K channels that are retained."""
    # the shortest decimal that gives this float is what the preset or client wrote
    return math.ceil(Fraction(repr(retention)) * head_dim)
