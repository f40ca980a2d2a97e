"""Decode steps on the CPU as on a GPU: kernels in Triton's interpreter, and a device that captures."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from kvferry.kernels import dispatch
from kvferry.services.decode import engine
from kvferry.shared.device.step_device import StepDevice


@pytest.fixture
def interpreter(monkeypatch):
    from triton.runtime import interpreter

    run, one_thread = interpreter.GridExecutor.__call__, threading.Lock()

    def unwatched(self, *args, **kwargs):
        with one_thread, _disable_current_modes():
            return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unwatched)
    dispatch.configure("triton", torch.device("cpu"))
    yield
    dispatch.configure("auto", torch.device("cpu"))


class ReplayingDevice(StepDevice):
    """Captures as a GPU does, in that the step's function is what is run again; its results arrive late."""

    captures = True

    def capture(self, run):
        run()
        return run

    def fetch(self, tensors):
        copies, _ = super().fetch(tensors)
        polls = iter([False, False, True])
        return copies, lambda: next(polls, True)


class CountingDevice(ReplayingDevice):
    """Counts captures."""

    def __init__(self):
        self.num_captures = 0

    def capture(self, run):
        self.num_captures += 1
        return super().capture(run)


@pytest.fixture
def runs_ahead(interpreter, monkeypatch):
    monkeypatch.setattr(engine, "step_device", lambda device: ReplayingDevice())
