"""What the playground page stands on: the page itself, the list of methods, the map of kept tokens."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import openai
import pytest
from kvtest.router import SPEC
from kvtest.text_models import CHATML, THINKING, make_text_model

from kvferry.models import CALIBRATION_TEXT
from kvferry.shared.compression.presets import method_names
from kvferry.shared.model.tokenizer import ChatTokenizer

BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "the red castle ."}],
    "max_tokens": 2,
}


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_the_page_is_whole_and_its_policy_allows_its_own_parts_only(
    start_stack: Any, path: str
) -> None:
    stack = await start_stack()
    response = await stack.http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"""(src|href|action)=["']?(https?:)?//""", response.text)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy


@pytest.mark.parametrize("path", ["/", "/example", "/docs", "/openapi.json"])
async def test_pages_are_open_where_there_are_keys(start_stack: Any, path: str) -> None:
    """They were locked wherever there are keys beyond loopback, so always in Compose and Kubernetes."""
    stack = await start_stack(api_keys="key-a", metrics_access="key")
    assert (await stack.http.get("/metrics")).status_code == 401
    assert (await stack.http.get(path)).status_code == 200


async def test_the_example_is_a_request_that_the_router_takes(stack: Any) -> None:
    example = (await stack.http.get("/example")).json()
    assert example["model"] == "demo"
    assert 1900 < len(example["messages"][0]["content"].split()) < 2100
    assert example["kv_compression"]["token_budget"] < 512
    _, question = example["messages"][0]["content"].split("\n\n")
    assert question.endswith("?")
    answer = await stack.http.post("/v1/chat/completions", json={**example, "max_tokens": 2})
    # The scripted model's context is shorter than the example; everything before that accepted the request.
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_a_model_that_reads_any_text_is_asked_about_a_story(start_stack: Any, tmp_path: Path) -> None:
    """The story and the answer's limit fit into the context."""
    whole = (CALIBRATION_TEXT / "engineers-thumb.txt").read_text("utf-8")
    fact = "The ferry to Kvitsund leaves at 16:45 from pier 7."
    tokenizers = [
        ChatTokenizer.load(make_text_model(tmp_path / name, template=template))
        for name, template in (("plain", CHATML), ("thinking", THINKING))
    ]
    for tokenizer, length, limit in (
        (tokenizers[0], 400, 100),
        (tokenizers[0], 2048, 128),
        (tokenizers[0], 32768, 128),
        (tokenizers[1], 32768, 1024),
    ):
        stack = await start_stack(tokenizer=tokenizer, spec=replace(SPEC, max_model_len=length))
        example = (await stack.http.get("/example")).json()
        *paragraphs, question = example["messages"][0]["content"].split("\n\n")
        paragraphs.remove(fact)
        story = "\n\n".join(paragraphs)
        assert whole.startswith(story)
        assert story.endswith(".")
        assert min(7000, 1.5 * length) < len(story) <= min(8000, 2 * length)
        assert question == "When does the ferry to Kvitsund leave?"
        assert example["max_tokens"] == limit
        assert example["kv_compression"] == {"method": "rdkv", "token_budget": 128}


async def test_the_example_names_the_method_of_the_server(start_stack: Any) -> None:
    stack = await start_stack(default_method="full", allowed_methods="full")
    assert (await stack.http.get("/example")).json()["kv_compression"] == {"method": "full"}


def test_the_page_has_a_line_about_every_method() -> None:
    text = (files("kvferry.services.router.playground") / "methods.js").read_text("utf-8")
    named = re.findall(r'^    "?([a-z0-9-]+)"?: "', text, re.MULTILINE)
    assert sorted(named) == sorted(method_names())


async def test_methods_are_those_a_request_may_name(start_stack: Any) -> None:
    stack = await start_stack(default_retention=0.7)
    listed = (await stack.http.get("/v1/methods")).json()
    assert listed["object"] == "list"
    assert [method["id"] for method in listed["data"]] == list(method_names())
    assert [(m["id"], m["retention"]) for m in listed["data"] if m["default"]] == [("rdkv", 0.7)]
    fewer = await start_stack(api_keys="key-a", allowed_methods="full,rdkv")
    assert (await fewer.http.get("/v1/methods")).status_code == 401
    listed = (await fewer.http.get("/v1/methods", headers={"Authorization": "Bearer key-a"})).json()
    assert [method["id"] for method in listed["data"]] == ["full", "rdkv"]


async def test_a_request_that_asks_gets_the_map_of_kept_tokens(start_stack: Any) -> None:
    stack = await start_stack()
    answer = await stack.client.chat.completions.create(**BODY, extra_body={"kv_kept_bins": 3})
    assert answer.kv["kept"] == [0.0, 0.5, 1.0]
    assert answer.kv["kept_by_layer"] == [[0.0, 0.5, 1.0]]
    assert "kept" not in (await stack.client.chat.completions.create(**BODY)).kv


@pytest.mark.parametrize("bins", [0, 4097, 1.5, "many"])
async def test_the_number_of_bins_is_checked(start_stack: Any, bins: Any) -> None:
    stack = await start_stack()
    with pytest.raises(openai.BadRequestError) as refused:
        await stack.client.chat.completions.create(**BODY, extra_body={"kv_kept_bins": bins})
    assert refused.value.param == "kv_kept_bins"
