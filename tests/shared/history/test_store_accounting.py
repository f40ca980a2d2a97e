"""Byte accounting under any order of events, and under threads: what is freed is freed to the byte."""

from __future__ import annotations

import threading

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import HistoryMiss, SessionBusy, SessionNotFound
from kvferry.shared.history.store import HistoryStore
from kvferry.shared.history.turn import StagedTurn

LAYERS = 2
TOKEN_BYTES = LAYERS * 2 * 4
"""One KV head, D of 1, float32, K and V."""
MAX_TOKENS = 40

tokens = st.lists(st.integers(1, 3), min_size=1, max_size=8).map(tuple)


def rows(token_ids: tuple[int, ...], start: int) -> torch.Tensor:
    return (torch.tensor(token_ids) * 100.0 + torch.arange(start, start + len(token_ids)))[None, :, None]


class PlainTurn:
    """What the machine knows of one turn."""

    def __init__(self, turn: StagedTurn, session: SessionKey, prompt: tuple[int, ...]) -> None:
        self.turn = turn
        self.session = session
        self.prompt = prompt
        self.token_ids = prompt[: turn.reused_tokens]
        self.dropped = False


class StoreMachine(RuleBasedStateMachine):
    """Random turns on three sessions. A record's content is checked on every load; sizes after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.store = HistoryStore(
            max_bytes=MAX_TOKENS * TOKEN_BYTES, num_layers=LAYERS, turn_lease_s=10, clock=lambda: self.now_s
        )
        self.sessions = [SessionKey(owner="o", session_id=str(i)) for i in range(3)]
        self.turns: dict[str, PlainTurn] = {}
        self.count = 0

    @rule(index=st.integers(0, 2), fresh=tokens, keep=st.integers(0, 30))
    def begin(self, index: int, fresh: tuple[int, ...], keep: int) -> None:
        session = self.sessions[index]
        record = self.store.record(session)
        prompt = (record.token_ids[:keep] if record is not None else ()) + fresh
        self.count += 1
        turn = self.store.begin(session, f"r{self.count}", prompt)
        reused = prompt[: turn.reused_tokens]
        assert turn.reused_tokens < len(prompt)
        if record is not None:
            assert reused == record.token_ids[: len(reused)]
            assert len(reused) >= min(keep, len(record.token_ids), len(prompt) - 1)
        for layer in range(LAYERS):
            loaded = turn.load(layer)
            assert (loaded is None) == (not reused)
            if loaded is not None:
                assert torch.equal(loaded[0], rows(reused, 0) + layer)
                assert torch.equal(loaded[1], -(rows(reused, 0) + layer))
        self.turns[f"r{self.count}"] = PlainTurn(turn, session, prompt)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), generated=tokens)
    def append(self, data: st.DataObject, generated: tuple[int, ...]) -> None:
        plain = self.turns[data.draw(st.sampled_from(sorted(self.turns)))]
        done = len(plain.token_ids)
        more = plain.prompt[done:] if done < len(plain.prompt) else generated
        for layer in range(LAYERS):
            kv = rows(more, done) + layer
            plain.turn.append(layer, kv, -kv)
        plain.token_ids += more

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), cut=st.integers(0, 3), beyond=st.integers(0, 2))
    def commit(self, data: st.DataObject, cut: int, beyond: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.turns)))
        plain = self.turns.pop(request_id)
        token_ids = plain.token_ids[: max(0, len(plain.token_ids) - cut)]
        if len(token_ids) >= len(plain.prompt):
            token_ids += (3,) * beyond if cut == 0 else ()
        try:
            info = plain.turn.commit(token_ids)
        except SessionNotFound:
            assert plain.dropped
            return
        except SessionBusy:
            return
        assert not plain.dropped
        assert info.num_tokens <= len(token_ids)
        record = self.store.record(plain.session)
        assert (record.token_ids if record else ()) == token_ids[: info.num_tokens]
        assert self.store.turn(request_id) is None

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        plain = self.turns.pop(data.draw(st.sampled_from(sorted(self.turns))))
        plain.turn.abort()
        plain.turn.abort()

    @rule(index=st.integers(0, 2))
    def drop(self, index: int) -> None:
        session = self.sessions[index]
        self.store.drop(session)
        assert self.store.record(session) is None
        for plain in self.turns.values():
            plain.dropped |= plain.session == session

    @rule(seconds=st.integers(1, 9))
    def sweep(self, seconds: int) -> None:
        self.now_s += seconds
        self.store.sweep()
        self.turns = {name: plain for name, plain in self.turns.items() if self.store.turn(name) is not None}

    @invariant()
    def size_is_within_the_bound(self) -> None:
        assert 0 <= self.store.size_bytes <= MAX_TOKENS * TOKEN_BYTES

    @invariant()
    def idle_store_holds_exactly_its_sessions(self) -> None:
        if not self.turns:
            held = sum(self.store.info(session).size_bytes for session in self.sessions)
            assert self.store.size_bytes == held

    def teardown(self) -> None:
        for plain in self.turns.values():
            plain.turn.abort()
        for session in self.sessions:
            self.store.drop(session)
        assert self.store.size_bytes == 0


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=30)


def test_threads_on_shared_sessions_leave_whole_records_and_no_stray_byte() -> None:
    store = HistoryStore(max_bytes=200 * TOKEN_BYTES, num_layers=LAYERS, turn_lease_s=60, clock=lambda: 0.0)
    sessions = [SessionKey(owner="o", session_id=str(i)) for i in range(3)]
    errors: list[BaseException] = []
    outcomes = {"committed": 0, "refused": 0}
    lock = threading.Lock()

    def work(worker: int) -> None:
        generator = torch.Generator().manual_seed(worker)
        try:
            for step in range(60):
                session = sessions[int(torch.randint(3, (1,), generator=generator))]
                record = store.record(session)
                prompt = (*(record.token_ids if record else ())[:30], worker + 1, step + 1)
                turn = store.begin(session, f"w{worker}-{step}", prompt)
                try:
                    for layer in range(LAYERS):
                        loaded = turn.load(layer)
                        reused = prompt[: turn.reused_tokens]
                        assert loaded is None or torch.equal(loaded[0], rows(reused, 0) + layer)
                        kv = rows(prompt[turn.reused_tokens :], turn.reused_tokens) + layer
                        turn.append(layer, kv, -kv)
                    turn.commit(prompt)
                    outcome = "committed"
                except (SessionBusy, SessionNotFound, HistoryMiss):
                    turn.abort()
                    outcome = "refused"
                with lock:
                    outcomes[outcome] += 1
                if step % 17 == 0:
                    store.drop(session)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
    assert outcomes["committed"] + outcomes["refused"] == 240
    assert outcomes["committed"] > 0
    assert store.size_bytes == sum(store.info(session).size_bytes for session in sessions)
    for session in sessions:
        store.drop(session)
    assert store.size_bytes == 0
