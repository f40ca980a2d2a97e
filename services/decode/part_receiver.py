"""Takes the blocks of a following rank's heads, straight from prefill.

Place in the request's path: between the rank's block server and its part of the arena. The leading rank's
receiver (`receiver.py`) takes its own heads' blocks and is told how this part went, so that it begins the
sequence once all parts are there, and ends it with the first that fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvferry.services.decode.rank_messages import IsAwaited, LateBlock, PartArrived, PartFailed
from kvferry.services.decode.receiver import ArenaCopier, CacheWriter, check_transfer, measured_plan
from kvferry.services.decode.sequence import PinnedRows
from kvferry.shared.cache.arena import SequenceLayout, sequence_layout
from kvferry.shared.cache.delta import Positions
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.errors import KvferryError, LeaseExpired, TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.frames import encode_nack
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    BlockHeader,
    EndRecord,
    LayerHeader,
    Manifest,
    TransferKey,
    part_key,
)

_EXPECT_TIMEOUT_S = 30.0
"""How long an awaited transfer waits for this rank to be told of it, which happens between two steps."""
_ASK_INTERVAL_S = 0.5
_ANSWER_TIMEOUT_S = 5.0


@dataclass(eq=False, kw_only=True)
class ExpectedPart:
    """A rank's part of a reservation.

    Attributes:
        key: the reservation's.
        resolved: the reservation's plan; room: new tokens for which there is room.
        layout: of the rank's heads; of measured plans, once the manifest is there.
        buffer: uint8, the range of the arena.
        pinned: rows that the transfer may leave out.
        caches: every layer, once it has arrived.
        has_begun: whether a transfer has, which then has these `layer_rows`.
    """

    key: TransferKey
    resolved: ResolvedPlan
    room: int
    returns_generated: bool
    layout: SequenceLayout
    buffer: Tensor
    pinned: PinnedRows | None
    caches: list[LayerCache] = field(default_factory=list)
    has_begun: bool = False
    layer_rows: tuple[int, ...] = ()


class PartReceiver:
    """Implements `BlockSink` for the block server's thread; the rank's own thread calls `expect` and
    `forget`.

        manifest ──known──► opened
            └──unknown──► the leading rank is asked ──its reservation has ended, or there is none──► refused
                                  └──awaited──► waits until the rank's own thread has come to it ──► opened

    Args:
        spec: of the rank's heads.
        first_head: the number of the rank's first KV head.
        note: tells the leading rank.
        ask: asks it (`FollowingRank.ask`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        first_head: int,
        device: torch.device,
        note: Callable[[object], None],
        ask: Callable[..., Any],
    ) -> None:
        self._spec = spec
        self._first_head = first_head
        self._note = note
        self._ask = ask
        self._copier = ArenaCopier(MAX_PAYLOAD_BYTES, device)
        self._condition = threading.Condition()
        self._expected: dict[TransferKey, ExpectedPart] = {}
        self._incoming: dict[TransferKey, tuple[ExpectedPart, CacheWriter]] = {}

    def expect(self, part: ExpectedPart) -> None:
        """A reservation was made. Everything that the rank was told before has been done, so that nothing
        else uses its range."""
        with self._condition:
            self._expected[part_key(part.key, self._first_head)] = part
            self._condition.notify_all()

    def forget(self, part: ExpectedPart) -> None:
        """The reservation has ended: nothing is written to its range any more. Idempotent."""
        key = part_key(part.key, self._first_head)
        with self._condition:
            self._expected.pop(key, None)
            for key in [key for key, its in self._incoming.items() if its[0] is part]:
                del self._incoming[key]

    @torch.inference_mode()
    def open(self, manifest: Manifest) -> None:
        """See `BlockSink.open`."""
        part = self._awaited(manifest.key)
        with self._condition:
            try:
                if self._expected.get(manifest.key) is not part:
                    raise self._unknown(manifest.key)
                if part.has_begun:
                    message = f"transfer {manifest.key.transfer_id:#x} has begun before"
                    raise LeaseExpired(message, reason="reservation_used")
                part.has_begun = True
                chain = part.pinned.chain if part.pinned is not None else None
                check_transfer(manifest, part.resolved, chain, self._spec)
                plan = measured_plan(manifest, part.resolved)
                if plan is not part.resolved:
                    part.layout = self._layout(plan, part)
            except KvferryError as error:
                self._fail(part, error)
                raise
            pinned = None
            if manifest.retained_transfer_id and part.pinned is not None:
                pinned = part.pinned.first(manifest.retained_depth, manifest.retained_tokens)
            writer = CacheWriter(part.layout, part.buffer, self._copier, pinned=pinned)
            self._incoming[manifest.key] = part, writer
            part.layer_rows = manifest.layer_rows

    @torch.inference_mode()
    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        """See `BlockSink.begin_layer`."""
        self._run(key, lambda part, writer: writer.begin_layer(header))

    @torch.inference_mode()
    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """See `BlockSink.write`."""
        self._run(header.key, lambda part, writer: writer.write(header, payload))

    @torch.inference_mode()
    def commit(self, end: EndRecord) -> None:
        """See `BlockSink.commit`."""
        self._run(end.key, self._finish)
        with self._condition:
            self._incoming.pop(end.key, None)

    def abort(self, key: TransferKey, reason: str) -> None:
        """See `BlockSink.abort`."""
        with self._condition:
            if (its := self._incoming.pop(key, None)) is not None:
                message = f"the transfer of the prompt's KV failed: {reason}"
                self._fail(its[0], TransferFailed(message, reason=reason))

    def late_block(self) -> None:
        """A block without a current reservation has arrived. Any thread may call this."""
        self._note(LateBlock())

    def _finish(self, part: ExpectedPart, writer: CacheWriter) -> None:
        part.caches = list(writer.finish())
        positions: Sequence[Positions | None] = ()
        if all(cache.format.is_plain for cache in part.caches):
            positions = [cache.positions for cache in part.caches]
        self._note(
            PartArrived(
                key=part.key,
                layer_rows=part.layer_rows,
                prompt_bytes=sum(cache.used_bytes(0) for cache in part.caches),
                positions=tuple(positions),
            )
        )

    def _run(self, key: TransferKey, what: Callable[[ExpectedPart, CacheWriter], None]) -> None:
        """Raises: LeaseExpired: the reservation has ended."""
        with self._condition:
            its = self._incoming.get(key)
            if its is None:
                self.late_block()
                message = f"the reservation of transfer {key.transfer_id:#x} has ended"
                raise LeaseExpired(message, reason="reservation_ended")
            try:
                what(*its)
            except KvferryError as error:
                self._incoming.pop(key)
                self._fail(its[0], error)
                raise

    def _awaited(self, key: TransferKey) -> ExpectedPart:
        """The rank's part; waits if the rank may yet be told of it.

        Raises: LeaseExpired: there is none.
        """
        reservation = part_key(key, -self._first_head)
        deadline_s = time.monotonic() + _EXPECT_TIMEOUT_S
        with self._condition:
            part = self._expected.get(key)
        while part is None and time.monotonic() < deadline_s and self._is_awaited(reservation):
            with self._condition:
                part = self._condition.wait_for(lambda: self._expected.get(key), _ASK_INTERVAL_S)
        if part is None:
            error = self._unknown(key)
            self._note(PartFailed(key=reservation, nack=encode_nack(error)))
            raise error
        return part

    def _is_awaited(self, key: TransferKey) -> bool:
        try:
            return bool(self._ask(IsAwaited(key=key), timeout_s=_ANSWER_TIMEOUT_S))
        except TimeoutError:
            return False

    def _unknown(self, key: TransferKey) -> LeaseExpired:
        return LeaseExpired(
            f"no reservation for transfer {key.transfer_id:#x}, generation {key.generation} exists in the "
            f"rank of head {self._first_head}",
            reason="unknown_transfer",
        )

    def _layout(self, plan: ResolvedPlan, part: ExpectedPart) -> SequenceLayout:
        with_room = replace(plan, max_new_tokens=part.room)
        return sequence_layout(make_formats(self._spec, with_room, returns_generated=part.returns_generated))

    def _fail(self, part: ExpectedPart, error: KvferryError) -> None:
        self._note(PartFailed(key=part.key, nack=encode_nack(error)))
