"""Streams and requests of a client while a worker dies and is started again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx


def stream_tokens(base_url: str, body: dict[str, Any], on_token: Callable[[int], None]) -> str:
    """The text of all choices, one after another; `on_token` is told how many chunks with text have come."""
    pieces: list[tuple[int, str]] = []
    with (
        httpx.Client(base_url=base_url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            assert '"error"' not in line, line
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice["text"]:
                        pieces.append((choice["index"], choice["text"]))
                        on_token(len(pieces))
    return "".join(text for _, text in sorted(pieces, key=lambda piece: piece[0]))


def wait_until_served(base_url: str, body: dict[str, Any]) -> None:
    """Ask as a client does that honours Retry-After, until the worker has been started again."""
    deadline = time.monotonic() + 180
    while (response := httpx.post(f"{base_url}/v1/completions", json=body, timeout=60)).status_code != 200:
        assert response.status_code == 503, response.text
        assert time.monotonic() < deadline, response.text
        time.sleep(float(response.headers["retry-after"]))
