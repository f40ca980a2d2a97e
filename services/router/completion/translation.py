"""Requests of other APIs as chat requests, and errors about these in the words of the API that was used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from kvferry.services.router.completion.engine_fields import ChatFields, EngineFields
from kvferry.services.router.completion.requests import ChatRequest
from kvferry.services.router.completion.structured import StructuredField
from kvferry.services.router.http.errors import wrong_field
from kvferry.shared.errors import InvalidRequest, KvferryError

_SAME = {*EngineFields.model_fields, *ChatFields.model_fields, *StructuredField.model_fields}
ErrorT = TypeVar("ErrorT", bound=KvferryError)


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the fields of a chat request are called in the request that it was made from.

    Attributes:
        messages, tools: for each message, or tool, the field that it came from.
        fields: regular expressions of the beginnings of chat fields' names, and their replacements; those of
            a tool's begin with a point.
    """

    messages: Sequence[str] = ()
    tools: Sequence[str] = ()
    fields: Mapping[str, str] = field(default_factory=dict)

    def name(self, param: str) -> str:
        """Return the client's name of a chat request's field."""
        for kind, origins in (("messages", self.messages), ("tools", self.tools)):
            match = re.match(rf"{kind}\[(\d+)\]", param)
            if match is not None and (index := int(match.group(1))) < len(origins):
                return origins[index] + self._renamed(param[match.end() :])
        return self._renamed(param)

    def _renamed(self, param: str) -> str:
        for pattern, theirs in self.fields.items():
            if re.match(rf"{pattern}(?![A-Za-z0-9_])", param):
                return re.sub(rf"^{pattern}", theirs, param)
        return param

    def told(self, error: ErrorT) -> ErrorT:
        """Return the error with the client's own field in place of the chat request's."""
        if error.param is None or (param := self.name(error.param)) == error.param:
            return error
        return type(error)(
            error.message.replace(error.param, param),
            param=param,
            reason=error.reason,
            retry_after_s=error.retry_after_s,
        )


def chat_request(body: EngineFields, fields: Mapping[str, Any], names: Names) -> ChatRequest:
    """Build the chat request of these fields and of those that every API has.

    Raises: InvalidRequest naming the client's field.
    """
    same = _SAME & body.model_fields_set
    given = {name: value for name, value in fields.items() if value is not None}
    whole = {**{name: getattr(body, name) for name in same}, **given}
    try:
        return validated(whole)
    except InvalidRequest as error:
        raise names.told(error) from None


def validated(fields: Mapping[str, Any]) -> ChatRequest:
    """Build the chat request of these fields. Raises: InvalidRequest naming one."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]
        raise wrong_field(RequestValidationError(errors, body=fields)) from None
