"""A message's content: a text, or parts, of which models here read those of text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kvferry.services.router.http.body import ClientModel

_READABLE = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")


class ContentPart(ClientModel):
    """A part: text, a refusal, a document of plain text, or what a model here cannot read. The text of a
    refusal is its `refusal`; a document's is in its `source`."""

    echoed = frozenset({"annotations", "logprobs"})

    type: str
    text: str | None = None
    refusal: str | None = None
    source: dict[str, Any] | None = None

    @property
    def left_out(self) -> str:
        return self.type if self.readable is None else ""

    @property
    def readable(self) -> str | None:
        """The part's text; None where it has none that a model here reads."""
        if self.type == "document" and self.source is not None and self.source.get("type") == "text":
            data = self.source.get("data")
            return data if isinstance(data, str) else None
        return (self.refusal if self.type == "refusal" else self.text) if self.type in _READABLE else None


def _has_text(parts: list[ContentPart]) -> list[ContentPart]:
    for part in parts:
        if part.type in _READABLE and part.readable is None:
            raise PydanticCustomError("rule", f"must have the text of each part of type {part.type}")
    return parts


Parts = Annotated[list[ContentPart], Field(fail_fast=True), AfterValidator(_has_text)]
Content = str | Parts


def check_readable(content: Content | None) -> Content | None:
    """The content. Raises: PydanticCustomError where a part is no text: without it, the answer is another."""
    for part in content if isinstance(content, list) else ():
        if part.readable is None:
            raise PydanticCustomError(
                "rule", f"must not have a part of type {part.type}; models here read text"
            )
    return content


ReadableContent = Annotated[Content, AfterValidator(check_readable)]


def text_of(content: Content | None, *, between: str = "") -> str:
    """The text of a content. A note stands for what models here cannot read."""
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(
        part.readable
        if part.readable is not None
        else f"[{part.type}: left out, as the model reads text alone]"
        for part in content
    )
