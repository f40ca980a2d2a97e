"""The pass that a model is probed with when it is loaded: what its layers call attention with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling, Softmax
from kvferry.shared.model.adapters.latent import Latent
from kvferry.shared.model.spec import Heads, ModelSpec

if TYPE_CHECKING:
    from kvferry.shared.model.state_cache import StateCache


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What one layer's attention was called with: its heads, the keys `[H_kv, T, D]`, whether the softmax is
    plain, and how many of the keys' channels are values (0: none)."""

    layer: int
    heads: Heads
    keys: Tensor
    has_plain_softmax: bool
    latent_dim: int


class ProbePass:
    """Records each layer's call. Its attention returns zeros, so that a token's key depends on the token and
    its position alone, in every layer; of a model with states, if each token is a sequence of its own."""

    def __init__(self, *, spec: ModelSpec) -> None:
        self.spec = spec
        self.positions = torch.empty(0)
        self.cache: StateCache | None = None
        self.calls: list[AttentionCall] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Scaling, latent: Latent | None
    ) -> Tensor:
        call = AttentionCall(
            layer=layer,
            heads=Heads(
                num_kv_heads=key.shape[1],
                group_size=query.shape[1] // key.shape[1],
                head_dim=key.shape[3],
            ),
            keys=key.transpose(0, 1).flatten(1, 2).clone(),
            has_plain_softmax=not isinstance(scaling, Softmax),
            latent_dim=0 if latent is None else value.shape[3],
        )
        self.calls.append(call)
        width = query.shape[3] if latent is None else latent.expand(key[0, 0, :1], slice(1))[1].shape[2]
        batch_size, num_heads, num_tokens, _ = query.shape
        return query.new_zeros(batch_size, num_tokens, num_heads, width)
