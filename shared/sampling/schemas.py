"""JSON schemas as llguidance takes them: without ineffective keywords, and otherwise equivalent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from kvferry.shared.errors import InvalidRequest

_WHITESPACE = r"[ \n\t\r]{1,40}"
"""White space between two parts of JSON. It is bounded, or an undecided model would write nothing else."""
_FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_MOST = 2**63 - 2**10
"""Larger bounds come from a programming language's number types, and can be left out."""
_MOST_CHARACTERS = 2**31
_MOST_COMPARED = 4096
"""Pairs of a property and a pattern."""
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_EXCLUSIVE = (("exclusiveMinimum", "minimum", 1e-4), ("exclusiveMaximum", "maximum", -1e-4))
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""The values of these are not schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""The values of these are schemas by names that the client chose, which may equal keywords."""
_ASKS_NOTHING: dict[str, Callable[[Any], bool]] = {
    "$schema": lambda value: True,
    "format": lambda value: value not in _FORMATS,  # JSON Schema treats these as annotations
    "uniqueItems": lambda value: value is False,
    "unevaluatedProperties": lambda value: value is True or value == {},
    "unevaluatedItems": lambda value: value is True or value == {},
    "dependentRequired": lambda value: not value,
    "dependentSchemas": lambda value: not value,
    "not": lambda value: value is False,
    "maxLength": lambda value: isinstance(value, int | float) and value >= _MOST_CHARACTERS,
}
_NEEDS = (("contains", ("minContains", "maxContains")), ("if", ("then", "else")))
"""Keywords that have no effect without another one."""
_SPECIAL, _ESCAPED = re.compile(r"[\\^$.|?*+()\[\]{}]"), r"\\\g<0>"


def guided_json(schema: Any, *, is_compact: bool = False) -> str:
    """Return the schema for llguidance, with a rule for white space: bounded, or none.

    Raises: InvalidRequest: it has what llguidance accepts but cannot follow.
    """
    shown = _guided(schema)
    if not isinstance(shown, dict):
        shown = {} if shown is True else {"enum": []}
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    if is_compact:
        options = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return json.dumps({**shown, "x-guidance": options})


def _guided(schema: Any) -> Any:
    """Convert a schema, or a list of them. What llguidance does not support stays, and is refused there."""
    if isinstance(schema, list):
        return [_guided(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shown = {}
    for name, value in schema.items():
        if name in _ASKS_NOTHING and _ASKS_NOTHING[name](value):
            continue
        if name in _BY_NAME and isinstance(value, dict):
            shown[name] = {key: _guided(inner) for key, inner in value.items()}
        else:
            shown[name] = value if name in _VALUES else _guided(value)
    for needed, names in _NEEDS:
        if needed not in shown:
            for name in names:
                shown.pop(name, None)
    return _without_overlap(_with_names(_with_exact_bounds(_within_range(shown))))


def _within_range(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without bounds that llguidance's numbers do not reach."""
    bounds = {name: value for name in (*_LOW, *_HIGH) if isinstance(value := schema.get(name), int | float)}
    low = {name: max(bounds[name], -_MOST) for name in _LOW if name in bounds}
    high = {name: min(bounds[name], _MOST) for name in _HIGH if name in bounds}
    return {**schema, **low, **high}


def _with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with narrow exclusive bounds as inclusive ones, a little inside.

    llguidance 1.9 allows a whole exclusive bound itself if the other bound is not whole and less than 1 away:
    15 for a number above 15 and below 15.5.
    """
    low = schema.get("exclusiveMinimum", schema.get("minimum"))
    high = schema.get("exclusiveMaximum", schema.get("maximum"))
    if isinstance(low, int | float) and isinstance(high, int | float) and 0 < high - low < 1:
        schema = dict(schema)
        for name, inclusive, inside in _EXCLUSIVE:
            if isinstance(bound := schema.get(name), int | float) and bound == int(bound):
                del schema[name]
                schema[inclusive] = bound + inside
    return schema


def _without_overlap(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without patterns that match only one property's name, which then obeys both schemas.

    Raises: InvalidRequest: another pattern matches a property. llguidance accepts that but cannot follow it.
    """
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if not (isinstance(named, dict) and isinstance(patterns, dict)):
        return schema
    if len(named) * len(patterns) > _MOST_COMPARED:
        raise InvalidRequest(
            f"it has {len(named)} properties beside {len(patterns)} patterns of properties; there may be "
            f"{_MOST_COMPARED} pairs of them"
        )
    named, patterns = dict(named), dict(patterns)
    for pattern, rule in tuple(patterns.items()):
        for name in named:
            if pattern == f"^{_SPECIAL.sub(_ESCAPED, name)}$":
                named[name] = {"allOf": [named[name], rule]}
                patterns.pop(pattern, None)
            elif _matches(pattern, name):
                raise InvalidRequest(
                    f"patternProperties has {pattern!r}, which matches the property {name!r}; they must not "
                    "overlap"
                )
    rest = {key: value for key, value in schema.items() if key != "patternProperties"}
    return {**rest, "properties": named, **({"patternProperties": patterns} if patterns else {})}


def _matches(pattern: str, name: str) -> bool:
    """Return whether a client's pattern matches, by an engine whose time is linear in the text."""
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:  # llguidance reports what is wrong with it
        return False
    return validator.isinstance_python(name)


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with a pattern of properties for `propertyNames`, if it has no other properties."""
    names = schema.get("propertyNames")
    if names is None:
        return schema
    rest = {name: value for name, value in schema.items() if name != "propertyNames"}
    asked = set(names) - {"type", "title", "description", "$comment"} if isinstance(names, dict) else set()
    if names is True or (isinstance(names, dict) and names.get("type", "string") == "string" and not asked):
        return rest
    if {"properties", "patternProperties"} & rest.keys() or len(asked) != 1:
        return schema
    (keyword,) = asked
    allowed = [names[keyword]] if keyword == "const" else names[keyword]
    if keyword in ("enum", "const") and isinstance(allowed, list):
        texts = [_SPECIAL.sub(_ESCAPED, name) for name in allowed if isinstance(name, str)]
        allowed = f"^(?:{'|'.join(texts)})$"
    elif keyword != "pattern":
        return schema
    values = rest.get("additionalProperties", {})
    return {**rest, "patternProperties": {allowed: values}, "additionalProperties": False}
