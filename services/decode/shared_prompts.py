"""Prompts that several requests begin with: their KV arrives once, and each request has a copy of it.

Place in the request's path: the receiver stores the prompt of a request with siblings once it has arrived,
before its first step. Each sibling's request then begins with a copy, in place of a transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvferry.services.decode.sequence import Sequence
from kvferry.shared.cache.arena import SequenceLayout
from kvferry.shared.compression.formats.interface import LayerCache
from kvferry.shared.compression.plan import CompressionPlan, ResolvedPlan
from kvferry.shared.control.messages import GenerateRequest
from kvferry.shared.errors import InvalidRequest, LeaseExpired

if TYPE_CHECKING:
    from kvferry.services.decode.ranks import DecodeRanks


@dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """A prompt's KV in host memory, as `Sequence` has it before its first step.

    Attributes:
        requested, max_tokens: what the request asked for; `resolved` and `plan` are as of `Sequence`.
        room: new tokens for which `caches` have room.
        transfer_id: of the transfer that brought it.
        layout: of `caches`.
        prompt_bytes: as of `Sequence`.
    """

    token_ids: tuple[int, ...]
    requested: CompressionPlan
    max_tokens: int
    resolved: ResolvedPlan
    plan: ResolvedPlan
    room: int
    caches: tuple[LayerCache, ...]
    layout: SequenceLayout
    transfer_id: int
    prompt_bytes: int

    def copied(self, layout: SequenceLayout, buffer: torch.Tensor) -> tuple[LayerCache, ...]:
        """The layers of a sequence of its own. Args: layout: with room for as many tokens, or more."""
        return tuple(
            cache.copied(layer.format, layer.views(buffer))
            for cache, layer in zip(self.caches, layout.layers, strict=True)
        )


@dataclass(kw_only=True)
class _Entry:
    prompt: SharedPrompt
    num_left: int
    until_s: float


class SharedPrompts:
    """The prompts that siblings have yet to take. Thread-safe.

        put ──► take ──► ... ──► the last sibling's take: forgotten
         └──── not all have come within `lease_s`, or the first request failed: forgotten

    A sibling that waits for arena memory has taken its prompt already, so it does not expire under it.

    Attributes: entries: by the request that brought the prompt.
    Args:
        clock: monotonic seconds.
        ranks: the worker's other ranks, which store their heads of each prompt.
    """

    def __init__(
        self, *, lease_s: float, clock: Callable[[], float], ranks: DecodeRanks | None = None
    ) -> None:
        self._ranks = ranks
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self.entries: dict[str, _Entry] = {}

    def put(self, sequence: Sequence) -> None:
        """Store a copy of the sequence's prompt for its siblings, before its first step."""
        request, layout = sequence.request, sequence.layout
        buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
        prompt = SharedPrompt(
            token_ids=request.prompt_token_ids,
            requested=request.plan,
            max_tokens=request.sampling.max_tokens,
            resolved=sequence.resolved,
            plan=sequence.plan,
            room=sequence.room,
            caches=tuple(
                cache.copied(layer.format, layer.views(buffer))
                for cache, layer in zip(sequence.caches, layout.layers, strict=True)
            ),
            layout=layout,
            transfer_id=sequence.key.transfer_id,
            prompt_bytes=sequence.prompt_bytes,
        )
        if self._ranks is not None:
            self._ranks.share(sequence, prompt)
        entry = _Entry(prompt=prompt, num_left=request.num_siblings, until_s=self._clock() + self._lease_s)
        with self._lock:
            self.entries[request.request_id] = entry

    def take(self, request: GenerateRequest, of: str) -> SharedPrompt:
        """The prompt for a request that shares it. Args: of: the request that brought it.

        Raises:
            LeaseExpired: it is not stored (`unknown_prompt`): it has not arrived, as many have taken it as
                were announced, or its lease has ended.
            InvalidRequest: the request has another prompt, plan or `max_tokens`, or returns its KV.
        """
        stores = request.store_history or request.session is not None
        with self._lock:
            entry = self.entries.get(of)
            if entry is None:
                message = f"no prompt of request {of!r} is stored here to share"
                raise LeaseExpired(message, reason="unknown_prompt")
            prompt, max_tokens = entry.prompt, request.sampling.max_tokens
            given = request.prompt_token_ids, request.plan, max_tokens, stores
            if given != (prompt.token_ids, prompt.requested, prompt.max_tokens, False):
                raise InvalidRequest(
                    f"request {request.request_id!r} cannot share the prompt of {of!r}: it must have the "
                    "same prompt, plan and max_tokens, and neither a session nor history"
                )
            entry.num_left -= 1
            if entry.num_left == 0:
                del self.entries[of]
        return prompt

    def forget(self, request_id: str) -> None:
        """The request that brought the prompt has ended before its answer did."""
        with self._lock:
            self.entries.pop(request_id, None)

    def expire(self) -> None:
        """Forget the prompts whose lease has ended."""
        now_s = self._clock()
        with self._lock:
            for of in [of for of, entry in self.entries.items() if entry.until_s <= now_s]:
                del self.entries[of]

    def close(self) -> None:
        """Forget all prompts."""
        with self._lock:
            self.entries.clear()
