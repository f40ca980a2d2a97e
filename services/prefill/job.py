"""One request in the prefill engine, shared by the event loop and the engine's thread, and the queue of
waiting requests."""

from __future__ import annotations

from collections import OrderedDict, deque
from concurrent.futures import Future

from kvferry.shared.cache.delta import RetainedChain
from kvferry.shared.compression.formats.interface import LayerFormat
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import FirstToken, HistoryWay, PrefillRequest
from kvferry.shared.errors import KvferryError
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry import begin, current_context
from kvferry.shared.wire.messages import TransferKey
from kvferry.shared.wire.transfer import OutgoingTransfer


class PrefillJob:
    """A request, its transfer and its staged turn.

        WAITING ──engine──► RUNNING ──► SHIPPED ──acknowledged──► DONE
           │                  │            │
           └──────────────────┴── cancel ──┴──► transfer aborted, staged turn dropped

    The engine's thread attaches the transfer and the turn while RUNNING, and resolves `first` at the end.
    `cancel` may be called from any thread at any time. It ends what is attached at that time. The engine
    checks for cancellation after attaching something and before each layer, and then ends that too.

    Attributes:
        history_way: how the turn got its history; None if there was none.
        retained: rows that decode retains and that need not be shipped; set before the transfer opens.
        saved_bytes: size of the rows that were not shipped for this reason.
    """

    def __init__(
        self,
        *,
        request: PrefillRequest,
        resolved: ResolvedPlan,
        formats: tuple[LayerFormat, ...],
        sampler: SequenceSampler,
        submitted_s: float,
    ) -> None:
        self.request = request
        self.resolved = resolved
        self.formats = formats
        self.sampler = sampler
        self.submitted_s = submitted_s
        self.owner = request.session.owner if request.session is not None else ""
        # Decode returns the generated KV under the same key.
        self.key = TransferKey(transfer_id=request.ticket.transfer_id, generation=request.ticket.generation)
        self.trace_context = current_context()
        self.queue_span = begin("queue")
        self.first: Future[FirstToken] = Future()
        self.transfer: OutgoingTransfer | None = None
        self.turn: StagedTurn | None = None
        self.history_way: HistoryWay | None = None
        self.retained: RetainedChain | None = None
        self.saved_bytes = 0
        self._cancellation: KvferryError | None = None

    def check_cancelled(self) -> None:
        """Raises the error that `cancel` was called with, if it was called."""
        if self._cancellation is not None:
            raise self._cancellation

    def cause(self, error: KvferryError) -> KvferryError:
        """Why the work ended: the cancellation if there was one, because it caused `error`."""
        return self._cancellation or error

    def cancel(self, error: KvferryError) -> None:
        """Stop the work at any stage with this error and free its resources. Idempotent."""
        if self._cancellation is None:
            self._cancellation = error
        self.abandon(error.reason)

    def abandon(self, reason: str) -> None:
        """End the transfer and the staged turn, if they are attached. Idempotent."""
        transfer, turn = self.transfer, self.turn
        if transfer is not None:
            transfer.abort(reason)
        if turn is not None:
            turn.abort()

    def fail(self, error: KvferryError) -> None:
        """Free everything, then pass the error to the waiting request."""
        self.abandon(error.reason)
        self.first.set_exception(error)


class JobQueue:
    """Waiting jobs: round-robin over owners, first come first served within one. Not thread-safe."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[PrefillJob]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def push(self, job: PrefillJob) -> None:
        self._by_owner.setdefault(job.owner, deque()).append(job)

    def pop(self) -> PrefillJob:
        """Remove the next job; its owner goes to the end of the round. Raises IndexError if empty."""
        if not self._by_owner:
            raise IndexError("pop from an empty JobQueue")
        owner, jobs = self._by_owner.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._by_owner[owner] = jobs
        return job

    def remove(self, job: PrefillJob) -> bool:
        """Remove a waiting job. Returns False if it is not waiting."""
        jobs = self._by_owner.get(job.owner)
        if jobs is None or job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._by_owner[job.owner]
        return True
