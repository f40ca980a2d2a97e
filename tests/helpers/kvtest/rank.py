"""A following rank for tests of passes, in a child process: its attention needs no KV, and it notes to the
lead what it has compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.shared.compression.formats.interface import Encoded
from kvferry.shared.model.interface import DecodeAttention
from kvferry.shared.model.parallel.follower import FollowingRank
from kvferry.shared.wire.messages import TransferKey

ATTENDING_RANK = "kvtest.rank:AttendingRank"


def attention_of(first_head: int) -> DecodeAttention:
    """Depends on every input, and on the order of heads. Args: first_head: of all, that it is given."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: object) -> Tensor:
        heads = torch.arange(first_head + 1, first_head + keys.shape[1] + 1)[:, None, None]
        return queries * heads + (keys * values)[:, :, None]

    return attend


class AttendingRank(FollowingRank):
    def part_taker(self, transfer: TransferKey) -> AttendingRank:
        return self

    def take(self, layer: int, part: Encoded | Exception) -> None:
        if isinstance(part, Encoded):
            self.note((layer, {name: tensor.numpy() for name, tensor in part.finish(part.tensors).items()}))
        else:
            self.note((layer, part))

    def decode_attention(self, num_slots: int) -> DecodeAttention:
        return attention_of(self.rank * self.model.spec.num_kv_heads)
