"""Documents over HTTP: running one, beginning sessions with it, and whose they are."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from kvtest.router import SPEC

A, B = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}
TEXT = "the pin of the red castle is 4 2 7 1 . the quiet doctor visited the green market ."
QUESTION = {"role": "user", "content": "what is the pin of the red castle ?"}


async def post(stack: Any, headers: dict[str, str] = A, **body: Any) -> Any:
    return await stack.http.post("/v1/documents", headers=headers, json={"text": TEXT, "id": "d", **body})


async def ask(stack: Any, *messages: dict[str, str], client: Any = None, **extra: Any) -> Any:
    return await (client or stack.client).chat.completions.create(
        model="demo",
        messages=list(messages) or [QUESTION],
        temperature=0,
        max_tokens=3,
        extra_body={"session_id": "s", **extra},
    )


def last_request(stack: Any) -> Any:
    return stack.prefill[0].requests[-1]


async def test_a_document_is_run_once_and_begins_sessions(stack: Any) -> None:
    created = (await post(stack)).json()
    run = last_request(stack)
    assert set(created) == {
        "id",
        "object",
        "tokens",
        "stored_bytes",
        "history_bytes",
        "history_tier",
        "kv_compression",
        "created_at",
        "expires_at",
    }
    assert (created["id"], created["object"], created["history_tier"]) == ("d", "document", "memory")
    assert created["tokens"] == len(run.prompt_token_ids)
    assert created["history_bytes"] == len(run.prompt_token_ids) * SPEC.kv_token_bytes
    for session_id in ("s", "t"):
        answer = await ask(stack, session_id=session_id, document_ids=["d"])
        asked = last_request(stack)
        assert asked.document == run.session
        assert asked.prompt_token_ids[: len(run.prompt_token_ids)] == run.prompt_token_ids
        assert answer.kv["reused_tokens"] == created["tokens"]
        assert answer.usage.prompt_tokens > created["tokens"]
    listed = (await stack.http.get("/v1/documents", headers=A)).json()
    assert [entry["id"] for entry in listed["data"]] == ["d"]
    sessions = (await stack.http.get("/v1/sessions", headers=A)).json()
    assert sorted(entry["id"] for entry in sessions["data"]) == ["s", "t"]


async def test_the_session_keeps_its_documents_over_turns_and_their_deletion(stack: Any) -> None:
    await post(stack)
    first = await ask(stack, document_ids=["d"])
    prompt = last_request(stack).prompt_token_ids
    assert (await stack.http.delete("/v1/documents/d", headers=A)).json() == {
        "id": "d",
        "object": "document.deleted",
        "deleted": True,
    }
    assert (await stack.http.get("/v1/documents/d", headers=A)).status_code == 404
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    await ask(stack, {"role": "user", "content": "and the word ?"})
    appended = last_request(stack).prompt_token_ids
    await ask(stack, QUESTION, answer, {"role": "user", "content": "and the word ?"}, session_mode="replace")
    assert appended[: len(prompt)] == prompt
    assert last_request(stack).prompt_token_ids == appended
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(stack, session_id="new", document_ids=["d"])
    assert refused.value.param == "document_ids"


async def test_other_documents_begin_a_session_anew_or_not_at_all(stack: Any) -> None:
    await post(stack)
    await post(stack, id="e", text="the old mill .")
    await ask(stack, document_ids=["d"])
    await ask(stack, {"role": "user", "content": "again ?"}, document_ids=["d"])  # the same ones: nothing new
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(stack, {"role": "user", "content": "and now ?"}, document_ids=["e"])
    assert refused.value.param == "document_ids"
    await ask(stack, session_mode="replace", document_ids=["d", "e"])
    both = last_request(stack).prompt_token_ids
    await ask(stack, session_mode="replace", document_ids=[])
    assert len(last_request(stack).prompt_token_ids) < len(both)


async def test_the_clients_own_system_message_follows_the_documents(stack: Any) -> None:
    run = (await post(stack)).json()["tokens"]
    document = last_request(stack).prompt_token_ids
    system = {"role": "system", "content": "the answer is a number ."}
    answer = await ask(stack, system, QUESTION, document_ids=["d"])
    shared = answer.kv["reused_tokens"]
    assert run - 6 <= shared <= run
    assert last_request(stack).prompt_token_ids[:shared] == document[:shared]
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(stack, QUESTION, {"role": "wizard", "content": "x"}, session_id="w", document_ids=["d"])
    assert refused.value.param == "messages[1].role"


async def test_a_documents_compression_is_its_sessions_default(stack: Any) -> None:
    created = await post(stack, kv_compression={"method": "compactor", "retention": 0.5})
    assert created.json()["kv_compression"] == {"method": "compactor", "retention": 0.5}
    await ask(stack, document_ids=["d"])
    plan = last_request(stack).ticket.plan.plan
    assert (plan.method, plan.budget.retention) == ("compactor", 0.5)
    await ask(stack, session_id="t", document_ids=["d"], kv_compression={"method": "snapkv"})
    assert last_request(stack).ticket.plan.plan.method == "snapkv"


async def test_another_key_sees_no_document(stack: Any) -> None:
    await post(stack)
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(stack, client=stack.keyed("key-b"), document_ids=["d"])
    missing = refused.value.body
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(stack, client=stack.keyed("key-b"), document_ids=["no-such"])
    assert missing["message"].replace("'d'", "'no-such'") == refused.value.body["message"]
    assert (await stack.http.get("/v1/documents", headers=B)).json()["data"] == []
    for method in ("GET", "DELETE"):
        response = await stack.http.request(method, "/v1/documents/d", headers=B)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "document_not_found"
    own = await post(stack, headers=B, text="the silver bridge .")
    assert own.json()["tokens"] < (await post(stack)).json()["tokens"]
    # A session cannot be given a document's name, nor read as one.
    assert (await stack.http.get("/v1/sessions/document/d", headers=A)).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": ""}, "text"),
        ({"text": 5}, "text"),
        ({"id": "a/b"}, "id"),
        ({"tools": []}, "tools"),
        ({"kv_compression": {"method": "none-such"}}, "kv_compression.method"),
        ({"text": "the red castle . " * 200}, "text"),
    ],
)
async def test_bad_documents_are_refused_by_name(stack: Any, body: dict[str, Any], param: str) -> None:
    response = await post(stack, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_bad_references_are_refused(stack: Any) -> None:
    await post(stack)
    for ids in (["d", "d"], ["../d"], [7], "d", ["d"] * 17):
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(stack, document_ids=ids)
        assert refused.value.param is not None
        assert refused.value.param.startswith("document_ids")
    with pytest.raises(openai.BadRequestError) as refused:
        await stack.client.completions.create(model="demo", prompt="x", extra_body={"document_ids": ["d"]})
    assert refused.value.param == "document_ids"


async def test_a_document_has_its_own_ttl_and_pin(stack: Any) -> None:
    created = (await post(stack, ttl_s=90_000, pin=True)).json()
    assert 89_000 < created["expires_at"] - created["created_at"] <= 90_000
    assert list(stack.prefill[0].pins.values()) == [True]


async def test_a_document_waits_in_its_keys_line_by_its_priority(stack: Any) -> None:
    assert (await post(stack, priority=-5)).status_code == 200
    run, placed = last_request(stack), stack.decode[0].requests[-1]
    assert (run.priority, run.owner, placed.owner) == (-5, run.session.owner, run.session.owner)
    await post(stack)
    assert last_request(stack).priority == 0
    refused = await post(stack, priority=1001)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
