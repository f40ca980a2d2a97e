"""Entry point of a service's process that the launcher started: ends with the launcher, whatever befalls it.

The launcher holds the other end of this process's standard input. When the launcher is gone, even killed, the
pipe ends; the service then gets SIGTERM, and the process ends for good if it has not stopped soon.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from kvferry.services.launcher.cli import EXIT_FAILED
from kvferry.services.launcher.cli import main as command

GRACE_S = 5.0
_READ_BYTES = 4096


def watch_parent(descriptor: int) -> None:
    """Start the thread that awaits the pipe's end."""
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
        # The service has closed what it held; dismantling the interpreter with torch in it takes another
        # second, for which whoever stops the launcher would wait.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
