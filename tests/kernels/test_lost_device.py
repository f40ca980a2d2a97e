"""Asking whether the device is lost: not beside a capture, and not after memory that ran out. torch.cuda is a
stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvferry.kernels import quarantine
from kvferry.kernels.quarantine import attempt, capturing, is_lost

ILLEGAL_ADDRESS = RuntimeError("CUDA error: an illegal memory access was encountered")
SHORT_S, TIMEOUT_S = 0.2, 60.0


class Device:
    """A CUDA device. Attributes: error: of every call, None while it works; asked: whether a capture could
    have begun beside each wait for it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked: list[bool] = []
        self.was_asked = threading.Event()

    def synchronize(self) -> None:
        self.asked.append(not capturing.locked())
        self.was_asked.set()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def guard() -> None:
    """Instead of the folder's: no kernel runs."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    yield device
    assert not capturing.locked(), "the next capture would wait"


def test_a_device_that_works_is_not_lost_whatever_failed(device: Device) -> None:
    assert not is_lost(ILLEGAL_ADDRESS)
    assert not is_lost()
    assert len(device.asked) == 2


def test_a_device_whose_every_call_fails_is_lost(device: Device) -> None:
    device.error = ILLEGAL_ADDRESS
    assert is_lost(ILLEGAL_ADDRESS)
    assert is_lost()


def test_no_capture_begins_while_the_device_is_asked(device: Device) -> None:
    for device.error in (None, ILLEGAL_ADDRESS):
        is_lost()
    assert device.asked == [False, False]


@pytest.mark.parametrize("error", [None, ILLEGAL_ADDRESS])
def test_it_is_asked_after_another_thread_s_capture_not_beside_it(
    error: Exception | None, device: Device
) -> None:
    """A wait for the whole device breaks the capture, and fails, as if the device were lost."""
    device.error = error
    with ThreadPoolExecutor(1) as threads:
        with capturing:
            answer = threads.submit(is_lost, ILLEGAL_ADDRESS)
            assert not device.was_asked.wait(SHORT_S), "it was asked while a graph was captured"
            assert not answer.done()
        assert answer.result(TIMEOUT_S) is (error is not None)
    assert len(device.asked) == 1


def test_a_capture_that_does_not_end_is_not_waited_for_forever(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "_CAPTURE_S", 0.01)
    device.error = ILLEGAL_ADDRESS
    with capturing:
        assert is_lost()
        assert capturing.locked(), "it is the other thread's to release"


def test_memory_that_ran_out_is_no_loss_and_asks_nothing(device: Device) -> None:
    """A prompt that is too long must not end the process."""
    device.error = ILLEGAL_ADDRESS
    assert not is_lost(torch.OutOfMemoryError("CUDA out of memory"))
    assert device.asked == []


@pytest.mark.parametrize(
    ("error", "launch_raises"), [(None, False), (ILLEGAL_ADDRESS, True)], ids=["works", "lost"]
)
def test_a_kernel_that_fails_is_quarantined_unless_the_device_is_lost_with_it(
    error: Exception | None, launch_raises: bool, device: Device
) -> None:
    device.error = error

    def launch() -> str:
        raise ILLEGAL_ADDRESS

    run: Callable[[], str] = lambda: attempt("hsa", launch, lambda: "torch's")  # noqa: E731
    if launch_raises:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            run()
        assert not quarantine.quarantined()
    else:
        assert run() == "torch's"
        assert quarantine.is_quarantined("hsa")
    quarantine.state.by_op = {}
