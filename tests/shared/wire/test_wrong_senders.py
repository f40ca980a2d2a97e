"""What a wrong, silent or vanished sender does is refused by its reason, and nothing is kept of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kvtest.wire as kit
import pytest

from kvferry.shared.errors import LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.wire.frames import HEADER_BYTES, FrameHeader, MessageType, encode_header


def blocks_of(manifest: Any) -> list[tuple[FrameHeader, bytes]]:
    """Every section as one block."""
    blocks = []
    for sequence, (layer, section, tensor) in enumerate(kit.make_sections(manifest)):
        payload = kit.to_bytes(tensor)
        header = FrameHeader(
            type=MessageType.BLOCK,
            key=manifest.key,
            sequence=sequence,
            layer=layer,
            section=section,
            section_bytes=len(payload),
        )
        blocks.append((header, payload))
    return blocks


def test_a_bare_transfer_is_acknowledged(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    blocks = blocks_of(manifest)
    for header, payload in blocks:
        peer.say(header, payload)
    total = sum(len(payload) for _, payload in blocks)
    peer.end(manifest.key, num_blocks=len(blocks), payload_bytes=total)
    assert peer.next(MessageType.ACK, MessageType.NACK)[0].type is MessageType.ACK
    kit.assert_arrived(sink, manifest, kit.make_sections(manifest))


def corrupt(blocks: list[tuple[FrameHeader, bytes]]) -> list[tuple[bytes, bytes]]:
    frames = [(encode_header(*block), block[1]) for block in blocks]
    header, payload = frames[2]
    frames[2] = (header, bytes([payload[0] ^ 1]) + payload[1:])
    return frames


def drop(blocks: list[tuple[FrameHeader, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(encode_header(*block), block[1]) for block in blocks[:2] + blocks[3:]]


def repeat(blocks: list[tuple[FrameHeader, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(encode_header(*block), block[1]) for block in blocks[:2] + blocks[1:]]


def swap(blocks: list[tuple[FrameHeader, bytes]]) -> list[tuple[bytes, bytes]]:
    order = [blocks[0], blocks[2], blocks[1], *blocks[3:]]
    return [(encode_header(*block), block[1]) for block in order]


def swap_sections(blocks: list[tuple[FrameHeader, bytes]]) -> list[tuple[bytes, bytes]]:
    order = [blocks[0], blocks[2], blocks[1], *blocks[3:]]
    numbered = [(replace(header, sequence=n), payload) for n, (header, payload) in enumerate(order)]
    return [(encode_header(*block), block[1]) for block in numbered]


def lie_about_size(blocks: list[tuple[FrameHeader, bytes]]) -> list[tuple[bytes, bytes]]:
    header, payload = blocks[2]
    blocks[2] = (replace(header, section_bytes=header.section_bytes + 1), payload)
    return [(encode_header(*block), block[1]) for block in blocks]


def speak_another_version(blocks: list[tuple[FrameHeader, bytes]]) -> list[tuple[bytes, bytes]]:
    frames = [(encode_header(*block), block[1]) for block in blocks]
    header, payload = frames[2]
    frames[2] = (header[:4] + b"\x02\x00" + header[6:], payload)
    return frames


@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (corrupt, TransferFailed, "checksum"),
        (drop, TransferFailed, "order"),
        (repeat, TransferFailed, "order"),
        (swap, TransferFailed, "order"),
        (swap_sections, TransferFailed, "order"),
        (lie_about_size, TransferFailed, "size"),
        (speak_another_version, ProtocolMismatch, "protocol_version"),
    ],
)
def test_a_damaged_stream_of_blocks_is_refused_and_the_rest_is_late(
    wire: Any, sink: Any, damage: Any, kind: type[TransferFailed], reason: str
) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    frames = damage(blocks_of(manifest))
    for header, payload in frames:
        peer.say_frames(header, payload)
    refusal = peer.refusal()
    assert type(refusal) is kind
    assert refusal.reason == reason
    assert sink.aborted == {manifest.key: reason}
    assert wire.failures == [reason]
    late = len(frames) - sink.blocks - 1
    assert late >= 2
    assert kit.eventually(lambda: wire.late_blocks == late)


@pytest.mark.parametrize(("blocks", "size"), [(1, 0), (0, 1), (2**32 - 1, 2**48)])
def test_wrong_totals_at_the_end_are_refused(wire: Any, sink: Any, blocks: int, size: int) -> None:
    manifest = kit.make_manifest(rows=(0,))
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    peer.end(manifest.key, num_blocks=blocks, payload_bytes=size)
    assert peer.refusal().reason == "totals"
    assert sink.aborted == {manifest.key: "totals"}


def test_an_early_end_is_refused(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    peer.end(manifest.key, num_blocks=0, payload_bytes=0)
    assert peer.refusal().reason == "incomplete"
    assert sink.committed == {}


def test_blocks_of_an_outdated_generation_are_dropped_and_counted(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest(generation=5)
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    header, payload = blocks_of(manifest)[0]
    for generation in (4, 6):
        peer.say(replace(header, key=replace(manifest.key, generation=generation)), payload)
        assert isinstance(peer.refusal(), LeaseExpired)
    assert wire.late_blocks == 2
    peer.say(header, payload)
    assert peer.next(MessageType.CREDIT)[0].section_bytes == len(payload)
    assert sink.blocks == 1
    assert sink.aborted == {}


def test_another_peer_cannot_touch_a_transfer(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest()
    server = wire.server(sink)
    peer, stranger = wire.bare(server.endpoint), wire.bare(server.endpoint)
    peer.manifest(manifest)
    header, payload = blocks_of(manifest)[0]
    peer.say(header, payload)
    peer.next(MessageType.CREDIT)
    stranger.manifest(manifest)
    assert stranger.refusal().reason == "order"
    stranger.say(FrameHeader(type=MessageType.ABORT, key=manifest.key), b"\x81\xa6reason\xa1x")
    stranger.say(header, payload)
    assert stranger.refusal().reason == "unknown_transfer"
    assert sink.aborted == {}
    assert sink.blocks == 1


def test_garbage_hurts_no_open_transfer(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    for header in (b"", b"\xff" * 3, b"\xff" * HEADER_BYTES, b"GET / HTTP/1.1\r\n" * 9):
        peer.say_frames(header, b"\xff" * 100)
    blocks = blocks_of(manifest)
    for header, payload in blocks:
        peer.say(header, payload)
    peer.end(manifest.key, num_blocks=len(blocks), payload_bytes=sum(len(p) for _, p in blocks))
    peer.next(MessageType.ACK)
    assert sink.aborted == {}


def test_a_silent_sender_is_given_up_on_the_receivers_own_clock(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink, idle_timeout_s=0.3).endpoint)
    peer.manifest(manifest)
    assert peer.refusal().reason == "idle"
    assert sink.aborted == {manifest.key: "idle"}


def test_a_vanished_sender_is_noticed_before_it_is_idle(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink, idle_timeout_s=600.0).endpoint)
    peer.manifest(manifest)
    assert kit.eventually(lambda: manifest.key in sink.manifests)
    peer.close()
    assert kit.eventually(lambda: sink.aborted == {manifest.key: "peer_lost"})
    assert wire.failures == ["peer_lost"]
