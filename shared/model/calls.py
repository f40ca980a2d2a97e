"""Tool calls in JSON that comes in pieces: names as soon as they are known, arguments as they come.

For formats of calls whose text is JSON: an object with the name and the arguments, a list of such objects, or
the arguments alone. A call with its arguments before its name is known only once its text is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_SPACE = " \t\r\n"
_OF_NUMBERS = "0123456789.eE+-"
_SCAN = json.JSONDecoder(strict=False).raw_decode


@dataclass(frozen=True, kw_only=True)
class CallPiece:
    """The piece of a call that some text adds.

    Attributes:
        name: of the call that begins here; None where it adds to the last one.
        arguments: what it adds to the arguments, as JSON.
        is_last: whether it completes the call.
    """

    name: str | None = None
    arguments: str = ""
    is_last: bool = False


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """Where a call's parts are in its JSON.

    Attributes:
        name_key, arguments_key: of an object; None where the JSON is the arguments alone.
        is_list: whether the JSON is a list of objects.
    """

    name_key: str | None
    arguments_key: str | None
    is_list: bool

    @classmethod
    def of(cls, transform: Any, *, is_list: bool) -> CallForm | None:
        """Read the form from a response template's `transform`; None where it has another shape."""
        function = transform.get("function") if isinstance(transform, Mapping) else None
        if not isinstance(function, Mapping):
            return None
        found = function.get("name"), function.get("arguments")
        if found == ("{name}", "{content}") and not is_list:
            return cls(name_key=None, arguments_key=None, is_list=False)
        begin = "{" if is_list else "{content."
        if not all(isinstance(part, str) and part.startswith(begin) and part.endswith("}") for part in found):
            return None
        name_key, arguments_key = (str(part)[len(begin) : -1] for part in found)
        return cls(name_key=name_key, arguments_key=arguments_key, is_list=is_list)


class CallReader:
    """Reads the JSON of one or several calls.

    outside ──{──► key ──name, others──► key ──arguments──► arguments ──}──► key ──}──► outside
    Anything unexpected ──► stuck, which ends with the text.

    Args: name: of the call, where the JSON is its arguments alone.
    """

    def __init__(self, form: CallForm, name: str | None = None) -> None:
        self._form = form
        self._name = name
        self._state: Literal["outside", "key", "arguments", "stuck"] = "outside"
        self._text = ""
        self._at = 0
        """The end of the text that has been read; within arguments, of the text that has been delivered."""
        self._begin = 0
        """The start of the arguments."""
        self._rest = 0
        """The start of the text that belongs to no call so far."""
        self.num_begun = 0

    @property
    def is_inside(self) -> bool:
        """Return whether a call has begun and is not complete."""
        return self._state == "arguments"

    @property
    def rest(self) -> str:
        """The text that belongs to no call so far."""
        return self._text[self._rest :]

    def feed(self, text: str) -> list[CallPiece]:
        """Return the pieces that are known after this text."""
        self._text += text
        pieces: list[CallPiece] = []
        before = None
        while (self._state, self._at) != before and self._state != "stuck":
            before = self._state, self._at
            if self._state == "arguments":
                self._read_arguments(pieces)
            else:
                self._skip()
                if self._at < len(self._text):
                    self._read_outside(pieces) if self._state == "outside" else self._read_key(pieces)
        return pieces

    def _skip(self) -> None:
        """Skip white space, and separators between values."""
        between = "," if self._state == "key" else "[,]" if self._form.is_list else ""
        while self._at < len(self._text) and self._text[self._at] in _SPACE + between:
            self._at += 1
        self._rest = self._at if self._state == "outside" else self._rest

    def _read_outside(self, pieces: list[CallPiece]) -> None:
        if self._text[self._at] != "{" or (self.num_begun and not self._form.is_list):
            self._state = "stuck"
        elif self._form.arguments_key is None:
            self._begin_arguments(pieces)
        else:
            self._at, self._state, self._name = self._at + 1, "key", None

    def _read_key(self, pieces: list[CallPiece]) -> None:
        if self._text[self._at] == "}":
            self._at, self._state = self._at + 1, "outside"
            self._rest = self._at
            return
        key, at = self._value(self._at)
        if at is None:
            return
        colon = self._text[at:].lstrip(_SPACE)
        value = colon[1:].lstrip(_SPACE)
        if not isinstance(key, str) or (colon and colon[0] != ":"):
            self._state = "stuck"
        elif value:
            at = len(self._text) - len(value)
            if key == self._form.arguments_key:
                self._at = at
                self._begin_arguments(pieces)
                return
            found, end = self._value(at)
            if end is not None:
                self._at = end
                if key == self._form.name_key:
                    self._name = found if isinstance(found, str) else None

    def _begin_arguments(self, pieces: list[CallPiece]) -> None:
        if self._text[self._at] != "{" or self._name is None:
            self._state = "stuck"
            return
        self.num_begun += 1
        self._begin, self._state = self._at, "arguments"
        pieces.append(CallPiece(name=self._name))

    def _read_arguments(self, pieces: list[CallPiece]) -> None:
        added = self._text[self._at :]
        end = self._value(self._begin)[1] if "}" in added else None
        if end is not None:
            self._state = "outside" if self._form.arguments_key is None else "key"
            added = self._text[self._at : end]
        self._at += len(added)
        self._rest = self._at
        if added or end is not None:
            pieces.append(CallPiece(arguments=added, is_last=end is not None))

    def _value(self, at: int) -> tuple[Any, int | None]:
        """Return the complete value that begins at `at`, and its end; None where it has no end so far."""
        try:
            value, end = _SCAN(self._text, at)
        except ValueError:
            return None, None
        # a number may go on: so far, 1.5e+16 may be cut after 1.5, or after 1.5e, which is not a number
        is_open = isinstance(value, int | float) and not self._text[end:].strip(_OF_NUMBERS)
        return value, None if is_open else end
