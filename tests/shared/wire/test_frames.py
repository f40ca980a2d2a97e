"""Headers and checksums: what is packed comes back, what is not of this format is refused by name."""

from __future__ import annotations

import itertools
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvferry.shared.errors import ProtocolMismatch, TransferFailed
from kvferry.shared.wire.frames import (
    HEADER,
    HEADER_BYTES,
    decode_message,
    encode_header,
    peek_key,
)
from kvferry.shared.wire.messages import (
    MAX_LAYER_TENSORS,
    MAX_PAYLOAD_BYTES,
    MAX_PAYLOAD_BYTES_BY_TYPE,
    FrameHeader,
    MessageType,
    TransferKey,
)

keys = st.builds(TransferKey, transfer_id=st.integers(0, 2**64 - 1), generation=st.integers(0, 2**32 - 1))
KEY = TransferKey(transfer_id=2**64 - 1, generation=7)


@st.composite
def messages(draw: st.DrawFn) -> tuple[FrameHeader, bytes]:
    message_type = draw(st.sampled_from(MessageType))
    limit = min(64, MAX_PAYLOAD_BYTES_BY_TYPE[message_type])
    payload = draw(st.binary(min_size=int(message_type is MessageType.BLOCK), max_size=limit))
    if message_type is not MessageType.BLOCK:
        written = draw(st.integers(0, 2**64 - 1)) if message_type is MessageType.CREDIT else 0
        sequence = draw(st.integers(0, 2**32 - 1)) if message_type is MessageType.LAYER else 0
        header = FrameHeader(type=message_type, key=draw(keys), sequence=sequence, total_bytes=written)
        return header, payload
    offset = draw(st.integers(0, 2**40))
    header = FrameHeader(
        type=message_type,
        key=draw(keys),
        sequence=draw(st.integers(0, 2**32 - 1)),
        layer=draw(st.integers(0, 2**16 - 1)),
        total_bytes=offset + len(payload) + draw(st.integers(0, 2**40)),
        offset=offset,
    )
    return header, payload


def repack(**changes: int | bytes) -> bytes:
    """A valid BLOCK header of payload b"abcd" with fields changed and the checksum made right again."""
    names = (
        "magic", "version", "type", "reserved_byte", "transfer_id", "generation", "sequence", "layer",
        "reserved", "payload_bytes", "total_bytes", "offset", "checksum",
    )  # fmt: skip
    values = dict(zip(names, HEADER.unpack(encode_header(block_header(), [b"abcd"])), strict=True)) | changes
    checked = HEADER.pack(*values.values())[:-8]
    return checked + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked + b"abcd"))


def block_header() -> FrameHeader:
    return FrameHeader(type=MessageType.BLOCK, key=KEY, layer=1, total_bytes=8, offset=4)


@st.composite
def frames_of(draw: st.DrawFn, header: FrameHeader, payload: bytes) -> list[bytes]:
    """The payload as frames: of BLOCK and LAYER cut anywhere, of others in one piece."""
    if header.type not in (MessageType.BLOCK, MessageType.LAYER):
        return [payload]
    cuts = draw(st.lists(st.integers(0, len(payload)), max_size=MAX_LAYER_TENSORS - 1).map(sorted))
    return [payload[a:b] for a, b in itertools.pairwise([0, *cuts, len(payload)])]


@given(messages(), st.data())
def test_decoding_returns_what_was_encoded(message: tuple[FrameHeader, bytes], data: st.DataObject) -> None:
    header, payload = message
    frames = data.draw(frames_of(header, payload))
    encoded = encode_header(header, frames)
    assert decode_message([encoded, *frames]) == (header, [memoryview(frame) for frame in frames])
    assert encode_header(header, [payload]) == encoded


def test_header_bytes_stay_as_documented() -> None:
    encoded = encode_header(block_header(), [b"ab", b"cd"])
    assert HEADER_BYTES == 56
    assert encoded[:48].hex() == (
        "4b564642" "0400" "03" "00" "ffffffffffffffff" "07000000" "00000000" "0100" "0000" "04000000"
        "0800000000000000" "0400000000000000"
    )  # fmt: skip
    assert encoded[48:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(encoded[:48] + b"abcd"))


def test_payload_is_a_view_of_the_frame() -> None:
    frame = bytearray(b"abcd")
    _, payload = decode_message([encode_header(block_header(), [memoryview(frame)]), memoryview(frame)])
    frame[0] = ord("z")
    assert bytes(payload[0]) == b"zbcd"


@given(messages(), st.data())
def test_a_flipped_bit_anywhere_is_refused(message: tuple[FrameHeader, bytes], data: st.DataObject) -> None:
    header, payload = message
    raw = bytearray(encode_header(header, [payload]) + payload)
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferFailed):
        decode_message([bytes(raw[:HEADER_BYTES]), bytes(raw[HEADER_BYTES:])])


@given(messages(), st.data())
def test_truncated_frames_are_refused(message: tuple[FrameHeader, bytes], data: st.DataObject) -> None:
    header, payload = message
    encoded = encode_header(header, [payload])
    with pytest.raises(ProtocolMismatch):
        decode_message([encoded[: data.draw(st.integers(0, HEADER_BYTES - 1))], payload])
    if payload:
        with pytest.raises(TransferFailed):
            decode_message([encoded, payload[: data.draw(st.integers(0, len(payload) - 1))]])


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_random_frames_raise_nothing_but_refusals(frames: list[bytes]) -> None:
    with pytest.raises(TransferFailed):
        decode_message(frames)
    peek_key(frames)


@given(st.binary(min_size=HEADER_BYTES - 14, max_size=HEADER_BYTES - 14))
def test_random_fields_with_a_right_checksum_decode_or_are_refused(fields: bytes) -> None:
    checked = (b"KVFB\x03\x00" + fields)[: HEADER_BYTES - 8]
    encoded = checked + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked))
    try:
        header, _ = decode_message([encoded, b""])
    except ProtocolMismatch:
        return
    assert encode_header(header) == encoded


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"HTTP"},
        {"type": 0},
        {"type": 10},
        {"reserved_byte": 1},
        {"reserved": 1},
        {"payload_bytes": 2**32 - 1},
        {"payload_bytes": 3},
        {"total_bytes": 7},
        {"offset": 2**64 - 1},
        {"type": MessageType.ACK},
        {"type": MessageType.END, "layer": 0},
        {"type": MessageType.LAYER, "layer": 0, "total_bytes": 0},
        {"type": MessageType.LAYER, "layer": 0, "offset": 0},
        {"type": MessageType.LAYER, "total_bytes": 0, "offset": 0},
        {"type": MessageType.END, "layer": 0, "total_bytes": 0, "offset": 0, "sequence": 1},
    ],
)
def test_fields_out_of_range_are_malformed(changes: dict[str, int | bytes]) -> None:
    with pytest.raises(ProtocolMismatch) as refused:
        decode_message([repack(**changes), b"abcd"])
    assert refused.value.reason == "malformed"


def test_another_version_is_named_and_its_key_can_be_read() -> None:
    encoded = repack(version=1)
    with pytest.raises(ProtocolMismatch, match="version 1; this side speaks 4") as refused:
        decode_message([encoded, b"abcd"])
    assert refused.value.reason == "protocol_version"
    assert peek_key([encoded]) == KEY


def test_oversized_payload_is_refused_at_both_ends() -> None:
    payload = bytes(MAX_PAYLOAD_BYTES + 1)
    header = FrameHeader(type=MessageType.BLOCK, key=KEY, total_bytes=len(payload))
    for frames in ([payload], [payload[:9], payload[9:]]):
        with pytest.raises(TransferFailed, match="at most"):
            encode_header(header, frames)
        with pytest.raises(TransferFailed):
            decode_message([repack(payload_bytes=len(payload), total_bytes=len(payload), offset=0), *frames])


@pytest.mark.parametrize(
    ("message_type", "most"),
    [
        *((other, 1) for other in MessageType if other not in (MessageType.LAYER, MessageType.BLOCK)),
        (MessageType.LAYER, 1 + MAX_LAYER_TENSORS),
        (MessageType.BLOCK, MAX_LAYER_TENSORS),
    ],
)
def test_more_frames_than_a_message_can_need_are_refused(message_type: MessageType, most: int) -> None:
    total = 1 if message_type is MessageType.BLOCK else 0
    header = FrameHeader(type=message_type, key=KEY, total_bytes=total)
    frames = [b"x" * total] + [b""] * (most - 1)
    encoded = encode_header(header, frames)
    assert decode_message([encoded, *frames])[0] == header
    with pytest.raises(ProtocolMismatch, match=f"has {most + 2} frames") as refused:
        decode_message([encoded, *frames, b""])
    assert refused.value.reason == "malformed"


def test_fields_too_wide_for_the_header_are_refused() -> None:
    with pytest.raises(TransferFailed, match="does not fit"):
        encode_header(FrameHeader(type=MessageType.ACK, key=TransferKey(transfer_id=2**64, generation=0)))
