"""Entry point of a service's process started by the launcher. It ends when the launcher ends, however that
happens.

The launcher has the other end of this process's standard input. When the launcher is gone, even killed, the
pipe ends: the service then gets SIGTERM, and the process exits if it has not stopped within `GRACE_S`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from kvferry.services.launcher.cli import main as command
from kvferry.shared.command_line import EXIT_FAILED

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


def main() -> None:
    """`python -m kvferry.services.launcher.child ROLE`."""
    watch_parent(sys.stdin.fileno())
    code = EXIT_FAILED
    try:
        command(sys.argv[1:])
        code = 0
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


if __name__ == "__main__":
    main()
