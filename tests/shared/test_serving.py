"""A process that is told to stop ends, whatever its threads wait for."""

from __future__ import annotations

import subprocess
import sys

WEDGED = """
import threading
from kvferry.shared.serving import end_within
end_within(0.5)
threading.Thread(target=threading.Event().wait).start()
"""


def test_a_process_with_a_stuck_thread_ends_in_time() -> None:
    done = subprocess.run([sys.executable, "-c", WEDGED], timeout=60, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"did not stop in time" in done.stdout + done.stderr
