"""A process that stands still as a whole is told from one whose engine alone does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from kvtest.clock import Clock

from kvferry.shared.process import heartbeat
from kvferry.shared.process.heartbeat import Heartbeat


@pytest.fixture
def idle() -> Iterator[threading.Thread]:
    """A thread that waits."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield thread
    end.set()
    thread.join()


def test_after_the_whole_process_stood_still_its_engine_gets_time_to_go_on(idle: threading.Thread) -> None:
    clock = Clock()
    beat = Heartbeat(clock, "cpu")
    assert not beat.is_wedged(idle)
    clock.turn(10 * heartbeat.STALL_S)  # nobody looked meanwhile: the process was stopped
    assert not beat.is_wedged(idle)
    beat.last_s = clock()
    clock.turn(heartbeat.FRESH_S)
    for _ in range(5):
        assert not beat.is_wedged(idle)
    clock.turn(heartbeat.STALL_S)
    assert beat.is_wedged(idle)


def test_only_a_thread_for_which_a_device_may_compute_gets_long(idle: threading.Thread) -> None:
    clock = Clock()
    beat = Heartbeat(clock, "cuda")
    beat.waits = False
    clock.turn(heartbeat.FRESH_S)
    for _ in range(5):
        assert not beat.is_wedged(idle)
    clock.turn(heartbeat.STALL_S)
    assert not beat.is_wedged(idle)
    beat.waits = True
    assert beat.is_wedged(idle)
