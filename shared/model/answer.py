"""An answer's text in parts while it is generated: content, thoughts, tool calls, by transformers' parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.shared.model.calls import CallForm, CallPiece, CallReader

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

THOUGHTS = frozenset({"reasoning_content", "thinking"})
"""Names of thoughts in response templates."""
_CALLS = "tool_calls"


@dataclass(frozen=True, kw_only=True)
class AnswerPart:
    """The part that some text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    call: CallPiece | None = None


class AnswerParser:
    """Splits text as it comes.

    A call begins with its name and its arguments' first character; from there on all text belongs to the
    call, even if the arguments are not JSON or are cut off. Text outside calls stays content, as the model
    wrote it.

    Args:
        template: transformers' `response_template`.
        prefix: the end of the prompt, in which templates may write an answer's first part.
        tools: the request's, for the types of arguments of calls that are not JSON.
    """

    def __init__(
        self, template: Mapping[str, Any], *, prefix: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(dict(template))
        self._fields = spec.fields
        self._form = _form_of(spec.fields.get(_CALLS))
        if self._form is not None:
            # As text, so that the parser hands it on and leaves its JSON to the reader.
            field = dict(template["fields"][_CALLS]) | {"content": "text", "transform": "{content}"}
            field.pop("transform_each", None)
            template = {**template, "fields": {**template["fields"], _CALLS: field}}
        self._parser: ResponseParser | None = ResponseParser(
            dict(template), prefix=prefix, tools=[dict(tool) for tool in tools]
        )
        self._pending = spec.truncate_past_last_anchor(prefix)
        """Text that no event has reported yet, after `_at`, and the text of an open call."""
        self._at = 0
        self._prompt_end = len(self._pending)
        self._open = ""
        self._body = ""
        """The text of the open region."""
        self._captures: dict[str, str] = {}
        self._reader: CallReader | None = None
        self._call_at = 0
        self._is_fresh = False
        """Whether there was no content yet since a thought or call: white space there belongs to neither."""
        self._parts(self._parser.initial_events)
        self.begins_with_thought = self._open in THOUGHTS
        """Whether the prompt has opened a thought."""

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are known after this text."""
        if self._parser is None:
            return [AnswerPart(content=text)]
        self._pending += text
        try:
            return self._parts(self._parser.feed(text))
        except (ValueError, KeyError):
            return self._give_up()

    def finish(self) -> list[AnswerPart]:
        """Return the parts that were held back."""
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
            if kind == "region_open":
                self._begin(field)
            elif kind == "region_chunk":
                self._at += len(event["text"])
                parts += self._added(field, event["text"])
            else:
                parts += self._ended(field, event["value"])
        # The text of an open call is content if it turns out not to be a call.
        told = self._call_at if self._open == _CALLS else self._at
        self._pending = self._pending[told:]
        self._at, self._call_at = self._at - told, self._call_at - told
        self._prompt_end = max(0, self._prompt_end - told)
        return parts

    def _begin(self, field: str) -> None:
        """Open a region: find the mark that the parser has found."""
        pattern = self._fields[field].open_re
        mark = pattern.search(self._pending, self._at) if pattern is not None else None
        self._open, self._body, self._captures = field, "", {}
        self._call_at = self._at
        if mark is not None:
            self._call_at, self._at = mark.start(), mark.end()
            self._captures = {name: text for name, text in mark.groupdict().items() if text is not None}
        if field == _CALLS:
            name = self._captures.get("name")
            self._reader = CallReader(self._form, name) if self._form is not None else None

    def _added(self, field: str, text: str) -> list[AnswerPart]:
        if field in THOUGHTS:
            return [AnswerPart(reasoning=text)]
        if field == _CALLS and self._reader is not None:
            self._body += text
            return [AnswerPart(call=piece) for piece in self._reader.feed(text)]
        if field != "content":
            return []
        text = text.lstrip() if self._is_fresh else text
        self._is_fresh = self._is_fresh and not text
        return [AnswerPart(content=text)] if text else []

    def _ended(self, field: str, value: Any) -> list[AnswerPart]:
        pattern = self._fields[field].close_re
        mark = pattern.search(self._pending, self._at) if pattern is not None else None
        self._at = mark.end() if mark is not None else self._at
        self._open = ""
        self._is_fresh = self._is_fresh or field != "content"
        if field != _CALLS:
            return []
        return _whole(value) if self._reader is None else self._json_ended(self._reader)

    def _json_ended(self, reader: CallReader) -> list[AnswerPart]:
        """Return the calls that the reader has not begun. Text that is not a call is content."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        try:
            return _whole(process_field(self._body, self._fields[_CALLS], self._captures), reader.num_begun)
        except (ValueError, KeyError):
            written = self._pending[max(self._call_at, self._prompt_end) : self._at]
            if reader.num_begun:
                written = "" if reader.is_inside else reader.rest.strip()
            self._is_fresh = self._is_fresh and not written
            return [AnswerPart(content=written)] if written else []

    def _give_up(self) -> list[AnswerPart]:
        self._parser, text, self._pending = None, self._pending[self._prompt_end :], ""
        return [AnswerPart(content=text)]


def _form_of(field: Any) -> CallForm | None:
    """Return how calls can be read before they are complete; None where they cannot."""
    if field is None or field.content != "json" or field.content_args or field.join is not None:
        return None
    return CallForm.of(field.transform, is_list=field.transform_each)


def _whole(value: Any, num_begun: int = 0) -> list[AnswerPart]:
    """Return the calls of a region's value, except those that have begun before."""
    calls = [call["function"] for call in (value if isinstance(value, list) else [value])[num_begun:]]
    pieces = []
    for function in calls:
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        pieces.append(CallPiece(name=str(function["name"]), arguments=arguments, is_last=True))
    return [AnswerPart(call=piece) for piece in pieces]
