"""What every test shares: models on disk, one torch thread, no network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Read when a kernel is decorated, so before anything imports Triton.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import structlog
import torch
from kvtest import fast_interpreter
from kvtest.redis_server import RedisServer
from kvtest.tiny_models import make_model

from kvferry.kernels import dispatch, quarantine
from kvferry.models import DEMO_MODEL

pytest_plugins = ("kvtest.lanes", "kvtest.report")
fast_interpreter.install()


@pytest.fixture(autouse=True)
def no_kernel_stays_in_quarantine() -> Iterator[None]:
    """A kernel that failed in one test would take the torch path in all later ones."""
    yield
    found = quarantine.quarantined()
    quarantine.state.by_op = {}
    assert not found, f"the test left kernels in quarantine: {found}"


@pytest.fixture(autouse=True)
def kernels_stay_as_they_are_configured() -> Iterator[None]:
    """The mode is the process's, so all later tests would run in it."""
    before = dispatch._state.mode
    yield
    after, dispatch._state.mode = dispatch._state.mode, before
    assert after == before, f"the test left kernels in mode {after}"


@pytest.fixture(autouse=True)
def logging_stays_as_it_is_configured() -> Iterator[None]:
    """A command that a test runs in this process configures structlog for itself, and other tests' loggers
    would lack what it expects of them."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """A server that a test runs in this process sets the number for the threads that later tests start."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The model that ships with the package."""
    return DEMO_MODEL


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A running `RedisServer` of the test's own."""
    with RedisServer.running() as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model_dir(family)`: the folder of a tiny random model, made once a session."""
    root = tmp_path_factory.mktemp("tiny-models")
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, root / family)
        return made[family]

    return folder
