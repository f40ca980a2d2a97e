"""Inputs of fuzzing that is guided by coverage: bytes without checksums, lengths or seals, which are made
right here, so that a changed byte reaches the readers behind them.

`benchmarks/fuzz_guided.py` runs it; `tests/fuzz/guided.jsonl` has inputs that it found, each of which reaches
code that the others do not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from kvferry.shared.control.seal import Seal
from kvtest.fuzz.files import _RECORD_HEAD, SHAPE, checked, new
from kvtest.fuzz.run import Case
from kvtest.fuzz.targets import _NAMES, pack, sealed, unpack

_MAX_MESSAGES, _MAX_FRAMES = 64, 24
_HEAD_BYTES = _RECORD_HEAD.size + 8


@dataclass(frozen=True)
class Guided:
    """Attributes:
    case_of: a target's case of any bytes.
    input_of: the bytes of a target's case; empty where it has none.
    """

    case_of: Callable[[bytes], Case]
    input_of: Callable[[Case], bytes]


def _record(data: bytes) -> Case:
    return (bytes([data[0] % 5]) + data[1:] if data else b"\0",)


def _control(data: bytes) -> Case:
    name = _NAMES[data[0] % len(_NAMES)] if data else _NAMES[0]
    return (name.encode() + b" " + Seal("/m", "r").close(data[1:]),)


def _control_input(case: Case) -> bytes:
    name, _, message = case[0].partition(b" ")
    try:
        return bytes([_NAMES.index(name.decode())]) + Seal("/m", "r").open(message)
    except Exception:  # its seal is spoilt
        return b""


_HISTORY_HEAD = new(SHAPE).value[: _RECORD_HEAD.size]


_STORED_KINDS = (0, 1, 2, 7)
"""Of the target's, those that are not encrypted; 2 has a checksum."""


def _stored(data: bytes) -> Case:
    kind = _STORED_KINDS[data[0] % len(_STORED_KINDS)] if data else 0
    return (bytes([kind, 0]) + (checked(_HISTORY_HEAD, data[1:]) if kind == 2 else data[1:]),)


def _stored_input(case: Case) -> bytes:
    kind, body = case[0][0], case[0][2:]
    if kind not in _STORED_KINDS:
        return b""
    return bytes([_STORED_KINDS.index(kind)]) + (body[_HEAD_BYTES:] if kind == 2 else body)


def _frames(data: bytes) -> Case:
    """Messages, each the number of its frames, their lengths in 16 bits, and their bytes."""
    messages, at = [], 0
    while at < len(data) and len(messages) < _MAX_MESSAGES:
        count = data[at] % _MAX_FRAMES
        lengths = struct.unpack(f"<{count}H", data[at + 1 : at + 1 + 2 * count].ljust(2 * count, b"\0"))
        at += 1 + 2 * count
        frames = []
        for length in lengths:
            frames.append(data[at : at + length])
            at += length
        messages.append(pack(sealed(frames) if frames else [b""]))
    return tuple(messages)


def _frames_input(case: Case) -> bytes:
    parts = []
    for message in map(unpack, case):
        if len(message) >= _MAX_FRAMES or max(map(len, message)) > 0xFFFF:
            return b""
        parts.append(bytes([len(message)]) + struct.pack(f"<{len(message)}H", *map(len, message)))
        parts += message
    return b"".join(parts)


GUIDED = {
    "records": Guided(_record, lambda case: case[0]),
    "control": Guided(_control, _control_input),
    "sessions": Guided(lambda data: (data,), lambda case: case[0]),
    "stored": Guided(_stored, _stored_input),
    "frames": Guided(_frames, _frames_input),
}


def seeds(name: str, count: int) -> list[bytes]:
    """Inputs of a target's seeded cases."""
    from kvtest.fuzz import TARGETS
    from kvtest.fuzz.run import case_of

    target = TARGETS[name]()
    try:
        made = (GUIDED[name].input_of(case_of(target, 1, number)) for number in range(10 * count))
        return list(islice(filter(None, made), count))
    finally:
        target.close()
