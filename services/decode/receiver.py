"""The decode worker's block sink: writes a prompt's compressed KV from the wire into the arena.

Place in the request's path: between the block server's thread and the engine. Accepts a transfer only if its
generation, model and plan match a reservation that has not ended; a refusal names the field that differs. The
layer's format decides where a tensor's bytes go and checks them; blocks may split tensors at any byte. The
engine gets only complete transfers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from opentelemetry.trace import Span
from torch import Tensor

from kvferry.services.decode.rank_messages import PartArrived, PartFailed
from kvferry.services.decode.sequence import (
    PinnedRows,
    Reservations,
    Sequence,
    SequenceState,
    written_so_far,
)
from kvferry.services.decode.shared_prompts import SharedPrompts
from kvferry.shared.cache.arena import ByteArena, SequenceLayout, sequence_layout
from kvferry.shared.cache.delta import DeltaLayer, RetainedChain
from kvferry.shared.compression.compress import with_layer_rows
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.formats.interface import InvalidTensors, LayerCache, LayerFormat
from kvferry.shared.compression.interface import TensorSpec
from kvferry.shared.compression.plan import ResolvedPlan, is_measured, plan_digest
from kvferry.shared.control.messages import GenerateRequest, TransferAccepted
from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.metrics import DecodeMetrics
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry import begin, context_of
from kvferry.shared.wire.frames import check_manifest, decode_nack, model_fields
from kvferry.shared.wire.messages import (
    MAX_PAYLOAD_BYTES,
    BlockHeader,
    EndRecord,
    LayerHeader,
    Manifest,
    TransferKey,
)

if TYPE_CHECKING:
    from kvferry.services.decode.ranks import DecodeRanks


class _Half:
    """Pinned memory for one payload. Attributes: sent: mark behind the last copy from it."""

    def __init__(self, size_bytes: int) -> None:
        self.pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]


class ArenaCopier:
    """Copies payloads from the transport's memory into the arena, on CUDA through pinned memory.

        half 0    | payload 0 ── to the device ───────► | payload 2 ...      a half is written again only when
        half 1                | payload 1 ── to the device ───────► |        the device has read it

    On CUDA the bytes arrive on the thread's current stream, after `copy` has returned: work on that stream
    finds them, and a step by a mark (`written_so_far`). Used only by the receiver's thread.
    """

    def __init__(self, max_payload_bytes: int, device: torch.device) -> None:
        self._payload = np.empty(0, np.uint8)
        self._half: _Half | None = None
        self._halves: Iterator[_Half] | None = None
        if device.type == "cuda":
            self._halves = itertools.cycle([_Half(max_payload_bytes), _Half(max_payload_bytes)])

    def load(self, payload: memoryview) -> None:
        """Set the payload that `copy` reads from until the next call."""
        self._payload = np.frombuffer(payload, np.uint8)
        if self._halves is not None:
            self._half = next(self._halves)
            self._half.sent.synchronize()
            self._half.pinned.numpy()[: payload.nbytes] = self._payload

    def copy(self, target: Tensor, offset: int) -> None:
        """Fill `target`, uint8 `[n]` in the arena or on the host, with the payload's bytes from `offset`."""
        end = offset + target.numel()
        if self._half is not None:
            target.copy_(self._half.pinned[offset:end], non_blocking=True)
            if target.is_cuda:  # else it is done
                self._half.sent.record(torch.cuda.current_stream(target.device))
        else:
            # Not `copy_`: torch would split the block among its threads and wait for busy cores.
            target.numpy()[:] = self._payload[offset:end]


class CacheWriter:
    """Writes one sequence's layers, in order.

        begin_layer ──► write ... write ──last byte──► the layer is checked and opened ──► begin_layer ...

    Args:
        buffer: the sequence's arena bytes, uint8 `[layout.size_bytes or more]`.
        copier: shared with the other transfers of the receiver's thread.
        pinned: rows of the session's last turns that are not sent again; None if everything is sent.
    """

    def __init__(
        self, layout: SequenceLayout, buffer: Tensor, copier: ArenaCopier, *, pinned: PinnedRows | None = None
    ) -> None:
        self._layout = layout
        self._receiving: LayerFormat | DeltaLayer
        """Of the layer that has begun."""
        self._buffer = buffer
        self._copier = copier
        self._pinned = pinned
        self._caches: list[LayerCache] = []
        self._num_layers = 0
        self._regions: Mapping[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self._pieces: list[Tensor] = []
        self._missing_bytes = 0

    def begin_layer(self, header: LayerHeader) -> None:
        """Start the next layer.

        Raises:
            TransferFailed, ProtocolMismatch: it is not the next layer, or its tensors are not those of its
                format.
        """
        layer = self._num_layers
        if header.layer != layer or layer == len(self._layout.layers) or self._missing_bytes:
            raise TransferFailed(f"layer {header.layer} was sent; layer {layer} is expected", reason="order")
        specs = {
            its.name: TensorSpec(shape=its.shape, dtype=getattr(torch, its.dtype)) for its in header.tensors
        }
        try:
            place = self._layout.layers[layer]
            self._regions = place.views(self._buffer)
            self._receiving = self._format(layer)
            self._tensors = self._receiving.receive(specs, self._regions)
        except InvalidTensors as error:
            raise layer_failed(layer, error) from error
        self._pieces = [_as_bytes(its) for its in self._tensors.values()]
        self._missing_bytes = sum([its.size_bytes for its in specs.values()])
        self._open_when_complete()

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """Write one block of the current layer.

        Raises: TransferFailed, ProtocolMismatch: the layer is now complete, and its content is invalid.
        """
        pieces, done = self._pieces[header.tensor], 0
        self._copier.load(payload)
        while done < payload.nbytes:
            piece, within = divmod(header.offset + done, pieces.shape[1])
            count = min(payload.nbytes - done, pieces.shape[1] - within)
            self._copier.copy(pieces[piece, within : within + count], done)
            done += count
        self._missing_bytes -= done
        self._open_when_complete()

    def finish(self) -> tuple[LayerCache, ...]:
        """All layers, once what the device checks is known.

        Raises: TransferFailed: a layer is missing or incomplete, or its content is invalid.
        """
        if self._num_layers != len(self._layout.layers):
            raise TransferFailed(
                f"layer {self._num_layers} is incomplete: {self._missing_bytes} bytes are missing",
                reason="incomplete",
            )
        for layer, cache in enumerate(self._caches):
            if not cache.settles:
                continue
            try:
                cache.settle()
            except InvalidTensors as error:
                raise layer_failed(layer, error) from error
        return tuple(self._caches)

    def _open_when_complete(self) -> None:
        if self._missing_bytes:
            return
        layer = self._num_layers
        try:
            cache = self._receiving.open(self._regions, self._tensors)
            self._layout.layers[layer].format.check_finite(self._tensors)
        except InvalidTensors as error:
            raise layer_failed(layer, error) from error
        self._caches.append(cache)
        self._num_layers += 1
        self._tensors, self._pieces = {}, []

    def _format(self, layer: int) -> LayerFormat | DeltaLayer:
        """What receives the layer that has begun."""
        fmt = self._layout.layers[layer].format
        if self._pinned is None:
            return fmt
        return DeltaLayer(fmt, layer, self._pinned.chain, [layers[layer] for layers in self._pinned.layers])


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as uint8 `[pieces, bytes]` with contiguous pieces: one, or one per KV head."""
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8)[None]
    size = (tensor.shape[0], math.prod(tensor.shape[1:]))
    return tensor.as_strided(size, (tensor.stride(0), 1)).view(torch.uint8)


def layer_failed(layer: int, error: InvalidTensors) -> TransferFailed:
    """Why a transfer ends whose layer has invalid tensors."""
    kind = ProtocolMismatch if error.reason == "layout_version" else TransferFailed
    return kind(f"layer {layer}: {error}", reason=error.reason)


@dataclass(frozen=True, kw_only=True)
class _Incoming:
    """An open transfer. Used only by the block server's thread."""

    sequence: Sequence
    writer: CacheWriter
    started_s: float
    span: Span


class CacheReceiver:
    """Implements `BlockSink`. All methods are called from one thread.

    An error in a transfer closes its sequence at once, so the request fails without waiting for the lease.

    Args:
        ranks: the worker's other ranks, which get their heads of each layer.
        prompts: gets the prompts that siblings share.
        submit: passes a complete sequence and its first token to the engine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        arena: ByteArena,
        reservations: Reservations,
        metrics: DecodeMetrics,
        *,
        prompts: SharedPrompts,
        clock: Callable[[], float],
        submit: Callable[[Sequence, SampledToken], None],
        ranks: DecodeRanks | None = None,
    ) -> None:
        self._ranks = ranks
        self._spec = spec
        self._part_spec = spec if ranks is None else ranks.spec
        """Of the heads whose blocks are taken here."""
        self._arena = arena
        self._reservations = reservations
        self._metrics = metrics
        self._prompts = prompts
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
        span = begin("receive", context_of({"traceparent": manifest.traceparent}))
        self._incoming[manifest.key] = _Incoming(
            sequence=sequence, writer=writer, started_s=self._clock(), span=span
        )

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        """See `BlockSink.begin_layer`."""
        with self._in_transfer(key) as incoming:
            incoming.writer.begin_layer(header)

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        """See `BlockSink.write`."""
        with self._in_transfer(header.key) as incoming:
            incoming.writer.write(header, payload)

    def commit(self, end: EndRecord) -> None:
        """See `BlockSink.commit`."""
        with self._in_transfer(end.key) as incoming:
            sequence = incoming.sequence
            first_token = checked_first_token(end.first_token, sequence.request, self._spec)
            sequence.caches = incoming.writer.finish()
            sequence.written = written_so_far(self._arena.device)
            if all(cache.format.is_plain for cache in sequence.caches):
                sequence.positions = tuple([cache.positions for cache in sequence.caches])
            sequence.arrived = first_token, incoming.started_s
            is_whole = self._is_whole(sequence)
        del self._incoming[end.key]
        incoming.span.end()
        if is_whole:
            self._begin(sequence)

    def late_block(self) -> None:
        """A block without a current reservation has arrived, here or at another rank. Any thread may call
        this."""
        self._metrics.late_blocks.inc()

    def awaits(self, key: TransferKey) -> bool:
        """Whether a reservation with this key waits for blocks. Any thread may call this."""
        with contextlib.suppress(LeaseExpired):
            return self._reservations.find(key).state in (SequenceState.RESERVED, SequenceState.IN_TRANSFER)
        return False

    def part_arrived(self, rank: int, part: PartArrived) -> None:
        """Another rank has all blocks of its heads. Any thread may call this."""
        with contextlib.suppress(LeaseExpired):
            sequence = self._reservations.find(part.key)
            with sequence.lock:
                if sequence.state not in (SequenceState.RESERVED, SequenceState.IN_TRANSFER):
                    return
                sequence.parts[rank] = part
                try:
                    is_whole = sequence.arrived is not None and self._is_whole(sequence)
                except KvferryError as error:
                    sequence.close(error)
                    return
            if is_whole:
                self._begin(sequence)

    def part_failed(self, rank: int, part: PartFailed) -> None:
        """The transfer of another rank's heads has failed, and with it the request. Any thread may call
        this."""
        error = decode_nack(part.nack)
        self._metrics.receive_failed.labels(error.reason).inc()
        with contextlib.suppress(LeaseExpired):
            sequence = self._reservations.find(part.key)
            with sequence.lock:
                if sequence.state in (SequenceState.RESERVED, SequenceState.IN_TRANSFER):
                    message = f"rank {rank}: {error.message}"
                    sequence.close(type(error)(message, reason=error.reason))

    def _is_whole(self, sequence: Sequence) -> bool:
        """Whether all ranks have the sequence, which then is READY. The caller has locked it.

        Raises: ProtocolMismatch: their parts do not belong together.
        """
        if self._ranks is not None:
            if len(sequence.parts) < self._ranks.num_ranks - 1:
                return False
            self._ranks.put_together(sequence)
        sequence.release_retained()
        if sequence.request.num_siblings:
            self._prompts.put(sequence)
        self._arena.advance(sequence.allocation, "running")
        sequence.committed_s = self._clock()
        sequence.state = SequenceState.READY
        return True

    def _begin(self, sequence: Sequence) -> None:
        assert sequence.arrived is not None
        assert sequence.committed_s is not None
        first_token, started_s = sequence.arrived
        sequence.events.put(TransferAccepted(transfer_s=sequence.committed_s - started_s))
        sequence.enter_stage("first step")
        self._submit(sequence, first_token)

    def abort(self, key: TransferKey, reason: str) -> None:
        """See `BlockSink.abort`."""
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            return
        self._metrics.receive_failed.labels(reason).inc()
        incoming.span.end()
        with incoming.sequence.lock:
            if incoming.sequence.state is SequenceState.IN_TRANSFER:
                message = f"the transfer of the prompt's KV failed: {reason}"
                incoming.sequence.close(TransferFailed(message, reason=reason))

    @contextlib.contextmanager
    def _in_transfer(self, key: TransferKey) -> Iterator[_Incoming]:
        """An open transfer, under its sequence's lock. An error closes the sequence.

        Raises: LeaseExpired: the transfer or its reservation has ended.
        """
        incoming = self._incoming.get(key)
        sequence = incoming.sequence if incoming is not None else None
        with sequence.lock if sequence is not None else contextlib.nullcontext():
            if incoming is None or sequence is None or sequence.state is not SequenceState.IN_TRANSFER:
                self.late_block()
                reservation = f"transfer {key.transfer_id:#x}, generation {key.generation}"
                raise LeaseExpired(f"the reservation of {reservation} has ended", reason="reservation_ended")
            try:
                yield incoming
            except KvferryError as error:
                sequence.close(error)
                raise

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
                chain = sequence.pinned.chain if sequence.pinned is not None else None
                check_transfer(manifest, sequence.resolved, chain, self._part_spec)
                self._lay_out_measured(manifest, sequence)
            except KvferryError as error:
                sequence.close(error)
                raise
            self._arena.advance(sequence.allocation, "in_transfer")
            sequence.state = SequenceState.IN_TRANSFER
            sequence.manifest = manifest
            pinned = sequence.pinned
            if not manifest.retained_transfer_id or pinned is None:
                if self._ranks is None:  # others may need them
                    sequence.release_retained()
                pinned = None
            else:
                pinned = pinned.first(manifest.retained_depth, manifest.retained_tokens)
                if self._ranks is not None:
                    pinned = pinned.of_heads(0, self._part_spec.num_kv_heads)
            buffer = self._arena.buffer(sequence.allocation)
            return sequence, CacheWriter(sequence.layout, buffer, self._copier, pinned=pinned)

    def _lay_out_measured(self, manifest: Manifest, sequence: Sequence) -> None:
        """Lay the rows that prefill measured out in the reserved bytes, which suffice for any division."""
        if not is_measured(sequence.resolved):
            return
        sequence.plan = measured_plan(manifest, sequence.resolved)
        with_room = replace(sequence.plan, max_new_tokens=sequence.room)
        stores = sequence.request.store_history
        formats = make_formats(self._part_spec, with_room, returns_generated=stores)
        sequence.layout = sequence_layout(formats)
        size_bytes, reserved_bytes = sequence.layout.size_bytes, sequence.allocation.size_bytes
        assert size_bytes <= reserved_bytes, (size_bytes, reserved_bytes)


def check_transfer(
    manifest: Manifest, resolved: ResolvedPlan, chain: RetainedChain | None, spec: ModelSpec
) -> None:
    """Check a manifest against the plan and the retained rows of its reservation.

    Args: spec: of the heads that are received.
    Raises: ProtocolMismatch: the manifest is not of the transfer that was reserved for.
    """
    expected: dict[str, Any] = {
        "purpose": "cache",
        **model_fields(spec),
        "start": 0,
        "num_tokens": resolved.num_prompt_tokens,
        "plan_digest": plan_digest(resolved),
    }
    if not is_measured(resolved):
        expected["layer_rows"] = ()
    if manifest.retained_transfer_id:
        transfer_id, num_tokens, depth = (
            (chain.transfer_id, chain.num_tokens, chain.depth) if chain is not None else (0, 0, 0)
        )
        expected["retained_transfer_id"] = transfer_id
        expected["retained_tokens"] = min(manifest.retained_tokens, num_tokens)
        expected["retained_depth"] = max(1, min(manifest.retained_depth, depth))
    check_manifest(manifest, expected)


def measured_plan(manifest: Manifest, resolved: ResolvedPlan) -> ResolvedPlan:
    """The plan with the rows that prefill measured, if it measures them.

    Raises: ProtocolMismatch: they do not belong to the plan.
    """
    if not is_measured(resolved):
        return resolved
    try:
        return with_layer_rows(resolved, manifest.layer_rows)
    except ValueError as error:
        message = f"the manifest's layer_rows: {error}"
        raise ProtocolMismatch(message, reason="manifest_layer_rows") from error


def checked_first_token(
    token: SampledToken | None, request: GenerateRequest, spec: ModelSpec
) -> SampledToken:
    """The token that prefill sampled for a request. Raises: TransferFailed: it cannot be that."""
    index = request.sampling.first_index
    if token is None or token.index != index or not 0 <= token.token_id < spec.vocab_size:
        raise TransferFailed(
            f"the prompt's first token is {token}; it must have index {index} and an id of 0 to "
            f"{spec.vocab_size - 1}",
            reason="first_token",
        )
    return token
