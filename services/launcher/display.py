"""What `kvferry serve` prints: a spinner while it starts, then addresses and an example command."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping

from rich.console import Console

from kvferry.shared.process.serving import reachable
from kvferry.shared.process.version import VERSION

# The demo model knows only these words; any other model can answer, too.
EXAMPLE_MESSAGE = (
    "the old sailor painted the quiet bridge . remember that the pin of the red castle is 4 2 7 1 . "
    "the access code of the blue lighthouse is 9 0 5 3 . what is the pin of the red castle ?"
)
EXAMPLE_ANSWER = "4 2 7 1"


class Display:
    """Writes to the terminal (stdout); a pipe gets the same text without colours or spinner."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)

    @contextlib.contextmanager
    def starting(self, model: str, *, calibrates: bool = False) -> Iterator[None]:
        first = " and calibrating it, which takes minutes the first time" if calibrates else ""
        with self._console.status(f"starting prefill, decode and router with {model}{first} ..."):
            yield

    def ready(
        self,
        model: str,
        addresses: Mapping[str, str],
        *,
        needs_key: bool,
        with_certs: bool = False,
        scheme: str = "http",
    ) -> None:
        base = f"{scheme}://{reachable(addresses['address'])}"
        self._line(f"kvferry {VERSION} serves {model}", style="bold green")
        self._line(f"  API      {base}/v1")
        self._line(f"  metrics  {base}/metrics (router; with ?all=1 the workers' too)")
        for role in ("prefill", "decode"):
            scheme = "https" if with_certs else "http"
            self._line(f"           {scheme}://{reachable(addresses[f'{role}_metrics'])}/metrics ({role})")
        self._line("")
        self._line("Try it:", style="bold")
        self._line(curl_line(base, model, needs_key=needs_key))
        self._line("")
        self._line(f"or talk to it: kvferry chat --url {base}        Ctrl-C stops.", style="dim")

    def stopping(self) -> None:
        self._line("stopping ...", style="dim")

    def _line(self, text: str, *, style: str | None = None) -> None:
        # Not wrapped, so that the command can be pasted, and not interpreted as markup.
        self._console.print(text, style=style, markup=False, soft_wrap=True)


def curl_line(base_url: str, model: str, *, needs_key: bool = False) -> str:
    """Return a shell command that sends a first request in a session."""
    body = {
        "model": model,
        "session_id": "hello",
        "messages": [{"role": "user", "content": EXAMPLE_MESSAGE}],
        "temperature": 0,
        "max_tokens": 16,
    }
    words = ["curl", "-s", f"{base_url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if needs_key:
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    return shlex.join([*words, "-d", json.dumps(body)])
