"""In which order `kvferry serve` starts its services; stand-ins for processes listen when they are told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvferry.services.launcher import processes
from kvferry.services.launcher.config import ServeConfig
from kvferry.services.launcher.processes import ProcessStack


class Services:
    """Stand-ins for processes.

    Attributes: started: roles in their order; listen: an event for each; timeouts_s: that they were given.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.timeouts_s: list[float] = []
        self.listen = {role: asyncio.Event() for role in ("prefill", "decode", "router")}

    def make(self, role: str, **_: Any) -> Service:
        return Service(role, self)

    async def until_idle(self) -> None:
        """Give every task that can go on its turns."""
        for _ in range(20):
            await asyncio.sleep(0)


class Service:
    """As `ServiceProcess`."""

    pid = 1

    def __init__(self, role: str, services: Services) -> None:
        self.role, self._services = role, services
        self.addresses = {"address": f"{role}:1", "metrics": f"{role}:2"}

    async def start(self, timeout_s: float) -> dict[str, str]:
        self._services.started.append(self.role)
        self._services.timeouts_s.append(timeout_s)
        await self._services.listen[self.role].wait()
        return self.addresses

    def pin(self, **settings: str) -> None:
        pass

    async def supervise(self, on_restart: Callable[[], None]) -> None:
        await asyncio.Event().wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        pass


@asynccontextmanager
async def starting(
    monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, calibrates: bool = False
) -> AsyncIterator[Services]:
    """A stack that is starting, on a machine with or without a GPU."""
    services = Services()
    monkeypatch.setattr(processes, "ServiceProcess", services.make)
    monkeypatch.setattr(processes, "may_use_gpu", lambda device: has_gpu)
    stack = ProcessStack(ServeConfig(calibrate=calibrates, start_timeout_s=9.0))
    task = asyncio.create_task(stack.start())
    try:
        await services.until_idle()
        yield services
        async with asyncio.timeout(60):
            await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await stack.close()


async def test_beside_a_gpu_decode_starts_once_prefill_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arena is a part of the memory that prefill's weights leave."""
    async with starting(monkeypatch, has_gpu=True) as services:
        assert services.started == ["prefill"]
        services.listen["prefill"].set()
        await services.until_idle()
        assert services.started == ["prefill", "decode"]
        services.listen["decode"].set()
        await services.until_idle()
        assert services.started == ["prefill", "decode", "router"]
        services.listen["router"].set()


async def test_without_a_gpu_both_workers_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with starting(monkeypatch, has_gpu=False) as services:
        assert sorted(services.started) == ["decode", "prefill"]
        services.listen["decode"].set()
        await services.until_idle()
        assert len(services.started) == 2
        services.listen["prefill"].set()
        await services.until_idle()
        assert services.started[2:] == ["router"]
        services.listen["router"].set()
        assert services.timeouts_s == [9.0] * 3


async def test_decode_waits_for_the_table_that_prefill_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    async with starting(monkeypatch, has_gpu=False, calibrates=True) as services:
        assert services.started == ["prefill"]
        services.listen["prefill"].set()
        await services.until_idle()
        assert services.started == ["prefill", "decode"]
        services.listen["decode"].set()
        services.listen["router"].set()
        await services.until_idle()
        assert services.timeouts_s == [math.inf] * 3
