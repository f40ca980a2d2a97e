"""Whole transfers over every channel: bytes arrive unchanged, within credit and buffer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import kvtest.wire as kit
import pytest
import torch
from kvtest.compression import packed_tensors
from kvtest.waiting import until
from kvtest.wire import RecordingSink, Wire

from kvferry.kernels.packed.layer import PackedLayer
from kvferry.kernels.packed.packing import pack_layer
from kvferry.shared.compression.formats.rdkv import Rdkv
from kvferry.shared.errors import TransferFailed
from kvferry.shared.wire import outgoing as outgoing_module
from kvferry.shared.wire import receiver as receiver_module
from kvferry.shared.wire import sender as sender_module
from kvferry.shared.wire.frames import HEADER_BYTES, encode_end, encode_layer, encode_manifest
from kvferry.shared.wire.messages import EndRecord, NamedTensor
from kvferry.shared.wire.outgoing import OutgoingTransfer
from kvferry.shared.wire.sender import SendBuffer


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
def test_every_byte_arrives(wire: Wire, sink: RecordingSink, shape: dict[str, Any], with_index: bool) -> None:
    manifest = kit.make_manifest(**shape)
    layers = kit.make_layers(manifest, with_index=with_index)
    _, sender, transfer = wire.begin(sink, manifest)
    assert kit.ship(transfer, layers) >= 0.0
    kit.assert_arrived(sink, manifest, layers)
    assert sender.buffer.used_bytes == 0
    assert sink.aborted == {}


@pytest.mark.parametrize(("credit_bytes", "num_blocks"), [(1 << 20, 0), (320, 2), (100, 9)])
def test_bytes_are_counted_by_kind(
    wire: Wire, sink: RecordingSink, credit_bytes: int, num_blocks: int
) -> None:
    """Layers of 408 and 544 bytes, in messages as large as the credit."""
    manifest = kit.make_manifest(rows=(3, 4), heads=2, dim=8)
    server, sender = wire.server(sink), wire.sender()
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=credit_bytes)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.ship(transfer, kit.make_layers(manifest))
    kit.assert_arrived(sink, manifest, kit.make_layers(manifest))
    end = sink.committed[manifest.key]
    assert end.num_blocks == num_blocks
    assert transfer.bytes_by_kind == {
        "rows": 7 * 2 * 8 * 4 * 2,
        "index": 7 * 2 * 4,
        "codes": 0,
        "scales": 0,
        "state": 0,
        "manifest": len(encode_manifest(manifest))
        + sum(len(encode_layer(layer)) for layer in sink.layers[manifest.key])
        + len(encode_end(end))
        + (1 + 2 + num_blocks + 1) * HEADER_BYTES,
    }


def test_each_tensor_counts_under_the_kind_that_its_sender_gives(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest(rows=(1,))
    kinds = ("codes", "scales", "rows", "index", "state", "index")
    tensors = [
        NamedTensor(name=f"t{n}", tensor=torch.zeros(10**n, dtype=torch.uint8), kind=kind)
        for n, kind in enumerate(kinds)
    ]
    _, _, transfer = wire.begin(sink, manifest)
    kit.ship(transfer, [tensors])
    kit.assert_arrived(sink, manifest, [tensors])
    counted = transfer.bytes_by_kind
    assert counted.pop("manifest") > 0
    assert counted == {"codes": 1, "scales": 10, "rows": 100, "index": 101_000, "state": 10_000}


def packed_layer(seed: int, *, widths: tuple[int, ...]) -> PackedLayer:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.tensor(widths, dtype=torch.uint8)
    keys, values = torch.randn(2, 2, 23, 6, generator=generator)
    draw = [bits[torch.randint(0, len(widths), (2, size), generator=generator)] for size in (6, 23)]
    return pack_layer(keys, values, *draw)


@pytest.mark.parametrize("credit_bytes", [37, 1 << 20])
def test_packed_layers_arrive_whole_and_are_counted_by_kind(
    wire: Wire, sink: RecordingSink, credit_bytes: int
) -> None:
    """Between them a layer of rows, and one in which a packed tensor has no bytes."""
    packed = [packed_layer(1, widths=(0, 2, 4, 8, 16)), packed_layer(2, widths=(4,))]
    manifest = kit.make_manifest(rows=(3, 3, 3), heads=2, dim=6)
    layers = kit.make_layers(manifest, with_index=False)
    for number, layer in zip((0, 2), packed, strict=True):
        named = packed_tensors(layer).items()
        layers[number] = [
            NamedTensor(name=name, tensor=tensor, kind=Rdkv.kinds[name]) for name, tensor in named
        ]
    server, sender = wire.server(sink), wire.sender()
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=credit_bytes)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.ship(transfer, layers)
    kit.assert_arrived(sink, manifest, layers)
    sent = transfer.bytes_by_kind
    sizes = {kind: sum(layer.layout.kinds[kind][1] for layer in packed) for kind in packed[0].layout.kinds}
    assert packed[1].layout.kinds["rows"][1] == 0
    assert (sent["codes"], sent["scales"]) == (sizes["codes"], sizes["scales"])
    assert sent["rows"] == sizes["rows"] + 2 * 2 * 3 * 6 * 4
    assert sent["index"] == sizes["index"]
    layout_bytes = 2 * (1 + 8 * 2) * 4  # counted with the manifest and the headers
    assert sent["manifest"] > layout_bytes
    payload_bytes = sum(entry.tensor.nbytes for layer in layers for entry in layer)
    assert sum(sent.values()) - sent["manifest"] == payload_bytes - layout_bytes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "int16", "uint8"])
def test_tensors_of_any_dtype_and_shape_arrive_under_their_names(
    wire: Wire, sink: RecordingSink, dtype: str
) -> None:
    manifest = kit.make_manifest(rows=(0, 0, 0))
    shapes: list[list[tuple[int, ...]]] = [
        [],
        [(), (0,), (3, 0, 2)],
        [(2, 0), (5,), (2, 1, 3, 2), (0,), (7, 1)],
    ]
    layers = [
        [
            NamedTensor(
                name=f"tensor_{n}", tensor=torch.full(shape, 1 + n).to(getattr(torch, dtype)), kind="rows"
            )
            for n, shape in enumerate(layer_shapes)
        ]
        for layer_shapes in shapes
    ]
    server, sender = wire.server(sink), wire.sender()
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=7)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.ship(transfer, layers)
    kit.assert_arrived(sink, manifest, layers)


def test_a_strided_tensor_arrives_in_logical_order(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest(rows=(6,), heads=2, dim=4)
    keys = torch.randn(6, 2, 4).transpose(0, 1)
    _, _, transfer = wire.begin(sink, manifest)
    layers = [
        [
            NamedTensor(name="keys", tensor=keys, kind="rows"),
            NamedTensor(name="values", tensor=torch.randn(2, 6, 4), kind="rows"),
        ]
    ]
    kit.ship(transfer, layers)
    got = torch.frombuffer(sink.tensors[manifest.key, 0, "keys"], dtype=torch.float32)
    assert torch.equal(got.view(2, 6, 4), keys)


def test_concurrent_transfers_do_not_mix(wire: Wire, sink: RecordingSink) -> None:
    server, senders = wire.server(sink), [wire.sender(), wire.sender()]
    manifests = [kit.make_manifest(rows=(11 * n + 1, 5), heads=2, dim=16) for n in range(12)]

    def one(number: int) -> None:
        manifest = manifests[number]
        ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=700)
        transfer = senders[number % 2].open(ticket, manifest, timeout_s=kit.WAIT_S)
        kit.ship(transfer, kit.make_layers(manifest))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(len(manifests))))
    for manifest in manifests:
        kit.assert_arrived(sink, manifest, kit.make_layers(manifest))
    assert [sender.buffer.used_bytes for sender in senders] == [0, 0]


@pytest.mark.parametrize("credit_bytes", [1, 999, 1000])
def test_no_more_than_the_credit_is_in_flight(wire: Wire, sink: RecordingSink, credit_bytes: int) -> None:
    manifest = kit.make_manifest(rows=(8,), heads=1, dim=32)
    layers = kit.make_layers(manifest)
    server, sender = wire.server(sink), wire.sender()
    sink.gate.clear()
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=credit_bytes)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.send(transfer, layers)
    until(lambda: sum(transfer.bytes_by_kind[kind] for kind in ("rows", "index")) > 0)
    threading.Event().wait(0.1)
    sent = sum(transfer.bytes_by_kind[kind] for kind in ("rows", "index"))
    assert 0 < sent <= credit_bytes
    sink.gate.set()
    transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
    transfer.wait(kit.WAIT_S)
    kit.assert_arrived(sink, manifest, layers)


def test_the_buffer_bound_holds_and_larger_transfers_pass(
    wire: Wire, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Watched(SendBuffer):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "used_bytes":
                seen.append(value)

    monkeypatch.setattr("kvferry.shared.wire.sender.SendBuffer", Watched)
    limit = 3000
    manifest = kit.make_manifest(rows=(40, 40), heads=2, dim=16)
    layers = kit.make_layers(manifest)
    server, sender = wire.server(sink), wire.sender(buffer_bytes=limit)
    ticket = kit.make_ticket(manifest, server.endpoint, credit_bytes=1000)
    transfer = sender.open(ticket, manifest, timeout_s=kit.WAIT_S)
    kit.ship(transfer, layers)
    kit.assert_arrived(sink, manifest, layers)
    assert sink.committed[manifest.key].payload_bytes > 3 * limit
    assert 0 < max(seen) <= limit
    assert sender.buffer.used_bytes == 0


def test_blocks_are_kept_until_the_acknowledgement(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest(rows=(10,))
    _, sender, transfer = wire.begin(sink, manifest)
    layers = kit.make_layers(manifest)
    kit.send(transfer, layers)
    total = sum(named.tensor.nbytes for named in layers[0])
    until(lambda: sink.blocks == 3)
    assert sender.buffer.used_bytes == total
    transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
    transfer.wait(kit.WAIT_S)
    assert sender.buffer.used_bytes == 0


def test_send_waits_for_room_and_gives_up_in_time(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest(rows=(40,), heads=2, dim=16)
    server, sender = wire.server(sink), wire.sender(buffer_bytes=1000)
    sink.gate.clear()
    transfer = kit.open_transfer(sender, server, manifest)
    until(lambda: manifest.key in sink.manifests)
    transfer._timeout_s = 0.2
    with pytest.raises(TransferFailed, match="send buffer holds 1000 of at most 1000") as failed:
        kit.ship(transfer, kit.make_layers(manifest))
    assert failed.value.reason == "buffer_full"
    assert sender.buffer.used_bytes == 0
    sink.gate.set()
    until(lambda: manifest.key in sink.aborted)
    assert sink.aborted == {manifest.key: "aborted"}


def test_slow_computation_between_layers_is_not_idleness(
    wire: Wire, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr(receiver_module, "time", clock)
    monkeypatch.setattr(receiver_module, "IDLE_TIMEOUT_S", kit.WAIT_S)
    monkeypatch.setattr(outgoing_module, "time", clock)
    monkeypatch.setattr(sender_module, "time", clock)
    monkeypatch.setattr(sender_module, "KEEPALIVE_INTERVAL_S", 0.05)
    manifest = kit.make_manifest(rows=(3,))
    layers = kit.make_layers(manifest)
    server = wire.server(sink)
    sender = wire.sender(timeout_s=kit.WAIT_S)
    transfer = kit.open_transfer(sender, server, manifest)
    transfer.send_layer(0, layers[0])
    until(lambda: sink.blocks == 3 and transfer._written_bytes == transfer._sent_bytes)
    incoming = server._transfers[manifest.key]
    for _ in range(3):
        ahead_s += 0.75 * kit.WAIT_S
        turned_s = clock.monotonic()
        until(lambda turned_s=turned_s: incoming.heard_at_s > turned_s)
    kit.ship(transfer, layers[1:], first=1)
    kit.assert_arrived(sink, manifest, layers)


@pytest.mark.parametrize(
    ("layer", "name", "kind", "dtype", "reason"),
    [
        (1, "keys", "rows", torch.float32, "order"),
        (2, "keys", "rows", torch.float32, "order"),
        (-1, "keys", "rows", torch.float32, "order"),
        (0, "keys", "rows", torch.float64, "dtype"),
        (0, "index", "index", torch.int64, "dtype"),
        (0, "keys", "layouts", torch.float32, "kind"),
        (0, "Keys", "rows", torch.float32, "malformed"),
    ],
)
def test_misuse_fails_the_transfer_at_the_sender(
    wire: Wire, sink: RecordingSink, layer: int, name: str, kind: str, dtype: torch.dtype, reason: str
) -> None:
    manifest = kit.make_manifest()
    _, _, transfer = wire.begin(sink, manifest)
    with pytest.raises(TransferFailed) as failed:
        transfer.send_layer(layer, [NamedTensor(name=name, tensor=torch.zeros(2, 3, dtype=dtype), kind=kind)])
    assert failed.value.reason == reason
    with pytest.raises(TransferFailed):
        transfer.wait(kit.WAIT_S)


def test_a_layer_is_sent_once(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    layers = kit.make_layers(manifest)
    _, _, transfer = wire.begin(sink, manifest)
    transfer.send_layer(0, layers[0])
    with pytest.raises(TransferFailed, match="the header of layer 1") as failed:
        transfer.send_layer(0, layers[0])
    assert failed.value.reason == "order"


def test_finishing_early_is_refused(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    _, _, transfer = wire.begin(sink, manifest)
    with pytest.raises(TransferFailed, match="the header of layer 0 is expected"):
        transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))


def test_one_connection_serves_many_transfers_in_turn(wire: Wire, sink: RecordingSink) -> None:
    server, sender = wire.server(sink), wire.sender()
    for generation in range(5):
        manifest = kit.make_manifest(rows=(2,), generation=generation)
        transfer = kit.open_transfer(sender, server, manifest)
        kit.ship(transfer, kit.make_layers(manifest))
    assert len(sink.committed) == 5


def test_the_thread_is_woken_when_a_message_is_queued() -> None:
    """It looks at the queue without the lock: woken before, it would find nothing and sleep for a tick."""
    manifest = kit.make_manifest(rows=(3, 4))
    queued: list[int] = []
    buffer = SendBuffer(1 << 20, 1 << 20, lambda: queued.append(len(transfer.queue)))
    ticket = kit.make_ticket(manifest, "tcp://127.0.0.1:1")
    transfer = OutgoingTransfer(ticket=ticket, manifest=manifest, buffer=buffer, timeout_s=kit.WAIT_S)
    for layer, tensors in enumerate(kit.make_layers(manifest)):
        transfer.queue.clear()  # the thread has sent what there was
        transfer.send_layer(layer, tensors)
    assert queued == [1, 1]
