"""One attempt at a turn: one decode worker, one prefill worker, their two streams read side by side.

Says which worker failed it. Retrying is `turn.py`'s matter.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import structlog

from kvferry.services.router.placement import Role, Worker
from kvferry.services.router.turn_state import CUT_OFF_S, TurnProgress
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.control.messages import (
    FirstToken,
    GenerateEvent,
    GenerateRequest,
    GenerationFinished,
    HistoryReturned,
    PrefillRequest,
    Ticket,
    TicketIssued,
    TokenGenerated,
    TransferAccepted,
    TransferDone,
)
from kvferry.shared.errors import Cancelled, KvferryError, TransferFailed, WorkerUnavailable
from kvferry.shared.sampling.params import SampledToken

_CLOSE_TIMEOUT_S = 5.0


class Attempt:
    """Reads both streams until the completion has ended and, in a session, generated KV is back at prefill.

        decode:   ticket ─────────────► accepted ─► token 1, 2, ... ─► finished ─► history returned
        prefill:         ─► first token ─► transfer done

    Tokens that overtake the first one wait for it; the end waits for `TransferDone`, which has the sizes.
    Closing either stream (an error, cancellation) frees what its worker holds.

    Attributes:
        failed_role: whose failure ended the attempt, None while nothing failed.
    """

    def __init__(
        self, prefill: Worker[PrefillControl], decode: Worker[DecodeControl], progress: TurnProgress
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.instance_ids: dict[Role, str] = {"prefill": prefill.instance_id, "decode": decode.instance_id}
        # Ids that clients choose may repeat; what workers stage under an id must not.
        self.worker_request_id = f"{progress.request.request_id}.{secrets.token_hex(4)}"
        self.failed_role: Role | None = None
        self._progress = progress
        self._request = progress.rest()
        self._base_index: int | None = None
        self._num_tokens = 0
        self._accepted = False
        self._first_seen = asyncio.Event()
        self._shipped = asyncio.Event()
        self._log = structlog.get_logger(__name__).bind(request_id=self.worker_request_id)

    async def run(self) -> None:
        """Raises: KvferryError, with `failed_role` set."""
        request = self._request
        stream = self.decode.client.generate(
            GenerateRequest(
                request_id=self.worker_request_id,
                model_fingerprint=request.model.fingerprint,
                prompt_token_ids=request.prompt_token_ids,
                plan=request.plan,
                sampling=request.sampling,
                store_history=request.session is not None,
                probe=request.probe,
                session=request.session,
            ),
            timeout_s=self._remaining_s(),
        )
        with self.prefill.turn(), self.decode.turn():
            async with aclosing(stream):
                ticket = await self._blaming("decode", self._ticket(stream))
                self._progress.admit()
                cutting = asyncio.create_task(self._finish_when_cut())
                try:
                    await _both(
                        self._blaming("decode", self._read_decode(stream)),
                        self._blaming("prefill", self._read_prefill(ticket)),
                    )
                finally:
                    cutting.cancel()

    def _remaining_s(self) -> float:
        """For the workers; where a turn that is cut off goes on for a while, for them too."""
        grace_s = CUT_OFF_S if self._request.keeps_cut_off else 0.0
        return max(0.001, self._request.deadline_s + grace_s - asyncio.get_running_loop().time())

    async def _finish_when_cut(self) -> None:
        await self._progress.was_cut.wait()
        try:
            await self.decode.client.finish(self.worker_request_id, timeout_s=CUT_OFF_S)
        except KvferryError as error:
            self._log.warning("completion not cut off", error=error.message)

    async def _blaming(self, role: Role, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        except Cancelled as error:
            # Our own cancellation is no KvferryError: the worker gave up, as one does that stops.
            self.failed_role = self.failed_role or role
            raise WorkerUnavailable(f"The {role} worker gave the turn up: {error.message}") from error
        except KvferryError as error:
            if self.failed_role is None:
                # A broken transfer is told by the end that survives it.
                peer: Role = "prefill" if role == "decode" else "decode"
                self.failed_role = peer if isinstance(error, TransferFailed) else role
            raise

    async def _ticket(self, stream: AsyncGenerator[GenerateEvent, None]) -> Ticket:
        event = await anext(stream, None)
        if not isinstance(event, TicketIssued):
            raise WorkerUnavailable("Decode ended the turn without a ticket")
        return event.ticket

    # ---- prefill -----------------------------------------------------------------------------------------

    async def _read_prefill(self, ticket: Ticket) -> None:
        request = self._request
        stream = self.prefill.client.prefill(
            PrefillRequest(
                request_id=self.worker_request_id,
                model_fingerprint=request.model.fingerprint,
                prompt_token_ids=request.prompt_token_ids,
                plan=request.plan,
                sampling=request.sampling,
                ticket=ticket,
                session=request.session,
                document=request.document,
                probe=request.probe,
                kept_bins=request.kept_bins,
                has_history=request.has_history,
            ),
            timeout_s=self._remaining_s(),
        )
        try:
            async with aclosing(stream):
                async for event in stream:
                    match event:
                        case FirstToken():
                            self._first_token(event)
                        case TransferDone():
                            self._transfer_done(event)
            if not self._shipped.is_set():
                raise WorkerUnavailable("Prefill's stream ended before its transfer did")
        except KvferryError as error:
            # Decode has all of it, so the completion goes on without this worker.
            if not (self._accepted and self._first_seen.is_set()):
                raise
            self._log.warning("prefill lost after its transfer", error=error.message)
            self._shipped.set()

    def _first_token(self, event: FirstToken) -> None:
        stats = self._progress.stats
        if not stats.method:
            stats.method = event.method
            stats.reused_tokens = event.reused_tokens
            stats.reuse_source = event.reuse_source
            stats.full_bytes = event.full_bytes
            stats.kept = event.kept
            stats.history_way = event.history_way
            stats.history_tier = event.history_tier
        stats.prefill_s += event.prefill_s
        stats.queue_s += event.queue_s
        self._deliver(event.token)
        self._first_seen.set()

    def _transfer_done(self, event: TransferDone) -> None:
        stats = self._progress.stats
        stats.shipped_bytes += sum(event.bytes_by_kind.values())
        stats.transfer_s += event.transfer_s
        if event.delta_bytes is not None:
            stats.delta_bytes = (stats.delta_bytes or 0) + event.delta_bytes
        self._shipped.set()

    # ---- decode ------------------------------------------------------------------------------------------

    async def _read_decode(self, stream: AsyncGenerator[GenerateEvent, None]) -> None:
        try:
            async for event in stream:
                match event:
                    case TransferAccepted():
                        self._accepted = True
                    case TokenGenerated(token=token):
                        await self._first_seen.wait()
                        if self._progress.stopped:
                            # Decode did not see the stop string, as after a replay in its middle.
                            await self._finish_early()
                            return
                        self._deliver(token)
                    case GenerationFinished():
                        await self._first_seen.wait()
                        await self._shipped.wait()
                        self._progress.stats.cache_bytes = event.cache_bytes
                        self._progress.finish(event.finish_reason)
                    case HistoryReturned():
                        self._progress.stats.history_tokens = event.num_tokens
        except KvferryError as error:
            if not self._progress.finished:
                raise
            self._log.warning("generated KV did not come home", error=error.message)
        if not self._progress.finished:
            raise WorkerUnavailable("Decode's stream ended before the completion did")

    async def _finish_early(self) -> None:
        await self._shipped.wait()
        self._progress.finish("stop")

    def _deliver(self, token: SampledToken) -> None:
        if self._base_index is None:
            self._base_index = token.index
        expected = self._base_index + self._num_tokens
        if token.index != expected:
            raise TransferFailed(
                f"Token {token.index} came where token {expected} was due", reason="token_gap"
            )
        self._num_tokens += 1
        self._progress.deliver(token)


async def _both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run two coroutines; the first failure cancels the other one, and both have ended on return."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [error for task in done if (error := task.exception()) is not None]
        if failed:
            # Both may have failed at once: the lost worker says more than the transfer that it broke.
            raise next((error for error in failed if isinstance(error, WorkerUnavailable)), failed[0])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)
