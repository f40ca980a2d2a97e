"""The router's two pages: the playground, which calls this router as any client does, and the API's
description.

A page loads nothing from elsewhere: its style and scripts are inserted into it, and its content security
policy lets nothing else run. It asks the router for models, methods, sessions or `/openapi.json`.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Literal

from starlette.responses import Response

_SCRIPTS = {
    "playground": (
        *("markdown.js", "messages.js", "turns.js", "kept.js", "documents.js"),
        *("conversations.js", "compare.js", "playground.js"),
    ),
    "docs": ("docs.js",),
}


@cache
def _page(name: Literal["playground", "docs"]) -> tuple[bytes, str]:
    """Return the page, and its Content-Security-Policy: its own style and script by their digests."""
    folder = files(__name__)
    page, style, *scripts = (
        (folder / file).read_text("utf-8") for file in (f"{name}.html", "style.css", *_SCRIPTS[name])
    )
    script = "".join(scripts)
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).encode(), policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_response(name: Literal["playground", "docs"]) -> Response:
    page, policy = _page(name)
    return Response(
        page,
        media_type="text/html; charset=utf-8",
        headers={
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )
