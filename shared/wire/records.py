"""The structured payloads of the block wire (manifest, layer, end, nack, abort) as msgpack, decoded strictly.

Place in the request's path: `frames.py` has checked size and checksum of what is decoded here. A payload is
refused unless it has every field, no other, of the right type and within range: unknown keys, missing ones
and values such as NaN do not survive the comparison of what was read with what was understood. The sink
compares manifest and layers with its model and reservation.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.model.spec import DTYPE_BYTES
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.frames import MAX_PAYLOAD_BYTES_BY_TYPE, MessageType
from kvferry.shared.wire.messages import (
    MAX_LAYER_TENSORS,
    MAX_RETAINED_SELECTIONS,
    TENSOR_DTYPE_BYTES,
    EndRecord,
    LayerHeader,
    Manifest,
    TransferKey,
)

MAX_LAYERS = 1024
MAX_KV_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_TOKENS = 2**31 - 1
MAX_TOTAL_BYTES = 2**48
MAX_TEXT_CHARS = 1024
MAX_TENSOR_DIMS = 4
_MAX_MESSAGE_CHARS = 1024
_REASON = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MANIFEST_BOUNDS = {
    "num_layers": (1, MAX_LAYERS),
    "num_kv_heads": (1, MAX_KV_HEADS),
    "head_dim": (1, MAX_HEAD_DIM),
    "start": (0, MAX_TOKENS),
    "num_tokens": (0, MAX_TOKENS),
    "retained_transfer_id": (0, 2**64 - 1),
    "retained_tokens": (0, MAX_TOKENS),
    "retained_depth": (0, MAX_RETAINED_SELECTIONS),
    "history_credit_bytes": (0, MAX_TOTAL_BYTES),
    "request_id": (0, MAX_TEXT_CHARS),
    "model_fingerprint": (0, MAX_TEXT_CHARS),
    "history_endpoint": (0, MAX_TEXT_CHARS),
    "traceparent": (0, MAX_TEXT_CHARS),
}
"""Of numbers their range, of texts that of their length."""
_TENSOR_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_DIGEST = re.compile(r"[0-9a-f]{0,128}")

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
_LAYER = msgspec.msgpack.Decoder(LayerHeader)
_END = msgspec.msgpack.Decoder(EndRecord)
_NACK = msgspec.msgpack.Decoder(NackRecord)
_ABORT = msgspec.msgpack.Decoder(AbortRecord)
_KINDS: dict[str, type[TransferFailed]] = {
    kind.__name__: kind for kind in (TransferFailed, ProtocolMismatch, LeaseExpired)
}


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises ProtocolMismatch where a field is out of range or the whole too large."""
    _check_manifest(manifest)
    return _encode(manifest, MessageType.MANIFEST)


def decode_manifest(payload: memoryview | bytes) -> Manifest:
    """Raises ProtocolMismatch on anything that `encode_manifest` does not write."""
    manifest = _decode(_MANIFEST, payload, MessageType.MANIFEST)
    _check_manifest(manifest)
    return manifest


def encode_layer(layer: LayerHeader) -> bytes:
    """Raises ProtocolMismatch where a field is out of range."""
    _check_layer(layer)
    return _encode(layer, MessageType.LAYER)


def decode_layer(payload: memoryview | bytes) -> LayerHeader:
    """Raises ProtocolMismatch on anything that `encode_layer` does not write."""
    layer = _decode(_LAYER, payload, MessageType.LAYER)
    _check_layer(layer)
    return layer


def encode_end(end: EndRecord) -> bytes:
    """Raises ProtocolMismatch where a field is out of range."""
    _check_end(end)
    return _encode(end, MessageType.END)


def decode_end(payload: memoryview | bytes) -> EndRecord:
    """Raises ProtocolMismatch on anything that `encode_end` does not write."""
    end = _decode(_END, payload, MessageType.END)
    _check_end(end)
    return end


def encode_nack(error: KvferryError) -> bytes:
    """An error as its sender will raise it; its class survives if it is TransferFailed or below."""
    kind = type(error).__name__ if type(error).__name__ in _KINDS else TransferFailed.__name__
    record = NackRecord(
        kind=kind, reason=clean_reason(error.reason), message=error.message[:_MAX_MESSAGE_CHARS]
    )
    return _encode(record, MessageType.NACK)


def decode_nack(payload: memoryview | bytes) -> TransferFailed:
    """The error to raise, not raised. Raises ProtocolMismatch on what `encode_nack` does not write."""
    record = _decode(_NACK, payload, MessageType.NACK)
    _check(record.kind in _KINDS, f"kind is {record.kind!r}; {', '.join(_KINDS)} are allowed")
    _check_reason(record.reason)
    return _KINDS[record.kind](record.message, reason=record.reason)


def encode_abort(reason: str) -> bytes:
    """A reason that is no label travels as "other"."""
    return _encode(AbortRecord(reason=clean_reason(reason)), MessageType.ABORT)


def decode_abort(payload: memoryview | bytes) -> str:
    """The sender's reason. Raises ProtocolMismatch on what `encode_abort` does not write."""
    record = _decode(_ABORT, payload, MessageType.ABORT)
    _check_reason(record.reason)
    return record.reason


def clean_reason(reason: str) -> str:
    """A reason fit to travel and to label a counter: `[a-z][a-z0-9_]*`, at most 64 characters."""
    return reason if _REASON.fullmatch(reason) else "other"


def _encode(record: object, message_type: MessageType) -> bytes:
    name, limit_bytes = type(record).__name__, MAX_PAYLOAD_BYTES_BY_TYPE[message_type]
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
    decoder: msgspec.msgpack.Decoder[_Record], payload: memoryview | bytes, message_type: MessageType
) -> _Record:
    size_bytes, limit_bytes = memoryview(payload).nbytes, MAX_PAYLOAD_BYTES_BY_TYPE[message_type]
    _check(size_bytes <= limit_bytes, f"it is {size_bytes} bytes; at most {limit_bytes} are allowed")
    try:
        record = decoder.decode(payload)
        understood: object = msgspec.msgpack.decode(msgspec.msgpack.encode(asdict(record)))
        same = understood == msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _malformed(str(error)) from error
    _check(same, "it has fields, or lacks fields, that this version does not know")
    return record


def _check_manifest(manifest: Manifest) -> None:
    _check_key(manifest.key)
    for name, (low, high) in _MANIFEST_BOUNDS.items():
        value = getattr(manifest, name)
        if not low <= (len(value) if isinstance(value, str) else value) <= high:
            raise _malformed(f"{name} is {value!r:.64}; {low} to {high} (characters of texts) is allowed")
    if manifest.dtype not in DTYPE_BYTES:
        raise _malformed(f"dtype is {manifest.dtype[:32]!r}; {', '.join(DTYPE_BYTES)} are allowed")
    if not _DIGEST.fullmatch(manifest.plan_digest):
        raise _malformed(f"plan_digest is {manifest.plan_digest[:128]!r}; 0 to 128 hex digits are allowed")
    rows, num_layers = manifest.layer_rows, manifest.num_layers
    if rows and (len(rows) != num_layers or min(rows) < 0 or max(rows) > MAX_TOKENS):
        raise _malformed(
            f"layer_rows has {len(rows)} entries from {min(rows)} to {max(rows)}; none or {num_layers}"
            f" entries from 0 to {MAX_TOKENS} are allowed"
        )


def _check_layer(layer: LayerHeader) -> None:
    """Few calls: it runs at both ends for every layer."""
    tensors = layer.tensors
    if not 0 <= layer.layer < MAX_LAYERS:
        raise _malformed(f"layer is {layer.layer}; 0 to {MAX_LAYERS - 1} is allowed")
    if len(tensors) > MAX_LAYER_TENSORS or len({tensor.name for tensor in tensors}) < len(tensors):
        raise _malformed(
            f"layer {layer.layer} has tensors {[tensor.name for tensor in tensors[:32]]}; at most"
            f" {MAX_LAYER_TENSORS}, of different names, are allowed"
        )
    for tensor in tensors:
        if not (
            _TENSOR_NAME.fullmatch(tensor.name)
            and tensor.dtype in TENSOR_DTYPE_BYTES
            and len(tensor.shape) <= MAX_TENSOR_DIMS
            and 0 <= min(tensor.shape, default=0) <= max(tensor.shape, default=0) <= MAX_TOKENS
            and tensor.size_bytes <= MAX_TOTAL_BYTES
        ):
            raise _malformed(
                f"layer {layer.layer} has a tensor {tensor.name[:64]!r} of {tensor.dtype[:32]!r} and shape"
                f" {tensor.shape[:8]}; names of at most 32 characters a-z, 0-9 and _, the dtypes"
                f" {', '.join(TENSOR_DTYPE_BYTES)}, at most {MAX_TENSOR_DIMS} dimensions and"
                f" {MAX_TOTAL_BYTES} bytes are allowed"
            )


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
