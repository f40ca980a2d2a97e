"""What `kvferry serve` prints."""

from __future__ import annotations

import io
import json
import shlex

from rich.console import Console

from kvferry.services.launcher.display import Display, curl_line

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
    assert "http://127.0.0.1:9101/metrics (prefill)" in text
    assert "http://127.0.0.1:9102/metrics (decode)" in text
    assert "https://127.0.0.1:9102/metrics (decode)" in shown(with_certs=True)
    assert "https://127.0.0.1:8000/v1\n" in shown(scheme="https")


def test_curl_line_is_one_whole_line_however_narrow_the_terminal() -> None:
    (line,) = (line for line in shown().splitlines() if line.startswith("curl"))
    words = shlex.split(line)
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    body = json.loads(words[words.index("-d") + 1])
    assert body["session_id"]
    assert body["model"] == "demo"


def test_curl_line_names_the_key_only_where_one_is_needed() -> None:
    assert "Authorization" not in curl_line("http://h:1", "demo")
    assert "Authorization: Bearer YOUR_KEY" in shlex.split(curl_line("http://h:1", "it's", needs_key=True))
