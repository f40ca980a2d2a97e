"""The stack in one process, built in the test's own."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.services.launcher.config import ServeConfig
from kvferry.services.launcher.in_process import InProcessStack
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.process import worker


def test_the_weights_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[TransformersModel] = []

    def load(*args: object, **options: object) -> TransformersModel:
        loaded.append(load_model(*args, **options))  # type: ignore[arg-type]
        return loaded[-1]

    monkeypatch.setattr(worker, "load_model", load)

    async def run() -> None:
        stack = InProcessStack(ServeConfig(listen="127.0.0.1:0", arena_bytes=1 << 22))
        try:
            await stack.start()
        finally:
            await stack.close()

    asyncio.run(run())
    assert len(loaded) == 1


def test_ranks_need_processes() -> None:
    with pytest.raises(ValueError, match="tensor_parallel is 2 with in_process; it must be 1"):
        ServeConfig(in_process=True, tensor_parallel=2)
