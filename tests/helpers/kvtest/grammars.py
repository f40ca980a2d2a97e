"""Grammars that take much to follow, and ordinary ones."""

from __future__ import annotations

import json
from typing import Any

from kvferry.shared.sampling.params import Grammar

_CHOICES = " | ".join(" ".join("s" * count) for count in range(2, 14))
COSTLY = Grammar(kind="lark", text=f'start: "z" s | /[a-y]+/\ns: {_CHOICES} | /[a-z ]/')
"""If its first token is a z, its masks soon take a tenth of a second and more."""


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT = {"type": "string"}
_NAMES = [f"warehouse {number * 7919 % 1000} of {number}" for number in range(1000)]
_TOOL = _object(
    path=_TEXT,
    command={"enum": ["view", "create", "replace", "insert"]},
    lines={"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2},
    at={"type": "string", "format": "date-time"},
    options={"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
)
_TREE = _object(value=_TEXT, children={"type": "array", "items": {"$ref": "#/$defs/tree"}})
_NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(20):
    _NESTED = _object(name=_TEXT, child=_NESTED)
_SCHEMAS = {
    "any_object": {"type": "object"},
    "enum_of_1000": {"type": "array", "items": _object(one={"enum": _NAMES}, other={"enum": _NAMES})},
    "long_texts": _object(**{f"text{i}": {"type": "string", "maxLength": 5000} for i in range(8)}),
    "nested": _NESTED,
    "tree": {"$defs": {"tree": _TREE}, "$ref": "#/$defs/tree"},
    "tool": _TOOL,
    "tools": {"anyOf": [_object(name={"const": f"tool{i}"}, arguments=_TOOL) for i in range(40)]},
    "optional": {"type": "object", "properties": {f"field{i}": _TEXT for i in range(200)}},
    "email": {"type": "array", "items": {"type": "string", "pattern": r"^[\w.%+-]+@[\w.-]+\.[a-zA-Z]{2,}$"}},
    "bounds": {"type": "array", "items": {"type": "number", "minimum": 0.5, "maximum": 99.25}},
}
_REGEXES = {
    "anything": r"(?s:.*)",
    "contains": r".*(yes|no|maybe).*",
    "length": r".{10,2000}",
    "lines": r"(- [^\n]{1,200}\n){1,20}",
    "thoughts": r"<think>(?s:.{0,4000})</think>\n\n(A|B|C|D)",
    "words": r"[A-Z][a-z]+( [a-z]+){3,12}\.",
    "letters": r"\p{L}{2,50}( \p{L}{2,50}){0,20}",
}
_JSON = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= ([ \t\n] ws)?"""
ORDINARY = {
    **{name: Grammar(kind="json_schema", text=json.dumps(schema)) for name, schema in _SCHEMAS.items()},
    **{name: Grammar(kind="regex", text=text) for name, text in _REGEXES.items()},
    "choice_of_1000": Grammar(kind="choice", text=json.dumps(_NAMES)),
    "llama.cpp's JSON": Grammar(kind="grammar", text=_JSON),
}
