"""`kvferry serve` as a person starts it, by a Python of its own; other tests use `kvtest.stack`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvtest.waiting import until

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running `kvferry serve`."""

    process: subprocess.Popen[bytes]
    ready_file: Path
    output_file: Path

    @property
    def ready(self) -> dict[str, str]:
        loaded: dict[str, str] = json.loads(self.ready_file.read_text(encoding="utf-8"))
        return loaded

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def address(self) -> str:
        """Where this machine reaches it."""
        return self.ready["address"].replace("0.0.0.0", "127.0.0.1")

    @property
    def output(self) -> str:
        return self.output_file.read_text(encoding="utf-8")

    def wait_until(self, what: str, holds: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        until(holds, timeout_s, lambda: f"{what}\n{self.output}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=STOP_TIMEOUT_S)


Serve = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`serve(*options, listen=...)`: a context manager; the stack is ready inside it and stopped after it.

    Services get more time to stop than by default, because the machine may be busy with other tests.
    """
    command = (
        "from kvferry.services.launcher import process\n"
        f"process.STOP_TIMEOUT_S = {STOP_TIMEOUT_S - 10}\n"
        "from kvferry.services.launcher.cli import main\n"
        "main()"
    )

    @contextlib.contextmanager
    def serving(*options: str, listen: str = "127.0.0.1:0") -> Iterator[Served]:
        folder = tmp_path_factory.mktemp("serve")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", command),
                    *("serve", "--listen", listen, "--threads", "1", "--arena-bytes", str(64 << 20)),
                    *("--ready-file", str(folder / "ready"), *options),
                ],
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
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

    return serving
