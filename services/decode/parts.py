"""The ranks of a decode worker, as everything else in it sees them: one or several, each with a `Part`, the
KV of its heads in memory of its own.

    memory, retained KV, prompts, history ── what each part is to do ──► rank 0: here
                                                 in one order for all └─► the others: `rank.py`

Everything that is decided is decided by the leading rank, of a sequence of all heads. Every rank, rank 0,
too, has a part, which allocates and decides nothing: all do the same in the same order, so that a range is
never written for two sequences.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvferry.kernels.decode_batch import Region
from kvferry.services.decode.receiver import Expected, PartArrived, PartReceiver, SequencePart
from kvferry.shared.cache.arena import Allocation, SequenceLayout, align
from kvferry.shared.cache.delta import PinnedRows, Positions, RetainedChain, RetainedRows, RowNumbers
from kvferry.shared.compression.formats import format_class
from kvferry.shared.compression.formats.interface import LayerCache, Tensors
from kvferry.shared.compression.presets import preset
from kvferry.shared.control.messages import GenerateRequest
from kvferry.shared.errors import (
    InvalidRequest,
    KvferryError,
    ProtocolMismatch,
    TransferFailed,
    WorkerUnavailable,
)
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.parallel.model import ParallelModel
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.worker import RankTransport
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.messages import TransferKey

DECODE_RANK = "kvferry.services.decode.rank:DecodeRank"
"""The class of the other ranks, for `load_parallel_model`."""
_START_TIMEOUT_S = 120.0
_RETURN_TIMEOUT_S = 180.0
"""A step may run first, whose exchanges have their own limit."""


@dataclass(eq=False, kw_only=True)
class RetainedPart:
    """One rank's rows of a sequence that has ended.

    Attributes:
        retained: of the rank's heads.
        rows: each layer's tensors of rows, `[H_kv, cap, D]` in the rank's memory.
    """

    retained: RetainedRows
    rows: tuple[tuple[Tensor, ...], ...]

    @property
    def whole_bytes(self) -> int:
        """Bytes of all rows of the prompt."""
        token_bytes = sum(tensor[:, :1].nbytes for tensors in self.rows for tensor in tensors)
        return token_bytes * self.retained.num_prompt_tokens


class Part:
    """Sequences, retained rows and shared prompts, each named by the id of the transfer that brought it.

    Args:
        memory: uint8, as large in all ranks; everything is at the same offsets.
        receiver: takes the blocks of the rank's heads.
    """

    def __init__(self, memory: Tensor, receiver: PartReceiver) -> None:
        self._memory = memory
        self.receiver = receiver
        self._heads = receiver.first_head, receiver.spec.num_kv_heads
        self._sequences: dict[int, SequencePart] = {}
        self._retained: dict[int, RetainedPart] = {}
        self._prompts: dict[int, tuple[LayerCache, ...]] = {}

    def arrived(self, name: int) -> SequencePart:
        """Return a sequence of which all blocks have arrived."""
        part = self._sequences[name]
        assert part.caches, f"the blocks of transfer {name:#x} are not here"
        return part

    def begin(
        self, key: TransferKey, allocation: Allocation, layout: SequenceLayout, expected: Expected | None
    ) -> SequencePart:
        """Begin a sequence, whose blocks may come from now on; None: it gets a copy of a shared prompt."""
        part = SequencePart(key=key, layout=layout, buffer=self._range(allocation), expected=expected)
        self._sequences[key.transfer_id] = part
        if expected is None:
            return part
        if expected.retained:
            found = [(self._retained[name], num_tokens) for name, num_tokens in expected.retained]
            chain = [replace(one.retained, num_tokens=num_tokens) for one, num_tokens in found]
            part.pinned = PinnedRows(
                chain=RetainedChain(selections=tuple(chain)), layers=tuple(one.rows for one, _ in found)
            )
        self.receiver.expect(part)
        return part

    def move(self, name: int, allocation: Allocation | None, layout: SequenceLayout) -> None:
        """Copy a sequence to other memory; None: to the host."""
        part = self.arrived(name)
        if allocation is None:
            buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
        else:
            buffer = self._range(allocation)
        for cache, layer in zip(part.caches, layout.layers, strict=True):
            cache.move(layer.format, layer.views(buffer))
        part.layout, part.buffer = layout, buffer

    def share(self, name: int) -> None:
        """Copy a sequence's prompt to the host for its siblings, under its name."""
        part = self.arrived(name)
        buffer = torch.empty(part.layout.size_bytes, dtype=torch.uint8)
        self._prompts[name] = _copied(part.caches, part.layout, buffer)

    def copy(self, prompt: int, name: int) -> None:
        """Copy a shared prompt to the memory of a sequence that has begun."""
        part = self._sequences[name]
        part.caches = _copied(self._prompts[prompt], part.layout, part.buffer)

    def retain(self, name: int, rows: RetainedRows) -> RetainedPart:
        """Keep the rows of a sequence that has ended, under its name. Args: rows: of all heads."""
        part = self.arrived(name)
        tensors = [
            tuple(map(cache.regions.__getitem__, cache.format.shape.row_names)) for cache in part.caches
        ]
        retained = RetainedPart(retained=rows.of_heads(*self._heads), rows=tuple(tensors))
        self._retained[name] = retained
        self.drop_sequence(name)
        return retained

    def shrink(
        self, name: int, allocation: Allocation, rows: RetainedRows, numbers: list[RowNumbers]
    ) -> None:
        """Copy some of the retained rows to other memory.

        Args: rows: what is left; numbers: of the rows that are copied, of each layer; both of all heads.
        """
        part, (first, number) = self._retained[name], self._heads
        own_numbers = [layer_numbers[first : first + number] for layer_numbers in numbers]
        regions, _ = retained_layout(part.rows, own_numbers)
        buffer = self._range(allocation)
        copied: list[tuple[Tensor, ...]] = []
        for tensors, places, chosen in zip(part.rows, regions, own_numbers, strict=True):
            index = torch.from_numpy(chosen)[:, :, None].to(tensors[0].device)
            targets = tuple([place.view(buffer) for place in places])
            for source, target in zip(tensors, targets, strict=True):
                target.copy_(source.gather(1, index.expand(-1, -1, source.shape[-1])))
            copied.append(targets)
        part.retained, part.rows = rows.of_heads(first, number), tuple(copied)

    def returned(self, name: int, num_appended: int) -> list[Tensors]:
        """Return what `LayerCache.returned` gives for each layer, on the host."""
        return [cache.returned(num_appended) for cache in self.arrived(name).caches]

    def drop_sequence(self, name: int) -> None:
        """Forget a sequence, and write no more of its blocks. Idempotent, as the other two."""
        if (part := self._sequences.pop(name, None)) is not None:
            self.receiver.forget(part)
            part.caches = ()

    def drop_retained(self, name: int) -> None:
        self._retained.pop(name, None)

    def drop_prompt(self, name: int) -> None:
        self._prompts.pop(name, None)

    def _range(self, allocation: Allocation) -> Tensor:
        return self._memory[allocation.offset : allocation.offset + allocation.size_bytes]


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
        self._listener: Any
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

    def listen(self, listener: Any) -> None:
        """Tell this listener how the parts arrive. Args: listener: a `Reservations`."""
        self._listener = listener

    def start(self, transport: RankTransport | None, max_batch_size: int) -> None:
        """Have the other ranks take memory and listen for the blocks of their heads; waits until they do.

        Raises: ConfigurationError: one cannot listen.
        """
        if self._lead is None:
            return

        def on_note(rank: int, note: tuple[Any, ...] | None) -> None:
            if note is not None:
                with suppress(KvferryError):  # its request has been given the error
                    getattr(self._listener, note[0])(rank, *note[1:])

        self._lead.on_note = on_note
        self._lead.on_question = lambda rank, key: self._listener.awaits(key)
        start = self._lead.ask("start", self._memory_bytes, max_batch_size, transport)
        self.endpoints = tuple(start(timeout_s=_START_TIMEOUT_S))

    def methods(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of these methods that can be divided among this worker's ranks."""
        if self.num_ranks == 1:
            return names
        return tuple(name for name in names if format_class(preset(name).representation).divides)

    def check(self, layout: SequenceLayout, method: str) -> None:
        """Check the layers. Raises: InvalidRequest: a format, of another package, cannot be divided."""
        for layer in layout.layers if self.num_ranks > 1 else ():
            if not layer.format.divides:
                raise InvalidRequest(
                    f"format {layer.format.name!r} of method {method!r} cannot be divided among the "
                    f"{self.num_ranks} ranks of this decode worker",
                    param="kv_compression.method",
                    reason="ranks",
                )

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of every rank's part. Returns: what rank 0's has returned.

        Raises: WorkerUnavailable: a rank is lost.
        """
        self.tell_others(name, *args)
        return getattr(self.own, name)(*args)

    def tell_others(self, name: str, *args: Any) -> None:
        """Call a method in the other ranks; also those of `DecodeRank` that place sequences in slots."""
        if self._lead is not None:
            self._flush()
            self._lead.call(name, *args)

    def returned(self, name: int, num_appended: int) -> Callable[[], list[Tensors]]:
        """Have every rank copy the rows that go to a sequence's history, as they are now. Returns: a function
        that waits for all heads of each layer."""
        own = self.own.returned(name, num_appended)
        if self._lead is None:
            return lambda: own
        self._flush()
        answers = self._lead.ask("pickled", "returned", name, num_appended)

        def joined() -> list[Tensors]:
            parts = [own, *map(pickle.loads, answers(timeout_s=_RETURN_TIMEOUT_S))]
            return [
                {name: torch.cat([tensors[name] for tensors in of_layer]) for name in of_layer[0]}
                for of_layer in zip(*parts, strict=True)
            ]

        return joined

    def positions(self, arrived: Mapping[int, PartArrived]) -> tuple[Positions | None, ...]:
        """Put together the positions of all heads' rows. Args: arrived: by rank.

        Raises: ProtocolMismatch: prefill measured other rows for some heads than for others.
        """
        own, *others = [arrived[rank] for rank in range(self.num_ranks)]
        for rank, part in enumerate(others, 1):
            if part.layer_rows != own.layer_rows:
                raise ProtocolMismatch(
                    f"the manifest's layer_rows for rank {rank} are {part.layer_rows}; for rank 0 they are "
                    f"{own.layer_rows}",
                    reason="manifest_layer_rows",
                )
        of_ranks = zip(own.positions, *[part.positions for part in others], strict=True)
        return tuple([None if layer[0] is None else np.concatenate(layer) for layer in of_ranks])

    def drop_sequence(self, name: int) -> None:
        """Forget a sequence that has ended."""
        with suppress(WorkerUnavailable):  # nothing is left of a lost rank
            self.tell_others("drop_sequence", name)
        self.own.drop_sequence(name)

    def drop_retained(self, name: int) -> None:
        """Forget rows that are not retained any more."""
        with suppress(WorkerUnavailable):
            self.tell_others("drop_retained", name)
        self.own.drop_retained(name)

    def drop_prompt(self, name: int) -> None:
        """Forget a shared prompt: here at once, elsewhere before the next call, because this may be called
        anywhere."""
        self.own.drop_prompt(name)
        if self._lead is not None:
            self._dropped.append(name)

    def _flush(self) -> None:
        assert self._lead is not None, "there are other ranks"
        while self._dropped:
            self._lead.call("drop_prompt", self._dropped.popleft())


def _copied(caches: tuple[LayerCache, ...], layout: SequenceLayout, buffer: Tensor) -> tuple[LayerCache, ...]:
    layers = zip(caches, layout.layers, strict=True)
    return tuple([cache.copied(layer.format, layer.views(buffer)) for cache, layer in layers])


def retained_layout(
    rows: tuple[tuple[Tensor, ...], ...], numbers: list[RowNumbers]
) -> tuple[list[list[Region]], int]:
    """Return regions for these rows of each layer, and the bytes of all regions."""
    layers, offset = [], 0
    for tensors, row_numbers in zip(rows, numbers, strict=True):
        regions = []
        for tensor in tensors:
            shape = (*row_numbers.shape, tensor.shape[-1])
            region = Region(offset=offset, shape=shape, dtype=tensor.dtype)
            offset += align(region.size_bytes)
            regions.append(region)
        layers.append(regions)
    return layers, offset


def checked_first_token(
    token: SampledToken | None, request: GenerateRequest, spec: ModelSpec, draft: tuple[int, ...] = ()
) -> SampledToken:
    """Return the token that prefill sampled for a request, after those of a draft.

    Raises: TransferFailed: the token or the draft cannot belong to the request.
    """
    index = request.sampling.first_index + len(draft)
    if token is None or token.index != index or not 0 <= token.token_id < spec.vocab_size:
        raise TransferFailed(
            f"the prompt's first token is {token}; it must have index {index} and an id of 0 to "
            f"{spec.vocab_size - 1}",
            reason="first_token",
        )
    if draft and (request.num_siblings or max(draft) >= spec.vocab_size):
        raise TransferFailed(
            f"the prompt's draft has {len(draft)} tokens of ids up to {max(draft)}; ids of 0 to "
            f"{spec.vocab_size - 1} are allowed, and no draft where {request.num_siblings} siblings share it",
            reason="draft",
        )
    return token
