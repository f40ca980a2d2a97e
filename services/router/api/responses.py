"""POST /v1/responses: OpenAI's Responses API over the completion that chats use, and its stored responses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from kvferry.services.router.api.answers import DeletedResponse, ResponseObject
from kvferry.services.router.api.completions import STREAMED, Shared, begin, keyed_router, named_model
from kvferry.services.router.api.response_answer import (
    OutputItems,
    ResponsesAnswer,
    ended,
    head_of,
    response_of_item,
)
from kvferry.services.router.completion.chain import (
    SESSION_PREFIX,
    ResponseChain,
    new_response_id,
    new_session_id,
    session_id_of,
)
from kvferry.services.router.completion.responses import INPUT_ITEM, ItemReference, ResponseRequest, translate
from kvferry.services.router.completion.services import Services
from kvferry.services.router.sessions.record import SessionRecord, StoredResponse, is_session_id
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest, NotFound, ResponseNotFound, SessionNotFound
from kvferry.shared.model.chat_template import ChatMessage

router = keyed_router()

_FILLED = 7 / 8
"""Of a key's bytes, where a conversation begins: the rest is for its turns."""


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=STREAMED,
    summary="Answer as OpenAI's Responses API does",
)
async def create_response(request: Request, services: Shared, body: ResponseRequest) -> Response:
    body = body.model_copy(update={"model": named_model(services, body.model).name})
    owner, previous_id, session_id = request.state.owner, body.previous_response_id, new_session_id()
    previous: SessionRecord | None = None
    before: tuple[ChatMessage, ...] = ()
    continues = False
    if previous_id is not None:
        previous, stored = await _stored(services, owner, previous_id)
        before = previous.conversation(stored)
        continues = body.is_stored and previous.responses[-1].id == previous_id
        if continues:
            session_id = session_id_of(previous_id)
        if previous.document_ids and body.document_ids is None:
            body = body.model_copy(update={"document_ids": list(previous.document_ids)})
            body.model_fields_set.add("document_ids")
    body = await _with_items(services, owner, body)
    # In a thread, because a chat's fields are read again: thousands of items take tens of milliseconds.
    chat, names = await request.state.work(partial(translate, body, before))
    session = SessionKey(owner=owner, session_id=session_id) if body.is_stored else None
    if session is not None and not continues:
        await _make_room(services, owner)
    head = head_of(body, new_response_id(session_id))
    items = OutputItems(response_id=head["id"], namespaced=body.namespaced)
    chain = ResponseChain(
        response_id=head["id"],
        previous=previous,
        continues=continues,
        num_instructions=int(bool(body.instructions)),
        describe=partial(ended, head, items),
    )
    completion = begin(request, services, chat, session, names=names, chain=chain)
    return ResponsesAnswer(completion, request, names, head=head, items=items, chain=chain)


@router.get("/v1/responses/{response_id}", response_model=ResponseObject, summary="A stored response")
async def get_response(request: Request, services: Shared, response_id: str) -> Response:
    _, stored = await _stored(services, request.state.owner, response_id)
    return JSONResponse(json.loads(stored.body))


@router.delete(
    "/v1/responses/{response_id}", summary="Delete a response, and its conversation with the last one"
)
async def delete_response(request: Request, services: Shared, response_id: str) -> DeletedResponse:
    key = _session_key(request.state.owner, response_id)
    async with services.sessions.lease(key) as lease:
        if lease.record is None or lease.record.response(response_id) is None:
            raise _unknown(response_id)
        rest = tuple(other for other in lease.record.responses if other.id != response_id)
        if rest:
            await lease.commit(replace(lease.record, responses=rest))
    if not rest:
        await services.sessions.delete(key)
        await services.runner.drop(key)
    return {"id": response_id, "object": "response", "deleted": True}


def _unknown(response_id: str) -> NotFound:
    return ResponseNotFound(
        f"There is no response {response_id!r}; it was not stored, or has been deleted or has expired",
        param="previous_response_id",
    )


def _session_key(owner: str, response_id: str) -> SessionKey:
    session_id = session_id_of(response_id)
    if not (response_id.startswith(SESSION_PREFIX) and is_session_id(session_id)):
        raise _unknown(response_id)
    return SessionKey(owner=owner, session_id=session_id)


async def _stored(services: Services, owner: str, response_id: str) -> tuple[SessionRecord, StoredResponse]:
    """Return the record that a response is in, and the response.

    Raises: ResponseNotFound, StoreUnavailable.
    """
    try:
        record = await services.sessions.get(_session_key(owner, response_id))
    except SessionNotFound:
        raise _unknown(response_id) from None
    if (stored := record.response(response_id)) is None:
        raise _unknown(response_id)
    return record, stored


async def _with_items(services: Services, owner: str, body: ResponseRequest) -> ResponseRequest:
    """Return the request with the items that its input refers to.

    Raises: InvalidRequest where one is not stored.
    """
    if isinstance(body.input, str):
        return body
    outputs: dict[str, list[dict[str, Any]]] = {}
    items: list[Any] = []
    for index, item in enumerate(body.input):
        if isinstance(item, ItemReference):
            response_id = response_of_item(item.id)
            if response_id not in outputs:
                outputs[response_id] = await _output_of(services, owner, response_id)
            found = [output for output in outputs[response_id] if output["id"] == item.id]
            if not found:
                param = f"input[{index}].id"
                raise InvalidRequest(f"{param} is {item.id!r}; no stored response has that item", param=param)
            item = INPUT_ITEM.validate_python(found[0])
        items.append(item)
    return body.model_copy(update={"input": items})


async def _output_of(services: Services, owner: str, response_id: str) -> list[dict[str, Any]]:
    """Return the items of a stored response's answer; none if it is not stored."""
    try:
        _, stored = await _stored(services, owner, response_id)
    except NotFound:
        return []
    output: list[dict[str, Any]] = json.loads(stored.body)["output"]
    return output


async def _make_room(services: Services, owner: str) -> None:
    """Delete the key's longest idle responses if it is at its limit of sessions or near that of their bytes.

    Clients of this API may not know that they store any.
    """
    found = await services.sessions.owned_by(owner, documents=False)
    excess = len(found) + 1 - services.config.max_sessions_per_key
    max_bytes = services.config.max_stored_bytes_per_key
    excess_bytes = sum(summary.size_bytes for _, summary in found) - max_bytes * _FILLED if max_bytes else 0
    idle = sorted(
        (summary.expires_at_s, key.session_id, key, summary.size_bytes)
        for key, summary in found
        if key.session_id.startswith(SESSION_PREFIX) and not services.sessions.is_running(key)
    )
    for _, _, key, size_bytes in idle:
        if excess <= 0 and excess_bytes <= 0:
            return
        excess, excess_bytes = excess - 1, excess_bytes - size_bytes
        try:
            await services.sessions.delete(key)
        except SessionNotFound:
            continue  # another request was faster
        await services.runner.drop(key)
