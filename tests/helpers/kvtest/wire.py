"""The three channels as one fixture, a sink that keeps what it gets, and manifests of random shapes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import KvferryError
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.channel import ConnectingChannel, PeerLost, Received, SendResult
from kvferry.shared.wire.frames import FrameHeader, MessageType, decode_message, encode_header
from kvferry.shared.wire.in_process import InProcessConnectingChannel, InProcessHub
from kvferry.shared.wire.interfaces import BlockSink
from kvferry.shared.wire.messages import BlockHeader, EndRecord, Manifest, Section, TransferKey
from kvferry.shared.wire.receiver import ChannelBlockServer
from kvferry.shared.wire.records import decode_nack, encode_end, encode_manifest
from kvferry.shared.wire.sender import ChannelBlockSender
from kvferry.shared.wire.transfer import SendingTransfer
from kvferry.shared.wire.zmq import ZmqBlockSender, ZmqBlockServer, ZmqConnectingChannel

WAIT_S = 20.0
ids = itertools.count(1)


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


class RecordingSink:
    """A sink that keeps every byte, refuses and fails on request, and checks how it is called."""

    def __init__(self) -> None:
        self.manifests: dict[TransferKey, Manifest] = {}
        self.sections: dict[tuple[TransferKey, int, Section], bytearray] = {}
        self.committed: dict[TransferKey, EndRecord] = {}
        self.aborted: dict[TransferKey, str] = {}
        self.open_error: Exception | None = None
        self.write_error: Exception | None = None
        self.commit_error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.blocks = 0
        self.thread: threading.Thread | None = None

    def _enter(self) -> None:
        self.thread = self.thread or threading.current_thread()
        assert self.thread is threading.current_thread()

    def open(self, manifest: Manifest) -> None:
        self._enter()
        if self.open_error is not None:
            raise self.open_error
        self.manifests[manifest.key] = manifest

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        self._enter()
        assert self.gate.wait(WAIT_S)
        if self.write_error is not None:
            raise self.write_error
        name = (header.key, header.layer, header.section)
        section = self.sections.setdefault(name, bytearray())
        assert len(section) == header.offset
        section += payload
        self.blocks += 1

    def commit(self, end: EndRecord) -> None:
        self._enter()
        if self.commit_error is not None:
            raise self.commit_error
        self.committed[end.key] = end

    def abort(self, key: TransferKey, reason: str) -> None:
        self._enter()
        assert key in self.manifests
        assert key not in self.committed
        assert key not in self.aborted
        self.aborted[key] = reason


class Wire:
    """One kind of channel: makes servers, senders and bare channels, and closes them all."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._hub = InProcessHub()
        self._folder = folder
        self._closers: list[Callable[[], None]] = []
        self.late_blocks = 0
        self.failures: list[str] = []

    def server(self, sink: BlockSink, *, idle_timeout_s: float = WAIT_S) -> ChannelBlockServer:
        server: ChannelBlockServer
        if self.kind == "inproc":
            server = self._hub.server(
                sink,
                idle_timeout_s=idle_timeout_s,
                on_late_block=self._on_late_block,
                on_failed=self.failures.append,
            )
        else:
            bind = "tcp://127.0.0.1:0" if self.kind == "tcp" else f"ipc://{self._folder}/{next(ids)}"
            server = ZmqBlockServer(
                bind,
                sink,
                idle_timeout_s=idle_timeout_s,
                on_late_block=self._on_late_block,
                on_failed=self.failures.append,
            )
        self._closers.append(server.close)
        return server

    def sender(
        self, *, buffer_bytes: int = 64 << 20, timeout_s: float = WAIT_S, keepalive_interval_s: float = 2.0
    ) -> ChannelBlockSender:
        sender: ChannelBlockSender
        if self.kind == "inproc":
            sender = self._hub.sender(
                buffer_bytes=buffer_bytes, timeout_s=timeout_s, keepalive_interval_s=keepalive_interval_s
            )
        else:
            sender = ZmqBlockSender(
                buffer_bytes=buffer_bytes, timeout_s=timeout_s, keepalive_interval_s=keepalive_interval_s
            )
        self._closers.append(sender.close)
        return sender

    def bare(self, endpoint: str) -> BarePeer:
        channel: ConnectingChannel
        channel = InProcessConnectingChannel(self._hub) if self.kind == "inproc" else ZmqConnectingChannel()
        peer = BarePeer(channel, endpoint)
        self._closers.append(peer.close)
        return peer

    def close(self) -> None:
        for close in reversed(self._closers):
            close()

    def _on_late_block(self) -> None:
        self.late_blocks += 1


class BarePeer:
    """A sender without a state machine: says whatever a test wants."""

    def __init__(self, channel: ConnectingChannel, endpoint: str) -> None:
        self._channel = channel
        self._endpoint = endpoint.encode()
        self._received: list[tuple[FrameHeader, bytes]] = []
        self._closed = False
        channel.open()
        channel.connect(self._endpoint)

    def say(self, header: FrameHeader, payload: bytes = b"") -> None:
        self.say_frames(encode_header(header, payload), payload)

    def say_frames(self, header: bytes, payload: bytes) -> None:
        deadline = time.monotonic() + WAIT_S
        while self._channel.send(self._endpoint, header, memoryview(payload)) is not SendResult.SENT:
            assert time.monotonic() < deadline
            self._poll()

    def manifest(self, manifest: Manifest) -> None:
        self.say(FrameHeader(type=MessageType.MANIFEST, key=manifest.key), encode_manifest(manifest))

    def end(self, key: TransferKey, *, num_blocks: int, payload_bytes: int) -> None:
        end = EndRecord(key=key, num_blocks=num_blocks, payload_bytes=payload_bytes)
        self.say(FrameHeader(type=MessageType.END, key=key), encode_end(end))

    def next(self, *types: MessageType) -> tuple[FrameHeader, bytes]:
        """The next message of one of the types; others are passed over."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            while self._received:
                header, payload = self._received.pop(0)
                if header.type in types:
                    return header, payload
            self._poll()
        raise AssertionError(f"none of {types} came")

    def refusal(self) -> KvferryError:
        return decode_nack(self.next(MessageType.NACK)[1])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.close()

    def _poll(self) -> None:
        for event in self._channel.poll(0.05):
            assert not isinstance(event, PeerLost)
            assert isinstance(event, Received)
            header, payload = decode_message(event.frames)
            self._received.append((header, bytes(payload)))


def make_manifest(
    *,
    rows: tuple[int, ...] = (3, 5),
    heads: int = 2,
    dim: int = 8,
    dtype: str = "float32",
    generation: int = 1,
) -> Manifest:
    return Manifest(
        purpose="cache",
        key=TransferKey(transfer_id=(1 << 63) + next(ids), generation=generation),
        request_id="request",
        model_fingerprint="fingerprint",
        dtype=dtype,
        num_kv_heads=heads,
        head_dim=dim,
        start=0,
        num_tokens=max(rows),
        layer_rows=rows,
    )


def make_ticket(manifest: Manifest, endpoint: str, *, credit_bytes: int = 32 << 20) -> Ticket:
    return Ticket(
        endpoint=endpoint,
        transfer_id=manifest.key.transfer_id,
        generation=manifest.key.generation,
        credit_bytes=credit_bytes,
        lease_s=60.0,
        reserved_bytes=0,
    )


def make_sections(manifest: Manifest, *, with_index: bool = True) -> list[tuple[int, Section, Tensor]]:
    """Random tensors for every section, in order."""
    generator = torch.Generator().manual_seed(manifest.key.transfer_id % 1000)
    dtype = getattr(torch, manifest.dtype)
    sections: list[tuple[int, Section, Tensor]] = []
    for layer, rows in enumerate(manifest.layer_rows):
        shape = (manifest.num_kv_heads, rows, manifest.head_dim)
        if with_index:
            index = torch.arange(rows, dtype=torch.int32).repeat(manifest.num_kv_heads, 1)
            sections.append((layer, Section.INDEX, index))
        for section in (Section.KEYS, Section.VALUES):
            sections.append((layer, section, torch.randn(shape, generator=generator).to(dtype)))
    return sections


def to_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)


def ship(transfer: SendingTransfer, manifest: Manifest, sections: list[tuple[int, Section, Tensor]]) -> float:
    for layer, section, tensor in sections:
        transfer.send(layer=layer, section=section, tensor=tensor)
    token = SampledToken(token_id=7, index=0)
    transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0, first_token=token))
    return transfer.wait(WAIT_S)


def assert_arrived(
    sink: RecordingSink, manifest: Manifest, sections: list[tuple[int, Section, Tensor]]
) -> None:
    assert sink.manifests[manifest.key] == manifest
    expected = {
        (manifest.key, layer, section): to_bytes(tensor)
        for layer, section, tensor in sections
        if tensor.numel()
    }
    got = {name: bytes(data) for name, data in sink.sections.items() if name[0] == manifest.key}
    assert got == expected
    assert sink.committed[manifest.key].payload_bytes == sum(map(len, expected.values()))


@pytest.fixture(params=["inproc", "tcp", "ipc"])
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    wire = Wire(request.param, tmp_path_factory.mktemp("w"))
    yield wire
    wire.close()


@pytest.fixture
def sink(wire: Wire) -> Iterator[RecordingSink]:
    sink = RecordingSink()
    yield sink
    sink.gate.set()
