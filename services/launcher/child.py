"""A service's process started by the launcher. It ends when the launcher ends, however that happens.

The launcher has the other end of a pipe. When the launcher is gone, even killed, the pipe ends: the service
then gets SIGTERM, and the process exits if it has not stopped within `GRACE_S`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from kvferry.shared.process.command_line import EXIT_FAILED

GRACE_S = 5.0
_READ_BYTES = 4096


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
