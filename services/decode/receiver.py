"""The decode worker's block sink: writes a prompt's compressed KV from the wire into the arena.

Place in the request's path: between the block server's thread and the engine. Accepts a transfer only if its
generation, model and plan match a reservation that has not ended; a refusal names the field that differs.
The engine gets only complete transfers.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.services.decode.cache_writer import ArenaCopier, CacheWriter
from kvferry.services.decode.scheduler import Reservations
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.cache.arena import ByteArena
from kvferry.shared.cache.layout import sequence_layout
from kvferry.shared.compression.compress import with_layer_rows
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.rows import RowsCache
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, plan_digest
from kvferry.shared.control.messages import TransferAccepted
from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.metrics import DecodeMetrics
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry import begin, context_of
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    BlockHeader,
    EndRecord,
    LayerHeader,
    Manifest,
    TransferKey,
)


class _Incoming:
    """An open transfer. Used only by the block server's thread."""

    def __init__(self, sequence: Sequence, writer: CacheWriter, manifest: Manifest, started_s: float) -> None:
        self.sequence = sequence
        self.writer = writer
        self.started_s = started_s
        self.span = begin("receive", context_of({"traceparent": manifest.traceparent}))


class CacheReceiver:
    """Implements `BlockSink`. All methods are called from one thread.

    An error in a transfer closes its sequence at once, so the request fails without waiting for the lease.

    Args:
        submit: passes a complete sequence and its first token to the engine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        arena: ByteArena,
        reservations: Reservations,
        metrics: DecodeMetrics,
        *,
        clock: Callable[[], float],
        submit: Callable[[Sequence, SampledToken], None],
    ) -> None:
        self._spec = spec
        self._arena = arena
        self._reservations = reservations
        self._metrics = metrics
        self._clock = clock
        self._submit = submit
        self._copier = ArenaCopier(MAX_PAYLOAD_BYTES, arena.device)
        self._incoming: dict[TransferKey, _Incoming] = {}

    def open(self, manifest: Manifest) -> None:
        """See `BlockSink.open`."""
        try:
            sequence, writer = self._accept(manifest)
        except KvferryError as error:
            self._metrics.receive_failed.labels(error.reason).inc()
            raise
        self._incoming[manifest.key] = _Incoming(sequence, writer, manifest, self._clock())

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        """See `BlockSink.begin_layer`."""
        writer = self._find(key).writer
        self._write(key, lambda: writer.begin_layer(header))

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """See `BlockSink.write`."""
        writer = self._find(header.key).writer
        self._write(header.key, lambda: writer.write(header, payload))

    def _write(self, key: TransferKey, write: Callable[[], None]) -> None:
        """Run `write` under the sequence's lock. Raises: LeaseExpired: the reservation has ended."""
        sequence = self._find(key).sequence
        with sequence.lock:
            if sequence.state is not SequenceState.IN_TRANSFER:
                self._metrics.late_blocks.inc()
                raise self._ended(key)
            try:
                write()
            except KvferryError as error:
                sequence.close(error)
                raise

    def commit(self, end: EndRecord) -> None:
        """See `BlockSink.commit`."""
        incoming = self._find(end.key)
        sequence = incoming.sequence
        with sequence.lock:
            if sequence.state is not SequenceState.IN_TRANSFER:
                raise self._ended(end.key)
            try:
                first_token = self._checked_first_token(end, sequence)
                sequence.caches = incoming.writer.finish()
            except KvferryError as error:
                sequence.close(error)
                raise
            caches = sequence.caches
            if all(cache.format.is_plain and isinstance(cache, RowsCache) for cache in caches):
                sequence.positions = tuple(its.positions for its in caches if isinstance(its, RowsCache))
            sequence.release_retained()
            self._arena.advance(sequence.allocation, "running")
            sequence.committed_s = self._clock()
            sequence.state = SequenceState.READY
        del self._incoming[end.key]
        incoming.span.end()
        sequence.events.put(TransferAccepted(transfer_s=sequence.committed_s - incoming.started_s))
        sequence.enter_stage("first step")
        self._submit(sequence, first_token)

    def abort(self, key: TransferKey, reason: str) -> None:
        """See `BlockSink.abort`."""
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            return
        self._metrics.receive_failed.labels(reason).inc()
        incoming.span.end()
        error = TransferFailed(f"the transfer of the prompt's KV failed: {reason}", reason=reason)
        with incoming.sequence.lock:
            if incoming.sequence.state is SequenceState.IN_TRANSFER:
                incoming.sequence.close(error)

    def _accept(self, manifest: Manifest) -> tuple[Sequence, CacheWriter]:
        sequence = self._reservations.find(manifest.key)
        with sequence.lock:
            if sequence.state is not SequenceState.RESERVED:
                raise LeaseExpired(
                    f"the reservation of transfer {manifest.key.transfer_id:#x} is {sequence.state.value}; "
                    "it takes one transfer",
                    reason="reservation_used",
                )
            try:
                measured = self._measured(manifest, sequence)
                self._check(manifest, sequence)
                if measured is not sequence.resolved:
                    self._lay_out(sequence, measured)
            except KvferryError as error:
                sequence.close(error)
                raise
            self._arena.advance(sequence.allocation, "in_transfer")
            sequence.state = SequenceState.IN_TRANSFER
            sequence.manifest = manifest
            if not manifest.is_delta:
                sequence.release_retained()
            writer = CacheWriter(
                sequence.layout,
                self._arena.buffer(sequence.allocation),
                self._copier,
                retained=sequence.retained.first(manifest.retained_depth, manifest.retained_tokens)
                if sequence.retained
                else None,
                retained_layers=sequence.retained_layers[: manifest.retained_depth],
            )
        return sequence, writer

    def _find(self, key: TransferKey) -> _Incoming:
        incoming = self._incoming.get(key)
        if incoming is None:
            self._metrics.late_blocks.inc()
            raise self._ended(key)
        return incoming

    def _ended(self, key: TransferKey) -> LeaseExpired:
        return LeaseExpired(
            f"the reservation of transfer {key.transfer_id:#x}, generation {key.generation} has ended",
            reason="reservation_ended",
        )

    def _lay_out(self, sequence: Sequence, measured: ResolvedPlan) -> None:
        """Lay the measured rows out in the reserved bytes, which suffice for any measured rows."""
        formats = make_formats(self._spec, measured, returns_generated=sequence.request.store_history)
        sequence.layout = sequence_layout(formats)
        size_bytes, reserved_bytes = sequence.layout.size_bytes, sequence.allocation.size_bytes
        assert size_bytes <= reserved_bytes, (size_bytes, reserved_bytes)

    def _measured(self, manifest: Manifest, sequence: Sequence) -> ResolvedPlan:
        """The sequence's plan, with the manifest's rows per layer if prefill measures them."""
        if not is_measured(sequence.resolved):
            return sequence.resolved
        try:
            return with_layer_rows(sequence.resolved, manifest.layer_rows)
        except ValueError as error:
            raise ProtocolMismatch(
                f"the manifest's layer_rows: {error}", reason="manifest_layer_rows"
            ) from error

    def _check(self, manifest: Manifest, sequence: Sequence) -> None:
        spec, resolved = self._spec, sequence.resolved
        expected: dict[str, tuple[object, object]] = {
            "purpose": (manifest.purpose, "cache"),
            "model_fingerprint": (manifest.model_fingerprint, spec.fingerprint),
            "dtype": (manifest.dtype, spec.dtype),
            "num_kv_heads": (manifest.num_kv_heads, spec.num_kv_heads),
            "head_dim": (manifest.head_dim, spec.head_dim),
            "start": (manifest.start, 0),
            "num_tokens": (manifest.num_tokens, resolved.num_prompt_tokens),
            "num_layers": (manifest.num_layers, spec.num_layers),
            "plan_digest": (manifest.plan_digest, plan_digest(resolved)),
            "layer_rows": (manifest.layer_rows, manifest.layer_rows if is_measured(resolved) else ()),
        }
        if manifest.is_delta:
            retained = sequence.retained
            expected |= {
                "retained_transfer_id": (
                    manifest.retained_transfer_id,
                    retained.transfer_id if retained else 0,
                ),
                "retained_tokens": (
                    min(manifest.retained_tokens, retained.num_tokens if retained else 0),
                    manifest.retained_tokens,
                ),
                "retained_depth": (
                    max(1, min(manifest.retained_depth, retained.depth if retained else 0)),
                    manifest.retained_depth,
                ),
            }
        for name, (sent, own) in expected.items():
            if sent != own:
                raise ProtocolMismatch(
                    f"the manifest's {name} is {sent!r}; this worker expects {own!r}",
                    reason=f"manifest_{name}",
                )

    def _checked_first_token(self, end: EndRecord, sequence: Sequence) -> SampledToken:
        token, index = end.first_token, sequence.request.sampling.first_index
        if token is None or token.index != index or not 0 <= token.token_id < self._spec.vocab_size:
            raise TransferFailed(
                f"the transfer's first token is {token}; it must have index {index} and an id of 0 to "
                f"{self._spec.vocab_size - 1}",
                reason="first_token",
            )
        return token
