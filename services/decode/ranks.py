"""The other ranks of a decode worker, as its leading rank sees them: each has the KV of its own heads.

    receiver ── what is expected ──────────┐
    memory, retained KV ── the same moves ─┼──► ranks (`rank.py`), in one order for all
    engine ── the same slots and steps ────┘

The leading rank's own sequences, arena and attention are those of a model with 1/N of the heads. What it does
to them, the others do to theirs at the same offsets. Each takes the blocks of its heads itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvferry.services.decode.rank_messages import (
    Copy,
    Drop,
    Expect,
    IsAwaited,
    JoinBatch,
    LateBlock,
    LeaveBatch,
    Listen,
    Move,
    PartArrived,
    PartFailed,
    Place,
    ResetBatch,
    Retain,
    Return,
    Share,
    Shrink,
    Start,
    received,
)
from kvferry.services.decode.receiver import CacheReceiver
from kvferry.services.decode.retained import RetainedSelection
from kvferry.services.decode.sequence import Sequence
from kvferry.services.decode.shared_prompts import SharedPrompt
from kvferry.services.decode.step import StepDevice, StepInput, StepRunner
from kvferry.shared.cache.arena import Allocation, SequenceLayout
from kvferry.shared.cache.delta import RowNumbers
from kvferry.shared.compression.formats import format_class
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.presets import preset
from kvferry.shared.errors import (
    ConfigurationError,
    InvalidRequest,
    KvferryError,
    ProtocolMismatch,
    WorkerUnavailable,
)
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.parallel.model import ParallelModel
from kvferry.shared.worker import RankTransport

DECODE_RANK = "kvferry.services.decode.rank:DecodeRank"
"""The class of the other ranks, for `load_parallel_model`."""
_START_TIMEOUT_S = 120.0
_RETURN_TIMEOUT_S = 180.0
"""A step may run first, whose exchanges have their own limit."""


class DecodeRanks:
    """Tells the other ranks. Any thread may call its methods, in the order in which the others are to follow.

    Attributes:
        num_ranks: with this one.
        spec: of one rank's heads.
        returning: to be locked around `ask_returned` and `with_returned`.
        endpoints: where the others take the blocks of their heads; empty until `listen`.

    Args: model: whose followers are `DECODE_RANK`s.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.num_ranks = model.num_ranks
        self.spec = model.part_spec
        self.returning = threading.Lock()
        self._lead = model.lead
        self._dropped: deque[Drop] = deque()
        self.endpoints: tuple[str, ...] = ()

    def start(self, *, arena_bytes: int, max_batch_size: int) -> None:
        """Have the others take memory; waits until they have."""
        self._tell(Start(arena_bytes=arena_bytes, max_batch_size=max_batch_size))
        self._lead.answers(timeout_s=_START_TIMEOUT_S)

    def listen(self, transport: RankTransport, receiver: CacheReceiver) -> None:
        """Have the others take the blocks of their heads. Args: receiver: is told how their parts went.

        Raises: ConfigurationError: one cannot listen.
        """

        def on_note(rank: int, note: object) -> None:
            if isinstance(note, PartArrived):
                receiver.part_arrived(rank, note)
            elif isinstance(note, PartFailed):
                receiver.part_failed(rank, note)
            elif isinstance(note, LateBlock):
                receiver.late_block()

        def on_question(rank: int, what: object) -> bool:
            return isinstance(what, IsAwaited) and receiver.awaits(what.key)

        self._lead.on_note, self._lead.on_question = on_note, on_question
        self._tell(Listen(transport=transport))
        answers = self._lead.answers(timeout_s=_START_TIMEOUT_S)
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, KvferryError):
                raise ConfigurationError(f"rank {rank} of {self.num_ranks}: {answer.message}")
        self.endpoints = tuple(answers)

    def methods(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these methods that can be divided."""
        return tuple(name for name in names if format_class(preset(name).representation).divides)

    def check(self, layout: SequenceLayout, method: str) -> None:
        """Raises: InvalidRequest: a layer's format, of another package, cannot be divided."""
        for layer in layout.layers:
            if not layer.format.divides:
                raise InvalidRequest(
                    f"format {layer.format.name!r} of method {method!r} cannot be divided among the "
                    f"{self.num_ranks} ranks of this decode worker",
                    param="kv_compression.method",
                    reason="ranks",
                )

    # ---- transfers ---------------------------------------------------------------------------------------

    def expect(self, sequence: Sequence) -> None:
        """A reservation was made; called before its ticket is out."""
        retained = () if sequence.pinned is None else sequence.pinned.chain.selections
        self._tell(
            Expect(
                key=sequence.key,
                place=_place(sequence.allocation),
                resolved=sequence.resolved,
                room=sequence.room,
                returns_generated=sequence.request.store_history,
                retained=tuple((its.transfer_id, its.num_tokens) for its in retained),
            )
        )

    def put_together(self, sequence: Sequence) -> None:
        """What is known of a sequence of all heads, when all parts have arrived.

        Raises: ProtocolMismatch: prefill measured other rows for some heads than for others.
        """
        parts = [sequence.parts[rank] for rank in range(1, self.num_ranks)]
        assert sequence.manifest is not None
        for rank, part in enumerate(parts, 1):
            if part.layer_rows != sequence.manifest.layer_rows:
                raise ProtocolMismatch(
                    f"the manifest's layer_rows for rank {rank} are {part.layer_rows}; for rank 0 they are "
                    f"{sequence.manifest.layer_rows}",
                    reason="manifest_layer_rows",
                )
        own_bytes = sum(cache.used_bytes(0) for cache in sequence.caches)
        sequence.prompt_bytes = own_bytes + sum(part.prompt_bytes for part in parts)
        of_ranks = [sequence.positions, *(part.positions for part in parts)]
        sequence.positions = tuple(
            None if layer[0] is None else np.concatenate(layer) for layer in zip(*of_ranks, strict=True)
        )

    def used_bytes(self, sequence: Sequence) -> int:
        """Bytes that all ranks use for a sequence. Segments that are packed while tokens are generated count
        as large as this rank's."""
        grown = sum(its.used_bytes(sequence.num_appended) - its.used_bytes(0) for its in sequence.caches)
        return sequence.prompt_bytes + self.num_ranks * grown

    # ---- sequences ---------------------------------------------------------------------------------------

    def moved(self, sequence: Sequence) -> None:
        """A sequence is elsewhere; its former range is still its own."""
        place = _place(sequence.allocation) if sequence.is_in_arena else None
        self._tell(Move(sequence=sequence.key.transfer_id, place=place, plan=_plan(sequence)))

    def share(self, sequence: Sequence, prompt: SharedPrompt) -> None:
        """Store a prompt for as long as this rank does."""
        name = sequence.key.transfer_id
        self._tell(Share(sequence=name))
        # later, because this may be called anywhere
        weakref.finalize(prompt, self._dropped.append, Drop(prompts=(name,))).atexit = False

    def copy(self, prompt: SharedPrompt, sequence: Sequence) -> None:
        """Begin a sequence with a copy of a shared prompt."""
        self._tell(
            Copy(
                prompt=prompt.transfer_id,
                sequence=sequence.key.transfer_id,
                place=_place(sequence.allocation),
                plan=_plan(sequence),
                returns_generated=sequence.request.store_history,
            )
        )

    def retain(self, selection: RetainedSelection) -> None:
        rows, number = selection.retained, self.spec.num_kv_heads
        self._lead.commands(
            [
                Retain(sequence=rows.transfer_id, rows=rows.of_heads(rank * number, number))
                for rank in range(1, self.num_ranks)
            ]
        )

    def own_heads(self, numbers: list[RowNumbers]) -> list[RowNumbers]:
        """Those of this rank's heads."""
        return [its[: self.spec.num_kv_heads] for its in numbers]

    def shrunk(self, selection: RetainedSelection, numbers: list[RowNumbers]) -> None:
        """Args: numbers: of the rows that are copied, of all heads."""
        rows, number, place = selection.retained, self.spec.num_kv_heads, _place(selection.allocation)
        firsts = range(number, self.num_ranks * number, number)
        self._lead.commands(
            [
                Shrink(
                    retained=rows.transfer_id,
                    place=place,
                    rows=rows.of_heads(first, number),
                    numbers=tuple(its[first : first + number] for its in numbers),
                )
                for first in firsts
            ]
        )

    def drop(self, *, sequence: Sequence | None = None, retained: RetainedSelection | None = None) -> None:
        """Forget a sequence that has ended, or rows that are not retained any more."""
        its_sequence = () if sequence is None else (sequence.key.transfer_id,)
        its_rows = () if retained is None else (retained.retained.transfer_id,)
        with suppress(WorkerUnavailable):  # nothing is left of a lost rank
            self._tell(Drop(sequences=its_sequence, retained=its_rows))

    def ask_returned(self, sequence: Sequence) -> None:
        """Have the others copy what a sequence's history gets, as it is now."""
        self._tell(Return(sequence=sequence.key.transfer_id, num_appended=sequence.num_appended))

    def with_returned(self, layers: list[Tensors]) -> list[Tensors]:
        """What the history gets, all heads. Args: layers: this rank's part."""
        answers = self._lead.answers(timeout_s=_RETURN_TIMEOUT_S)
        parts = [layers, *([received(layer) for layer in answer] for answer in answers)]
        return [
            {name: torch.cat([its[name] for its in of_layer]) for name in of_layer[0]}
            for of_layer in zip(*parts, strict=True)
        ]

    # ---- steps -------------------------------------------------------------------------------------------

    def runner(self, *arguments: Any, **options: Any) -> RanksRunner:
        """What places sequences in this rank's slots and the others'. Args: as of `StepRunner`."""
        return RanksRunner(self, *arguments, **options)

    def joined(self, slot: int, given: StepInput) -> None:
        self._tell(JoinBatch(sequence=given.sequence, slot=slot, num_appended=given.num_appended))

    def left(self, slot: int) -> None:
        self._tell(LeaveBatch(slot))

    def reset_batch(self) -> None:
        with suppress(WorkerUnavailable):
            self._tell(ResetBatch())

    def _tell(self, command: object) -> None:
        self._flush()
        self._lead.command(command)

    def _flush(self) -> None:
        while self._dropped:
            self._lead.command(self._dropped.popleft())


class RanksRunner(StepRunner):
    """`StepRunner` of the leading rank: the others have the same sequences in the same slots."""

    def __init__(
        self,
        ranks: DecodeRanks,
        model: LanguageModel,
        device: StepDevice,
        *,
        max_batch_size: int,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(model, device, max_batch_size=max_batch_size, warn=warn)
        self._ranks = ranks
        self._spec = ranks.spec

    def join(self, given: StepInput) -> int:
        slot = super().join(given)
        self._ranks.joined(slot, given)
        return slot

    def leave(self, slot: int) -> None:
        super().leave(slot)
        self._ranks.left(slot)

    def reset(self) -> None:
        super().reset()
        self._ranks.reset_batch()


def _place(allocation: Allocation) -> Place:
    return Place(offset=allocation.offset, size_bytes=allocation.size_bytes)


def _plan(sequence: Sequence) -> ResolvedPlan:
    """The plan with the room that the sequence has."""
    return replace(sequence.plan, max_new_tokens=sequence.room)
