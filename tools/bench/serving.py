"""Starts a `kvferry serve` of one's own, for measurements."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvferry.shared.errors import KvferryError

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.1
_LOG_CHARS = 4000


@contextlib.contextmanager
def served(*options: str) -> Iterator[dict[str, str]]:
    """Run a `kvferry serve` with these options, on a free port.

    Yields: its addresses: `url` of the API; host:port of `address`, `prefill_metrics` and `decode_metrics`.
    Raises: KvferryError with its log: it does not serve within `START_TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-serve-") as folder:
        ready, log = Path(folder) / "ready", Path(folder) / "log"
        command = [sys.executable, "-c", "from kvferry.services.launcher.cli import main; main()", "serve"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--listen", "127.0.0.1:0", "--ready-file", str(ready), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise KvferryError(f"kvferry serve does not serve:\n{log.read_text()[-_LOG_CHARS:]}")
                time.sleep(_POLL_S)
            addresses: dict[str, str] = json.loads(ready.read_text(encoding="utf-8"))
            yield {**addresses, "url": f"http://{addresses['address']}"}
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
