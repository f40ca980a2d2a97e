"""Processes forked from one that has imported the services' libraries: a start takes a tenth of the CPU time.

They are processes as any others: with their own environment, output, threads and sockets. Services that
`kvferry serve` starts in such a process are forked from the same one, and so are a worker's other ranks.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.services.launcher import process
from kvferry.services.launcher.process import process_context, run_service
from kvferry.shared.model.parallel import follower, lead


class Forked:
    """One process, with `subprocess.Popen`'s methods.

    Args:
        main: what runs in it, with `sys.argv[1:]` as given; it may raise SystemExit.
        log: where its output is appended; None: it goes where that of the tests goes.
        errors: where what it writes to standard error is appended; None: to the log.
        environment: all of its variables.
    """

    def __init__(
        self,
        main: Callable[[], None],
        arguments: Sequence[str],
        *,
        log: Path | None,
        errors: Path | None = None,
        environment: Mapping[str, str],
    ) -> None:
        context = process_context("cpu")
        parent: Any = forkserver._forkserver  # type: ignore[attr-defined]
        parent.ensure_running()
        self._process = context.Process(
            target=_run,
            args=(
                main,
                [str(argument) for argument in arguments],
                (log, errors or log),
                dict(environment),
                parent._forkserver_address,
            ),
        )
        self._process.start()
        assert self._process.pid is not None, "it is started"
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        # the fork server learns of an end before this process does
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    main: Callable[[], None],
    arguments: Sequence[str],
    logs: Sequence[Path | None],
    environment: Mapping[str, str],
    forkserver_address: str,
) -> None:
    for stream, log in enumerate(logs, start=1):
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(output, stream)
            os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["kvferry", *arguments]
    multiprocessing.current_process().name = "kvferry"
    _share_forkserver(forkserver_address, environment)
    try:
        main()
    finally:
        # such a process runs no exit handlers by itself
        atexit._run_exitfuncs()


def _share_forkserver(address: str, environment: Mapping[str, str]) -> None:
    """Let this process fork from the server at this address; its services get its environment."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server.ensure_running = lambda: None
    process.run_service = partial(_run_service, dict(environment))  # type: ignore[assignment]
    lead.subprocess = forking()


def _run_service(
    environment: Mapping[str, str],
    arguments: Sequence[str],
    variables: Mapping[str, str],
    lifeline: Connection,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    run_service(arguments, variables, lifeline)


def forking() -> Any:
    """The module `subprocess` for `shared/model/parallel/lead.py`, with followers that are forked."""
    return SimpleNamespace(**vars(subprocess) | {"Popen": _fork_follower})


def _fork_follower(
    command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
) -> Forked:
    """Args: command: of Python, which ends with the descriptors and the follower's class."""
    descriptors = [reduction.DupFd(descriptor) for descriptor in pass_fds]
    return Forked(partial(_follow, descriptors), command[-1:], log=None, environment=env)


def _follow(descriptors: Sequence[Any]) -> None:
    sys.argv[1:1] = [str(descriptor.detach()) for descriptor in descriptors]
    follower.main()
