"""A following rank of a decode worker: the KV of its heads, and attention to it.

Runs in a child process of the worker (`shared/model/parallel/follower.py`). The leading rank (`Parts`)
says what its `Part` does, and which slot a sequence has in a step.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from multiprocessing.connection import Connection
from typing import Any

import structlog
import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.services.decode.attention import BatchAttention, SlotAttention
from kvferry.services.decode.parts import Part
from kvferry.services.decode.receiver import PartReceiver
from kvferry.shared.model.interface import DecodeAttention
from kvferry.shared.model.parallel.follower import FollowingRank
from kvferry.shared.process.worker import RankTransport
from kvferry.shared.wire.receiver import BlockServer

_log = structlog.get_logger(__name__)


class DecodeRank(FollowingRank):
    """The methods that the leading rank calls are its part's and those about slots."""

    def __init__(self, commands: Connection, notes: Connection) -> None:
        super().__init__(commands, notes)
        self._server: BlockServer | None = None
        self._part: Part
        self._slots: SlotAttention | None = None
        self._placed: set[int] = set()
        self._shape: tuple[int, Hashable] | None = None
        self._attention: BatchAttention
        """Of the last step, which had this shape."""

    def target(self, name: str) -> Any:
        return self if hasattr(self, name) else self._part

    def start(self, memory_bytes: int, max_batch_size: int, transport: RankTransport) -> str:
        """Take memory and listen for the blocks of the rank's heads; forget everything from before.

        Returns: the endpoint. Raises: ConfigurationError: the address cannot be bound.
        """
        if self._server is not None:
            self._server.close()
        with torch.inference_mode(False):  # other threads write to it, too
            self._memory = torch.empty(memory_bytes, dtype=torch.uint8, device=self.device)
        self._max_batch_size = max_batch_size
        receiver = PartReceiver(
            self.model.spec,
            first_head=self.rank * self.model.spec.num_kv_heads,
            device=self.device,
            note=lambda *note: self.note(note),
            ask=self.ask,
        )
        self._part = Part(self._memory, receiver)
        self.reset()
        self._server = transport.server(self.rank, receiver, on_late_block=receiver.late_block)
        return self._server.endpoint

    def pickled(self, name: str, *args: Any) -> bytes:
        """Return what the part's method returns, pickled, because ranks share no memory."""
        return pickle.dumps(getattr(self._part, name)(*args))

    def place(self, slot: int, name: int, num_appended: int) -> None:
        """Place a sequence in an empty slot."""
        if self._slots is None:
            self._slots = SlotAttention(self.model.spec, self._max_batch_size, self._memory)
        self._slots.place(slot, self._part.arrived(name).caches, num_appended)
        self._placed.add(slot)

    def vacate(self, slot: int) -> None:
        assert self._slots is not None, "nothing has been placed"
        self._slots.remove(slot)
        self._placed.discard(slot)

    def reset(self) -> None:
        """Empty all slots, whatever state they are in."""
        self._slots = self._shape = None
        self._placed.clear()

    @torch.inference_mode()
    def decode_attention(self, num_slots: int) -> DecodeAttention:
        slots = self._slots
        assert slots is not None, "nothing has been placed"
        shape = (num_slots, slots.signature())
        if shape != self._shape:
            self._shape, self._attention = shape, BatchAttention(slots, num_slots)
        attention = self._attention

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
            output = attention(layer, queries, keys, values, scaling)
            if slots.errors:  # the leading rank sees it in the slots' logits
                output = output.clone()
                output[list(slots.errors)] = torch.nan
            return output

        return attend

    @torch.inference_mode()
    def step_done(self) -> None:
        assert self._slots is not None, "a step has been run"
        assert self._shape is not None, "a step has been run"
        active = torch.tensor([slot in self._placed for slot in range(self._shape[0])], dtype=torch.int64)
        self._attention.advance(active.to(self._memory.device))
        for slot, error in self._slots.errors.items():
            _log.error("a sequence failed in a rank", rank=self.rank, slot=slot, exc_info=error)
