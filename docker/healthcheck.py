"""Ends with 0 if the service in this container is ready, as its own `/ready` says, else with 1.

Standard library alone, so that a check costs milliseconds. The entry point wrote the port.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

PORT_FILE = Path("/tmp/ready-port")
TIMEOUT_S = 5.0


def problem() -> str:
    """Why the service is not ready; empty if it is."""
    try:
        url = f"http://127.0.0.1:{int(PORT_FILE.read_text(encoding='ascii'))}/ready"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return ""
    except (OSError, ValueError) as error:
        return f"not ready: {error}"


if __name__ == "__main__":
    # An empty string would count as a message, and so as a failure.
    sys.exit(problem() or 0)
