"""Returns a finished completion's generated KV to the prefill worker, for the session's history.

Last stage of a request that stores history. Rows are first copied to the host (those packed during decode
were copied then), and the arena bytes are released or retained, so a slow peer blocks no decode memory.
If a return fails, the next turn prefills these tokens again; the client does not see an error.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import structlog
from torch import Tensor

from kvferry.services.decode.retained import RetainedSelections
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.control.messages import HistoryReturned, Ticket
from kvferry.shared.errors import KvferryError
from kvferry.shared.metrics import DecodeMetrics
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.transfer import OutgoingTransfer

_log = structlog.get_logger(__name__)
_Rows = list[tuple[Tensor, Tensor]]


class HistoryReturner:
    """A pool of threads that ship rows. A sequence that waits for a thread still occupies its arena bytes.

    Args:
        timeout_s: limit on each wait for room in the send buffer, and on the wait for the acknowledgement.
        retained: takes over a sequence's bytes if its session's next turn can reuse them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sender: BlockSender,
        metrics: DecodeMetrics,
        *,
        num_threads: int,
        timeout_s: float,
        retained: RetainedSelections,
    ) -> None:
        self._retained = retained
        self._spec = spec
        self._sender = sender
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvferry-history-return")

    def submit(self, sequence: Sequence) -> None:
        """Return the generated KV of a RETURNING sequence, then close it."""
        if sequence.num_appended == 0 or sequence.manifest is None or not sequence.manifest.history_endpoint:
            self._retained.keep(sequence)
            self._end(sequence, num_tokens=0)
        else:
            self._pool.submit(self._return, sequence, sequence.manifest)

    def close(self) -> None:
        """End the threads. Drops returns that have not begun. Cancel all sequences first. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _return(self, sequence: Sequence, manifest: Manifest) -> None:
        num_tokens = 0
        try:
            with sequence.lock:
                if sequence.state is SequenceState.CLOSED:
                    return
                rows = [cache.generated_rows(sequence.num_appended) for cache in sequence.caches]
                if not self._retained.keep(sequence):
                    sequence.release_bytes()
            self._ship(sequence, manifest, rows)
            num_tokens = sequence.num_appended
        except KvferryError as error:
            _log.warning("history not returned", request_id=sequence.request.request_id, error=error.message)
        except Exception:
            _log.exception("history not returned", request_id=sequence.request.request_id)
        finally:
            if num_tokens == 0:
                self._retained.drop(sequence.request.session, transfer_id=sequence.key.transfer_id)
            self._end(sequence, num_tokens=num_tokens)

    def _end(self, sequence: Sequence, *, num_tokens: int) -> None:
        if sequence.close():
            sequence.events.put(HistoryReturned(num_tokens=num_tokens))

    def _ship(self, sequence: Sequence, manifest: Manifest, rows: _Rows) -> None:
        outgoing = self._open(sequence, manifest)
        with sequence.lock:
            sequence.outgoing = outgoing
            if sequence.cancelled:
                outgoing.abort("the request was cancelled")
        try:
            for layer, (keys, values) in enumerate(rows):
                tensors = (("keys", keys), ("values", values))
                outgoing.send_layer(
                    layer, [NamedTensor(name=name, tensor=its, kind="rows") for name, its in tensors]
                )
            outgoing.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
            outgoing.wait(self._timeout_s)
        finally:
            outgoing.abort("the return failed")  # no effect once acknowledged
        if not sequence.request.probe:
            sent_bytes = outgoing.bytes_by_kind["rows"]
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
            model_fingerprint=self._spec.fingerprint,
            dtype=self._spec.dtype,
            num_layers=self._spec.num_layers,
            num_kv_heads=self._spec.num_kv_heads,
            head_dim=self._spec.head_dim,
            start=sequence.resolved.num_prompt_tokens,
            num_tokens=sequence.num_appended,
        )
        return self._sender.open(ticket, returned, timeout_s=self._timeout_s)
