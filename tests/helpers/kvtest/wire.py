"""The channels as one fixture, a sink that records what it gets, and transfers of random tensors."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import KvferryError
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.trust.certs import PEERS, BlockKeys, Role
from kvferry.shared.wire import outgoing, receiver, shared_memory
from kvferry.shared.wire.channel import (
    Channel,
    ListeningChannel,
    PeerLost,
    SendResult,
)
from kvferry.shared.wire.frames import (
    decode_message,
    decode_nack,
    encode_end,
    encode_header,
    encode_layer,
    encode_manifest,
    tensor_starts,
)
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.shared.wire.messages import (
    BlockHeader,
    EndRecord,
    FrameHeader,
    LayerHeader,
    Manifest,
    MessageType,
    NamedTensor,
    TensorHeader,
    TransferKey,
)
from kvferry.shared.wire.outgoing import OutgoingTransfer
from kvferry.shared.wire.receiver import BlockServer, BlockSink
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryConnectingChannel, SharedMemoryListeningChannel
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel
from kvtest.ports import unreachable_endpoint

WAIT_S = 20.0
_SECRETS = {"prefill": b"p" * 32, "decode": b"d" * 32}
ids = itertools.count(1)


class RecordingSink:
    """A sink that records every byte, refuses and fails on request, and checks how it is called."""

    def __init__(self) -> None:
        self.manifests: dict[TransferKey, Manifest] = {}
        self.layers: dict[TransferKey, list[LayerHeader]] = {}
        self.tensors: dict[tuple[TransferKey, int, str], bytearray] = {}
        self.committed: dict[TransferKey, EndRecord] = {}
        self.aborted: dict[TransferKey, str] = {}
        self.open_error: Exception | None = None
        self.layer_error: Exception | None = None
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
        self.layers[manifest.key] = []

    def begin_layer(self, key: TransferKey, header: LayerHeader) -> None:
        self._enter()
        if self.layer_error is not None:
            raise self.layer_error
        assert header.layer == len(self.layers[key])
        self.layers[key].append(header)

    def write(self, header: BlockHeader, payload: memoryview) -> None:
        self._enter()
        assert self.gate.wait(WAIT_S)
        if self.write_error is not None:
            raise self.write_error
        layers = self.layers[header.key]
        assert header.layer == len(layers) - 1
        announced = layers[-1].tensors[header.tensor]
        tensor = self.tensors.setdefault((header.key, header.layer, announced.name), bytearray())
        assert len(tensor) == header.offset
        start, end = tensor_starts(layers[-1])[header.tensor : header.tensor + 2]
        assert header.offset + payload.nbytes <= end - start
        tensor += payload
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

    def server(self, sink: BlockSink) -> BlockServer:
        channel: ListeningChannel
        if self.kind == "inproc":
            channel = self._hub.listening()
        elif self.kind == "shm":
            channel = listening_in_shared_memory()
        elif self.kind == "curve":
            channel = ZmqListeningChannel("tcp://127.0.0.1:0", keys=block_keys("decode"))
        else:
            bind = "tcp://127.0.0.1:0" if self.kind == "tcp" else f"ipc://{self._folder}/{next(ids)}"
            channel = ZmqListeningChannel(bind)
        server = BlockServer(channel, sink, on_late_block=self._on_late_block)
        self._closers.append(server.close)
        return server

    def sender(self, *, buffer_bytes: int = 64 << 20, timeout_s: float = WAIT_S) -> BlockSender:
        sender = BlockSender(self._connecting(), buffer_bytes=buffer_bytes, timeout_s=timeout_s)
        self._closers.append(sender.close)
        return sender

    def begin(
        self, sink: BlockSink, manifest: Manifest, **options: Any
    ) -> tuple[BlockServer, BlockSender, OutgoingTransfer]:
        """Begin a transfer between a new server and a new sender. Args: options: of the sender."""
        server, sender = self.server(sink), self.sender(**options)
        return server, sender, open_transfer(sender, server, manifest)

    def bare(self, endpoint: str) -> BarePeer:
        peer = BarePeer(self._connecting(), endpoint)
        self._closers.append(peer.close)
        return peer

    def close(self) -> None:
        for close in reversed(self._closers):
            close()

    def _connecting(self) -> Channel:
        if self.kind == "inproc":
            return self._hub.connecting()
        if self.kind == "curve":
            return ZmqConnectingChannel(block_keys("prefill"))
        network = ZmqConnectingChannel()
        return SharedMemoryConnectingChannel(network) if self.kind == "shm" else network

    def _on_late_block(self) -> None:
        self.late_blocks += 1


def resume_within(monkeypatch: pytest.MonkeyPatch, within_s: float) -> None:
    """Have both ends wait so long for a connection that replaces a lost one."""
    for module in (outgoing, receiver):
        monkeypatch.setattr(module, "RESUME_S", within_s)


def block_keys(role: Role) -> BlockKeys:
    """One set for all tests."""
    peer = PEERS[role]
    public = X25519PrivateKey.from_private_bytes(_SECRETS[peer]).public_key().public_bytes_raw()
    return BlockKeys(role=role, secret=_SECRETS[role], peer_role=peer, peer_public=public)


def listening_in_shared_memory() -> SharedMemoryListeningChannel:
    """A channel that ZeroMQ cannot reach, because nobody listens at the address that it advertises."""
    network = ZmqListeningChannel("tcp://127.0.0.1:0", advertise=unreachable_endpoint())
    return SharedMemoryListeningChannel(network)


class BarePeer:
    """A sender without a state machine: says whatever a test wants."""

    def __init__(self, channel: Channel, endpoint: str) -> None:
        self._channel = channel
        self._endpoint = endpoint.encode()
        self._received: list[tuple[FrameHeader, bytes]] = []
        self._closed = False
        channel.open()

    def say(self, header: FrameHeader, *payload: bytes) -> None:
        payload = payload or (b"",)
        self.say_frames(encode_header(header, payload), *payload)

    def say_frames(self, *frames: bytes) -> None:
        deadline = time.monotonic() + WAIT_S
        while self._channel.send(self._endpoint, frames) is not SendResult.SENT:
            assert time.monotonic() < deadline
            self._poll()

    def manifest(self, manifest: Manifest) -> None:
        self.say(FrameHeader(type=MessageType.MANIFEST, key=manifest.key), encode_manifest(manifest))

    def layer(self, key: TransferKey, sequence: int, layer: LayerHeader) -> None:
        self.say(FrameHeader(type=MessageType.LAYER, key=key, sequence=sequence), encode_layer(layer))

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
            if isinstance(event, PeerLost):
                assert event.peer != self._endpoint
                continue
            header, payload = decode_message(event.frames)
            self._received.append((header, b"".join(payload)))


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
        num_layers=len(rows),
        num_kv_heads=heads,
        head_dim=dim,
        start=0,
        num_tokens=max(rows),
        plan_digest="0123abcd",
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


def open_transfer(
    sender: BlockSender, server: BlockServer, manifest: Manifest, *, timeout_s: float = WAIT_S
) -> OutgoingTransfer:
    return sender.open(make_ticket(manifest, server.endpoint), manifest, timeout_s=timeout_s)


Layers = list[list[NamedTensor]]


def make_layers(manifest: Manifest, *, with_index: bool = True) -> Layers:
    """Random K and V of each layer's rows, after their index."""
    generator = torch.Generator().manual_seed(manifest.key.transfer_id % 1000)
    dtype = getattr(torch, manifest.dtype)
    layers: Layers = []
    for rows in manifest.layer_rows:
        shape = (manifest.num_kv_heads, rows, manifest.head_dim)
        index = torch.arange(rows, dtype=torch.int32).repeat(manifest.num_kv_heads, 1)
        layers.append([NamedTensor(name="index", tensor=index, kind="index")] if with_index else [])
        for name in ("keys", "values"):
            tensor = torch.randn(shape, generator=generator).to(dtype)
            layers[-1].append(NamedTensor(name=name, tensor=tensor, kind="rows"))
    return layers


def header_of(layer: int, tensors: list[NamedTensor]) -> LayerHeader:
    return LayerHeader(
        layer=layer,
        tensors=tuple(
            TensorHeader(
                name=named.name,
                dtype=str(named.tensor.dtype).removeprefix("torch."),
                shape=tuple(named.tensor.shape),
            )
            for named in tensors
        ),
    )


def to_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def send(transfer: OutgoingTransfer, layers: Layers, *, first: int = 0) -> None:
    """Send the layers, the first of which has this number."""
    for layer, tensors in enumerate(layers, first):
        transfer.send_layer(layer, tensors)


def ship(transfer: OutgoingTransfer, layers: Layers, *, first: int = 0) -> float:
    """Send the layers and the end, and wait."""
    send(transfer, layers, first=first)
    token = SampledToken(token_id=7, index=0)
    transfer.finish(EndRecord(key=transfer.key, num_blocks=0, payload_bytes=0, first_token=token))
    return transfer.wait(WAIT_S)


def arrived(sink: RecordingSink, key: TransferKey) -> dict[tuple[int, str], bytes]:
    """What came of a transfer, by layer and name."""
    return {name[1:]: bytes(data) for name, data in sink.tensors.items() if name[0] == key}


def assert_arrived(sink: RecordingSink, manifest: Manifest, layers: Layers) -> None:
    assert sink.manifests[manifest.key] == manifest
    assert sink.layers[manifest.key] == [header_of(layer, tensors) for layer, tensors in enumerate(layers)]
    expected = {
        (layer, named.name): to_bytes(named.tensor)
        for layer, tensors in enumerate(layers)
        for named in tensors
        if named.tensor.numel()
    }
    assert arrived(sink, manifest.key) == expected
    assert sink.committed[manifest.key].payload_bytes == sum(map(len, expected.values()))


needs_shared_memory = pytest.mark.skipif(
    not shared_memory.IS_SUPPORTED, reason="blocks go through shared memory on Linux only"
)


TRANSPORTS = [
    "inproc",
    "tcp",
    "curve",
    "ipc",
    pytest.param("shm", marks=needs_shared_memory),
]


@pytest.fixture(params=TRANSPORTS)
def wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    wire = Wire(request.param, tmp_path_factory.mktemp("w"))
    yield wire
    wire.close()


@pytest.fixture
def sink(wire: Wire) -> Iterator[RecordingSink]:
    sink = RecordingSink()
    yield sink
    sink.gate.set()
