"""With certs nobody but the right role gets an answer from a worker's ports, and all works as before."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import kvtest.control as control_kit
import kvtest.wire as wire_kit
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvtest.control import DecodeService, PrefillService

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.prefill.config import PrefillConfig
from kvferry.shared.control.client import GrpcDecodeClient, GrpcPrefillClient
from kvferry.shared.control.server import ControlServer, serve_control
from kvferry.shared.errors import ConfigurationError, TransferFailed, WorkerUnavailable
from kvferry.shared.trust.certs import ROLES, Certs
from kvferry.shared.wire.messages import MAX_PAYLOAD_BYTES
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel
from kvferry.tools.certs import make_certs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder, days=2, everything=False)
    return folder


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another deployment's."""
    folder = tmp_path_factory.mktemp("strangers")
    make_certs(folder, days=2, everything=False)
    return folder


@pytest.fixture
async def serve(folder: Path) -> Any:
    servers: list[ControlServer] = []

    async def start(certs: Path = folder, **options: Any) -> ControlServer:
        decode = control_kit.as_decode(DecodeService())
        server = await serve_control(
            listen="127.0.0.1:0", decode=decode, certs=Certs(str(certs), "decode"), **options
        )
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close(0.0)


# ---- files -----------------------------------------------------------------------------------------------


def test_each_role_has_its_own_keys_and_nobody_elses(folder: Path) -> None:
    files = {role: {path.name for path in (folder / role).iterdir()} for role in ROLES}
    tls, curve = {"ca.pem", "tls.pem", "tls.key"}, {"curve.key", "prefill.pub", "decode.pub"}
    assert files == {"router": tls, "prefill": tls | curve, "decode": tls | curve, "metrics": tls}
    secrets = [path for path in folder.rglob("*.key")]
    assert len({path.read_bytes() for path in secrets}) == len(secrets) == 7
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)


def test_a_missing_file_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ca\.pem.*kvferry certs"):
        Certs(str(tmp_path), "decode")


def test_the_end_of_a_certificate_is_known(folder: Path, tmp_path: Path) -> None:
    make_certs(tmp_path, days=3, everything=False)
    for role in ROLES:
        assert Certs(str(tmp_path), role).expires_at_s == pytest.approx(time.time() + 3 * 86_400, abs=120)
    (tmp_path / "router" / "tls.pem").write_text("none")
    with pytest.raises(ConfigurationError, match=r"no certificate in .*tls\.pem"):
        _ = Certs(str(tmp_path), "router").expires_at_s


# ---- control ---------------------------------------------------------------------------------------------


async def test_the_router_calls_a_worker(serve: Any, folder: Path) -> None:
    server = await serve()
    client = GrpcDecodeClient(server.address, certs=Certs(str(folder), "router"))
    assert (await client.status(timeout_s=control_kit.WAIT_S)).role == "decode"
    events = await control_kit.collect(
        client.generate(control_kit.generate_request(), timeout_s=control_kit.WAIT_S)
    )
    assert len(events) == 5
    await client.close()


@pytest.mark.parametrize("who", ["nobody", "prefill", "decode", "metrics", "stranger"])
async def test_nobody_else_gets_an_answer(serve: Any, folder: Path, strangers: Path, who: str) -> None:
    server = await serve()
    certs = {
        "nobody": None,
        "prefill": Certs(str(folder), "prefill"),
        "decode": Certs(str(folder), "decode"),
        "metrics": Certs(str(folder), "metrics"),
        "stranger": Certs(str(strangers), "router"),
    }[who]
    client = GrpcDecodeClient(server.address, certs=certs)
    with pytest.raises(WorkerUnavailable):
        await client.status(timeout_s=3.0)
    await client.close()


async def test_a_client_without_a_certificate_sees_an_alert_and_no_more(serve: Any) -> None:
    server = await serve()
    host, port = server.address.split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    def ask() -> bytes:
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            return connection.recv(1000)

    try:
        answer = await asyncio.to_thread(ask)
    except (ssl.SSLError, ConnectionError):
        answer = b""
    assert answer == b""


async def test_a_worker_cannot_pass_for_one_of_another_role(serve: Any, folder: Path) -> None:
    server = await serve(certs=folder)
    client = GrpcPrefillClient(server.address, certs=Certs(str(folder), "router"))
    with pytest.raises(WorkerUnavailable):
        await client.status(timeout_s=3.0)
    await client.close()


async def test_certificates_are_renewed_one_service_after_the_other(tmp_path: Path, serve: Any) -> None:
    make_certs(tmp_path, days=2, everything=False)
    server, before = await serve(certs=tmp_path), Certs(str(tmp_path), "router")
    keys_before = Certs(str(tmp_path), "decode").block_keys()
    make_certs(tmp_path, days=2, everything=False)
    renewed = await serve(certs=tmp_path)
    for address, certs in ((server.address, Certs(str(tmp_path), "router")), (renewed.address, before)):
        client = GrpcDecodeClient(address, certs=certs)
        assert (await client.status(timeout_s=control_kit.WAIT_S)).role == "decode"
        await client.close()
    assert Certs(str(tmp_path), "decode").block_keys() == keys_before
    make_certs(tmp_path, days=2, everything=True)
    assert Certs(str(tmp_path), "decode").block_keys() != keys_before


async def test_reflection_is_off_unless_asked_for() -> None:
    server = await serve_control(listen="127.0.0.1:0", prefill=control_kit.as_prefill(PrefillService()))
    async with grpc.aio.insecure_channel(server.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(service=""), timeout=control_kit.WAIT_S)
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(stub.ServerReflectionInfo(iter(requests), timeout=control_kit.WAIT_S)))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await server.close(0.0)


# ---- blocks ----------------------------------------------------------------------------------------------


@pytest.fixture
def receiver(folder: Path) -> Iterator[tuple[wire_kit.RecordingSink, str]]:
    """Decode's end."""
    keys = Certs(str(folder), "decode").block_keys()
    sink = wire_kit.RecordingSink()
    server = BlockServer(ZmqListeningChannel("tcp://127.0.0.1:0", keys=keys), sink)
    yield sink, server.endpoint
    server.close()


def send(
    endpoint: str, certs: Certs | None, timeout_s: float, rows: tuple[int, ...] = (3, 5)
) -> Callable[[wire_kit.RecordingSink], None]:
    channel = ZmqConnectingChannel(certs.block_keys() if certs is not None else None)
    sender = BlockSender(channel, buffer_bytes=64 << 20, timeout_s=timeout_s)
    try:
        manifest = wire_kit.make_manifest(rows=rows)
        layers = wire_kit.make_layers(manifest)
        transfer = sender.open(wire_kit.make_ticket(manifest, endpoint), manifest, timeout_s=timeout_s)
        wire_kit.ship(transfer, layers)
        return lambda sink: wire_kit.assert_arrived(sink, manifest, layers)
    finally:
        sender.close()


def test_prefill_sends_blocks_to_decode(folder: Path, receiver: tuple[wire_kit.RecordingSink, str]) -> None:
    sink, endpoint = receiver
    send(endpoint, Certs(str(folder), "prefill"), wire_kit.WAIT_S)(sink)


def test_blocks_of_the_largest_size_pass(folder: Path, receiver: tuple[wire_kit.RecordingSink, str]) -> None:
    """A frame of them is longer when it is encrypted."""
    sink, endpoint = receiver
    rows = 3 * MAX_PAYLOAD_BYTES // (2 * 8 * 4)
    send(endpoint, Certs(str(folder), "prefill"), wire_kit.WAIT_S, (rows,))(sink)


@pytest.mark.parametrize("who", ["nobody", "stranger", "decode"])
def test_nobody_else_sends_a_block(
    folder: Path, strangers: Path, receiver: tuple[wire_kit.RecordingSink, str], who: str
) -> None:
    sink, endpoint = receiver
    certs = {
        "nobody": None,
        "stranger": Certs(str(strangers), "prefill"),
        "decode": Certs(str(folder), "decode"),
    }[who]
    with pytest.raises(TransferFailed):
        send(endpoint, certs, 1.5)
    assert sink.manifests == {}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def send_all(connection: socket.socket, messages: Iterable[bytes]) -> None:
    for message in messages:
        connection.sendall(message)


def test_an_endless_message_of_a_stranger_takes_no_memory(
    receiver: tuple[wire_kit.RecordingSink, str],
) -> None:
    _, endpoint = receiver
    host, port = endpoint.removeprefix("tcp://").split(":")
    before = resident_bytes()
    # A greeting of ZMTP 3.1 with the mechanism NULL, then frames that say that more will follow.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    frame = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
    with socket.create_connection((host, int(port)), timeout=wire_kit.WAIT_S) as connection:
        connection.sendall(greeting)
        # the receiver closes the connection
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_all(connection, (ready, *[frame] * 256))
    assert resident_bytes() - before < 64 << 20


# ---- options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize(
    "address",
    [
        {"listen": "0.0.0.0:9001"},
        {"listen": "10.0.0.7:9001"},
        {"block_listen": "tcp://[::]:9101"},
        {"block_listen": "tcp://*:9101"},
    ],
)
def test_a_worker_listens_beyond_loopback_only_with_certs(settings: Any, address: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="no certs"):
        settings(**address)
    settings(**address, insecure=True)
    settings(**address, certs="somewhere")
    settings(listen="localhost:1", block_listen="ipc:///tmp/x")
