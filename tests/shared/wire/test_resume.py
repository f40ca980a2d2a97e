"""A transfer whose connection is cut goes on over another one where it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import kvtest.wire as kit
import pytest
from kvtest.proxy import CuttingProxy, CuttingRingProxy
from kvtest.waiting import until
from kvtest.wire import BarePeer, RecordingSink, Wire

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.channel import Channel
from kvferry.shared.wire.messages import Manifest, MessageType
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryConnectingChannel
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

CREDIT_BYTES = 12_000
ROWS = (40, 0, 200, 90)
"""A layer without a row is a message without a tensor's byte."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a new connection may take long."""
    kit.resume_within(monkeypatch, kit.WAIT_S)


@pytest.fixture
def cut_sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture(params=["tcp", "curve", pytest.param("shm", marks=kit.needs_shared_memory)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def proxy(cut_sink: RecordingSink, transport: str) -> Iterator[CuttingProxy]:
    if transport != "shm":
        keys = kit.block_keys("decode") if transport == "curve" else None
        server = BlockServer(ZmqListeningChannel("tcp://127.0.0.1:0", keys=keys), cut_sink)
        proxy = CuttingProxy(server.endpoint)
    else:
        server = BlockServer(kit.listening_in_shared_memory(), cut_sink)
        proxy = CuttingRingProxy(server.endpoint)
    yield proxy
    proxy.close()
    server.close()


def connecting(transport: str) -> Channel:
    network = ZmqConnectingChannel(kit.block_keys("prefill") if transport == "curve" else None)
    return SharedMemoryConnectingChannel(network) if transport == "shm" else network


@pytest.fixture
def sender(transport: str) -> Iterator[BlockSender]:
    sender = BlockSender(connecting(transport), buffer_bytes=1 << 20, timeout_s=kit.WAIT_S)
    yield sender
    sender.close()


def cut_manifest() -> tuple[Manifest, kit.Layers, int]:
    """A transfer, and how many messages it is."""
    manifest = kit.make_manifest(rows=ROWS, heads=2, dim=32)
    layers = kit.make_layers(manifest)
    sizes = [sum(named.tensor.nbytes for named in tensors) for tensors in layers]
    return manifest, layers, 2 + sum(max(1, -(-size // CREDIT_BYTES)) for size in sizes)


@pytest.mark.covering(1)
@pytest.mark.parametrize("within", [False, True])
def test_a_transfer_cut_at_any_message_goes_on_where_it_stopped(
    proxy: CuttingProxy, cut_sink: RecordingSink, sender: BlockSender, transport: str, within: bool
) -> None:
    if within and isinstance(proxy, CuttingRingProxy):
        pytest.skip("a packet is delivered whole or not at all")
    proxy.within = within
    _, _, num_messages = cut_manifest()
    assert num_messages > 15
    resent = []
    for cut in range(num_messages + 1):
        manifest, layers, _ = cut_manifest()
        proxy.cuts = [cut]
        proxy.num_cuts = proxy.forwarded_bytes = 0
        ticket = kit.make_ticket(manifest, proxy.endpoint, credit_bytes=CREDIT_BYTES)
        transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
        kit.ship(transfer, layers)
        assert sender.buffer.used_bytes == 0
        kit.assert_arrived(cut_sink, manifest, layers)
        if transport != "curve":  # whose messages are as many as their frames, and there are heartbeats
            assert proxy.num_cuts == (cut < num_messages)
        elif cut < num_messages // 2:
            assert proxy.num_cuts == 1
        whole = cut_sink.committed[manifest.key].payload_bytes
        assert proxy.forwarded_bytes <= 1.2 * whole
        assert sum(transfer.bytes_by_kind.values()) <= 1.2 * whole
        assert transfer.resent_bytes <= CREDIT_BYTES
        resent.append(transfer.resent_bytes)
    assert cut_sink.aborted == {}
    assert any(resent)
    assert resent[-1] == 0 or proxy.num_cuts


def test_a_transfer_survives_many_cuts(
    proxy: CuttingProxy, cut_sink: RecordingSink, sender: BlockSender
) -> None:
    manifest, layers, _ = cut_manifest()
    proxy.cuts = [3, 1, 2, 4, 2]
    ticket = kit.make_ticket(manifest, proxy.endpoint, credit_bytes=CREDIT_BYTES)
    kit.ship(sender.open(ticket, manifest, timeout_s=kit.WAIT_S), layers)
    kit.assert_arrived(cut_sink, manifest, layers)
    assert proxy.num_cuts == 5


def test_a_cut_while_the_buffer_is_full_loses_nothing(
    proxy: CuttingProxy, cut_sink: RecordingSink, transport: str
) -> None:
    manifest, layers, _ = cut_manifest()
    proxy.cuts = [9]
    sender = BlockSender(connecting(transport), buffer_bytes=2 * CREDIT_BYTES, timeout_s=kit.WAIT_S)
    ticket = kit.make_ticket(manifest, proxy.endpoint, credit_bytes=CREDIT_BYTES)
    kit.ship(sender.open(ticket, manifest, timeout_s=kit.WAIT_S), layers)
    kit.assert_arrived(cut_sink, manifest, layers)
    assert proxy.num_cuts == 1
    assert sender.buffer.used_bytes == 0
    sender.close()


def test_an_abort_after_a_cut_frees_both_ends(
    proxy: CuttingProxy, cut_sink: RecordingSink, sender: BlockSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, layers, _ = cut_manifest()
    proxy.cuts = [2] + 1000 * [0]
    ticket = kit.make_ticket(manifest, proxy.endpoint, credit_bytes=CREDIT_BYTES)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.send(transfer, layers)
    until(lambda: proxy.num_cuts > 0)
    transfer.abort("client_left")
    assert sender.buffer.used_bytes == 0
    kit.resume_within(monkeypatch, 0)
    until(lambda: manifest.key in cut_sink.aborted)


def test_a_receiver_that_does_not_come_back_is_lost(
    proxy: CuttingProxy, cut_sink: RecordingSink, sender: BlockSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.resume_within(monkeypatch, 0.5)
    manifest, layers, _ = cut_manifest()
    ticket = kit.make_ticket(manifest, proxy.endpoint, credit_bytes=CREDIT_BYTES)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.send(transfer, layers[:1])
    until(lambda: cut_sink.blocks > 0)
    proxy.close()
    with pytest.raises(TransferFailed, match="was lost for more than") as failed:
        transfer.wait(kit.WAIT_S)
    assert failed.value.reason == "peer_lost"
    until(lambda: cut_sink.aborted == {manifest.key: "peer_lost"})


def test_another_manifest_of_a_lost_transfer_is_refused(wire: Wire, sink: RecordingSink) -> None:
    manifest, changed = kit.make_manifest(rows=(3,)), kit.make_manifest(rows=(4,))
    server = wire.server(sink)
    peer = wire.bare(server.endpoint)
    peer.manifest(manifest)
    assert peer.next(MessageType.CREDIT)[0].sequence == 0
    peer.close()
    stranger = wire.bare(server.endpoint)
    stranger.manifest(replace(changed, key=manifest.key))
    assert stranger.refusal().reason == "order"
    assert sink.aborted == {}


def over_two_connections(wire: Wire, sink: RecordingSink) -> tuple[Manifest, BarePeer, BarePeer]:
    """A transfer of one layer whose manifest came over a connection, and again over another one."""
    manifest = kit.make_manifest(rows=(3,))
    server = wire.server(sink)
    peer, again = wire.bare(server.endpoint), wire.bare(server.endpoint)
    peer.manifest(manifest)
    peer.next(MessageType.CREDIT)
    again.manifest(manifest)
    peer.next(MessageType.CREDIT)  # asks whether the connection is lost
    return manifest, peer, again


def say_the_rest(peer: BarePeer, manifest: Manifest) -> None:
    peer.layer(manifest.key, 0, kit.header_of(0, []))
    peer.end(manifest.key, num_blocks=0, payload_bytes=0)


def test_a_sender_that_knows_of_a_cut_before_its_receiver_goes_on(wire: Wire, sink: RecordingSink) -> None:
    manifest, peer, again = over_two_connections(wire, sink)
    peer.close()
    assert again.next(MessageType.CREDIT)[0].sequence == 0
    say_the_rest(again, manifest)
    again.next(MessageType.ACK)
    assert sink.aborted == {}


def test_a_sender_that_knows_of_a_cut_before_its_receiver_is_acknowledged(
    wire: Wire, sink: RecordingSink
) -> None:
    """What it sent before the cut is read after its manifest over another connection."""
    manifest, peer, again = over_two_connections(wire, sink)
    say_the_rest(peer, manifest)
    again.next(MessageType.ACK)
    assert list(sink.committed) == [manifest.key]


def test_of_two_that_would_go_on_only_the_last_one_does(
    wire: Wire, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = kit.make_manifest(rows=(3,))
    server = wire.server(sink)
    peer, second, third = (wire.bare(server.endpoint) for _ in range(3))
    peer.manifest(manifest)
    peer.next(MessageType.CREDIT)
    second.manifest(manifest)
    peer.next(MessageType.CREDIT)
    third.manifest(manifest)
    assert second.refusal().reason == "order"
    peer.close()
    assert third.next(MessageType.CREDIT)[0].sequence == 0
    kit.resume_within(monkeypatch, 0)
    third.close()
    until(lambda: sink.aborted == {manifest.key: "peer_lost"})


def test_one_that_would_go_on_and_is_lost_itself_ends_nothing(wire: Wire, sink: RecordingSink) -> None:
    manifest, peer, again = over_two_connections(wire, sink)
    again.close()
    say_the_rest(peer, manifest)
    peer.next(MessageType.ACK)
    assert sink.aborted == {}


def test_the_acknowledgement_is_repeated_for_a_sender_that_missed_it(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest(rows=(3,))
    server = wire.server(sink)
    peer = wire.bare(server.endpoint)
    peer.manifest(manifest)
    say_the_rest(peer, manifest)
    peer.next(MessageType.ACK)
    peer.close()
    again = wire.bare(server.endpoint)
    again.manifest(manifest)
    again.next(MessageType.ACK)
    assert list(sink.committed) == [manifest.key]
