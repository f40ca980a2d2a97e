"""Units and groups that settings classes annotate their fields with.

    retain_s: Annotated[Seconds, HISTORY] = Field(300.0, ge=0, description="...")

A value is a plain number (bytes, seconds) or has a unit: 10GiB, 512MB, 1.5h, 250ms. Options and variables
take both. Groups are the headings of `--help` and of docs/configuration.md.
"""

from __future__ import annotations

import re
from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError

_BYTES = TypeAdapter(ByteSize)
_UNIT_S = {"ms": 0.001, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(rf"\s*([+-]?\d+(?:\.\d+)?)\s*({'|'.join(_UNIT_S)})\s*")


def parse_bytes(value: object) -> object:
    """Parse the bytes in text with a unit; other values stay as they are, for pydantic to judge."""
    if not isinstance(value, str) or not value.strip()[-1:].isalpha():
        return value
    try:
        return int(_BYTES.validate_python(value))
    except ValidationError:
        raise ValueError("input should be bytes: a number, or one with a unit (512MB, 10GiB)") from None


def parse_seconds(value: object) -> object:
    """Parse the seconds in text with a unit; other values stay as they are, for pydantic to judge."""
    if not isinstance(value, str) or not value.strip()[-1:].isalpha():
        return value
    if (found := _DURATION.fullmatch(value)) is None:
        raise ValueError(f"input should be seconds: a number, or one with a unit ({', '.join(_UNIT_S)})")
    return float(found[1]) * _UNIT_S[found[2]]


def show_bytes(size_bytes: int) -> str:
    """Format bytes as an option takes them: 4GiB, 32MiB, 0."""
    return ByteSize(size_bytes).human_readable().replace(".0", "") if size_bytes else "0"


def show_seconds(duration_s: float) -> str:
    """Format seconds as an option takes them, in the largest whole unit: 7d, 30min, 2s, 250ms, 0."""
    for unit in ("d", "h", "min", "s"):
        if duration_s and duration_s % _UNIT_S[unit] == 0:
            return f"{duration_s / _UNIT_S[unit]:g}{unit}"
    return f"{duration_s * 1000:g}ms" if duration_s else "0"


Bytes = Annotated[int, BeforeValidator(parse_bytes), Parameter(metavar="BYTES", show_default=show_bytes)]
Seconds = Annotated[
    float, BeforeValidator(parse_seconds), Parameter(metavar="TIME", show_default=show_seconds)
]


def group(title: str) -> Parameter:
    """Make a heading; headings come in the order in which they are made."""
    return Parameter(group=Group.create_ordered(title))


JSON = Parameter(name="--json", negative=())
"""The option of a field `json_output`: a setting cannot be named `json`."""
MODEL = group("Model")
NETWORK = group("Addresses")
ACCESS = group("Clients")
COMPRESSION = group("Compression")
CAPACITY = group("Capacity")
HISTORY = group("Sessions and history")
TIMEOUTS = group("Timeouts and recovery")
PROCESS = group("Start, stop and logs")
