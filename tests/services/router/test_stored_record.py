"""Records as a head and parts: each turn writes what it adds, and what is read is the record."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.services.router.sessions import store
from kvferry.services.router.sessions.record import SessionRecord, StoredResponse
from kvferry.services.router.sessions.store import sized
from kvferry.services.router.sessions.stored_record import (
    FORMAT_VERSION,
    WrittenRecord,
    decode_summary,
    read_record,
    write_parts,
    write_whole,
)
from kvferry.shared.errors import InvalidRequest, StoreUnavailable
from kvferry.shared.model.chat_template import ChatMessage

EMPTY = SessionRecord(kind="chat", model_fingerprint="f", token_ids=())
RECORD = replace(
    EMPTY,
    token_ids=(1, 2, 300_000),
    messages=(ChatMessage("user", "grüße"), ChatMessage("assistant", "\x00 yes", '{"tool_calls": []}')),
    assistant_ends=(3,),
    responses=(StoredResponse(id="r", num_messages=2, body="{}"),),
    preamble="a document",
    template_inputs="[]",
    turns=1,
    last_plan={"method": "full", "prefill_ms": 0.5},
    prefill_addresses=("a:1",),
)


class Stored:
    """What Redis has of one record."""

    def __init__(self) -> None:
        self.head = b""
        self.parts: list[bytes] = []
        self.record: SessionRecord | None = None

    def write(self, written: WrittenRecord) -> int:
        """Returns how many bytes were written."""
        assert written.num_kept <= len(self.parts)
        if written.after:
            assert self.record is not None
            assert self.record.parts[-1].id == written.after
        self.head, self.record = written.head, written.record
        self.parts = [*self.parts[: written.num_kept], *written.parts]
        return len(written.head) + sum(map(len, written.parts))

    def read(self) -> SessionRecord:
        return read_record(self.head, self.parts)


def after_turns(number: int) -> SessionRecord:
    """A conversation of so many turns of 40 tokens and 60 characters."""
    return replace(
        RECORD,
        token_ids=tuple(range(1000, 1000 + 40 * number)),
        messages=tuple(
            ChatMessage(role, f"{turn:30d}") for turn in range(number) for role in ("user", "assistant")
        ),
        assistant_ends=tuple(40 * (turn + 1) for turn in range(number)),
        responses=tuple(
            StoredResponse(id=f"r{turn:04d}", num_messages=2 * turn + 2, body="{}") for turn in range(number)
        ),
        preamble="x" * 10_000,
        turns=number,
    )


def test_a_record_is_read_as_it_was_written_in_either_form() -> None:
    for written in (write_whole(RECORD), write_parts(RECORD, None)):
        assert read_record(written.head, written.parts) == RECORD
    one, other = write_parts(RECORD, None), write_whole(EMPTY)
    assert read_record(other.head, one.parts) == EMPTY  # parts that a router of an earlier release left
    nothing = write_parts(EMPTY, None)
    assert (nothing.parts, nothing.last, read_record(nothing.head, ())) == ((), "", EMPTY)


def test_a_turn_writes_as_many_bytes_after_a_hundred_others_as_after_one() -> None:
    stored, sizes = Stored(), []
    for number in range(1, 101):
        sizes.append(stored.write(write_parts(after_turns(number), stored.record)))
        assert stored.read() == after_turns(number)
    assert sizes[0] > 10_000
    assert max(sizes[1:]) < 1.1 * min(sizes[1:]) < 1000
    assert len(stored.parts) == 100


def test_answers_whose_tokens_the_template_shows_otherwise_later_are_written_twice_and_no_more() -> None:
    stored, sizes, known = Stored(), [], ()
    for number in range(1, 41):
        known += tuple(range(1000 * number, 1000 * number + 20))
        thoughts = tuple(range(30))
        record = replace(after_turns(number), token_ids=(*known, *thoughts), assistant_ends=(0,) * number)
        sizes.append(stored.write(write_parts(record, stored.record)))
        assert stored.read() == record
    assert max(sizes[2:]) < 1.1 * min(sizes[2:]) < 1200


def test_another_answer_takes_the_former_ones_place() -> None:
    stored = Stored()
    for number in range(1, 51):
        stored.write(write_parts(after_turns(number), stored.record))
    longest = after_turns(50)
    for attempt in range(30):
        answer = ChatMessage("assistant", f"secret {attempt:02d} of this answer")
        other = replace(
            longest,
            token_ids=(*longest.token_ids[:-20], *range(attempt, attempt + 20)),
            messages=(*longest.messages[:-1], answer),
        )
        assert stored.write(write_parts(other, stored.record)) < 1500
        assert stored.read() == other
        assert sum(data.count(b"secret") for data in stored.parts) == 1
    assert len(stored.parts) < 55
    branch = replace(longest, messages=(*longest.messages[:20], ChatMessage("user", "another way")))
    stored.write(write_parts(branch, stored.record))
    assert stored.read() == branch
    assert len(stored.parts) < 15


_MESSAGE = st.builds(ChatMessage, st.sampled_from("ua"), st.text("ab", max_size=2))
_PIECES = {
    "token_ids": st.lists(st.integers(0, 3), max_size=5).map(tuple),
    "messages": st.lists(_MESSAGE, max_size=3),
    "assistant_ends": st.lists(st.integers(0, 2), max_size=2),
    "responses": st.lists(
        st.builds(StoredResponse, id=st.text("ab", max_size=1), num_messages=st.just(1), body=st.just("{}")),
        max_size=2,
    ),
    "text": st.text("aé", max_size=4),
    "preamble": st.text("ab", max_size=2),
}


@given(st.data())
def test_any_turns_leave_the_record_of_the_last_one_and_nothing_else(data: st.DataObject) -> None:
    stored, record = Stored(), EMPTY
    for _ in range(data.draw(st.integers(1, 8))):
        values = {}
        for name, pieces in _PIECES.items():
            before = getattr(record, name)
            kept = before[: data.draw(st.integers(0, len(before)) | st.just(len(before)))]
            added = data.draw(pieces)
            values[name] = kept + (added if isinstance(kept, str) else tuple(added))
        record = replace(record, turns=record.turns + 1, parts=(), **values)
        before = stored.record if data.draw(st.booleans()) else None
        stored.write(write_parts(record, before))
        read = stored.read()
        assert read == record
        assert stored.record is not None
        assert read.parts == stored.record.parts
        stored.record = data.draw(st.sampled_from([read, stored.record]))


def test_what_is_not_a_head_and_its_parts_is_refused() -> None:
    stored = Stored()
    for number in (1, 2, 3):
        stored.write(write_parts(after_turns(number), stored.record))
    head, parts = stored.head, stored.parts
    older = write_parts(after_turns(2), None)
    for wrong_head, wrong_parts in (
        (head, parts[:-1]),
        (head, parts[1:]),
        (head, []),
        (head, [parts[1], parts[0], parts[2]]),
        (head, [*parts, parts[2]]),
        (head, [*parts[:2], parts[2][:-1]]),
        (head, [*parts[:2], b""]),
        (head, [older.parts[0], *parts[1:]]),
        (older.head, parts),
        (b"", parts),
        (head[:-1], parts),
    ):
        with pytest.raises(StoreUnavailable) as refused:
            read_record(wrong_head, wrong_parts)
        assert refused.value.reason == "format"
    other = head.replace(b"\xa7version" + bytes([FORMAT_VERSION]), b"\xa7version\x7e")
    assert other != head
    with pytest.raises(StoreUnavailable, match="format is 126, not 1 or 2"):
        read_record(other, parts)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["ttl_s", "created_at_s", "expires_at_s", "last_plan", "compression"])
def test_numbers_that_are_not_finite_are_neither_written_nor_read(name: str, number: float) -> None:
    marked, damaged = (
        replace(RECORD, **{name: {"a": [value]} if name in ("last_plan", "compression") else value})
        for value in (123.25, number)
    )
    for write in (lambda: write_whole(damaged), lambda: write_parts(damaged, None)):
        with pytest.raises(ValueError, match=f"{name} is or has"):
            write()
    whole, parts = write_whole(marked), write_parts(marked, None)
    bytes_of = [msgspec.msgpack.encode(value) for value in (123.25, number)]
    for read in (
        lambda: read_record(whole.head.replace(*bytes_of), ()),
        lambda: read_record(parts.head.replace(*bytes_of), parts.parts),
        lambda: decode_summary(msgspec.msgpack.encode(damaged.summary)),
    ):
        with pytest.raises(StoreUnavailable, match=f"{name} is or has") as refused:
            read()
        assert refused.value.reason == "format"


def test_a_record_of_an_earlier_release_is_read() -> None:
    plain = replace(RECORD, messages=(ChatMessage("user", "grüße"),))
    pairs = replace(RECORD, messages=(("user", "grüße"),))  # type: ignore[arg-type]
    assert read_record(write_whole(pairs).head, ()) == plain


def test_a_record_that_is_too_long_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_RECORD_BYTES", 20_000)
    assert 10_000 < sized(after_turns(1)).size_bytes < 20_000
    with pytest.raises(
        InvalidRequest, match=r"with 2\d{4} bytes; one conversation or document may have 20000"
    ):
        sized(replace(after_turns(1), text="y" * 11_000))
