"""The HTTP routes of what a key keeps: its sessions and its documents.

Beside `routes.py`, in the same way: each reads its request, asks the part that knows, and shapes the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvferry.services.router.auth import Authenticator
from kvferry.services.router.completion import CompletionService
from kvferry.services.router.documents import DocumentService
from kvferry.services.router.edge import RequestRecord
from kvferry.services.router.responses import document_object, session_object
from kvferry.services.router.schemas import DocumentRequest, is_session_id
from kvferry.services.router.session_file import SessionFile, exported
from kvferry.services.router.session_record import SessionSummary, document_key
from kvferry.services.router.sessions import SessionStore, session_key
from kvferry.services.router.validation import parse_body, parse_request
from kvferry.shared.control.messages import HistoryInfo, SessionKey
from kvferry.shared.errors import DocumentNotFound, InvalidRequest, KvferryError
from kvferry.shared.model.spec import ModelSpec

_WORKER_CALL_TIMEOUT_S = 2.0
_SESSIONS_PATH, _DOCUMENTS_PATH = "/v1/sessions/", "/v1/documents/"
_EXPORT = "/export"


@dataclass(kw_only=True)
class KeptRoutes:
    """Handlers with what they need.

    Attributes:
        served: the model that the workers hold now.
    """

    auth: Authenticator
    completions: CompletionService
    served: Callable[[], ModelSpec]

    def add_to(self, router: APIRouter) -> None:
        table = (
            ("GET", "/v1/sessions", self.list_sessions),
            ("POST", _SESSIONS_PATH + "import", self.import_session),
            ("GET", _SESSIONS_PATH + "{session_id}" + _EXPORT, self.export_session),
            ("GET", _SESSIONS_PATH + "{session_id:path}", self.get_session),
            ("DELETE", _SESSIONS_PATH + "{session_id:path}", self.delete_session),
            ("POST", "/v1/documents", self.create_document),
            ("GET", "/v1/documents", self.list_documents),
            ("GET", _DOCUMENTS_PATH + "{document_id:path}", self.get_document),
            ("DELETE", _DOCUMENTS_PATH + "{document_id:path}", self.delete_document),
        )
        for method, path, handler in table:
            router.add_api_route(path, handler, methods=[method], response_model=None)

    @property
    def _sessions(self) -> SessionStore:
        return self.completions.sessions

    @property
    def _documents(self) -> DocumentService:
        return self.completions.documents

    # ---- sessions ----------------------------------------------------------------------------------------

    async def list_sessions(self, request: Request) -> Response:
        owner = self.auth.owner(request.headers)
        found = await self._sessions.owned_by(owner, documents=False)
        data = await asyncio.gather(*(self._session_object(key, summary) for key, summary in found))
        return JSONResponse({"object": "list", "data": data})

    async def get_session(self, request: Request) -> Response:
        key = self._named_session(request)
        record = await self._sessions.get(key)
        return JSONResponse(await self._session_object(key, record.summary))

    async def delete_session(self, request: Request) -> Response:
        key = self._named_session(request)
        await self._sessions.delete(key)
        await self.completions.history.drop(key)
        return JSONResponse({"id": key.session_id, "object": "session.deleted", "deleted": True})

    async def export_session(self, request: Request) -> Response:
        key = self._named_session(request, suffix=_EXPORT)
        record = await self._sessions.get(key)
        headers = {"content-disposition": f'attachment; filename="{key.session_id}.json"'}
        return JSONResponse(exported(key, record, self.served().name), headers=headers)

    async def import_session(self, request: Request) -> Response:
        owner = self.auth.owner(request.headers)
        file = parse_request(SessionFile, parse_body(await request.body()))
        key = session_key(owner, request.query_params.get("session_id", file.id), param="session_id")
        record = file.record(self.served())
        async with self._sessions.lease(key) as lease:
            if lease.record is not None:
                raise InvalidRequest(
                    f"There is a session {key.session_id!r} already; delete it, or give another ?session_id=",
                    param="session_id",
                )
            await self.completions.quota.check(
                self._sessions, key, is_new=True, num_tokens=len(record.token_ids)
            )
            await lease.commit(record)
        return JSONResponse(await self._session_object(key, (await self._sessions.get(key)).summary))

    def _named_session(self, request: Request, *, suffix: str = "") -> SessionKey:
        # From the path itself: the framework's pattern drops a trailing newline.
        session_id = request.scope["path"].removeprefix(_SESSIONS_PATH).removesuffix(suffix)
        return session_key(self.auth.owner(request.headers), session_id, param="session_id")

    async def _session_object(self, key: SessionKey, summary: SessionSummary) -> dict[str, Any]:
        return session_object(key, summary, await self._history(key, summary))

    async def _history(self, key: SessionKey, summary: SessionSummary) -> HistoryInfo:
        """What the worker that had its last turn holds of it."""
        address = summary.prefill_addresses[0] if summary.prefill_addresses else ""
        worker = self.completions.history.prefill.worker(address)
        if worker is not None:
            # Where the history's worker is away, nothing of it can be used now.
            with contextlib.suppress(KvferryError):
                return await worker.client.session_info(key, timeout_s=_WORKER_CALL_TIMEOUT_S)
        return HistoryInfo(num_tokens=0, size_bytes=0, tier="none")

    # ---- documents ---------------------------------------------------------------------------------------

    async def create_document(self, request: Request) -> Response:
        owner = self.auth.owner(request.headers)
        fields = parse_request(DocumentRequest, parse_body(await request.body()))
        record: RequestRecord = request.state.record
        document_id = fields.id or f"doc-{secrets.token_hex(8)}"
        written = await self._documents.create(
            owner, document_id, fields, model=self.served(), request_id=record.request_id
        )
        return JSONResponse(await self._document_object(document_key(owner, document_id), written.summary))

    async def list_documents(self, request: Request) -> Response:
        found = await self._documents.owned_by(self.auth.owner(request.headers))
        data = await asyncio.gather(*(self._document_object(key, summary) for key, summary in found))
        return JSONResponse({"object": "list", "data": data})

    async def get_document(self, request: Request) -> Response:
        owner, document_id = self._named_document(request)
        record = await self._documents.get(owner, document_id)
        return JSONResponse(await self._document_object(document_key(owner, document_id), record.summary))

    async def delete_document(self, request: Request) -> Response:
        owner, document_id = self._named_document(request)
        await self._documents.delete(owner, document_id)
        return JSONResponse({"id": document_id, "object": "document.deleted", "deleted": True})

    def _named_document(self, request: Request) -> tuple[str, str]:
        owner = self.auth.owner(request.headers)
        document_id = request.scope["path"].removeprefix(_DOCUMENTS_PATH)
        if not is_session_id(document_id):
            raise DocumentNotFound(f"There is no document {document_id[:140]!r}")
        return owner, document_id

    async def _document_object(self, key: SessionKey, summary: SessionSummary) -> dict[str, Any]:
        return document_object(key, summary, await self._history(key, summary))
