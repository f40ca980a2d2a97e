"""A following rank of a prefill worker: it ships the blocks of its heads straight to decode.

Runs in a child process of the worker (`shared/model/parallel/follower.py`). The leading rank (`parts.py`)
opens the same transfers for its own heads, and decides when one ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import structlog

from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.host_copies import HandOver, HostCopies, host_copies
from kvferry.services.prefill.parts import PromptTransfer
from kvferry.services.prefill.schedule import MAX_STARTED
from kvferry.shared.cache.delta import RetainedChain
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import Encoded
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import KvferryError, TransferFailed
from kvferry.shared.model.parallel.follower import FollowingRank
from kvferry.shared.model.parallel.passes import PartTaker
from kvferry.shared.process.heartbeat import Heartbeat
from kvferry.shared.process.worker import ProcessTransport
from kvferry.shared.wire.messages import EndRecord, Manifest, TransferKey
from kvferry.shared.wire.sender import BlockSender

_MAX_WAITING = 64
"""Transfers that wait for their acknowledgement at the same time; others wait for these first."""

_log = structlog.get_logger(__name__)


class Shipment:
    """One transfer's heads of this rank. Implements `PartTaker`.

        take: layer k ──► wait for layer k - 1 ──► layer k is sent on the pool ──► the last: END ──► ACK

    `take` is called by the rank's own thread, `abort` by any. What fails is noted to the leading rank, which
    ends the transfer in all ranks; the pass itself goes on, because the others run it, too.
    """

    def __init__(
        self, rank: PrefillRank, key: TransferKey, transfer: PromptTransfer, timeout_s: float
    ) -> None:
        """Args: timeout_s: for all of it."""
        self._rank = rank
        self._key = key
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._handing = HandOver(rank.pool, Heartbeat(time.monotonic, "cpu"))
        self._num_taken = 0
        self._failed = threading.Event()

    def take(self, layer: int, part: Encoded | Exception) -> None:
        if layer < self._num_taken or self._failed.is_set():
            return
        self._num_taken = layer + 1
        try:
            if isinstance(part, Exception):
                raise part
            send = self._transfer.begin_layer(layer, part, self._rank.copies, time.monotonic)
        except Exception as error:
            self._fail(error)
            return
        self._handing.work.append(partial(self._send, layer, send))
        self._handing.put()

    def abort(self, reason: str) -> None:
        """Abort the transfer. Idempotent; no effect once it is acknowledged."""
        self._failed.set()
        self._transfer.abort(reason)

    def _send(self, layer: int, send: Callable[[], None]) -> None:
        """Send a layer, on the pool. Raises nothing."""
        if self._failed.is_set():
            return
        try:
            send()
            is_last = layer == len(self._transfer.formats) - 1
            if is_last:
                self._transfer.finish(EndRecord(key=self._key, num_blocks=0, payload_bytes=0))
            self._rank.note(("sent", self._key, layer, self._transfer.rows if is_last else None))
            if is_last:
                self._rank.waiters.submit(self._wait)
        except Exception as error:
            self._fail(error)

    def _wait(self) -> None:
        try:
            transfer, seconds = self._transfer, self._transfer.wait(self._timeout_s)
            word = ("acknowledged", self._key, seconds, transfer.bytes_by_kind, transfer.resent_bytes)
            self._rank.note(word)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._failed.is_set():
            return  # the leading rank knows
        self.abort("failed")
        if not isinstance(error, KvferryError):
            _log.error("a rank cannot ship its heads", exc_info=error)
            error = KvferryError(f"{type(error).__name__}: {error}", reason="internal")
        self._rank.note(("failed", self._key, error.with_traceback(None)))


class PrefillRank(FollowingRank):
    """What is here is named by the transfers' keys, as in the messages.

    Attributes: copies: to the host, once the rank has started; pool: hands layers over; waiters: wait for
        acknowledgements.
    """

    def __init__(self, commands: Connection, notes: Connection) -> None:
        super().__init__(commands, notes)
        self._sender: BlockSender | None = None
        self._timeout_s = 0.0
        self.copies = HostCopies()
        self._shipments: dict[TransferKey, Shipment] = {}
        # A cancelled pass may still be handing a layer over when the next one begins.
        self.pool = ThreadPoolExecutor(MAX_STARTED + 1, "kvferry-rank-hand-over")
        self.waiters = ThreadPoolExecutor(_MAX_WAITING, "kvferry-rank-acknowledgement")

    def take_aside(self, word: tuple[TransferKey, str]) -> None:
        key, reason = word
        if (shipment := self._shipments.get(key)) is not None:
            shipment.abort(reason)

    def part_taker(self, transfer: TransferKey) -> PartTaker | None:
        return self._shipments.get(transfer)

    def start(self, settings: PrefillConfig) -> None:
        """Make the rank's block sender; forget everything from before.

        Args: settings: the worker's, with the folder of its keys.
        """
        for shipment in self._shipments.values():
            shipment.abort("closed")
        self._shipments.clear()
        if self._sender is not None:
            self._sender.close()
        self.copies = host_copies(self.model.device)
        self._timeout_s = settings.transfer_timeout_s
        transport = ProcessTransport(settings, "prefill")
        self._sender = BlockSender(
            transport.connecting(lambda name: self.note(("connected", name))),
            buffer_bytes=max(1, settings.buffer_bytes // self.num_ranks),
            timeout_s=settings.transfer_timeout_s,
        )

    def ship(
        self,
        ticket: Ticket,
        manifest: Manifest,
        plan: ResolvedPlan,
        retained: RetainedChain | None,
        with_positions: bool,
        timeout_s: float,
    ) -> None:
        """Open the transfer of the rank's heads, of which a pass follows.

        Args:
            manifest: of all heads; its key names the transfer from now on.
            retained: rows that decode retains, of the rank's heads.
            with_positions: as of `PromptTransfer`.
            timeout_s: for all of it.
        """
        key = manifest.key
        try:
            if self._sender is None:
                raise TransferFailed("the rank has no block sender", reason="closed")
            transfer = PromptTransfer(
                self._sender, ticket, manifest, make_formats(self.model.spec, plan),
                timeout_s=self._timeout_s, retained=retained, rank=self.rank, num_ranks=self.num_ranks,
                with_positions=with_positions,
            )  # fmt: skip
        except KvferryError as error:
            self.note(("failed", key, error.with_traceback(None)))
            return
        self._shipments[key] = Shipment(self, key, transfer, timeout_s)

    def forget(self, key: TransferKey) -> None:
        """Forget a transfer that is no longer needed; abort it if it is not over."""
        if (shipment := self._shipments.pop(key, None)) is not None:
            shipment.abort("forgotten")
