"""What a wrong, silent or vanished sender does is refused by its reason, and nothing of it remains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kvtest.wire as kit
import pytest
from kvtest.lanes import some
from kvtest.waiting import until
from kvtest.wire import RecordingSink, Wire

from kvferry.shared.errors import LeaseExpired, MalformedMessage, TransferFailed
from kvferry.shared.wire import receiver as receiver_module
from kvferry.shared.wire.frames import HEADER_BYTES, decode_layer, encode_header, encode_layer
from kvferry.shared.wire.messages import FrameHeader, LayerHeader, Manifest, MessageType, TensorHeader

Message = tuple[FrameHeader, bytes]
Frames = list[tuple[bytes, bytes]]


def messages_of(manifest: Manifest) -> list[Message]:
    """The layers' headers, and every tensor as one block: numbers 0 and 4 are headers where there are two
    layers of index, keys and values."""
    messages: list[Message] = []
    for layer, tensors in enumerate(kit.make_layers(manifest)):
        header = FrameHeader(type=MessageType.LAYER, key=manifest.key, sequence=len(messages))
        messages.append((header, encode_layer(kit.header_of(layer, tensors))))
        total = sum(named.tensor.nbytes for named in tensors)
        offset = 0
        for named in tensors:
            payload = kit.to_bytes(named.tensor)
            header = FrameHeader(
                type=MessageType.BLOCK,
                key=manifest.key,
                sequence=len(messages),
                layer=layer,
                total_bytes=total,
                offset=offset,
            )
            messages.append((header, payload))
            offset += len(payload)
    return messages


def frames_of(messages: list[Message]) -> Frames:
    return [(encode_header(header, [payload]), payload) for header, payload in messages]


def numbered(messages: list[Message]) -> list[Message]:
    return [(replace(header, sequence=n), payload) for n, (header, payload) in enumerate(messages)]


def begin(wire: Wire, sink: RecordingSink, **shape: Any) -> tuple[Manifest, kit.BarePeer]:
    """Begin a transfer by hand. Args: shape: of its manifest."""
    manifest = kit.make_manifest(**shape)
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    return manifest, peer


def say_all(peer: kit.BarePeer, manifest: Manifest) -> None:
    """Say every layer and block, and the end."""
    messages = messages_of(manifest)
    for header, payload in messages:
        peer.say(header, payload)
    blocks = [payload for header, payload in messages if header.type is MessageType.BLOCK]
    peer.end(manifest.key, num_blocks=len(blocks), payload_bytes=sum(map(len, blocks)))


def num_late(
    peer: kit.BarePeer, sink: RecordingSink, frames: Frames, kind: type[TransferFailed], reason: str
) -> int:
    """Say the frames, which are refused; returns how many blocks of them the sink has not got."""
    for header, payload in frames:
        peer.say_frames(header, payload)
    refusal = peer.refusal()
    assert type(refusal) is kind
    assert refusal.reason == reason
    assert sink.aborted == dict.fromkeys(sink.manifests, reason)
    return sum(header[6] == MessageType.BLOCK for header, _ in frames) - sink.blocks


@pytest.mark.parametrize("num_frames", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_layers_message_may_carry_any_share_of_its_bytes_in_any_frames(
    wire: Wire, sink: RecordingSink, share: float, num_frames: int
) -> None:
    manifest, peer = begin(wire, sink)
    messages, total = [], 0
    for layer, tensors in enumerate(kit.make_layers(manifest)):
        record = encode_layer(kit.header_of(layer, tensors))
        data = b"".join(kit.to_bytes(named.tensor) for named in tensors)
        first = int(share * len(data))
        header = FrameHeader(type=MessageType.LAYER, key=manifest.key, sequence=len(messages))
        messages.append((header, [record, *cut(data[:first], num_frames)]))
        if first < len(data):
            position = {"layer": layer, "offset": first, "total_bytes": len(data)}
            header = replace(header, type=MessageType.BLOCK, sequence=len(messages), **position)
            messages.append((header, cut(data[first:], num_frames)))
        total += len(data)
    for header, frames in messages:
        peer.say(header, *frames)
    peer.end(manifest.key, num_blocks=len(messages) - 2, payload_bytes=total)
    assert peer.next(MessageType.ACK, MessageType.NACK)[0].type is MessageType.ACK
    kit.assert_arrived(sink, manifest, kit.make_layers(manifest))


def cut(data: bytes, num_frames: int) -> list[bytes]:
    edges = [len(data) * n // num_frames for n in range(num_frames + 1)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(("extra", "reason"), [(b"x", "size"), (b"", "checksum")])
def test_a_layer_with_too_many_or_damaged_bytes_is_refused_before_the_sink_sees_it(
    wire: Wire, sink: RecordingSink, extra: bytes, reason: str
) -> None:
    manifest, peer = begin(wire, sink)
    tensors = kit.make_layers(manifest)[0]
    data = b"".join(kit.to_bytes(named.tensor) for named in tensors) + extra
    header = FrameHeader(type=MessageType.LAYER, key=manifest.key)
    payload = [encode_layer(kit.header_of(0, tensors)), data]
    encoded = encode_header(header, payload)
    if not extra:
        payload[1] = data[:-1] + bytes([data[-1] ^ 1])
    peer.say_frames(encoded, *payload)
    assert peer.refusal().reason == reason
    assert sink.layers[manifest.key] == []
    assert sink.aborted == {manifest.key: reason}
    peer.say(header, *payload)
    assert peer.refusal().reason == "unknown_transfer"
    assert wire.late_blocks == 1


def test_a_bare_transfer_is_acknowledged(wire: Wire, sink: RecordingSink) -> None:
    manifest, peer = begin(wire, sink)
    say_all(peer, manifest)
    assert peer.next(MessageType.ACK, MessageType.NACK)[0].type is MessageType.ACK
    kit.assert_arrived(sink, manifest, kit.make_layers(manifest))


def corrupt(messages: list[Message]) -> Frames:
    frames = frames_of(messages)
    header, payload = frames[2]
    frames[2] = (header, bytes([payload[0] ^ 1]) + payload[1:])
    return frames


def drop(messages: list[Message]) -> Frames:
    return frames_of(messages[:2] + messages[3:])


def repeat(messages: list[Message]) -> Frames:
    return frames_of(messages[:2] + messages[1:])


def swap(messages: list[Message]) -> Frames:
    return frames_of([messages[0], messages[2], messages[1], *messages[3:]])


def swap_tensors(messages: list[Message]) -> Frames:
    return frames_of(numbered([messages[0], messages[2], messages[1], *messages[3:]]))


def lie_about_size(messages: list[Message]) -> Frames:
    header, payload = messages[2]
    messages[2] = (replace(header, total_bytes=header.total_bytes + 1), payload)
    return frames_of(messages)


def name_a_tensor_too_many(messages: list[Message]) -> Frames:
    header, payload = messages[3]
    beyond = {"offset": header.total_bytes, "total_bytes": header.total_bytes + len(payload)}
    messages[3] = (replace(header, **beyond), payload)
    return frames_of(messages)


def go_beyond_the_layer(messages: list[Message]) -> Frames:
    header, payload = messages[3]
    beyond = {"offset": header.total_bytes, "total_bytes": header.total_bytes + len(payload)}
    return frames_of(numbered([*messages[:4], (replace(header, **beyond), payload), *messages[4:]]))


def leave_out_the_header(messages: list[Message]) -> Frames:
    return frames_of(numbered(messages[:4] + messages[5:]))


def speak_another_version(messages: list[Message]) -> Frames:
    frames = frames_of(messages)
    header, payload = frames[2]
    frames[2] = (header[:4] + b"\x01\x00" + header[6:], payload)
    return frames


@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (corrupt, TransferFailed, "checksum"),
        (drop, TransferFailed, "order"),
        (repeat, TransferFailed, "order"),
        (swap, TransferFailed, "order"),
        (swap_tensors, TransferFailed, "order"),
        (lie_about_size, TransferFailed, "size"),
        (name_a_tensor_too_many, TransferFailed, "order"),
        (go_beyond_the_layer, TransferFailed, "order"),
        (leave_out_the_header, TransferFailed, "order"),
        (speak_another_version, MalformedMessage, "protocol_version"),
    ],
)
def test_a_damaged_stream_of_blocks_is_refused_and_the_rest_is_late(
    wire: Wire,
    sink: RecordingSink,
    damage: Callable[[list[Message]], Frames],
    kind: type[TransferFailed],
    reason: str,
) -> None:
    manifest, peer = begin(wire, sink)
    late = num_late(peer, sink, damage(messages_of(manifest)), kind, reason) - 1
    assert late >= 2
    until(lambda: wire.late_blocks == late)


def repeat_the_header(messages: list[Message]) -> Frames:
    return frames_of(numbered([messages[0], *messages]))


def begin_before_the_last_one_ends(messages: list[Message]) -> Frames:
    return frames_of(numbered(messages[:3] + messages[4:]))


def skip_a_layer(messages: list[Message]) -> Frames:
    return frames_of(numbered(messages[4:]))


def skip_a_number(messages: list[Message]) -> Frames:
    header, payload = messages[4]
    messages[4] = (replace(header, sequence=5), payload)
    return frames_of(messages)


def name_a_tensor_twice(messages: list[Message]) -> Frames:
    header, payload = messages[4]
    layer = decode_layer(payload)
    names = payload.replace(b"keys", b"same").replace(b"\xa6values", b"\xa4same")
    assert names.count(b"same") == len(layer.tensors) - 1
    messages[4] = (header, names)
    return frames_of(messages)


def announce_one_layer_more(messages: list[Message]) -> Frames:
    extra = LayerHeader(layer=2, tensors=(TensorHeader(name="keys", dtype="uint8", shape=(1,)),))
    header = FrameHeader(type=MessageType.LAYER, key=messages[0][0].key, sequence=len(messages))
    return frames_of([*messages, (header, encode_layer(extra))])


def corrupt_the_header(messages: list[Message]) -> Frames:
    frames = frames_of(messages)
    header, payload = frames[4]
    frames[4] = (header, payload[:-1] + bytes([payload[-1] ^ 1]))
    return frames


@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (repeat_the_header, TransferFailed, "order"),
        (begin_before_the_last_one_ends, TransferFailed, "order"),
        (skip_a_layer, TransferFailed, "order"),
        (skip_a_number, TransferFailed, "order"),
        (announce_one_layer_more, TransferFailed, "order"),
        (name_a_tensor_twice, MalformedMessage, "malformed"),
        (corrupt_the_header, TransferFailed, "checksum"),
    ],
)
def test_a_wrong_layer_header_is_refused_before_the_sink_sees_it(
    wire: Wire,
    sink: RecordingSink,
    damage: Callable[[list[Message]], Frames],
    kind: type[TransferFailed],
    reason: str,
) -> None:
    manifest, peer = begin(wire, sink)
    late = num_late(peer, sink, damage(messages_of(manifest)), kind, reason)
    expected = [kit.header_of(layer, tensors) for layer, tensors in enumerate(kit.make_layers(manifest))]
    assert sink.layers[manifest.key] == expected[: len(sink.layers[manifest.key])]
    until(lambda: wire.late_blocks == late)


@pytest.mark.parametrize(("blocks", "size"), [(1, 0), (0, 1), (2**32 - 1, 2**48)])
def test_wrong_totals_at_the_end_are_refused(wire: Wire, sink: RecordingSink, blocks: int, size: int) -> None:
    manifest, peer = begin(wire, sink, rows=(0,))
    for header, payload in messages_of(manifest)[:1]:
        peer.say(header, payload)
    peer.end(manifest.key, num_blocks=blocks, payload_bytes=size)
    assert peer.refusal().reason == "totals"
    assert sink.aborted == {manifest.key: "totals"}


def test_an_early_end_is_refused(wire: Wire, sink: RecordingSink) -> None:
    manifest, peer = begin(wire, sink)
    peer.end(manifest.key, num_blocks=0, payload_bytes=0)
    assert peer.refusal().reason == "incomplete"
    assert sink.committed == {}


def test_blocks_of_an_outdated_generation_are_dropped_and_counted(wire: Wire, sink: RecordingSink) -> None:
    manifest, peer = begin(wire, sink, generation=5)
    layer, (header, payload) = messages_of(manifest)[:2]
    for generation in (4, 6):
        peer.say(replace(header, key=replace(manifest.key, generation=generation)), payload)
        assert isinstance(peer.refusal(), LeaseExpired)
    assert wire.late_blocks == 2
    peer.say(*layer)
    peer.say(header, payload)
    until(lambda: peer.next(MessageType.CREDIT)[0].total_bytes == len(payload))
    assert sink.blocks == 1
    assert sink.aborted == {}


def test_another_peer_cannot_touch_a_transfer(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    server = wire.server(sink)
    peer, stranger = wire.bare(server.endpoint), wire.bare(server.endpoint)
    peer.manifest(manifest)
    layer, (header, payload) = messages_of(manifest)[:2]
    peer.say(*layer)
    peer.say(header, payload)
    peer.next(MessageType.CREDIT)
    stranger.manifest(manifest)
    assert stranger.refusal().reason == "order"
    stranger.say(FrameHeader(type=MessageType.ABORT, key=manifest.key), b"\x81\xa6reason\xa1x")
    stranger.say(header, payload)
    assert stranger.refusal().reason == "unknown_transfer"
    assert sink.aborted == {}
    assert sink.blocks == 1


def test_garbage_hurts_no_open_transfer(wire: Wire, sink: RecordingSink) -> None:
    manifest, peer = begin(wire, sink)
    for garbage in (b"", b"\xff" * 3, b"\xff" * HEADER_BYTES, b"GET / HTTP/1.1\r\n" * 9):
        peer.say_frames(garbage, b"\xff" * 100)
    say_all(peer, manifest)
    peer.next(MessageType.ACK)
    assert sink.aborted == {}


def test_a_silent_sender_is_given_up_on_the_receivers_own_clock(
    wire: Wire, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "IDLE_TIMEOUT_S", 0.3)
    manifest, peer = begin(wire, sink)
    assert peer.refusal().reason == "idle"
    assert sink.aborted == {manifest.key: "idle"}


@pytest.mark.parametrize("wire", some(kit.TRANSPORTS, "tcp", "shm"), indirect=True)
def test_a_vanished_sender_is_noticed_before_it_is_idle(wire: Wire, sink: RecordingSink) -> None:
    manifest, peer = begin(wire, sink)
    until(lambda: manifest.key in sink.manifests)
    peer.close()
    until(lambda: sink.aborted == {manifest.key: "peer_lost"})
