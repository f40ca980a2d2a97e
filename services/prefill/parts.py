"""A prompt's transfer to decode: one or several parts, from one rank of prefill or from each.

    rank 0        opens a transfer, in every rank ──► passes ──► waits for all acknowledgements
    the others    `rank.py`: each layer's heads are compressed and sent there

A part is the blocks of some KV heads, sent straight to the rank of decode with these heads. Of what other
ranks ship, rank 0 learns only numbers: which layers have been sent, the positions of rows for the session's
next turn, bytes and seconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.host_copies import HostCopies
from kvferry.shared.cache.delta import (
    NEW_ROWS,
    RetainedChain,
    ShippedRows,
    delta_parts,
    delta_tensors,
    head_positions,
)
from kvferry.shared.compression.formats import compresses_heads_apart, make_formats
from kvferry.shared.compression.formats.drafted import parts
from kvferry.shared.compression.formats.interface import Encoded, InvalidTensors, LayerFormat, Tensors
from kvferry.shared.compression.plan import ResolvedPlan, num_draft_tokens
from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import Cancelled, KvferryError, TransferFailed, WorkerUnavailable
from kvferry.shared.model.interface import Division, LanguageModel
from kvferry.shared.model.parallel.model import ParallelModel
from kvferry.shared.model.question import Question
from kvferry.shared.telemetry.tracing import stage
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

    Attributes:
        division: how ranks that ship their heads themselves divide the prompt's; None: this one ships all.
        rows: what is known of those shipped; of all heads once the last layer is sent.
        sending_s: seconds that sending took.

    Args:
        manifest: of all heads.
        formats: of the layers, of the heads that are shipped here.
        retained: rows that decode retains, of these heads.
        rank, num_ranks: of prefill, where each ships its heads itself; decode has as many or a multiple.
        with_positions: whether `rows` is to have the positions of rows.
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
        with_positions: bool = False,
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
        self.division: Division | None = None
        self.rows = ShippedRows()
        self.sending_s = 0.0
        self._num_parts = len(endpoints)
        self._retained = retained
        self._with_positions = with_positions
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

    def begin_layer(
        self, layer: int, encoded: Encoded, copies: HostCopies, clock: Callable[[], float]
    ) -> Callable[[], None]:
        """Begin to copy a layer of these heads to the host.

        Args: clock: seconds, on the thread that sends.
        Returns: waits for the copies and sends them; for another thread.
        """
        fmt = self.formats[layer]
        if self._retained is not None:
            whole = encoded.finish(encoded.tensors)
            tensors = delta_tensors(whole, layer, self._retained)
            saved = [whole[name].nbytes - tensors[name].nbytes for name in fmt.shape.row_names]
            self.rows.saved_bytes += sum(saved)
            encoded = Encoded(tensors=tuple(tensors.values()), names=tuple(tensors))
        arrived = copies.start(encoded.tensors)

        def send() -> None:
            begin_s = clock()
            with stage("ship", layer=layer):
                copied = encoded.finish(arrived())
                if self._with_positions:
                    self.rows.positions[layer] = head_positions(fmt, copied)
                self.send_layer(layer, copied)
            self.sending_s += clock() - begin_s

        return send

    def send_layer(self, layer: int, tensors: Tensors) -> None:
        """See `OutgoingTransfer.send_layer`. Args: tensors: of all its heads, on the host."""
        fmt, number = self.formats[layer], len(self._parts)
        kinds = {NEW_ROWS: "index", **fmt.kinds}
        divided: Sequence[Tensors] = (tensors,)
        if number > 1:
            try:
                is_delta = NEW_ROWS in tensors
                divided = delta_parts(fmt, tensors, number) if is_delta else parts(fmt, tensors, number)
            except InvalidTensors as error:
                self._abort_parts(error.reason)
                raise TransferFailed(f"layer {layer}: {error}", reason=error.reason) from error
        for part, heads in zip(self._parts, divided, strict=True):
            named = [
                NamedTensor(name=name, tensor=tensor, kind=kinds.get(name, "rows"))
                for name, tensor in heads.items()
            ]
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
        first.wait_for(lambda: any(each.has_failed for each in self._parts) or self.is_over, timeout_s)
        try:
            in_order = sorted(self._parts, key=lambda each: not each.is_over)  # those that failed come first
            return max([part.wait(max(0.0, deadline_s - time.monotonic())) for part in in_order])
        except BaseException:
            self._abort_parts("aborted")
            raise

    def abort(self, reason: str) -> None:
        self._abort_parts(reason)

    def _abort_parts(self, reason: str) -> None:
        for part in self._parts:
            part.abort(reason)

    def redirect(self, ticket: Ticket) -> None:
        """See `OutgoingTransfer.redirect`. Several parts are not sent again, nor one in several."""
        if self._num_parts > 1 or ticket.part_endpoints:
            raise TransferFailed(
                f"a transfer of {self._num_parts} parts ({self._parts[0].key}) cannot be sent to another "
                "worker",
                reason="resend",
            )
        self._parts[0].redirect(ticket)

    @property
    def is_over(self) -> bool:
        return all([part.is_over for part in self._parts])

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """See `OutgoingTransfer.bytes_by_kind`: of all parts."""
        total = Counter[str]()
        for part in self._parts:
            total.update(part.bytes_by_kind)
        return dict(total)

    @property
    def resent_bytes(self) -> int:
        return sum(part.resent_bytes for part in self._parts)


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
        self._lead.ask("start", settings)(timeout_s=_START_TIMEOUT_S)

    def open(
        self,
        ticket: Ticket,
        manifest: Manifest,
        plan: ResolvedPlan,
        formats: Sequence[LayerFormat],
        question: Question | None,
        *,
        retained: RetainedChain | None,
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
            with_positions, keeps_failed, timeout_s: as of `PromptTransfer`.
            question, with_rows: as of `Division`.
            left_s: until it is over, at the latest.

        Raises: TransferFailed, ProtocolMismatch: as `PromptTransfer`; WorkerUnavailable: a rank is lost.
        """
        if self._lead is None or not compresses_heads_apart(plan, formats) or num_draft_tokens(plan):
            return PromptTransfer(
                self.sender, ticket, manifest, formats, timeout_s=timeout_s, retained=retained,
                with_positions=with_positions, keeps_failed=keeps_failed,
            )  # fmt: skip
        size = self._part_spec.num_kv_heads
        firsts = range(0, size * self.num_ranks, size)
        chains = [retained.of_heads(first, size) if retained is not None else None for first in firsts]
        transfer = RankedTransfer(
            self, ticket, manifest, make_formats(self._part_spec, plan),
            timeout_s=timeout_s, retained=chains[0], with_positions=with_positions, left_s=left_s,
            division=Division(plan=plan, with_rows=with_rows, transfer=manifest.key, question=question),
        )  # fmt: skip
        self._transfers[manifest.key] = transfer
        args = [(ticket, manifest, plan, chain, with_positions, left_s) for chain in chains[1:]]
        try:
            self._lead.call_each("ship", args)
        except WorkerUnavailable:
            transfer.abort("rank_lost")
            raise
        return transfer

    def end(self, key: TransferKey, reason: str = "") -> None:
        """Forget a transfer that is no longer needed. Args: reason: to abort it, also while a pass runs."""
        assert self._lead is not None, "there are other ranks"
        if reason:
            self._lead.aside((key, reason))
        if self._transfers.pop(key, None) is not None:
            with suppress(WorkerUnavailable):  # nothing is left of a lost rank
                self._lead.call("forget", key)


class RankedTransfer(PromptTransfer):
    """A prompt's transfer of which each rank ships its heads, this one the first ones. If one rank's fails,
    all do.

    Args: as of `PromptTransfer`, of this rank's heads; left_s: until it is over, at the latest.
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
        with_positions: bool,
        left_s: float,
        division: Division,
    ) -> None:
        super().__init__(
            ranks.sender, ticket, manifest, formats, timeout_s=timeout_s, retained=retained,
            num_ranks=ranks.num_ranks, with_positions=with_positions,
        )  # fmt: skip
        self.division = division
        self._key = manifest.key
        self._ranks = ranks
        self._deadline_s = time.monotonic() + left_s
        self._condition = threading.Condition()
        self._error: KvferryError | None = None
        self._sent = dict.fromkeys(range(1, ranks.num_ranks), -1)
        self._rows: dict[int, ShippedRows] = {}
        self._seconds: dict[int, float] = {}
        self._bytes = Counter[str]()
        self._resent_bytes = 0

    def send_layer(self, layer: int, tensors: Tensors) -> None:
        """See `OutgoingTransfer.send_layer`. Returns when all ranks have given the layer to their senders, so
        that the prompt's pass waits for the slowest of them here. Args: tensors: of this rank's heads."""
        with self._one_for_all():
            super().send_layer(layer, tensors)
        what = f"layer {layer} was not sent"
        self._await(lambda: min(self._sent.values()) >= layer, self._deadline_s, what)
        for rank in sorted(self._sent) if layer == len(self.formats) - 1 else ():
            self.rows.add_heads(self._rows[rank])

    def finish(self, end: EndRecord) -> None:
        """See `OutgoingTransfer.finish`. The others have finished theirs."""
        with self._one_for_all():
            super().finish(end)

    def wait(self, timeout_s: float) -> float:
        """See `OutgoingTransfer.wait`: the seconds of the rank that took longest."""
        deadline_s = time.monotonic() + timeout_s
        with self._one_for_all():
            own_s = super().wait(timeout_s)
        self._await(lambda: len(self._seconds) == len(self._sent), deadline_s, "it was not acknowledged")
        self._ranks.end(self._key)
        return max(own_s, *self._seconds.values())

    def abort(self, reason: str) -> None:
        self.fail(Cancelled(f"transfer was aborted: {reason}", reason="aborted"), reason=reason)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """See `OutgoingTransfer.bytes_by_kind`: of all ranks, once it is acknowledged."""
        total = Counter(super().bytes_by_kind)
        total.update(self._bytes)
        return dict(total)

    @property
    def resent_bytes(self) -> int:
        return super().resent_bytes + self._resent_bytes

    def sent(self, rank: int, layer: int, rows: ShippedRows | None) -> None:
        """Note that a rank's sender has a layer. Args: rows: of all layers, with the last of them."""
        with self._condition:
            if rows is not None:
                self._rows[rank] = rows
            self._sent[rank] = layer
            self._condition.notify_all()

    def acknowledged(
        self, rank: int, transfer_s: float, bytes_by_kind: Mapping[str, int], resent_bytes: int
    ) -> None:
        """Note that decode has a rank's heads. Args: as of `OutgoingTransfer`."""
        with self._condition:
            self._seconds[rank] = transfer_s
            self._bytes.update(bytes_by_kind)
            self._resent_bytes += resent_bytes
            self._condition.notify_all()

    def failed(self, rank: int, error: KvferryError) -> None:
        """End the transfer, because a rank's heads could not be compressed or shipped."""
        self.fail(type(error)(f"rank {rank}: {error.message}", reason=error.reason))

    def fail(self, error: KvferryError, *, reason: str = "") -> KvferryError:
        """End the transfer in all ranks. Idempotent. Returns: why it failed first."""
        with self._condition:
            if self._error is not None:
                return self._error
            self._error = error
            self._condition.notify_all()
        self._abort_parts(reason or error.reason)
        self._ranks.end(self._key, reason or error.reason)
        return error

    @contextmanager
    def _one_for_all(self) -> Iterator[None]:
        """Fail all ranks if this rank's heads fail here. Raises: why the transfer failed first."""
        try:
            yield
        except KvferryError as error:
            if (first := self.fail(error)) is not error:
                raise first from error
            raise

    def _await(self, is_so: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Wait for `is_so`. Raises: why the transfer failed; TransferFailed ("timeout"): the wait is over."""
        with self._condition:
            left_s = max(0.0, deadline_s - time.monotonic())
            in_time = self._condition.wait_for(lambda: self._error is not None or is_so(), left_s)
            if self._error is not None:
                raise self._error
        if not in_time:
            raise self.fail(TransferFailed(f"{what} by another rank within {left_s:.1f} s", reason="timeout"))
