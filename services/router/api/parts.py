"""An answer's deltas as parts in their order: thoughts, texts and calls.

The Responses and Messages APIs have an answer in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvferry.services.router.api.completions import server_event
from kvferry.services.router.completion.choice import ChoiceDelta, TokenLogprob, ToolCall, ToolCallDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass(kw_only=True)
class Part:
    """One part.

    Attributes:
        text: of thoughts or text so far.
        call: of a call, so far.
        is_complete: whether it has ended, and not because the answer became too long.
    """

    kind: Kind
    index: int
    text: str = ""
    call: ToolCall | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_complete: bool = False


@dataclass(frozen=True, kw_only=True)
class PartStep:
    """What an event does to a part.

    Attributes:
        added: to thoughts, text, or a call's arguments.
        logprobs: of the text that is added.
    """

    kind: Literal["begin", "add", "end"]
    part: Part
    added: str = ""
    logprobs: Sequence[TokenLogprob] = ()


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

    def steps(self, delta: ChoiceDelta) -> Iterator[PartStep]:
        """Yield what a delta does to the parts."""
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning, delta)
        else:
            self._held += delta.logprobs or ()
        if delta.text:
            yield from self._add("text", delta.text, delta)
        for added in delta.calls:
            yield from self._add_call(added)
        if delta.finish_reason is not None:
            if not self.parts:
                yield from self._add("text", "", delta)
            yield from self._close(is_complete=delta.finish_reason != "length")

    def _begin(self, kind: Kind, call: ToolCall | None = None) -> Iterator[PartStep]:
        yield from self._close()
        self._open = Part(kind=kind, index=len(self.parts), call=call)
        self.parts.append(self._open)
        yield PartStep(kind="begin", part=self._open)

    def _add(self, kind: Literal["reasoning", "text"], text: str, delta: ChoiceDelta) -> Iterator[PartStep]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None, "it has begun"
        self._open.text += text
        if kind == "text":
            self._open.logprobs += self._held
        self._held = []
        yield PartStep(kind="add", part=self._open, added=text, logprobs=delta.logprobs or ())

    def _add_call(self, added: ToolCallDelta) -> Iterator[PartStep]:
        self._held = []
        if added.begins:
            yield from self._begin("call", added.call)
        assert self._open is not None, "it has begun"
        if added.arguments:
            yield PartStep(kind="add", part=self._open, added=added.arguments)
        if added.ends:
            yield from self._close()

    def _close(self, *, is_complete: bool = True) -> Iterator[PartStep]:
        if self._open is not None:
            part, self._open = self._open, None
            part.is_complete = is_complete
            yield PartStep(kind="end", part=part)


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event whose name is its type."""
    kind: str = data["type"]
    return b"event: " + kind.encode() + b"\n" + server_event(data)


def parts_of(deltas: list[ChoiceDelta]) -> list[Part]:
    """Return the parts of a whole answer."""
    parts = AnswerParts()
    for delta in deltas:
        for _ in parts.steps(delta):
            pass
    return parts.parts
