"""Readers of what is stored: session files, records in Redis, history in Redis and on disk."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
import xxhash
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from kvferry.services.router.http.body import _parse
from kvferry.services.router.http.errors import error_response, from_framework
from kvferry.services.router.sessions.record import SessionFile, SessionRecord, StoredResponse
from kvferry.services.router.sessions.stored_record import (
    decode_summary,
    read_record,
    write_parts,
    write_whole,
)
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss, InvalidRequest, StoreUnavailable
from kvferry.shared.history import stored_format
from kvferry.shared.history.disk_history import DiskHistory
from kvferry.shared.history.records import StoredRecord
from kvferry.shared.history.rows import Piece, RowChunk, RowPrecision, Segment
from kvferry.shared.history.storage import new_record
from kvferry.shared.history.stored_format import StoredShape, TierRecord
from kvferry.shared.model.chat_template import ChatMessage
from kvferry.shared.model.spec import Heads, ModelSpec
from kvferry.shared.trust.at_rest import AtRestKeys
from kvtest.fuzz.mutate import spoilt_bytes, spoilt_tree
from kvtest.fuzz.run import Case, Target
from kvtest.fuzz.targets import spoilt_record

SESSION = SessionKey(owner="o", session_id="s")
SPEC = ModelSpec(
    name="demo", fingerprint="f", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=704,
    max_model_len=512, dtype="float32", eos_token_ids=(6,),
)  # fmt: skip
RECORD = SessionRecord(
    kind="chat",
    model_fingerprint="f",
    token_ids=(1, 2, 3, 4, 5),
    messages=(ChatMessage("user", "a"), ChatMessage("assistant", "b", '{"tool_calls": []}')),
    assistant_ends=(5,),
    turns=1,
    last_plan={"method": "full", "prefill_ms": 0.5},
    prefill_addresses=("a:1",),
    responses=(StoredResponse(id="r", num_messages=2, body="{}"),),
    document_ids=("d",),
)

# ---- session files ---------------------------------------------------------------------------------------


def make_session(rng: Random) -> Case:
    file: Any = SessionFile.of(SESSION, replace(RECORD, document_ids=()), "demo").model_dump()
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        file = spoilt_tree(rng, file)
    try:
        data = json.dumps(file).encode()
    except (RecursionError, UnicodeEncodeError):
        data = b"{"
    if rng.random() < 0.2:
        data = spoilt_bytes(rng, data)
    if rng.random() < 0.002:
        data = rng.choice((b"[", b'{"a":', b'{"token_ids":[', b'{"messages":[{},')) * rng.randrange(50_000)
    return (data,)


def read_session(case: Case) -> str:
    """As the route does it: JSON, fields, then what the model says."""
    try:
        body: Any = _parse(case[0])
        try:
            file = SessionFile.model_validate(body)
        except ValidationError as error:
            wrong = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
            refusal = from_framework(RequestValidationError(wrong, body=body), "POST", "/v1/sessions/import")
            assert isinstance(refusal, InvalidRequest)
            assert len(refusal.message) < 2000
            error_response(refusal, "/v1/sessions/import")
            return f"refused {refusal.reason}"
        record = file.record(SPEC)
    except InvalidRequest as error:
        error_response(error, "/v1/sessions/import")
        return f"refused {str(error.param or 'body').split('[')[0]}"
    written = write_parts(record, None)
    assert read_record(written.head, written.parts) == record
    assert SessionFile.of(SESSION, record, "demo").record(SPEC) == replace(record, last_plan=None)
    return "read"


# ---- records in Redis ------------------------------------------------------------------------------------

_WHOLE = write_whole(RECORD)
_FIRST = write_parts(replace(RECORD, token_ids=(1, 2, 3), messages=RECORD.messages[:1], responses=()), None)
_SECOND = write_parts(RECORD, _FIRST.record)
_HEAD_AND_PARTS = (_SECOND.head, *_FIRST.parts, *_SECOND.parts)


def framed(values: Sequence[bytes]) -> bytes:
    """A record's head and parts as one case."""
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)


def unframed(data: bytes) -> list[bytes]:
    """What `framed` made, of whatever bytes are left of it."""
    values = []
    while data:
        size_bytes = int.from_bytes(data[:4], "little")
        values.append(data[4 : 4 + size_bytes])
        data = data[4 + size_bytes :]
    return values or [b""]


def spoilt_parts(rng: Random) -> bytes:
    """A record's head and parts: one of them spoilt, or all of them in another order."""
    values = list(_HEAD_AND_PARTS)
    number = rng.randrange(len(values))
    match rng.randrange(5):
        case 0 | 1:
            values[number] = spoilt_record(rng, values[number])
        case 2:
            values[number] = spoilt_bytes(rng, values[number])
        case 3:
            values[number] = rng.choice((*_FIRST.parts, *_SECOND.parts, _WHOLE.head, _FIRST.head))
        case _:
            del values[number]
    return framed(values)


_KEYS = AtRestKeys((b"k" * 32,))
_PRECISION = RowPrecision(bits="8", dtype=torch.float32)
SHAPE = StoredShape(
    fingerprint="f", heads=(Heads(num_kv_heads=2, group_size=1, head_dim=4),) * 2, precision=_PRECISION
)
SEALED_SHAPE = replace(SHAPE, keys=_KEYS)
TOKENS = tuple(range(1, 41))


def chunks() -> list[list[RowChunk]]:
    rows = torch.arange(2 * len(TOKENS) * 4, dtype=torch.float32).reshape(2, len(TOKENS), 4)
    return [[_PRECISION.encode(rows + layer, -rows)] for layer in range(2)]


def new(shape: StoredShape) -> Any:
    piece = Piece(segment=Segment(chunks(), len(TOKENS)), length=len(TOKENS))
    record = StoredRecord(token_ids=TOKENS, pieces=(piece,), num_exact_tokens=0)
    return new_record(
        SESSION, record, shape=shape, base=None, num_base_tokens=0, method="full", value_bytes=256
    )


_RECORD_HEAD = struct.Struct("<4sHH16sII")


def checked(head: bytes, body: bytes) -> bytes:
    """A record of history whose sizes and checksum are right."""
    values = list(_RECORD_HEAD.unpack(head))
    values[4] = len(body)
    head = _RECORD_HEAD.pack(*values)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)) + body


_MAX_SPOILT_BYTES = 1 << 20


class _Stored:
    """Kinds: 0 a session's record of version 1, 1 its summary, 2 a record of history, 3 a value, 4 and 5 the
    last two encrypted, 6 a session's record encrypted, 7 its head and parts."""

    def __init__(self) -> None:
        self._plain, self._sealed = new(SHAPE), new(SEALED_SHAPE)
        self._values = [value for _, _, value in self._plain.values()]
        self._sealed_values = [value for _, _, value in self._sealed.values()]
        self._spans = [(layer, index) for layer, index, _ in self._plain.values()]
        self._first = [0]
        for count in self._plain.entry.value_tokens:
            self._first.append(self._first[-1] + count)

    def make(self, rng: Random) -> Case:
        kind = rng.randrange(8)
        number = rng.randrange(len(self._values))
        head_bytes = _RECORD_HEAD.size + 8
        plain: list[bytes] = [
            _WHOLE.head, msgspec.msgpack.encode(RECORD.summary), self._plain.value, self._values[number],
            self._sealed.value, self._sealed_values[number], b"", framed(_HEAD_AND_PARTS),
        ]  # fmt: skip
        data = plain[kind]
        if kind == 6:
            data = _KEYS.seal("o", spoilt_record(rng, plain[0]), context="s record")
        for _ in range(rng.choice((0, 1, 1, 1, 3))):
            if len(data) > _MAX_SPOILT_BYTES:
                break  # a long value, spoilt twice, has gigabytes
            if kind == 7 and rng.random() < 0.9:
                data = spoilt_parts(rng)
            elif kind in (0, 1) and rng.random() < 0.7:
                data = spoilt_record(rng, data)
            elif kind == 2 and rng.random() < 0.7 and len(data) >= head_bytes:
                data = checked(data[: _RECORD_HEAD.size], spoilt_record(rng, data[head_bytes:]))
            elif kind in (0, 2) and rng.random() < 0.3 and len(data) >= head_bytes:
                data = checked(data[: _RECORD_HEAD.size], spoilt_bytes(rng, data[head_bytes:]))
            else:
                data = spoilt_bytes(rng, data)
        return (bytes([kind, number]) + data,)

    def read(self, case: Case) -> str:
        kind, number, data = case[0][0], case[0][1], case[0][2:]
        try:
            if kind in (0, 6, 7):
                if kind == 6:
                    data = _KEYS.open("o", data, context="s record")
                head, *parts = unframed(data) if kind == 7 else [data]
                self._check_parts(read_record(head, parts))
            elif kind == 1:
                decode_summary(data)
            elif kind in (2, 4):
                shape = SHAPE if kind == 2 else SEALED_SHAPE
                self._check(stored_format.read_record(shape.opened(SESSION, data), SESSION))
            else:
                shape = SHAPE if kind == 3 else SEALED_SHAPE
                layer, index = self._spans[number]
                chunk = stored_format.read_chunk(
                    shape.opened(SESSION, data), shape=shape,
                    segment_id=(self._plain if kind == 3 else self._sealed).entry.segment_id,
                    layer=layer, first_token=self._first[index],
                    num_tokens=self._plain.entry.value_tokens[index],
                )  # fmt: skip
                assert chunk.num_tokens == self._plain.entry.value_tokens[index]
        except (HistoryMiss, StoreUnavailable) as error:
            return f"{kind} {error.reason}"
        except Exception as error:
            if kind == 6 and type(error).__name__ == "Unreadable":
                return "6 key"
            raise
        return f"{kind} read"

    def _check_parts(self, record: SessionRecord) -> None:
        """What the next turn does with a record that was read."""
        longer = replace(record, token_ids=(*record.token_ids, 6), turns=record.turns + 1)
        written = write_parts(longer, record)
        assert written.num_kept == len(record.parts)
        whole = write_parts(longer, None)
        again = read_record(whole.head, whole.parts)
        # NaN differs from itself; a plan that was recorded may have one.
        assert again == longer or repr(replace(again, parts=())) == repr(replace(longer, parts=()))

    def _check(self, record: TierRecord) -> None:
        """What the storages do with a record that was read."""
        for want in stored_format.wanted_values(record, 0, len(record.token_ids)):
            assert 0 <= want.low < want.high <= want.num_tokens
        assert record.size_bytes >= 0


# ---- history on disk -------------------------------------------------------------------------------------


class _Disk:
    """A folder with one session, one of whose files is spoilt: 0 the record, 1 the segment."""

    def __init__(self, folder: Path, shape: StoredShape) -> None:
        self._disk = DiskHistory(folder, max_bytes=1 << 30, shape=shape, ttl_s=1e9)
        self._disk.write(SESSION, None, new(shape))
        (session,) = (path for path in folder.iterdir() if path.is_dir())
        self._paths = [session / "record", *session.glob("*.safetensors")]
        self._good = [path.read_bytes() for path in self._paths]
        record = self._disk.record(SESSION)
        assert record is not None
        self._record = record
        self._rows = [self._load(layer) for layer in range(2)]

    def _load(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        loaded = self._disk.load(SESSION, self._record, layer, 3, len(TOKENS))
        return [chunk.rows() for chunk in loaded]

    def make(self, rng: Random) -> Case:
        which = int(rng.random() < 0.8)
        data = self._good[which]
        for _ in range(rng.choice((1, 1, 1, 3))):
            length = int.from_bytes(data[:8], "little")
            if which and rng.random() < 0.5 and length < len(data):
                data = _with_header(rng, data[8 : 8 + length], data[8 + length :])
            else:
                data = spoilt_bytes(rng, data)
        return (bytes([which]) + data,)

    def read(self, case: Case) -> str:
        which, data = case[0][0], case[0][1:]
        try:
            self._paths[which].write_bytes(data)
            record = self._disk.record(SESSION)
            if record is None:
                return "none"
            for layer in range(2):
                for (keys, values), (own_keys, own_values) in zip(
                    self._load(layer), self._rows[layer], strict=True
                ):
                    assert torch.equal(keys, own_keys), "other rows were read"
                    assert torch.equal(values, own_values), "other rows were read"
        except (HistoryMiss, StoreUnavailable) as error:
            return f"{which} {error.reason}"
        finally:
            self._paths[which].write_bytes(self._good[which])
        return f"{which} read"


def _with_header(rng: Random, header: bytes, rest: bytes) -> bytes:
    """A segment with another header of JSON, whose length is right or nearly so."""
    try:
        encoded = json.dumps(spoilt_tree(rng, json.loads(header))).encode()
    except (ValueError, RecursionError):
        encoded = spoilt_bytes(rng, header)
    length = len(encoded) + rng.choice((0, 0, 0, 1, -1, 2**40))
    return max(0, length).to_bytes(8, "little") + encoded + rest


def sessions_target() -> Target:
    return Target(name="sessions", make=make_session, read=read_session, max_bytes=(256, 1 << 20))


def stored_target() -> Target:
    stored = _Stored()
    return Target(name="stored", make=stored.make, read=stored.read, max_bytes=(256, 256 << 10))


def disk_target() -> Target:
    folder = tempfile.TemporaryDirectory(prefix="kvferry-fuzz-")
    disk = _Disk(Path(folder.name), SHAPE)
    return Target(
        name="disk", make=disk.make, read=disk.read, max_bytes=(256, 256 << 10), close=folder.cleanup
    )
