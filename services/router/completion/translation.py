"""Requests of other APIs as chat requests, and errors about these in the words of the API that was used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from kvferry.services.router.completion.engine_fields import ChatFields, EngineFields
from kvferry.services.router.completion.requests import ChatRequest
from kvferry.services.router.completion.structured import StructuredField
from kvferry.services.router.http.body import ignored_names
from kvferry.services.router.http.errors import wrong_field
from kvferry.shared.errors import KvferryError

_SAME = {*EngineFields.model_fields, *ChatFields.model_fields, *StructuredField.model_fields}
ErrorT = TypeVar("ErrorT", bound=KvferryError)


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the fields of a chat request are called in the request that it was made from.

    Attributes:
        messages: for each message, the field that it came from.
        fields: regular expressions of the beginnings of chat fields' names, and their replacements.
    """

    messages: Sequence[str]
    fields: Mapping[str, str]

    def name(self, param: str) -> str:
        """The client's name of a chat request's field."""
        if (match := re.match(r"messages\[(\d+)\]", param)) is not None:
            index = int(match.group(1))
            if index < len(self.messages):
                return self.messages[index] + param[match.end() :]
        for pattern, theirs in self.fields.items():
            if re.match(rf"{pattern}(?![A-Za-z0-9_])", param):
                return re.sub(rf"^{pattern}", theirs, param)
        return param

    def told(self, error: ErrorT) -> ErrorT:
        """The error, about the client's own field."""
        if error.param is None:
            return error
        param = self.name(error.param)
        return type(error)(
            error.message.replace(error.param, param),
            param=param,
            reason=error.reason,
            retry_after_s=error.retry_after_s,
        )


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A request as a chat request."""

    chat: ChatRequest
    names: Names


def chat_request(body: EngineFields, fields: Mapping[str, Any], names: Names) -> Translation:
    """The chat request of these fields and of those that every API has.

    Raises: InvalidRequest naming the client's field.
    """
    same = _SAME & body.model_fields_set
    given = {name: value for name, value in fields.items() if value is not None}
    whole = {**{name: getattr(body, name) for name in same}, **given}
    try:
        return Translation(chat=ChatRequest.model_validate(whole), names=names)
    except ValidationError as error:
        errors = [{**its, "loc": ("body", *its["loc"])} for its in error.errors()]
        raise names.told(wrong_field(RequestValidationError(errors, body=whole))) from None


def ignored_fields(body: EngineFields, names: Names, chat_ignores: Sequence[str]) -> list[str]:
    """The client's fields that change nothing.

    Args: chat_ignores: those of the chat request.
    """
    own = {
        name for name in ignored_names(type(body)) & body.model_fields_set if getattr(body, name) is not None
    }
    return sorted(own | {names.name(name) for name in chat_ignores})


def texts_of(content: Any, *, between: str = "") -> str:
    """The text of a content: a string, or parts with texts."""
    return content if isinstance(content, str) else between.join(part.text for part in content or ())
