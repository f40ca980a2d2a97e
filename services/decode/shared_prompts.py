"""Prompts that several requests begin with: their KV arrives once, and each request has a copy of it.

Place in the request's path: the receiver stores the prompt of a request with siblings once it has arrived,
before its first step. Each sibling's request then begins with a copy, in place of a transfer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.services.decode.parts import Parts, checked_first_token
from kvferry.services.decode.receiver import PartArrived
from kvferry.services.decode.sequence import Sequence
from kvferry.shared.compression.plan import ResolvedPlan
from kvferry.shared.control.messages import GenerateRequest, SharedStart
from kvferry.shared.errors import InvalidRequest, LeaseExpired


@dataclass(eq=False, kw_only=True)
class SharedPrompt:
    """A prompt whose KV every rank has in host memory, as of its `Sequence` before its first step. They drop
    it with this object.

    Attributes:
        request: which brought it.
        name, resolved, plan, room, arrived: as of its `Sequence`.
        num_left: siblings that have yet to take it, until `until_s`.
    """

    request: GenerateRequest
    name: int
    resolved: ResolvedPlan
    plan: ResolvedPlan
    room: int
    arrived: dict[int, PartArrived]
    num_left: int
    until_s: float


class SharedPrompts:
    """The prompts that siblings have yet to take. Thread-safe.

        put ──► take ──► ... ──► the last sibling's take: forgotten
         └──── not all have come within `lease_s`, or the first request failed: forgotten

    A sibling that waits for arena memory has taken its prompt already, so it does not expire under it.

    Attributes: entries: by the request that brought the prompt.
    Args: clock: monotonic seconds.
    """

    def __init__(self, parts: Parts, *, lease_s: float, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self.entries: dict[str, SharedPrompt] = {}

    def put(self, sequence: Sequence) -> None:
        """Store a copy of the sequence's prompt for its siblings, before its first step."""
        request = sequence.request
        prompt = SharedPrompt(
            request=request,
            name=sequence.name,
            resolved=sequence.resolved,
            plan=sequence.plan,
            room=sequence.room,
            arrived=sequence.arrived,
            num_left=request.num_siblings,
            until_s=self._clock() + self._lease_s,
        )
        self._parts.call("share", sequence.name)
        weakref.finalize(prompt, self._parts.drop_prompt, sequence.name).atexit = False
        with self._lock:
            self.entries[request.request_id] = prompt

    def take(self, request: GenerateRequest, start: SharedStart) -> SharedPrompt:
        """Return the prompt for a request that shares one. Args: start: the request's `shares`.

        Raises:
            TransferFailed: the request's first token cannot be one.
            LeaseExpired: it is not stored (`unknown_prompt`): it has not arrived, as many have taken it as
                were announced, or its lease has ended.
            InvalidRequest: the request has another prompt, plan or `max_tokens`, or returns its KV.
        """
        checked_first_token(start.first_token, request, self._parts.spec)
        of, stores = start.request_id, request.store_history or request.session is not None
        with self._lock:
            prompt = self.entries.get(of)
            if prompt is None:
                message = f"no prompt of request {of!r} is stored here to share"
                raise LeaseExpired(message, reason="unknown_prompt")
            if stores or _shared(request) != _shared(prompt.request):
                raise InvalidRequest(
                    f"request {request.request_id!r} cannot share the prompt of {of!r}: it must have the "
                    "same prompt, plan and max_tokens, and neither a session nor history"
                )
            prompt.num_left -= 1
            if prompt.num_left == 0:
                del self.entries[of]
        return prompt

    def copy(self, prompt: SharedPrompt, sequence: Sequence) -> None:
        """Copy a prompt to the memory of a sequence that has begun; the caller has locked it."""
        sequence.plan, sequence.arrived = prompt.plan, prompt.arrived
        self._parts.call("copy", prompt.name, sequence.name)

    def forget(self, request_id: str) -> None:
        """Forget the prompt of a request that ended before its answer did."""
        with self._lock:
            self.entries.pop(request_id, None)

    def expire(self) -> None:
        """Forget the prompts whose lease has ended."""
        now_s = self._clock()
        with self._lock:
            for of in [of for of, prompt in self.entries.items() if prompt.until_s <= now_s]:
                del self.entries[of]

    def close(self) -> None:
        with self._lock:
            self.entries.clear()


def _shared(request: GenerateRequest) -> tuple[object, ...]:
    """Return the fields that are equal in requests that share a prompt."""
    return request.prompt_token_ids, request.plan, request.sampling.max_tokens
