"""From a request's bytes to typed fields, and from what is wrong with them to an error that names the field.

JSON is parsed strictly: UTF-8, no NaN or Infinity, no lone surrogates, bounded depth and digits. The first
thing wrong is reported as an InvalidRequest with a dotted `param` (`messages[0].role`), the value and what is
allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from kvferry.services.router.schemas import (
    IGNORED_FIELDS,
    UNSUPPORTED_FIELDS,
    CompletionFields,
    describe,
)
from kvferry.shared.errors import InvalidRequest

Path = tuple[str | int, ...]
RequestT = TypeVar("RequestT", bound=BaseModel)

_RANGE_ERRORS = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
# Union members that a value was nowhere near are reported after those that it almost matched.
_TYPE_ERRORS = frozenset({"string_type", "list_type", "int_type", "dict_type", "model_type", "none_required"})


def parse_body(body: bytes) -> dict[str, Any]:
    """A request's JSON object.

    Raises: InvalidRequest where the bytes are not UTF-8, not JSON, or not an object.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object; it is {describe(data)}")
    return data


def parse_request(kind: type[RequestT], data: dict[str, Any]) -> RequestT:
    """Typed fields of one endpoint.

    Raises: InvalidRequest with `param`.
    """
    kept = {}
    is_completion = issubclass(kind, CompletionFields)
    for name, value in data.items():
        if name in kind.model_fields:
            kept[name] = value
        elif is_completion and name in UNSUPPORTED_FIELDS:
            if value is not None and value not in UNSUPPORTED_FIELDS[name]:
                raise InvalidRequest(f"{name} is not supported by this server", param=name)
        elif not is_completion or name not in IGNORED_FIELDS:
            raise InvalidRequest(f"Unknown field {describe(name)}", param=name[:128])
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _translate(kind, kept, error.errors(include_url=False, include_context=False)) from None


def param_name(path: Path) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    name = ""
    for segment in path:
        if isinstance(segment, int):
            name += f"[{segment}]"
        else:
            name += f".{segment}" if name else segment
    return name


def _translate(kind: type[BaseModel], data: dict[str, Any], errors: list[ErrorDetails]) -> InvalidRequest:
    found = [(_real_path(data, error), error) for error in errors]
    # A value that fits no member of a union gives one error a member: the deepest says most.
    path, first = max(found, key=lambda item: (len(item[0]), item[1]["type"] not in _TYPE_ERRORS))
    param = param_name(path)
    same = [error for other, error in found if other == path]
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing", param=param)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"Unknown field {describe(param)}", param=param)
    value = describe(first["input"])
    if first["type"] in _RANGE_ERRORS:
        allowed = _range_text(kind, path)
        return InvalidRequest(f"{param} is {value}; it must be {allowed}", param=param)
    if first["type"] in _TYPE_ERRORS | {"literal_error", "float_type", "bool_type"}:
        rules = dict.fromkeys(_rule(error) for error in same)
        return InvalidRequest(f"{param} is {value}; it must be {' or '.join(rules)}", param=param)
    return InvalidRequest(f"{param} {_own_words(first)} (given: {value})", param=param)


def _rule(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Input should be ")
    return "an object" if error["type"] in ("model_type", "dict_type") else message


def _own_words(error: ErrorDetails) -> str:
    """Messages of our validators continue the field's name; pydantic's own are sentences."""
    message = error["msg"]
    return message if message[:1].islower() or "exclude" in message else f"is not allowed: {message}"


def _real_path(data: Any, error: ErrorDetails) -> Path:
    """The error's location without the names that pydantic adds for members of a union."""
    path: list[str | int] = []
    here = data
    last = len(error["loc"]) - 1
    for index, segment in enumerate(error["loc"]):
        inside = (isinstance(here, dict) and segment in here) or (
            isinstance(here, list) and isinstance(segment, int) and segment < len(here)
        )
        if inside:
            here = here[segment]
            path.append(segment)
        elif index == last and error["type"] in ("missing", "extra_forbidden"):
            path.append(segment)
    return tuple(path)


@cache
def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema()


def _range_text(kind: type[BaseModel], path: Path) -> str:
    root = _schema(kind)
    nodes = [root]
    for segment in path:
        nodes = [child for parent in nodes for child in _children(root, parent, segment)]
    for node in [variant for parent in nodes for variant in _variants(root, parent)]:
        low = node.get("minimum", node.get("exclusiveMinimum"))
        high = node.get("maximum", node.get("exclusiveMaximum"))
        if low is None and high is None:
            continue
        lower = "" if low is None else f"{'above' if 'exclusiveMinimum' in node else 'at least'} {low}"
        upper = "" if high is None else f"{'below' if 'exclusiveMaximum' in node else 'at most'} {high}"
        return " and ".join(part for part in (lower, upper) if part)
    raise AssertionError(f"{param_name(path)} failed a range that its schema does not have")


def _variants(root: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in node:
        yield from _variants(root, root["$defs"][node["$ref"].rpartition("/")[2]])
    elif "anyOf" in node:
        for member in node["anyOf"]:
            yield from _variants(root, member)
    else:
        yield node


def _children(root: dict[str, Any], node: dict[str, Any], segment: str | int) -> Iterator[dict[str, Any]]:
    for variant in _variants(root, node):
        if isinstance(segment, int):
            child = variant.get("items")
        else:
            child = variant.get("properties", {}).get(segment, variant.get("additionalProperties"))
        if isinstance(child, dict):
            yield child
