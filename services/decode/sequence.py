"""State of one request in the decode worker: its reservation, its KV cache and its completion so far.

Created at admission, filled by the receiver, run by the engine, and closed after the history return or when
the request ends, fails or is cancelled earlier.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
import torch
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span

from kvferry.services.decode.events import EventStream
from kvferry.services.decode.parts import Parts, checked_first_token
from kvferry.services.decode.receiver import PartArrived, SequencePart, measured_plan
from kvferry.shared.cache.arena import Allocation, ByteArena
from kvferry.shared.cache.delta import Positions, RetainedChain
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import FinishReason, GenerateRequest, TransferAccepted
from kvferry.shared.device.step_device import written_so_far
from kvferry.shared.errors import KvferryError, LeaseExpired
from kvferry.shared.model.ending import Ending
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry.metrics import DecodeMetrics
from kvferry.shared.telemetry.tracing import begin, context_of, current_context
from kvferry.shared.wire.messages import Manifest, TransferKey
from kvferry.shared.wire.outgoing import OutgoingTransfer

_log = structlog.get_logger(__name__)


class SequenceState(enum.Enum):
    RESERVED = "reserved"
    IN_TRANSFER = "in_transfer"
    READY = "ready"
    RUNNING = "running"
    RETURNING = "returning"
    CLOSED = "closed"


_ARRIVING = (SequenceState.RESERVED, SequenceState.IN_TRANSFER)


class Pinned(NamedTuple):
    """A session's retained rows, of all heads, that a transfer may leave out; `unpin` is called once."""

    chain: RetainedChain
    unpin: Callable[[], None]


@dataclass(eq=False, kw_only=True)
class Sequence:
    """State of one request. `lock` guards `state`, the arena bytes and `outgoing`.

        RESERVED ─manifest─► IN_TRANSFER ─commit─► READY ─joins─► RUNNING ─last token─► RETURNING ─┐
            │                     │                  │               │                      │      │
            └─────────────────────┴───── failed, cancelled, lease ───┴──────────────────────┴──► CLOSED

    Who may access the arena bytes and close the sequence:
        RESERVED, IN_TRANSFER   any thread that holds `lock` (receiver, sweeper, the request's own task)
        READY, RUNNING          the engine's thread; others set `cancelled` and wake it
        RETURNING               any thread that holds `lock`, until the history return has copied the rows
                                and released the bytes or handed them over; after that, its thread closes

    Attributes:
        part: rank 0's heads.
        room: new tokens for which the layout has room; `memory.py` adds more.
        router: whose request it is; its status calls move the lease.
        lease_until_s: when it is closed unless its transfer is complete by then.
        ending: finds the token that completes it.
        release: frees the allocation; called at most once, under `lock`, and not after `hand_over_bytes`.
        forget: removes the sequence from the worker's tables; called exactly once, at closing.
        cut_off: whether the completion must end with the tokens it has.
        arrival: grows from sequence to sequence in the order in which the engine received them.
        pinned: the session's retained rows, until the transfer has arrived.
        positions: the tokens of each layer's rows; empty if the rows cannot be reused by the next turn.
        arrived: the parts of which all blocks are there, by rank.
        metrics, lengths: where its tokens and bytes, and its answer's length are counted.
        first_token: came with the last of rank 0's; its transfer began at `began_s`.
        draft: the tokens before it, whose rows came with the prompt's.
        num_without_retained: ranks whose transfer has begun and leaves out no retained rows.
        written: mark behind the last write of `caches` but for steps' (`written_so_far`); None on a CPU.
        is_in_arena: whether it has arena bytes: not if it is swapped to the host or has released them.
        span: the current stage; `enter_stage` ends it and begins the next.
    """

    request: GenerateRequest
    resolved: ResolvedPlan
    part: SequencePart
    room: int
    key: TransferKey
    allocation: Allocation
    router: str
    lease_until_s: float
    events: EventStream
    sampler: SequenceSampler
    ending: Ending
    release: Callable[[Allocation], None]
    forget: Callable[[Sequence], None]
    metrics: DecodeMetrics
    lengths: deque[int]
    lock: threading.RLock = field(default_factory=threading.RLock)
    state: SequenceState = SequenceState.RESERVED
    cancelled: bool = False
    cut_off: bool = False
    arrival: int = 0
    manifest: Manifest | None = None
    outgoing: OutgoingTransfer | None = None
    pinned: Pinned | None = None
    positions: tuple[Positions | None, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    num_appended: int = 0
    arrived: dict[int, PartArrived] = field(default_factory=dict)
    first_token: SampledToken | None = None
    draft: tuple[int, ...] = ()
    began_s: float = 0.0
    num_without_retained: int = 0
    committed_s: float | None = None
    written: torch.cuda.Event | None = None
    is_in_arena: bool = True
    trace_context: Context = field(default_factory=current_context)
    span: Span = INVALID_SPAN

    def __post_init__(self) -> None:
        self.name = self.key.transfer_id
        """By which the ranks know it."""
        self.plan = self.resolved
        """`resolved` with the rows per layer that prefill measured, if it measures them."""

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Rank 0's layers, once they have arrived."""
        return self.part.caches

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion so far."""
        return len(self.token_ids)

    @property
    def position(self) -> int:
        """Position of the token to run next, which is the last one sampled."""
        return self.resolved.num_prompt_tokens + self.num_tokens - 1

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.resolved.max_new_tokens - self.num_tokens

    def take(self, token_id: int) -> FinishReason | None:
        """Add a token to the completion. Returns why the completion ends with it, or None."""
        self.token_ids.append(token_id)
        if self.ending.stops(token_id):
            return "stop"
        return "length" if self.num_left <= 0 else None

    def enter_stage(self, name: str) -> None:
        """End the current stage's span and begin one with this name; "" begins none."""
        self.span.end()
        self.span = begin(name, self.trace_context) if name else INVALID_SPAN

    def lacks_room(self, num_steps: int) -> bool:
        """Return whether the next `num_steps` steps' rows do not fit; the last new token never gets one."""
        num_rows = min(self.num_appended + num_steps, self.resolved.max_new_tokens - 1)
        return num_rows > self.room - 1

    def release_bytes(self) -> None:
        """Release the arena bytes. Idempotent."""
        with self.lock:
            if self.is_in_arena:
                self.is_in_arena = False
                self.release(self.allocation)

    def hand_over_bytes(self) -> Allocation:
        """Transfer the arena bytes to the caller, which must free them. Call once, under `lock`."""
        assert self.is_in_arena, self.state
        self.is_in_arena = False
        return self.allocation

    def release_retained(self) -> None:
        """Unpin the session's retained rows. Idempotent."""
        with self.lock:
            pinned, self.pinned = self.pinned, None
        if pinned is not None:
            pinned.unpin()

    def close(self, error: KvferryError | None = None) -> bool:
        """End the sequence: release its bytes and pins, remove it from the tables, pass on the error if any.

        Returns: False if it was closed already.
        """
        with self.lock:
            if self.state is SequenceState.CLOSED:
                return False
            self.state = SequenceState.CLOSED
            self.enter_stage("")
            self.release_retained()
            self.forget(self)  # before its bytes are released, to which no rank then writes any more
            self.release_bytes()
        if error is not None:
            self.events.put(error)
        return True

    def cancel(self) -> None:
        """Cancel the request, because its reader has gone.

        Closes the sequence now if that is safe. Otherwise the engine closes it when it sees `cancelled`, or
        the history return after its transfer is aborted.
        """
        with self.lock:
            self.cancelled = True
            if self.state in _ARRIVING:
                self.close()
            elif self.state is SequenceState.RETURNING:
                if self.is_in_arena:
                    self.close()
                elif self.outgoing is not None:
                    self.outgoing.abort("the request was cancelled")


class Reservations:
    """All sequences from admission until they close, by transfer id, and how their parts arrive. Thread-safe.

    A sequence begins once every rank has its part, and ends with the first that fails, so that the request
    fails without waiting for the lease. `began` to `late_block` note how a rank's part fares: those of one
    rank come in order, and any thread may bring them.

    Args:
        share: is given the sequences whose prompt siblings share.
        submit: passes a complete sequence to the engine.
    """

    def __init__(
        self,
        parts: Parts,
        arena: ByteArena,
        metrics: DecodeMetrics,
        *,
        share: Callable[[Sequence], None],
        clock: Callable[[], float],
        submit: Callable[[Sequence], None],
    ) -> None:
        self._parts = parts
        self._arena = arena
        self._metrics = metrics
        self._share = share
        self._clock = clock
        self._submit = submit
        self._lock = threading.Lock()
        self._sequences: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        with self._lock:
            self._sequences[sequence.name] = sequence

    def remove(self, sequence: Sequence) -> None:
        with self._lock:
            self._sequences.pop(sequence.name, None)
        self._parts.drop_sequence(sequence.name)

    def find(self, key: TransferKey) -> Sequence:
        """Find the sequence with this key. Raises: LeaseExpired: there is none, or of another generation."""
        with self._lock:
            sequence = self._sequences.get(key.transfer_id)
        if sequence is None or sequence.key != key:
            raise LeaseExpired(
                f"no reservation for transfer {key.transfer_id:#x}, generation {key.generation} exists",
                reason="unknown_transfer",
            )
        return sequence

    def all(self) -> tuple[Sequence, ...]:
        with self._lock:
            return tuple(self._sequences.values())

    def renew(self, router: str, until_s: float) -> None:
        """Extend the leases of a router's requests, because the router is alive."""
        for sequence in self.all():
            if sequence.router == router:
                sequence.lease_until_s = until_s

    def expire(self) -> None:
        """Close the sequences whose transfer is not complete at the end of their lease."""
        now_s = self._clock()
        for sequence in self.all():
            with sequence.lock:
                if now_s < sequence.lease_until_s or sequence.state not in _ARRIVING:
                    continue
                request_id, state = sequence.request.request_id, sequence.state.value
                self._metrics.leases_expired.inc()
                sequence.close(
                    LeaseExpired(
                        f"request {request_id} was still {state} when its lease ended: the prompt's KV did "
                        "not arrive in time",
                        reason="lease_expired",
                    )
                )
            _log.warning("lease expired", request_id=request_id, state=state)

    def awaits(self, key: TransferKey) -> bool:
        """Return whether a reservation with this key waits for blocks."""
        with contextlib.suppress(LeaseExpired):
            return self.find(key).state in _ARRIVING
        return False

    def began(self, rank: int, key: TransferKey, manifest: Manifest) -> None:
        """Note that a rank has accepted the transfer of its part. Args: manifest: of the part."""
        with contextlib.suppress(LeaseExpired):
            sequence = self.find(key)
            with sequence.lock:
                if sequence.state not in _ARRIVING:
                    return
                sequence.num_without_retained += not manifest.retained_transfer_id
                if sequence.num_without_retained == self._parts.num_ranks:
                    sequence.release_retained()
                if rank == 0:
                    sequence.manifest = manifest
                    sequence.plan = measured_plan(manifest, sequence.resolved)
                    sequence.began_s = self._clock()
                    sequence.span = begin("receive", context_of({"traceparent": manifest.traceparent}))
                if sequence.state is SequenceState.RESERVED:
                    self._arena.advance(sequence.allocation, "in_transfer")
                    sequence.state = SequenceState.IN_TRANSFER

    def arrived(
        self,
        rank: int,
        key: TransferKey,
        part: PartArrived,
        draft: tuple[int, ...],
        first_token: SampledToken | None,
    ) -> None:
        """Note that a rank has all blocks of its heads. Args: draft, first_token: of `EndRecord`; the latter
        comes with rank 0's.

        Raises: LeaseExpired: the sequence has ended; KvferryError: why it ends now.
        """
        sequence = self.find(key)
        request = sequence.request
        with sequence.lock:
            if sequence.state not in _ARRIVING:
                message = f"the reservation of transfer {key.transfer_id:#x} has ended"
                raise LeaseExpired(message, reason="reservation_ended")
            try:
                if rank == 0:
                    spec = self._parts.spec
                    sequence.first_token = checked_first_token(first_token, request, spec, draft)
                    sequence.draft = draft
                    sequence.written = written_so_far(self._arena.device)
                sequence.arrived[rank] = part
                if len(sequence.arrived) < self._parts.num_ranks:
                    return
                sequence.positions = self._parts.positions(sequence.arrived)
            except KvferryError as error:
                self._metrics.receive_failed.labels(error.reason).inc()
                sequence.close(error)
                raise
            sequence.release_retained()
            if request.num_siblings:
                self._share(sequence)
            committed_s = self._make_ready(sequence)
        self._begin(sequence, transfer_s=committed_s - sequence.began_s)

    def copied(self, sequence: Sequence, copy: Callable[[], None], first_token: SampledToken) -> None:
        """Begin a sequence with a copy of a shared prompt, as if it had arrived. Args: copy: copies it."""
        with sequence.lock:
            if sequence.state is not SequenceState.RESERVED:
                return
            copy()
            sequence.first_token = first_token
            sequence.written = written_so_far(self._arena.device)
            self._arena.advance(sequence.allocation, "in_transfer")
            self._make_ready(sequence)
        self._begin(sequence, transfer_s=0.0)

    def failed(self, rank: int, key: TransferKey, error: KvferryError) -> None:
        """Note that the transfer of a rank's part has failed, and with it the request."""
        self._metrics.receive_failed.labels(error.reason).inc()
        with contextlib.suppress(LeaseExpired):
            sequence = self.find(key)
            with sequence.lock:
                if sequence.state in _ARRIVING:
                    if self._parts.num_ranks > 1:
                        error = type(error)(f"rank {rank}: {error.message}", reason=error.reason)
                    sequence.close(error)

    def refused(self, rank: int, reason: str) -> None:
        """Count a transfer that a rank has refused and that harms no reservation."""
        self._metrics.receive_failed.labels(reason).inc()

    def late_block(self, rank: int) -> None:
        """Count a block that arrived without a current reservation."""
        self._metrics.late_blocks.inc()

    def _make_ready(self, sequence: Sequence) -> float:
        """Hand a sequence over to the engine's thread; the caller has locked it. Returns the time."""
        self._arena.advance(sequence.allocation, "running")
        sequence.committed_s = committed_s = self._clock()
        sequence.state = SequenceState.READY
        return committed_s

    def _begin(self, sequence: Sequence, *, transfer_s: float) -> None:
        sequence.events.put(TransferAccepted(transfer_s=transfer_s))
        sequence.enter_stage("first step")
        self._submit(sequence)
