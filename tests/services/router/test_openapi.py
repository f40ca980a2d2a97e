"""The description names exactly the routes that there are, and the fields that requests may have."""

from __future__ import annotations

from typing import Any

from kvferry.services.router.openapi import openapi_document
from kvferry.services.router.schemas import ChatRequest


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


async def test_it_is_served_and_its_paths_are_routes(stack: Any) -> None:
    served = (await stack.http.get("/openapi.json")).json()
    assert served == openapi_document()
    for path, operations in served["paths"].items():
        for method in operations:
            response = await stack.http.request(method, path.replace("{", "x").replace("}", ""))
            body = response.json() if "json" in response.headers["content-type"] else {}
            message = body.get("error", {}).get("message", "") if isinstance(body, dict) else ""
            assert response.status_code != 405, (method, path)
            assert not message.startswith("There is nothing at"), (method, path)


def test_every_reference_resolves_and_every_field_is_there() -> None:
    document = openapi_document()
    schemas = document["components"]["schemas"]
    names = {reference.rpartition("/")[2] for reference in references(document)}
    assert {"ChatRequest", "SessionFile", "Error"} <= names <= set(schemas)
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
