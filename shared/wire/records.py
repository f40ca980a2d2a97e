"""The structured payloads of the block wire (manifest, end, nack, abort) as msgpack, decoded strictly.

Place in the request's path: `frames.py` has checked size and checksum of what is decoded here. A payload is
refused unless it has every field, no other, of the right type and within range: unknown keys, missing ones
and values such as NaN do not survive the comparison of what was read with what was understood. Does not
compare a manifest with a model or a reservation: that is the sink's part.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.model.spec import DTYPE_BYTES
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.messages import (
    MAX_HELD_SELECTIONS,
    MAX_MANIFEST_BYTES,
    EndRecord,
    Manifest,
    Section,
    TransferKey,
)

MAX_LAYERS = 1024
MAX_KV_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_TOKENS = 2**31 - 1
MAX_TOTAL_BYTES = 2**48
MAX_TEXT_CHARS = 1024
_MAX_MESSAGE_CHARS = 1024
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class NackRecord:
    """Why a receiver refuses: the error's class, reason and message."""

    kind: str
    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class AbortRecord:
    """Why a sender gave up."""

    reason: str


_MANIFEST = msgspec.msgpack.Decoder(Manifest)
_END = msgspec.msgpack.Decoder(EndRecord)
_NACK = msgspec.msgpack.Decoder(NackRecord)
_ABORT = msgspec.msgpack.Decoder(AbortRecord)
_KINDS: dict[str, type[TransferFailed]] = {
    kind.__name__: kind for kind in (TransferFailed, ProtocolMismatch, LeaseExpired)
}


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises ProtocolMismatch where a field is out of range or the whole too large."""
    _check_manifest(manifest)
    return _encode(manifest, limit_bytes=MAX_MANIFEST_BYTES)


def decode_manifest(payload: memoryview | bytes) -> Manifest:
    """Raises ProtocolMismatch on anything that `encode_manifest` does not write."""
    manifest = _decode(_MANIFEST, payload, limit_bytes=MAX_MANIFEST_BYTES)
    _check_manifest(manifest)
    return manifest


def encode_end(end: EndRecord) -> bytes:
    _check_end(end)
    return _encode(end, limit_bytes=MAX_MANIFEST_BYTES)


def decode_end(payload: memoryview | bytes) -> EndRecord:
    """Raises ProtocolMismatch on anything that `encode_end` does not write."""
    end = _decode(_END, payload, limit_bytes=MAX_MANIFEST_BYTES)
    _check_end(end)
    return end


def encode_nack(error: KvferryError) -> bytes:
    """An error as its sender will raise it; its class survives if it is TransferFailed or below."""
    kind = type(error).__name__ if type(error).__name__ in _KINDS else TransferFailed.__name__
    record = NackRecord(
        kind=kind, reason=clean_reason(error.reason), message=error.message[:_MAX_MESSAGE_CHARS]
    )
    return _encode(record, limit_bytes=8192)


def decode_nack(payload: memoryview | bytes) -> TransferFailed:
    """The error to raise, not raised. Raises ProtocolMismatch on what `encode_nack` does not write."""
    record = _decode(_NACK, payload, limit_bytes=8192)
    _check(record.kind in _KINDS, f"kind is {record.kind!r}; {', '.join(_KINDS)} are allowed")
    _check_reason(record.reason)
    return _KINDS[record.kind](record.message, reason=record.reason)


def encode_abort(reason: str) -> bytes:
    return _encode(AbortRecord(reason=clean_reason(reason)), limit_bytes=4096)


def decode_abort(payload: memoryview | bytes) -> str:
    """The sender's reason. Raises ProtocolMismatch on what `encode_abort` does not write."""
    record = _decode(_ABORT, payload, limit_bytes=4096)
    _check_reason(record.reason)
    return record.reason


def clean_reason(reason: str) -> str:
    """A reason fit to travel and to label a counter: `[a-z][a-z0-9_]*`, at most 64 characters."""
    return reason if _REASON.fullmatch(reason) else "other"


def _encode(record: object, *, limit_bytes: int) -> bytes:
    name = type(record).__name__
    try:
        payload = msgspec.msgpack.encode(record)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise ProtocolMismatch(f"{name} cannot be encoded: {error}", reason="malformed") from error
    if len(payload) > limit_bytes:
        raise ProtocolMismatch(
            f"{name} is {len(payload)} bytes; at most {limit_bytes} are allowed", reason="size"
        )
    return payload


def _decode(
    decoder: msgspec.msgpack.Decoder[_Record], payload: memoryview | bytes, *, limit_bytes: int
) -> _Record:
    size_bytes = memoryview(payload).nbytes
    _check(size_bytes <= limit_bytes, f"it is {size_bytes} bytes; at most {limit_bytes} are allowed")
    try:
        record = decoder.decode(payload)
        understood: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(asdict(record)))
        same = understood == msgspec.msgpack.decode(payload)
    except KvferryError as error:
        raise _malformed(error.message) from error
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _malformed(str(error)) from error
    _check(same, "it has fields, or lacks fields, that this version does not know")
    return record


def _check_manifest(manifest: Manifest) -> None:
    _check_key(manifest.key)
    _check_range("num_kv_heads", manifest.num_kv_heads, 1, MAX_KV_HEADS)
    _check_range("head_dim", manifest.head_dim, 1, MAX_HEAD_DIM)
    _check_range("start", manifest.start, 0, MAX_TOKENS)
    _check_range("num_tokens", manifest.num_tokens, 0, MAX_TOKENS)
    _check_range("held_transfer_id", manifest.held_transfer_id, 0, 2**64 - 1)
    _check_range("held_tokens", manifest.held_tokens, 0, MAX_TOKENS)
    _check_range("held_depth", manifest.held_depth, 0, MAX_HELD_SELECTIONS)
    _check_range("history_credit_bytes", manifest.history_credit_bytes, 0, MAX_TOTAL_BYTES)
    _check_range("number of layers", len(manifest.layer_rows), 1, MAX_LAYERS)
    for layer, rows in enumerate(manifest.layer_rows):
        _check_range(f"layer_rows[{layer}]", rows, 0, MAX_TOKENS)
    _check(
        manifest.dtype in DTYPE_BYTES,
        f"dtype is {manifest.dtype[:32]!r}; {', '.join(DTYPE_BYTES)} are allowed",
    )
    for name in ("request_id", "model_fingerprint", "history_endpoint", "traceparent"):
        _check_range(f"length of {name}", len(getattr(manifest, name)), 0, MAX_TEXT_CHARS)
    for name in ("layer_packed_bytes", "layer_state_bytes"):
        sizes = getattr(manifest, name)
        if sizes:
            num_layers = len(manifest.layer_rows)
            _check_range(f"length of {name}", len(sizes), num_layers, num_layers)
        for layer, size_bytes in enumerate(sizes):
            _check_range(f"{name}[{layer}]", size_bytes, 0, MAX_TOTAL_BYTES)
    _check_announced(manifest)
    stored = manifest.layer_packed_bytes or manifest.layer_state_bytes or manifest.layer_sections
    _check(not (manifest.is_delta and stored), "a delta has layers that are not rows alone")
    row_bytes = 2 * manifest.head_dim * DTYPE_BYTES[manifest.dtype] + 4
    total_bytes = sum(
        sum(its.size_bytes for its in manifest.announced(layer))
        or manifest.packed_limit_bytes(layer)
        or rows * manifest.num_kv_heads * row_bytes + manifest.state_bytes(layer)
        for layer, rows in enumerate(manifest.layer_rows)
    )
    _check_range("total size in bytes", total_bytes, 0, MAX_TOTAL_BYTES)
    if manifest.resolved is not None:
        num_layers = len(manifest.layer_rows)
        _check_range("number of resolved layers", len(manifest.resolved.layers), num_layers, num_layers)


def _check_announced(manifest: Manifest) -> None:
    if not manifest.layer_sections:
        return
    num_layers = len(manifest.layer_rows)
    _check_range("length of layer_sections", len(manifest.layer_sections), num_layers, num_layers)
    for layer, sections in enumerate(manifest.layer_sections):
        names = [its.section for its in sections]
        _check(
            len(set(names)) == len(names) and Section.LAYOUT not in names,
            f"layer_sections[{layer}] is {[name.name for name in names]}; each but LAYOUT once is allowed",
        )
        for its in sections:
            _check_range(f"layer_sections[{layer}] {its.section.name}", its.size_bytes, 0, MAX_TOTAL_BYTES)


def _check_end(end: EndRecord) -> None:
    _check_key(end.key)
    _check_range("num_blocks", end.num_blocks, 0, 2**32 - 1)
    _check_range("payload_bytes", end.payload_bytes, 0, MAX_TOTAL_BYTES)
    if end.first_token is not None:
        _check_token(end.first_token)


def _check_token(token: SampledToken) -> None:
    _check_range("token_id", token.token_id, 0, MAX_TOKENS)
    _check_range("index", token.index, 0, MAX_TOKENS)
    _check(token.logprob is None or not math.isnan(token.logprob), "logprob is NaN; a number is allowed")
    for token_id, logprob in token.top_logprobs:
        _check_range("top_logprobs token id", token_id, 0, MAX_TOKENS)
        _check(not math.isnan(logprob), "a logprob of top_logprobs is NaN; a number is allowed")


def _check_key(key: TransferKey) -> None:
    _check_range("transfer_id", key.transfer_id, 0, 2**64 - 1)
    _check_range("generation", key.generation, 0, 2**32 - 1)


def _check_reason(reason: str) -> None:
    _check(
        _REASON.fullmatch(reason) is not None,
        f"reason is {reason[:64]!r}; a lower-case label of at most 64 characters is allowed",
    )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    _check(low <= value <= high, f"{name} is {value}; {low} to {high} is allowed")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise _malformed(message)


def _malformed(message: str) -> ProtocolMismatch:
    return ProtocolMismatch(f"malformed block wire record: {message}", reason="malformed")
