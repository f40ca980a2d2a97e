"""A prompt whose error is the device's loss ends the worker; one that memory is too small for does not."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch
from kvtest.prefill import make_prompt
from kvtest.waiting import eventually

from kvferry.kernels import quarantine
from kvferry.services.prefill import engine
from kvferry.shared.errors import KvferryError, WorkerUnavailable

if TYPE_CHECKING:
    from kvtest.prefill import Harness

ILLEGAL_ADDRESS = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def lost(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What the worker was told, on a device on which every wait fails, as beside a capture."""

    class Cuda:
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def is_current_stream_capturing() -> bool:
            return False

        @staticmethod
        def synchronize() -> None:
            raise ILLEGAL_ADDRESS

    class Torch:
        cuda, OutOfMemoryError = Cuda, torch.OutOfMemoryError

    told: list[Exception] = []
    monkeypatch.setattr(quarantine, "torch", Torch)
    # a traceback with the variables of every frame takes seconds to draw
    monkeypatch.setattr(engine, "log", Mock())
    monkeypatch.setattr(harness.service._engine, "_on_device_lost", told.append)
    return told


def break_with(harness: Harness, error: Exception) -> None:
    def fail(layer: int, keys: torch.Tensor) -> None:
        raise error

    harness.model.on_layer = fail


async def test_a_prompt_that_is_too_long_for_the_memory_ends_no_worker(
    harness: Harness, lost: list[Exception]
) -> None:
    break_with(harness, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(KvferryError, match="failed in prefill"):
        await harness.run(harness.request(make_prompt(20)))
    harness.model.on_layer = None
    await harness.run(harness.request(make_prompt(20)))
    assert lost == []


async def test_a_prompt_on_a_lost_device_can_be_replayed_and_the_worker_is_told(
    harness: Harness, lost: list[Exception]
) -> None:
    break_with(harness, ILLEGAL_ADDRESS)
    with pytest.raises(WorkerUnavailable, match="the device is lost") as raised:
        await harness.run(harness.request(make_prompt(20)))
    assert raised.value.retryable
    await eventually(lambda: lost == [ILLEGAL_ADDRESS])
