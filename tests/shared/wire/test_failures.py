"""Broken, refused, lost and abandoned transfers: each side names the reason and keeps nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from kvferry.shared.errors import (
    Cancelled,
    CapacityExceeded,
    ConfigurationError,
    LeaseExpired,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.wire.frames import HEADER_BYTES, FrameHeader, MessageType, encode_header
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.shared.wire.messages import EndRecord, Section
from kvferry.shared.wire.zmq import ZmqBlockSender, ZmqBlockServer


def blocks_of(manifest: Any, kit: ModuleType) -> list[tuple[FrameHeader, bytes]]:
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


# ---- what a wrong sender says ----------------------------------------------------------------------------


def test_a_bare_transfer_is_acknowledged(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    blocks = blocks_of(manifest, kit)
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
    wire: Any, sink: Any, kit: ModuleType, damage: Any, kind: type[TransferFailed], reason: str
) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    frames = damage(blocks_of(manifest, kit))
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
def test_wrong_totals_at_the_end_are_refused(
    wire: Any, sink: Any, kit: ModuleType, blocks: int, size: int
) -> None:
    manifest = kit.make_manifest(rows=(0,))
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    peer.end(manifest.key, num_blocks=blocks, payload_bytes=size)
    assert peer.refusal().reason == "totals"
    assert sink.aborted == {manifest.key: "totals"}


def test_an_early_end_is_refused(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    peer.end(manifest.key, num_blocks=0, payload_bytes=0)
    assert peer.refusal().reason == "incomplete"
    assert sink.committed == {}


def test_blocks_of_an_outdated_generation_are_dropped_and_counted(
    wire: Any, sink: Any, kit: ModuleType
) -> None:
    manifest = kit.make_manifest(generation=5)
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    header, payload = blocks_of(manifest, kit)[0]
    for generation in (4, 6):
        peer.say(replace(header, key=replace(manifest.key, generation=generation)), payload)
        assert isinstance(peer.refusal(), LeaseExpired)
    assert wire.late_blocks == 2
    peer.say(header, payload)
    assert peer.next(MessageType.CREDIT)[0].section_bytes == len(payload)
    assert sink.blocks == 1
    assert sink.aborted == {}


def test_another_peer_cannot_touch_a_transfer(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    server = wire.server(sink)
    peer, stranger = wire.bare(server.endpoint), wire.bare(server.endpoint)
    peer.manifest(manifest)
    header, payload = blocks_of(manifest, kit)[0]
    peer.say(header, payload)
    peer.next(MessageType.CREDIT)
    stranger.manifest(manifest)
    assert stranger.refusal().reason == "order"
    stranger.say(FrameHeader(type=MessageType.ABORT, key=manifest.key), b"\x81\xa6reason\xa1x")
    stranger.say(header, payload)
    assert stranger.refusal().reason == "unknown_transfer"
    assert sink.aborted == {}
    assert sink.blocks == 1


def test_garbage_hurts_no_open_transfer(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink).endpoint)
    peer.manifest(manifest)
    for header in (b"", b"\xff" * 3, b"\xff" * HEADER_BYTES, b"GET / HTTP/1.1\r\n" * 9):
        peer.say_frames(header, b"\xff" * 100)
    blocks = blocks_of(manifest, kit)
    for header, payload in blocks:
        peer.say(header, payload)
    peer.end(manifest.key, num_blocks=len(blocks), payload_bytes=sum(len(p) for _, p in blocks))
    peer.next(MessageType.ACK)
    assert sink.aborted == {}


def test_a_silent_sender_is_given_up_on_the_receivers_own_clock(
    wire: Any, sink: Any, kit: ModuleType
) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink, idle_timeout_s=0.3).endpoint)
    peer.manifest(manifest)
    assert peer.refusal().reason == "idle"
    assert sink.aborted == {manifest.key: "idle"}


def test_a_vanished_sender_is_noticed_before_it_is_idle(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    peer = wire.bare(wire.server(sink, idle_timeout_s=600.0).endpoint)
    peer.manifest(manifest)
    assert kit.eventually(lambda: manifest.key in sink.manifests)
    peer.close()
    assert kit.eventually(lambda: sink.aborted == {manifest.key: "peer_lost"})
    assert wire.failures == ["peer_lost"]


# ---- what a receiver refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (ProtocolMismatch("other model", reason="fingerprint"), ProtocolMismatch, "fingerprint"),
        (LeaseExpired("too late", reason="lease"), LeaseExpired, "lease"),
        (TransferFailed("no", reason="no"), TransferFailed, "no"),
        (CapacityExceeded("arena is full", reason="arena"), TransferFailed, "arena"),
        (ZeroDivisionError("bug"), TransferFailed, "internal"),
    ],
)
@pytest.mark.parametrize("when", ["open", "write", "commit"])
def test_a_sinks_error_reaches_the_sender_as_it_is(
    wire: Any,
    sink: Any,
    kit: ModuleType,
    error: Exception,
    kind: type[TransferFailed],
    reason: str,
    when: str,
) -> None:
    manifest = kit.make_manifest()
    setattr(sink, f"{when}_error", error)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    with pytest.raises(kind) as failed:
        kit.ship(transfer, manifest, kit.make_sections(manifest))
    assert type(failed.value) is kind
    assert failed.value.reason == reason
    assert sender.buffered_bytes == 0
    assert sink.aborted == ({} if when == "open" else {manifest.key: reason})
    assert wire.failures == [reason]
    sink.open_error = sink.write_error = sink.commit_error = None
    again = kit.make_manifest()
    transfer = sender.open(kit.make_ticket(again, server.endpoint), again, timeout_s=kit.WAIT_S)
    kit.ship(transfer, again, kit.make_sections(again))


# ---- giving up -------------------------------------------------------------------------------------------


def test_abort_frees_both_ends_and_raises_in_waiting_calls(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    sections = kit.make_sections(manifest)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    transfer.send(layer=0, section=sections[0][1], tensor=sections[0][2])
    assert kit.eventually(lambda: sink.blocks == 1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            transfer.wait(kit.WAIT_S)
        except Cancelled as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    transfer.abort("client_left")
    transfer.abort("client_left")
    waiter.join(kit.WAIT_S)
    assert [type(error) for error in raised] == [Cancelled]
    assert sender.buffered_bytes == 0
    assert kit.eventually(lambda: sink.aborted == {manifest.key: "aborted"})
    for call in (
        lambda: transfer.send(layer=0, section=sections[1][1], tensor=sections[1][2]),
        lambda: transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0)),
        lambda: transfer.wait(1.0),
    ):
        with pytest.raises(Cancelled):
            call()


def test_abort_wakes_a_send_that_waits_for_room(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest(rows=(100,))
    server, sender = wire.server(sink), wire.sender(buffer_bytes=1000)
    sink.gate.clear()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    timer = threading.Timer(0.2, transfer.abort, ["client_left"])
    timer.start()
    with pytest.raises(Cancelled):
        kit.ship(transfer, manifest, kit.make_sections(manifest))
    timer.join()
    assert sender.buffered_bytes == 0


def test_abort_after_the_acknowledgement_has_no_effect(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    took_s = kit.ship(transfer, manifest, kit.make_sections(manifest))
    transfer.abort("late")
    assert transfer.wait(0.0) == took_s
    assert sink.aborted == {}


def test_closing_the_receiver_fails_its_senders(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    sections = kit.make_sections(manifest)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    transfer.send(layer=0, section=sections[0][1], tensor=sections[0][2])
    assert kit.eventually(lambda: sink.blocks == 1)
    server.close()
    server.close()
    assert sink.aborted == {manifest.key: "closed"}
    with pytest.raises(TransferFailed) as failed:
        transfer.wait(kit.WAIT_S)
    assert failed.value.reason in ("closed", "peer_lost")
    assert sender.buffered_bytes == 0


def test_closing_the_sender_fails_its_transfers_and_frees_the_receiver(
    wire: Any, sink: Any, kit: ModuleType
) -> None:
    manifest = kit.make_manifest()
    sections = kit.make_sections(manifest)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    transfer.send(layer=0, section=sections[0][1], tensor=sections[0][2])
    assert kit.eventually(lambda: sink.blocks == 1)
    sender.close()
    sender.close()
    with pytest.raises(TransferFailed) as failed:
        transfer.wait(kit.WAIT_S)
    assert failed.value.reason == "closed"
    assert sender.buffered_bytes == 0
    assert kit.eventually(lambda: manifest.key in sink.aborted)
    with pytest.raises(TransferFailed, match="closed"):
        sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)


def test_a_receiver_that_stops_answering_is_a_timeout(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    server, sender = wire.server(sink), wire.sender(timeout_s=0.5)
    sink.gate.clear()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    with pytest.raises(TransferFailed, match=r"silent for more than 0\.5 s") as failed:
        kit.ship(transfer, manifest, kit.make_sections(manifest))
    assert failed.value.reason == "timeout"
    assert sender.buffered_bytes == 0


def test_waiting_in_vain_fails_the_transfer(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    assert kit.eventually(lambda: manifest.key in sink.manifests)
    with pytest.raises(TransferFailed, match=r"not acknowledged within 0\.1 s"):
        transfer.wait(0.1)
    assert kit.eventually(lambda: sink.aborted == {manifest.key: "aborted"})


def test_a_failed_transfer_leaves_others_alone(wire: Any, sink: Any, kit: ModuleType) -> None:
    server, sender = wire.server(sink), wire.sender()
    doomed, fine = kit.make_manifest(), kit.make_manifest()
    first = sender.open(kit.make_ticket(doomed, server.endpoint), doomed, timeout_s=kit.WAIT_S)
    second = sender.open(kit.make_ticket(fine, server.endpoint), fine, timeout_s=kit.WAIT_S)
    first.abort("test")
    kit.ship(second, fine, kit.make_sections(fine))
    kit.assert_arrived(sink, fine, kit.make_sections(fine))


# ---- endpoints and arguments -----------------------------------------------------------------------------


def test_the_ticket_must_name_the_manifests_key(wire: Any, sink: Any, kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    server, sender = wire.server(sink), wire.sender()
    ticket = kit.make_ticket(manifest, server.endpoint)
    with pytest.raises(TransferFailed, match="manifest is of"):
        sender.open(replace(ticket, generation=9), manifest, timeout_s=1.0)
    with pytest.raises(TransferFailed, match="credit is 0 bytes"):
        sender.open(replace(ticket, credit_bytes=0), manifest, timeout_s=1.0)
    sender.open(ticket, manifest, timeout_s=1.0)
    with pytest.raises(TransferFailed, match="already open"):
        sender.open(ticket, manifest, timeout_s=1.0)


@pytest.mark.parametrize("endpoint", ["", "http://x", "tcp://", "inproc://nowhere"])
def test_an_unusable_endpoint_fails_the_transfer(wire: Any, kit: ModuleType, endpoint: str) -> None:
    manifest = kit.make_manifest()
    transfer = wire.sender().open(kit.make_ticket(manifest, endpoint), manifest, timeout_s=1.0)
    with pytest.raises(TransferFailed) as failed:
        transfer.wait(kit.WAIT_S)
    assert failed.value.reason in ("endpoint", "peer_lost")


def test_an_endpoint_where_nobody_listens_is_a_timeout(kit: ModuleType) -> None:
    manifest = kit.make_manifest()
    sender = ZmqBlockSender(buffer_bytes=1 << 20, timeout_s=0.5)
    try:
        ticket = kit.make_ticket(manifest, "tcp://127.0.0.1:1")
        transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
        transfer.send(layer=0, section=Section.KEYS, tensor=kit.make_sections(manifest)[1][2])
        with pytest.raises(TransferFailed) as failed:
            transfer.wait(kit.WAIT_S)
        assert failed.value.reason == "timeout"
        assert sender.buffered_bytes == 0
    finally:
        sender.close()


@pytest.mark.parametrize(
    "bind", ["", "udp://127.0.0.1:1", "tcp://nowhere.invalid:1", "ipc:///nowhere/at/all"]
)
def test_an_address_that_cannot_be_bound_is_a_configuration_error(bind: str, kit: ModuleType) -> None:
    with pytest.raises(ConfigurationError, match="block"):
        ZmqBlockServer(bind, kit.RecordingSink())


def test_binding_everywhere_needs_an_advertised_address(kit: ModuleType) -> None:
    with pytest.raises(ConfigurationError, match="advertised"):
        ZmqBlockServer("tcp://0.0.0.0:0", kit.RecordingSink())
    server = ZmqBlockServer("tcp://0.0.0.0:0", kit.RecordingSink(), advertise="tcp://decode:5000")
    assert server.endpoint == "tcp://decode:5000"
    server.close()


def test_an_in_process_name_is_given_once(kit: ModuleType) -> None:
    hub = InProcessHub()
    server = hub.server(kit.RecordingSink(), name="decode")
    assert server.endpoint == "inproc://decode"
    with pytest.raises(ConfigurationError, match="already in use"):
        hub.server(kit.RecordingSink(), name="decode")
    server.close()
    hub.server(kit.RecordingSink(), name="decode").close()
