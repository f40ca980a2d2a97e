"""The HTTP routes of what a key has stored: its sessions and its documents."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from kvferry.services.router.api.answers import Deleted, Document, Forgotten, Listing, Session
from kvferry.services.router.api.completions import Shared, keyed_router
from kvferry.services.router.completion import documents
from kvferry.services.router.completion.services import Services
from kvferry.services.router.sessions.record import SessionFile, SessionSummary, is_session_id, session_key
from kvferry.services.router.sessions.store import DOCUMENT_PREFIX, document_key, is_document
from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.errors import DocumentNotFound, InvalidRequest, KvferryError, SessionNotFound

_WORKER_CALL_TIMEOUT_S = 2.0
_DELETED_AT_ONCE = 16

router = keyed_router()


@router.get("/v1/sessions", response_model=Listing[Session], summary="The key's sessions")
async def list_sessions(request: Request, services: Shared) -> Any:
    return await _listing(services, request.state.owner, documents=False)


@router.post(
    "/v1/sessions/import",
    response_model=Session,
    summary="Make a session from a file; ?session_id= gives it another id",
)
async def import_session(
    request: Request, services: Shared, body: SessionFile, session_id: str | None = None
) -> Any:
    name = body.id if session_id is None else session_id
    key = session_key(request.state.owner, name, param="session_id")
    record = body.record(services.runner.model())
    async with services.sessions.lease(key) as lease:
        if lease.record is not None:
            raise InvalidRequest(
                f"There is a session {key.session_id!r} already; delete it, or give another ?session_id=",
                param="session_id",
            )
        await services.sessions.check_quota(lease, services.config, record)
        await lease.commit(record)
    return await _one(services, key)


@router.get("/v1/sessions/{session_id}/export", response_model=SessionFile, summary="A session as one file")
async def export_session(request: Request, services: Shared, session_id: str) -> Response:
    key = _named_session(request, suffix="/export")
    file = SessionFile.of(key, await services.sessions.get(key), services.runner.model().name)
    headers = {"content-disposition": f'attachment; filename="{key.session_id}.json"'}
    return JSONResponse(file.model_dump(), headers=headers)


@router.get("/v1/sessions/{session_id:path}", response_model=Session, summary="One session")
async def get_session(request: Request, services: Shared, session_id: str) -> Any:
    return await _one(services, _named_session(request))


@router.delete("/v1/sessions/{session_id:path}", summary="Delete a session and its KV in every tier")
async def delete_session(request: Request, services: Shared, session_id: str) -> Deleted:
    return await _delete(services, _named_session(request))


@router.post("/v1/documents", response_model=Document, summary="Prefill a document for sessions")
async def create_document(request: Request, services: Shared, body: documents.DocumentRequest) -> Any:
    key = document_key(request.state.owner, body.id or f"doc-{secrets.token_hex(8)}")
    await documents.create(services, key, body, request.state.work, request.state.record.request_id)
    return await _one(services, key)


@router.get("/v1/documents", response_model=Listing[Document], summary="The key's documents")
async def list_documents(request: Request, services: Shared) -> Any:
    return await _listing(services, request.state.owner, documents=True)


@router.get("/v1/documents/{document_id:path}", response_model=Document, summary="One document")
async def get_document(request: Request, services: Shared, document_id: str) -> Any:
    return await _one(services, _named_document(request))


@router.delete("/v1/documents/{document_id:path}", summary="Delete a document")
async def delete_document(request: Request, services: Shared, document_id: str) -> Deleted:
    return await _delete(services, _named_document(request))


@router.delete("/v1/keys/{key_hash}/data", summary="Delete all that an API key stored; needs a key for admin")
async def forget_key(request: Request, services: Shared, key_hash: str) -> Forgotten:
    request.app.state.auth.check_admin(request.headers)
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", key_hash):
        raise InvalidRequest(
            f"key_hash is {key_hash[:140]!r}; it must be the sha256:... of a key", param="key_hash"
        )
    owner, counts = key_hash.removeprefix("sha256:"), {"sessions": 0, "documents": 0}
    for kind in counts:
        found = [key for key, _ in await services.sessions.owned_by(owner, documents=kind == "documents")]
        for first in range(0, len(found), _DELETED_AT_ONCE):
            some = found[first : first + _DELETED_AT_ONCE]
            counts[kind] += sum(await asyncio.gather(*(_delete_if_there(services, key) for key in some)))
    for key in services.implicit.remove_owner(owner):
        await services.runner.drop(key)
    return {
        "object": "key.forgotten",
        "hash": key_hash,
        "sessions": counts["sessions"],
        "documents": counts["documents"],
    }


async def _delete_if_there(services: Services, key: SessionKey) -> bool:
    try:
        await _delete(services, key)
    except (SessionNotFound, DocumentNotFound):  # by another request, since it was listed
        return False
    return True


# Ids are read from the path itself, because the framework's pattern drops a trailing newline.


def _named_session(request: Request, *, suffix: str = "") -> SessionKey:
    session_id = request.scope["path"].removeprefix("/v1/sessions/").removesuffix(suffix)
    return session_key(request.state.owner, session_id, param="session_id")


def _named_document(request: Request) -> SessionKey:
    document_id: str = request.scope["path"].removeprefix("/v1/documents/")
    if not is_session_id(document_id):
        raise DocumentNotFound(f"There is no document {document_id[:140]!r}")
    return document_key(request.state.owner, document_id)


async def _listing(services: Services, owner: str, *, documents: bool) -> dict[str, Any]:
    found = await services.sessions.owned_by(owner, documents=documents)
    data = await asyncio.gather(*(_described(services, key, summary) for key, summary in found))
    return {"object": "list", "data": data}


async def _one(services: Services, key: SessionKey) -> Session | Document:
    return await _described(services, key, (await services.sessions.get(key)).summary)


async def _delete(services: Services, key: SessionKey) -> Deleted:
    await services.sessions.delete(key)
    await services.runner.drop(key)
    name = key.session_id.removeprefix(DOCUMENT_PREFIX)
    return {
        "id": name,
        "object": "document.deleted" if is_document(key) else "session.deleted",
        "deleted": True,
    }


async def _described(services: Services, key: SessionKey, summary: SessionSummary) -> Session | Document:
    address = summary.prefill_addresses[0] if summary.prefill_addresses else ""
    history = HistoryInfo(num_tokens=0, size_bytes=0, tier="none")
    # The worker that had the last turn; while it is down, its history cannot be used.
    if (worker := services.runner.prefill.worker(address)) is not None:
        with contextlib.suppress(KvferryError):
            history = await worker.client.session_info(key, timeout_s=_WORKER_CALL_TIMEOUT_S)
    if is_document(key):
        return Document(
            id=key.session_id.removeprefix(DOCUMENT_PREFIX),
            object="document",
            tokens=summary.num_tokens,
            stored_bytes=summary.size_bytes,
            history_bytes=history.size_bytes,
            history_tier=history.tier,
            kv_compression=summary.compression,
            created_at=int(summary.created_at_s),
            expires_at=int(summary.expires_at_s),
        )
    return Session(
        id=key.session_id,
        object="session",
        tokens=summary.num_tokens,
        stored_bytes=summary.size_bytes,
        turns=summary.turns,
        running=services.sessions.is_running(key),
        history_bytes=history.size_bytes,
        history_tier=history.tier,
        last_plan=summary.last_plan,
        expires_at=int(summary.expires_at_s),
    )
