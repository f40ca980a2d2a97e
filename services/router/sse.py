"""Server-sent events: the bytes of a stream, and the comment that keeps it open while nothing else goes out.

Knows nothing of completions.
"""

from __future__ import annotations

import json
from typing import Any

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One `data:` event; JSON escapes line ends, so it is always one line."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
