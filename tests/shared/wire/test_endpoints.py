"""Tickets, endpoints and addresses that cannot be used are refused by name."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import kvtest.wire as kit
import pytest
from kvtest.wire import RecordingSink, Wire

from kvferry.shared.errors import ConfigurationError, TransferFailed
from kvferry.shared.process.serving import parse_address
from kvferry.shared.wire import zmq
from kvferry.shared.wire.channel import Channel, ListeningChannel
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel


def test_the_ticket_must_name_the_manifests_key(wire: Wire, sink: RecordingSink) -> None:
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
def test_an_unusable_endpoint_fails_the_transfer(wire: Wire, endpoint: str) -> None:
    manifest = kit.make_manifest()
    transfer = wire.sender().open(kit.make_ticket(manifest, endpoint), manifest, timeout_s=1.0)
    with pytest.raises(TransferFailed) as failed:
        transfer.wait(kit.WAIT_S)
    assert failed.value.reason in ("endpoint", "peer_lost")


def connecting(kind: str) -> Channel:
    return ZmqConnectingChannel(kit.block_keys("prefill") if kind == "curve" else None)


def listening(kind: str, bind: str, **options: Any) -> ListeningChannel:
    keys = kit.block_keys("decode") if kind == "curve" else None
    return ZmqListeningChannel(bind, keys=keys, **options)


KINDS = pytest.mark.parametrize("kind", ["plain", "curve"])


@KINDS
def test_an_endpoint_where_nobody_listens_is_a_timeout(kind: str) -> None:
    manifest = kit.make_manifest()
    sender = BlockSender(connecting(kind), buffer_bytes=1 << 20, timeout_s=0.5)
    try:
        ticket = kit.make_ticket(manifest, "tcp://127.0.0.1:1")
        transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
        transfer.send_layer(0, kit.make_layers(manifest)[0])
        with pytest.raises(TransferFailed) as failed:
            transfer.wait(kit.WAIT_S)
        assert failed.value.reason == "timeout"
        assert sender.buffer.used_bytes == 0
    finally:
        sender.close()


@KINDS
@pytest.mark.parametrize(
    "bind", ["", "udp://127.0.0.1:1", "tcp://nowhere.invalid:1", "ipc:///nowhere/at/all"]
)
def test_an_address_that_cannot_be_bound_is_a_configuration_error(kind: str, bind: str) -> None:
    with pytest.raises(ConfigurationError, match="block"):
        BlockServer(listening(kind, bind), RecordingSink())


@KINDS
def test_a_connection_that_says_nothing_is_closed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "HANDSHAKE_S", 0.5)
    server = BlockServer(listening(kind, "tcp://127.0.0.1:0"), RecordingSink())
    try:
        address = parse_address("endpoint", server.endpoint.removeprefix("tcp://"))
        with socket.create_connection(address, timeout=5.0) as silent:
            while silent.recv(1000):
                pass
    finally:
        server.close()


@KINDS
def test_binding_everywhere_needs_an_advertised_address(kind: str) -> None:
    with pytest.raises(ConfigurationError, match="advertised"):
        listening(kind, "tcp://0.0.0.0:0")
    channel = listening(kind, "tcp://0.0.0.0:0", advertise="tcp://decode:5000")
    server = BlockServer(channel, RecordingSink())
    assert server.endpoint == "tcp://decode:5000"
    server.close()
