"""Takes a rank's blocks of prompts' compressed KV from the wire into its part of the arena.

Place in the request's path: between the rank's block server and its part of the sequence. Every rank has a
`PartReceiver`, the leading one, too. It accepts a transfer only if its generation, model and plan match a
reservation that has not ended; a refusal names the field that differs. The layer's format decides where a
tensor's bytes go and checks them; blocks may split tensors at any byte. `Reservations` is told how it went.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvferry.services.decode.cache_writer import CacheWriter
from kvferry.shared.cache.arena import ArenaCopier, SequenceLayout, sequence_layout
from kvferry.shared.cache.delta import PinnedRows, Positions, RetainedChain
from kvferry.shared.compression.compress import with_layer_rows
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, num_draft_tokens, plan_digest
from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    BlockHeader,
    EndRecord,
    LayerHeader,
    Manifest,
    TransferKey,
)
from kvferry.shared.wire.receiver import check_manifest, model_fields, part_key

_EXPECT_TIMEOUT_S = 30.0
"""How long an awaited transfer waits for this rank to be told of it, which happens between two steps."""
_ASK_INTERVAL_S = 0.5
_ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What may arrive for a reservation, the same in all ranks.

    Attributes:
        resolved: the reservation's plan.
        room: new tokens for which there is room.
        retained: the transfers whose rows this one may leave out, newest first, and below which token.
    """

    resolved: ResolvedPlan
    room: int
    returns_generated: bool
    retained: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False, kw_only=True)
class SequencePart:
    """One rank's heads of a sequence. `lock` guards its bytes while they arrive.

    Attributes:
        key: of the sequence's transfer.
        layout: of measured plans that of the reservation, until the manifest is there.
        buffer: uint8, its range of the arena, or host memory.
        expected: None for a copy of a shared prompt.
        pinned: rows that the transfer may leave out.
        caches: every layer, once it has arrived.
        has_begun: whether a transfer has; there is one at most.
        is_over: nothing is written to its range any more.
    """

    key: TransferKey
    layout: SequenceLayout
    buffer: Tensor
    expected: Expected | None = None
    pinned: PinnedRows | None = None
    caches: tuple[LayerCache, ...] = ()
    has_begun: bool = False
    is_over: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(frozen=True, kw_only=True)
class PartArrived:
    """What is known of a part once all its blocks are there.

    Attributes:
        layer_rows: as of the part's manifest.
        prompt_bytes: of the part of the prompt's cache.
        positions: the tokens of each layer's rows; empty if the rows cannot be reused by the next turn.
    """

    layer_rows: tuple[int, ...]
    prompt_bytes: int
    positions: tuple[Positions | None, ...]


@dataclass(frozen=True)
class _Incoming:
    part: SequencePart
    writer: CacheWriter
    layer_rows: tuple[int, ...]


class PartReceiver:
    """Implements `BlockSink` for the block server's thread; any thread may call `expect` and `forget`.

        manifest ──known──► opened ──► layers, blocks ──► end: arrived
            └──unknown──► the leading rank is asked ──its reservation has ended, or there is none──► refused
                                  └──awaited──► waits until this rank has been told of it ──► opened

    Attributes:
        spec: of the rank's heads.
        first_head: the number of the rank's first KV head.

    Args:
        note: given the name and arguments of what happens, as of `Reservations`; called without locks.
        ask: whether a reservation with this key waits for its blocks. Raises: TimeoutError: no answer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        first_head: int,
        device: torch.device,
        note: Callable[..., None],
        ask: Callable[..., bool],
    ) -> None:
        self.spec = spec
        self.first_head = first_head
        self._note = note
        self._ask = ask
        self._copier = ArenaCopier(MAX_PAYLOAD_BYTES, device)
        self._told = threading.Condition()
        self._expected: dict[TransferKey, SequencePart] = {}
        self._incoming: dict[TransferKey, _Incoming] = {}

    def expect(self, part: SequencePart) -> None:
        """Let a part's blocks come. Nothing else uses its range."""
        with self._told:
            self._expected[part_key(part.key, self.first_head)] = part
            self._told.notify_all()

    def forget(self, part: SequencePart) -> None:
        """Write nothing to the part's range any more. Idempotent; waits for a block that is being written."""
        with part.lock:
            part.is_over = True
        key = part_key(part.key, self.first_head)
        self._incoming.pop(key, None)
        with self._told:
            self._expected.pop(key, None)

    def open(self, manifest: Manifest) -> None:
        key = manifest.key
        part = self._awaited(key)
        try:
            with part.lock:
                if part.is_over:
                    raise self._unknown(key)
                if part.has_begun:
                    message = f"the reservation of transfer {key.transfer_id:#x} takes one transfer"
                    raise LeaseExpired(message, reason="reservation_used")
                part.has_begun = True
                writer = self._writer(part, manifest)
                self._incoming[key] = _Incoming(part=part, writer=writer, layer_rows=manifest.layer_rows)
        except LeaseExpired as error:
            self._note("refused", error.reason)
            raise
        except KvferryError as error:
            self._note("failed", part.key, error)
            raise
        self._note("began", part.key, manifest)

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        self._run(key, CacheWriter.begin_layer, header)

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        self._run(header.key, CacheWriter.write, header, payload)

    def commit(self, end: EndRecord) -> None:
        """See `BlockSink.commit`. Raises: KvferryError: also what the leading rank says of it."""
        incoming = self._run(end.key, CacheWriter.finish, len(end.draft))
        self._incoming.pop(end.key, None)
        part = incoming.part
        is_plain = all([cache.format.is_plain for cache in part.caches])
        arrived = PartArrived(
            layer_rows=incoming.layer_rows,
            prompt_bytes=sum([cache.used_bytes(0) for cache in part.caches]),
            positions=tuple([cache.positions for cache in part.caches]) if is_plain else (),
        )
        self._note("arrived", part.key, arrived, end.draft, end.first_token)

    def abort(self, key: TransferKey, reason: str) -> None:
        if (incoming := self._incoming.pop(key, None)) is not None:
            message = f"the transfer of the prompt's KV failed: {reason}"
            self._note("failed", incoming.part.key, TransferFailed(message, reason=reason))

    def late_block(self) -> None:
        """Note that a block without a current reservation has arrived. Any thread may call this."""
        self._note("late_block")

    def _run(
        self, key: TransferKey, what: Callable[..., tuple[LayerCache, ...] | None], *args: object
    ) -> _Incoming:
        """Call a method of an open transfer's writer, under its part's lock. An error is noted, and ends it.

        Raises: LeaseExpired: the transfer or its reservation has ended.
        """
        incoming = self._incoming.get(key)
        try:
            if incoming is None:
                raise self._ended(key)
            part = incoming.part
            with part.lock:
                if part.is_over:
                    raise self._ended(key)
                if caches := what(incoming.writer, *args):
                    part.caches, part.pinned = caches, None
        except LeaseExpired:
            self.late_block()
            raise
        except KvferryError as error:
            self._incoming.pop(key, None)
            self._note("failed", part.key, error)
            raise
        return incoming

    def _writer(self, part: SequencePart, manifest: Manifest) -> CacheWriter:
        """Make a part's writer. Raises: ProtocolMismatch: the manifest is not of the reserved transfer."""
        expected, pinned = part.expected, part.pinned
        assert expected is not None, "copies of a shared prompt are not awaited"
        check_transfer(manifest, expected.resolved, None if pinned is None else pinned.chain, self.spec)
        plan = measured_plan(manifest, expected.resolved)
        if plan is not expected.resolved:  # the reserved bytes suffice for any division
            with_room = replace(plan, max_new_tokens=expected.room)
            stores = expected.returns_generated
            part.layout = sequence_layout(make_formats(self.spec, with_room, returns_generated=stores))
            assert part.layout.size_bytes <= len(part.buffer), (part.layout.size_bytes, len(part.buffer))
        if pinned is not None and manifest.retained_transfer_id:
            part.pinned = pinned.first(manifest.retained_depth, manifest.retained_tokens)
        else:
            part.pinned = None
        most = num_draft_tokens(expected.resolved)
        return CacheWriter(part.layout, part.buffer, self._copier, pinned=part.pinned, most_drafted=most)

    def _awaited(self, key: TransferKey) -> SequencePart:
        """Return the part with this key; wait if this rank may still be told of it.

        Raises: LeaseExpired: there is none.
        """
        part = self._expected.get(key)
        if part is not None:
            return part
        reservation = part_key(key, -self.first_head)
        deadline_s = time.monotonic() + _EXPECT_TIMEOUT_S
        while part is None and time.monotonic() < deadline_s and self._is_awaited(reservation):
            with self._told:
                part = self._told.wait_for(lambda: self._expected.get(key), _ASK_INTERVAL_S)
        if part is None:
            error = self._unknown(key)
            self._note("failed", reservation, error)
            raise error
        return part

    def _is_awaited(self, key: TransferKey) -> bool:
        with suppress(TimeoutError):
            return self._ask(key, timeout_s=_ANSWER_TIMEOUT_S)
        return False

    def _unknown(self, key: TransferKey) -> LeaseExpired:
        return LeaseExpired(
            f"no reservation for transfer {key.transfer_id:#x}, generation {key.generation} exists",
            reason="unknown_transfer",
        )

    def _ended(self, key: TransferKey) -> LeaseExpired:
        reservation = f"transfer {key.transfer_id:#x}, generation {key.generation}"
        return LeaseExpired(f"the reservation of {reservation} has ended", reason="reservation_ended")


def check_transfer(
    manifest: Manifest, resolved: ResolvedPlan, chain: RetainedChain | None, spec: ModelSpec
) -> None:
    """Check a manifest against the plan and the retained rows of its reservation.

    Args: spec: of the heads that are received.
    Raises: ProtocolMismatch: the manifest is not of the transfer that was reserved for.
    """
    expected: dict[str, Any] = {
        "purpose": "cache",
        **model_fields(spec),
        "start": 0,
        "num_tokens": resolved.num_prompt_tokens,
        "plan_digest": plan_digest(resolved),
    }
    if not is_measured(resolved):
        expected["layer_rows"] = ()
    if manifest.retained_transfer_id:
        transfer_id, num_tokens, depth = (
            (chain.transfer_id, chain.num_tokens, chain.depth) if chain is not None else (0, 0, 0)
        )
        expected["retained_transfer_id"] = transfer_id
        expected["retained_tokens"] = min(manifest.retained_tokens, num_tokens)
        expected["retained_depth"] = max(1, min(manifest.retained_depth, depth))
    check_manifest(manifest, expected)


def measured_plan(manifest: Manifest, resolved: ResolvedPlan) -> ResolvedPlan:
    """Return the plan, with the rows that prefill measured if the plan measures them.

    Raises: ProtocolMismatch: those rows do not belong to the plan.
    """
    if not is_measured(resolved):
        return resolved
    try:
        return with_layer_rows(resolved, manifest.layer_rows)
    except ValueError as error:
        message = f"the manifest's layer_rows: {error}"
        raise ProtocolMismatch(message, reason="manifest_layer_rows") from error
