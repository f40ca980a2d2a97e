"""The other ranks of a prefill worker, as its leading rank sees them: each ships the blocks of its own heads.

    leading rank   opens a transfer, in every rank ──► passes ──► waits for all acknowledgements
    the others     `rank.py`: each layer's heads are compressed and sent there

Of what they ship the leading rank learns the numbers alone: which layers have been sent, the positions of
rows for the session's next turn, bytes and seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.parts import PartedTransfer
from kvferry.services.prefill.rank_messages import (
    Abort,
    Connected,
    Forget,
    LayerSent,
    PartAcknowledged,
    PartFailed,
    Ship,
    Start,
)
from kvferry.shared.cache.delta import RetainedChain, ShippedRows
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import (
    Cancelled,
    ConfigurationError,
    KvferryError,
    TransferFailed,
    WorkerUnavailable,
)
from kvferry.shared.model.parallel.model import ParallelModel
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor, TransferKey
from kvferry.shared.wire.sender import BlockSender

PREFILL_RANK = "kvferry.services.prefill.rank:PrefillRank"
"""The class of the other ranks, for `load_parallel_model`."""
_START_TIMEOUT_S = 120.0


class PrefillRanks:
    """Tells the other ranks. Any thread may call its methods.

    Attributes: num_ranks: with this one; spec: of one rank's heads.

    Args: model: whose followers are `PREFILL_RANK`s.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.num_ranks = model.num_ranks
        self.spec = model.part_spec
        self._lead = model.lead
        self._transfers: dict[TransferKey, RankedTransfer] = {}

    def start(self, settings: PrefillConfig, on_connected: Callable[[str], None]) -> None:
        """Have the others make their block senders; waits until they have.

        Args: on_connected: as of `BlockTransport.sender`.
        Raises: ConfigurationError: one cannot.
        """

        def on_note(rank: int, note: object) -> None:
            if isinstance(note, Connected):
                on_connected(note.transport)
            elif isinstance(note, LayerSent | PartAcknowledged | PartFailed):
                if (transfer := self._transfers.get(note.key)) is not None:
                    transfer.noted(rank, note)
            elif note is None:
                error = WorkerUnavailable(f"rank {rank} of the prefill worker has ended", reason="rank_lost")
                for transfer in tuple(self._transfers.values()):
                    transfer.fail(error)

        self._lead.on_note = on_note
        self._lead.command(Start(settings=settings))
        for rank, answer in enumerate(self._lead.answers(timeout_s=_START_TIMEOUT_S), 1):
            if isinstance(answer, KvferryError):
                raise ConfigurationError(f"rank {rank} of {self.num_ranks}: {answer.message}")

    def open(
        self,
        sender: BlockSender,
        ticket: Ticket,
        manifest: Manifest,
        plan: ResolvedPlan,
        *,
        retained: RetainedChain | None,
        num_bins: int,
        with_positions: bool,
        timeout_s: float,
        deadline_s: float,
    ) -> RankedTransfer:
        """Open a prompt's transfer in every rank.

        Args:
            manifest: of all heads; others as of `Ship`, of all heads.
            timeout_s: as of `BlockSender.open`.
            deadline_s: by which it is over, monotonic seconds.

        Raises: TransferFailed, ProtocolMismatch: as `PartedTransfer`; WorkerUnavailable: a rank is lost.
        """
        size = self.spec.num_kv_heads
        own_formats = make_formats(self.spec, plan)
        own = PartedTransfer(
            sender, ticket, manifest, own_formats, timeout_s=timeout_s, num_ranks=self.num_ranks
        )
        chains = [_of_heads(retained, rank * size, size) for rank in range(self.num_ranks)]
        transfer = RankedTransfer(self, own, manifest.key, plan, chains[0], deadline_s=deadline_s)
        self._transfers[manifest.key] = transfer
        try:
            self._lead.commands(
                [
                    Ship(
                        ticket=ticket,
                        manifest=manifest,
                        plan=plan,
                        retained=chain,
                        num_bins=num_bins,
                        with_positions=with_positions,
                        timeout_s=max(0.0, deadline_s - time.monotonic()),
                    )
                    for chain in chains[1:]
                ]
            )
        except WorkerUnavailable:
            transfer.abort("rank_lost")
            raise
        return transfer

    def abort(self, key: TransferKey, reason: str) -> None:
        self._lead.aside(Abort(key=key, reason=reason))

    def forget(self, key: TransferKey) -> None:
        if self._transfers.pop(key, None) is not None:
            with suppress(WorkerUnavailable):  # nothing is left of a lost rank
                self._lead.command(Forget(key=key))


class RankedTransfer:
    """A prompt's transfer of which each rank ships its heads, this one the first ones. Has what prefill uses
    of an `OutgoingTransfer`; see there. If one rank's fails, all do.

    Attributes:
        plan: by which the ranks compress.
        formats: of the layers, of this rank's heads.
        retained: rows that decode retains, of this rank's heads.
    """

    def __init__(
        self,
        ranks: PrefillRanks,
        own: PartedTransfer,
        key: TransferKey,
        plan: ResolvedPlan,
        retained: RetainedChain | None,
        *,
        deadline_s: float,
    ) -> None:
        self.key = key
        self.plan = plan
        self.formats = make_formats(ranks.spec, plan)
        self.retained = retained
        self._ranks = ranks
        self._own = own
        self._deadline_s = deadline_s
        self._condition = threading.Condition()
        self._error: KvferryError | None = None
        self._sent = dict.fromkeys(range(1, ranks.num_ranks), -1)
        self._rows: dict[int, ShippedRows] = {}
        self._acknowledged: dict[int, PartAcknowledged] = {}

    def send_layer(self, layer: int, tensors: Sequence[NamedTensor]) -> None:
        """See `OutgoingTransfer.send_layer`. Returns when all ranks have given the layer to their senders, so
        that the prompt's pass waits for the slowest of them here. Args: tensors: of this rank's heads."""
        try:
            self._own.send_layer(layer, tensors)
        except KvferryError as error:
            raise self.fail(error) from error
        self._await(
            lambda: min(self._sent.values()) >= layer, self._deadline_s, f"layer {layer} was not sent"
        )

    def add_rows(self, rows: ShippedRows) -> None:
        """Add what the others have shipped, once all layers are sent. Args: rows: of this rank's heads."""
        for rank in sorted(self._sent):
            rows.add_heads(self._rows[rank])

    def finish(self, end: EndRecord) -> None:
        """See `OutgoingTransfer.finish`. The others have finished theirs."""
        try:
            self._own.finish(end)
        except KvferryError as error:
            raise self.fail(error) from error

    def wait(self, timeout_s: float) -> float:
        """See `OutgoingTransfer.wait`: the seconds of the rank that took longest."""
        deadline_s = time.monotonic() + timeout_s
        try:
            own_s = self._own.wait(timeout_s)
        except KvferryError as error:
            raise self.fail(error) from error
        self._await(lambda: len(self._acknowledged) == len(self._sent), deadline_s, "it was not acknowledged")
        self._ranks.forget(self.key)
        return max(own_s, *(its.transfer_s for its in self._acknowledged.values()))

    def abort(self, reason: str) -> None:
        """See `OutgoingTransfer.abort`."""
        self.fail(Cancelled(f"transfer was aborted: {reason}", reason="aborted"), reason=reason)

    def redirect(self, ticket: Ticket) -> None:
        """Raises: TransferFailed ("resend"): what several ranks ship is not sent again."""
        raise TransferFailed(
            f"a transfer of {self._ranks.num_ranks} ranks ({self.key}) cannot be sent to another worker",
            reason="resend",
        )

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """See `OutgoingTransfer.bytes_by_kind`: of all ranks, once it is acknowledged."""
        total = self._own.bytes_by_kind
        for its in self._acknowledged.values():
            for kind, size_bytes in its.bytes_by_kind.items():
                total[kind] = total.get(kind, 0) + size_bytes
        return total

    @property
    def resent_bytes(self) -> int:
        others = sum(its.resent_bytes for its in self._acknowledged.values())
        return self._own.resent_bytes + others

    # ---- what the other ranks say ------------------------------------------------------------------------

    def noted(self, rank: int, note: LayerSent | PartAcknowledged | PartFailed) -> None:
        if isinstance(note, PartFailed):
            error = note.error
            self.fail(type(error)(f"rank {rank}: {error.message}", reason=error.reason))
            return
        with self._condition:
            if isinstance(note, PartAcknowledged):
                self._acknowledged[rank] = note
            else:
                if note.rows is not None:
                    self._rows[rank] = note.rows
                self._sent[rank] = note.layer
            self._condition.notify_all()

    def fail(self, error: KvferryError, *, reason: str = "") -> KvferryError:
        """End the transfer in all ranks. Idempotent. Returns: why it failed first."""
        with self._condition:
            if self._error is not None:
                return self._error
            self._error = error
            self._condition.notify_all()
        self._own.abort(reason or error.reason)
        self._ranks.abort(self.key, reason or error.reason)
        self._ranks.forget(self.key)
        return error

    def _await(self, is_so: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Raises: why the transfer failed; TransferFailed ("timeout"): it is not so by then."""
        with self._condition:
            left_s = max(0.0, deadline_s - time.monotonic())
            in_time = self._condition.wait_for(lambda: self._error is not None or is_so(), left_s)
            if self._error is not None:
                raise self._error
        if not in_time:
            raise self.fail(TransferFailed(f"{what} by another rank within {left_s:.1f} s", reason="timeout"))


def _of_heads(chain: RetainedChain | None, first: int, number: int) -> RetainedChain | None:
    if chain is None:
        return None
    return replace(chain, selections=tuple(its.of_heads(first, number) for its in chain.selections))
