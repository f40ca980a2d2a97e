"""One request on its way through the prefill engine: what asyncio and the engine thread share of it."""

from __future__ import annotations

from concurrent.futures import Future

from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import FirstToken, HistoryWay, PrefillRequest
from kvferry.shared.errors import KvferryError
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry import begin, current_context
from kvferry.shared.wire.held_rows import HeldSelections
from kvferry.shared.wire.interfaces import OutgoingTransfer
from kvferry.shared.wire.messages import TransferKey


class PrefillJob:
    """A request, its transfer and its staged turn.

        WAITING ──engine──► RUNNING ──► SHIPPED ──acknowledged──► DONE
           │                  │            │
           └──────────────────┴── cancel ──┴──► transfer aborted, staged turn dropped

    The engine thread attaches transfer and turn while RUNNING, and resolves `first` at its end. `cancel` may
    come from any thread at any time: what is attached by then it ends itself; what is attached later the
    engine ends, because it looks at the flag after attaching and before each layer.
    """

    def __init__(
        self,
        *,
        request: PrefillRequest,
        resolved: ResolvedPlan,
        sampler: SequenceSampler,
        submitted_s: float,
    ) -> None:
        self.request = request
        self.resolved = resolved
        self.sampler = sampler
        self.submitted_s = submitted_s
        self.trace_context = current_context()
        self.queue_span = begin("queue")
        self.first: Future[FirstToken] = Future()
        self.transfer: OutgoingTransfer | None = None
        self.turn: StagedTurn | None = None
        self.history_way: HistoryWay | None = None
        """How it comes by what was there before it; None where there was nothing."""
        self.held: HeldSelections | None = None
        """Rows that decode holds and so are not shipped; set before the transfer opens."""
        self.saved_bytes = 0
        """Of those rows."""
        self._cancellation: KvferryError | None = None

    @property
    def owner(self) -> str:
        """Whose share of the engine it uses."""
        return self.request.session.owner if self.request.session is not None else ""

    @property
    def key(self) -> TransferKey:
        """Its ticket's key, which a return of generated KV bears as well."""
        ticket = self.request.ticket
        return TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation)

    def check_cancelled(self) -> None:
        """Raises what `cancel` was called with, once it was."""
        if self._cancellation is not None:
            raise self._cancellation

    def cause(self, error: KvferryError) -> KvferryError:
        """Why the work ended: the cancellation if there was one, for `error` is then its consequence."""
        return self._cancellation or error

    def cancel(self, error: KvferryError) -> None:
        """Stop the work at any stage, with this error, and free what it holds. Idempotent."""
        if self._cancellation is None:
            self._cancellation = error
        self.abandon(error.reason)

    def abandon(self, reason: str) -> None:
        """End transfer and staged turn, as far as they are attached. Idempotent."""
        transfer, turn = self.transfer, self.turn
        if transfer is not None:
            transfer.abort(reason)
        if turn is not None:
            turn.abort()

    def fail(self, error: KvferryError) -> None:
        """The engine gives up: free everything, then tell who waits."""
        self.abandon(error.reason)
        self.first.set_exception(error)
