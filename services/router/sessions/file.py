"""A session as one JSON file: what export writes and import reads.

Self-contained: the conversation's text and token ids, and the model that they belong to. KV is left out; the
next turn computes it again from the token ids. A file is checked as strictly as a request.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.sessions.record import SESSION_ID_RULE, SessionRecord, is_session_id
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import ModelSpec

_MAX_MESSAGES = 100_000
_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class FileMessage(_Strict):
    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str


class SessionFile(_Strict):
    """A session's export; see `SessionRecord` for the fields of the same name."""

    format: Literal["kvferry.session"]
    version: Literal[1]
    id: str
    model: str
    model_fingerprint: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    kind: Literal["chat", "text"]
    messages: Annotated[list[FileMessage], Field(max_length=_MAX_MESSAGES)]
    text: str
    token_ids: Annotated[list[_Count], Field(min_length=1)]
    assistant_ends: Annotated[list[_Count], Field(max_length=_MAX_MESSAGES)]
    turns: Annotated[int, Field(ge=1, le=2**31 - 1)]
    document_ids: Annotated[list[str], Field(max_length=16)]
    preamble: str
    created_at: Annotated[float, Field(ge=0)]

    @field_validator("id")
    @classmethod
    def _id(cls, value: str) -> str:
        if not is_session_id(value):
            raise PydanticCustomError("session_id", f"must be {SESSION_ID_RULE}")
        return value

    @field_validator("document_ids")
    @classmethod
    def _documents(cls, value: list[str]) -> list[str]:
        if not all(is_session_id(name) for name in value):
            raise PydanticCustomError("document_ids", f"must be ids of documents: {SESSION_ID_RULE}")
        return value

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
