"""Streams and requests of a client while a worker dies and is started again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx

NOTICED = {"decode": "worker's turns are given up", "prefill": "worker down"}
"""What the router logs when statuses do not come: of prefill it may be before a turn has begun there."""
LONGEST_SILENCE_S = 30.0
"""Of a stream whose worker is silent. It is about five seconds where the machine has nothing else to do."""


class Heard:
    """What comes of a stream of completions. Args: on_token: told how many chunks with text have come.

    Attributes: longest_s: the longest time without a token.
    """

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self.longest_s = 0.0
        self._on_token = on_token
        self._pieces: list[tuple[int, str]] = []
        self._last_s = time.monotonic()

    def hear(self, line: str) -> None:
        assert '"error"' not in line, line
        if not line.startswith("data: {"):
            return
        for choice in json.loads(line[6:])["choices"]:
            if choice["text"]:
                now_s = time.monotonic()
                self.longest_s, self._last_s = max(self.longest_s, now_s - self._last_s), now_s
                self._pieces.append((choice["index"], choice["text"]))
                self._on_token(len(self._pieces))

    @property
    def text(self) -> str:
        """All choices, one after another."""
        return "".join(text for _, text in sorted(self._pieces, key=lambda piece: piece[0]))


def listen(base_url: str, body: dict[str, Any], on_token: Callable[[int], None]) -> Heard:
    """Stream a completion to the end."""
    heard = Heard(on_token)
    with (
        httpx.Client(base_url=base_url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            heard.hear(line)
    return heard


def stream_tokens(base_url: str, body: dict[str, Any], on_token: Callable[[int], None]) -> str:
    """Stream a completion to the end; returns its text."""
    return listen(base_url, body, on_token).text


def wait_until_served(base_url: str, body: dict[str, Any]) -> None:
    """Ask as a client does that honours Retry-After, until the worker has been started again."""
    deadline = time.monotonic() + 180
    while (response := httpx.post(f"{base_url}/v1/completions", json=body, timeout=60)).status_code != 200:
        assert response.status_code == 503, response.text
        assert time.monotonic() < deadline, response.text
        time.sleep(float(response.headers["retry-after"]))
