"""Random JSON schemas, regular expressions and grammars that are made to cost time, memory or stack.

Used by `benchmarks/hostile_grammars.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

MODEL = "hostile"
_MAX_TOKENS = 8
_HERE = "<the grammar>"
_SAID = [{"role": "user", "content": "answer"}]
_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _SAID, "max_tokens": _MAX_TOKENS},
    "/v1/completions": {"prompt": "answer", "max_tokens": _MAX_TOKENS},
    "/v1/responses": {"input": "answer", "max_output_tokens": _MAX_TOKENS},
    "/v1/messages": {"messages": _SAID, "max_tokens": _MAX_TOKENS},
}


@dataclass(frozen=True, kw_only=True)
class HostileRequest:
    """A request.

    Attributes:
        kind: what is hostile in it.
        field: what asks for it.
        body: JSON; nested too deeply for Python's own encoder, perhaps.
    """

    kind: str
    path: str
    field: str
    body: str


def hostile_request(seed: int, number: int) -> HostileRequest:
    """Return the request with this number, the same for the same seed."""
    rng = Random(f"hostile grammars {seed} {number}")
    makers, fields = rng.choices(
        ((_SCHEMAS, _SCHEMA_FIELDS), (_REGEXES, _REGEX_FIELDS), (_GRAMMARS, _GRAMMAR_FIELDS)), (3, 1, 1)
    )[0]
    make = rng.choice(makers)
    path, field, asked = rng.choice(fields)
    grammar = make(rng)
    if makers is not _SCHEMAS or field in ("json_schema", "guided_json"):
        grammar = json.dumps(grammar)
    body = json.dumps({"model": MODEL, **_BODIES[path], **asked}).replace(json.dumps(_HERE), grammar)
    return HostileRequest(kind=make.__name__.strip("_"), path=path, field=field, body=body)


def _size(rng: Random, low: int, high: int) -> int:
    """A number of any magnitude."""
    return round(low * (high / low) ** rng.random())


# ---- JSON schemas, as texts ------------------------------------------------------------------------------


def _nested(rng: Random) -> str:
    begin, end = rng.choice(
        (
            ('{"items":', "}"),
            ('{"properties":{"a":', "}}"),
            ('{"anyOf":[{"type":"null"},', "]}"),
            ('{"allOf":[', "]}"),
            ('{"not":', "}"),
            ('{"type":"array","minItems":2,"items":', "}"),
            ('{"const":[', "]}"),
        )
    )
    depth = _size(rng, 5, 20_000)
    return begin * depth + '{"type":"integer"}' + end * depth


def _unclosed(rng: Random) -> str:
    # as JSON it would be refused with the body
    return json.dumps({"enum": [rng.choice("[{(") * _size(rng, 10, 100_000)]})


def _wide(rng: Random) -> str:
    names = [f"{rng.choice(_WORDS)}{i}" for i in range(_size(rng, 10, 8_000))]
    part: Any = rng.choice(({}, {"type": "integer"}, {"enum": ["a", 1]}, {"type": "string", "maxLength": 9}))
    return json.dumps(
        rng.choice(
            (
                {"type": "object", "properties": dict.fromkeys(names, part), "required": names},
                {"type": "object", "properties": dict.fromkeys(names, part)},
                {"anyOf": [{"type": "object", "properties": {name: part}} for name in names]},
                {"oneOf": [{"const": name} for name in names]},
                {"type": "array", "prefixItems": [part for _ in names], "items": False},
            )
        )
    )


def _chained(rng: Random) -> str:
    length = _size(rng, 5, 4_000)

    def link(ref: dict[str, str]) -> Any:
        return {
            "properties": {"properties": {"n": ref}},
            "anyOf": {"anyOf": [{"type": "null"}, ref]},
            "allOf": {"allOf": [ref, {}]},
            "ref": ref,
            "items": {"items": ref},
        }[form]

    form = rng.choice(("properties", "anyOf", "allOf", "ref", "items"))
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def _cyclic(rng: Random) -> str:
    length = rng.randint(1, 20)
    links: dict[str, Any] = {}
    for i in range(length):
        ref = {"$ref": f"#/$defs/d{rng.randrange(length)}"}
        links[f"d{i}"] = rng.choice(
            (ref, {"anyOf": [ref, {"$ref": "#"}]}, {"allOf": [ref, ref]}, {"items": ref, "minItems": 1})
        )
    return json.dumps({"$defs": links, "$ref": "#/$defs/d0"})


def _doubling(rng: Random) -> str:
    depth = _size(rng, 4, 60)
    form = rng.choice(("properties", "allOf", "anyOf", "oneOf"))
    links: dict[str, Any] = {}
    for i in range(depth):
        ref = {"$ref": f"#/$defs/d{i + 1}"}
        both: Any = {"a": ref, "b": ref} if form == "properties" else [ref, {"properties": {f"p{i}": ref}}]
        links[f"d{i}"] = {form: both}
    return json.dumps({"$defs": {**links, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def _overlapping(rng: Random) -> str:
    number = _size(rng, 2, 60)
    patterns = [f".*{rng.choice(_LETTERS)}.{{{rng.randint(0, i + 1)}}}" for i in range(number)]
    return json.dumps(
        rng.choice(
            (
                {"allOf": [{"properties": {"x": {"type": "string", "pattern": p}}} for p in patterns]},
                {"allOf": [{"type": "string", "pattern": p} for p in patterns]},
                {"type": "object", "patternProperties": {p: {"const": i} for i, p in enumerate(patterns)}},
                {
                    "type": "object",
                    "patternProperties": {p: {"minimum": i} for i, p in enumerate(patterns)},
                    "properties": {"aaa": {"type": "string"}, "bbb": {"type": "integer"}},
                    "required": ["aaa", "bbb"],
                    "additionalProperties": False,
                },
                {"oneOf": [{"type": "string", "pattern": p} for p in patterns]},
            )
        )
    )


def _repeated(rng: Random) -> str:
    low, high = sorted(_size(rng, 1, 10**9) for _ in range(2))
    inner: Any = rng.choice(({}, {"type": "string", "minLength": low, "maxLength": high}, {"enum": [1, "b"]}))
    for _ in range(rng.randint(1, 4)):
        inner = {"type": "array", "items": inner, "minItems": low, "maxItems": high}
    objects = {"type": "object", "minProperties": low, "maxProperties": high, "additionalProperties": inner}
    counted = {"type": "string", "pattern": f"^((a{{{_size(rng, 1, 900)}}}b?){{1,{_size(rng, 1, 900)}}})$"}
    return json.dumps(rng.choice((inner, objects, counted)))


def _enumerated(rng: Random) -> str:
    number = _size(rng, 100, 15_000)
    if rng.random() < 0.5:
        return json.dumps({"enum": [rng.getrandbits(rng.choice((8, 40))) for _ in range(number)]})
    return json.dumps({"enum": ["a" * (i % 50) + str(i) for i in range(min(number, 8_000))]})


def _numeric(rng: Random) -> str:
    value = rng.choice((1e-308, 1e308, 0.1, 1e-9, 7, 10**18, -(10**30), 3.3333333, 2**53 + 1))
    names = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    chosen = {name: value * rng.choice((1, 3, 0.7)) for name in rng.sample(names, rng.randint(1, 4))}
    multiples = [{"multipleOf": rng.randint(2, 10**6)} for _ in range(rng.randint(1, 12))]
    return json.dumps({"type": rng.choice(("number", "integer")), **chosen, "allOf": multiples})


def _odd(rng: Random) -> str:
    return rng.choice(
        (
            '{"type": 5}',
            '{"type": ["string", "nothing"]}',
            '{"properties": []}',
            '{"type": "string", "pattern": "(((("}',
            '{"$ref": 5}',
            '{"$ref": "file:///etc/hostname"}',
            '{"$ref": "http://127.0.0.1:9/schema"}',
            '{"$ref": "#/$defs/none"}',
            '{"type": "string", "format": "nothing"}',
            '{"const": NaN}',
            '{"minimum": Infinity}',
            '{"minimum": 1' + "0" * 5000 + "}",
            '{"enum": []}',
            '{"enum": ["\\ud800"]}',
            '{"pattern": "\\u0000", "type": "string"}',
            '{"properties": {"": {"": {"": {}}}}, "required": [""]}',
            '{"properties": {"__proto__": {}, "\\ufdd0": {}}, "required": ["\\ufdd0", "x"]}',
            '{"type": "string", "minLength": -1}',
            '{"type": "string", "minLength": 9, "maxLength": 3}',
            '{"if": {"type": "string"}, "then": {"minLength": 3}, "else": false}',
            '{"dependentRequired": {"a": ["b"]}, "unevaluatedProperties": false}',
            '{"$dynamicRef": "#a", "$dynamicAnchor": "a"}',
            '{"x-guidance": {"item_separator": "(.*)*", "lenient": true}}',
            '{"%regex": {"substring_chars": "' + "ab" * 5000 + '"}}',
            "false",
            "true",
            "[]",
            "null",
        )
    )


def _mixed(rng: Random) -> str:
    parts = [rng.choice(_SCHEMAS)(rng) for _ in range(2)]
    form = rng.choice(
        ('{"allOf":[%s,%s]}', '{"anyOf":[%s,%s]}', '{"oneOf":[%s,%s]}', '{"items":%s,"contains":%s}')
    )
    return form % tuple(parts)


# ---- regular expressions ---------------------------------------------------------------------------------


def _counted_regex(rng: Random) -> str:
    text = rng.choice(("a", "(a|b)", "[a-z]", ".", "(a?b*)", r"\w"))
    for _ in range(rng.randint(1, 5)):
        low = _size(rng, 1, 1_000)
        text = f"({text}){{{rng.choice((0, low))},{rng.choice((low, low * 2, ''))}}}"
    return text


def _alternating_regex(rng: Random) -> str:
    words = ["".join(rng.choices(_LETTERS[:3], k=rng.randint(1, 30))) for _ in range(_size(rng, 5, 5_000))]
    return f"({'|'.join(words)}){rng.choice(('', '*', '+', '{20}'))}"


def _intersecting_regex(rng: Random) -> str:
    parts = [f"(.*{rng.choice(_LETTERS)}.{{{_size(rng, 1, 80)}}})" for _ in range(rng.randint(2, 30))]
    return rng.choice((" & ", "&", "|")).join([rng.choice(("", "~")) + part for part in parts])


def _class_regex(rng: Random) -> str:
    several = "".join(rf"\u{rng.randrange(0x100, 0xD000):04x}" for _ in range(_size(rng, 5, 3_000)))
    one = rng.choice(
        (r"[\u0000-\U0010ffff]", r"\p{L}", r"[^a]", f"[{several}]", f"[^{several}]", r"(?i:[k-s])")
    )
    return f"({one}{{{_size(rng, 1, 500)}}}|{one}*x){rng.choice(('', '*', '{1,50}'))}"


def _exploding_regex(rng: Random) -> str:
    number = _size(rng, 5, 400)
    return rng.choice(
        (f"^.*a.{{{number}}}$", f"(a?){{{number}}}a{{{number}}}", "(a*)*" * number, "(.*)" * number)
    )


def _broken_regex(rng: Random) -> str:
    parts = (
        "(",
        ")",
        "[",
        "{9999999999}",
        "*",
        "+",
        "|",
        r"\1",
        "(?=a)",
        r"\b",
        "(?P<x>",
        "$^",
        "\\",
        "\x00",
        "&",
        "~",
    )
    return "".join(rng.choices(parts, k=_size(rng, 1, 300))) or "("


# ---- grammars: Lark and EBNF -----------------------------------------------------------------------------


def _chained_grammar(rng: Random) -> str:
    length, is_rule = _size(rng, 5, 5_000), rng.random() < 0.6
    begin = "r" if is_rule else "R"
    rules = [f"{begin}{i}: {rng.choice(_LEAVES)} {begin}{i + 1}" for i in range(length)]
    return "\n".join([f"start: {begin}0", *rules, f'{begin}{length}: "a"'])


def _ambiguous_grammar(rng: Random) -> str:
    names = _LETTERS[: rng.randint(1, 6)]
    rules = []
    for name in names:
        sides = [" ".join(rng.choices(names, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
        rules.append(
            f"{name}: {' | '.join([*sides, rng.choice(_LEAVES), ''][: len(sides) + rng.randint(1, 2)])}"
        )
    return "\n".join([f"start: {names[0]}", *rules])


def _empty_loops_grammar(rng: Random) -> str:
    depth = _size(rng, 1, 300)
    return f"start: {'(' * depth}a{rng.choice((')*', ')?', ')+')) * depth}\na: b* c?\nb: a | \nc: b b | \n"


def _terminals_grammar(rng: Random) -> str:
    number = _size(rng, 10, 4_000)
    bodies = (r"/[a-z]+/", r"/.*a.{9}/", '"word%d"', r"/(x|y){%d}/")
    rules = [f"T{i}: " + (body % i if "%d" in (body := rng.choice(bodies)) else body) for i in range(number)]
    return "\n".join([f"start: ({' | '.join(f'T{i}' for i in range(number))})+", *rules])


def _repeated_grammar(rng: Random) -> str:
    low, high = sorted(_size(rng, 1, 10**6) for _ in range(2))
    inner = f'a: b{{{rng.randint(0, 99)},{high}}} | "y"\nb: "x" | /[a-z]{{{low % 999}}}/'
    return f"start: a{{{low},{high}}}\n{inner}"


def _nested_grammar(rng: Random) -> str:
    depth = _size(rng, 10, 60_000)
    return rng.choice(
        (f'start: {"(" * depth}"a"{")" * depth}', f"start: {'(' * depth}", f"start: {'[' * depth}")
    )


def _schema_grammar(rng: Random) -> str:
    return f'start: "x" j | j j\nj: %json {rng.choice(_SCHEMAS)(rng)}'


def _ebnf_grammar(rng: Random) -> str:
    length = _size(rng, 2, 1_000)
    rules = [
        f'r{i} ::= "a" r{rng.randrange(length)} | r{rng.randrange(length)} "b" | ""' for i in range(length)
    ]
    return "\n".join(["root ::= r0", *rules])


def _broken_grammar(rng: Random) -> str:
    whole = rng.choice(_GRAMMARS[:-1])(rng)
    parts = [
        whole[(at := rng.randrange(len(whole) + 1)) : at + rng.randint(1, 40)]
        for _ in range(rng.randint(1, 20))
    ]
    return "".join(parts) or "start"


_WORDS = ("name", "größe", "a b", "x-y", '"', "\\", "id")
_LEAVES = ('"a"', '"b"', "/[a-c]*/", '""')
_LETTERS = "abcdefghij"
_Makers = tuple[Callable[[Random], str], ...]
_SCHEMAS: _Makers = (
    *(
        _nested,
        _unclosed,
        _wide,
        _chained,
        _cyclic,
        _doubling,
        _overlapping,
        _repeated,
        _enumerated,
        _numeric,
    ),
    *(_odd, _mixed),
)
_REGEXES: _Makers = (
    *(_counted_regex, _alternating_regex, _intersecting_regex, _class_regex, _exploding_regex, _broken_regex),
)
_GRAMMARS: _Makers = (
    *(_chained_grammar, _ambiguous_grammar, _empty_loops_grammar, _terminals_grammar, _repeated_grammar),
    *(_nested_grammar, _schema_grammar, _ebnf_grammar, _broken_grammar),
)

# ---- what asks for them ----------------------------------------------------------------------------------

_CHAT, _TEXT, _RESPONSES, _MESSAGES = _BODIES
_NAMED = {"type": "json_schema", "name": "answer", "schema": _HERE}
_TOOL = {"name": "call", "parameters": _HERE}
_SCHEMA_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    (_CHAT, "response_format", {"response_format": {"type": "json_schema", "json_schema": _NAMED}}),
    (_CHAT, "tools", {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"}),
    (_CHAT, "guided_json", {"guided_json": _HERE}),
    (_CHAT, "json_schema", {"json_schema": _HERE}),
    (_TEXT, "structured_outputs", {"structured_outputs": {"json": _HERE, "disable_any_whitespace": True}}),
    (_RESPONSES, "text.format", {"text": {"format": _NAMED}}),
    (_RESPONSES, "tools", {"tools": [{"type": "function", **_TOOL}], "tool_choice": "required"}),
    (
        _MESSAGES,
        "tools",
        {"tools": [{"name": "call", "input_schema": _HERE}], "tool_choice": {"type": "any"}},
    ),
]
_REGEX_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    (_CHAT, "guided_regex", {"guided_regex": _HERE}),
    (_CHAT, "structured_outputs", {"structured_outputs": {"regex": _HERE}}),
    (_TEXT, "regex", {"regex": _HERE}),
    (_RESPONSES, "structured_outputs", {"structured_outputs": {"regex": _HERE}}),
]
_GRAMMAR_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    (_CHAT, "guided_grammar", {"guided_grammar": _HERE}),
    (_CHAT, "structured_outputs", {"structured_outputs": {"grammar": _HERE}}),
    (_TEXT, "ebnf", {"ebnf": _HERE}),
    (_MESSAGES, "structured_outputs", {"structured_outputs": {"grammar": _HERE}}),
]
