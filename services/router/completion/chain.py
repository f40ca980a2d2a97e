"""A response of the Responses API as a turn of a session: what it continues, and what is stored of it.

`previous_response_id` is a session by another name: a response's id begins with its session's. One that
continues the session's last response is the session's next turn. Any other begins a session of its own with
the conversation so far, whose KV is found by its prefix.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.services.router.completion.choice import Choice, ChoiceDelta, Usage
from kvferry.services.router.completion.compression import KvReport
from kvferry.services.router.sessions.record import SessionRecord, StoredResponse
from kvferry.shared.errors import SessionBusy
from kvferry.shared.model.spec import ModelSpec

SESSION_PREFIX = "resp_"
_SESSION_BYTES, _RESPONSE_BYTES = 12, 4
_SESSION_CHARS = len(SESSION_PREFIX) + 2 * _SESSION_BYTES


def new_session_id() -> str:
    return SESSION_PREFIX + secrets.token_hex(_SESSION_BYTES)


def new_response_id(session_id: str) -> str:
    return session_id + secrets.token_hex(_RESPONSE_BYTES)


def session_id_of(response_id: str) -> str:
    """Return the session that a response is stored in."""
    return response_id[:_SESSION_CHARS]


@dataclass(kw_only=True)
class ResponseChain:
    """One response's place among those that it continues.

    Attributes:
        previous: the record that the previous response is in, as it was when the request came.
        continues: whether this is the next turn of that record's session.
        num_instructions: how many of the request's messages are instructions.
        describe: the response object of an answer's deltas.
        deltas: of the answer, in order.
        body: the response object, once the answer has ended and is stored.
    """

    response_id: str
    previous: SessionRecord | None
    continues: bool
    num_instructions: int
    describe: Callable[[list[ChoiceDelta], Choice, Usage, KvReport], dict[str, Any]]
    deltas: list[ChoiceDelta] = field(default_factory=list)
    body: dict[str, Any] | None = None

    def check(self, record: SessionRecord | None) -> None:
        """Check the session. Raises: SessionBusy if it has got another turn since the request came."""
        last = self.previous.responses[-1].id if self.continues and self.previous is not None else None
        if record is not None and (not record.responses or record.responses[-1].id != last):
            raise SessionBusy(f"Response {last!r} was continued by another request", retry_after_s=1.0)

    def former(self, model: ModelSpec) -> SessionRecord | None:
        """Return a record whose token ids begin the prompt, if the session has none."""
        known = self.previous
        return known if known is not None and known.model_fingerprint == model.fingerprint else None

    def added(
        self, record: SessionRecord, before: SessionRecord | None, choice: Choice, usage: Usage, kv: KvReport
    ) -> SessionRecord:
        """Return the session's record with this response. Args: before: the record until now."""
        self.body = self.describe(self.deltas, choice, usage, kv)
        earlier = before.responses if before is not None else ()
        stored = StoredResponse(
            id=self.response_id,
            num_messages=len(record.messages) - self.num_instructions,
            body=json.dumps(self.body, ensure_ascii=False),
        )
        return replace(record, responses=(*earlier, stored), num_instructions=self.num_instructions)
