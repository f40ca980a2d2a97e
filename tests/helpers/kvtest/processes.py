"""Services as real processes, started with the `kvferry` command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvferry.services.launcher.cli import main
from kvtest.forked import Forked

START_TIMEOUT_S = 180.0


@dataclass
class Process:
    """A service's process, and its addresses."""

    popen: subprocess.Popen[bytes] | Forked
    addresses: dict[str, str]
    log: Path

    def metric(self, name: str) -> float:
        text = httpx.get(f"http://{self.addresses['metrics']}/metrics", timeout=60).raise_for_status().text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    @contextmanager
    def frozen(self) -> Iterator[Callable[[], None]]:
        """Gives what freezes it; it goes on at the end."""
        try:
            yield lambda: os.kill(self.popen.pid, signal.SIGSTOP)
        finally:
            os.kill(self.popen.pid, signal.SIGCONT)


def is_running(pid: int) -> bool:
    """Whether a thread of a process has not ended: until then its sockets are open. Where nobody waits for
    the process, zombies are left."""
    try:
        tasks = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # one ends while its file is read
        return is_running(pid)
    return any(task.rpartition(")")[2].split()[0] not in "ZX" for task in tasks)


@contextmanager
def started(
    folder: Path,
    name: str,
    *options: str,
    environment: Path | None = None,
    main: Callable[[], None] = main,
) -> Iterator[Callable[[], Process]]:
    """Start `kvferry ROLE`; gives what waits until it listens.

    Args:
        environment: the folder of another one, that has a wheel; None: this one's.
        main: what runs in this one's processes.
    """
    ready, log = folder / f"{name}.json", folder / f"{name}.log"
    arguments = [name.split("-")[0], "--ready-file", str(ready), *options]
    log.write_bytes(b"")
    popen: subprocess.Popen[bytes] | Forked
    if environment is None:
        popen = Forked(main, arguments, log=log, environment=os.environ)
    else:
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(environment / "bin" / "kvferry"), *arguments]
        with log.open("wb") as output:
            popen = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)

    def wait() -> Process:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert popen.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, log.read_text()[-4000:]
            time.sleep(0.05)
        return Process(popen, json.loads(ready.read_text()), log)

    try:
        yield wait
    finally:
        popen.kill()
        popen.wait(30)
