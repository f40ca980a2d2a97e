"""Connections with keys: who may connect, and what a recording, a change or a stranger can do."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import kvtest.wire as kit
import pytest
from kvtest.proxy import CuttingProxy
from kvtest.waiting import until
from kvtest.wire import RecordingSink

from kvferry.shared.errors import TransferFailed
from kvferry.shared.trust.certs import BlockKeys
from kvferry.shared.wire import zmq as module
from kvferry.shared.wire.channel import Received, SendResult
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

GREETING_BYTES = 64
"""Of ZMTP, the same for all; it says that the mechanism is CURVE."""


@pytest.fixture
def curve_sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def channel() -> ZmqListeningChannel:
    return ZmqListeningChannel("tcp://127.0.0.1:0", keys=kit.block_keys("decode"))


@pytest.fixture
def endpoint(channel: ZmqListeningChannel, curve_sink: RecordingSink) -> Iterator[str]:
    server = BlockServer(channel, curve_sink)
    yield server.endpoint
    server.close()


@contextlib.contextmanager
def connected(endpoint: str) -> Iterator[socket.socket]:
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=kit.WAIT_S) as connection:
        yield connection


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    answer = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            answer += piece
    return bytes(answer)


def ship(
    endpoint: str,
    rows: tuple[int, ...] = (3, 5),
    *,
    keys: BlockKeys | None = None,
    timeout_s: float = kit.WAIT_S,
) -> tuple[kit.Manifest, kit.Layers]:
    """Args: keys: the sender's, prefill's if None."""
    channel = ZmqConnectingChannel(keys or kit.block_keys("prefill"))
    sender = BlockSender(channel, buffer_bytes=64 << 20, timeout_s=timeout_s)
    try:
        manifest = kit.make_manifest(rows=rows)
        layers = kit.make_layers(manifest)
        ticket = kit.make_ticket(manifest, endpoint)
        kit.ship(sender.open(ticket, manifest, timeout_s=timeout_s), layers)
        return manifest, layers
    finally:
        sender.close()


class Tape(CuttingProxy):
    """Remembers what a sender sent, and may change it: `change` gets the number of a piece and its bytes."""

    PIECE_BYTES = 5000

    def __init__(self, target: str, change: tuple[int, bytes] | None = None) -> None:
        self.recorded = bytearray()
        self.change = change
        super().__init__(target)

    def _messages(self, client: socket.socket, server: socket.socket) -> Iterator[bytes]:
        recorded = bytearray()
        for number in itertools.count():
            piece = client.recv(self.PIECE_BYTES)
            recorded += piece
            self.recorded = max(self.recorded, recorded, key=len)
            if not piece:
                return
            if self.change is not None and self.change[0] == number:
                added, self.change = self.change[1], None
                piece = added + piece[len(added) :]
            yield piece


def recording(endpoint: str) -> bytes:
    """What a sender with the right key sent, as a relay saw it."""
    tape = Tape(endpoint)
    ship(tape.endpoint)
    tape.close()
    return bytes(tape.recorded)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_messages_of_all_sizes_pass_both_ways() -> None:
    listening = ZmqListeningChannel("tcp://127.0.0.1:0", keys=kit.block_keys("decode"))
    connecting = ZmqConnectingChannel(kit.block_keys("prefill"))
    listening.open()
    connecting.open()
    peer = listening.endpoint.encode()
    messages = [[b"head", b"", b"x" * size] for size in (0, 1, 4096, MAX_PAYLOAD_BYTES)]
    messages += [[b"%d" % part * 100_000 for part in range(4)], [b""], [b"a"] * 4]
    try:
        waiting = list(messages)
        received: list[list[bytes]] = []
        answers: list[list[bytes]] = []
        while len(answers) < len(messages):
            if waiting and connecting.send(peer, waiting[0]) is SendResult.SENT:
                del waiting[0]
            for event in listening.poll(0.01):
                assert isinstance(event, Received)
                received.append([bytes(frame) for frame in event.frames])
                assert listening.send(event.peer, [b"answer", received[-1][0][:9]]) is SendResult.SENT
            for event in connecting.poll(0.01):
                assert isinstance(event, Received)
                answers.append([bytes(frame) for frame in event.frames])
        assert received == messages
        assert answers == [[b"answer", frames[0][:9]] for frames in messages]
    finally:
        connecting.close()
        listening.close()


@pytest.mark.parametrize("size", [0, 47, GREETING_BYTES, 4096])
def test_a_stranger_gets_the_greeting_that_everybody_gets_and_nothing_else(
    endpoint: str, curve_sink: RecordingSink, size: int
) -> None:
    with connected(endpoint) as connection:
        with contextlib.suppress(OSError):  # the other end has closed it
            connection.sendall(b"?" * size)
            connection.shutdown(socket.SHUT_WR)
        assert len(answer_of(connection)) <= GREETING_BYTES
    assert curve_sink.manifests == {}
    kit.assert_arrived(curve_sink, *ship(endpoint))


@pytest.mark.parametrize("whose", ["a stranger's own", "the receiver's role"])
def test_another_key_is_refused_although_it_is_proved(
    endpoint: str, channel: ZmqListeningChannel, curve_sink: RecordingSink, whose: str
) -> None:
    """Whoever knows the receiver's public key can begin; a stolen key of decode sends nothing to decode."""
    decode, prefill = kit.block_keys("decode"), kit.block_keys("prefill")
    secret = decode.secret if whose == "the receiver's role" else b"s" * 32
    keys = BlockKeys(role="prefill", secret=secret, peer_role="decode", peer_public=prefill.peer_public)
    with pytest.raises(TransferFailed):
        ship(endpoint, keys=keys, timeout_s=1.0)
    until(lambda: channel.refused >= 1)
    assert curve_sink.manifests == {}
    kit.assert_arrived(curve_sink, *ship(endpoint))


def test_a_receiver_with_another_key_gets_nothing(endpoint: str, curve_sink: RecordingSink) -> None:
    keys = kit.block_keys("prefill")
    other = BlockKeys(role="prefill", secret=keys.secret, peer_role="decode", peer_public=b"\x09" + bytes(31))
    with pytest.raises(TransferFailed):
        ship(endpoint, keys=other, timeout_s=1.0)
    assert curve_sink.manifests == {}


@pytest.mark.parametrize("has_key", ["sender", "receiver"])
def test_one_end_without_keys_is_refused(has_key: str) -> None:
    sink = RecordingSink()
    keys = kit.block_keys("decode") if has_key == "receiver" else None
    server = BlockServer(ZmqListeningChannel("tcp://127.0.0.1:0", keys=keys), sink)
    own = kit.block_keys("prefill") if has_key == "sender" else None
    sender = BlockSender(ZmqConnectingChannel(own), buffer_bytes=1 << 20, timeout_s=1.0)
    try:
        manifest = kit.make_manifest()
        transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=1.0)
        with pytest.raises(TransferFailed):
            transfer.wait(kit.WAIT_S)
        assert sink.manifests == {}
    finally:
        sender.close()
        server.close()


def test_a_recorded_connection_is_not_accepted_again(endpoint: str, curve_sink: RecordingSink) -> None:
    recorded = recording(endpoint)
    before = dict(curve_sink.committed), len(curve_sink.tensors), len(curve_sink.manifests)
    assert before[0]
    with connected(endpoint) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(recorded)
        answer_of(connection)  # until it is closed
    assert (dict(curve_sink.committed), len(curve_sink.tensors), len(curve_sink.manifests)) == before
    kit.assert_arrived(curve_sink, *ship(endpoint))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_changed_or_inserted_piece_ends_the_connection_and_the_transfer_goes_on(
    endpoint: str, curve_sink: RecordingSink, number: int
) -> None:
    tape = Tape(endpoint, change=(number, b"\x00" * 32))
    shipped = ship(tape.endpoint, rows=(400, 900))
    assert tape.change is None
    tape.close()
    kit.assert_arrived(curve_sink, *shipped)


@pytest.mark.parametrize("repeats", ["nothing", "the greeting", "a recording"])
def test_strangers_who_wait_keep_nobody_out_hold_no_memory_and_are_closed(
    curve_sink: RecordingSink, monkeypatch: pytest.MonkeyPatch, repeats: str
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 2.0)
    channel = ZmqListeningChannel("tcp://127.0.0.1:0", keys=kit.block_keys("decode"))
    server = BlockServer(channel, curve_sink)
    try:
        recorded = recording(server.endpoint)
        said = {"nothing": b"", "the greeting": recorded[:GREETING_BYTES], "a recording": recorded[:600]}[
            repeats
        ]
        curve_sink.manifests.clear()
        with contextlib.ExitStack() as stack:
            before_bytes = resident_bytes()
            connections = [stack.enter_context(connected(server.endpoint)) for _ in range(100)]
            for connection in connections:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(said)
            kit.assert_arrived(curve_sink, *ship(server.endpoint))
            assert resident_bytes() - before_bytes < 50 << 20, "each may have half a MiB"
            for connection in connections:
                answer_of(connection)  # until it is closed
        kit.assert_arrived(curve_sink, *ship(server.endpoint))
    finally:
        server.close()
