"""Whole transfers over every channel: bytes arrive unchanged, within credit and buffer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kvtest.wire as kit
import pytest
import torch

from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire.frames import HEADER_BYTES
from kvferry.shared.wire.messages import EndRecord, Section
from kvferry.shared.wire.records import encode_end, encode_manifest


@pytest.mark.parametrize(
    "shape",
    [
        {"rows": (1,), "heads": 1, "dim": 1},
        {"rows": (1, 1, 1)},
        {"rows": (7, 13, 1), "heads": 3, "dim": 5, "dtype": "bfloat16"},
        {"rows": (0, 3, 0), "dtype": "float16"},
        {"rows": (0,)},
        {"rows": (9001, 17), "heads": 2, "dim": 128, "dtype": "float32"},
    ],
)
@pytest.mark.parametrize("with_index", [True, False])
def test_every_byte_arrives(wire: Any, sink: Any, shape: dict[str, Any], with_index: bool) -> None:
    manifest = kit.make_manifest(**shape)
    sections = kit.make_sections(manifest, with_index=with_index)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    assert kit.ship(transfer, manifest, sections) >= 0.0
    kit.assert_arrived(sink, manifest, sections)
    assert sender.buffered_bytes == 0
    assert sink.aborted == {}


def test_bytes_are_counted_by_kind(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest(rows=(3, 4), heads=2, dim=8)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    kit.ship(transfer, manifest, kit.make_sections(manifest))
    end = sink.committed[manifest.key]
    assert end.num_blocks == 6
    assert transfer.bytes_by_kind == {
        "rows": 7 * 2 * 8 * 4 * 2,
        "index": 7 * 2 * 4,
        "codes": 0,
        "scales": 0,
        "state": 0,
        "manifest": len(encode_manifest(manifest)) + len(encode_end(end)) + (6 + 2) * HEADER_BYTES,
    }


def test_a_strided_tensor_arrives_in_logical_order(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest(rows=(6,), heads=2, dim=4)
    keys = torch.randn(6, 2, 4).transpose(0, 1)
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    sections = [(0, Section.KEYS, keys), (0, Section.VALUES, torch.randn(2, 6, 4))]
    kit.ship(transfer, manifest, sections)
    got = torch.frombuffer(sink.sections[manifest.key, 0, Section.KEYS], dtype=torch.float32)
    assert torch.equal(got.view(2, 6, 4), keys)


def test_concurrent_transfers_do_not_mix(wire: Any, sink: Any) -> None:
    server, senders = wire.server(sink), [wire.sender(), wire.sender()]
    manifests = [kit.make_manifest(rows=(11 * n + 1, 5), heads=2, dim=16) for n in range(12)]

    def one(number: int) -> None:
        manifest = manifests[number]
        ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=700)
        transfer = senders[number % 2].open(ticket, manifest, timeout_s=kit.WAIT_S)
        kit.ship(transfer, manifest, kit.make_sections(manifest))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(len(manifests))))
    for manifest in manifests:
        kit.assert_arrived(sink, manifest, kit.make_sections(manifest))
    assert [sender.buffered_bytes for sender in senders] == [0, 0]


@pytest.mark.parametrize("credit_bytes", [1, 999, 1000])
def test_no_more_than_the_credit_is_in_flight(wire: Any, sink: Any, credit_bytes: int) -> None:
    manifest = kit.make_manifest(rows=(8,), heads=1, dim=32)
    sections = kit.make_sections(manifest)
    server, sender = wire.server(sink), wire.sender()
    sink.gate.clear()
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=credit_bytes)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    for layer, section, tensor in sections:
        transfer.send(layer=layer, section=section, tensor=tensor)
    assert kit.eventually(lambda: sum(transfer.bytes_by_kind[kind] for kind in ("rows", "index")) > 0)
    threading.Event().wait(0.1)
    sent = sum(transfer.bytes_by_kind[kind] for kind in ("rows", "index"))
    assert 0 < sent <= credit_bytes
    sink.gate.set()
    transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
    transfer.wait(kit.WAIT_S)
    assert {k: bytes(v) for k, v in sink.sections.items()} == {
        (manifest.key, layer, section): kit.to_bytes(tensor) for layer, section, tensor in sections
    }


def test_the_buffer_bound_holds_and_larger_transfers_pass(wire: Any, sink: Any) -> None:
    limit = 3000
    manifest = kit.make_manifest(rows=(40, 40), heads=2, dim=16)
    sections = kit.make_sections(manifest)
    server, sender = wire.server(sink), wire.sender(buffer_bytes=limit)
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=1000)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    seen = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(sender.buffered_bytes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        kit.ship(transfer, manifest, sections)
    finally:
        done.set()
        watcher.join()
    kit.assert_arrived(sink, manifest, sections)
    assert sum(tensor.numel() * tensor.element_size() for _, _, tensor in sections) > 3 * limit
    assert 0 < max(seen) <= limit
    assert sender.buffered_bytes == 0


def test_blocks_are_kept_until_the_acknowledgement(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest(rows=(10,))
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    total = 0
    for layer, section, tensor in kit.make_sections(manifest):
        transfer.send(layer=layer, section=section, tensor=tensor)
        total += tensor.numel() * tensor.element_size()
    assert kit.eventually(lambda: sink.blocks == 3)
    assert sender.buffered_bytes == total
    transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
    transfer.wait(kit.WAIT_S)
    assert sender.buffered_bytes == 0


def test_send_waits_for_room_and_gives_up_in_time(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest(rows=(40,), heads=2, dim=16)
    server, sender = wire.server(sink), wire.sender(buffer_bytes=1000)
    sink.gate.clear()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=0.2)
    with pytest.raises(TransferFailed, match="send buffer holds 320 of at most 1000") as failed:
        kit.ship(transfer, manifest, kit.make_sections(manifest))
    assert failed.value.reason == "buffer_full"
    assert sender.buffered_bytes == 0
    sink.gate.set()
    assert kit.eventually(lambda: sink.aborted == {manifest.key: "aborted"})


def test_slow_computation_between_sections_is_not_idleness(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest(rows=(3,))
    sections = kit.make_sections(manifest)
    server = wire.server(sink, idle_timeout_s=1.0)
    sender = wire.sender(keepalive_interval_s=0.2, timeout_s=1.0)
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    transfer.send(layer=0, section=sections[0][1], tensor=sections[0][2])
    threading.Event().wait(2.5)
    kit.ship(transfer, manifest, sections[1:])
    kit.assert_arrived(sink, manifest, sections)


@pytest.mark.parametrize(
    ("layer", "section", "tensor", "reason"),
    [
        (0, Section.VALUES, torch.zeros(2, 3, 8), "order"),
        (1, Section.KEYS, torch.zeros(2, 5, 8), "order"),
        (2, Section.KEYS, torch.zeros(2, 5, 8), "order"),
        (0, Section.KEYS, torch.zeros(2, 4, 8), "size"),
        (0, Section.KEYS, torch.zeros(2, 3, 8, dtype=torch.float64), "dtype"),
        (0, Section.INDEX, torch.zeros(2, 3, dtype=torch.int64), "dtype"),
    ],
)
def test_misuse_fails_the_transfer_at_the_sender(
    wire: Any, sink: Any, layer: int, section: Section, tensor: torch.Tensor, reason: str
) -> None:
    manifest = kit.make_manifest()
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    with pytest.raises(TransferFailed) as failed:
        transfer.send(layer=layer, section=section, tensor=tensor)
    assert failed.value.reason == reason
    with pytest.raises(TransferFailed):
        transfer.wait(kit.WAIT_S)


def test_finishing_early_is_refused(wire: Any, sink: Any) -> None:
    manifest = kit.make_manifest()
    server, sender = wire.server(sink), wire.sender()
    transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
    with pytest.raises(TransferFailed, match="layer 0 INDEX offset 0 is expected"):
        transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))


def test_one_connection_serves_many_transfers_in_turn(wire: Any, sink: Any) -> None:
    server, sender = wire.server(sink), wire.sender()
    for generation in range(5):
        manifest = kit.make_manifest(rows=(2,), generation=generation)
        transfer = sender.open(kit.make_ticket(manifest, server.endpoint), manifest, timeout_s=kit.WAIT_S)
        kit.ship(transfer, manifest, kit.make_sections(manifest))
    assert len(sink.committed) == 5
