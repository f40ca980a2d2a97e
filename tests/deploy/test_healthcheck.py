"""The image's health check against a real endpoint: its exit code is what Docker goes by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kvtest.ports import free_port
from prometheus_client import CollectorRegistry

from kvferry.shared.telemetry.metrics_server import serve_metrics
from kvferry.shared.trust.certs import Certs
from kvferry.tools.certs import make_certs

SCRIPT = Path(__file__).parents[2] / "docker" / "healthcheck.py"


def check(base: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script's run for a service there, with the certificates in the folder."""
    url_file = folder / "ready-url"
    url_file.write_text(f"{base}\n")
    changed = folder / "healthcheck.py"
    changed.write_text(SCRIPT.read_text(encoding="utf-8").replace("/tmp/ready-url", str(url_file)))
    return subprocess.run(
        [sys.executable, "-I", changed, *arguments],
        env={"KVFERRY_CERTS": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("with_certs", [False, True])
@pytest.mark.parametrize("ready", [True, False])
def test_exit_code_says_whether_the_service_is_ready(ready: bool, with_certs: bool, tmp_path: Path) -> None:
    certs = None
    if with_certs:
        make_certs(tmp_path, days=1, everything=False)
        certs = Certs(str(tmp_path), "decode")
    problem = "" if ready else "its kernels are tested"
    server = serve_metrics(CollectorRegistry(), "127.0.0.1:0", problem=lambda: problem, certs=certs)
    base = f"{'https' if with_certs else 'http'}://{server.address}"
    try:
        done = check(base, tmp_path)
        assert check(base, tmp_path, "/health").returncode == 0
    finally:
        server.close()
    assert done.returncode == (0 if ready else 1)
    assert ("503" in done.stderr) is not ready


def test_a_service_that_does_not_listen_yet_is_not_ready(tmp_path: Path) -> None:
    assert check(f"http://127.0.0.1:{free_port()}", tmp_path).returncode == 1
