"""Three processes with certs: control calls over TLS, blocks encrypted, answers as without."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.shared.telemetry.metrics import CERTIFICATE_EXPIRY
from kvferry.tools.certs import make_certs


def test_a_stack_with_certs_answers_as_one_without(
    start_stack: Callable[..., Any], stack: Any, make_document: Callable[..., Any], tmp_path: Path
) -> None:
    document = make_document(31, num_words=120)
    make_certs(tmp_path, days=2, everything=False)
    body = {"model": "demo", "max_tokens": 12, "temperature": 0, "session_id": "encrypted"}
    with start_stack("--certs", str(tmp_path)) as encrypted:
        for metric in (encrypted.router_metric, encrypted.prefill_metric, encrypted.decode_metric):
            assert metric(CERTIFICATE_EXPIRY) == pytest.approx(time.time() + 2 * 86_400, abs=300)
        for url in (encrypted.prefill_metrics_url, encrypted.decode_metrics_url):
            for tried in (url, url.replace("https://", "http://")):
                with pytest.raises(httpx.TransportError):
                    httpx.get(tried, verify=False, timeout=30)
        everything = httpx.get(f"{encrypted.base_url}/metrics?all=1", timeout=60).text
        assert "kvferry_prefill_warm_up_ratio" in everything
        assert "kvferry_decode_warm_up_ratio" in everything
        for question in (f"{document.text} {document.questions[0][0]}", document.questions[1][0]):
            messages = [{"role": "user", "content": question}]
            answers = [
                httpx.post(
                    f"{each.base_url}/v1/chat/completions", json={**body, "messages": messages}, timeout=120
                ).json()
                for each in (stack, encrypted)
            ]
            assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[1]["kv"]["reused_tokens"] > 0
