"""For layers that scale queries by positions which they count in transformers' own cache (Llama 4)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

QUERY_SCALE = "kvferry_query_scale"
"""Attribute of an attention module: a function from positions `[B, T]` to the scale of their queries."""


def scale_queries_by_position(model: Any) -> None:
    """Turn the module's own scaling off; `bridge.py` scales by the pass's positions instead."""
    for attention in model.modules():
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False
            sizes = (attention.floor_scale, attention.attn_scale)
            setattr(attention, QUERY_SCALE, partial(_scale, *sizes))


def _scale(floor_scale: float, attn_scale: float, positions: Tensor) -> Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
