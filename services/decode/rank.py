"""A following rank of a decode worker: the KV of its heads, and attention to it.

Runs in a child process of the worker (`shared/model/parallel/follower.py`). It allocates and decides nothing:
the leading rank (`ranks.py`) says where every sequence is, and which slot it has in a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from multiprocessing.connection import Connection

import structlog
import torch
from torch import Tensor

from kvferry.kernels.softmax import Scaling
from kvferry.services.decode.attention import BatchAttention, SlotAttention
from kvferry.services.decode.part_receiver import ExpectedPart, PartReceiver
from kvferry.services.decode.rank_messages import (
    Copy,
    Drop,
    Expect,
    JoinBatch,
    LeaveBatch,
    Listen,
    Move,
    Place,
    ResetBatch,
    Retain,
    Return,
    Share,
    Shrink,
    Start,
    sent,
)
from kvferry.services.decode.retained import copied_rows, retained_layout
from kvferry.services.decode.sequence import PinnedRows
from kvferry.services.decode.step import MAX_STEPS
from kvferry.shared.cache.arena import SequenceLayout, sequence_layout
from kvferry.shared.cache.delta import RetainedChain, RetainedRows
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.model.interface import DecodeAttention
from kvferry.shared.model.parallel.follower import FollowingRank
from kvferry.shared.wire.receiver import BlockServer

_log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class _Sequence:
    """This rank's part of a sequence.

    Attributes:
        part: of its transfer, until all blocks are there.
    """

    layout: SequenceLayout
    buffer: Tensor
    returns_generated: bool
    part: ExpectedPart | None = None
    caches: list[LayerCache] = field(default_factory=list)


@dataclass(kw_only=True)
class _Retained:
    """As `RetainedSelection`, of this rank's heads."""

    retained: RetainedRows
    rows: tuple[tuple[Tensor, ...], ...]


class DecodeRank(FollowingRank):
    """What is here is named by the transfer that brought it, as in the messages."""

    def __init__(self, commands: Connection, notes: Connection) -> None:
        super().__init__(commands, notes)
        self._server: BlockServer | None = None
        self._receiver: PartReceiver | None = None
        self._slots: SlotAttention | None = None
        self._placed: set[int] = set()
        self._shapes: OrderedDict[tuple[int, Hashable], BatchAttention] = OrderedDict()
        self._start(Start(arena_bytes=0, max_batch_size=1))

    @torch.inference_mode()
    def run_other(self, command: object) -> None:
        self._run_other(command)

    @singledispatchmethod
    def _run_other(self, command: object) -> None:
        super().run_other(command)

    @_run_other.register
    def _(self, command: Start) -> None:
        self._start(command)
        self.answer(None)

    def _start(self, command: Start) -> None:
        if self._server is not None:
            self._server.close()
            self._server = self._receiver = None
        self._buffer = torch.empty(command.arena_bytes, dtype=torch.uint8, device=self.resolve_device())
        self._max_batch_size = command.max_batch_size
        self._sequences: dict[int, _Sequence] = {}
        self._retained: dict[int, _Retained] = {}
        self._prompts: dict[int, list[LayerCache]] = {}
        self._reset()

    # ---- sequences ---------------------------------------------------------------------------------------

    @_run_other.register
    def _(self, command: Listen) -> None:
        first_head = self.rank * self.model.spec.num_kv_heads
        receiver = PartReceiver(
            self.model.spec,
            first_head=first_head,
            device=self.resolve_device(),
            note=self.note,
            ask=self.ask,
        )
        try:
            self._server = command.transport.server(self.rank, receiver, on_late_block=receiver.late_block)
        except ConfigurationError as error:
            self.answer(error)
            return
        self._receiver = receiver
        self.answer(self._server.endpoint)

    @_run_other.register
    def _(self, command: Expect) -> None:
        assert self._receiver is not None, "the rank does not listen"
        pinned = None
        if command.retained:
            its = [(self._retained[name], num_tokens) for name, num_tokens in command.retained]
            selections = [replace(one.retained, num_tokens=num_tokens) for one, num_tokens in its]
            pinned = PinnedRows(
                chain=RetainedChain(selections=tuple(selections)),
                layers=tuple(one.rows for one, _ in its),
                unpin=lambda: None,  # the leading rank has pinned them
            )
        plan = replace(command.resolved, max_new_tokens=command.room)
        made = self._made(plan, command.place, returns_generated=command.returns_generated)
        made.part = ExpectedPart(
            key=command.key,
            resolved=command.resolved,
            room=command.room,
            returns_generated=command.returns_generated,
            layout=made.layout,
            buffer=made.buffer,
            pinned=pinned,
        )
        self._sequences[command.key.transfer_id] = made
        self._receiver.expect(made.part)

    @_run_other.register
    def _(self, command: Move) -> None:
        sequence = self._arrived(command.sequence)
        moved = self._made(command.plan, command.place, returns_generated=sequence.returns_generated)
        for cache, layer in zip(sequence.caches, moved.layout.layers, strict=True):
            cache.move(layer.format, layer.views(moved.buffer))
        sequence.layout, sequence.buffer = moved.layout, moved.buffer

    @_run_other.register
    def _(self, command: Share) -> None:
        sequence = self._arrived(command.sequence)
        buffer = torch.empty(sequence.layout.size_bytes, dtype=torch.uint8)
        self._prompts[command.sequence] = _copied(sequence.caches, sequence.layout, buffer)

    @_run_other.register
    def _(self, command: Copy) -> None:
        prompt = self._prompts[command.prompt]
        sequence = self._made(command.plan, command.place, returns_generated=command.returns_generated)
        sequence.caches = _copied(prompt, sequence.layout, sequence.buffer)
        self._sequences[command.sequence] = sequence

    @_run_other.register
    def _(self, command: Retain) -> None:
        caches = self._arrived(command.sequence).caches
        del self._sequences[command.sequence]
        rows = tuple(tuple(map(cache.regions.__getitem__, cache.format.shape.row_names)) for cache in caches)
        self._retained[command.sequence] = _Retained(retained=command.rows, rows=rows)

    @_run_other.register
    def _(self, command: Shrink) -> None:
        its = self._retained[command.retained]
        numbers = list(command.numbers)
        regions, _ = retained_layout(its.rows, numbers)
        its.rows = copied_rows(its.rows, regions, self._range(command.place), numbers)
        its.retained = command.rows

    @_run_other.register
    def _(self, command: Drop) -> None:
        for name in command.sequences:
            sequence = self._sequences.pop(name, None)
            if self._receiver is not None and sequence is not None and sequence.part is not None:
                self._receiver.forget(sequence.part)
        for name in command.retained:
            self._retained.pop(name, None)
        for name in command.prompts:
            self._prompts.pop(name, None)

    @_run_other.register
    def _(self, command: Return) -> None:
        caches = self._arrived(command.sequence).caches
        self.answer([sent(cache.returned(command.num_appended)) for cache in caches])

    def _arrived(self, name: int) -> _Sequence:
        """A sequence whose blocks are all there."""
        sequence = self._sequences[name]
        if self._receiver is not None and sequence.part is not None:
            self._receiver.forget(sequence.part)
            sequence.caches, sequence.layout = sequence.part.caches, sequence.part.layout
            sequence.part = None
        return sequence

    def _made(self, plan: ResolvedPlan, place: Place | None, *, returns_generated: bool) -> _Sequence:
        """A sequence without layers. Args: place: None: in host memory."""
        layout = sequence_layout(make_formats(self.model.spec, plan, returns_generated=returns_generated))
        buffer = torch.empty(layout.size_bytes, dtype=torch.uint8) if place is None else self._range(place)
        return _Sequence(layout=layout, buffer=buffer, returns_generated=returns_generated)

    def _range(self, place: Place) -> Tensor:
        return self._buffer[place.offset : place.offset + place.size_bytes]

    # ---- steps -------------------------------------------------------------------------------------------

    @_run_other.register
    def _(self, command: JoinBatch) -> None:
        if self._slots is None:
            self._slots = SlotAttention(self.model.spec, self._max_batch_size, self._buffer)
        caches = self._arrived(command.sequence).caches
        self._slots.place(command.slot, caches, command.num_appended)
        self._placed.add(command.slot)

    @_run_other.register
    def _(self, command: LeaveBatch) -> None:
        assert self._slots is not None, "nothing has been placed"
        self._slots.remove(command.slot)
        self._placed.discard(command.slot)

    @_run_other.register
    def _(self, command: ResetBatch) -> None:
        self._reset()

    def _reset(self) -> None:
        self._slots = None
        self._placed.clear()
        self._shapes.clear()

    @torch.inference_mode()
    def decode_attention(self, num_slots: int) -> DecodeAttention:
        slots = self._slots
        assert slots is not None, "nothing has been placed"
        key = (num_slots, slots.signature())
        attention = self._shapes.pop(key, None) or BatchAttention(slots, num_slots)
        self._shapes[key] = attention
        if len(self._shapes) > MAX_STEPS:
            self._shapes.popitem(last=False)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
            output = attention(layer, queries, keys, values, scaling)
            if slots.errors:  # the leading rank sees it in the slots' logits
                output = output.clone()
                output[list(slots.errors)] = torch.nan
            return output

        return attend

    @torch.inference_mode()
    def step_done(self) -> None:
        (num_slots, _), attention = next(reversed(self._shapes.items()))
        active = torch.tensor([slot in self._placed for slot in range(num_slots)], dtype=torch.int64)
        attention.advance(active.to(self._buffer.device))
        assert self._slots is not None, "a step has been run"
        for slot, error in self._slots.errors.items():
            _log.error("a sequence failed in a rank", rank=self.rank, slot=slot, exc_info=error)


def _copied(caches: list[LayerCache], layout: SequenceLayout, buffer: Tensor) -> list[LayerCache]:
    layers = zip(caches, layout.layers, strict=True)
    return [cache.copied(layer.format, layer.views(buffer)) for cache, layer in layers]
