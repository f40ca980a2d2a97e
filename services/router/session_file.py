"""A session as one file: what export writes and import reads.

JSON that needs nothing else: the conversation's text and its token ids, and which model they are of. KV is
left out; the next turn runs the tokens again. A file is read as strictly as a request. Keeps nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from kvferry.services.router.schemas import SESSION_ID_RULE, is_session_id
from kvferry.services.router.session_record import SessionRecord
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest
from kvferry.shared.model.spec import ModelSpec

FORMAT = "kvferry.session"
VERSION = 1
_MAX_MESSAGES = 100_000


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class FileMessage(_Strict):
    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str


class SessionFile(_Strict):
    """The file's fields; see `SessionRecord` for those of the same name."""

    format: Literal["kvferry.session"]
    version: Literal[1]
    id: str
    model: str
    model_fingerprint: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    kind: Literal["chat", "text"]
    messages: Annotated[list[FileMessage], Field(max_length=_MAX_MESSAGES)]
    text: str
    token_ids: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]
    assistant_ends: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=_MAX_MESSAGES)
    ]
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

    def record(self, model: ModelSpec) -> SessionRecord:
        """The session, if this server can go on with it.

        Raises: InvalidRequest with `param`.
        """
        if self.model_fingerprint != model.fingerprint:
            raise InvalidRequest(
                f"model_fingerprint is {self.model_fingerprint!r}; this server's model {model.name!r} has "
                f"{model.fingerprint!r}, and token ids of one model mean nothing to another",
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


def exported(key: SessionKey, record: SessionRecord, model_name: str) -> dict[str, Any]:
    """The file's content."""
    return {
        "format": FORMAT,
        "version": VERSION,
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
