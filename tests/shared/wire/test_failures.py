"""Refused, lost and abandoned transfers: each side names the reason and keeps nothing."""

from __future__ import annotations

import threading

import kvtest.wire as kit
import pytest
from kvtest.waiting import until
from kvtest.wire import RecordingSink, Wire

from kvferry.shared.errors import (
    Cancelled,
    CapacityExceeded,
    LeaseExpired,
    ProtocolMismatch,
    TransferFailed,
)
from kvferry.shared.wire.messages import EndRecord, Manifest
from kvferry.shared.wire.outgoing import OutgoingTransfer
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender

# ---- what a receiver refuses -----------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (ProtocolMismatch("other model", reason="fingerprint"), ProtocolMismatch, "fingerprint"),
        (LeaseExpired("too late", reason="lease"), LeaseExpired, "lease"),
        (TransferFailed("no", reason="no"), TransferFailed, "no"),
        (CapacityExceeded("arena is full", reason="arena"), TransferFailed, "arena"),
        (ZeroDivisionError("bug"), TransferFailed, "internal"),
    ],
)
@pytest.mark.parametrize("when", ["open", "layer", "write", "commit"])
def test_a_sinks_error_reaches_the_sender_as_it_is(
    wire: Wire,
    sink: RecordingSink,
    error: Exception,
    kind: type[TransferFailed],
    reason: str,
    when: str,
) -> None:
    manifest = kit.make_manifest()
    setattr(sink, f"{when}_error", error)
    server, sender, transfer = wire.begin(sink, manifest)
    with pytest.raises(kind) as failed:
        kit.ship(transfer, kit.make_layers(manifest))
    assert type(failed.value) is kind
    assert failed.value.reason == reason
    assert sender.buffer.used_bytes == 0
    assert sink.aborted == ({} if when == "open" else {manifest.key: reason})
    sink.open_error = sink.layer_error = sink.write_error = sink.commit_error = None
    again = kit.make_manifest()
    transfer = kit.open_transfer(sender, server, again)
    kit.ship(transfer, kit.make_layers(again))


# ---- giving up -------------------------------------------------------------------------------------------


def half_sent(
    wire: Wire, sink: RecordingSink, manifest: Manifest
) -> tuple[BlockServer, BlockSender, OutgoingTransfer]:
    """A transfer whose first layer has arrived, and both ends."""
    server, sender, transfer = wire.begin(sink, manifest)
    transfer.send_layer(0, kit.make_layers(manifest)[0])
    until(lambda: sink.blocks == 3)
    return server, sender, transfer


def test_abort_frees_both_ends_and_raises_in_waiting_calls(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    _, sender, transfer = half_sent(wire, sink, manifest)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            transfer.wait(kit.WAIT_S)
        except Cancelled as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    transfer.abort("client_left")
    transfer.abort("client_left")
    waiter.join(kit.WAIT_S)
    assert [type(error) for error in raised] == [Cancelled]
    assert sender.buffer.used_bytes == 0
    until(lambda: sink.aborted == {manifest.key: "aborted"})
    for call in (
        lambda: transfer.send_layer(1, kit.make_layers(manifest)[1]),
        lambda: transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0)),
        lambda: transfer.wait(1.0),
    ):
        with pytest.raises(Cancelled):
            call()


def test_abort_wakes_a_send_that_waits_for_room(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest(rows=(100,))
    _, sender, transfer = wire.begin(sink, manifest, buffer_bytes=1000)
    sink.gate.clear()

    def abort_when_full() -> None:
        until(lambda: sender.buffer.used_bytes == 1000)
        transfer.abort("client_left")

    aborting = threading.Thread(target=abort_when_full)
    aborting.start()
    with pytest.raises(Cancelled):
        kit.ship(transfer, kit.make_layers(manifest))
    aborting.join()
    assert sender.buffer.used_bytes == 0


def test_abort_after_the_acknowledgement_has_no_effect(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    _, _, transfer = wire.begin(sink, manifest)
    took_s = kit.ship(transfer, kit.make_layers(manifest))
    transfer.abort("late")
    assert transfer.wait(0.0) == took_s
    assert sink.aborted == {}


def test_closing_the_receiver_fails_its_senders(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    server, sender, transfer = half_sent(wire, sink, manifest)
    server.close()
    server.close()
    assert sink.aborted == {manifest.key: "closed"}
    with pytest.raises(TransferFailed) as failed:
        transfer.wait(kit.WAIT_S)
    assert failed.value.reason in ("closed", "peer_lost")
    assert sender.buffer.used_bytes == 0


def test_closing_the_sender_fails_its_transfers_and_frees_the_receiver(
    wire: Wire, sink: RecordingSink
) -> None:
    manifest = kit.make_manifest()
    server, sender, transfer = half_sent(wire, sink, manifest)
    sender.close()
    sender.close()
    with pytest.raises(TransferFailed) as failed:
        transfer.wait(kit.WAIT_S)
    assert failed.value.reason == "closed"
    assert sender.buffer.used_bytes == 0
    until(lambda: manifest.key in sink.aborted)
    with pytest.raises(TransferFailed, match="closed"):
        kit.open_transfer(sender, server, manifest)


def test_a_receiver_that_stops_answering_is_a_timeout(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    _, sender, transfer = wire.begin(sink, manifest, timeout_s=0.5)
    sink.gate.clear()
    with pytest.raises(TransferFailed, match=r"silent for more than 0\.5 s") as failed:
        kit.ship(transfer, kit.make_layers(manifest))
    assert failed.value.reason == "timeout"
    assert sender.buffer.used_bytes == 0


def test_waiting_in_vain_fails_the_transfer(wire: Wire, sink: RecordingSink) -> None:
    manifest = kit.make_manifest()
    _, _, transfer = wire.begin(sink, manifest)
    until(lambda: manifest.key in sink.manifests)
    with pytest.raises(TransferFailed, match=r"not acknowledged within 0\.1 s"):
        transfer.wait(0.1)
    until(lambda: sink.aborted == {manifest.key: "aborted"})


def test_a_failed_transfer_leaves_others_alone(wire: Wire, sink: RecordingSink) -> None:
    server, sender = wire.server(sink), wire.sender()
    doomed, fine = kit.make_manifest(), kit.make_manifest()
    first = kit.open_transfer(sender, server, doomed)
    second = kit.open_transfer(sender, server, fine)
    first.abort("test")
    kit.ship(second, kit.make_layers(fine))
    kit.assert_arrived(sink, fine, kit.make_layers(fine))
