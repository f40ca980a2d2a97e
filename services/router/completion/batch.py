"""Several prompts of one request: a completion for each, read as one."""

from __future__ import annotations

import asyncio

from kvferry.services.router.completion.choice import Choice, KvReport, RequestTimer, Usage
from kvferry.services.router.completion.completion import Completion, CompletionEnd, CompletionEvent
from kvferry.services.router.completion.texts import TextRequest
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.spec import ModelSpec


class CompletionBatch:
    """As `Completion`, for the choices of every prompt, in the prompts' order.

    Its `kv` has the first prompt's method and reasons, and sums over all prompts.

    Args: request: as the client sent it; parts: of one prompt each, with their choices' numbers.
    """

    def __init__(self, request: TextRequest, parts: list[Completion]) -> None:
        self.request = request
        self.events: asyncio.Queue[CompletionEvent | None] = asyncio.Queue()
        self._parts = parts
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        for part in self._parts:
            part.start()
        self._reading = asyncio.create_task(self._read())

    def cancel(self) -> None:
        """The client left."""
        if self._reading is not None:
            self._reading.cancel()
        for part in self._parts:
            part.cancel()

    async def _read(self) -> None:
        """Pass on every part's deltas, and one end after them, or the first error."""
        end: CompletionEvent | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    group.create_task(self._read_part(part))
        except* KvferryError as failed:
            for part in self._parts:
                part.cancel()
            (end, *_) = [error for error in failed.exceptions if isinstance(error, KvferryError)]
        self.events.put_nowait(end or CompletionEnd(usage=self.usage(), kv=self.kv()))

    async def _read_part(self, part: Completion) -> None:
        """Raises: KvferryError: the part's."""
        while not isinstance(event := await part.events.get(), dict):
            if isinstance(event, KvferryError):
                raise event
            self.events.put_nowait(event)

    @property
    def model(self) -> ModelSpec:
        return self._parts[0].model

    @property
    def timer(self) -> RequestTimer:
        return self._parts[0].timer

    @property
    def choices(self) -> list[Choice]:
        return [choice for part in self._parts for choice in part.choices]

    def choice(self, index: int) -> Choice:
        """A choice by its number in the response."""
        number, within = divmod(index, self.request.n or 1)
        return self._parts[number].choices[within]

    @property
    def num_choices(self) -> int:
        return sum(part.num_choices for part in self._parts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(part.num_prompt_tokens for part in self._parts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(part.num_completion_tokens for part in self._parts)

    def usage(self) -> Usage:
        usages = [part.usage() for part in self._parts if part.choices]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=self.num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details={"cached_tokens": cached},
        )

    def kv(self) -> KvReport:
        reports = [part.kv() for part in self._parts if part.choices]
        total = reports[0].copy()
        for report in reports[1:]:
            total["prompt_tokens"] += report["prompt_tokens"]
            total["reused_tokens"] += report["reused_tokens"]
            total["full_bytes"] += report["full_bytes"]
            total["shipped_bytes"] += report["shipped_bytes"]
            total["cache_bytes"] += report["cache_bytes"]
            total["prefill_ms"] = max(total["prefill_ms"], report["prefill_ms"])
            total["transfer_ms"] = max(total["transfer_ms"], report["transfer_ms"])
        return total
