"""One rank's part of a decode worker: the KV of its heads, in memory of its own.

Every rank has one, rank 0, too. It allocates and decides nothing: `parts.py` has all of them do the same in
the same order, so that a range is never written for two sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvferry.kernels.decode_batch import Region
from kvferry.services.decode.receiver import Expected, PartReceiver, SequencePart
from kvferry.shared.cache.arena import Allocation, SequenceLayout, align
from kvferry.shared.cache.delta import PinnedRows, RetainedChain, RetainedRows, RowNumbers
from kvferry.shared.compression.formats.interface import LayerCache, Tensors
from kvferry.shared.wire.messages import TransferKey


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
        self._sequences: dict[int, SequencePart] = {}
        self._retained: dict[int, RetainedPart] = {}
        self._prompts: dict[int, tuple[LayerCache, ...]] = {}

    def arrived(self, name: int) -> SequencePart:
        """A sequence whose blocks are all there."""
        part = self._sequences[name]
        assert part.caches, f"the blocks of transfer {name:#x} are not here"
        return part

    def retained(self, name: int) -> RetainedPart:
        return self._retained[name]

    # ---- what all ranks do -------------------------------------------------------------------------------

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

    def retain(self, name: int, rows: RetainedRows) -> None:
        """Keep the rows of a sequence that has ended, under its name. Args: rows: of the rank's heads."""
        part = self.arrived(name)
        tensors = [
            tuple(map(cache.regions.__getitem__, cache.format.shape.row_names)) for cache in part.caches
        ]
        self._retained[name] = RetainedPart(retained=rows, rows=tuple(tensors))
        self.drop(sequences=(name,))

    def shrink(
        self, name: int, allocation: Allocation, rows: RetainedRows, numbers: list[RowNumbers]
    ) -> None:
        """Copy some of the retained rows to other memory.

        Args: rows: what is left; numbers: of the rows that are copied, of each layer; of the rank's heads.
        """
        part = self._retained[name]
        regions, _ = retained_layout(part.rows, numbers)
        part.rows = _copied_rows(part.rows, regions, self._range(allocation), numbers)
        part.retained = rows

    def returned(self, name: int, num_appended: int) -> list[Tensors]:
        """What `LayerCache.returned` gives of each layer, on the host."""
        return [cache.returned(num_appended) for cache in self.arrived(name).caches]

    def drop(
        self,
        sequences: tuple[int, ...] = (),
        retained: tuple[int, ...] = (),
        prompts: tuple[int, ...] = (),
    ) -> None:
        """Forget what has these names. Those that are unknown are ignored."""
        for name in sequences:
            if (part := self._sequences.pop(name, None)) is not None:
                self.receiver.forget(part)
                part.caches = ()
        for name in retained:
            self._retained.pop(name, None)
        for name in prompts:
            self._prompts.pop(name, None)

    def _range(self, allocation: Allocation) -> Tensor:
        return self._memory[allocation.offset : allocation.offset + allocation.size_bytes]


def _copied(caches: tuple[LayerCache, ...], layout: SequenceLayout, buffer: Tensor) -> tuple[LayerCache, ...]:
    layers = zip(caches, layout.layers, strict=True)
    return tuple([cache.copied(layer.format, layer.views(buffer)) for cache, layer in layers])


def retained_layout(
    rows: tuple[tuple[Tensor, ...], ...], numbers: list[RowNumbers]
) -> tuple[list[list[Region]], int]:
    """Regions for these rows of each layer, and the bytes of all."""
    layers, offset = [], 0
    for tensors, its in zip(rows, numbers, strict=True):
        regions = []
        for tensor in tensors:
            shape = (*its.shape, tensor.shape[-1])
            region = Region(offset=offset, shape=shape, dtype=tensor.dtype)
            offset += align(region.size_bytes)
            regions.append(region)
        layers.append(regions)
    return layers, offset


def _copied_rows(
    rows: tuple[tuple[Tensor, ...], ...],
    regions: list[list[Region]],
    buffer: Tensor,
    numbers: list[RowNumbers],
) -> tuple[tuple[Tensor, ...], ...]:
    """Copy rows of each layer to these regions of a buffer. Args: numbers: of the rows, int64 `[H_kv, m]`."""
    layers = []
    for tensors, places, chosen in zip(rows, regions, numbers, strict=True):
        index = torch.from_numpy(chosen)[:, :, None].to(tensors[0].device)
        targets = tuple([place.view(buffer) for place in places])
        for source, target in zip(tensors, targets, strict=True):
            target.copy_(source.gather(1, index.expand(-1, -1, source.shape[-1])))
        layers.append(targets)
    return tuple(layers)
