"""A transfer that reaches a rank before the rank is told of it: the leading rank says whether to wait."""

import dataclasses
import threading

import pytest
import torch
from kvtest.decode import SPEC, make_request, manifest_for, resolve

from kvferry.services.decode import receiver as receiver_module
from kvferry.services.decode.receiver import Expected, PartReceiver, SequencePart
from kvferry.shared.cache.arena import sequence_layout
from kvferry.shared.compression.formats import make_formats
from kvferry.shared.control.messages import Ticket
from kvferry.shared.errors import LeaseExpired
from kvferry.shared.wire.messages import LayerHeader, TransferKey

KEY = TransferKey(transfer_id=2**64 - 1, generation=9)
"""The number of rank 1's part begins at 0 again."""
PART = dataclasses.replace(SPEC, num_heads=2, num_kv_heads=1)


class Lead:
    """What a rank asks and notes. Args: awaits: the answers, of which the last one stays."""

    def __init__(self, *awaits):
        self.awaits = list(awaits)
        self.asked, self.notes = [], []
        self.is_asked = threading.Event()

    def ask(self, key, *, timeout_s):
        self.asked.append(key)
        self.is_asked.set()
        answer = self.awaits.pop(0) if len(self.awaits) > 1 else self.awaits[0]
        if answer is None:
            raise TimeoutError
        return answer

    def receiver(self):
        return PartReceiver(
            PART,
            first_head=1,
            device=torch.device("cpu"),
            note=lambda *note: self.notes.append(note),
            ask=self.ask,
        )


def manifest(key=KEY):
    ticket = Ticket(
        endpoint="",
        transfer_id=(key.transfer_id + 1) % 2**64,
        generation=key.generation,
        credit_bytes=1,
        lease_s=1.0,
        reserved_bytes=0,
    )
    return manifest_for(PART, make_request(), ticket)


def expected(key=KEY):
    resolved = resolve(SPEC, make_request())
    layout = sequence_layout(make_formats(PART, resolved))
    return SequencePart(
        key=key,
        layout=layout,
        buffer=torch.empty(layout.size_bytes, dtype=torch.uint8),
        expected=Expected(resolved=resolved, room=resolved.max_new_tokens, returns_generated=False),
    )


def test_a_transfer_that_the_rank_knows_needs_no_question():
    lead = Lead(False)
    receiver = lead.receiver()
    receiver.expect(expected())
    opened = manifest()
    receiver.open(opened)
    assert (lead.asked, lead.notes) == ([], [("began", KEY, opened)])


def test_a_transfer_that_is_awaited_waits_until_the_rank_is_told(monkeypatch):
    monkeypatch.setattr(receiver_module, "_ASK_INTERVAL_S", 0.01)
    lead, part = Lead(True), expected()
    receiver = lead.receiver()

    def tell():
        assert lead.is_asked.wait(20)
        receiver.expect(expected(TransferKey(transfer_id=5, generation=10)))  # a newer one is no sign
        lead.is_asked.clear()
        assert lead.is_asked.wait(20), "it goes on waiting"
        receiver.expect(part)

    thread = threading.Thread(target=tell)
    thread.start()
    opened = manifest()
    receiver.open(opened)
    thread.join()
    assert part.has_begun
    assert lead.asked == [KEY] * len(lead.asked)
    assert lead.notes == [("began", KEY, opened)]


@pytest.mark.parametrize("answers", [(False,), (True, False), (None,)], ids=["never", "ended", "no answer"])
def test_a_transfer_that_is_not_awaited_is_refused_at_once_and_noted(answers, monkeypatch):
    monkeypatch.setattr(receiver_module, "_EXPECT_TIMEOUT_S", 1000.0)
    lead = Lead(*answers)
    with pytest.raises(LeaseExpired, match="no reservation for transfer 0x0, generation 9 exists"):
        lead.receiver().open(manifest())
    assert len(lead.asked) == len(answers)
    ((name, key, error),) = lead.notes
    assert (name, key, error.reason) == ("failed", KEY, "unknown_transfer")


def test_an_ended_part_is_neither_opened_nor_written():
    lead, part = Lead(False), expected()
    receiver = lead.receiver()
    receiver.expect(part)
    opened = manifest()
    receiver.open(opened)
    receiver.forget(part)
    with pytest.raises(LeaseExpired, match="has ended"):
        receiver.begin_layer(opened.key, LayerHeader(layer=0, tensors=()))
    with pytest.raises(LeaseExpired, match="no reservation"):
        receiver.open(opened)
    assert [note[0] for note in lead.notes] == ["began", "late_block", "failed"]


def test_a_reservation_takes_one_transfer_and_the_second_ends_nothing():
    lead, part = Lead(False), expected()
    receiver = lead.receiver()
    receiver.expect(part)
    receiver.open(manifest())
    with pytest.raises(LeaseExpired, match="takes one transfer"):
        receiver.open(manifest())
    assert [note[0] for note in lead.notes] == ["began", "refused"]


def test_an_ended_part_waits_for_the_block_that_is_being_written():
    lead, part = Lead(False), expected()
    receiver = lead.receiver()
    receiver.expect(part)
    receiver.open(manifest())
    with part.lock:
        thread = threading.Thread(target=receiver.forget, args=(part,))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        assert not part.is_over
    thread.join(20)
    assert part.is_over
