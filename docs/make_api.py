"""Writes docs/api.md from FastAPI's description of the API and from the control protocol.

python docs/make_api.py docs/api.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvferry.models import DEMO_MODEL
from kvferry.services.router.app import create_app
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.server import grpc_pools
from kvferry.shared.model.tokenizer import ChatTokenizer

INTRODUCTION = """# API reference

Made by `docs/make_api.py` from the routes' types and `proto/control.proto`; a test compares it.
The running server has the HTTP part at `/openapi.json`, and as a page at `/docs`.

Errors have OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, and Anthropic's below
`/v1/messages`. With keys configured, every path wants `Authorization: Bearer KEY` or `X-API-Key: KEY`,
but for `/health`, `/ready` and the pages `/`, `/example`, `/docs` and `/openapi.json`; `/metrics`
follows `--metrics-access`. `X-Request-ID` is honoured and echoed; `traceparent` is continued.
"""
_MESSAGE = re.compile(r"^(message|enum|service) (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)


def main(target: Path) -> None:
    target.write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *_http(openapi_document()), *_control(), ""])


def openapi_document() -> dict[str, Any]:
    """Return the description as the running server has it."""
    config = RouterConfig()
    prefill, decode = grpc_pools(config)
    app = create_app(config, prefill=prefill, decode=decode, tokenizer=ChatTokenizer.load(DEMO_MODEL))
    return app.openapi()


# ---- HTTP ------------------------------------------------------------------------------------------------


def _http(document: dict[str, Any]) -> Iterator[str]:
    yield "## HTTP\n"
    yield "| | path | what | body |"
    yield "|---|---|---|---|"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
            link = f"[{name}](#{name.lower()})" if name else ""
            yield f"| {method.upper()} | `{path}` | {operation['summary']} | {link} |"
    yield ""
    for name, schema in document["components"]["schemas"].items():
        yield from _schema(name, schema)


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n"
    if description := schema.get("description"):
        yield f"{' '.join(description.split())}\n"
    yield "| field | type | allowed |"
    yield "|---|---|---|"
    required = schema.get("required", ())
    for field, rule in schema.get("properties", {}).items():
        label = f"`{field}`, required" if field in required else f"`{field}`"
        types, limits = _rule(rule)
        yield f"| {label} | {' or '.join(types)} | {'; '.join(limits)} |"
    yield ""


def _rule(rule: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the types and limits of one field, each once, null left out."""
    types: dict[str, None] = {}
    limits: dict[str, None] = {}
    for choice in rule.get("anyOf", [rule]):
        kind = _type(choice)
        if kind != "null":
            types[kind] = None
        for limit in _limits(choice):
            limits[limit] = None
    return list(types), list(limits)


def _type(rule: dict[str, Any]) -> str:
    if "$ref" in rule:
        name = rule["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if rule.get("type") == "array":
        return f"list of {' or '.join(_rule(rule.get('items', {}))[0])}"
    if "enum" in rule or "const" in rule:
        return "string"
    kind = rule.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _limits(rule: dict[str, Any]) -> Iterator[str]:
    words = (
        ("minimum", "at least {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "at most {}"),
        ("exclusiveMaximum", "below {}"),
        ("minLength", "at least {} characters"),
        ("maxLength", "at most {} characters"),
        ("minItems", "at least {} items"),
        ("maxItems", "at most {} items"),
    )
    for key, text in words:
        if key in rule:
            yield text.format(rule[key])
    values = rule.get("enum", [rule["const"]] if "const" in rule else [])
    if values:
        yield ", ".join(f"`{value}`" for value in values)


# ---- control ---------------------------------------------------------------------------------------------


def _control() -> Iterator[str]:
    source = (files("kvferry.proto") / "control.proto").read_text("utf-8")
    yield "## Control (gRPC)\n"
    yield "Between router and workers; [BLOCKS.md](../proto/BLOCKS.md) has what prefill ships to decode.\n"
    for kind, name, body in _MESSAGE.findall(source):
        yield f"### {kind} {name}\n"
        yield f"```proto\n{body.rstrip()}\n```\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
