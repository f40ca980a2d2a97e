"""The byte arena: one uint8 tensor per device for the KV of all sequences of a decode worker.

Admission reserves ranges of it, the receiver writes to them, and the engine reads and appends. The arena
manages bytes, owners and states and never reads or writes the contents. A sequence's layout places the
regions of each layer's format in its range; decode computes it at admission, before any byte arrives:

    sequence: | layer 0: region | region ... | layer 1: region | ... |      each aligned to ALIGNMENT_BYTES
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from kvferry.kernels.decode_batch import Region
from kvferry.shared.compression.formats import compacted
from kvferry.shared.compression.formats.interface import LayerCache, LayerFormat, Specs, Tensors
from kvferry.shared.compression.interface import TensorSpec
from kvferry.shared.errors import CapacityExceeded, InvalidRequest, KvferryError

ALIGNMENT_BYTES = 64

AllocationState = Literal["reserved", "in_transfer", "running", "retained"]
"""In the order in which an allocation passes through them."""
_NEXT_STATES: dict[AllocationState, AllocationState] = dict(itertools.pairwise(get_args(AllocationState)))
_MAX_GENERATION = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A byte range and its owner.

    Attributes:
        offset, size_bytes: multiples of ALIGNMENT_BYTES.
        owner: request id.
        generation: u32, new for every allocation.
    """

    offset: int
    size_bytes: int
    owner: str
    generation: int


class ByteArena:
    """First-fit allocator with coalescing over one uint8 tensor. Thread-safe.

        0                                                              size_bytes
        | reserved | running |   free   | in_transfer |      free      |

        reserve ──► reserved ──► in_transfer ──► running ──► retained ──► free
           │            └──────────────┴────────────┴────────────────────► free
           └──────── a running sequence moves ─────► running

    Free ranges are sorted by offset and never adjacent. Allocations and free ranges together tile the arena
    exactly, which `check_integrity` verifies. Only the owner of an allocation may read or write its range,
    and it must stop before it frees the range. `lock` guards every change, so under the lock the bytes of all
    states sum to the total.

    Args: size_bytes: rounded down to ALIGNMENT_BYTES.
    Attributes: memory: all bytes, uint8 `[size_bytes]`.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.lock = threading.RLock()
        self.memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)] if self.size_bytes else []
        self._allocations: dict[int, Allocation] = {}
        self._states: dict[int, AllocationState] = {}
        self._bytes = dict.fromkeys(("free", *get_args(AllocationState)), 0) | {"free": self.size_bytes}
        self._generation = 0

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def free_bytes(self) -> int:
        return self._bytes["free"]

    def bytes_by_state(self) -> dict[str, int]:
        """Count bytes that are free, reserved, in_transfer, running and retained; they sum to
        `size_bytes`."""
        with self.lock:
            return dict(self._bytes)

    @property
    def largest_free_bytes(self) -> int:
        """The bytes of the largest free range."""
        with self.lock:
            return max((size for _, size in self._free), default=0)

    def can_be_lower(self, allocation: Allocation) -> bool:
        """Return whether the allocation would get a lower offset if it were freed and reserved again."""
        with self.lock:
            return any(
                offset < allocation.offset
                and (size >= allocation.size_bytes or offset + size == allocation.offset)
                for offset, size in self._free
            )

    def reserve(self, size_bytes: int, *, owner: str, state: AllocationState = "reserved") -> Allocation:
        """Take the first free range that is large enough.

        Args: state: "running" for a sequence that has arrived already and moves.

        Raises:
            InvalidRequest: the size is larger than the whole arena.
            CapacityExceeded: no free range is large enough now (reason `arena_full`).
        """
        needed = self.check_fits(size_bytes)
        with self.lock:
            offset = self._take(needed)
            self._generation = self._generation % _MAX_GENERATION + 1
            allocation = Allocation(
                offset=offset, size_bytes=needed, owner=owner, generation=self._generation
            )
            self._allocations[offset] = allocation
            self._states[offset] = state
            self._move(needed, "free", state)
            return allocation

    def needed_bytes(self, size_bytes: int) -> int:
        """Return the bytes that an allocation of this size takes."""
        return max(align(size_bytes), ALIGNMENT_BYTES)

    def check_fits(self, size_bytes: int) -> int:
        """Return the bytes that an allocation of this size takes.

        Raises:
            InvalidRequest: they are more than the whole arena.
        """
        needed = self.needed_bytes(size_bytes)
        if needed > self.size_bytes:
            raise InvalidRequest(
                f"the request needs {needed} bytes of decode memory; the arena has {self.size_bytes} in all",
                reason="too_large",
            )
        return needed

    def advance(self, allocation: Allocation, state: AllocationState) -> None:
        """Move an allocation to its next state.

        Raises:
            KvferryError: the allocation does not exist, or the state is not the next one.
        """
        with self.lock:
            current = self._state_of(allocation)
            if state != _NEXT_STATES.get(current):
                raise KvferryError(
                    f"allocation of {allocation.owner!r} is {current}; it may become "
                    f"{_NEXT_STATES.get(current, 'free only')}, not {state}"
                )
            self._states[allocation.offset] = state
            self._move(allocation.size_bytes, current, state)

    def state(self, allocation: Allocation) -> AllocationState:
        """Return the allocation's state. Raises KvferryError if the allocation does not exist."""
        with self.lock:
            return self._state_of(allocation)

    def free(self, allocation: Allocation) -> None:
        """Release a range and join it with adjacent free ranges.

        Raises:
            KvferryError: the allocation does not exist (freed already, or of an older generation).
        """
        with self.lock:
            state = self._state_of(allocation)
            del self._allocations[allocation.offset], self._states[allocation.offset]
            self._give_back(allocation.offset, allocation.size_bytes, state)

    def buffer(self, allocation: Allocation) -> Tensor:
        """Return the allocation's bytes, uint8 `[size_bytes]`. Raises KvferryError if it does not exist."""
        with self.lock:
            self._state_of(allocation)
        return self.memory[allocation.offset : allocation.offset + allocation.size_bytes]

    def check_integrity(self) -> None:
        """Verify that allocations and free ranges tile the arena and that the bytes by state agree.

        Raises:
            KvferryError: they do not; the message says where.
        """
        with self.lock:
            ranges = sorted(
                [(offset, size, "free") for offset, size in self._free]
                + [(a.offset, a.size_bytes, self._states[a.offset]) for a in self._allocations.values()]
            )
            counted = dict.fromkeys(self._bytes, 0)
            end, previous = 0, ""
            for offset, size, state in ranges:
                if offset != end or size <= 0 or (state == previous == "free"):
                    raise KvferryError(f"arena range ({offset}, {size}, {state}) does not follow byte {end}")
                counted[state] += size
                end, previous = offset + size, state
            if end != self.size_bytes or counted != self._bytes:
                raise KvferryError(
                    f"arena of {self.size_bytes} bytes: ranges {counted}, counts {self._bytes}"
                )

    def _give_back(self, start: int, size_bytes: int, state: AllocationState) -> None:
        """Add a range to the free ones, joined with its neighbours."""
        end = start + size_bytes
        i = bisect.bisect_left(self._free, (start, 0))
        if i < len(self._free) and self._free[i][0] == end:
            end += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end - start))
        self._move(size_bytes, state, "free")

    def _take(self, needed: int) -> int:
        for i, (offset, size) in enumerate(self._free):
            if size > needed:
                self._free[i] = (offset + needed, size - needed)
                return offset
            if size == needed:
                del self._free[i]
                return offset
        raise CapacityExceeded(
            f"the request needs {needed} bytes of decode memory; {self.free_bytes} of {self.size_bytes} are "
            f"free, the largest range {self.largest_free_bytes}",
            reason="arena_full",
        )

    def _state_of(self, allocation: Allocation) -> AllocationState:
        if self._allocations.get(allocation.offset) != allocation:
            raise KvferryError(
                f"allocation of {allocation.owner!r}, generation {allocation.generation}, does not exist"
            )
        return self._states[allocation.offset]

    def _move(self, size_bytes: int, source: str, target: str) -> None:
        self._bytes[source] -= size_bytes
        self._bytes[target] += size_bytes


def align(size_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT_BYTES."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def header_of(tensors: Tensors) -> Specs:
    """Return the specs that announce these tensors."""
    return {
        name: TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()
    }


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """One layer's format, and its regions by the names of `LayerFormat.regions`."""

    format: LayerFormat
    regions: Mapping[str, Region]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """View the regions as typed tensors.

        Args: buffer: uint8, the sequence's bytes, aligned to ALIGNMENT_BYTES.
        """
        return {name: region.view(buffer) for name, region in self.regions.items()}

    def place(self, buffer: Tensor, tensors: Tensors) -> LayerCache:
        """Write a whole compressed prompt to the regions and open the layer, as if it had been received.

        Args: buffer: as in `views`; tensors: as `LayerFormat.compress` returned them, on any device.
        """
        regions = self.views(buffer)
        places = self.format.receive(header_of(tensors), regions)
        for name, place in places.items():
            place.copy_(tensors[name])
        cache = compacted(self.format.open(regions, places))
        cache.settle()
        return cache


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """All of a sequence's regions.

    Attributes:
        size_bytes: from the sequence's start to the end of the last region, a multiple of ALIGNMENT_BYTES.
    """

    layers: tuple[LayerLayout, ...]
    size_bytes: int


def sequence_layout(formats: Iterable[LayerFormat]) -> SequenceLayout:
    """Place the regions of every layer one after another."""
    layers, offset = list[LayerLayout](), 0
    for fmt in formats:
        regions = {}
        for name, wanted in fmt.regions().items():
            region = Region(offset=offset, shape=wanted.placed_shape, dtype=wanted.dtype)
            offset += align(region.size_bytes)
            regions[name] = region
        layers.append(LayerLayout(format=fmt, regions=regions))
    return SequenceLayout(layers=tuple(layers), size_bytes=offset)


def measured_limit_bytes(layout: SequenceLayout) -> int:
    """Return the bytes to reserve if prefill will measure how the layers divide the rows.

    The total of K and V does not depend on the division. The auxiliary tensors of a layer grow by at most one
    row's share (a started page), and the alignment of every region may change.
    """
    beside = 0
    for layer in layout.layers:
        shape = replace(layer.format.shape, max_new_tokens=1, returns_generated=False)
        one_row = sequence_layout([replace(layer.format, rows=1, shape=shape)])
        beside += one_row.size_bytes + ALIGNMENT_BYTES * len(one_row.layers[0].regions)
    return layout.size_bytes + beside


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
