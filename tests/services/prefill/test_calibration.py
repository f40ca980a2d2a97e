"""A worker that is to calibrate its model does so before it serves, and uses what it found."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from kvtest.ports import free_port
from kvtest.waiting import eventually

from kvferry.services.launcher import cli
from kvferry.services.launcher.config import ServeConfig
from kvferry.services.prefill import server
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.server import build_service
from kvferry.shared.compression.rdkv.epsilon import EpsilonTable, install_tables, own_table
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.process.worker import Calibrate, start_service
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.tools.evaluation.epsilon import save_table


class Held:
    """A calibration that ends when it is told. Attributes: given_up: whether it was told to give up."""

    def __init__(self, folder: Path) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.given_up = False
        self._folder = folder

    def __call__(self, model: LanguageModel, is_given_up: Callable[[], bool]) -> None:
        self.begun.set()
        while not self.may_end.wait(0.01):
            if is_given_up():
                self.given_up = True
                return
        table = EpsilonTable(keys=(0.3, 0.01, 1e-5), values=(0.2, 0.02, 2e-5))
        origin = {"fingerprints": {"float32": model.spec.fingerprint}}
        save_table(self._folder / "m-0123.epsilon.json", table, origin=origin)


@asynccontextmanager
async def starting(
    model: LanguageModel, folder: Path, calibrate: Calibrate
) -> AsyncIterator[tuple[asyncio.Task[object], str]]:
    """A prefill service that starts, and the address of its metrics."""
    metrics = f"127.0.0.1:{free_port()}"
    config = PrefillConfig(metrics_listen=metrics, calibration=str(folder), self_test=False)
    async with AsyncExitStack() as stack:
        build = partial(build_service, config)
        start = start_service(config, "prefill", model, build, InProcessHub(), stack, calibrate=calibrate)
        task: asyncio.Task[object] = asyncio.create_task(start)
        try:
            yield task, f"http://{metrics}/ready"
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            install_tables("")


async def test_a_worker_is_not_ready_while_it_calibrates_and_then_uses_its_own_table(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model, held = load_model(tiny_model_dir("llama")), Held(tmp_path)
    async with starting(model, tmp_path, held) as (task, ready), httpx.AsyncClient(timeout=60) as client:
        await eventually(held.begun.is_set)
        reply = await client.get(ready)
        assert reply.status_code == 503
        assert "calibrated" in reply.json()["reason"]
        assert not task.done()
        held.may_end.set()
        await task
        table = own_table(model.spec.fingerprint)
        assert table is not None
        assert table.keys == (0.3, 0.01, 1e-5)

        async with asyncio.timeout(120):
            while (await client.get(ready)).status_code != 200:
                await asyncio.sleep(0.05)


async def test_a_worker_that_is_stopped_has_its_calibration_give_up(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    held = Held(tmp_path)
    async with starting(load_model(tiny_model_dir("llama")), tmp_path, held) as (task, _):
        await eventually(held.begun.is_set)
        task.cancel()
        await eventually(lambda: held.given_up)


@pytest.mark.parametrize("asked", [False, True])
def test_the_command_calibrates_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: bool
) -> None:
    given: list[Calibrate | None] = []

    async def run(config: PrefillConfig, calibrate: Calibrate | None = None) -> None:
        given.append(calibrate)

    monkeypatch.setattr(server, "run", run)
    folder = tmp_path / "made"
    with pytest.raises(SystemExit) as end:
        cli.main(["prefill", *(["--calibrate", "--calibration", str(folder)] if asked else [])])
    assert end.value.code == 0
    assert (given[0] is not None) is asked
    assert folder.is_dir() is asked


@pytest.mark.parametrize("settings", [PrefillConfig, ServeConfig])
def test_ranks_are_calibrated_by_the_command(settings: type[PrefillConfig]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel is 2 with calibrate; it must be 1"):
        settings(calibrate=True, tensor_parallel=2)
