"""Clients whose connections end at any moment, with a reset or without: no service logs an error, and
nothing of their requests is left."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

QUIET_TIMEOUT_S = 180.0
LONGEST = 3000
BODY = {"model": "demo", "prompt": "the red castle .", "logit_bias": {"6": -100}}


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


CHAT = request(
    "/v1/chat/completions",
    {
        "model": "demo",
        "messages": [{"role": "user", "content": "the red castle ."}],
        "max_tokens": LONGEST,
        "logit_bias": {"6": -100},
        "stream": True,
        "session_id": "cut",
    },
)
STREAM = request("/v1/completions", {**BODY, "max_tokens": LONGEST, "stream": True})
WHOLE = request("/v1/completions", {**BODY, "max_tokens": LONGEST})
MANY = request("/v1/completions", {**BODY, "max_tokens": 50, "n": 8, "stream": True})
RESPONSE = request("/v1/responses", {"model": "demo", "input": "the red castle .", "stream": True})

MOMENTS: dict[str, tuple[bytes, bytes | float]] = {
    # what is sent, and what must have come, or how long the client waits, before it is gone
    "connected": (b"", 0.0),
    "in the head": (STREAM[:40], 0.05),
    "in the body": (STREAM[:-20], 0.05),
    "sent": (STREAM, 0.0),
    "sent twice": (WHOLE + WHOLE, 0.0),
    "before the answer's head": (STREAM, 0.02),
    "after the answer's head": (STREAM, b"\r\n\r\n"),
    "after tokens": (STREAM, b"data: " * 5),
    "in a session": (CHAT, b"data: " * 3),
    "of many choices": (MANY, b"data: " * 5),
    "of a response": (RESPONSE, b"event: response.output_text.delta"),
    "before a whole answer": (WHOLE, 0.2),
}


def leave(address: tuple[str, int], sent: bytes, until: bytes | float, *, reset: bool) -> None:
    with socket.create_connection(address, timeout=120) as connection:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(sent)
        if isinstance(until, float):
            time.sleep(until)
            return
        unit, seen = until[: len(until) // max(1, until.count(b"data: "))], b""
        while seen.count(unit) < until.count(unit):
            chunk = connection.recv(65_536)
            assert chunk, seen
            seen += chunk


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_connections_that_end_at_any_moment_log_no_error_and_leave_nothing(stack: Any, reset: bool) -> None:
    """The stack logs warnings and errors alone."""
    host, port = urlsplit(stack.base_url).hostname, urlsplit(stack.base_url).port
    begin = stack.log_path.stat().st_size
    cut = stack.router_metric("kvferry_request_failure_total", category="cancelled")
    for _ in range(2):
        for sent, until in MOMENTS.values():
            leave((host, port), sent, until, reset=reset)
    deadline_s = time.monotonic() + QUIET_TIMEOUT_S
    while any(
        stack.decode_metric("kvferry_arena_bytes", state=state)
        for state in ("reserved", "in_transfer", "running")
    ):
        assert time.monotonic() < deadline_s, "a request of a client that left still has memory"
        time.sleep(0.1)
    answer = httpx.post(f"{stack.base_url}/v1/completions", json={**BODY, "max_tokens": 4}, timeout=240)
    assert answer.status_code == 200, answer.text
    cut = stack.router_metric("kvferry_request_failure_total", category="cancelled") - cut
    assert cut >= len(MOMENTS), "too few requests were cut"
    with stack.log_path.open() as log:
        log.seek(begin)
        text = log.read()
    assert text == ""
