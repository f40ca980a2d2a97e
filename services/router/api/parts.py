"""An answer's deltas as parts in their order: thoughts, texts and calls.

The Responses and Messages APIs have an answer in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvferry.services.router.completion.choice import ChoiceDelta, TokenLogprob, ToolCall

Step = Literal["begin", "add", "end"]


@dataclass(kw_only=True)
class Part:
    """One part.

    Attributes:
        text: of thoughts or text so far.
        call: of a call, which is whole.
        is_complete: whether it has ended, and not because the answer became too long.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    call: ToolCall | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_complete: bool = False


class AnswerParts:
    """The parts of one choice.

    begin ──► add ... add ──► end, then the next part

    An answer of nothing has one empty text.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._held: list[TokenLogprob] = []
        """Of tokens whose text has not come yet."""

    def steps(self, delta: ChoiceDelta) -> Iterator[tuple[Step, Part, ChoiceDelta]]:
        """What a delta does to the parts; a delta that adds has its own text or thoughts alone."""
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning, delta)
        else:
            self._held += delta.logprobs or ()
        if delta.text:
            yield from self._add("text", delta.text, delta)
        for call in delta.calls:
            yield from self._close(delta)
            part = Part(kind="call", index=len(self.parts), call=call, is_complete=True)
            self.parts.append(part)
            yield "begin", part, delta
            yield "end", part, delta
        if delta.finish_reason is not None:
            if not self.parts:
                yield from self._add("text", "", delta)
            yield from self._close(delta)

    def _add(
        self, kind: Literal["reasoning", "text"], text: str, delta: ChoiceDelta
    ) -> Iterator[tuple[Step, Part, ChoiceDelta]]:
        part = self._open
        if part is None or part.kind != kind:
            yield from self._close(delta)
            part = self._open = Part(kind=kind, index=len(self.parts))
            self.parts.append(part)
            yield "begin", part, delta
        part.text += text
        if kind == "text":
            part.logprobs += self._held
        self._held = []
        yield "add", part, delta

    def _close(self, delta: ChoiceDelta) -> Iterator[tuple[Step, Part, ChoiceDelta]]:
        if self._open is not None:
            part, self._open = self._open, None
            part.is_complete = delta.finish_reason != "length"
            yield "end", part, delta


def parts_of(deltas: list[ChoiceDelta]) -> list[Part]:
    """The parts of a whole answer."""
    parts = AnswerParts()
    for delta in deltas:
        for _ in parts.steps(delta):
            pass
    return parts.parts
