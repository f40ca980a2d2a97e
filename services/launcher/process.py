"""The process of one service: started, waited for until it listens, restarted when it ends, stopped.

start ──► starting ──ready file──► running ──exit──► backoff ──► starting ...
             │                        │                 │
             └──exit, timeout: error  └────── stop ─────┴──► stopped (SIGTERM, then SIGKILL)

It ends when the launcher ends, however that happens: the launcher has the other end of a pipe, and when that
ends the service gets SIGTERM, and the process exits if it has not stopped within `GRACE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import NoReturn

import structlog

from kvferry.shared.errors import ConfigurationError, DeadlineExceeded, KvferryError
from kvferry.shared.process.command_line import EXIT_FAILED, EXIT_USAGE, variable_name

logger = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 5.0
GRACE_S = 5.0
_READ_BYTES = 4096
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_STABLE_S = 60.0
_POLL_S = 0.05
_NVIDIA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
SHARED_IMPORTS = (
    "transformers.activations",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "kvferry.services.decode.server",
    "kvferry.services.prefill.server",
    "kvferry.services.router.server",
    "kvferry.services.launcher.cli",
)
"""What services need that are forked from one process. Importing it starts no thread, looks for no device and
opens nothing: these do not survive a fork."""


def may_use_gpu(device: str) -> bool:
    """Return whether services with this device option use a GPU, if torch is built for it."""
    return device != "cpu" and any(path.exists() for path in _NVIDIA)


def process_context(device: str) -> ForkServerContext | SpawnContext:
    """Return the context that makes the services' processes.

    Without a GPU they are forked from a process that has imported what all of them need: that takes a third
    of the time, and they share the memory of the libraries. CUDA does not work in a forked process if a
    library has looked for devices before, so beside a GPU each service imports for itself.

    Args: device: the option of the services.
    """
    if may_use_gpu(device) or not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    # NumPy's BLAS starts threads when it is imported. The services compute in torch, with threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(SHARED_IMPORTS))
    return context


class ServiceProcess:
    """A service's process. Used by the launcher's event loop only.

    Attributes: addresses: what the service wrote into its ready file: `address`, `metrics`, ...
    """

    def __init__(
        self,
        role: str,
        *,
        settings: Mapping[str, str],
        ready_file: Path,
        context: ForkServerContext | SpawnContext,
    ) -> None:
        """Args: settings: the service's settings by field; they override the inherited environment."""
        self.role = role
        self._settings = dict(settings)
        self._ready_file = ready_file
        self._context = context
        self._process: Process | None = None
        self._lifeline: Connection | None = None
        self._stop = asyncio.Event()
        self.addresses: dict[str, str] = {}

    @property
    def pid(self) -> int:
        assert self._process is not None, "the process is not started"
        assert self._process.pid is not None, "it has one once it is started"
        return self._process.pid

    async def start(self, timeout_s: float) -> dict[str, str]:
        """Start the process and wait until it listens; returns its addresses.

        Raises:
            ConfigurationError: it refused its settings (it has written the reason to stderr).
            KvferryError: it ended.
            DeadlineExceeded: it did not listen in time and was killed.
        """
        with contextlib.suppress(FileNotFoundError):
            self._ready_file.unlink()
        settings = self._settings | {"ready_file": str(self._ready_file)}
        variables = {variable_name(field): value for field, value in settings.items()}
        process = await self._begin(variables)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready_file.exists():
                    if process.exitcode == EXIT_USAGE:
                        raise ConfigurationError(f"{self.role} refused its settings, see above")
                    if (code := process.exitcode) is not None:
                        raise KvferryError(f"{self.role} ended with exit code {code} before it listened")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self._end(process, 0.0)
            raise DeadlineExceeded(f"{self.role} was not listening after {timeout_s:g} s") from None
        self.addresses = json.loads(self._ready_file.read_text(encoding="utf-8"))
        return self.addresses

    async def _begin(self, variables: Mapping[str, str]) -> Process:
        if self._lifeline is not None:
            self._lifeline.close()
        theirs, self._lifeline = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=run_service, args=([self.role], variables, theirs), name=f"kvferry {self.role}"
        )
        # it returns when the process exists; the first time, that is when the imports are done
        starting = asyncio.create_task(asyncio.to_thread(process.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            process.kill()
            raise
        finally:
            theirs.close()
        self._process = process
        return process

    def pin(self, **settings: str) -> None:
        """Fix settings for restarts, such as a port that other services have been given."""
        self._settings |= settings

    async def supervise(self, on_restart: Callable[[], None]) -> None:
        """Restart the process whenever it ends, until `stop`. Call after `start`."""
        loop = asyncio.get_running_loop()
        backoff_s = _FIRST_BACKOFF_S
        while True:
            assert self._process is not None
            started_s = loop.time()
            code = await _wait(self._process)
            if self._stop.is_set():
                return
            if loop.time() - started_s > _STABLE_S:
                backoff_s = _FIRST_BACKOFF_S
            pause_s = backoff_s * random.uniform(0.75, 1.25)
            logger.warning("service ended", role=self.role, code=code, restart_in_s=round(pause_s, 2))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
                return
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            try:
                await self.start(timeout_s=_STABLE_S)
            except KvferryError as error:
                logger.warning("service did not start", role=self.role, error=error.message)
                continue
            on_restart()

    async def stop(self, drain_s: float = 0.0) -> None:
        """End the process: SIGTERM, then SIGKILL after STOP_TIMEOUT_S or `drain_s` if longer. Idempotent."""
        self._stop.set()
        if self._process is not None:
            await self._end(self._process, max(STOP_TIMEOUT_S, drain_s))

    async def _end(self, process: Process, timeout_s: float) -> None:
        if process.exitcode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(_wait(process), timeout_s)
        except TimeoutError:
            logger.warning("service killed", role=self.role, timeout_s=timeout_s)
            process.kill()
            await _wait(process)


async def _wait(process: Process) -> int:
    loop = asyncio.get_running_loop()
    while (code := process.exitcode) is None:
        ended = asyncio.Event()
        watched = os.dup(process.sentinel)  # others may wait for it too
        loop.add_reader(watched, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
    return code


# ---- in the service's process ------------------------------------------------------------------------------


def watch_parent(descriptor: int) -> None:
    """Start the thread that waits for the end of the pipe."""
    threading.Thread(target=_await_end, args=(descriptor,), name="launcher-watch", daemon=True).start()


def _await_end(descriptor: int) -> None:
    while os.read(descriptor, _READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def run_service(arguments: Sequence[str], variables: Mapping[str, str], lifeline: Connection) -> NoReturn:
    """Run a command of `kvferry` in this process, and end it with the command's exit code.

    The process becomes the leader of a new session, so that a terminal's Ctrl-C reaches the launcher alone.

    Args:
        arguments: of the command.
        variables: for the environment.
        lifeline: the end of the pipe.
    """
    os.setsid()
    with contextlib.suppress(OSError):  # for `ps -o comm` and `top`, on Linux
        Path("/proc/self/comm").write_text(f"kvferry-{arguments[0]}", encoding="utf-8")
    os.environ.update(variables)
    watch_parent(lifeline.fileno())
    code = EXIT_FAILED
    try:
        # the launcher itself does not need it
        from kvferry.services.launcher.cli import main

        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_FAILED
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        # The service has closed everything. Finalizing the interpreter with torch loaded would take another
        # second, and stopping the launcher would wait for it.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
