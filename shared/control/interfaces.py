"""The two control interfaces, implemented by the services themselves and by their gRPC clients.

Streams are async generators: closing one, or cancelling the task that reads it, cancels the work behind it
and frees its memory. `timeout_s` is the deadline of the whole call. Errors are those of `shared.errors` on
both sides.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from kvferry.shared.control.messages import (
    CommitTurnRequest,
    GenerateEvent,
    GenerateRequest,
    HistoryInfo,
    PrefillEvent,
    PrefillRequest,
    SessionKey,
    WorkerStatus,
)


class DecodeControl(Protocol):
    """The calls that a decode worker answers."""

    def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[GenerateEvent, None]:
        """Reserve memory, receive the prompt's KV, decode. Yields TicketIssued, TransferAccepted,
        TokenGenerated..., GenerationFinished and, if the request stores history, HistoryReturned."""
        ...

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        """End a completion early; `generate` still yields its last events. An unknown id is no error."""
        ...

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        """Free the KV retained for a session; returns what was retained."""
        ...

    async def status(self, *, timeout_s: float) -> WorkerStatus: ...


class PrefillControl(Protocol):
    """The calls that a prefill worker answers."""

    def prefill(self, request: PrefillRequest, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """Run a prompt, compress and ship its KV. Yields FirstToken, then TransferDone."""
        ...

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        """Publish the history that a turn staged as the session's record."""
        ...

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        """Discard the history that a turn staged. An unknown id is no error."""
        ...

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo: ...

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        """Delete a session's history; returns what was stored. Turns in flight for it will not commit."""
        ...

    async def status(self, *, timeout_s: float) -> WorkerStatus: ...
