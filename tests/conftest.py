"""What every test shares: models on disk, one torch thread, no network."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Read when a kernel is decorated, so before anything imports Triton.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings

from kvferry.models import DEMO_MODEL

torch.set_num_threads(1)

# A change is judged by the same examples each time; "search" looks for new ones (CONTRIBUTING.md).
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", print_blob=True)
settings.load_profile("repeatable")


def _load(module: str) -> ModuleType:
    """A module beside this file: tests are no package, so it is loaded by its path."""
    name = f"kvferry_{module}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The model that ships with the package."""
    return DEMO_MODEL


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """`tests/tiny_models.py`."""
    return _load("tiny_models")


@pytest.fixture(scope="session")
def redis_servers() -> ModuleType:
    """`tests/redis_server.py`."""
    return _load("redis_server")


@pytest.fixture
def redis_server(redis_servers: ModuleType) -> Iterator[Any]:
    """A running `RedisServer` of the test's own."""
    with redis_servers.RedisServer.running() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: ModuleType
) -> Callable[[str], Path]:
    """`tiny_model_dir(family)`: the folder of a tiny random model, made once a session."""
    root = tmp_path_factory.mktemp("tiny-models")
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny_models.make_model(family, root / family)
        return made[family]

    return folder
