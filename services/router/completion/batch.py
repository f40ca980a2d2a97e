"""Several prompts of one request: a completion for each, read as one."""

from __future__ import annotations

import asyncio

from kvferry.services.router.completion.choice import Choice, RequestTimer, Usage, usage_of
from kvferry.services.router.completion.completion import Completion, CompletionEnd, CompletionEvent
from kvferry.services.router.completion.compression import KvReport, of_prompts
from kvferry.services.router.completion.texts import TextRequest
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.spec import ModelSpec


class CompletionBatch:
    """As `Completion`, for the choices of every prompt, in the prompts' order.

    Args: request: as the client sent it; parts: of one prompt each, with their choices' numbers.
    """

    def __init__(self, request: TextRequest, parts: list[Completion]) -> None:
        self.request = request
        self.events: asyncio.Queue[CompletionEvent | None] = asyncio.Queue()
        self._parts = parts
        self._num_left = len(parts)
        for part in parts:
            part.events, part.tell_end = self.events, self._part_ended

    def start(self) -> None:
        for part in self._parts:
            part.start()

    def cancel(self) -> None:
        """Cancel every part, because the client has left."""
        for part in self._parts:
            part.cancel()

    def _part_ended(self, end: CompletionEnd | KvferryError) -> None:
        """Put one end after every part's deltas, or the first error, which ends the other parts."""
        self._num_left -= 1
        if isinstance(end, KvferryError):
            self.cancel()
            self.events.put_nowait(end)
        elif not self._num_left:
            self.events.put_nowait(CompletionEnd(usage=self.usage(), kv=self.kv()))

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
        """Return a choice by its number in the response."""
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
        return usage_of(self.num_prompt_tokens, self.num_completion_tokens, cached)

    def kv(self) -> KvReport:
        return of_prompts([part.kv() for part in self._parts if part.choices])
