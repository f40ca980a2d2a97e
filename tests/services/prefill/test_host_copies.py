"""A layer is shipped and staged while the next one runs, where copies take time; what arrives is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from kvtest.prefill import make_prompt
from torch import Tensor

from kvferry.services.prefill.host_copies import Arrived, Elapsed, HostCopies
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import SessionKey

if TYPE_CHECKING:
    from kvtest.prefill import Harness

SESSION = SessionKey(owner="key", session_id="s")


class LateCopies(HostCopies):
    """Copies that have begun and have not arrived while the next layer runs, as on a GPU."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self._num_started = 0
        self._is_inside = False

    @contextmanager
    def scope(self) -> Iterator[None]:
        self._is_inside = True
        yield
        self._is_inside = False

    def start(self, tensors: Sequence[Tensor]) -> Arrived:
        assert self._is_inside, "on a GPU the layer would be computed on another stream than is copied from"
        copies, number = tuple(tensor.clone() for tensor in tensors), self._num_started
        self._num_started += 1
        self.log.append(f"start {number}")

        def wait() -> tuple[Tensor, ...]:
            self.log.append(f"wait {number}")
            return copies

        return wait

    def time(self, clock: Callable[[], float]) -> Callable[[], Elapsed]:
        """On a GPU, to ask for a time is to wait for the device."""
        end, number = super().time(clock), self._num_started

        def logged_end() -> Elapsed:
            elapsed_s = end()

            def asked() -> float:
                self.log.append(f"time {number}")
                return elapsed_s()

            return asked

        return logged_end


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    """Before the harness: its engine copies late, and says so here."""
    entries: list[str] = []
    monkeypatch.setattr("kvferry.services.prefill.engine.host_copies", lambda device: LateCopies(entries))
    return entries


async def test_layers_leave_one_behind_and_in_order(log: list[str], harness: Harness) -> None:
    num_layers = harness.model.spec.num_layers
    await harness.run(harness.request(make_prompt(30)))
    starts, waits = ([entry for entry in log if entry.startswith(kind)] for kind in ("start", "wait"))
    assert starts == [f"start {layer}" for layer in range(num_layers)]
    assert waits == [f"wait {layer}" for layer in range(num_layers)]
    # one layer is handed over while the next is computed, and no time is asked for before the end
    for layer in range(2, num_layers):
        assert log.index(f"wait {layer - 2}") < log.index(f"start {layer}")
    assert log[-num_layers:] == [f"time {layer}" for layer in range(num_layers)]


async def test_a_history_lost_in_mid_prompt_leaves_nothing_behind(log: list[str], harness: Harness) -> None:
    prompt = make_prompt(90)
    first = harness.request(prompt[:50], session=SESSION)
    await harness.run(first)
    await harness.commit(first)
    layers: list[int] = []

    def drop_at_layer_two(layer: int, keys: Tensor) -> None:
        layers.append(layer)
        if len(layers) == 3:
            harness.store.drop(SESSION)

    harness.model.on_layer = drop_at_layer_two
    plan = plan_for("full")
    second = harness.request(prompt, session=SESSION, plan=plan)
    token, _ = await harness.run(second)
    harness.model.on_layer = None
    assert layers[:4] == [0, 1, 2, 0]
    fresh = harness.request(prompt, plan=plan)
    fresh_token, _ = await harness.run(fresh)
    assert token.token == fresh_token.token
    harness.assert_same_rows(second, fresh)


async def test_what_is_staged_late_is_the_next_turns_history(log: list[str], harness: Harness) -> None:
    prompt = make_prompt(60)
    first = harness.request(prompt[:40], session=SESSION)
    await harness.run(first)
    await harness.commit(first)
    second, fresh = harness.request(prompt, session=SESSION), harness.request(prompt)
    token, _ = await harness.run(second)
    fresh_token, _ = await harness.run(fresh)
    assert (token.reused_tokens, fresh_token.reused_tokens) == (40, 0)
    assert token.token == fresh_token.token
    harness.assert_same_rows(second, fresh)
