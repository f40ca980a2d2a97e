"""Admission in bytes: who gets arena memory, in which order, and for how long they wait for it.

First step of a request's life in this worker. Knows sizes and owners; what is done with the bytes is
`sequence.py`'s matter.
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

        reserve ──► granted at once ──────────────────────────────► Allocation
           └──────► waits in line ──bytes freed, it is the head──► Allocation
                        └── admission_wait_s over, or cancelled ──► out of the line, nothing held

    `release` may be called from any thread; `reserve` from any event loop.

    Args:
        evict: frees something spare towards so many bytes, calling nothing here; False where it has nothing.
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
        """Arena bytes, now or once they are free.

        Raises:
            InvalidRequest: the arena is too small for it even when empty.
            CapacityExceeded: no memory within admission_wait_s or timeout_s (`arena_full`), or the line is
                full (`queue_full`).
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
        """Give bytes back and serve the line."""
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
            waiter.allocation = allocation  # first: its loop may run before this thread goes on
            try:
                waiter.loop.call_soon_threadsafe(waiter.granted.set)
            except RuntimeError:  # its loop is closed: nobody is there to take the bytes
                self._arena.free(allocation)

    def _leave(self, waiter: _Waiter) -> bool:
        """Step out of the line; returns whether the bytes were granted in the meantime."""
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
    """Every sequence from admission to its end. Thread-safe."""

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
        """The sequence that this key names.

        Raises:
            LeaseExpired: there is none, or it is of another generation.
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
    """Ends reservations whose transfer is not complete by their lease, from a thread of its own clock.

    Depends on no event loop and no engine: whatever else is stuck, memory comes back. Also verifies the
    arena's integrity whenever no sequence is live.
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
        """One round."""
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
