"""The two control interfaces. Services implement them; gRPC and in-process clients offer them to the router.

Streams are async generators: closing one (or cancelling the task that reads it) cancels the work behind it
and frees its memory. `timeout_s` is the whole call's deadline. Errors are those of `shared.errors`, on both
sides.
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
    """What a decode worker offers."""

    def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[GenerateEvent, None]:
        """Reserve, receive, decode. Yields TicketIssued, TransferAccepted, TokenGenerated...,
        GenerationFinished and, where asked for, HistoryReturned."""
        ...

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        """End a completion with the tokens that it has; `generate` goes on to its last event. Unknown ids are
        no error."""
        ...

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        """Let go of the rows held of a session for its next turn; returns what was held."""
        ...

    async def status(self, *, timeout_s: float) -> WorkerStatus: ...


class PrefillControl(Protocol):
    """What a prefill worker offers."""

    def prefill(self, request: PrefillRequest, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """Run, compress and ship a prompt. Yields FirstToken, then TransferDone."""
        ...

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo: ...

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        """Drop what the turn staged. Unknown ids are no error."""
        ...

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo: ...

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        """Delete a session's history; returns what was held. Turns under way for it will not commit."""
        ...

    async def status(self, *, timeout_s: float) -> WorkerStatus: ...
