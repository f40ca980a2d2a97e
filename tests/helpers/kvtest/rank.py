"""A following rank whose attention needs no KV, for tests of passes; runs in a child process."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.shared.model.interface import DecodeAttention
from kvferry.shared.model.parallel.follower import FollowingRank

ATTENDING_RANK = "kvtest.rank:AttendingRank"


def attention_of(first_head: int) -> DecodeAttention:
    """Depends on every input, and on the order of heads. Args: first_head: of all, that it is given."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        heads = torch.arange(first_head + 1, first_head + keys.shape[1] + 1)[:, None, None]
        return queries * heads + (keys * values)[:, :, None]

    return attend


class AttendingRank(FollowingRank):
    def decode_attention(self, num_slots: int) -> DecodeAttention:
        return attention_of(self.rank * self.model.spec.num_kv_heads)
