"""The ranks of a decode worker, as everything else in it sees them: one or several, each with a `Part`.

    memory, retained KV, prompts, history ── what each part is to do ──► rank 0: here
                                                 in one order for all └─► the others: `rank.py`

Everything that is decided is decided here, by the leading rank, of a sequence of all heads.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvferry.services.decode.part import Part
from kvferry.services.decode.receiver import PartArrived, PartReceiver, measured_plan
from kvferry.services.decode.sequence import Reservations, Sequence, SequenceState, written_so_far
from kvferry.shared.cache.arena import ByteArena, SequenceLayout
from kvferry.shared.compression.formats import format_class
from kvferry.shared.compression.formats.interface import Tensors
from kvferry.shared.compression.presets import preset
from kvferry.shared.control.messages import GenerateRequest, TransferAccepted
from kvferry.shared.errors import (
    InvalidRequest,
    KvferryError,
    LeaseExpired,
    ProtocolMismatch,
    TransferFailed,
    WorkerUnavailable,
)
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.parallel.model import ParallelModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.worker import RankTransport
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry.metrics import DecodeMetrics
from kvferry.shared.telemetry.tracing import begin, context_of
from kvferry.shared.wire.messages import Manifest, TransferKey

DECODE_RANK = "kvferry.services.decode.rank:DecodeRank"
"""The class of the other ranks, for `load_parallel_model`."""
_START_TIMEOUT_S = 120.0
_RETURN_TIMEOUT_S = 180.0
"""A step may run first, whose exchanges have their own limit."""
_ARRIVING = (SequenceState.RESERVED, SequenceState.IN_TRANSFER)


class Parts:
    """Has every rank's part do the same. Any thread may call its methods, in the order to be followed.

    Attributes:
        spec: of one rank's heads.
        own: rank 0's part.
        endpoints: where the other ranks take the blocks of their heads.
        returning: to be locked around `returned` and the function that it returns.

    Args:
        model: a `ParallelModel`'s followers are `DECODE_RANK`s.
        memory: rank 0's, uint8.
    """

    def __init__(self, model: LanguageModel, memory: torch.Tensor) -> None:
        self._lead = model.lead if isinstance(model, ParallelModel) else None
        self.num_ranks = model.num_ranks
        self.spec = model.part_spec if isinstance(model, ParallelModel) else model.spec
        self.endpoints: tuple[str, ...] = ()
        self.returning = threading.Lock()
        self._listener: Arrivals
        self._dropped: deque[int] = deque()
        receiver = PartReceiver(
            self.spec,
            first_head=0,
            device=memory.device,
            note=lambda name, *args: getattr(self._listener, name)(0, *args),
            ask=lambda key, timeout_s: self._listener.awaits(key),
        )
        self.own = Part(memory, receiver)
        self._memory_bytes = len(memory)

    def listen(self, listener: Arrivals) -> None:
        """Tell this listener how the parts arrive."""
        self._listener = listener

    def start(self, transport: RankTransport | None, max_batch_size: int) -> None:
        """Have the other ranks take memory and listen for the blocks of their heads; waits until they do.

        Raises: ConfigurationError: one cannot listen.
        """
        if self._lead is None:
            return

        def on_note(rank: int, note: tuple[Any, ...] | None) -> None:
            if note is not None:
                with suppress(KvferryError):  # its request has been told
                    getattr(self._listener, note[0])(rank, *note[1:])

        self._lead.on_note = on_note
        self._lead.on_question = lambda rank, key: self._listener.awaits(key)
        start = self._lead.ask("start", self._memory_bytes, max_batch_size, transport)
        self.endpoints = tuple(start(timeout_s=_START_TIMEOUT_S))

    def methods(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of these methods that can be divided among so many ranks."""
        if self.num_ranks == 1:
            return names
        return tuple(name for name in names if format_class(preset(name).representation).divides)

    def check(self, layout: SequenceLayout, method: str) -> None:
        """Raises: InvalidRequest: a layer's format, of another package, cannot be divided."""
        for layer in layout.layers if self.num_ranks > 1 else ():
            if not layer.format.divides:
                raise InvalidRequest(
                    f"format {layer.format.name!r} of method {method!r} cannot be divided among the "
                    f"{self.num_ranks} ranks of this decode worker",
                    param="kv_compression.method",
                    reason="ranks",
                )

    # ---- calls -------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of every rank's part. Returns: what rank 0's has returned.

        Raises: WorkerUnavailable: a rank is lost.
        """
        self.tell_others(name, *args)
        return getattr(self.own, name)(*args)

    def call_by_heads(self, name: str, args: Callable[[int, int], tuple[Any, ...]]) -> None:
        """As `call`. Args: args: a rank's arguments, given its first head and the number of its heads."""
        number = self.spec.num_kv_heads
        own, *others = [args(rank * number, number) for rank in range(self.num_ranks)]
        if self._lead is not None:
            self._flush()
            self._lead.call_each(name, others)
        getattr(self.own, name)(*own)

    def tell_others(self, name: str, *args: Any) -> None:
        """Call a method in the other ranks; also those of `DecodeRank` that place sequences in slots."""
        if self._lead is not None:
            self._flush()
            self._lead.call(name, *args)

    def returned(self, name: int, num_appended: int) -> Callable[[], list[Tensors]]:
        """Have every rank copy what a sequence's history gets, as it is now. Returns: a function that waits
        for all heads of each layer."""
        own = self.own.returned(name, num_appended)
        if self._lead is None:
            return lambda: own
        self._flush()
        answers = self._lead.ask("pickled", "returned", name, num_appended)

        def joined() -> list[Tensors]:
            parts = [own, *map(pickle.loads, answers(timeout_s=_RETURN_TIMEOUT_S))]
            return [
                {name: torch.cat([its[name] for its in of_layer]) for name in of_layer[0]}
                for of_layer in zip(*parts, strict=True)
            ]

        return joined

    def drop(self, *, sequence: int | None = None, retained: int | None = None) -> None:
        """Forget a sequence that has ended, or rows that are not retained any more."""
        sequences = () if sequence is None else (sequence,)
        rows = () if retained is None else (retained,)
        with suppress(WorkerUnavailable):  # nothing is left of a lost rank
            self.tell_others("drop", sequences, rows)
        self.own.drop(sequences, rows)

    def drop_prompt(self, prompt: int) -> None:
        """Forget a shared prompt: here at once, elsewhere before the next call, because this may be called
        anywhere."""
        self.own.drop((), (), (prompt,))
        if self._lead is not None:
            self._dropped.append(prompt)

    def _flush(self) -> None:
        assert self._lead is not None, "there are other ranks"
        while self._dropped:
            self._lead.call("drop", (), (), (self._dropped.popleft(),))


class Arrivals:
    """What becomes of the parts of transfers: a sequence begins once every rank has its part, and ends with
    the first that fails. Its methods note how a rank's part fares; those of one rank come in order, and any
    thread may bring them.

    An error in a transfer closes its sequence at once, so the request fails without waiting for the lease.

    Args:
        spec: of all heads.
        share: is given the sequences whose prompt siblings share.
        submit: passes a complete sequence and its first token to the engine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: Parts,
        arena: ByteArena,
        reservations: Reservations,
        metrics: DecodeMetrics,
        *,
        share: Callable[[Sequence], None],
        clock: Callable[[], float],
        submit: Callable[[Sequence, SampledToken], None],
    ) -> None:
        self._spec = spec
        self._num_ranks = parts.num_ranks
        self._arena = arena
        self._reservations = reservations
        self._metrics = metrics
        self._share = share
        self._clock = clock
        self._submit = submit

    def awaits(self, key: TransferKey) -> bool:
        """Whether a reservation with this key waits for blocks."""
        with suppress(LeaseExpired):
            return self._reservations.find(key).state in _ARRIVING
        return False

    def began(self, rank: int, key: TransferKey, manifest: Manifest) -> None:
        """A rank has accepted the transfer of its part. Args: manifest: of the part."""
        with suppress(LeaseExpired):
            sequence = self._reservations.find(key)
            with sequence.lock:
                if sequence.state not in _ARRIVING:
                    return
                sequence.num_without_retained += not manifest.retained_transfer_id
                if sequence.num_without_retained == self._num_ranks:
                    sequence.release_retained()
                if rank == 0:
                    sequence.manifest = manifest
                    sequence.plan = measured_plan(manifest, sequence.resolved)
                    sequence.began_s = self._clock()
                    sequence.span = begin("receive", context_of({"traceparent": manifest.traceparent}))
                if sequence.state is SequenceState.RESERVED:
                    self._arena.advance(sequence.allocation, "in_transfer")
                    sequence.state = SequenceState.IN_TRANSFER

    def arrived(
        self, rank: int, key: TransferKey, part: PartArrived, first_token: SampledToken | None
    ) -> None:
        """A rank has all blocks of its heads. Args: first_token: comes with rank 0's.

        Raises: LeaseExpired: the sequence has ended; KvferryError: why it ends now.
        """
        sequence = self._reservations.find(key)
        with sequence.lock:
            if sequence.state not in _ARRIVING:
                message = f"the reservation of transfer {key.transfer_id:#x} has ended"
                raise LeaseExpired(message, reason="reservation_ended")
            try:
                if rank == 0:
                    sequence.first_token = checked_first_token(first_token, sequence.request, self._spec)
                    sequence.written = written_so_far(self._arena.device)
                    sequence.own_bytes = part.prompt_bytes
                sequence.arrived[rank] = part
                if len(sequence.arrived) < self._num_ranks:
                    return
                self._put_together(sequence)
            except KvferryError as error:
                self._metrics.receive_failed.labels(error.reason).inc()
                sequence.close(error)
                raise
            sequence.release_retained()
            if sequence.request.num_siblings:
                self._share(sequence)
            self._arena.advance(sequence.allocation, "running")
            sequence.committed_s = self._clock()
            sequence.state = SequenceState.READY
        assert sequence.first_token is not None, "rank 0's part is here"
        sequence.events.put(TransferAccepted(transfer_s=sequence.committed_s - sequence.began_s))
        sequence.enter_stage("first step")
        self._submit(sequence, sequence.first_token)

    def failed(self, rank: int, key: TransferKey, error: KvferryError) -> None:
        """The transfer of a rank's part has failed, and with it the request."""
        self._metrics.receive_failed.labels(error.reason).inc()
        with suppress(LeaseExpired):
            sequence = self._reservations.find(key)
            with sequence.lock:
                if sequence.state in _ARRIVING:
                    if self._num_ranks > 1:
                        error = type(error)(f"rank {rank}: {error.message}", reason=error.reason)
                    sequence.close(error)

    def refused(self, rank: int, reason: str) -> None:
        """A rank has refused a transfer that harms no reservation."""
        self._metrics.receive_failed.labels(reason).inc()

    def late_block(self, rank: int) -> None:
        """A block without a current reservation has arrived."""
        self._metrics.late_blocks.inc()

    def _put_together(self, sequence: Sequence) -> None:
        """What is known of a sequence of all heads.

        Raises: ProtocolMismatch: prefill measured other rows for some heads than for others.
        """
        own, *others = [sequence.arrived[rank] for rank in range(self._num_ranks)]
        for rank, part in enumerate(others, 1):
            if part.layer_rows != own.layer_rows:
                raise ProtocolMismatch(
                    f"the manifest's layer_rows for rank {rank} are {part.layer_rows}; for rank 0 they are "
                    f"{own.layer_rows}",
                    reason="manifest_layer_rows",
                )
        sequence.prompt_bytes = own.prompt_bytes + sum([part.prompt_bytes for part in others])
        of_ranks = zip(own.positions, *[part.positions for part in others], strict=True)
        sequence.positions = tuple(
            [None if layer[0] is None else np.concatenate(layer) for layer in of_ranks]
        )


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
