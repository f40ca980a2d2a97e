"""The worker's live sequences, found by transfer key; and the sweep that ends those whose lease ran out."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from kvferry.services.decode.retained import RetainedSelections
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.cache.arena import ByteArena
from kvferry.shared.errors import KvferryError, LeaseExpired
from kvferry.shared.wire.messages import TransferKey

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
