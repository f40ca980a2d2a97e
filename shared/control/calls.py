"""The calls between a router and its workers, as two interfaces.

The services themselves and their gRPC clients implement them. Streams are async generators: closing one, or
cancelling the task that reads it, cancels the work behind it and frees its memory. `timeout_s` bounds
the whole call. Errors are those of `shared.errors` on both sides.
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
    PrefixRequest,
    RedirectRequest,
    SessionKey,
    WorkerStatus,
)


class WorkerControl(Protocol):
    """The calls that every worker answers."""

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        """Delete what is stored or retained for a session, and return what that was. Turns in flight for it
        will not commit."""

    async def status(self, *, timeout_s: float) -> WorkerStatus: ...


class DecodeControl(WorkerControl, Protocol):
    """The calls that a decode worker answers."""

    def generate(self, request: GenerateRequest, *, timeout_s: float) -> AsyncGenerator[GenerateEvent, None]:
        """Reserve memory, receive the prompt's KV or copy that of the request it shares with, then decode.
        Yields TicketIssued, TransferAccepted, TokenGenerated..., GenerationFinished and, if the request
        stores history, HistoryReturned."""

    async def finish(self, request_id: str, *, timeout_s: float) -> None:
        """End a completion early; `generate` still yields its last events. An unknown id is no error."""


class PrefillControl(WorkerControl, Protocol):
    """The calls that a prefill worker answers."""

    def prefill(self, request: PrefillRequest, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """Run a prompt, compress and ship its KV. Yields FirstToken, then TransferDone."""

    async def redirect(self, request: RedirectRequest, *, timeout_s: float) -> None:
        """Send a running request's blocks to another reservation. The prompt is not run again.

        Raises:
            TransferFailed: the request is not running, its blocks are no longer in the buffer, or the other
                reservation is not for the same plan ("resend").
        """

    async def commit_turn(self, request: CommitTurnRequest, *, timeout_s: float) -> HistoryInfo:
        """Publish the history that a turn staged as the session's record."""

    async def abort_turn(self, request_id: str, *, timeout_s: float) -> None:
        """Discard the history that a turn staged. An unknown id is no error."""

    async def session_info(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo: ...

    async def prefix_info(self, request: PrefixRequest, *, timeout_s: float) -> HistoryInfo:
        """Return how many of a prompt's first tokens are stored for its owner, without their size."""
