"""A session as one JSON file: what export writes and import reads.

Self-contained: the conversation's text and token ids, and the model that they belong to. KV is left out; the
next turn computes it again from the token ids. A file is checked as strictly as a request.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints

from kvferry.services.router.http.fields import Range, StrictModel
from kvferry.services.router.sessions.record import DocumentIds, SessionId, SessionRecord
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import ModelSpec

_MAX_MESSAGES = 100_000
_Count = Annotated[int, Range(0, 2**31 - 1)]


class FileMessage(StrictModel):
    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str


class SessionFile(StrictModel):
    """A session's export; see `SessionRecord` for the fields of the same name."""

    format: Literal["kvferry.session"]
    version: Literal[1]
    id: SessionId
    model: str
    model_fingerprint: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    kind: Literal["chat", "text"]
    messages: Annotated[list[FileMessage], Field(max_length=_MAX_MESSAGES)]
    text: str
    token_ids: Annotated[list[_Count], Field(min_length=1)]
    assistant_ends: Annotated[list[_Count], Field(max_length=_MAX_MESSAGES)]
    turns: Annotated[int, Range(1, 2**31 - 1)]
    document_ids: DocumentIds
    preamble: str
    created_at: Annotated[float, Range(0)]

    @classmethod
    def of(cls, key: SessionKey, record: SessionRecord, model_name: str) -> Self:
        """The export of a session."""
        return cls.model_validate(
            {
                "format": "kvferry.session",
                "version": 1,
                "id": key.session_id,
                "model": model_name,
                "model_fingerprint": record.model_fingerprint,
                "kind": record.kind,
                "messages": [{"role": role, "content": text} for role, text in record.messages],
                "text": record.text,
                "token_ids": list(record.token_ids),
                "assistant_ends": list(record.assistant_ends),
                "turns": record.turns,
                "document_ids": list(record.document_ids),
                "preamble": record.preamble,
                "created_at": record.created_at_s,
            }
        )

    def record(self, model: ModelSpec) -> SessionRecord:
        """The session, if this server can continue it.

        Raises: InvalidRequest with `param`.
        """
        if self.model_fingerprint != model.fingerprint:
            raise InvalidRequest(
                f"model_fingerprint is {self.model_fingerprint!r}; this server's model {model.name!r} has "
                f"{model.fingerprint!r}, and token ids belong to one model",
                param="model_fingerprint",
            )
        self._check_tokens(model)
        self._check_messages()
        return SessionRecord(
            kind=self.kind,
            model_fingerprint=self.model_fingerprint,
            token_ids=tuple(self.token_ids),
            messages=tuple((message.role, message.content) for message in self.messages),
            text=self.text,
            assistant_ends=tuple(self.assistant_ends),
            turns=self.turns,
            document_ids=tuple(self.document_ids),
            preamble=self.preamble,
            created_at_s=self.created_at,
        )

    def _check_tokens(self, model: ModelSpec) -> None:
        if len(self.token_ids) > model.max_model_len:
            raise InvalidRequest(
                f"token_ids has {len(self.token_ids)} tokens; at most {model.max_model_len} fit the context",
                param="token_ids",
            )
        highest = max(self.token_ids)
        if highest >= model.vocab_size:
            raise InvalidRequest(
                f"token_ids has token {highest}; the vocabulary has ids 0 to {model.vocab_size - 1}",
                param="token_ids",
            )

    def _check_messages(self) -> None:
        answers = sum(message.role == "assistant" for message in self.messages)
        known = [end for end in self.assistant_ends if end]
        if (self.kind == "chat") != bool(self.messages):
            raise InvalidRequest("messages must be those of a chat, and empty otherwise", param="messages")
        if len(self.assistant_ends) != answers:
            raise InvalidRequest(
                f"assistant_ends has {len(self.assistant_ends)} entries; there are {answers} assistant "
                "messages",
                param="assistant_ends",
            )
        if known != sorted(set(known)) or (known and known[-1] > len(self.token_ids)):
            raise InvalidRequest(
                f"assistant_ends must ascend and be at most {len(self.token_ids)}, the number of token_ids",
                param="assistant_ends",
            )
