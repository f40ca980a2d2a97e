"""`kvferry serve` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvtest.forked import Forked

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running `kvferry serve`."""

    process: Forked | subprocess.Popen[bytes]
    ready_file: Path
    output_file: Path

    @property
    def ready(self) -> dict[str, str]:
        loaded: dict[str, str] = json.loads(self.ready_file.read_text(encoding="utf-8"))
        return loaded

    @property
    def url(self) -> str:
        return f"http://{self.ready['address']}"

    @property
    def output(self) -> str:
        return self.output_file.read_text(encoding="utf-8")

    def wait_until(self, what: str, holds: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}\n{self.output}"
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=STOP_TIMEOUT_S)


Serve = Callable[..., AbstractContextManager[Served]]
_COMMAND = (
    "from kvferry.services.launcher import process\n"
    f"process.STOP_TIMEOUT_S = {STOP_TIMEOUT_S - 10}\n"
    "from kvferry.services.launcher.cli import main\n"
    "main()"
)
"""Services get more time to stop than by default, because the machine may be busy with other tests."""


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`serve(*options)`: a context manager; the stack is ready inside it and stopped after it."""

    def start(arguments: list[str], output: Path, environment: dict[str, str]) -> Forked:
        return Forked(_main, arguments, log=output, environment=environment)

    return partial(_serving, tmp_path_factory, start)


@pytest.fixture(scope="session")
def serve_afresh(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """As `serve`, by a Python of its own, as a person starts it."""

    def start(arguments: list[str], output: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with output.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    return partial(_serving, tmp_path_factory, start)


def _main() -> None:
    exec(_COMMAND, {})


@contextlib.contextmanager
def _serving(
    tmp_path_factory: pytest.TempPathFactory,
    start: Callable[[list[str], Path, dict[str, str]], Forked | subprocess.Popen[bytes]],
    *options: str,
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    arguments = [
        *("serve", "--listen", "127.0.0.1:0", "--threads", "1", "--arena-bytes", str(64 << 20)),
        *("--ready-file", str(folder / "ready"), *options),
    ]
    process = start(arguments, folder / "output", clean)
    served = Served(process=process, ready_file=folder / "ready", output_file=folder / "output")
    try:
        served.wait_until("ready", lambda: served.ready_file.exists() or process.poll() is not None)
        assert process.poll() is None, served.output
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=STOP_TIMEOUT_S)
