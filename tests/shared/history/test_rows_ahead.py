"""Reused rows are made ready one layer ahead of the pass, on other threads, whichever tier they come from."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from kvtest.history import LAYERS, Worker, rows

from kvferry.shared.control.messages import SessionKey
from kvferry.shared.history.rows import LayerKV

A = SessionKey(owner="key", session_id="a")
PROMPT = (1, 2, 3, 4, 5, 6)
WAIT_S = 60


@pytest.mark.parametrize("tier", ["memory", "disk", "both"])
def test_the_next_layer_is_prepared_while_this_one_is_computed(tier: str, tmp_path: Path) -> None:
    worker = Worker(folder=tmp_path / "history")
    worker.turn(A, PROMPT[:4])
    if tier == "disk":
        worker.evict(A)
    if tier == "both":
        other = Worker(folder=tmp_path / "history")
        other.turn(A, PROMPT[:5])
        other.store.close()
    turn = worker.begin(A, PROMPT)
    reused = 5 if tier == "both" else 4
    by_tier = {"memory": (4, 0), "disk": (0, 4), "both": (4, 1)}[tier]
    assert turn.reused_tokens == reused
    assert (turn.reused_by_tier["memory"], turn.reused_by_tier.get("disk", 0)) == by_tier
    prepared = [threading.Event() for _ in range(LAYERS)]
    threads: set[str] = set()

    def prepare(loaded: LayerKV) -> torch.Tensor:
        layer = int(loaded[0].view(-1)[0] // 1e6)
        threads.add(threading.current_thread().name.rpartition("_")[0])
        prepared[layer].set()
        return loaded[0] * 2

    for layer in range(LAYERS):
        keys = turn.load_prepared(layer, prepare)
        assert keys is not None
        assert torch.equal(keys, 2 * rows(layer, PROMPT[:reused], 0))
        # without a further call: it was begun with this one
        assert all(event.wait(WAIT_S) for event in prepared[: layer + 2])
        assert not any(event.is_set() for event in prepared[layer + 2 :])
    assert threads == {"kvferry-history-memory" if tier == "memory" else "kvferry-history-disk"}
    turn.abort()
    worker.store.close()


def test_what_was_read_ahead_is_not_staged_when_the_turn_starts_again(tmp_path: Path) -> None:
    worker = Worker(folder=tmp_path / "history")
    worker.turn(A, PROMPT[:4])
    worker.evict(A)
    turn = worker.begin(A, PROMPT)
    assert turn.load(0) is not None
    turn.restart()
    assert turn.reused_tokens == 0
    assert worker.store.size_bytes == 0
    for layer in range(LAYERS):
        assert turn.load(layer) is None
        turn.append(layer, rows(layer, PROMPT, 0), -rows(layer, PROMPT, 0))
    assert turn.commit(PROMPT).num_tokens == len(PROMPT)
    for layer in range(LAYERS):
        loaded = worker.begin(A, (*PROMPT, 7)).load(layer)
        assert loaded is not None
        assert torch.equal(loaded[0], rows(layer, PROMPT, 0))
    worker.store.close()
