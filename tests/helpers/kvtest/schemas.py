"""Random JSON schemas and regular expressions, the same for the same seed, whose outputs are mostly short.

Used by the tests and by `benchmarks/structured_output.py`.
"""

from __future__ import annotations

import random
import string
from typing import Any

_WORDS = (
    "name",
    "age",
    "city",
    "tags",
    "items",
    "id",
    "score",
    "kind",
    "when",
    "note",
    "a b",
    "x-y",
    "größe",
)
_PATTERNS = (r"^[a-z]{1,6}$", r"^[A-Z][a-z]+-\d{2}$", r"^(red|green|blue)$", r"^\d{3}-\d{4}$", r"^a*b$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of objects, arrays, numbers, texts, enumerations, unions and references."""
    schema = _object(rng, depth) if rng.random() < 0.7 else _value(rng, depth)
    if rng.random() < 0.15:
        schema = {
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/part"}, "rest": _array(rng, {"$ref": "#/$defs/part"})},
            "required": ["first", "rest"],
            "additionalProperties": False,
            "$defs": {"part": schema},
        }
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _integer, _number, _choice, lambda _: {"type": rng.choice(["boolean", "null"])}]
    if depth > 0:
        kinds += [
            lambda r: _object(r, depth - 1),
            lambda r: _array(r, _value(r, depth - 1)),
            lambda r: {"anyOf": [_value(r, depth - 1) for _ in range(r.randint(2, 3))]},
            lambda r: {"type": ["string", "null"], "maxLength": 5},
        ]
    return rng.choice(kinds)(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        schema["additionalProperties"] = {"type": "boolean"}
    return schema


def _array(rng: random.Random, items: dict[str, Any]) -> dict[str, Any]:
    fewest = rng.randint(0, 2)
    return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + rng.randint(0, 2)}


def _text(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    fewest = rng.randint(0, 3)
    return {"type": "string", "minLength": fewest, "maxLength": fewest + rng.randint(0, 8)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _number(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "number"}
    low = rng.randint(-100, 100) / 4
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 40) / 4}


def _choice(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice(["fixed", 7, True, None])}
    return {"enum": rng.sample(["a", "b b", 'quo"te', 1, 2.5, None, True, "ü"], rng.randint(1, 4))}


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A regular expression in the syntax that Python and Rust share."""
    parts = [_regex_part(rng, depth) for _ in range(rng.randint(1, 4))]
    return "".join(parts)


def _regex_part(rng: random.Random, depth: int) -> str:
    atom = rng.choice(
        [
            "".join(rng.choices(string.ascii_lowercase + " ", k=rng.randint(1, 5))),
            rng.choice([r"\d", r"\w", r"[a-f]", r"[^x]", r"[A-Z0-9_]", r"\.", r"\s"]),
            rng.choice(["ä", "→", "[à-ÿ]", r"\+", r"\("]),
        ]
    )
    if depth > 0 and rng.random() < 0.4:
        atom = f"({'|'.join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3)))})"
    elif len(atom) > 1 and atom[0] not in "\\[":
        return atom
    return atom + rng.choice(["", "", "?", "{2}", "{1,3}", "{0,2}"])
