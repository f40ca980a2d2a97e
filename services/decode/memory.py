"""Arena memory of sequences: granted to requests in order, grown with the answers, swapped when it runs out.

Place in the request's path: its first stage in this worker, and between the steps of its answer.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from kvferry.services.decode.config import GROWTH_TOKENS
from kvferry.services.decode.parts import Parts
from kvferry.services.decode.sequence import Sequence
from kvferry.shared.cache.arena import (
    Allocation,
    AllocationState,
    ByteArena,
    SequenceLayout,
    measured_limit_bytes,
    sequence_layout,
)
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.compression.plan import ResolvedPlan, is_measured
from kvferry.shared.device.step_device import written_so_far
from kvferry.shared.errors import CapacityExceeded, KvferryError
from kvferry.shared.process.freeing_rate import FreeingRate

_OBSERVED_ANSWERS = 64
_MAX_OWNERS = 4096
"""API keys whose last grant is remembered."""


@dataclass(eq=False, kw_only=True)
class _Waiter:
    sizes_bytes: tuple[int, ...]
    owner: str
    key_owner: str
    loop: asyncio.AbstractEventLoop
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    allocation: Allocation | None = None
    refusal: KvferryError | None = None

    def wake(self) -> bool:
        """Wake the request, granted or refused; False if its loop is closed. Any thread may call this."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.decided.set)
            return True
        return False


class Scheduler:
    """Owners of API keys take turns: the one that was granted memory longest ago is next. One owner's
    requests are strictly first in, first out. A large request at the head is overtaken only by those of an
    owner whose turn was before. When the line is full, the owner that has most of it gives way: its newest
    request is refused for one of an owner that has fewer.

        reserve ──► granted at once ──────────────────────────────────► Allocation
           └──────► waits in the queue ──bytes freed, it is the head──► Allocation
                        └── admission_wait_s over, or cancelled ──► leaves the queue without an allocation

    `release` may be called from any thread; `reserve` from any event loop.

    Args:
        evict: frees some retained KV for a request of this many bytes, without calling the scheduler; returns
            False if that cannot help.
    """

    def __init__(
        self,
        arena: ByteArena,
        *,
        max_waiting: int,
        admission_wait_s: float,
        evict: Callable[[int], bool] = lambda wanted_bytes: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self._evict = evict
        self._max_waiting = max_waiting
        self._admission_wait_s = admission_wait_s
        self._lock = threading.Lock()
        self._num_pauses = 0
        self._refusal: Callable[[], KvferryError] | None = None
        self._queues: dict[str, deque[_Waiter]] = {}
        """By the API key's owner."""
        self._freed = FreeingRate(clock)
        """Bytes that ended sequences gave back."""
        self._num_granted = 0
        self._last_granted: OrderedDict[str, int] = OrderedDict()
        """The number of each owner's last grant, the last one at the end."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, tuple(self._queues.values())))

    @property
    def wanted_bytes(self) -> int:
        """Bytes for which the first request of the queue waits; 0 if none does, or grants are paused."""
        with self._lock:
            return self._head().sizes_bytes[-1] if self._queues and not self._num_pauses else 0

    async def reserve(
        self,
        size_bytes: int,
        *,
        owner: str,
        timeout_s: float,
        key_owner: str = "",
        smaller: tuple[int, ...] = (),
    ) -> Allocation:
        """Allocate arena bytes, waiting until enough are free.

        Args:
            owner: of the allocation.
            key_owner: of the API key.
            smaller: sizes that will do as well, descending; the first of all that is free is allocated.

        Raises:
            InvalidRequest: the size is larger than the whole arena.
            CapacityExceeded: not enough bytes were free within admission_wait_s or timeout_s (`arena_full`),
                or the queue is full (`queue_full`).
            KvferryError: what `refuse_waiting` was given.
        """
        sizes_bytes = (size_bytes, *smaller)
        self._arena.check_fits(sizes_bytes[-1])
        waiter = _Waiter(
            sizes_bytes=sizes_bytes,
            owner=owner,
            key_owner=key_owner,
            loop=asyncio.get_running_loop(),
        )
        wait_s = min(self._admission_wait_s, timeout_s)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            self._queues.setdefault(key_owner, deque()).append(waiter)
            self._grant()
            if waiter.allocation is None and wait_s <= 0:
                self._remove(waiter)
                raise self._no_memory(sizes_bytes[-1], waited_s=0.0)
            if waiter.allocation is None and self.num_waiting > self._max_waiting:
                longest = max(self._queues.values(), key=len)
                gives_way = longest[-1] if len(longest) > len(self._queues[key_owner]) else waiter
                self._remove(gives_way)
                gives_way.refusal = self._no_memory(gives_way.sizes_bytes[-1], waited_s=0.0, queue_full=True)
                gives_way.wake()
        try:
            if waiter.allocation is None and waiter.refusal is None:
                async with asyncio.timeout(wait_s):
                    await waiter.decided.wait()
        except TimeoutError:
            if not self._leave(waiter) and waiter.refusal is None:
                with self._lock:
                    raise self._no_memory(sizes_bytes[-1], waited_s=wait_s) from None
        except asyncio.CancelledError:
            if self._leave(waiter) and waiter.allocation is not None:
                self.release(waiter.allocation)
            raise
        if waiter.refusal is not None:
            raise waiter.refusal
        assert waiter.allocation is not None
        return waiter.allocation

    def release(self, allocation: Allocation) -> None:
        """Free bytes and grant them to waiting requests. Any thread may call this."""
        with self._lock:
            self._arena.free(allocation)
            self._freed.add(allocation.size_bytes)
            self._grant()

    def refuse_waiting(self, refusal: Callable[[], KvferryError]) -> None:
        """Refuse the requests that wait, and all that come, with this error."""
        with self._lock:
            self._refusal = refusal
            for waiter in [waiter for queue in self._queues.values() for waiter in queue]:
                self._remove(waiter)
                waiter.refusal = refusal()
                waiter.wake()

    def take(self, size_bytes: int, *, owner: str) -> Allocation | None:
        """Allocate for a sequence that has arrived already, ahead of the queue; None if nothing is free."""
        with self._lock:
            return self._allocate(size_bytes, owner=owner, state="running")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Grant nothing within this context. Contexts may overlap."""
        with self._lock:
            self._num_pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_pauses -= 1
                self._grant()

    def _grant(self) -> None:
        while self._queues and not self._num_pauses:
            waiter = self._head()
            tried = (self._allocate(size_bytes, owner=waiter.owner) for size_bytes in waiter.sizes_bytes)
            allocation = next(filter(None, tried), None)
            if allocation is None:
                return
            self._remove(waiter)
            self._num_granted += 1
            self._last_granted[waiter.key_owner] = self._num_granted
            self._last_granted.move_to_end(waiter.key_owner)
            if len(self._last_granted) > _MAX_OWNERS:
                self._last_granted.popitem(last=False)
            waiter.allocation = allocation  # set first: the waiter may run before this thread continues
            if not waiter.wake():  # nothing would use the bytes
                self._arena.free(allocation)

    def _head(self) -> _Waiter:
        return self._queues[min(self._queues, key=lambda owner: self._last_granted.get(owner, 0))][0]

    def _remove(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.key_owner]
        queue.remove(waiter)
        if not queue:
            del self._queues[waiter.key_owner]

    def _allocate(
        self, size_bytes: int, *, owner: str, state: AllocationState = "reserved"
    ) -> Allocation | None:
        """Allocate, evicting retained KV if that helps; None if there is not enough memory."""
        while self._arena.needed_bytes(size_bytes) <= self._arena.size_bytes:
            try:
                return self._arena.reserve(size_bytes, owner=owner, state=state)
            except CapacityExceeded:
                if not self._evict(size_bytes):
                    break
        return None

    def _leave(self, waiter: _Waiter) -> bool:
        """Leave the queue. Returns whether the bytes were granted in the meantime."""
        with self._lock:
            if waiter.allocation is not None:
                return True
            if waiter.refusal is not None:
                return False
            self._remove(waiter)
            self._grant()
            return False

    def _missing_bytes(self, size_bytes: int) -> int:
        """Return the bytes to be freed before a request of this size is granted, behind those that wait."""
        waiting = sum(waiter.sizes_bytes[-1] for queue in self._queues.values() for waiter in queue)
        return max(0, waiting + size_bytes - self._arena.free_bytes)

    def _no_memory(self, size_bytes: int, *, waited_s: float, queue_full: bool = False) -> CapacityExceeded:
        """Return the refusal. The caller holds the lock."""
        message = (
            f"{self._max_waiting} requests wait for decode memory already, which is the limit"
            if queue_full
            else f"the request needs {size_bytes} bytes of decode memory; they did not become free within "
            f"{waited_s:.1f} s ({self._arena.free_bytes} of {self._arena.size_bytes} are free)"
        )
        return CapacityExceeded(
            message,
            reason="queue_full" if queue_full else "arena_full",
            retry_after_s=self._freed.wait_s(
                self._missing_bytes(size_bytes), unknown_s=self._admission_wait_s
            ),
        )


class SequenceMemory:
    """Sizes, moves and swaps sequences.

        admitted with `first_room` tokens ──room used up──► moved to a larger range ──► ...
                                                │ nothing is free: younger sequences are swapped out
                        swapped to the host ◄───┴──► loaded again, the oldest first, before anyone is admitted

    A sequence is one contiguous range, so that a step's descriptors change only when it moves. Growth copies
    it; the room grows by half each time, so that the copies of an answer are few. If the free bytes suffice
    but no free range does, the sequences are moved together.

    `first_room`, `layout` and `within_arena` serve admission. The other methods are for the engine's thread,
    while no step is in flight: moving a sequence changes the addresses that a step was placed with.

    Args: on_swapped_out: called once for each sequence that has to wait on the host.

    Attributes: lengths: of the last answers, in tokens.
    """

    def __init__(
        self,
        parts: Parts,
        arena: ByteArena,
        scheduler: Scheduler,
        *,
        on_swapped_out: Callable[[], None] = lambda: None,
    ) -> None:
        self._parts = parts
        self._arena = arena
        self._scheduler = scheduler
        self._on_swapped_out = on_swapped_out
        self.lengths: deque[int] = deque(maxlen=_OBSERVED_ANSWERS)
        self._pause = contextlib.ExitStack()
        self._is_paused = False

    def first_room(self, max_new_tokens: int) -> int:
        """Return the tokens to reserve: the last answers' mean, at least GROWTH_TOKENS, within the limit."""
        lengths = tuple(self.lengths)
        expected = sum(lengths) // len(lengths) if lengths else 0
        return min(max_new_tokens, max(expected, GROWTH_TOKENS))

    def layout(self, resolved: ResolvedPlan, room: int, *, returns_generated: bool) -> SequenceLayout:
        """Return the layout of a sequence with room for this many new tokens."""
        with_room = resolved if room == resolved.max_new_tokens else replace(resolved, max_new_tokens=room)
        return sequence_layout(make_formats(self._parts.spec, with_room, returns_generated=returns_generated))

    def within_arena(self, resolved: ResolvedPlan, *, returns_generated: bool) -> ResolvedPlan:
        """Return the plan for an answer that fits in the whole arena; unchanged if no answer fits."""

        def fits(num_tokens: int) -> bool:
            whole = self.layout(resolved, num_tokens, returns_generated=returns_generated)
            size_bytes = measured_limit_bytes(whole) if is_measured(resolved) else whole.size_bytes
            return self._arena.needed_bytes(size_bytes) <= self._arena.size_bytes

        longest = resolved.max_new_tokens
        if fits(longest) or not fits(1):
            return resolved
        too_long = bisect.bisect_left(range(longest), True, 2, key=lambda length: not fits(length))
        return replace(resolved, max_new_tokens=too_long - 1)

    def make_room(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Bring a sequence to the arena, with room for its next row, at the cost of younger ones.

        Args: others: all other sequences of the engine.
        Returns: whether it is in the arena; if not, it waits on the host.
        """
        while not sequence.is_in_arena or sequence.lacks_room(1):
            present = [other for other in others if other.is_in_arena]
            if self._grow(sequence, present):
                break
            younger = [other for other in present if other.arrival > sequence.arrival]
            if not younger:
                self._swap_out(sequence)
                break
            self._swap_out(max(younger, key=lambda candidate: candidate.arrival))
        return sequence.is_in_arena

    def admit_again(self, sequences: Iterable[Sequence]) -> None:
        """End the pause of admission that began with a swap, if all sequences are back in the arena."""
        if self._is_paused and all(sequence.is_in_arena for sequence in sequences):
            self._is_paused = False
            self._pause.close()

    def wants_compaction(self, sequences: Callable[[], Iterable[Sequence]]) -> bool:
        """Return whether the first waiting request lacks only a range, which moving these may make."""
        return 0 < self._scheduler.wanted_bytes <= self._arena.free_bytes and any(
            self._arena.can_be_lower(sequence.allocation) for sequence in sequences()
        )

    def compact_for_queue(self, sequences: Iterable[Sequence]) -> None:
        """Move sequences together so that the first waiting request fits."""
        wanted_bytes = self._scheduler.wanted_bytes
        with self._scheduler.paused():
            self._compact(sequences, wanted_bytes)

    def _grow(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Move a sequence to a range with more room, or from the host to the arena.

        Returns: False if there is not enough memory; the sequence may then be on the host.
        """
        layout, room = sequence.part.layout, sequence.room
        if sequence.lacks_room(1):
            room = min(room + max(GROWTH_TOKENS, room // 2), sequence.resolved.max_new_tokens)
            layout = self.layout(sequence.plan, room, returns_generated=sequence.request.store_history)
        with self._scheduler.paused():
            allocation = self._take(sequence, layout)
            if allocation is None:
                own_bytes = sequence.allocation.size_bytes if sequence.is_in_arena else 0
                if layout.size_bytes > self._arena.free_bytes + own_bytes:
                    return False
                self._move_to_host(sequence)
                self._compact(others, layout.size_bytes)
                allocation = self._take(sequence, layout)
            if allocation is None:
                return False
            self._move(sequence, layout, room, allocation)
        return True

    def _swap_out(self, sequence: Sequence) -> None:
        """Let a sequence wait on the host; no request is admitted until it is back."""
        if not self._is_paused:
            self._is_paused = True
            self._pause.enter_context(self._scheduler.paused())
        if sequence.is_in_arena:
            self._move_to_host(sequence)
            self._on_swapped_out()

    def _compact(self, sequences: Iterable[Sequence], wanted_bytes: int) -> None:
        """Move sequences to lower offsets until a free range has `wanted_bytes`."""
        for sequence in sorted(sequences, key=lambda each: each.allocation.offset):
            if self._arena.largest_free_bytes >= wanted_bytes:
                return
            if self._arena.can_be_lower(sequence.allocation):
                self._move_to_host(sequence)
                allocation = self._take(sequence, sequence.part.layout)
                assert allocation is not None, "the range that the sequence has just released is free"
                self._move(sequence, sequence.part.layout, sequence.room, allocation)

    def _take(self, sequence: Sequence, layout: SequenceLayout) -> Allocation | None:
        return self._scheduler.take(layout.size_bytes, owner=sequence.request.request_id)

    def _move_to_host(self, sequence: Sequence) -> None:
        """Move a sequence to the host. Idempotent."""
        if sequence.is_in_arena:
            self._move(sequence, sequence.part.layout, sequence.room, None)

    def _move(
        self, sequence: Sequence, layout: SequenceLayout, room: int, allocation: Allocation | None
    ) -> None:
        """Move a sequence to an allocation, or to the host without one, and release its former range."""
        former = sequence.allocation if sequence.is_in_arena else None
        with sequence.lock:
            self._parts.call("move", sequence.name, allocation, layout)
            sequence.room, sequence.is_in_arena = room, allocation is not None
            sequence.written = None
            if allocation is not None:
                sequence.allocation, sequence.written = allocation, written_so_far(self._arena.device)
        if former is not None:
            self._scheduler.release(former)
