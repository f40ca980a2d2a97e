"""The router's two pages: the playground, which calls this router as any client does, and the API's
description.

A page loads nothing from elsewhere: the files that its tags name are inserted into it, and its content
security policy lets nothing else run. It asks the router for models, methods, sessions or `/openapi.json`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Literal

from starlette.responses import Response

_INSERTED = re.compile(r"<(style|script)>/\*(.*?)\*/", re.DOTALL)


@cache
def _page(name: Literal["playground", "docs"]) -> tuple[bytes, str]:
    """Return the page, and its Content-Security-Policy: its own style and script by their digests."""
    folder = files(__name__)
    digests: dict[str, str] = {}

    def insert(match: re.Match[str]) -> str:
        text = "".join((folder / file).read_text("utf-8") for file in match[2].split())
        digest = hashlib.sha256(text.encode()).digest()
        digests[match[1]] = f"'sha256-{base64.b64encode(digest).decode()}'"
        return f"<{match[1]}>{text}"

    page = _INSERTED.sub(insert, (folder / f"{name}.html").read_text("utf-8"))
    policy = (
        f"default-src 'none'; style-src {digests['style']}; script-src {digests['script']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


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
