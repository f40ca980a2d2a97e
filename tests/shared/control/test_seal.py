"""A control message that is not the one that was sent, at its place in its call, is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import kvtest.control as kit
import pytest

from kvferry.shared.control import client as client_module
from kvferry.shared.control import server as server_module
from kvferry.shared.control.client import GrpcDecodeClient
from kvferry.shared.control.codec import DECODE
from kvferry.shared.control.messages import TicketIssued
from kvferry.shared.control.seal import SEALED_KEY, Seal
from kvferry.shared.control.server import ControlServer
from kvferry.shared.errors import WorkerUnavailable

MESSAGES = (b"", b"a", b"bcd" * 100)


def test_messages_in_order_pass() -> None:
    sender, receiver = Seal("/m", "call"), Seal("/m", "call")
    assert [receiver.open(sender.close(message)) for message in MESSAGES] == list(MESSAGES)


def test_every_changed_bit_is_seen() -> None:
    sealed = Seal("/m", "call").close(b"message")
    for bit in range(8 * len(sealed)):
        spoilt = bytearray(sealed)
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WorkerUnavailable, match="damaged"):
            Seal("/m", "call").open(bytes(spoilt))


@pytest.mark.parametrize(
    ("what", "received"),
    [
        ("repeated", lambda sealed: [sealed[0], sealed[0]]),
        ("left out", lambda sealed: [sealed[0], sealed[2]]),
        ("moved", lambda sealed: [sealed[1], sealed[0]]),
        ("cut", lambda sealed: [sealed[0][:5]]),
        ("of another call", lambda sealed: [Seal("/m", "other").close(b"a")]),
        ("of another method", lambda sealed: [Seal("/n", "call").close(b"a")]),
    ],
)
def test_a_message_at_another_place_is_seen(
    what: str, received: Callable[[list[bytes]], list[bytes]]
) -> None:
    sender, receiver = Seal("/m", "call"), Seal("/m", "call")
    *before, wrong = received([sender.close(b"a") for _ in range(3)])
    num_right = {"repeated": 1, "left out": 1}.get(what, 0)
    for sealed in before[:num_right]:
        receiver.open(sealed)
    with pytest.raises(WorkerUnavailable, match="damaged"):
        receiver.open(before[0] if before[num_right:] else wrong)


@pytest.mark.parametrize(
    ("what", "path", "metadata"),
    [
        ("bytes", "", ((SEALED_KEY, "id"),)),
        ("method", "Finish", ((SEALED_KEY, "id"),)),
        ("call", "Generate", ((SEALED_KEY, "other"),)),
        ("metadata", "Generate", (("kvferry-sealee", "id"),)),
    ],
)
async def test_a_request_that_is_not_what_was_sent_is_refused_and_blames_nobody(
    server: ControlServer, what: str, path: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    method = DECODE.methods["Generate"]
    sealed = Seal(method.path, "id").close(method.request.encode(kit.generate_request()))
    sent = sealed.replace(b"request-1", b"request-2") if what == "bytes" else sealed
    assert (sent != sealed) == (what == "bytes")
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = channel.unary_stream(DECODE.methods[path or "Generate"].path)(sent, metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "damaged" in (raised.value.details() or "")


async def test_a_silent_stream_ends_by_name_and_a_waiting_one_does_not(
    decode: Any, decode_client: GrpcDecodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "IDLE_LIMIT_S", 1.0)
    monkeypatch.setattr(server_module, "KEEPALIVE_S", 0.2)
    decode.gap_s = 2.0
    events = await kit.collect(decode_client.generate(kit.generate_request(), timeout_s=kit.WAIT_S))
    assert isinstance(events[0], TicketIssued)
    monkeypatch.setattr(server_module, "KEEPALIVE_S", 60.0)
    with pytest.raises(WorkerUnavailable, match="was silent in a stream") as raised:
        async with asyncio.timeout(kit.WAIT_S):
            await kit.collect(decode_client.generate(kit.generate_request(), timeout_s=kit.WAIT_S))
    assert raised.value.reason == "silent"
