"""Schemas as llguidance takes them: what demands nothing is left out, and answers still follow the schema."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from kvferry.shared.errors import InvalidRequest
from kvferry.shared.sampling.schemas import guided_json

BYTES = llguidance.LLTokenizer("byte")
ONES = {"type": "object", "additionalProperties": {"const": 1}}
NAMED = {"type": "object", "required": ["format"]}
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


def takes(schema: Any, text: str, *, is_compact: bool = False) -> bool:
    """Whether the grammar of the schema allows a text."""
    grammar = LLMatcher.grammar_from_json_schema(guided_json(schema, is_compact=is_compact))
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, ["a", "a"], [1]),
        ({"type": "string", "format": "password"}, "x", 1),
        ({"type": "string", "format": "uri-reference"}, "x", None),
        ({"type": "string", "maxLength": 2**40}, "x", 1),
        ({"type": "integer", **INT64}, -5, 1.5),
        ({"type": "integer", "exclusiveMinimum": -(2**63), "maximum": 10}, -5, 11),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, 5, -1),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, 2.5, "x"),
        ({**ONES, "propertyNames": {"type": "string"}}, {"a": 1}, {"a": 2}),
        ({**ONES, "propertyNames": {"enum": ["a.b", "c"]}}, {"a.b": 1}, {"axb": 1}),
        ({"type": "object", "propertyNames": {"const": "a"}}, {"a": 1}, {"b": 1}),
        ({"type": "object", "propertyNames": {"pattern": "^x-"}, "title": "t"}, {"x-a": 1}, {"a": 1}),
        ({**NAMED, "properties": {"format": {"type": "integer", "format": "int64"}}}, {"format": 1}, {}),
        (
            {
                **NAMED,
                "properties": {"format": {"type": "integer"}},
                "additionalProperties": False,
                "patternProperties": {"^format$": {"minimum": 3}},
            },
            {"format": 3},
            {"format": 2},
        ),
        ({"$schema": "https://example.com/mine", "type": "boolean"}, True, 1),
        ({"type": "string", "not": False, "dependentRequired": {}, "then": {"const": 1}}, "x", 1),
        ({"type": "array", "minContains": 2}, [], 1),
        ({"enum": [{"uniqueItems": False}]}, {"uniqueItems": False}, {}),
        (True, [1, {"a": None}], None),
    ],
)
def test_what_demands_nothing_is_left_out(schema: Any, right: Any, wrong: Any) -> None:
    validator = Draft202012Validator(schema if not isinstance(schema, dict) else {**schema, "$schema": ""})
    assert validator.is_valid(right)
    assert takes(schema, json.dumps(right))
    if wrong is not None:
        assert not validator.is_valid(wrong)
        assert not takes(schema, json.dumps(wrong))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"type": "array", "contains": {"type": "string"}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^a"}},
    ],
)
def test_what_demands_something_that_cannot_be_had_is_refused(schema: Any) -> None:
    grammar = LLMatcher.grammar_from_json_schema(guided_json(schema))
    assert LLMatcher(BYTES, grammar, log_level=0).is_error()


def test_a_pattern_of_several_names_that_matches_a_property_is_refused() -> None:
    schema = {"properties": {"score": {"type": "integer"}}, "patternProperties": {"^s": {"type": "integer"}}}
    with pytest.raises(InvalidRequest, match="score"):
        guided_json({"type": "array", "items": schema})


def test_white_space_is_bounded_or_none() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text, is_compact, taken in (
        ('{"a":1}', False, True),
        ('{ "a" : 1 }', False, True),
        ('{"a":' + " " * 41 + "1}", False, False),
        ('{"a":1}', True, True),
        ('{"a": 1}', True, False),
    ):
        assert takes(schema, text, is_compact=is_compact) is taken
