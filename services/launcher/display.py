"""What `kvferry serve` prints: a spinner while it starts, then addresses and an example command."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping

from rich.console import Console

from kvferry.shared.process.serving import reachable
from kvferry.shared.process.version import VERSION


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
        self._line(f"  page     {base}/")
        self._line(f"  metrics  {base}/metrics (router; with ?all=1 the workers' too)")
        for role in ("prefill", "decode"):
            scheme = "https" if with_certs else "http"
            self._line(f"           {scheme}://{reachable(addresses[f'{role}_metrics'])}/metrics ({role})")
        self._line("")
        self._line("Try it; kv in the answer compares the bytes shipped with all of them:", style="bold")
        self._line(example_line(base, needs_key=needs_key))
        self._line("")
        self._line(f"or talk to it: kvferry chat --url {base}        Ctrl-C stops.", style="dim")

    def stopping(self) -> None:
        self._line("stopping ...", style="dim")

    def _line(self, text: str, *, style: str | None = None) -> None:
        # Not wrapped, so that the command can be pasted, and not interpreted as markup.
        self._console.print(text, style=style, markup=False, soft_wrap=True)


def example_line(base_url: str, *, needs_key: bool = False) -> str:
    """Return a shell command that asks the server's example, a question about a document."""
    words = ["curl", "-s", f"{base_url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    if needs_key:
        words += ["-H", "Authorization: Bearer YOUR_KEY"]
    return f"curl -s {base_url}/example | {shlex.join([*words, '-d', '@-'])}"
