"""The router's table of malformed requests, sent to the real stack, which keeps serving."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest

_path = Path(__file__).parents[1] / "services" / "router" / "test_malformed_requests.py"
_spec = importlib.util.spec_from_file_location("kvferry_malformed_requests", _path)
assert _spec is not None
assert _spec.loader is not None
_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_table)
# The same tests, collected here a second time with this folder's `base_url`.
globals().update({name: value for name, value in vars(_table).items() if name.startswith("test_")})


@pytest.fixture
def base_url(stack: Any) -> str:
    return stack.base_url


def test_the_stack_still_serves_afterwards(base_url: str) -> None:
    response = httpx.post(
        f"{base_url}/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
        timeout=60,
    )
    assert response.status_code == 200, response.text
