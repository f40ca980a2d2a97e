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
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    Specs,
    Tensors,
    check_index,
    select_rows,
)
from kvferry.shared.compression.formats.stored import PromptAttention, StoredFormat
from kvferry.shared.compression.interface import LayerInputs, TensorSpec
from kvferry.shared.compression.plan import Allowed, Between, Part
from kvferry.shared.compression.rdkv.weights import channel_weights


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
    allowed: ClassVar[Allowed] = {"channel_retention": Between(0.001, 1.0), "window": Between(1, 1024)}
    channel_retention: float
    window: int

    @classmethod
    def rows_within(
        cls, part: Part, budget_rows: int, *, num_tokens: int, head_dim: int, latent_dim: int = 0
    ) -> int:
        channels = num_channels(cls.params(part)["channel_retention"], head_dim)
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

    def compress(self, inputs: LayerInputs, scores: Tensor | None) -> Tensors:
        window = min(self.window, inputs.queries.shape[2])
        weights = channel_weights(inputs.queries[:, :, -window:], inputs.keys)
        channels = select_rows(weights, num_channels(self.channel_retention, inputs.keys.shape[2]))
        index, keys, values = self.selected(inputs, scores)
        return {
            "channels": channels.to(torch.int16),
            **index,
            "keys": keys.gather(2, channels.long()[:, None].expand(-1, keys.shape[1], -1)),
            "values": values.contiguous(),
        }

    def check_content(self, tensors: Tensors) -> None:
        """Check that channels and positions ascend and are in range."""
        if "index" in tensors:
            check_index(tensors["index"], self.shape.num_prompt_tokens, reason="packed")
        channels, head_dim = tensors["channels"], self.shape.head_dim
        ascending = bool((channels[:, 1:] > channels[:, :-1]).all())
        if not ascending or bool(((channels < 0) | (channels >= head_dim)).any()):
            raise InvalidTensors(
                f"kept channels must ascend within 0 to {head_dim - 1} for each KV head", reason="packed"
            )

    def attention(self, tensors: Tensors) -> PromptAttention:
        channels, its_keys, its_values = (tensors[name] for name in ("channels", "keys", "values"))
        return lambda queries, keys, values, scaling: pruned_decode(
            queries, channels, its_keys, its_values, keys, values, scaling=scaling
        )


def num_channels(retention: float, head_dim: int) -> int:
    """C, the number of K channels that are retained."""
    # the shortest decimal that gives this float is what the preset or client wrote
    return math.ceil(Fraction(repr(retention)) * head_dim)
