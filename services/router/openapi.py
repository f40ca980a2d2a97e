"""The API's description in OpenAPI 3.1, made of the types that requests are checked with.

Served at `/openapi.json`. Describes; `schemas.py` and the routes decide.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvferry.services.router.schemas import ChatRequest, DocumentRequest, TextRequest
from kvferry.services.router.session_file import SessionFile

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "ChatRequest": ChatRequest,
    "TextRequest": TextRequest,
    "DocumentRequest": DocumentRequest,
    "SessionFile": SessionFile,
}
_OPERATIONS: tuple[tuple[str, str, str, str], ...] = (
    # method, path, what it does, body
    ("post", "/v1/chat/completions", "Answer a conversation, streamed or not", "ChatRequest"),
    ("post", "/v1/completions", "Continue a text, streamed or not", "TextRequest"),
    ("get", "/v1/models", "The model that is served", ""),
    ("get", "/v1/models/{model}", "One model", ""),
    ("get", "/v1/methods", "The compression methods that requests may name", ""),
    ("get", "/v1/sessions", "The key's sessions", ""),
    ("get", "/v1/sessions/{session_id}", "One session", ""),
    ("delete", "/v1/sessions/{session_id}", "Forget a session and its KV in every tier", ""),
    ("get", "/v1/sessions/{session_id}/export", "A session as one file", ""),
    (
        "post",
        "/v1/sessions/import",
        "Make a session of a file; ?session_id= names it otherwise",
        "SessionFile",
    ),
    ("post", "/v1/documents", "Run a document that sessions may begin with", "DocumentRequest"),
    ("get", "/v1/documents", "The key's documents", ""),
    ("get", "/v1/documents/{document_id}", "One document", ""),
    ("delete", "/v1/documents/{document_id}", "Forget a document", ""),
    ("get", "/", "The playground page", ""),
    ("get", "/health", "Whether the server is alive", ""),
    ("get", "/ready", "Whether work goes through", ""),
    ("get", "/metrics", "Prometheus metrics", ""),
    ("get", "/version", "Versions of the package and of its protocol", ""),
)
_OPEN = ("/health", "/ready")


def openapi_document() -> dict[str, Any]:
    """The description, as JSON has it."""
    _, schemas = models_json_schema([(body, "validation") for body in _BODIES.values()], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, body in _OPERATIONS:
        paths.setdefault(path, {})[method] = _operation(path, summary, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": version("kvferry")},
        "paths": paths,
        "security": [{}, {"key": []}],
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, summary: str, body: str) -> dict[str, Any]:
    error = {"description": "error", "content": _json("Error")}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "done"}}}
    if path not in _OPEN:
        operation["responses"]["default"] = error
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=schema)}}}


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
