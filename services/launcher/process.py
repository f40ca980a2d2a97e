"""The process of one service: started, waited for until it listens, restarted when it ends, stopped.

start ──► starting ──ready file──► running ──exit──► backoff ──► starting ...
             │                        │                 │
             └──exit, timeout: error  └────── stop ─────┴──► stopped (SIGTERM, then SIGKILL)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from kvferry.shared.command_line import EXIT_USAGE, variable_name
from kvferry.shared.errors import ConfigurationError, DeadlineExceeded, KvferryError

logger = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_STABLE_S = 60.0
_POLL_S = 0.05


class ServiceProcess:
    """A service's process. Used by the launcher's event loop only.

    It is the leader of a new session, so that a terminal's Ctrl-C reaches the launcher alone.

    Attributes: addresses: what the service wrote into its ready file: `address`, `metrics`, ...
    """

    def __init__(self, role: str, *, settings: Mapping[str, str], ready_file: Path) -> None:
        """Args: settings: the service's settings by field; they override the inherited environment."""
        self.role = role
        self._settings = dict(settings)
        self._ready_file = ready_file
        self._process: Process | None = None
        self._stop = asyncio.Event()
        self.addresses: dict[str, str] = {}

    @property
    def pid(self) -> int:
        assert self._process is not None, "the process is not started"
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
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvferry.services.launcher.child", self.role),
            stdin=PIPE,
            env=os.environ | {variable_name(field): value for field, value in settings.items()},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready_file.exists():
                    self._check_running(self._process)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self._end(self._process, 0.0)
            raise DeadlineExceeded(f"{self.role} was not listening after {timeout_s:g} s") from None
        self.addresses = json.loads(self._ready_file.read_text(encoding="utf-8"))
        return self.addresses

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
            code = await self._process.wait()
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
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            logger.warning("service killed", role=self.role, timeout_s=timeout_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _check_running(self, process: Process) -> None:
        if process.returncode == EXIT_USAGE:
            raise ConfigurationError(f"{self.role} refused its settings, see above")
        if process.returncode is not None:
            raise KvferryError(f"{self.role} ended with exit code {process.returncode} before it listened")
