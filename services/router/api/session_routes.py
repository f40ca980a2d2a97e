"""The HTTP routes of what a key has stored: its sessions and its documents."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvferry.services.router.api.responses import (
    Deleted,
    Document,
    Listing,
    Session,
    document_object,
    session_object,
)
from kvferry.services.router.api.routes import add_routes, keyed_router
from kvferry.services.router.completion.documents import Documents
from kvferry.services.router.completion.requests import DocumentRequest
from kvferry.services.router.completion.services import Services
from kvferry.services.router.http.api_route import Authenticator
from kvferry.services.router.sessions.file import SessionFile
from kvferry.services.router.sessions.record import SessionSummary, document_key, is_session_id, session_key
from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.errors import DocumentNotFound, InvalidRequest, KvferryError

_WORKER_CALL_TIMEOUT_S = 2.0
_SESSIONS_PATH, _DOCUMENTS_PATH = "/v1/sessions/", "/v1/documents/"
_EXPORT = "/export"


@dataclass(kw_only=True)
class SessionRoutes:
    """Handlers and their dependencies."""

    services: Services
    auth: Authenticator

    def router(self) -> APIRouter:
        router = keyed_router(self.auth)
        session, document = _SESSIONS_PATH + "{session_id:path}", _DOCUMENTS_PATH + "{document_id:path}"
        export, load = _SESSIONS_PATH + "{session_id}" + _EXPORT, _SESSIONS_PATH + "import"
        loaded = "Make a session from a file; ?session_id= gives it another id"
        add_routes(
            router,
            (
                ("GET", "/v1/sessions", self.list_sessions, Listing[Session], "The key's sessions"),
                ("POST", load, self.import_session, Session, loaded),
                ("GET", export, self.export_session, SessionFile, "A session as one file"),
                ("GET", session, self.get_session, Session, "One session"),
                (
                    "DELETE",
                    session,
                    self.delete_session,
                    Deleted,
                    "Delete a session and its KV in every tier",
                ),
                ("POST", "/v1/documents", self.create_document, Document, "Prefill a document for sessions"),
                ("GET", "/v1/documents", self.list_documents, Listing[Document], "The key's documents"),
                ("GET", document, self.get_document, Document, "One document"),
                ("DELETE", document, self.delete_document, Deleted, "Delete a document"),
            ),
        )
        return router

    @property
    def _documents(self) -> Documents:
        return Documents(self.services)

    # ---- sessions ----------------------------------------------------------------------------------------

    async def list_sessions(self, request: Request) -> Listing[Session]:
        found = await self.services.sessions.owned_by(request.state.owner, documents=False)
        data = await asyncio.gather(*(self._session(key, summary) for key, summary in found))
        return {"object": "list", "data": data}

    async def get_session(self, request: Request, session_id: str) -> Session:
        key = _named_session(request)
        return await self._session(key, (await self.services.sessions.get(key)).summary)

    async def delete_session(self, request: Request, session_id: str) -> Deleted:
        key = _named_session(request)
        await self.services.sessions.delete(key)
        await self.services.drop(key)
        return {"id": key.session_id, "object": "session.deleted", "deleted": True}

    async def export_session(self, request: Request, session_id: str) -> Response:
        key = _named_session(request, suffix=_EXPORT)
        file = SessionFile.of(key, await self.services.sessions.get(key), self.services.model().name)
        headers = {"content-disposition": f'attachment; filename="{key.session_id}.json"'}
        return JSONResponse(file.model_dump(), headers=headers)

    async def import_session(
        self, request: Request, body: SessionFile, session_id: str | None = None
    ) -> Session:
        name = body.id if session_id is None else session_id
        key = session_key(request.state.owner, name, param="session_id")
        record = body.record(self.services.model())
        async with self.services.sessions.lease(key) as lease:
            if lease.record is not None:
                raise InvalidRequest(
                    f"There is a session {key.session_id!r} already; delete it, or give another ?session_id=",
                    param="session_id",
                )
            await self.services.check_quota(key, is_new=True, num_tokens=len(record.token_ids))
            await lease.commit(record)
        return await self._session(key, (await self.services.sessions.get(key)).summary)

    async def _session(self, key: SessionKey, summary: SessionSummary) -> Session:
        return session_object(key, summary, await self._history(key, summary))

    async def _history(self, key: SessionKey, summary: SessionSummary) -> HistoryInfo:
        """The history at the worker that had the last turn."""
        address = summary.prefill_addresses[0] if summary.prefill_addresses else ""
        worker = self.services.runner.prefill.worker(address)
        if worker is not None:
            # While that worker is down its history cannot be used.
            with contextlib.suppress(KvferryError):
                return await worker.client.session_info(key, timeout_s=_WORKER_CALL_TIMEOUT_S)
        return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")

    # ---- documents ---------------------------------------------------------------------------------------

    async def create_document(self, request: Request, body: DocumentRequest) -> Document:
        owner, document_id = request.state.owner, body.id or f"doc-{secrets.token_hex(8)}"
        request_id = request.state.record.request_id
        record = await self._documents.create(
            owner, document_id, body, model=self.services.model(), request_id=request_id
        )
        return await self._document(document_key(owner, document_id), record.summary)

    async def list_documents(self, request: Request) -> Listing[Document]:
        found = await self.services.sessions.owned_by(request.state.owner, documents=True)
        data = await asyncio.gather(*(self._document(key, summary) for key, summary in found))
        return {"object": "list", "data": data}

    async def get_document(self, request: Request, document_id: str) -> Document:
        owner, name = request.state.owner, _named_document(request)
        return await self._document(
            document_key(owner, name), (await self._documents.get(owner, name)).summary
        )

    async def delete_document(self, request: Request, document_id: str) -> Deleted:
        name = _named_document(request)
        await self._documents.delete(request.state.owner, name)
        return {"id": name, "object": "document.deleted", "deleted": True}

    async def _document(self, key: SessionKey, summary: SessionSummary) -> Document:
        return document_object(key, summary, await self._history(key, summary))


# Ids are read from the path itself, because the framework's pattern drops a trailing newline.


def _named_session(request: Request, *, suffix: str = "") -> SessionKey:
    session_id = request.scope["path"].removeprefix(_SESSIONS_PATH).removesuffix(suffix)
    return session_key(request.state.owner, session_id, param="session_id")


def _named_document(request: Request) -> str:
    document_id: str = request.scope["path"].removeprefix(_DOCUMENTS_PATH)
    if not is_session_id(document_id):
        raise DocumentNotFound(f"There is no document {document_id[:140]!r}")
    return document_id
