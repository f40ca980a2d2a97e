"""A sequence joins behind its own last write, and waits for nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from kvtest.decode import PromptCache, SmallModel

from kvferry.services.decode import engine, memory, sequence
from kvferry.services.decode.config import GROWTH_TOKENS
from kvferry.shared.control.messages import SharedStart
from kvferry.shared.device.cuda_device import CudaDevice
from kvferry.shared.device.step_device import StepDevice, written_so_far


class Following(StepDevice):
    """Attributes: followed: what it has been told to wait for."""

    def __init__(self) -> None:
        self.followed: list[Any] = []

    def follow(self, written: Any = None) -> None:
        self.followed.append(written)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Following:
    """Marks are (who wrote, the mark's number)."""
    device, numbers = Following(), itertools.count()
    monkeypatch.setattr(engine, "step_device", lambda _: device)
    for writer in (memory, sequence):
        name = writer.__name__.rpartition(".")[2]
        monkeypatch.setattr(writer, "written_so_far", lambda _, name=name: (name, next(numbers)))
    return device


async def test_a_sequence_joins_behind_its_blocks_and_again_behind_a_move(
    device: Following, harness: Any, request_of: Any
) -> None:
    made = await harness()
    assert len(await made.tokens(request_of(max_tokens=8))) == 8
    assert device.followed == [("sequence", 0)]
    max_tokens = GROWTH_TOKENS + 20
    assert len(await made.tokens(request_of(max_tokens=max_tokens, ignore_eos=True))) == max_tokens
    (_, blocks), *moves = device.followed[1:]
    assert device.followed[1:] == [("sequence", blocks), *(("memory", number) for _, number in moves)]
    assert moves, "its answer outgrew its room"
    assert moves == sorted(moves)


async def test_a_sibling_joins_behind_the_copy_of_its_prompt(
    device: Following, harness: Any, request_of: Any, ticket_of: Any
) -> None:
    made = await harness()
    first = dataclasses.replace(request_of(max_tokens=4), num_siblings=1)
    stream, ticket = await ticket_of(made.service, first)
    async with contextlib.aclosing(stream):
        await asyncio.to_thread(made.shipper.ship, first, ticket)
        await anext(stream)
        token = PromptCache(SmallModel(), first).first_token
        start = SharedStart(request_id=first.request_id, first_token=token)
        sibling = dataclasses.replace(first, request_id="sibling", num_siblings=0, shares=start)
        events = [event async for event in made.service.generate(sibling, timeout_s=30)]
    assert events
    assert {who for who, _ in device.followed} == {"sequence"}
    assert len(set(device.followed)) == 2, "the first joins behind its blocks, its sibling behind the copy"


class Waiting:
    """Stands for the steps' stream. Attributes: waited: for events and streams."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    wait_event = wait_stream = lambda self, what: self.waited.append(what)


def cuda_device(stream: Any = None) -> CudaDevice:
    """One without a GPU."""
    device = object.__new__(CudaDevice)
    device._stream, device._device = stream, torch.device("cuda")
    return device


def test_the_steps_stream_waits_for_a_mark_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default stream")
    stream = Waiting()
    device = cuda_device(stream)
    device.follow("a mark")  # type: ignore[arg-type]
    assert stream.waited == ["a mark"]
    device.follow()
    assert stream.waited == ["a mark", "the default stream"]


def test_a_mark_is_behind_the_work_of_the_thread_s_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self, stream: Any) -> None:
            self.stream = stream

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current on {device}")
    mark = written_so_far(torch.device("cuda", 1))
    assert mark is not None
    assert mark.stream == "current on cuda:1"
    assert written_so_far(torch.device("cpu")) is None


@pytest.mark.parametrize(("name", "runs"), [("capture", 1), ("capture_warm", 0)])
def test_a_step_is_run_before_its_capture_unless_it_has_been(
    monkeypatch: pytest.MonkeyPatch, name: str, runs: int
) -> None:
    class Graph:
        def replay(self) -> None:
            """Nothing is captured."""

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(CudaDevice, "_capture", lambda self, graph, run: captured.append(run))
    captured: list[Any] = []
    called: list[int] = []

    def run() -> None:
        called.append(1)

    getattr(cuda_device(), name)(run)
    assert captured == [run]
    assert len(called) == runs
