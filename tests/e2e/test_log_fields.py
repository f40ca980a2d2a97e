"""Every field of the router's log is documented."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from kvtest.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def _requests(log: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for line in log.read_text().splitlines(keepends=True)
        if line[:1] == "{" and line[-1] == "\n"
    ]
    return [line for line in lines if line["event"] == "request" and "completions" in line["path"]]


def test_lines_of_requests_have_documented_fields_and_no_text(start_stack: Callable[..., Any]) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Log fields")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`([a-z_]+)`", section))
    body = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "quiet bridge"}]}
    with start_stack("--log-level", "info", "--in-process") as stack:
        for changed in ({}, {"session_id": "a", "stream": True}, {"max_tokens": 0}, {"model": "none"}):
            httpx.post(f"{stack.base_url}/v1/chat/completions", json=body | changed, timeout=60)
        # A request is logged after its answer has been sent.
        until(lambda: len(_requests(stack.log_path)) >= 4)
        requests = _requests(stack.log_path)
    assert [line["status"] for line in requests] == [200, 200, 400, 404]
    assert {"kv", "ttft_ms", "replays", "reason", "param"} <= {name for line in requests for name in line}
    for line in requests:
        assert line.keys() <= documented
        assert "bridge" not in json.dumps(line)
