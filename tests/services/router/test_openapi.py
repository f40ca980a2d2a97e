"""FastAPI's description of the API names exactly the routes that there are, and the fields of requests."""

from __future__ import annotations

from typing import Any

from kvferry.services.router.completion.requests import ChatRequest


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


async def test_it_is_served_and_its_paths_are_routes(stack: Any) -> None:
    served = (await stack.http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/sessions/{session_id}", "/v1/documents", "/health"} <= set(
        served["paths"]
    )
    for path, operations in served["paths"].items():
        for method in operations:
            response = await stack.http.request(method, path.replace("{", "x").replace("}", ""))
            body = response.json() if "json" in response.headers["content-type"] else {}
            message = body.get("error", {}).get("message", "") if isinstance(body, dict) else ""
            assert response.status_code != 405, (method, path)
            assert not message.startswith("There is nothing at"), (method, path)


async def test_every_reference_resolves_and_every_field_is_there(stack: Any) -> None:
    document = (await stack.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    names = {reference.rpartition("/")[2] for reference in references(document)}
    assert {"ChatRequest", "SessionFile", "ErrorBody", "ChatCompletion", "KvReport"} <= names <= set(schemas)
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
    temperature = schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0, "maximum": 2}


async def test_the_docs_page_shows_it(stack: Any) -> None:
    page = await stack.http.get("/docs")
    assert page.status_code == 200
    assert "/openapi.json" in page.text


async def test_the_description_follows_the_metrics_option(start_stack: Any) -> None:
    stack = await start_stack(api_keys="key-a", metrics_access="key")
    for path in ("/openapi.json", "/docs", "/example"):
        assert (await stack.http.get(path)).status_code == 401
