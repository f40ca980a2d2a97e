"""State of one request in the decode worker: its reservation, its KV cache and its completion so far.

Created at admission, filled by the receiver, run by the engine, and closed after the history return or when
the request ends, fails or is cancelled earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Callable

from opentelemetry.trace import INVALID_SPAN, Span
from torch import Tensor

from kvferry.shared.cache.arena import Allocation
from kvferry.shared.cache.delta import Positions, RetainedChain
from kvferry.shared.cache.layout import SequenceLayout
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import FinishReason, GenerateEvent, GenerateRequest
from kvferry.shared.errors import DeadlineExceeded, KvferryError
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.sampling.sampler import SequenceSampler
from kvferry.shared.telemetry import begin, current_context
from kvferry.shared.wire.messages import Manifest, TransferKey
from kvferry.shared.wire.transfer import OutgoingTransfer


class EventStream:
    """A queue into one event loop. It needs no bound: a completion has a limited number of events.

    Created by the task that reads it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[GenerateEvent | KvferryError] = asyncio.Queue()

    def put(self, event: GenerateEvent | KvferryError) -> None:
        """Add an event. An error is raised in the reader and ends the stream. Any thread may call this."""
        # If the loop is closed, there is no reader any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self, *, deadline_s: float) -> GenerateEvent:
        """The next event.

        Args: deadline_s: on the loop's clock.

        Raises:
            DeadlineExceeded: none came in time.
            KvferryError: the request failed.
        """
        try:
            async with asyncio.timeout_at(deadline_s):
                event = await self._queue.get()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its completion ended") from None
        if isinstance(event, KvferryError):
            raise event
        return event


class SequenceState(enum.Enum):
    RESERVED = "reserved"
    IN_TRANSFER = "in_transfer"
    READY = "ready"
    RUNNING = "running"
    RETURNING = "returning"
    CLOSED = "closed"


class Sequence:
    """State of one request. `lock` guards `state`, the arena bytes and `outgoing`.

        RESERVED ─manifest─► IN_TRANSFER ─commit─► READY ─joins─► RUNNING ─last token─► RETURNING ─┐
            │                     │                  │               │                      │      │
            └─────────────────────┴───── failed, cancelled, lease ───┴──────────────────────┴──► CLOSED

    Who may access the arena bytes and close the sequence:
        RESERVED, IN_TRANSFER   any thread that holds `lock` (receiver, sweeper, the request's own task)
        READY, RUNNING          the engine's thread; others set `cancelled` and wake it
        RETURNING               any thread that holds `lock`, until the history return has copied the rows
                                and released the bytes or handed them over; after that, its thread closes

    Args:
        layout: of the plan; if prefill measures rows per layer, of their mean until the manifest is accepted.
        release: frees the allocation; called at most once, under `lock`, and not after `hand_over_bytes`.
        forget: removes the sequence from the worker's tables; called exactly once, at closing.
        assembler: finds stop strings; None if there are none.
        stop_token_ids: ids that end the completion, including the model's own unless they are ignored.
    """

    def __init__(
        self,
        *,
        request: GenerateRequest,
        resolved: ResolvedPlan,
        layout: SequenceLayout,
        key: TransferKey,
        allocation: Allocation,
        events: EventStream,
        sampler: SequenceSampler,
        assembler: TextAssembler | None,
        stop_token_ids: frozenset[int],
        release: Callable[[Allocation], None],
        forget: Callable[[Sequence], None],
    ) -> None:
        self.lock = threading.RLock()
        self.state = SequenceState.RESERVED
        self.cancelled = False
        self.cut_off = False
        """Whether the completion must end with the tokens it has."""
        self.request = request
        self.resolved = resolved
        self.layout = layout
        self.key = key
        self.allocation = allocation
        self.events = events
        self.sampler = sampler
        self.manifest: Manifest | None = None
        self.caches: tuple[LayerCache, ...] = ()
        self.outgoing: OutgoingTransfer | None = None
        self.positions: tuple[Positions | None, ...] = ()
        self.retained: RetainedChain | None = None
        self.retained_layers: tuple[tuple[tuple[Tensor, Tensor], ...], ...] = ()
        self.token_ids: list[int] = []
        self.num_appended = 0
        self.committed_s: float | None = None
        self.trace_context = current_context()
        self.span: Span = INVALID_SPAN
        """The current stage; `enter_stage` ends it and begins the next."""
        self._assembler = assembler
        self.stop_token_ids = stop_token_ids
        self._release = release
        self._forget = forget
        self._holds_bytes = True
        self._unpin: Callable[[], None] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the completion so far."""
        return len(self.token_ids)

    @property
    def last_token_id(self) -> int:
        return self.token_ids[-1]

    @property
    def position(self) -> int:
        """Position of the token to run next, which is the last one sampled."""
        return self.resolved.num_prompt_tokens + self.num_tokens - 1

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return self.request.sampling.max_tokens - self.num_tokens

    def take(self, token: SampledToken) -> FinishReason | None:
        """Add a token to the completion. Returns why the completion ends with it, or None."""
        self.token_ids.append(token.token_id)
        stopped = self._assembler is not None and self._assembler.push(token.token_id).stopped
        if stopped or token.token_id in self.stop_token_ids:
            return "stop"
        return "length" if self.num_left <= 0 else None

    def enter_stage(self, name: str) -> None:
        """End the current stage's span and begin one with this name; "" begins none."""
        self.span.end()
        self.span = begin(name, self.trace_context) if name else INVALID_SPAN

    def release_bytes(self) -> None:
        """Drop the views of the arena bytes, then release the bytes. Idempotent."""
        with self.lock:
            self.caches = ()
            if self._holds_bytes:
                self._holds_bytes = False
                self._release(self.allocation)

    def hand_over_bytes(self) -> Allocation:
        """Transfer the arena bytes to the caller, which must free them. Call once, under `lock`."""
        assert self._holds_bytes, self.state
        self.caches = ()
        self._holds_bytes = False
        return self.allocation

    def use_retained(
        self,
        retained: RetainedChain,
        *,
        retained_layers: tuple[tuple[tuple[Tensor, Tensor], ...], ...],
        unpin: Callable[[], None],
    ) -> None:
        """Pin the session's retained rows for this sequence's transfer.

        Args:
            retained_layers: for each selection, each layer's K and V `[H_kv, cap, D]`.
            unpin: called once, by `release_retained`.
        """
        self.retained, self.retained_layers, self._unpin = retained, retained_layers, unpin

    def release_retained(self) -> None:
        """Unpin the session's retained rows. Idempotent."""
        with self.lock:
            unpin, self._unpin = self._unpin, None
            self.retained, self.retained_layers = None, ()
        if unpin is not None:
            unpin()

    def close(self, error: KvferryError | None = None) -> bool:
        """End the sequence: release its bytes and pins, remove it from the tables, pass on the error if any.

        Returns: False if it was closed already.
        """
        with self.lock:
            if self.state is SequenceState.CLOSED:
                return False
            self.state = SequenceState.CLOSED
            self.enter_stage("")
            self.release_retained()
            self.release_bytes()
            self._forget(self)
        if error is not None:
            self.events.put(error)
        return True

    def cancel(self) -> None:
        """Cancel the request, because its reader has gone.

        Closes the sequence now if that is safe. Otherwise the engine closes it when it sees `cancelled`, or
        the history return after its transfer is aborted.
        """
        with self.lock:
            self.cancelled = True
            if self.state in (SequenceState.RESERVED, SequenceState.IN_TRANSFER):
                self.close()
            elif self.state is SequenceState.RETURNING:
                if self._holds_bytes:
                    self.close()
                elif self.outgoing is not None:
                    self.outgoing.abort("the request was cancelled")
