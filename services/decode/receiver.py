"""The decode worker's block sink: takes a prompt's compressed KV from the wire into the arena.

Between the block server's thread and the engine. Admits a transfer only for a live reservation of the same
generation, model and plan; anything else is refused by name, and nothing partial ever reaches the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.services.decode.arena_copier import ArenaCopier
from kvferry.services.decode.cache_writer import CacheWriter
from kvferry.services.decode.reservations import Reservations
from kvferry.services.decode.sequence import Sequence, SequenceState
from kvferry.shared.cache.arena import ByteArena
from kvferry.shared.cache.layout import TORCH_DTYPES, sequence_layout
from kvferry.shared.compression.attention import state_sizes
from kvferry.shared.compression.measured import is_measured, with_layer_rows
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.compression.representation import packed_limits
from kvferry.shared.control.messages import TransferAccepted
from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.metrics import DecodeMetrics
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry import begin, context_of
from kvferry.shared.wire.held_rows import ships_rows_alone
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES, BlockHeader, EndRecord, Manifest, TransferKey
from kvferry.shared.wire.stored_sections import announced_sections


class _Incoming:
    """A transfer under way. Belongs to the block server's thread."""

    def __init__(self, sequence: Sequence, writer: CacheWriter, manifest: Manifest, started_s: float) -> None:
        self.sequence = sequence
        self.writer = writer
        self.started_s = started_s
        self.span = begin("receive", context_of({"traceparent": manifest.traceparent}))


class CacheReceiver:
    """Implements `BlockSink`. All methods are called from one thread.

    Whatever fails, fails the request at once, with the error that the sender is told.

    Args:
        submit: hands a complete sequence and its first token to the engine.
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

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """See `BlockSink.write`. Bytes are copied only while the reservation is still held."""
        incoming = self._find(header.key)
        sequence = incoming.sequence
        with sequence.lock:
            if sequence.state is not SequenceState.IN_TRANSFER:
                self._metrics.late_blocks.inc()
                raise self._ended(header.key)
            try:
                incoming.writer.write(header, payload)
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
            if ships_rows_alone(self._spec, sequence.resolved):
                sequence.positions = incoming.writer.positions
            sequence.let_go()
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
                settled = self._settled(manifest, sequence)
                self._check(manifest, sequence, settled)
                if settled is not sequence.resolved:
                    self._lay_out(sequence, settled)
            except KvferryError as error:
                sequence.close(error)
                raise
            self._arena.advance(sequence.allocation, "in_transfer")
            sequence.state = SequenceState.IN_TRANSFER
            sequence.manifest = manifest
            if not manifest.is_delta:
                sequence.let_go()
            writer = CacheWriter(
                self._spec,
                sequence.layout,
                self._arena.buffer(sequence.allocation),
                self._copier,
                resolved=settled,
                held=sequence.held.first(manifest.held_depth, manifest.held_tokens)
                if sequence.held
                else None,
                held_layers=sequence.held_layers[: manifest.held_depth],
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

    def _lay_out(self, sequence: Sequence, settled: ResolvedPlan) -> None:
        """Place measured rows in the bytes that were reserved for any such rows."""
        sequence.layout = sequence_layout(
            self._spec, settled, returns_generated=sequence.request.store_history
        )
        held_bytes, reserved_bytes = sequence.layout.size_bytes, sequence.allocation.size_bytes
        assert held_bytes <= reserved_bytes, (held_bytes, reserved_bytes)

    def _settled(self, manifest: Manifest, sequence: Sequence) -> ResolvedPlan:
        """The sequence's plan; with the manifest's rows, where prefill measures them."""
        if not is_measured(sequence.resolved):
            return sequence.resolved
        try:
            return with_layer_rows(sequence.resolved, manifest.layer_rows)
        except ValueError as error:
            raise ProtocolMismatch(
                f"the manifest's layer_rows: {error}", reason="manifest_layer_rows"
            ) from error

    def _check(self, manifest: Manifest, sequence: Sequence, settled: ResolvedPlan) -> None:
        spec, resolved = self._spec, sequence.resolved
        expected: dict[str, tuple[object, object]] = {
            "purpose": (manifest.purpose, "cache"),
            "model_fingerprint": (manifest.model_fingerprint, spec.fingerprint),
            "dtype": (manifest.dtype, spec.dtype),
            "num_kv_heads": (manifest.num_kv_heads, spec.num_kv_heads),
            "head_dim": (manifest.head_dim, spec.head_dim),
            "start": (manifest.start, 0),
            "num_tokens": (manifest.num_tokens, resolved.num_prompt_tokens),
            "layer_rows": (manifest.layer_rows, tuple(layer.rows for layer in settled.layers)),
            "layer_packed_bytes": (
                manifest.layer_packed_bytes,
                packed_limits(
                    resolved,
                    num_kv_heads=spec.num_kv_heads,
                    head_dim=spec.head_dim,
                    dtype=TORCH_DTYPES[spec.dtype],
                ),
            ),
            "layer_state_bytes": (
                manifest.layer_state_bytes,
                state_sizes(settled, num_kv_heads=spec.num_kv_heads),
            ),
            "layer_sections": (manifest.layer_sections, announced_sections(spec, settled)),
            "resolved": (manifest.resolved, resolved),
        }
        if manifest.is_delta:
            held = sequence.held
            expected |= {
                "held_transfer_id": (manifest.held_transfer_id, held.transfer_id if held else 0),
                "held_tokens": (
                    min(manifest.held_tokens, held.num_tokens if held else 0),
                    manifest.held_tokens,
                ),
                "held_depth": (
                    max(1, min(manifest.held_depth, held.depth if held else 0)),
                    manifest.held_depth,
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
