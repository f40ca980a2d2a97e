"""K with fewer channels, V whole (ThinK, Xu et al. 2024).

Each KV head retains the K channels to which the question's last queries give the most weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.kernels.dispatch import check_same_kind
from kvferry.shared.compression.formats.interface import (
    InvalidTensors,
    Specs,
    Tensors,
    check_index,
    select_rows,
)
from kvferry.shared.compression.formats.stored import PromptAttention, StoredFormat
from kvferry.shared.compression.interface import LayerInputs, Method, Sizing, TensorSpec
from kvferry.shared.compression.plan import Allowed, Between, CompressionPlan, Part
from kvferry.shared.compression.presets import PRESETS
from kvferry.shared.compression.rdkv.compress import channel_weights


@dataclass(frozen=True, kw_only=True)
class Think(StoredFormat):
    """Selects channels by `|Q_c| |K_c|` (ThinK, Eq. 5, without its square).

    Q_c covers the queries of `LayerInputs.observing` and the group; K_c covers all tokens of the prompt, also
    those that are not selected.

    Attributes:
        channel_retention: fraction of K's channels that are retained; their number is rounded up.
        window: the most queries that choose the channels.
    """

    name: ClassVar[str] = "think"
    heads_apart: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, str]] = {**StoredFormat.kinds, "channels": "index"}
    allowed: ClassVar[Allowed] = {"channel_retention": Between(0.001, 1.0), "window": Between(1, 1024)}
    channel_retention: float
    window: int

    @classmethod
    def rows_within(cls, part: Part, sizing: Sizing) -> int:
        head_dim = sizing.head_dim
        channels = num_channels(cls.params(part)["channel_retention"], head_dim)
        rows = (sizing.rows * 2 * head_dim - channels) // (head_dim + channels)
        return min(rows, sizing.num_prompt_tokens)

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
        weights = channel_weights(inputs.observing(self.window).queries, inputs.keys)
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
        check_index(tensors, self.shape.num_prompt_tokens, reason="packed")
        channels, head_dim = tensors["channels"], self.shape.head_dim
        ascending = bool((channels[:, 1:] > channels[:, :-1]).all())
        if not ascending or bool(((channels < 0) | (channels >= head_dim)).any()):
            raise InvalidTensors(
                f"kept channels must ascend within 0 to {head_dim - 1} for each KV head", reason="packed"
            )

    def attention(self, tensors: Tensors) -> PromptAttention:
        channels, prompt_keys, prompt_values = (tensors[name] for name in ("channels", "keys", "values"))
        return lambda queries, keys, values, scaling: pruned_decode(
            queries, channels, prompt_keys, prompt_values, keys, values, scaling=scaling
        )


def num_channels(retention: float, head_dim: int) -> int:
    """Return C, the number of K channels that are retained."""
    # the shortest decimal that gives this float is what the preset or client wrote
    return math.ceil(Fraction(repr(retention)) * head_dim)


def pruned_decode(
    queries: Tensor,
    channels: Tensor,
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    *,
    scaling: float,
) -> Tensor:
    """Compute softmax(scaling * [q_C K^T, q K_new^T]) [V; V_new], q_C the query's retained channels (Eq. 6).

    Args: as in `kernels`; scaling is that of all D channels.
        channels: integers `[H_kv, C]`, those of the prompt's K, in its order.
        keys: `[H_kv, n, C]`, n >= 0.
        values: `[H_kv, n, D]`.
    """
    num_kv_heads, group_size, head_dim = queries.shape
    num_rows, num_new, num_channels = values.shape[1], new_keys.shape[1], channels.shape[1]
    new = (num_kv_heads, num_new, head_dim)
    expected = (
        (num_kv_heads, num_channels), (num_kv_heads, num_rows, num_channels),
        (num_kv_heads, num_rows, head_dim), new, new,
    )  # fmt: skip
    shapes = tuple(tuple(t.shape) for t in (channels, keys, values, new_keys, new_values))
    if shapes != expected:
        raise ValueError(f"channels, K, V and new K, V are {shapes}; they must be {expected}")
    check_same_kind(queries=queries, keys=keys, values=values, new_keys=new_keys, new_values=new_values)
    if num_rows + num_new == 0:
        raise ValueError("there is neither a row of the prompt nor a new one; there must be one to attend to")
    index = channels.long()[:, None].expand(-1, group_size, -1)
    logits = torch.cat([queries.gather(2, index) @ keys.mT, queries @ new_keys.mT], dim=2).float()
    probabilities = (logits * scaling).softmax(dim=-1).to(queries.dtype)
    return probabilities[:, :, :num_rows] @ values + probabilities[:, :, num_rows:] @ new_values


_REPRESENTATION = Part(name=Think.name, params={"channel_retention": 0.5, "window": 32})
THINK = Method(plan=CompressionPlan(method="think", representation=_REPRESENTATION), format=Think)
SNAPKV_THINK = Method(
    plan=replace(PRESETS["snapkv"], method="snapkv-think", representation=_REPRESENTATION), format=Think
)
