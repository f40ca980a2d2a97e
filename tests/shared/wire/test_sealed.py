"""Sealed connections: who may connect, what a recording, a change or a stranger can do."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace

import kvtest.wire as kit
import pytest
from kvtest.clock import Clock
from kvtest.proxy import CuttingSealedProxy
from kvtest.waiting import until
from kvtest.wire import RecordingSink

from kvferry.shared.wire import sealed
from kvferry.shared.wire.channel import Received, SendResult
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES
from kvferry.shared.wire.noise import HANDSHAKE_BYTES, Handshake
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sealed import SealedConnectingChannel, SealedListeningChannel
from kvferry.shared.wire.sealed_connection import MAX_FRAMES, RECORD_BYTES
from kvferry.shared.wire.sender import BlockSender


@pytest.fixture
def sealed_sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def channel() -> SealedListeningChannel:
    return SealedListeningChannel("tcp://127.0.0.1:0", keys=kit.block_keys("decode"))


@pytest.fixture
def endpoint(channel: SealedListeningChannel, sealed_sink: RecordingSink) -> Iterator[str]:
    server = BlockServer(channel, sealed_sink)
    yield server.endpoint
    server.close()


@contextlib.contextmanager
def connected(endpoint: str) -> Iterator[socket.socket]:
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=kit.WAIT_S) as connection:
        yield connection


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    with contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return b""


def ship(endpoint: str, rows: tuple[int, ...] = (3, 5)) -> tuple[kit.Manifest, kit.Layers]:
    sender = BlockSender(
        SealedConnectingChannel(kit.block_keys("prefill")), buffer_bytes=64 << 20, timeout_s=kit.WAIT_S
    )
    try:
        manifest = kit.make_manifest(rows=rows)
        layers = kit.make_layers(manifest)
        ticket = kit.make_ticket(manifest, endpoint)
        kit.ship(sender.open(ticket, manifest, timeout_s=kit.WAIT_S), layers)
        return manifest, layers
    finally:
        sender.close()


class Tape(CuttingSealedProxy):
    """Remembers what a sender sent, and may change it: `change` gets the number of a piece and its bytes."""

    def __init__(self, target: str, change: tuple[int, bytes] | None = None) -> None:
        self.recorded = bytearray()
        self.change = change
        super().__init__(target)

    def _messages(self, client: socket.socket, server: socket.socket) -> Iterator[bytes]:
        first = client.recv(HANDSHAKE_BYTES, socket.MSG_WAITALL)
        self.recorded += first
        server.sendall(first)
        for number in itertools.count():
            piece = client.recv(self.PIECE_BYTES)
            if not piece:
                return
            self.recorded += piece
            if self.change is not None and self.change[0] == number:
                added, self.change = self.change[1], None
                piece = added + piece[len(added) :]
            yield piece


def test_messages_of_all_sizes_pass_both_ways() -> None:
    listening = SealedListeningChannel("tcp://127.0.0.1:0", keys=kit.block_keys("decode"))
    connecting = SealedConnectingChannel(kit.block_keys("prefill"))
    listening.open()
    connecting.open()
    peer = listening.endpoint.encode()
    messages = [
        [b"head", b"", b"x" * size] for size in (0, 1, RECORD_BYTES - 4, RECORD_BYTES, MAX_PAYLOAD_BYTES)
    ]
    messages += [[b"%d" % part * 100_000 for part in range(MAX_FRAMES)], [b""], [b"a"] * MAX_FRAMES]
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


@pytest.mark.parametrize("size", [0, 47, 48, 4096])
def test_a_stranger_gets_no_byte(
    endpoint: str, channel: SealedListeningChannel, sealed_sink: RecordingSink, size: int
) -> None:
    with connected(endpoint) as connection:
        with contextlib.suppress(OSError):  # the other end has closed it
            connection.sendall(b"?" * size)
            connection.shutdown(socket.SHUT_WR)
        assert answer_of(connection) == b""
    until(lambda: channel.refused == 1)
    assert sealed_sink.manifests == {}
    kit.assert_arrived(sealed_sink, *ship(endpoint))


def test_a_key_of_the_receivers_own_role_is_refused(endpoint: str, channel: SealedListeningChannel) -> None:
    """A stolen key of decode cannot send blocks to decode."""
    own = kit.block_keys("decode")
    for prologue in (b"kvferry blocks 1 prefill decode", b"kvferry blocks 1 decode decode"):
        handshake = Handshake(initiates=True, own=own.secret, peer=own.peer_public, prologue=prologue)
        with connected(endpoint) as connection:
            connection.sendall(handshake.write())
            assert answer_of(connection) == b""
    until(lambda: channel.refused == 2)


def test_a_recorded_connection_is_not_accepted_again(
    endpoint: str, sealed_sink: RecordingSink, channel: SealedListeningChannel
) -> None:
    """Its first message is answered, with another key, and nothing that follows is authentic."""
    tape = Tape(endpoint)
    manifest, _ = ship(tape.endpoint)
    tape.close()
    assert manifest.key in sealed_sink.committed
    written = len(sealed_sink.tensors)
    with connected(endpoint) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(tape.recorded)
        assert len(answer_of(connection)) <= HANDSHAKE_BYTES
    until(lambda: channel.refused == 1)
    assert len(sealed_sink.tensors) == written
    assert list(sealed_sink.manifests) == [manifest.key]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_changed_or_inserted_piece_ends_the_connection_and_the_transfer_goes_on(
    endpoint: str, sealed_sink: RecordingSink, channel: SealedListeningChannel, number: int
) -> None:
    tape = Tape(endpoint, change=(number, b"\x00" * 32))
    shipped = ship(tape.endpoint, rows=(400, 900))
    tape.close()
    kit.assert_arrived(sealed_sink, *shipped)
    until(lambda: channel.refused == 1)


def recorded_greeting(endpoint: str) -> bytes:
    """The first message of a connection with the right key, as a relay saw it."""
    tape = Tape(endpoint)
    ship(tape.endpoint)
    tape.close()
    return bytes(tape.recorded[:HANDSHAKE_BYTES])


@pytest.mark.parametrize("repeats", [False, True])
def test_strangers_who_wait_do_not_keep_senders_out(
    endpoint: str,
    channel: SealedListeningChannel,
    sealed_sink: RecordingSink,
    monkeypatch: pytest.MonkeyPatch,
    repeats: bool,
) -> None:
    greeting = recorded_greeting(endpoint) if repeats else b""
    monkeypatch.setattr(sealed, "MAX_UNPROVEN", 8)
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(40):
            connections.append(stack.enter_context(connected(endpoint)))
            connections[-1].sendall(greeting)
            assert len(connections[-1].recv(len(greeting), socket.MSG_WAITALL)) == len(greeting)
        kit.assert_arrived(sealed_sink, *ship(endpoint))
        until(lambda: channel.refused >= 32, kit.WAIT_S)
        assert answer_of(connections[0]) == b""
    assert threading.active_count() < 40


@pytest.mark.parametrize("size", [0, HANDSHAKE_BYTES - 1, HANDSHAKE_BYTES])
def test_who_repeats_a_recorded_greeting_is_closed_and_holds_no_memory(
    endpoint: str,
    channel: SealedListeningChannel,
    sealed_sink: RecordingSink,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    """All of it is answered, which proves nothing: who repeats it cannot go on."""
    greeting, answer_bytes = recorded_greeting(endpoint)[:size], size // HANDSHAKE_BYTES * HANDSHAKE_BYTES
    clock = Clock(time.monotonic)
    monkeypatch.setattr(sealed, "time", SimpleNamespace(monotonic=clock))

    def all_refused() -> bool:
        clock.turn(sealed.HANDSHAKE_S)  # again and again: the last ones may not have been accepted yet
        return channel.refused == len(connections)

    with contextlib.ExitStack() as stack:
        stack.callback(tracemalloc.stop)
        tracemalloc.start()
        connections = []
        for _ in range(40):
            connections.append(stack.enter_context(connected(endpoint)))
            connections[-1].sendall(greeting)
            assert len(connections[-1].recv(answer_bytes, socket.MSG_WAITALL)) == answer_bytes
        assert tracemalloc.get_traced_memory()[1] < RECORD_BYTES
        until(all_refused, kit.WAIT_S)
        assert [answer_of(connection) for connection in connections] == [b""] * len(connections)
    kit.assert_arrived(sealed_sink, *ship(endpoint))
