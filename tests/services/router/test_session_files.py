"""Export and import of sessions over HTTP, and the quotas that both obey."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from kvtest.router import say
from kvtest.waiting import eventually
from pydantic import ValidationError

from kvferry.services.router.http.errors import from_framework
from kvferry.services.router.sessions import store
from kvferry.services.router.sessions.record import SessionFile
from kvferry.shared.errors import InvalidRequest

LONG = "the red castle . the old mill . the barn . the bridge . " * 20
A, B = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}


async def export(stack: Any, session_id: str = "s", headers: dict[str, str] = A) -> Any:
    return await stack.http.get(f"/v1/sessions/{session_id}/export", headers=headers)


async def put(stack: Any, file: dict[str, Any], headers: dict[str, str] = A, **query: str) -> Any:
    return await stack.http.post("/v1/sessions/import", json=file, headers=headers, params=query)


async def exported(stack: Any) -> dict[str, Any]:
    """The file of a session of two turns."""
    await say(stack, "the red castle .")
    await say(stack, "what is the pin ?")
    await stack.has_turns("s", 2)
    return (await export(stack)).json()


async def test_an_imported_session_goes_on_as_the_exported_one_would(start_stack: Any) -> None:
    one, other = await start_stack(), await start_stack()
    file = await exported(one)
    assert file["id"] == "s"
    assert file["turns"] == 2
    assert [message["role"] for message in file["messages"]] == ["user", "assistant"] * 2
    response = await put(other, file)
    assert response.status_code == 200
    assert response.json()["tokens"] == len(file["token_ids"])
    assert response.json()["turns"] == 2
    for stack in (one, other):
        await say(stack, "and the word ?")
    prompts = [stack.prefill[0].requests[-1].prompt_token_ids for stack in (one, other)]
    assert prompts[0] == prompts[1]
    assert list(prompts[0][: len(file["token_ids"])]) == file["token_ids"]


async def test_an_import_is_the_importing_keys_own(stack: Any) -> None:
    file = await exported(stack)
    assert (await export(stack, headers=B)).status_code == 404
    assert (await put(stack, file, headers=B)).status_code == 200
    await stack.http.delete("/v1/sessions/s", headers=B)
    assert (await export(stack)).json() == file
    taken = await put(stack, file)
    assert taken.status_code == 400
    assert taken.json()["error"]["param"] == "session_id"
    assert (await put(stack, file, session_id="copy")).json()["id"] == "copy"
    assert (await put(stack, file, session_id="../x")).status_code == 400


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"format": "zip"}, "format"),
        ({"version": 2}, "version"),
        ({"id": "a b"}, "id"),
        ({"model_fingerprint": "another"}, "model_fingerprint"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [704]}, "token_ids"),
        ({"token_ids": [1] * 513}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"messages": []}, "messages"),
        ({"kind": "text"}, "messages"),
        ({"assistant_ends": []}, "assistant_ends"),
        ({"assistant_ends": [9, 3]}, "assistant_ends"),
        ({"assistant_ends": [1, 10_000]}, "assistant_ends"),
        ({"turns": 0}, "turns"),
        ({"messages": [{"role": "user", "content": "a", "fields": "{"}]}, "messages[0].fields"),
        ({"messages": [{"role": "user", "content": "a", "fields": "[]"}]}, "messages[0].fields"),
        ({"messages": [{"role": "user", "content": "a", "fields": '{"b": 1}'}]}, "messages[0].fields"),
        ({"extra": 1}, "extra"),
    ],
)
async def test_a_file_that_does_not_fit_is_refused_by_field(
    stack: Any, change: dict[str, Any], param: str
) -> None:
    file = await exported(stack)
    response = await put(stack, {**file, **change}, session_id="copy")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert (await stack.http.get("/v1/sessions/copy", headers=A)).status_code == 404


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*SessionFile.model_fields, "other"]), _JSON))
def test_any_json_is_read_or_refused(file: dict[str, Any]) -> None:
    try:
        SessionFile.model_validate(file)
    except ValidationError as error:
        wrong = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        refusal = from_framework(RequestValidationError(wrong, body=file), "POST", "/v1/sessions/import")
        assert isinstance(refusal, InvalidRequest)
        assert refusal.param


# ---- quotas ----------------------------------------------------------------------------------------------


async def test_a_key_keeps_so_many_sessions(start_stack: Any) -> None:
    stack = await start_stack(max_sessions_per_key=2)
    file = await exported(stack)
    await say(stack, "the old mill .", "t")
    await stack.has_turns("t", 1)
    with pytest.raises(openai.RateLimitError, match="2 sessions; the limit is 2") as full:
        await say(stack, "the barn .", "u")
    first = (await stack.http.get("/v1/sessions/s", headers=A)).json()["expires_at"] - time.time()
    assert int(full.value.response.headers["retry-after"]) == pytest.approx(first, abs=30)
    assert (await put(stack, file, session_id="u")).status_code == 429
    await say(stack, "the barn .", "t")  # what there is goes on
    await say(stack, "the barn .", "u", client=stack.keyed("key-b"))
    await stack.http.delete("/v1/sessions/s", headers=A)
    await say(stack, "the barn .", "u")


async def test_a_key_keeps_so_many_tokens(start_stack: Any) -> None:
    stack = await start_stack(max_history_tokens_per_key=40)
    await say(stack, "the red castle . the old mill . the barn . the bridge .")
    await stack.has_turns("s", 1)
    with pytest.raises(openai.RateLimitError, match="the limit for all is 40"):
        await say(
            stack, "the red castle . the old mill . the barn . the bridge . the harbor . the school .", "t"
        )
    with pytest.raises(openai.BadRequestError, match="may have 40 together"):
        await say(stack, "the red castle . " * 20, "t")
    document = {"text": "the red castle . " * 20}
    response = await stack.http.post("/v1/documents", json=document, headers=A)
    assert response.status_code == 400


@pytest.fixture(params=["memory", "redis"])
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    """The option that says where sessions are."""
    return {} if request.param == "memory" else {"history_redis": request.getfixturevalue("redis_server").url}


async def test_a_key_stores_so_many_bytes(start_stack: Any, options: dict[str, str]) -> None:
    stack, other = [await start_stack(max_stored_bytes_per_key=4500, **options) for _ in range(2)]
    for name in ("s", "t"):
        await say(stack, LONG, name)
        stored = (await stack.http.get(f"/v1/sessions/{name}", headers=A)).json()["stored_bytes"]
        assert 1500 < stored < 2250
    file = (await export(stack)).json()
    asked = len(stack.prefill[0].requests)
    for name in ("u", "t"):  # a new one, and one that would grow
        with pytest.raises(openai.RateLimitError, match=r"with \d+ bytes .* the limit for all is 4500"):
            await say(other if options else stack, LONG[: len(LONG) // 2], name)
    assert (await put(stack, file, session_id="u")).status_code == 429
    assert len(stack.prefill[0].requests) == asked
    assert len(other.prefill[0].requests) == 0
    await say(stack, LONG, "u", client=stack.keyed("key-b"))
    for status, name in ((200, "d"), (200, "e"), (429, "f"), (200, "e")):
        document = {"text": LONG, "id": name}
        response = await stack.http.post("/v1/documents", json=document, headers=A)
        assert response.status_code == status, response.text
    await stack.http.delete("/v1/sessions/s", headers=A)
    await say(other if options else stack, LONG, "u")


async def test_simultaneous_turns_store_no_more_bytes_than_one_after_another(
    start_stack: Any, options: dict[str, str]
) -> None:
    stack = await start_stack(max_stored_bytes_per_key=4500, **options)
    stack.script.may_prefill.clear()
    turns = [asyncio.create_task(say(stack, LONG, f"s{number}")) for number in range(5)]
    await eventually(lambda: len(stack.prefill[0].requests) == len(turns))
    stack.script.may_prefill.set()
    answers = await asyncio.gather(*turns, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert len(refused) == 3
    assert all("the limit for all is 4500" in str(error) for error in refused)
    await eventually(lambda: stack.num_active == 0 and not stack.prefill[0].staged)
    assert len(stack.prefill[0].history) == 2
    found = (await stack.http.get("/v1/sessions", headers=A)).json()["data"]
    assert sum(session["stored_bytes"] for session in found) <= 4500


async def test_a_record_that_is_too_long_is_refused_by_its_size(
    start_stack: Any, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await start_stack(**options)
    monkeypatch.setattr(store, "MAX_RECORD_BYTES", 1500)
    with pytest.raises(openai.BadRequestError, match=r"with \d+ bytes; one conversation .* may have 1500"):
        await say(stack, LONG)
    document = {"text": LONG}
    assert (await stack.http.post("/v1/documents", json=document, headers=A)).status_code == 400
    assert not stack.prefill[0].requests
    # An answer that is longer than could be known.
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 20}
    ask: Any = {"model": "demo", "input": "the red castle .", **fields}
    with pytest.raises(openai.BadRequestError, match="one conversation or document may have 1500"):
        await stack.client.responses.create(**ask)
    events = [event async for event in await stack.client.responses.create(**ask, stream=True)]
    assert events[-1].type == "response.failed"
    assert "may have 1500" in events[-1].response.error.message
    await eventually(lambda: stack.num_active == 0 and not stack.prefill[0].staged)
    assert stack.prefill[0].history == {}
    assert (await stack.http.get("/v1/sessions", headers=A)).json()["data"] == []


async def test_a_key_keeps_so_many_documents(start_stack: Any) -> None:
    stack = await start_stack(max_documents_per_key=1)
    for status, document_id in ((200, "d"), (429, "e"), (200, "d")):
        response = await stack.http.post(
            "/v1/documents", json={"text": "the old mill .", "id": document_id}, headers=A
        )
        assert response.status_code == status, response.text
