"""One server under load: its address and model, and the form of its requests.

A kvferry gets sessions and documents by their ids. Any other server gets the whole conversation in each
request, with the document as its system message, as its clients would send it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.tools.bench.config import Api, BenchConfig
from kvferry.tools.bench.http import EventClient
from kvferry.tools.bench.load import Conversation, Load, Question

PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
Messages = list[dict[str, str]]


@dataclass(kw_only=True)
class Server:
    """A server that a run sends its load to.

    Attributes:
        name: in results: the option that gave it, `url` or `beside`.
        is_kvferry: it has sessions, documents and the `kv` field.
        compression: `kv_compression` of each request.
    """

    name: str
    model: str
    is_kvferry: bool
    compression: dict[str, Any]
    events: EventClient
    calls: httpx.AsyncClient
    config: BenchConfig
    _documents: list[str] = field(default_factory=list)
    _sessions: list[str] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, name: str, url: str, api_key: str, model: str, config: BenchConfig
    ) -> AsyncIterator[Self]:
        """Connect to a server and ask for its model and features.

        Args: model: to ask for; empty: the first that the server lists.
        Raises: KvferryError: it cannot be reached or answers with an error.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A proxy from the environment cannot reach this machine's loopback, and h11 uses none.
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=config.bench_timeout_s, trust_env=False
        ) as calls:
            events = EventClient(url, api_key)
            try:
                model = model or (await _get(calls, "/v1/models"))["data"][0]["id"]
                version = await calls.get("/version")
                is_kvferry = version.status_code == 200 and "protocol_version" in version.json()
                given = {"method": config.method, "token_budget": config.token_budget}
                yield cls(
                    name=name,
                    model=model,
                    is_kvferry=is_kvferry,
                    compression={key: value for key, value in given.items() if value} if is_kvferry else {},
                    events=events,
                    calls=calls,
                    config=config,
                )
            except httpx.TransportError as error:
                raise WorkerUnavailable(
                    f"{url} cannot be reached: {error or type(error).__name__}"
                ) from error
            finally:
                events.close()

    async def prepare(self, load: Load) -> None:
        """Have the server run the documents, so that conversations find their KV."""
        self._documents.clear()
        for text in load.documents:
            if self.is_kvferry:
                body: dict[str, Any] = {"text": text}
                if self.compression:
                    body["kv_compression"] = self.compression
                self._documents.append((await _post(self.calls, "/v1/documents", body))["id"])
            else:
                messages = [{"role": "system", "content": text}, {"role": "user", "content": "."}]
                await _post(
                    self.calls, PATHS["chat"], {"model": self.model, "messages": messages, "max_tokens": 1}
                )

    async def clean_up(self) -> None:
        """Delete the sessions and documents of a run."""
        for path in (
            *(f"/v1/sessions/{id}" for id in self._sessions),
            *(f"/v1/documents/{id}" for id in self._documents),
        ):
            await self.calls.delete(path)
        self._sessions.clear()

    def talk(self, conversation: Conversation, load: Load) -> Talk:
        session = ""
        if self.is_kvferry and len(conversation.questions) > 1:
            session = f"bench-{secrets.token_hex(8)}"
            self._sessions.append(session)
        document = None
        messages: Messages = []
        if conversation.document is not None:
            if self.is_kvferry:
                document = self._documents[conversation.document]
            else:
                messages.append({"role": "system", "content": load.documents[conversation.document]})
        return Talk(server=self, session=session, document=document, messages=messages)


@dataclass(kw_only=True)
class Talk:
    """A conversation with a server.

    Attributes: messages: those so far, where the server does not store them.
    """

    server: Server
    session: str
    document: str | None
    messages: Messages

    def body(self, question: Question) -> bytes:
        server = self.server
        fields: dict[str, Any] = {
            "model": server.model,
            "max_tokens": question.kind.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if server.config.ignore_eos:
            fields["ignore_eos"] = True
        if server.compression:
            fields["kv_compression"] = server.compression
        if server.config.api == "completions":
            fields["prompt"] = question.text
            return json.dumps(fields).encode()
        fields["messages"] = [*self.messages, {"role": "user", "content": question.text}]
        if self.session:
            fields |= {"session_id": self.session, "session_mode": "append"}
        if self.document is not None:
            fields["document_ids"] = [self.document]
        return json.dumps(fields).encode()

    def answered(self, question: Question, answer: str) -> None:
        """Remember a turn for the next one's request."""
        if not self.session:
            self.messages += [
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": answer},
            ]


async def _get(calls: httpx.AsyncClient, path: str) -> Any:
    return _checked(await calls.get(path))


async def _post(calls: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    return _checked(await calls.post(path, json=body))


def _checked(reply: httpx.Response) -> Any:
    if reply.status_code != 200:
        raise KvferryError(
            f"{reply.request.url} answered with status {reply.status_code}: {reply.text[:500]}"
        )
    return reply.json()
