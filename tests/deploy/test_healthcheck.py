"""The image's health check against a real endpoint: its exit code is what Docker goes by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kvtest.ports import free_port
from prometheus_client import CollectorRegistry

from kvferry.shared.serving import serve_metrics

SCRIPT = Path(__file__).parents[2] / "docker" / "healthcheck.py"


def check(port: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script's run for a service at this port."""
    port_file = folder / "ready-port"
    port_file.write_text(f"{port}\n")
    changed = folder / "healthcheck.py"
    changed.write_text(SCRIPT.read_text(encoding="utf-8").replace("/tmp/ready-port", str(port_file)))
    return subprocess.run([sys.executable, "-I", changed], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("ready", [True, False])
def test_exit_code_says_whether_the_service_is_ready(ready: bool, tmp_path: Path) -> None:
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0", is_ready=lambda: ready)
    try:
        done = check(int(server.address.rpartition(":")[2]), tmp_path)
    finally:
        server.close()
    assert done.returncode == (0 if ready else 1)
    assert ("503" in done.stderr) is not ready


def test_a_service_that_does_not_listen_yet_is_not_ready(tmp_path: Path) -> None:
    assert check(free_port(), tmp_path).returncode == 1
