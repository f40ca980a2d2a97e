"""A prompt's transfer to decode: one or several parts, from one rank of prefill or from each.

    rank 0        opens a transfer, in every rank ──► passes ──► waits for all acknowledgements
    the others    `rank.py`: each layer's heads are compressed and sent there

A part is blocks of some KV heads, straight to the rank of decode with these heads. Of what other ranks ship,
rank 0 learns the numbers alone: which layers have been sent, the positions of rows for the session's next
turn, bytes and seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvferry.services.prefill.config import PrefillConfig
from kvferry.shared.cache.delta import NEW_ROWS, RetainedChain, ShippedRows, delta_parts
from kvferry.shared.compression.formats import compresses_heads_apart, make_formats
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerFormat
from kvferry.shared.compression.plan import ResolvedPlan, num_draft_tokens
from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import (
    Cancelled,
    ConfigurationError,
    KvferryError,
    TransferFailed,
    WorkerUnavailable,
)
from kvferry.shared.model.interface import Division, LanguageModel
from kvferry.shared.model.parallel.messages import Call
from kvferry.shared.model.parallel.model import ParallelModel
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor, TransferKey
from kvferry.shared.wire.outgoing import OutgoingTransfer
from kvferry.shared.wire.receiver import part_key
from kvferry.shared.wire.sender import BlockSender

PREFILL_RANK = "kvferry.services.prefill.rank:PrefillRank"
"""The class of the other ranks, for `load_parallel_model`."""
_START_TIMEOUT_S = 120.0


class PromptTransfer:
    """The heads of one rank of prefill, or of all. Has what prefill uses of an `OutgoingTransfer`; see there.
    Each part is one, which is acknowledged by its own rank. If one fails, all do.

        prefill        | rank 0    | rank 1    |
        parts, decode  | 0   | 1   | 2   | 3   |

    Attributes: division: how ranks that ship their heads themselves divide the prompt's; None: this one ships
        all.

    Args:
        manifest: of all heads.
        formats: of the layers, of the heads that are shipped here.
        retained: rows that decode retains, of these heads.
        rank, num_ranks: of prefill, where each ships its heads itself; decode has as many or a multiple.
        keeps_failed: as of `BlockSender.open`; of one part.

    Raises: TransferFailed: the heads cannot be divided among so many ranks, or as `BlockSender.open`.
    """

    def __init__(
        self,
        sender: BlockSender,
        ticket: Ticket,
        manifest: Manifest,
        formats: Sequence[LayerFormat],
        *,
        timeout_s: float,
        retained: RetainedChain | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        keeps_failed: bool = False,
    ) -> None:
        endpoints = (ticket.endpoint, *ticket.part_endpoints)
        num_heads, left = divmod(manifest.num_kv_heads, len(endpoints))
        if left:
            raise TransferFailed(
                f"the ticket has endpoints of {len(endpoints)} ranks; the model's {manifest.num_kv_heads} KV "
                "heads must be a multiple of that",
                reason="parts",
            )
        num_own = len(endpoints) // num_ranks
        self.formats = formats
        self.retained = retained
        self.division: Division | None = None
        self._parts: list[OutgoingTransfer] = []
        try:
            for number in range(rank * num_own, (rank + 1) * num_own):
                key = part_key(manifest.key, number * num_heads)
                self._parts.append(
                    sender.open(
                        replace(ticket, endpoint=endpoints[number], transfer_id=key.transfer_id),
                        replace(manifest, key=key, num_kv_heads=num_heads),
                        timeout_s=timeout_s,
                        keeps_failed=keeps_failed and len(endpoints) == 1,
                    )
                )
        except BaseException:
            self._abort_parts("aborted")
            raise

    def send_layer(self, layer: int, tensors: Sequence[NamedTensor]) -> None:
        """See `OutgoingTransfer.send_layer`. Args: tensors: of all its heads, on the host."""
        if len(self._parts) == 1:
            self._parts[0].send_layer(layer, tensors)
            return
        kinds = {its.name: its.kind for its in tensors}
        whole = {its.name: its.tensor for its in tensors}
        fmt, number = self.formats[layer], len(self._parts)
        try:
            divided = delta_parts(fmt, whole, number) if NEW_ROWS in whole else fmt.parts(whole, number)
        except InvalidTensors as error:
            failed = TransferFailed(f"layer {layer}: {error}", reason=error.reason)
            self._abort_parts(error.reason)
            raise failed from error
        for part, of_part in zip(self._parts, divided, strict=True):
            named = [NamedTensor(name=name, tensor=its, kind=kinds[name]) for name, its in of_part.items()]
            part.send_layer(layer, named)

    def finish(self, end: EndRecord) -> None:
        """See `OutgoingTransfer.finish`. The first rank's part has the first token."""
        for part in self._parts:
            part.finish(end)
            end = replace(end, first_token=None)

    def wait(self, timeout_s: float) -> float:
        """See `OutgoingTransfer.wait`: the seconds of the part that took longest."""
        deadline_s = time.monotonic() + timeout_s
        first = self._parts[0]
        first.wait_for(lambda: any(its.has_failed for its in self._parts) or self.is_over, timeout_s)
        try:
            in_order = sorted(self._parts, key=lambda its: not its.is_over)  # those that failed come first
            return max(its.wait(max(0.0, deadline_s - time.monotonic())) for its in in_order)
        except BaseException:
            self._abort_parts("aborted")
            raise

    def abort(self, reason: str) -> None:
        """See `OutgoingTransfer.abort`."""
        self._abort_parts(reason)

    def _abort_parts(self, reason: str) -> None:
        for part in self._parts:
            part.abort(reason)

    def add_rows(self, rows: ShippedRows) -> None:
        """Add what other ranks have shipped, once all layers are sent. Args: rows: of the heads from here."""

    def redirect(self, ticket: Ticket) -> None:
        """See `OutgoingTransfer.redirect`. Several parts are not sent again, nor one in several."""
        if len(self._parts) == 1 and not ticket.part_endpoints:
            self._parts[0].redirect(ticket)
            return
        raise TransferFailed(
            f"a transfer of {len(self._parts)} parts ({self._parts[0].key}) cannot be sent to another worker",
            reason="resend",
        )

    @property
    def is_over(self) -> bool:
        return all(its.is_over for its in self._parts)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """See `OutgoingTransfer.bytes_by_kind`: of all parts."""
        total: dict[str, int] = {}
        for part in self._parts:
            for kind, size_bytes in part.bytes_by_kind.items():
                total[kind] = total.get(kind, 0) + size_bytes
        return total

    @property
    def resent_bytes(self) -> int:
        return sum(its.resent_bytes for its in self._parts)


class PrefillRanks:
    """Any thread may call its methods.

    Args:
        model: a `ParallelModel`'s followers are `PREFILL_RANK`s.
        sender: of this process.
    """

    def __init__(self, model: LanguageModel, sender: BlockSender) -> None:
        self.sender = sender
        self.num_ranks = model.num_ranks
        self._lead = model.lead if isinstance(model, ParallelModel) else None
        self._part_spec = model.part_spec if isinstance(model, ParallelModel) else model.spec
        self._transfers: dict[TransferKey, RankedTransfer] = {}

    def start(self, settings: PrefillConfig, on_connected: Callable[[str], None]) -> None:
        """Have the other ranks make their block senders; waits until they have.

        Args: on_connected: as of `BlockTransport.connecting`.
        Raises: ConfigurationError: one cannot.
        """
        if self._lead is None:
            return

        def on_note(rank: int, note: tuple[Any, ...] | None) -> None:
            if note is None:
                error = WorkerUnavailable(f"rank {rank} of the prefill worker has ended", reason="rank_lost")
                for open_one in tuple(self._transfers.values()):
                    open_one.fail(error)
                return
            name, *args = note
            if name == "connected":
                on_connected(*args)
            elif (transfer := self._transfers.get(args[0])) is not None:
                getattr(transfer, name)(rank, *args[1:])

        self._lead.on_note = on_note
        start = self._lead.ask("start", settings)
        for rank, answer in enumerate(start(timeout_s=_START_TIMEOUT_S), 1):
            if isinstance(answer, KvferryError):
                raise ConfigurationError(f"rank {rank} of {self.num_ranks}: {answer.message}")

    def open(
        self,
        ticket: Ticket,
        manifest: Manifest,
        plan: ResolvedPlan,
        formats: Sequence[LayerFormat],
        *,
        retained: RetainedChain | None,
        num_bins: int,
        with_positions: bool,
        with_rows: bool,
        keeps_failed: bool,
        timeout_s: float,
        left_s: float,
    ) -> PromptTransfer:
        """Open a prompt's transfer in every rank that ships some of it.

        Args:
            manifest: of all heads.
            plan: with the rows that prefill has measured; formats: by it, of all heads.
            retained: rows that decode retains, of all heads.
            num_bins: as of `KeptMap`; 0: none is wanted.
            with_positions: whether the positions of rows are wanted.
            with_rows: as of `Division`.
            keeps_failed, timeout_s: as of `BlockSender.open`.
            left_s: until it is over, at the latest.

        Raises: TransferFailed, ProtocolMismatch: as `PromptTransfer`; WorkerUnavailable: a rank is lost.
        """
        if self._lead is None or not compresses_heads_apart(plan, formats) or num_draft_tokens(plan):
            return PromptTransfer(
                self.sender, ticket, manifest, formats,
                timeout_s=timeout_s, retained=retained, keeps_failed=keeps_failed,
            )  # fmt: skip
        size = self._part_spec.num_kv_heads
        chains = [_of_heads(retained, rank * size, size) for rank in range(self.num_ranks)]
        transfer = RankedTransfer(
            self, ticket, manifest, make_formats(self._part_spec, plan),
            timeout_s=timeout_s, retained=chains[0], deadline_s=time.monotonic() + left_s,
            division=Division(plan=plan, with_rows=with_rows, transfer=manifest.key),
        )  # fmt: skip
        self._transfers[manifest.key] = transfer
        args = [(ticket, manifest, plan, chain, num_bins, with_positions, left_s) for chain in chains[1:]]
        try:
            self._lead.commands([Call(name="ship", args=its) for its in args])
        except WorkerUnavailable:
            transfer.abort("rank_lost")
            raise
        return transfer

    def abort(self, key: TransferKey, reason: str) -> None:
        """Abort the others' parts, also while a pass runs."""
        assert self._lead is not None, "there are other ranks"
        self._lead.aside((key, reason))

    def forget(self, key: TransferKey) -> None:
        """Nothing more is wanted of a transfer."""
        if self._transfers.pop(key, None) is not None and self._lead is not None:
            with suppress(WorkerUnavailable):  # nothing is left of a lost rank
                self._lead.call("forget", key)


class RankedTransfer(PromptTransfer):
    """A prompt's transfer of which each rank ships its heads, this one the first ones. If one rank's fails,
    all do.

    Args: as of `PromptTransfer`, of this rank's heads; deadline_s: by which it is over, monotonic seconds.
    """

    def __init__(
        self,
        ranks: PrefillRanks,
        ticket: Ticket,
        manifest: Manifest,
        formats: Sequence[LayerFormat],
        *,
        timeout_s: float,
        retained: RetainedChain | None,
        deadline_s: float,
        division: Division,
    ) -> None:
        super().__init__(
            ranks.sender, ticket, manifest, formats,
            timeout_s=timeout_s, retained=retained, num_ranks=ranks.num_ranks,
        )  # fmt: skip
        self.division = division
        self._key = manifest.key
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._condition = threading.Condition()
        self._error: KvferryError | None = None
        self._sent = dict.fromkeys(range(1, ranks.num_ranks), -1)
        self._rows: dict[int, ShippedRows] = {}
        self._seconds: dict[int, float] = {}
        self._bytes: list[Mapping[str, int]] = []
        self._resent_bytes = 0

    def send_layer(self, layer: int, tensors: Sequence[NamedTensor]) -> None:
        """See `OutgoingTransfer.send_layer`. Returns when all ranks have given the layer to their senders, so
        that the prompt's pass waits for the slowest of them here. Args: tensors: of this rank's heads."""
        try:
            super().send_layer(layer, tensors)
        except KvferryError as error:
            raise self.fail(error) from error
        self._await(
            lambda: min(self._sent.values()) >= layer, self._deadline_s, f"layer {layer} was not sent"
        )

    def add_rows(self, rows: ShippedRows) -> None:
        """See `PromptTransfer.add_rows`."""
        for rank in sorted(self._sent):
            rows.add_heads(self._rows[rank])

    def finish(self, end: EndRecord) -> None:
        """See `OutgoingTransfer.finish`. The others have finished theirs."""
        try:
            super().finish(end)
        except KvferryError as error:
            raise self.fail(error) from error

    def wait(self, timeout_s: float) -> float:
        """See `OutgoingTransfer.wait`: the seconds of the rank that took longest."""
        deadline_s = time.monotonic() + timeout_s
        try:
            own_s = super().wait(timeout_s)
        except KvferryError as error:
            raise self.fail(error) from error
        self._await(lambda: len(self._seconds) == len(self._sent), deadline_s, "it was not acknowledged")
        self._ranks.forget(self._key)
        return max(own_s, *self._seconds.values())

    def abort(self, reason: str) -> None:
        """See `OutgoingTransfer.abort`."""
        self.fail(Cancelled(f"transfer was aborted: {reason}", reason="aborted"), reason=reason)

    def redirect(self, ticket: Ticket) -> None:
        """Raises: TransferFailed ("resend"): what several ranks ship is not sent again."""
        raise TransferFailed(
            f"a transfer of {self._ranks.num_ranks} ranks ({self._key}) cannot be sent to another worker",
            reason="resend",
        )

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """See `OutgoingTransfer.bytes_by_kind`: of all ranks, once it is acknowledged."""
        total = super().bytes_by_kind
        for its in self._bytes:
            for kind, size_bytes in its.items():
                total[kind] = total.get(kind, 0) + size_bytes
        return total

    @property
    def resent_bytes(self) -> int:
        return super().resent_bytes + self._resent_bytes

    # ---- what the other ranks say ------------------------------------------------------------------------

    def sent(self, rank: int, layer: int, rows: ShippedRows | None) -> None:
        """A rank's sender has a layer. Args: rows: of all layers, with the last of them."""
        with self._condition:
            if rows is not None:
                self._rows[rank] = rows
            self._sent[rank] = layer
            self._condition.notify_all()

    def acknowledged(
        self, rank: int, transfer_s: float, bytes_by_kind: Mapping[str, int], resent_bytes: int
    ) -> None:
        """Decode has a rank's heads. Args: as of `OutgoingTransfer`."""
        with self._condition:
            self._seconds[rank] = transfer_s
            self._bytes.append(bytes_by_kind)
            self._resent_bytes += resent_bytes
            self._condition.notify_all()

    def failed(self, rank: int, error: KvferryError) -> None:
        """A rank's heads could not be compressed or shipped."""
        self.fail(type(error)(f"rank {rank}: {error.message}", reason=error.reason))

    def fail(self, error: KvferryError, *, reason: str = "") -> KvferryError:
        """End the transfer in all ranks. Idempotent. Returns: why it failed first."""
        with self._condition:
            if self._error is not None:
                return self._error
            self._error = error
            self._condition.notify_all()
        self._abort_parts(reason or error.reason)
        self._ranks.abort(self._key, reason or error.reason)
        self._ranks.forget(self._key)
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
