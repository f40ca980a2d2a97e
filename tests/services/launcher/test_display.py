"""What `kvferry serve` prints."""

from __future__ import annotations

import io
import shlex

from rich.console import Console

from kvferry.services.launcher.display import Display, example_line

ADDRESSES = {
    "address": "0.0.0.0:8000",
    "prefill_metrics": "127.0.0.1:9101",
    "decode_metrics": "127.0.0.1:9102",
}


def shown(*, needs_key: bool = False, with_certs: bool = False, scheme: str = "http") -> str:
    stream = io.StringIO()
    Display(Console(file=stream, width=40, highlight=False)).ready(
        "demo", ADDRESSES, needs_key=needs_key, with_certs=with_certs, scheme=scheme
    )
    return stream.getvalue()


def test_all_addresses_are_shown_as_this_machine_reaches_them() -> None:
    text = shown()
    assert "http://127.0.0.1:8000/v1\n" in text
    assert "http://127.0.0.1:8000/\n" in text
    assert "http://127.0.0.1:9101/metrics (prefill)" in text
    assert "http://127.0.0.1:9102/metrics (decode)" in text
    assert "https://127.0.0.1:9102/metrics (decode)" in shown(with_certs=True)
    assert "https://127.0.0.1:8000/v1\n" in shown(scheme="https")


def test_the_example_is_one_whole_line_however_narrow_the_terminal() -> None:
    (line,) = (line for line in shown().splitlines() if line.startswith("curl"))
    assert line == example_line("http://127.0.0.1:8000")
    asked, answered = map(shlex.split, line.split(" | "))
    assert asked == ["curl", "-s", "http://127.0.0.1:8000/example"]
    assert answered[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert answered[-2:] == ["-d", "@-"]


def test_the_example_names_the_key_only_where_one_is_needed() -> None:
    assert "Authorization" not in example_line("http://h:1")
    assert "Authorization: Bearer YOUR_KEY" in shlex.split(example_line("http://h:1", needs_key=True))
