"""An answer's text in parts while it is generated: content, thoughts, tool calls, by transformers' parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THOUGHTS = frozenset({"reasoning_content", "thinking"})
"""Names of thoughts in response templates."""


@dataclass(frozen=True, kw_only=True)
class CalledTool:
    """A whole call. Attributes: arguments: as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class AnswerPart:
    """What some text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    call: CalledTool | None = None


class AnswerParser:
    """Splits text as it comes. A call that is no JSON stays content, as the model wrote it.

    Args:
        template: transformers' `response_template`.
        prefix: the end of the prompt, of which templates may write an answer's first part.
        tools: the request's, for the types of arguments.
    """

    def __init__(
        self, template: Mapping[str, Any], *, prefix: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser: ResponseParser | None = ResponseParser(
            dict(template), prefix=prefix, tools=[dict(tool) for tool in tools]
        )
        self._field = ""
        self._unparsed = ""
        self._is_fresh = False
        """No content yet since a thought or call: white space there belongs to neither."""
        for event in self._parser.initial_events:
            self._field = event["field"] if event["type"] != "region_close" else ""
        self.begins_with_thought = self._field in THOUGHTS
        """Whether the prompt has opened one."""

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are known after this text."""
        if self._parser is None:
            return [AnswerPart(content=text)]
        self._unparsed += text
        try:
            return self._parts(self._parser.feed(text))
        except (ValueError, KeyError):
            return self._give_up()

    def finish(self) -> list[AnswerPart]:
        """The parts that were held back."""
        if self._parser is None:
            return []
        try:
            return self._parts(self._parser.finalize()[1])
        except (ValueError, KeyError):
            return self._give_up()

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and field == "content":
                text = event["text"].lstrip() if self._is_fresh else event["text"]
                self._is_fresh = self._is_fresh and not text
                parts += [AnswerPart(content=text)] if text else []
            elif kind == "region_chunk" and field in THOUGHTS:
                parts.append(AnswerPart(reasoning=event["text"]))
            elif kind == "region_close" and field == "tool_calls":
                value = event["value"]
                parts += [
                    AnswerPart(call=_called(its)) for its in (value if isinstance(value, list) else [value])
                ]
            self._is_fresh = self._is_fresh or (kind == "region_close" and field != "content")
        if events:
            # What an open call has so far is content if it turns out to be none.
            opened = [event for event in events if event["type"] == "region_open"]
            self._field = opened[-1]["field"] if opened else self._field
            if events[-1]["type"] == "region_close" or self._field != "tool_calls":
                self._unparsed = ""
        return parts

    def _give_up(self) -> list[AnswerPart]:
        self._parser, text, self._unparsed = None, self._unparsed, ""
        return [AnswerPart(content=text)]


def _called(value: Mapping[str, Any]) -> CalledTool:
    function = value["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return CalledTool(name=str(function["name"]), arguments=arguments)
