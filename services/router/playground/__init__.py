"""The playground: one self-contained page that calls this router as any client does.

`style.css` and `app.js` are inserted into `page.html`. The page loads nothing from elsewhere, and its content
security policy lets nothing else run. It asks the router for models, methods and sessions.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from starlette.responses import Response


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the Content-Security-Policy that fits it: its own style and script by their digests."""
    folder = files(__name__)
    text = {name: (folder / name).read_text("utf-8") for name in ("page.html", "style.css", "app.js")}
    style, script = text["style.css"], text["app.js"]
    page = text["page.html"].replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_response() -> Response:
    """GET /."""
    page, policy = _page()
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
