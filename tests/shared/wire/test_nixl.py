"""NIXL carries large messages between workers that have it; all else, and all without it, goes as before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kvtest.wire as kit
import pytest
from kvtest.waiting import until
from kvtest.wire import RecordingSink
from structlog.testing import capture_logs

from kvferry.shared.command_line import EXIT_USAGE
from kvferry.shared.config import WorkerSettings
from kvferry.shared.errors import ConfigurationError, LeaseExpired, TransferFailed
from kvferry.shared.wire.channel import Channel, ListeningChannel, Peer, Received, SendResult
from kvferry.shared.wire.messages import FrameHeader, MessageType
from kvferry.shared.wire.nixl import agent, connecting, listening
from kvferry.shared.wire.nixl.agent import NixlAgent, RegisteredMemory, Remote
from kvferry.shared.wire.nixl.connecting import NixlConnectingChannel
from kvferry.shared.wire.nixl.listening import NixlListeningChannel
from kvferry.shared.wire.nixl.packets import Packet, PacketKind, encode_place
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.ring import RING_BYTES
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

pytestmark = kit.needs_nixl
WITH_HELPERS = {
    **os.environ,
    "PYTHONPATH": f"{Path(kit.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
}
LARGE = (9000, 20, 0, 30_000, 2500)
"""Rows of layers of 21 MB together, more than a ring."""


class CountingZmq(ZmqConnectingChannel):
    """Counts the bytes that go over the network."""

    num_bytes = 0

    def send(self, peer: Peer, frames: Sequence[memoryview | bytes]) -> SendResult:
        self.num_bytes += sum(map(len, frames))
        return super().send(peer, frames)


class FaultyAgent(NixlAgent):
    """An agent that spoils what it writes, whose writes fail, or that takes no writes of others."""

    spoils = fails = stalls = False

    def write(self, source: RegisteredMemory, remote: Remote, start: int, num_bytes: int) -> Any:
        if self.spoils:
            source.bytes[start + num_bytes // 2] ^= 1
        return super().write(source, remote, start, num_bytes)

    def is_written(self, handle: Any) -> bool:
        if self.fails:
            raise agent.NixlFailed("the link is down")
        return super().is_written(handle)

    def progress(self) -> None:
        if not self.stalls:
            super().progress()


@contextlib.contextmanager
def serving(channel: ListeningChannel, sink: RecordingSink, **options: Any) -> Iterator[BlockServer]:
    server = BlockServer(channel, sink, idle_timeout_s=kit.WAIT_S, **options)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def sending(channel: Channel) -> Iterator[BlockSender]:
    sender = BlockSender(channel, buffer_bytes=64 << 20, timeout_s=kit.WAIT_S)
    try:
        yield sender
    finally:
        sender.close()


@pytest.fixture
def sink() -> Iterator[RecordingSink]:
    sink = RecordingSink()
    yield sink
    sink.gate.set()


@pytest.fixture
def connected() -> list[str]:
    return []


def transfer_once(
    sender: BlockSender, endpoint: str, sink: RecordingSink, rows: tuple[int, ...] = (900, 0, 90)
) -> None:
    manifest = kit.make_manifest(rows=rows, heads=2, dim=32)
    layers = kit.make_layers(manifest)
    ticket = kit.make_ticket(manifest, endpoint)
    kit.ship(sender.open(ticket, manifest, timeout_s=kit.WAIT_S), layers)
    kit.assert_arrived(sink, manifest, layers)


def reasons(lines: Sequence[Any]) -> list[str]:
    return [line["reason"] for line in lines if line["event"].endswith("not NIXL")]


# ---- what goes where -------------------------------------------------------------------------------------


def test_a_transfer_larger_than_the_ring_goes_through_nixl_and_hardly_over_the_network(
    sink: RecordingSink, connected: list[str]
) -> None:
    network = CountingZmq()
    channel = NixlConnectingChannel(network, NixlAgent(loopback_only=True), on_connected=connected.append)
    with serving(kit.listening_with_nixl(), sink) as server, sending(channel) as sender:
        transfer_once(sender, server.endpoint, sink, LARGE)
    sent = sum(map(len, sink.tensors.values()))
    assert sent > RING_BYTES
    assert network.num_bytes < sent / 500
    assert connected == ["nixl"]


@pytest.mark.parametrize("ring_bytes", [28_001, 65_536])
def test_transfers_larger_than_an_odd_ring_arrive_though_what_is_free_is_poisoned(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, ring_bytes: int
) -> None:
    for module in (connecting, listening):
        monkeypatch.setattr(module, "RING_BYTES", ring_bytes)
    monkeypatch.setattr(connecting, "_SMALL_BYTES", 100)
    on_packet = NixlConnectingChannel._on_packet

    def poison(self: NixlConnectingChannel, link: Any, packet: Packet) -> None:
        freed = link.places.freed
        on_packet(self, link, packet)
        for start in range(freed, link.places.freed):
            link.memory.bytes[start % ring_bytes] = 0xA5

    monkeypatch.setattr(NixlConnectingChannel, "_on_packet", poison)
    with serving(kit.listening_with_nixl(), sink) as server, sending(kit.connecting_with_nixl()) as sender:
        for _ in range(3):
            manifest = kit.make_manifest(rows=(60, 1, 777, 5, 0, 130), heads=2, dim=16)
            layers = kit.make_layers(manifest)
            ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=ring_bytes * 3 // 8 - 400)
            kit.ship(sender.open(ticket, manifest, timeout_s=kit.WAIT_S), layers)
            kit.assert_arrived(sink, manifest, layers)


def test_blocks_of_an_outdated_generation_are_dropped_and_counted(sink: RecordingSink) -> None:
    late: list[int] = []
    manifest = kit.make_manifest(rows=(900,), generation=2)
    header = FrameHeader(
        type=MessageType.BLOCK,
        key=kit.make_manifest(generation=1).key,
        total_bytes=100_000,
    )
    with serving(kit.listening_with_nixl(), sink, on_late_block=lambda: late.append(1)) as server:
        peer = kit.BarePeer(kit.connecting_with_nixl(), server.endpoint)
        peer.manifest(manifest)
        peer.say(header, bytes(100_000))
        assert isinstance(peer.refusal(), LeaseExpired)
        peer.close()
    assert late == [1]
    assert sink.tensors == {}


def test_a_receiver_without_nixl_is_reached_over_the_network_at_once_and_said_so_once(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, connected: list[str]
) -> None:
    monkeypatch.setattr(connecting, "ANSWER_S", 10 * kit.WAIT_S)
    with (
        serving(ZmqListeningChannel("tcp://127.0.0.1:0"), sink) as server,
        sending(kit.connecting_with_nixl(connected.append)) as sender,
        capture_logs() as lines,
    ):
        transfer_once(sender, server.endpoint, sink)
        transfer_once(sender, server.endpoint, sink)
    assert reasons(lines) == ["the receiver does not use NIXL"]
    assert connected == ["network"]


def test_a_receiver_with_nixl_takes_what_a_sender_without_it_sends(sink: RecordingSink) -> None:
    with serving(kit.listening_with_nixl(), sink) as server, sending(ZmqConnectingChannel()) as sender:
        transfer_once(sender, server.endpoint, sink)


def test_a_receiver_with_as_many_rings_as_it_may_have_is_reached_over_the_network(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, connected: list[str]
) -> None:
    monkeypatch.setattr(listening, "MAX_RINGS", 1)
    with serving(kit.listening_with_nixl(), sink) as server:
        for _ in range(2):
            with sending(kit.connecting_with_nixl(connected.append)) as sender:
                transfer_once(sender, server.endpoint, sink)
    assert connected == ["nixl", "network"]


def test_an_idle_ring_is_given_back_and_the_next_transfer_gets_another(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, connected: list[str]
) -> None:
    monkeypatch.setattr(connecting, "IDLE_S", 0.2)
    channel = kit.listening_with_nixl()
    retired = len(agent._RETIRED)
    with serving(channel, sink) as server, sending(kit.connecting_with_nixl(connected.append)) as sender:
        for _ in range(2):
            transfer_once(sender, server.endpoint, sink)
            until(lambda: not channel._rings)
    assert connected == ["nixl"]
    assert len(agent._RETIRED) == retired


def test_a_lost_senders_ring_is_noticed_and_its_addresses_are_not_used_again(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_BEAT_S", 0.2)
    channel = kit.listening_with_nixl()
    retired = len(agent._RETIRED)
    with serving(channel, sink) as server:
        with sending(kit.connecting_with_nixl()) as sender:
            transfer_once(sender, server.endpoint, sink)
            (ring,) = channel._rings.values()
        until(lambda: len(agent._RETIRED) == retired + 1)
        assert not ring.memory.bytes.any()
        with sending(kit.connecting_with_nixl()) as sender:
            transfer_once(sender, server.endpoint, sink)
            (new,) = channel._rings.values()
            assert abs(new.memory.address - ring.memory.address) >= RING_BYTES


# ---- what fails ------------------------------------------------------------------------------------------


def test_spoilt_bytes_are_found_by_the_checksum(sink: RecordingSink) -> None:
    faulty = FaultyAgent(loopback_only=True)
    channel = NixlConnectingChannel(ZmqConnectingChannel(), faulty)
    with serving(kit.listening_with_nixl(), sink) as server, sending(channel) as sender:
        transfer_once(sender, server.endpoint, sink)
        faulty.spoils = True
        with pytest.raises(TransferFailed, match="checksum"):
            transfer_once(sender, server.endpoint, sink)
        faulty.spoils = False
        transfer_once(sender, server.endpoint, sink)
    assert list(sink.aborted.values()) == ["checksum"]


def test_a_write_that_fails_is_sent_again_over_the_network_and_nixl_is_tried_later(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, connected: list[str]
) -> None:
    monkeypatch.setattr(connecting, "REFUSED_S", 0.5)
    faulty = FaultyAgent(loopback_only=True)
    channel = NixlConnectingChannel(ZmqConnectingChannel(), faulty, on_connected=connected.append)
    with serving(kit.listening_with_nixl(), sink) as server, sending(channel) as sender:
        transfer_once(sender, server.endpoint, sink, LARGE)
        faulty.fails = True
        with capture_logs() as lines:
            transfer_once(sender, server.endpoint, sink, LARGE)
        assert reasons(lines) == ["the link is down"]
        faulty.fails = False
        until(lambda: not channel._links)
        transfer_once(sender, server.endpoint, sink, LARGE)
    assert connected == ["nixl", "network", "nixl"]
    assert sink.aborted == {}


def test_a_write_that_nobody_takes_is_given_up_and_lands_where_nothing_else_is(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, connected: list[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # over which the receiver's own process takes a write
    monkeypatch.setattr(connecting, "WRITE_S", 1.0)
    monkeypatch.setattr(connecting, "REFUSED_S", 0.2)
    stalling = FaultyAgent(loopback_only=True)
    receiving = NixlListeningChannel(ZmqListeningChannel("tcp://127.0.0.1:0"), stalling)
    channel = kit.connecting_with_nixl(connected.append)
    with serving(receiving, sink) as server, sending(channel) as sender:
        transfer_once(sender, server.endpoint, sink)
        (ring,) = receiving._rings.values()
        stalling.stalls = True
        with capture_logs() as lines:
            transfer_once(sender, server.endpoint, sink, LARGE)
        assert reasons(lines) == ["no write ended within 1.0 s"]
        until(lambda: not receiving._rings)
        stalling.stalls = False
        assert not ring.memory.bytes.any()

        def has_landed() -> bool:
            stalling.progress()
            return bool(ring.memory.bytes.any())

        until(has_landed)
        until(lambda: not channel._links)
        transfer_once(sender, server.endpoint, sink, LARGE)
        (new,) = receiving._rings.values()
        assert abs(new.memory.address - ring.memory.address) >= RING_BYTES
    assert connected == ["nixl", "network", "nixl"]


def test_a_receiver_that_offers_no_ring_in_time_is_reached_over_the_network(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, connected: list[str]
) -> None:
    monkeypatch.setattr(connecting, "ANSWER_S", 0.3)

    class Deaf(NixlListeningChannel):
        def _offer(self, peer: Peer, number: int) -> None:
            pass

    receiving = Deaf(ZmqListeningChannel("tcp://127.0.0.1:0"), NixlAgent(loopback_only=True))
    with (
        serving(receiving, sink) as server,
        sending(kit.connecting_with_nixl(connected.append)) as sender,
        capture_logs() as lines,
    ):
        transfer_once(sender, server.endpoint, sink)
    assert reasons(lines) == ["no ring was offered within 0.3 s"]
    assert connected == ["network"]


RECEIVE = """
import sys, kvtest.wire as kit
sink = kit.RecordingSink()
server = kit.BlockServer(kit.listening_with_nixl(), sink)
print(server.endpoint, flush=True)
sys.stdin.read()
"""


def test_a_killed_receiver_ends_the_transfer_in_time_and_the_next_receiver_gets_the_whole() -> None:
    with sending(kit.connecting_with_nixl()) as sender:
        first = subprocess.Popen(
            [sys.executable, "-c", RECEIVE], env=WITH_HELPERS, stdin=-1, stdout=-1, text=True
        )
        assert first.stdout is not None
        try:
            manifest = kit.make_manifest(rows=LARGE, heads=2, dim=32)
            layers = kit.make_layers(manifest)
            ticket = kit.make_ticket(manifest, first.stdout.readline().strip())
            transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S, keeps_failed=True)
            kit.send(transfer, layers[:3])
            until(lambda: transfer._sent_bytes > 1 << 20)
            first.send_signal(signal.SIGKILL)
            kit.send(transfer, layers[3:], first=3)
        finally:
            first.kill()
            first.communicate()
        until(lambda: transfer._failure is not None)
        sink = RecordingSink()
        with serving(kit.listening_with_nixl(), sink) as server:
            again = kit.make_ticket(kit.make_manifest(), server.endpoint)
            transfer.redirect(again)
            token = kit.EndRecord(key=transfer.key, num_blocks=0, payload_bytes=0)
            transfer.finish(token)
            transfer.wait(kit.WAIT_S)
            (arrived,) = sink.committed
            assert kit.arrived(sink, arrived) == {
                (layer, named.name): kit.to_bytes(named.tensor)
                for layer, tensors in enumerate(layers)
                for named in tensors
                if named.tensor.numel()
            }


@pytest.mark.parametrize(
    "rest",
    [b"", encode_place(0, (1 << 20, 15 << 20, 1)), encode_place(RING_BYTES - 1, (2,)), b"\xff" * 11],
    ids=["empty", "too large", "across the end", "not whole"],
)
def test_a_sender_that_names_what_is_not_in_its_ring_hurts_nobody(sink: RecordingSink, rest: bytes) -> None:
    with serving(kit.listening_with_nixl(), sink) as server:
        bad = ZmqConnectingChannel()
        bad.open()
        endpoint = server.endpoint.encode()

        def say(*frames: bytes) -> None:
            until(lambda: bad.send(endpoint, frames) is SendResult.SENT or bool(bad.poll(0.05)))

        say(*Packet(kind=PacketKind.ASK, ring=7).frames())
        offers: list[Any] = []
        until(lambda: bool(offers.extend(bad.poll(0.05)) or offers))
        assert isinstance(offers[0], Received)
        say(*Packet(kind=PacketKind.WRITTEN, ring=7, number=1, rest=rest).frames())
        say(*Packet(kind=PacketKind.WRITTEN, ring=8, number=1, rest=encode_place(0, (56, 10))).frames())
        say(*Packet(kind=PacketKind.OFFER, ring=7, rest=b"\x80").frames())
        say(b"KVFN" + bytes(16), b"")
        say(b"", b"")
        with sending(kit.connecting_with_nixl()) as sender:
            transfer_once(sender, server.endpoint, sink)
        bad.close()


@pytest.mark.parametrize("rest", [b"", b"\x80", b"\xc1", b"\xff" * 40_000])
def test_a_receiver_that_offers_nonsense_is_reached_over_the_network(
    sink: RecordingSink, connected: list[str], rest: bytes
) -> None:
    class Nonsense(NixlListeningChannel):
        def _offer(self, peer: Peer, number: int) -> None:
            self.send(peer, Packet(kind=PacketKind.OFFER, ring=number, rest=rest).frames())

    receiving = Nonsense(ZmqListeningChannel("tcp://127.0.0.1:0"), NixlAgent(loopback_only=True))
    with (
        serving(receiving, sink) as server,
        sending(kit.connecting_with_nixl(connected.append)) as sender,
    ):
        transfer_once(sender, server.endpoint, sink)
    assert connected == ["network"]


# ---- without the package ---------------------------------------------------------------------------------


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvferry\[nixl\]'"):
        NixlAgent(loopback_only=True)


def test_a_worker_without_the_package_ends_before_it_loads_a_model() -> None:
    program = (
        "import sys; sys.modules['nixl'] = None\n"
        "from kvferry.services.launcher.cli import main\n"
        "sys.exit(main(['prefill', '--transport', 'nixl', '--model', '/nowhere']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == EXIT_USAGE
    assert "pip install 'kvferry[nixl]'" in done.stderr


@pytest.mark.parametrize(
    ("options", "is_accepted"),
    [
        ({}, True),
        ({"block_listen": "ipc:///tmp/blocks"}, True),
        ({"certs": "/certs"}, False),
        ({"block_listen": "tcp://0.0.0.0:9101"}, False),
        ({"block_listen": "tcp://0.0.0.0:9101", "certs": "/certs"}, False),
        ({"block_listen": "tcp://0.0.0.0:9101", "certs": "/certs", "insecure": True}, True),
        ({"block_listen": "tcp://0.0.0.0:9101", "insecure": True}, True),
    ],
)
def test_nixl_with_certs_or_beyond_loopback_must_be_accepted(
    options: dict[str, Any], is_accepted: bool
) -> None:
    with contextlib.nullcontext() if is_accepted else pytest.raises(ValueError, match="insecure"):
        WorkerSettings(transport="nixl", **options)


def test_on_loopback_nothing_listens_beyond_it() -> None:
    program = (
        "import os; from pathlib import Path; from kvferry.shared.wire.nixl.agent import NixlAgent\n"
        "its = NixlAgent(loopback_only=True)\n"
        "links = [link for link in Path('/proc/self/fd').iterdir() if link.is_symlink()]\n"
        "own = {link.readlink().name[8:-1] for link in links}\n"
        "for line in Path('/proc/self/net/tcp').read_text().splitlines()[1:]:\n"
        "    if line.split()[9] in own and line.split()[3] == '0A': print(line.split()[1])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    addresses = done.stdout.split()
    assert addresses
    assert all(address.startswith("0100007F:") for address in addresses)


def test_a_package_that_does_not_work_here_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(ConfigurationError, match="does not work here"):
        NixlAgent(loopback_only=True)
