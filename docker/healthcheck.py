"""Ends with 0 if the service in this container answers a path with 200, else with 1.

    python healthcheck.py [PATH]      PATH: /ready

Standard library alone, so that a check costs milliseconds. The entry point wrote where the service listens.
A worker with certificates answers only a client with that of metrics, which is mounted beside its own.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

URL_FILE = Path("/tmp/ready-url")
TIMEOUT_S = 5.0


def problem(path: str) -> str:
    """Why the service does not answer well; empty if it does."""
    try:
        url = URL_FILE.read_text(encoding="ascii").strip() + path
        context = metrics_context() if url.startswith("https:") else None
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context):
            return ""
    except (OSError, ValueError) as error:
        return f"not ready: {error}"


def metrics_context() -> ssl.SSLContext:
    """TLS with the certificate of metrics; the server's must be of the same authority."""
    folder = Path(os.environ["KVFERRY_CERTS"]) / "metrics"
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.check_hostname = False
    context.load_cert_chain(folder / "tls.pem", folder / "tls.key")
    return context


if __name__ == "__main__":
    # An empty string would count as a message, and so as a failure.
    sys.exit(problem(sys.argv[1] if len(sys.argv) > 1 else "/ready") or 0)
