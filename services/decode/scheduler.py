"""Admission by bytes: grants arena memory to requests in order, with a queue and a time limit.

Place in the request's path: its first stage in this worker. `Reservations` finds a request's sequence by its
transfer key, and `LeaseSweeper` ends those whose transfer is late. `sequence.py` defines who uses the bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from kvferry.services.decode.retained import RetainedSelections
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.cache.arena import Allocation, ByteArena
from kvferry.shared.errors import CapacityExceeded, KvferryError, LeaseExpired
from kvferry.shared.wire.messages import TransferKey

_MIN_RETRY_AFTER_S = 1.0


@dataclass(eq=False, kw_only=True)
class _Waiter:
    size_bytes: int
    owner: str
    lease_s: float
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    allocation: Allocation | None = None


class Scheduler:
    """Strictly first in, first out: a large request at the head is not overtaken by small ones.

        reserve ──► granted at once ──────────────────────────────────► Allocation
           └──────► waits in the queue ──bytes freed, it is the head──► Allocation
                        └── admission_wait_s over, or cancelled ──► leaves the queue without an allocation

    `release` may be called from any thread; `reserve` from any event loop.

    Args:
        evict: frees some retained KV for a request of this many bytes, without calling the scheduler; returns
            False if that cannot help.
    """

    def __init__(
        self,
        arena: ByteArena,
        *,
        max_waiting: int,
        admission_wait_s: float,
        lease_s: float,
        evict: Callable[[int], bool] = lambda wanted_bytes: False,
    ) -> None:
        self._arena = arena
        self._evict = evict
        self._max_waiting = max_waiting
        self._admission_wait_s = admission_wait_s
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._line: deque[_Waiter] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    async def reserve(self, size_bytes: int, *, owner: str, timeout_s: float) -> Allocation:
        """Allocate arena bytes, waiting until enough are free.

        Raises:
            InvalidRequest: the size is larger than the whole arena.
            CapacityExceeded: not enough bytes were free within admission_wait_s or timeout_s (`arena_full`),
                or the queue is full (`queue_full`).
        """
        self._arena.check_fits(size_bytes)
        waiter = _Waiter(
            size_bytes=size_bytes,
            owner=owner,
            lease_s=min(self._lease_s, timeout_s),
            loop=asyncio.get_running_loop(),
        )
        wait_s = min(self._admission_wait_s, timeout_s)
        with self._lock:
            self._line.append(waiter)
            self._grant()
            if waiter.allocation is None and (len(self._line) > self._max_waiting or wait_s <= 0):
                self._line.remove(waiter)
                raise self._refusal(size_bytes, waited_s=0.0, queue_full=wait_s > 0)
        if waiter.allocation is not None:
            return waiter.allocation
        try:
            async with asyncio.timeout(wait_s):
                await waiter.granted.wait()
        except TimeoutError:
            if not self._leave(waiter):
                raise self._refusal(size_bytes, waited_s=wait_s) from None
        except asyncio.CancelledError:
            if self._leave(waiter):
                self.release(_granted(waiter))
            raise
        return _granted(waiter)

    def release(self, allocation: Allocation) -> None:
        """Free bytes and grant them to waiting requests. Any thread may call this."""
        with self._lock:
            self._arena.free(allocation)
            self._grant()

    def _grant(self) -> None:
        while self._line:
            waiter = self._line[0]
            try:
                allocation = self._arena.reserve(
                    waiter.size_bytes, owner=waiter.owner, lease_s=waiter.lease_s
                )
            except CapacityExceeded:
                if self._evict(waiter.size_bytes):
                    continue
                return
            self._line.popleft()
            waiter.allocation = allocation  # set first: the waiter may run before this thread continues
            try:
                waiter.loop.call_soon_threadsafe(waiter.granted.set)
            except RuntimeError:  # its loop is closed, so nothing would use the bytes
                self._arena.free(allocation)

    def _leave(self, waiter: _Waiter) -> bool:
        """Leave the queue. Returns whether the bytes were granted in the meantime."""
        with self._lock:
            if waiter.allocation is not None:
                return True
            self._line.remove(waiter)
            self._grant()
            return False

    def _refusal(self, size_bytes: int, *, waited_s: float, queue_full: bool = False) -> CapacityExceeded:
        retry_after_s = max(_MIN_RETRY_AFTER_S, self._admission_wait_s)
        if queue_full:
            return CapacityExceeded(
                f"{self._max_waiting} requests wait for decode memory already, which is the limit",
                reason="queue_full",
                retry_after_s=retry_after_s,
            )
        return CapacityExceeded(
            f"the request needs {size_bytes} bytes of decode memory; they did not become free within "
            f"{waited_s:.1f} s ({self._arena.free_bytes} of {self._arena.size_bytes} are free)",
            reason="arena_full",
            retry_after_s=retry_after_s,
        )


def _granted(waiter: _Waiter) -> Allocation:
    assert waiter.allocation is not None
    return waiter.allocation


_log = structlog.get_logger(__name__)
_AWAITING_BLOCKS = (SequenceState.RESERVED, SequenceState.IN_TRANSFER)
_CLOSE_TIMEOUT_S = 10.0


class Reservations:
    """All sequences from admission until they close, by transfer id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sequences: dict[int, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        with self._lock:
            self._sequences[sequence.key.transfer_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        with self._lock:
            self._sequences.pop(sequence.key.transfer_id, None)

    def find(self, key: TransferKey) -> Sequence:
        """The sequence with this key.

        Raises:
            LeaseExpired: there is none, or it has another generation.
        """
        with self._lock:
            sequence = self._sequences.get(key.transfer_id)
        if sequence is None or sequence.key != key:
            raise LeaseExpired(
                f"no reservation of transfer {key.transfer_id:#x}, generation {key.generation} is held here",
                reason="unknown_transfer",
            )
        return sequence

    def all(self) -> tuple[Sequence, ...]:
        with self._lock:
            return tuple(self._sequences.values())


class LeaseSweeper:
    """Closes sequences whose transfer is not complete when their lease ends, on its own thread.

    It does not depend on the event loop or the engine, so memory is released even if those are stuck. It also
    drops retained KV whose lease has ended, and checks the arena's integrity whenever there is no sequence.
    """

    def __init__(
        self,
        reservations: Reservations,
        arena: ByteArena,
        *,
        interval_s: float,
        clock: Callable[[], float],
        on_expired: Callable[[], None],
        retained: RetainedSelections,
    ) -> None:
        self._retained = retained
        self._reservations = reservations
        self._arena = arena
        self._interval_s = interval_s
        self._clock = clock
        self._on_expired = on_expired
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-lease-sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def sweep(self) -> None:
        """Check all leases once."""
        self._retained.expire()
        sequences = self._reservations.all()
        for sequence in sequences:
            if self._clock() >= sequence.allocation.lease_until_s:
                self._expire(sequence)
        if not sequences:
            self._arena.check_integrity()

    def _expire(self, sequence: Sequence) -> None:
        with sequence.lock:
            if sequence.state not in _AWAITING_BLOCKS:
                return
            state = sequence.state.value
            error = LeaseExpired(
                f"request {sequence.request.request_id} was still {state} when its lease ended: the prompt's "
                "KV did not arrive in time",
                reason="lease_expired",
            )
            self._on_expired()
            sequence.close(error)
        _log.warning("lease expired", request_id=sequence.request.request_id, state=state)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.sweep()
            except KvferryError as error:
                _log.error("sweep failed", error=error.message)
            except Exception:
                _log.exception("sweep failed")
