"""Staging, encoding and sending leave the engine's thread: one layer behind, in order, with their errors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.services.prefill.host_copies import HandOver
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import TransferFailed
from kvferry.shared.history import rows_ahead
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.process.heartbeat import Heartbeat
from kvferry.shared.wire.outgoing import OutgoingTransfer

if TYPE_CHECKING:
    from kvtest.prefill import Harness

SESSION = SessionKey(owner="key", session_id="s")
WAIT_S = 60


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture
def handing(pool: ThreadPoolExecutor) -> HandOver:
    return HandOver(pool, Heartbeat(lambda: 0.0, "cpu"))


def put(handing: HandOver, *work: Callable[[], None]) -> None:
    handing.work += work
    handing.put()


def test_a_layer_runs_while_the_next_is_computed_and_no_later_one_begins(handing: HandOver) -> None:
    done: list[int] = []
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        entered.set()
        assert leave.wait(WAIT_S)
        done.append(0)

    put(handing, first)
    assert entered.wait(WAIT_S)
    assert done == []  # and the engine is here
    engine = threading.Thread(target=lambda: (put(handing, lambda: done.append(1)), handing.settle()))
    engine.start()
    engine.join(0.05)
    assert engine.is_alive()
    leave.set()
    engine.join(WAIT_S)
    assert done == [0, 1]


def test_an_error_comes_back_as_it_was_raised_and_nothing_after_it_runs(handing: HandOver) -> None:
    done: list[int] = []

    def fail() -> None:
        raise TransferFailed("the receiver is gone", reason="peer_lost")

    put(handing, lambda: done.append(0), fail, lambda: done.append(1))
    with pytest.raises(TransferFailed, match="is gone") as caught:
        put(handing, lambda: done.append(2))
    assert caught.value.reason == "peer_lost"
    handing.settle()
    assert done == [0]


def test_what_a_failed_pass_has_queued_does_not_run(pool: ThreadPoolExecutor, handing: HandOver) -> None:
    done: list[int] = []
    leave = threading.Event()
    pool.submit(leave.wait, WAIT_S)
    with contextlib.suppress(ValueError), handing:
        put(handing, lambda: done.append(0))
        raise ValueError("the pass fails")
    leave.set()
    pool.submit(lambda: None).result(WAIT_S)
    handing.settle()
    assert done == []


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The names of the threads that call a method from now on."""
    original: Callable[..., Any] = getattr(owner, name)
    threads: list[str] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, record)
    return threads


async def test_the_engines_thread_neither_sends_nor_stages_nor_joins_history(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(range(10, 90))
    num_layers = harness.model.spec.num_layers
    handed = [
        threads_of(monkeypatch, OutgoingTransfer, "send_layer"),
        threads_of(monkeypatch, StagedTurn, "append"),
    ]
    joined = threads_of(monkeypatch, rows_ahead, "chunk_rows")
    first = harness.request(prompt[:50], session=SESSION)
    await harness.run(first)
    await harness.commit(first)
    assert [len(thread_names) for thread_names in handed] == [num_layers] * 2
    token, _ = await harness.run(harness.request(prompt, session=SESSION))
    assert token.reused_tokens == 50
    for thread_names in handed:
        assert len(thread_names) == 2 * num_layers
        assert {name.rpartition("_")[0] for name in thread_names} == {"kvferry-prefill-hand-over"}
    assert len(joined) == num_layers
    assert {name.rpartition("_")[0] for name in joined} == {"kvferry-history-memory"}


async def test_the_next_layer_is_computed_while_one_waits_to_be_sent(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = OutgoingTransfer.send_layer
    computed = [threading.Event() for _ in range(harness.model.spec.num_layers)]
    sent: list[int] = []

    def send_after_the_next(transfer: OutgoingTransfer, layer: int, tensors: Any) -> None:
        if layer + 1 < len(computed):
            assert computed[layer + 1].wait(WAIT_S)
        if layer + 2 < len(computed):
            assert not computed[layer + 2].is_set()
        sent.append(layer)
        send(transfer, layer, tensors)

    monkeypatch.setattr(OutgoingTransfer, "send_layer", send_after_the_next)
    harness.model.on_layer = lambda layer, keys: computed[layer].set()
    await harness.run(harness.request(tuple(range(10, 60))))
    assert sent == list(range(len(computed)))
