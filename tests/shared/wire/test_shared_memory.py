"""Shared memory carries blocks between processes of one machine, and only where it can; else ZeroMQ does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kvtest.wire as kit
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtest.ports import unreachable_endpoint
from kvtest.waiting import until
from kvtest.wire import RecordingSink
from structlog.testing import capture_logs

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire import ring, shared_memory
from kvferry.shared.wire.channel import Channel, ListeningChannel
from kvferry.shared.wire.frames import encode_header
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES, FrameHeader, MessageType
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.ring import RING_BYTES, Ring, RingWriter
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import (
    SharedMemoryConnectingChannel,
    SharedMemoryListeningChannel,
    socket_address,
)
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

pytestmark = kit.needs_shared_memory
WITH_HELPERS = {**os.environ, "PYTHONPATH": str(Path(kit.__file__).parents[1])}
SEQPACKET = socket.SOCK_SEQPACKET if shared_memory.IS_SUPPORTED else 0


@pytest.fixture
def sink() -> Iterator[RecordingSink]:
    sink = RecordingSink()
    yield sink
    sink.gate.set()


@contextlib.contextmanager
def serving(channel: ListeningChannel, sink: RecordingSink) -> Iterator[BlockServer]:
    server = BlockServer(channel, sink)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def sending(channel: Channel | None = None, *, timeout_s: float = kit.WAIT_S) -> Iterator[BlockSender]:
    channel = channel or SharedMemoryConnectingChannel(ZmqConnectingChannel())
    sender = BlockSender(channel, buffer_bytes=64 << 20, timeout_s=timeout_s)
    try:
        yield sender
    finally:
        sender.close()


def transfer_once(
    sender: BlockSender, endpoint: str, sink: RecordingSink, *, credit_bytes: int = 32 << 20
) -> None:
    manifest = kit.make_manifest(rows=(400, 0, 90), heads=2, dim=64)
    ticket = kit.make_ticket(manifest, endpoint, credit_bytes=credit_bytes)
    layers = kit.make_layers(manifest)
    kit.ship(sender.open(ticket, manifest, timeout_s=kit.WAIT_S), layers)
    kit.assert_arrived(sink, manifest, layers)


def num_mapped(pid: int | str = "self") -> int:
    """How many rings a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvferry-blocks")


def transports(lines: list[dict[str, str]]) -> list[str]:
    return [line["event"] for line in lines if line["event"].startswith("blocks are sent")]


# ---- the ring --------------------------------------------------------------------------------------------


@given(
    st.integers(8, 1000).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size * 3 // 8), max_size=60))
    )
)
def test_a_ring_never_gives_bytes_twice_and_always_has_room_once_it_is_read(
    case: tuple[int, list[int]],
) -> None:
    size, messages = case
    allocator = Ring(size)
    in_use: list[range] = []
    for num_bytes in messages:
        position = allocator.place(num_bytes)
        if position is None:
            # Everything is read; what was read last, less than a quarter of the ring, is not reported.
            allocator.freed = min(
                part.stop for part in in_use if allocator.used - part.stop < max(1, size // 4)
            )
            in_use = [part for part in in_use if part.stop > allocator.freed]
            position = allocator.place(num_bytes)
        assert position is not None
        assert position % size + num_bytes <= size
        new = range(position, position + num_bytes)
        assert not {byte % size for part in in_use for byte in part} & {byte % size for byte in new}
        allocator.used = new.stop
        in_use.append(new)


def test_every_message_fits_into_the_ring() -> None:
    assert MAX_PAYLOAD_BYTES + (1 << 20) <= RING_BYTES * 3 // 8


@pytest.mark.parametrize("ring_bytes", [28_001, 40_009, 65_536])
@pytest.mark.parametrize("credit_bytes", [10_001, 10_240, 9_999_999])
def test_transfers_larger_than_an_odd_ring_arrive_though_what_is_free_is_poisoned(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, ring_bytes: int, credit_bytes: int
) -> None:
    monkeypatch.setattr(ring, "RING_BYTES", ring_bytes)
    frames_of = RingWriter.frames_of

    def poison(self: RingWriter, packet: bytes) -> list[memoryview] | None:
        freed = self._ring.freed
        frames = frames_of(self, packet)
        for start in range(freed, self._ring.freed):
            self._memory[start % ring_bytes] = 0xA5
        return frames

    monkeypatch.setattr(RingWriter, "frames_of", poison)
    with serving(kit.listening_in_shared_memory(), sink) as server, sending() as sender:
        for _ in range(3):
            manifest = kit.make_manifest(rows=(60, 1, 777, 5, 0, 130), heads=2, dim=16)
            layers = kit.make_layers(manifest)
            sent = [sum(named.tensor.nbytes for named in tensors) for tensors in layers]
            assert max(sent) > ring_bytes
            ticket = kit.make_ticket(
                manifest, server.endpoint, credit_bytes=min(credit_bytes, ring_bytes * 3 // 8 - 400)
            )
            kit.ship(sender.open(ticket, manifest, timeout_s=kit.WAIT_S), layers)
            kit.assert_arrived(sink, manifest, layers)
    assert sink.aborted == {}


def test_more_small_messages_than_a_socket_takes_arrive(
    sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_SOCKET_BUFFER_BYTES", 10_000)
    manifest = kit.make_manifest(rows=(1,) * 1000, heads=1, dim=1)
    layers = kit.make_layers(manifest)
    with serving(kit.listening_in_shared_memory(), sink) as server, sending() as sender:
        sink.gate.clear()
        ticket = kit.make_ticket(manifest, server.endpoint)
        transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
        kit.send(transfer, layers)
        time.sleep(0.5)
        assert transfer.queue, "its messages wait for the sink"
        sink.gate.set()
        kit.ship(transfer, [])
    kit.assert_arrived(sink, manifest, layers)


def test_a_connection_is_ended_when_its_sender_does_not_read_the_answers(sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    keepalive = encode_header(FrameHeader(type=MessageType.KEEPALIVE, key=manifest.key))
    with serving(kit.listening_in_shared_memory(), sink) as server, raw_sender(server.endpoint) as raw:
        raw.settimeout(kit.WAIT_S)
        packet = packet_of(keepalive, b"")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_forever(raw, packet)
        with sending() as sender:
            transfer_once(sender, server.endpoint, sink)


def send_forever(raw: socket.socket, packet: bytes) -> None:
    for _ in range(100_000):
        raw.send(packet)


# ---- memory ----------------------------------------------------------------------------------------------


def test_an_idle_connection_gives_its_ring_back(sink: RecordingSink, monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_mapped()
    with serving(kit.listening_in_shared_memory(), sink) as server, sending() as sender:
        for _ in range(2):
            monkeypatch.setattr(shared_memory, "IDLE_CONNECTION_S", 10 * kit.WAIT_S)
            transfer_once(sender, server.endpoint, sink)
            assert num_mapped() == before + 2  # the sender's view and the receiver's
            monkeypatch.setattr(shared_memory, "IDLE_CONNECTION_S", 0.01)
            until(lambda: num_mapped() == before)
    assert sink.aborted == {}


def test_closing_gives_the_ring_back(sink: RecordingSink) -> None:
    before = num_mapped()
    with serving(kit.listening_in_shared_memory(), sink) as server, sending() as sender:
        transfer_once(sender, server.endpoint, sink)
    assert num_mapped() == before


RECEIVER = """
import sys, time
import kvtest.wire as kit
from kvferry.shared.wire.receiver import BlockServer
sink = kit.RecordingSink()
server = BlockServer(kit.listening_in_shared_memory(), sink)
print(server.endpoint, flush=True)
time.sleep(60)
"""


def test_a_killed_receiver_fails_the_transfer_and_leaves_no_memory() -> None:
    before = num_mapped()
    process = subprocess.Popen(
        [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True, env=WITH_HELPERS
    )
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        manifest = kit.make_manifest(rows=(9000, 3), heads=2, dim=64)
        layers = kit.make_layers(manifest)
        with sending() as sender:
            transfer = sender.open(kit.make_ticket(manifest, endpoint), manifest, timeout_s=kit.WAIT_S)
            transfer.send_layer(0, layers[0])
            until(lambda: transfer.bytes_by_kind["rows"] > 0)
            assert (num_mapped(), num_mapped(process.pid)) == (before + 1, 1)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(TransferFailed, match="was lost for more than") as failed:
                transfer.wait(kit.WAIT_S)
            assert failed.value.reason == "peer_lost"
            assert num_mapped() == before
    finally:
        process.kill()
        process.communicate(timeout=kit.WAIT_S)


def test_a_receiver_that_comes_back_at_its_endpoint_is_found_again() -> None:
    endpoint = unreachable_endpoint()
    with sending() as sender, capture_logs() as lines:
        for _ in range(2):
            network, sink = ZmqListeningChannel("tcp://127.0.0.1:0", advertise=endpoint), RecordingSink()
            with serving(SharedMemoryListeningChannel(network), sink):
                transfer_once(sender, endpoint, sink)
    assert transports(lines) == ["blocks are sent through shared memory"] * 2


# ---- the choice of the transport -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
@pytest.mark.parametrize("shares", ["both", "sender", "receiver"])
def test_both_ends_must_offer_shared_memory(
    sink: RecordingSink, tmp_path_factory: pytest.TempPathFactory, scheme: str, shares: str
) -> None:
    bind = "tcp://127.0.0.1:0" if scheme == "tcp" else f"ipc://{tmp_path_factory.mktemp('s')}/blocks"
    network, sending_network = ZmqListeningChannel(bind), ZmqConnectingChannel()
    listening: ListeningChannel = network if shares == "sender" else SharedMemoryListeningChannel(network)
    connecting: Channel = sending_network
    if shares != "receiver":
        connecting = SharedMemoryConnectingChannel(sending_network)
    before = num_mapped()
    with serving(listening, sink) as server, capture_logs() as lines, sending(connecting) as sender:
        transfer_once(sender, server.endpoint, sink)
        assert num_mapped() == before + (2 if shares == "both" else 0)
    expected = {
        "both": ["blocks are sent through shared memory"],
        "sender": ["blocks are sent over the network"],
    }
    assert transports(lines) == expected.get(shares, [])


def test_a_receiver_that_does_not_answer_the_handshake_is_reached_over_zeromq(sink: RecordingSink) -> None:
    silent = socket.socket(socket.AF_UNIX, SEQPACKET)
    with serving(ZmqListeningChannel("tcp://127.0.0.1:0"), sink) as server, silent:
        silent.bind(socket_address(server.endpoint) or "")
        silent.listen()
        with sending() as sender, capture_logs() as lines:
            transfer_once(sender, server.endpoint, sink)
            transfer_once(sender, server.endpoint, sink)
    assert transports(lines) == ["blocks are sent over the network"]


IN_ANOTHER_NAMESPACE = ("unshare", "--net", "--map-root-user")


def test_another_network_namespace_uses_zeromq(
    sink: RecordingSink, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As of another container: it may share a volume with the receiver's ipc socket, but not its loopback."""
    probe = [*IN_ANOTHER_NAMESPACE, "true"]
    if subprocess.run(probe, capture_output=True, timeout=kit.WAIT_S, check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    bind = f"ipc://{tmp_path_factory.mktemp('n')}/blocks"
    before = num_mapped()
    with serving(SharedMemoryListeningChannel(ZmqListeningChannel(bind)), sink) as server:
        script = TRANSFER.format(endpoint=server.endpoint)
        done = subprocess.run(
            [*IN_ANOTHER_NAMESPACE, sys.executable, "-c", script],
            capture_output=True, text=True, timeout=60, check=False, env=WITH_HELPERS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert num_mapped() == before
    assert "blocks are sent over the network" in done.stdout + done.stderr
    assert len(sink.committed) == 1


TRANSFER = """
import kvtest.wire as kit
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryConnectingChannel
from kvferry.shared.wire.zmq import ZmqConnectingChannel
channel = SharedMemoryConnectingChannel(ZmqConnectingChannel())
sender = BlockSender(channel, buffer_bytes=1 << 20, timeout_s=20)
manifest = kit.make_manifest()
transfer = sender.open(kit.make_ticket(manifest, {endpoint!r}), manifest, timeout_s=20)
kit.ship(transfer, kit.make_layers(manifest))
sender.close()
"""

OTHER_USERS_SENDER = """
import os, socket, sys
os.setuid(65534)
connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connected.settimeout(20)
connected.connect("\\0" + sys.argv[1])
memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
try:
    socket.send_fds(connected, [b"ring"], [memory])
    sys.exit(len(connected.recv(1)))
except (BrokenPipeError, ConnectionResetError):
    pass
"""

OTHER_USERS_RECEIVER = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listening", flush=True)
listener.settimeout(20)
accepted, _ = listener.accept()
accepted.settimeout(20)
sys.exit(len(accepted.recv(1)))
"""
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user")


@is_root
def test_another_users_sender_is_refused(sink: RecordingSink) -> None:
    with serving(kit.listening_in_shared_memory(), sink) as server:
        address = (socket_address(server.endpoint) or "").removeprefix("\0")
        script = [sys.executable, "-c", OTHER_USERS_SENDER, address]
        assert subprocess.run(script, timeout=60, check=False).returncode == 0


@is_root
def test_another_users_receiver_gets_nothing(sink: RecordingSink) -> None:
    with serving(ZmqListeningChannel("tcp://127.0.0.1:0"), sink) as server:
        address = (socket_address(server.endpoint) or "").removeprefix("\0")
        script = [sys.executable, "-c", OTHER_USERS_RECEIVER, address]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            with sending() as sender, capture_logs() as lines:
                transfer_once(sender, server.endpoint, sink)
            assert process.wait(kit.WAIT_S) == 0
    assert transports(lines) == ["blocks are sent over the network"]


# ---- broken senders --------------------------------------------------------------------------------------


def packet_of(*frames: bytes, position: int = 2**64 - 1, sizes: tuple[int, ...] | None = None) -> bytes:
    sizes = sizes if sizes is not None else tuple(map(len, frames))
    return struct.pack(f"=QI{len(sizes)}I", position, len(sizes), *sizes) + b"".join(frames)


@contextlib.contextmanager
def raw_sender(
    endpoint: str, *, seals: int = fcntl.F_SEAL_SHRINK, size: int = 4096
) -> Iterator[socket.socket]:
    """A sender's socket, whose ring has been passed."""
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, size)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        with socket.socket(socket.AF_UNIX, SEQPACKET) as connected:
            connected.settimeout(kit.WAIT_S)
            connected.connect(socket_address(endpoint) or "")
            socket.send_fds(connected, [b"ring"], [memory])
            yield connected
    finally:
        os.close(memory)


def ended(raw: socket.socket) -> bool:
    """Whether the connection has ended, without another packet."""
    try:
        return raw.recv(8) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        packet_of(position=0, sizes=(4097,)),
        packet_of(position=4000, sizes=(50, 50)),
        packet_of(position=2**63 + 4090, sizes=(7,)),
        packet_of(sizes=(1,)),
        packet_of(b"left", sizes=(1,)),
        struct.pack("=QI", 0, 2**32 - 1),
    ],
)
def test_a_packet_that_points_outside_its_ring_ends_the_connection(
    sink: RecordingSink, packet: bytes
) -> None:
    with serving(kit.listening_in_shared_memory(), sink) as server:
        with raw_sender(server.endpoint) as raw:
            assert raw.recv(8) == bytes(8)
            raw.send(packet)
            assert ended(raw)
        with sending() as sender:
            transfer_once(sender, server.endpoint, sink)


@pytest.mark.parametrize(("seals", "size"), [(0, 4096), (fcntl.F_SEAL_GROW, 4096), (fcntl.F_SEAL_SHRINK, 0)])
def test_a_ring_that_could_shrink_or_is_empty_is_refused(sink: RecordingSink, seals: int, size: int) -> None:
    with serving(kit.listening_in_shared_memory(), sink) as server:
        with raw_sender(server.endpoint, seals=seals, size=size) as raw:
            assert ended(raw)
        with sending() as sender:
            transfer_once(sender, server.endpoint, sink)


def test_a_first_packet_without_a_ring_is_refused(sink: RecordingSink) -> None:
    with serving(kit.listening_in_shared_memory(), sink) as server:
        with socket.socket(socket.AF_UNIX, SEQPACKET) as raw:
            raw.settimeout(kit.WAIT_S)
            raw.connect(socket_address(server.endpoint) or "")
            raw.send(b"ring")
            assert ended(raw)
        with sending() as sender:
            transfer_once(sender, server.endpoint, sink)
