"""What a turn is asked to do, what it has done so far, and whom it tells.

Shared by `turn.py` (the turn over all its attempts) and `attempt.py` (one attempt). Calls no worker.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.services.router.placement import Role
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.control.messages import FinishReason, HistoryWay, ReuseSource, SessionKey
from kvferry.shared.errors import KvferryError
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.sampling.params import SampledToken, SamplingParams

CUT_OFF_S = 10.0
"""How long what was delivered of a turn that was cut off may take to go home."""


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One completion of one prompt.

    Attributes:
        request_id: the client's; every attempt derives an id of its own for the workers.
        session: whose history is looked up and kept; None keeps none.
        document: whose history the session may begin with.
        has_history: whether the session has had turns.
        prefer_prefill: addresses that may hold the session's history, best first.
        kept_bins: stretches of the prompt whose kept fraction is wanted; 0 wants none.
        prefer_decode: addresses that may hold the session's last selection, best first.
        keeps_cut_off: whether what was delivered of a completion that is cut off becomes the session's.
        deadline_s: when the whole turn must have ended, on the event loop's clock.
    """

    request_id: str
    model: ModelSpec
    prompt_token_ids: tuple[int, ...]
    plan: CompressionPlan
    sampling: SamplingParams
    deadline_s: float
    session: SessionKey | None = None
    document: SessionKey | None = None
    has_history: bool = False
    keeps_cut_off: bool = False
    prefer_prefill: tuple[str, ...] = ()
    prefer_decode: tuple[str, ...] = ()
    probe: bool = False
    kept_bins: int = 0


@dataclass(kw_only=True)
class TurnStats:
    """What a turn has cost; summed over replays where it adds up.

    Attributes:
        token_ids: the completion so far.
        method, reused_tokens, reuse_source, full_bytes, kept: of the first prefill, whose prompt is the
            client's.
        history_way, history_tier: of the first prefill too; the slowest tier that gave rows.
        shipped_bytes: everything that crossed the wire.
        delta_bytes: of rows that decode did not hold, where it was spared the others; else None.
        cache_bytes: decode's memory for the sequence at its end.
        history_tokens: generated tokens whose KV came home.
        prefill_address, worker_request_id: where, and under which id, history was staged last.
        decode_address: where the last attempt decoded.
    """

    token_ids: list[int] = field(default_factory=list)
    method: str = ""
    reused_tokens: int = 0
    reuse_source: ReuseSource = "session"
    full_bytes: int = 0
    kept: tuple[float, ...] = ()
    history_way: HistoryWay | None = None
    history_tier: str = ""
    shipped_bytes: int = 0
    delta_bytes: int | None = None
    cache_bytes: int = 0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    queue_s: float = 0.0
    replays: int = 0
    history_tokens: int = 0
    prefill_address: str = ""
    decode_address: str = ""
    worker_request_id: str = ""


class TurnSink(Protocol):
    """Where a turn's events go. Called from the event loop; must not wait."""

    def admitted(self) -> None:
        """Decode has reserved memory. Once a turn."""
        ...

    def token(self, token: SampledToken, stats: TurnStats) -> bool:
        """The next token, indices ascending from 0. Returns whether its text ended the completion."""
        ...

    def finished(self, reason: FinishReason, stats: TurnStats) -> None:
        """No more tokens; `stats` are final but for `history_tokens`, which may still come home."""
        ...

    def cut_off(self, error: KvferryError) -> None:
        """The turn's time is over in the midst of its completion. What was delivered is kept; `finished` may
        still come, for that alone."""
        ...

    def recovered(self, role: Role) -> None:
        """A worker was lost and the turn is about to be replayed."""
        ...


class TurnProgress:
    """How far a turn has come, over all its attempts.

    waiting ──admit──► admitted ──deliver*──► finished
                                     └─cut──► tokens are no longer delivered ──► finished
    """

    def __init__(self, request: TurnRequest, sink: TurnSink) -> None:
        self.request = request
        self.stats = TurnStats()
        self.finished = False
        self.stopped = False
        """The text ended with the last token. Decode ends it there too, by the same rule."""
        self.was_cut = asyncio.Event()
        """The completion ends with what was delivered, for the session's sake: nobody reads on."""
        self._sink = sink
        self._admitted = False

    def admit(self) -> None:
        if not self._admitted:
            self._admitted = True
            self._sink.admitted()

    def cut(self, error: KvferryError | None = None) -> bool:
        """End with the tokens delivered, where these are to be kept and there are any.

        Args: error: why, for the sink; None where nobody is left to be told.
        Returns: False where the turn is to be given up, or has ended.
        """
        if self.finished or not self.request.keeps_cut_off or not self.stats.token_ids:
            return False
        if not self.was_cut.is_set():
            self.was_cut.set()
            if error is not None:
                self._sink.cut_off(error)
        return True

    def deliver(self, token: SampledToken) -> None:
        if self.was_cut.is_set():
            return
        index = len(self.stats.token_ids)
        self.stats.token_ids.append(token.token_id)
        self.stopped = self._sink.token(replace(token, index=index), self.stats)

    def finish(self, reason: FinishReason) -> None:
        self.finished = True
        self._sink.finished(reason, self.stats)

    def recover(self, role: Role) -> None:
        self.stats.replays += 1
        self._sink.recovered(role)

    @property
    def end(self) -> FinishReason | None:
        """Why the delivered tokens are a whole completion, or None while they are not. Needed where decode
        was lost between its last token and saying so."""
        request, delivered = self.request, self.stats.token_ids
        ends = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            ends |= set(request.model.eos_token_ids)
        if self.stopped or (delivered and delivered[-1] in ends):
            return "stop"
        return "length" if len(delivered) >= request.sampling.max_tokens else None

    def rest(self) -> TurnRequest:
        """The turn that is still to be done: delivered tokens join the prompt."""
        request, delivered = self.request, tuple(self.stats.token_ids)
        sampling = replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - len(delivered),
            first_index=len(delivered),
        )
        return replace(request, prompt_token_ids=request.prompt_token_ids + delivered, sampling=sampling)
