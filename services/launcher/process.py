"""One service's process under supervision: started, awaited until it listens, restarted, stopped.

    start ──► starting ──ready file──► running ──exit──► backoff ──► starting ...
                 │                        │                 │
                 └──exit, timeout: error  └────── stop ─────┴──► stopped (SIGTERM, then SIGKILL)

Knows settings as text only, not what the service does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from kvferry.shared.command_line import EXIT_USAGE, variable_name
from kvferry.shared.errors import ConfigurationError, DeadlineExceeded, KvferryError

logger = structlog.get_logger(__name__)

MAX_BACKOFF_S = 10.0
_STABLE_S = 60.0
_POLL_S = 0.05


class ServiceProcess:
    """A service's process. Owned by the launcher's event loop; not thread-safe.

    The process is a session of its own, so that a terminal's Ctrl-C reaches the launcher alone.
    """

    def __init__(
        self,
        role: str,
        *,
        settings: Mapping[str, str],
        environment: Mapping[str, str],
        ready_file: Path,
        restart_backoff_s: float,
    ) -> None:
        """Args:
        settings: the service's settings, by field; they override the environment.
        environment: what the process inherits.
        """
        self.role = role
        self.restarts = 0
        self._settings = dict(settings)
        self._environment = dict(environment)
        self._ready_file = ready_file
        self._backoff_s = restart_backoff_s
        self._process: Process | None = None
        self._stop = asyncio.Event()
        self._addresses: dict[str, str] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """What the service announced: `address`, `metrics`, ..."""
        return dict(self._addresses)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the process is not started"
        return self._process.pid

    async def start(self, timeout_s: float) -> dict[str, str]:
        """Start the process and wait until it listens; returns the addresses it announced.

        Raises:
            ConfigurationError: it refused its settings (it has told why on stderr).
            KvferryError: it ended.
            DeadlineExceeded: it did not listen in time, and was killed.
        """
        with contextlib.suppress(FileNotFoundError):
            self._ready_file.unlink()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvferry.services.launcher.child", self.role),
            stdin=PIPE,
            env=self._environment | self._variables(),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                self._addresses = await self._until_ready(self._process)
        except TimeoutError:
            await self._end(self._process, 0.0)
            raise DeadlineExceeded(f"{self.role} was not listening after {timeout_s:g} s") from None
        return self.addresses

    def pin(self, **settings: str) -> None:
        """Change settings for restarts, such as the port that others know by now."""
        self._settings |= settings

    async def supervise(self, on_restart: Callable[[], None]) -> None:
        """Restart the process whenever it ends, until `stop`. Call after `start`."""
        loop = asyncio.get_running_loop()
        backoff_s = self._backoff_s
        while True:
            assert self._process is not None
            started_s = loop.time()
            code = await self._process.wait()
            if self._stop.is_set():
                return
            if loop.time() - started_s > _STABLE_S:
                backoff_s = self._backoff_s
            pause_s = backoff_s * random.uniform(0.75, 1.25)
            logger.warning("service ended", role=self.role, code=code, restart_in_s=round(pause_s, 2))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
                return
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            self.restarts += 1
            try:
                await self.start(timeout_s=_STABLE_S)
            except KvferryError as error:
                logger.warning("service did not start", role=self.role, error=error.message)
                continue
            on_restart()

    async def stop(self, timeout_s: float) -> None:
        """End the process: SIGTERM, and SIGKILL after the timeout. Idempotent."""
        self._stop.set()
        if self._process is not None:
            await self._end(self._process, timeout_s)

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

    def _variables(self) -> dict[str, str]:
        settings = self._settings | {"ready_file": str(self._ready_file)}
        return {variable_name(field): value for field, value in settings.items()}

    async def _until_ready(self, process: Process) -> dict[str, str]:
        while not self._ready_file.exists():
            if process.returncode is not None:
                self._raise_for(process.returncode)
            await asyncio.sleep(_POLL_S)
        announced: dict[str, str] = json.loads(self._ready_file.read_text(encoding="utf-8"))
        return announced

    def _raise_for(self, code: int) -> None:
        if code == EXIT_USAGE:
            raise ConfigurationError(f"{self.role} refused its settings, see above")
        raise KvferryError(f"{self.role} ended with exit code {code} before it listened")
