"""One choice of a response: a turn's tokens as text, with log-probabilities and timings.

The sink of one turn. Text that may become a stop string is held back by the assembler, not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.services.router.placement import Role
from kvferry.services.router.responses import TokenLogprob
from kvferry.services.router.turn_state import TurnStats
from kvferry.shared.control.messages import FinishReason
from kvferry.shared.errors import KvferryError
from kvferry.shared.metrics import RouterMetrics
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.sampling.params import SampledToken


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """What one event adds to a choice."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


class RequestTimer:
    """Latencies of one request, from its arrival, and its place among the waiting and the running.

    waiting ──admitted──► running ──close──► gone
    """

    def __init__(self, metrics: RouterMetrics, model: str, arrival_s: float) -> None:
        self._metrics = metrics
        self._model = model
        self._arrival_s = arrival_s
        self.first_token_s: float | None = None
        self._gauge = metrics.requests_waiting.labels(model=model)
        self._gauge.inc()

    def admitted(self) -> None:
        self._gauge.dec()
        self._gauge = self._metrics.requests_running.labels(model=self._model)
        self._gauge.inc()

    def token(self, method: str, previous_s: float | None) -> float:
        """A token of a choice came; `previous_s` is when that choice's one before did. Returns now."""
        now_s = time.perf_counter()
        labels = {"model": self._model, "method": method}
        self._metrics.generation_tokens.labels(**labels).inc()
        if previous_s is not None:
            self._metrics.inter_token_latency.labels(**labels).observe(now_s - previous_s)
        if self.first_token_s is None:
            self.first_token_s = now_s - self._arrival_s
            self._metrics.time_to_first_token.labels(**labels).observe(self.first_token_s)
        return now_s

    def finished(self, method: str) -> None:
        elapsed_s = time.perf_counter() - self._arrival_s
        self._metrics.e2e_request_latency.labels(model=self._model, method=method).observe(elapsed_s)

    def recovered(self, role: Role) -> None:
        self._metrics.recoveries.labels(role=role).inc()

    def close(self) -> None:
        self._gauge.dec()


class Choice:
    """Implements `TurnSink` for one choice.

    Args:
        emit: takes each delta.
        on_admitted, on_finished: told once.
        on_cut_off: told why, where the turn's time is over in the midst of its completion.
    """

    def __init__(
        self,
        index: int,
        *,
        assembler: TextAssembler,
        with_logprobs: bool,
        timer: RequestTimer,
        emit: Callable[[ChoiceDelta], None],
        on_admitted: Callable[[], None],
        on_finished: Callable[[], None],
        on_cut_off: Callable[[KvferryError], None],
    ) -> None:
        self.index = index
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stats = TurnStats()
        self._assembler = assembler
        self._with_logprobs = with_logprobs
        self._timer = timer
        self._emit = emit
        self._on_admitted = on_admitted
        self._on_finished = on_finished
        self._on_cut_off = on_cut_off
        self._offset = 0
        self._last_token_s: float | None = None

    def admitted(self) -> None:
        self._on_admitted()

    def token(self, token: SampledToken, stats: TurnStats) -> bool:
        self.stats = stats
        self._last_token_s = self._timer.token(stats.method, self._last_token_s)
        # Alternatives stand where the token does, so they are read before it is taken.
        top = tuple((self._assembler.token_text(other), value) for other, value in token.top_logprobs)
        delta = self._assembler.push(token.token_id)
        self.text += delta.text
        entries = (self._logprob(token, delta.token_text, top),) if self._with_logprobs else None
        if delta.text or entries:
            self._emit(ChoiceDelta(index=self.index, text=delta.text, logprobs=entries))
        return delta.stopped

    def finished(self, reason: FinishReason, stats: TurnStats) -> None:
        self.stats = stats
        self.finish_reason = reason
        rest = self._assembler.flush()
        self.text += rest
        if rest:
            self._emit(ChoiceDelta(index=self.index, text=rest, logprobs=() if self._with_logprobs else None))
        self._emit(ChoiceDelta(index=self.index, finish_reason=reason))
        self._on_finished()

    def cut_off(self, error: KvferryError) -> None:
        self._on_cut_off(error)

    def recovered(self, role: Role) -> None:
        self._timer.recovered(role)

    def _logprob(self, token: SampledToken, text: str, top: tuple[tuple[str, float], ...]) -> TokenLogprob:
        entry = TokenLogprob(
            text=text,
            logprob=token.logprob if token.logprob is not None else 0.0,
            offset=self._offset,
            top=top,
        )
        self._offset += len(text)
        return entry
