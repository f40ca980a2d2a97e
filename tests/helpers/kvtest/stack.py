"""Serves the whole system for a test: `kvferry serve` in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvferry.services.launcher.cli import main
from kvferry.shared.process.serving import reachable
from kvferry.shared.trust.certs import Certs
from kvtest.forked import Forked

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Addresses of a running stack."""

    base_url: str
    prefill_metrics_url: str
    decode_metrics_url: str
    tls: ssl.SSLContext | None
    addresses: dict[str, str]
    process: Forked
    log_path: Path
    ready_path: Path

    def prefill_metric(self, name: str, **labels: str) -> float:
        return _sample(self.prefill_metrics_url, name, labels, self.tls)

    def decode_metric(self, name: str, **labels: str) -> float:
        return _sample(self.decode_metrics_url, name, labels, self.tls)

    def wait_kept(self, session_id: str, key: str = "") -> dict[str, Any]:
        """The session, once its last turn's KV is in the history, which follows the answer."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            reply = httpx.get(f"{self.base_url}/v1/sessions/{session_id}", headers=headers, timeout=60)
            if reply.status_code == 200 and not reply.json()["running"]:
                session: dict[str, Any] = reply.json()
                return session
            assert time.monotonic() < deadline_s, reply.text
            time.sleep(0.02)

    def router_metric(self, name: str, **labels: str) -> float:
        return _sample(f"{self.base_url}/metrics", name, labels)


def _sample(url: str, name: str, labels: dict[str, str], tls: ssl.SSLContext | None = None) -> float:
    """Sum of the samples of this name whose labels include these."""
    text = httpx.get(url, timeout=60, verify=tls or True).raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@contextlib.contextmanager
def serving(*options: str, listen: str = "127.0.0.1:0") -> Iterator[Stack]:
    """Run `kvferry serve` with these options until the block ends; raises with its log if it fails."""
    with tempfile.TemporaryDirectory(prefix="kvferry-e2e-") as folder:
        ready_path, log_path = Path(folder) / "ready.json", Path(folder) / "serve.log"
        process = Forked(
            main,
            [
                *("serve", "--listen", listen),
                *("--ready-file", str(ready_path), "--log-format", "json", *options),
            ],
            log=log_path,
            environment=os.environ,
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not ready_path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the stack did not start:\n{log_path.read_text()[-4000:]}")
                time.sleep(0.05)
            addresses = json.loads(ready_path.read_text())
            certs = dict(itertools.pairwise(options)).get("--certs")
            scheme = "https" if certs else "http"
            yield Stack(
                base_url=f"http://{reachable(addresses['address'])}",
                prefill_metrics_url=f"{scheme}://{addresses['prefill_metrics']}/metrics",
                decode_metrics_url=f"{scheme}://{addresses['decode_metrics']}/metrics",
                tls=Certs(certs, "metrics").client_context() if certs else None,
                addresses=addresses,
                process=process,
                log_path=log_path,
                ready_path=ready_path,
            )
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
