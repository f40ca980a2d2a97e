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


async def test_answers_have_the_types_that_it_says(stack: Any) -> None:
    document = (await stack.http.get("/openapi.json")).json()

    def described(method: str, path: str, status: str) -> set[str]:
        return set(document["paths"][path][method]["responses"][status]["content"])

    pages = [
        path for path, operations in document["paths"].items() if "get" in operations and "{" not in path
    ]
    assert {"/", "/docs", "/metrics", "/health"} <= set(pages)
    for path in pages:
        content_type = (await stack.http.get(path)).headers["content-type"].partition(";")[0]
        assert described("get", path, "200") == {content_type}, path
        assert described("get", path, "default") == {"application/json"}, path
    asked = {"model": "demo", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "the red castle ."}]}
    for path, fields in {
        "/v1/chat/completions": asked | chat,
        "/v1/completions": {**asked, "prompt": "the red castle ."},
        "/v1/messages": asked | chat,
        "/v1/responses": {"model": "demo", "input": "the red castle .", "max_output_tokens": 2},
    }.items():
        types = set()
        for stream in (False, True):
            answer = await stack.http.post(path, json={**fields, "stream": stream})
            assert answer.status_code == 200, answer.text
            types.add(answer.headers["content-type"].partition(";")[0])
        assert described("post", path, "200") == types, path
