"""On a device blocks go through two halves of pinned memory, each read before it is overwritten.

There is no device here: copies to it are done late, when somebody waits for them, as it may happen there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvferry.shared.cache.arena import ArenaCopier

SIZE = 32


class LateDevice:
    """A stream that does nothing until it is waited for. Attributes: num_done: copies that it has done."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.num_done = 0

    def run_until(self, count: int) -> None:
        while self.num_done < count:
            self.queue[self.num_done]()
            self.num_done += 1

    def event(self) -> Any:
        return LateEvent(self)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._count = 0

    def record(self, stream: Any) -> None:
        assert stream is self._device
        self._count = len(self._device.queue)

    def synchronize(self) -> None:
        self._device.run_until(self._count)


class ArenaBytes:
    """Stands for a range of the arena."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def __init__(self, device: LateDevice, bytes_: Tensor) -> None:
        self._device, self._bytes = device, bytes_

    def numel(self) -> int:
        return self._bytes.numel()

    def copy_(self, source: Tensor, *, non_blocking: bool = False) -> None:
        self._device.queue.append(lambda: self._bytes.copy_(source))
        if not non_blocking:
            self._device.run_until(len(self._device.queue))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device, empty = LateDevice(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: device if of.index == 1 else None)
    return device


def test_late_copies_take_the_bytes_of_their_own_payloads(late: LateDevice) -> None:
    copier = ArenaCopier(SIZE, torch.device("cuda"))
    payloads = [np.random.default_rng(i).integers(0, 256, SIZE - i, np.uint8) for i in range(7)]
    arena = [torch.zeros(len(data), dtype=torch.uint8) for data in payloads]
    for payload, target in zip(payloads, arena, strict=True):
        memory = bytearray(payload)
        copier.load(memoryview(memory))
        memory[:] = bytes(len(memory))  # the transport uses its memory again
        for first in range(0, len(payload), 5):
            copier.copy(ArenaBytes(late, target[first : first + 5]), first)  # type: ignore[arg-type]
    late.run_until(len(late.queue))
    assert [bytes(tensor.numpy()) for tensor in arena] == [data.tobytes() for data in payloads]


def test_a_payload_is_loaded_while_the_one_before_is_copied(late: LateDevice) -> None:
    copier, target = ArenaCopier(SIZE, torch.device("cuda")), torch.zeros(8, dtype=torch.uint8)
    done = []
    for _ in range(5):
        copier.load(memoryview(bytes(8)))
        done.append(late.num_done)
        copier.copy(ArenaBytes(late, target), 0)  # type: ignore[arg-type]
    assert done == [0, 0, 1, 2, 3], "each waits for the last but one"


def test_bytes_for_host_memory_are_there_at_once(late: LateDevice) -> None:
    copier, target = ArenaCopier(SIZE, torch.device("cuda")), torch.zeros(4, dtype=torch.uint8)
    copier.load(memoryview(bytes(range(8))))
    copier.copy(target, 3)
    assert target.tolist() == [3, 4, 5, 6]


def test_on_a_cpu_a_block_is_there_when_copy_returns() -> None:
    copier, target = ArenaCopier(SIZE, torch.device("cpu")), torch.zeros(4, dtype=torch.uint8)
    copier.load(memoryview(bytes(range(8))))
    copier.copy(target, 3)
    assert target.tolist() == [3, 4, 5, 6]
