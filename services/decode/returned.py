"""Returns finished sequences' KV to prefill, for their sessions' histories. Last stage of a request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import structlog

from kvferry.services.decode.parts import Parts
from kvferry.services.decode.retained import RetainedSelections
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.control.messages import HistoryReturned, Ticket
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.telemetry.metrics import DecodeMetrics
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor
from kvferry.shared.wire.outgoing import OutgoingTransfer
from kvferry.shared.wire.receiver import model_fields
from kvferry.shared.wire.sender import BlockSender

_MAX_ENDPOINTS = 64
"""Prefill workers for which threads stay."""

_log = structlog.get_logger(__name__)


class HistoryReturner:
    """Threads that return the generated tokens' KV of finished sequences to prefill, some for each prefill
    worker, so that one that stalls delays no session of another.

    Rows are first copied to the host (those packed during decode were copied then), and the arena bytes are
    released or retained, so a slow peer blocks no decode memory; a sequence that waits for a thread still
    occupies its arena bytes. If a return fails, the next turn prefills these tokens again; the client does
    not see an error.

    Args:
        num_threads: for each prefill worker.
        timeout_s: limit on each wait for room in the send buffer, and on the wait for the acknowledgement.
        retained: takes over a sequence's bytes if its session's next turn can reuse them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: Parts,
        sender: BlockSender,
        metrics: DecodeMetrics,
        *,
        num_threads: int,
        timeout_s: float,
        retained: RetainedSelections,
    ) -> None:
        self._parts = parts
        self._retained = retained
        self._spec = spec
        self._sender = sender
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._pools: OrderedDict[str, ThreadPoolExecutor] = OrderedDict()
        """By the prefill worker's endpoint, the least recently used first."""

    def submit(self, sequence: Sequence) -> None:
        """Retain what a RETURNING sequence has, return its generated KV if that is stored, then close it."""
        if sequence.num_appended == 0 or sequence.manifest is None or not sequence.manifest.history_endpoint:
            self._retained.retain(sequence)
            self._end(sequence, num_tokens=0)
        else:
            self._submit(sequence, sequence.manifest)

    def close(self) -> None:
        """End the threads. Drops returns that have not begun. Cancel all sequences first. Idempotent."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, sequence: Sequence, manifest: Manifest) -> None:
        endpoint = manifest.history_endpoint
        with self._lock:
            pool = self._pools.pop(endpoint, None)
            if pool is None:
                pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="kvferry-history-return")
            self._pools[endpoint] = pool
            if len(self._pools) > _MAX_ENDPOINTS:
                # Its returns go on; its threads end after them.
                self._pools.popitem(last=False)[1].shutdown(wait=False)
            pool.submit(self._return, sequence, manifest)

    def _return(self, sequence: Sequence, manifest: Manifest) -> None:
        num_tokens = 0
        try:
            with self._parts.returning:
                with sequence.lock:
                    if sequence.state is SequenceState.CLOSED:
                        return
                    returned = self._parts.returned(sequence.name, sequence.num_appended)
                    if not self._retained.retain(sequence):
                        sequence.release_bytes()
                layers = returned()
            self._ship(sequence, manifest, layers)
            num_tokens = sequence.num_appended
        except KvferryError as error:
            _log.warning("history not returned", request_id=sequence.request.request_id, error=error.message)
        except Exception:
            _log.exception("history not returned", request_id=sequence.request.request_id)
        finally:
            if num_tokens == 0:
                self._retained.drop(sequence.request.session, transfer_id=sequence.name)
            self._end(sequence, num_tokens=num_tokens)

    def _end(self, sequence: Sequence, *, num_tokens: int) -> None:
        if sequence.close() and sequence.request.store_history:
            sequence.events.put(HistoryReturned(num_tokens=num_tokens))

    def _ship(self, sequence: Sequence, manifest: Manifest, layers: list[Tensors]) -> None:
        outgoing = self._open(sequence, manifest)
        with sequence.lock:
            sequence.outgoing = outgoing
            if sequence.cancelled:
                outgoing.abort("the request was cancelled")
        try:
            for layer, tensors in enumerate(layers):
                kind = "rows" if self._spec.layer(layer).has_rows else "state"
                outgoing.send_layer(
                    layer, [NamedTensor(name=name, tensor=its, kind=kind) for name, its in tensors.items()]
                )
            outgoing.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
            outgoing.wait(self._timeout_s)
        finally:
            outgoing.abort("the return failed")  # no effect once acknowledged
        if not sequence.request.probe:
            sent_bytes = outgoing.bytes_by_kind["rows"] + outgoing.bytes_by_kind["state"]
            self._metrics.history_returned_bytes.labels(self._spec.name).inc(sent_bytes)

    def _open(self, sequence: Sequence, manifest: Manifest) -> OutgoingTransfer:
        ticket = Ticket(
            endpoint=manifest.history_endpoint,
            transfer_id=manifest.key.transfer_id,
            generation=manifest.key.generation,
            credit_bytes=manifest.history_credit_bytes,
            lease_s=self._timeout_s,
            reserved_bytes=0,
        )
        returned = Manifest(
            purpose="history",
            key=manifest.key,
            request_id=sequence.request.request_id,
            **model_fields(self._spec),
            start=sequence.resolved.num_prompt_tokens,
            num_tokens=sequence.num_appended,
        )
        return self._sender.open(ticket, returned, timeout_s=self._timeout_s)
