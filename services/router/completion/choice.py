"""The choices of a response: each a turn's tokens as text with log-probabilities, and their `usage` and `kv`
objects.

`TextAssembler` holds back text that may begin a stop string.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from typing_extensions import TypedDict

from kvferry.services.router.completion.tools import read_arguments
from kvferry.services.router.turn.attempt import TurnStats
from kvferry.services.router.turn.turn import Turn
from kvferry.shared.compression.plan import CompressionPlan
from kvferry.shared.compression.resolve import why_full
from kvferry.shared.control.messages import FinishReason, HistorySource
from kvferry.shared.model.chat_template import ChatMessage
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry.metrics import RouterMetrics

if TYPE_CHECKING:
    from kvferry.services.router.completion.prompt_tokens import PromptTokens
    from kvferry.shared.model.answer import AnswerParser, AnswerPart
    from kvferry.shared.model.calls import CallPiece


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """One token's log-probability.

    Attributes:
        text: what the token adds to the choice's text.
        logprob: None for a prompt's first token.
        offset: where the text begins in the choice's text, in characters.
        top: the most likely alternatives with theirs, best first.
        data: its bytes where they are no whole characters; None where they are its text's.
    """

    text: str
    logprob: float | None
    offset: int = 0
    top: tuple[TokenLogprob, ...] = ()
    data: bytes | None = None

    @property
    def bytes(self) -> list[int]:
        return list(self.text.encode() if self.data is None else self.data)


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@dataclass(frozen=True, kw_only=True)
class ToolCallDelta:
    """What one event adds to a call.

    Attributes:
        index: of the call among the choice's.
        call: the call so far.
        begins, ends: whether it begins or is whole with this.
        arguments: what it adds to the arguments, as JSON.
    """

    index: int
    call: ToolCall
    begins: bool
    ends: bool
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """What one event adds to a choice. `token_ids` are of tokens, whose text may come later."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None


class RequestTimer:
    """Latencies of one request from its arrival, and its place among the waiting and the running.

    waiting ──admitted──► running ──close──► gone
    """

    def __init__(self, metrics: RouterMetrics, model: str, arrival_s: float) -> None:
        self._metrics = metrics
        self._model = model
        self._arrival_s = arrival_s
        self.first_token_s: float | None = None
        self._waiting = metrics.requests_waiting.labels(model=model)
        self._running = metrics.requests_running.labels(model=model)
        self._gauge = self._waiting
        self._closed = False
        self._gauge.inc()
        self._method: str | None = None

    def admitted(self) -> None:
        """Decode has reserved memory for one of the request's choices."""
        if self._gauge is self._waiting and not self._closed:
            self._waiting.dec()
            self._running.inc()
            self._gauge = self._running

    def token(self, method: str, previous_s: float | None) -> float:
        """Count a choice's token; `previous_s` is when its previous one came. Returns the time now."""
        now_s = time.perf_counter()
        if method != self._method:  # looking a metric up by its labels takes longer than counting
            self._method, labels = method, {"model": self._model, "method": method}
            self._tokens = self._metrics.generation_tokens.labels(**labels)
            self._latency = self._metrics.inter_token_latency.labels(**labels)
        self._tokens.inc()
        if previous_s is not None:
            self._latency.observe(now_s - previous_s)
        if self.first_token_s is None:
            self.first_token_s = now_s - self._arrival_s
            self._metrics.time_to_first_token.labels(model=self._model, method=method).observe(
                self.first_token_s
            )
        return now_s

    def finished(self, method: str) -> None:
        elapsed_s = time.perf_counter() - self._arrival_s
        self._metrics.e2e_request_latency.labels(model=self._model, method=method).observe(elapsed_s)

    def close(self) -> None:
        """The request neither waits nor runs any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._gauge.dec()


class Choice:
    """One turn's completion as text.

    Attributes:
        text: the completion so far, as delivered, after the prompt where the request wants it echoed.
        content, reasoning, calls: what a parser found in the completion; without one, content is the text.
        num_reasoning_tokens: those that added to the reasoning alone.
        prompt_tokens: the prompt's own, from the first token on, where the request wants their logprobs.

    Args:
        parser: splits the text, where the model has a form for its parts.
        parallel_calls: whether there may be several calls; otherwise all but the first are left out.
        shows_reasoning: whether deltas have the model's thoughts.
        with_logprobs, with_token_ids: whether each token has a delta, even without text.
    """

    def __init__(
        self,
        index: int,
        turn: Turn,
        assembler: TextAssembler,
        timer: RequestTimer,
        *,
        parser: AnswerParser | None = None,
        parallel_calls: bool = True,
        shows_reasoning: bool = True,
        with_logprobs: bool = False,
        with_token_ids: bool = False,
    ) -> None:
        self.index = index
        self.turn = turn
        self.text = ""
        self._assembler = assembler
        self._timer = timer
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._shows_reasoning = shows_reasoning
        self.reasoning = ""
        self.num_reasoning_tokens = 0
        self.calls: list[ToolCall] = []
        self._num_whole_calls = 0
        self._leaves_call_out = False
        self._content = ""
        self.prompt_tokens: PromptTokens | None = None
        self._offset = 0
        self._last_token_s: float | None = None

    def echo(self, text: str, entries: tuple[TokenLogprob, ...] | None) -> ChoiceDelta:
        """Put the prompt before the first token."""
        self.text, self._offset = text, len(text)
        return ChoiceDelta(index=self.index, text=text, logprobs=entries)

    def token(self, token: SampledToken) -> ChoiceDelta | None:
        """Take the next token; returns what it adds, None while nothing can be delivered."""
        self._last_token_s = self._timer.token(self.turn.stats.method, self._last_token_s)
        # Alternatives are decoded in the token's place, so before the token itself is taken.
        assembler = self._assembler
        top = tuple(
            TokenLogprob(text=assembler.token_text(other), logprob=value, data=assembler.partial_bytes(other))
            for other, value in token.top_logprobs
        )
        delta = assembler.push(token.token_id)
        self.turn.text_ended = delta.stopped
        self.text += delta.text
        entries = None
        if self._with_logprobs:
            logprob = token.logprob if token.logprob is not None else 0.0
            data = assembler.partial_bytes(token.token_id)
            entries = (
                TokenLogprob(text=delta.token_text, logprob=logprob, offset=self._offset, top=top, data=data),
            )
            self._offset += len(delta.token_text)
        token_ids = (token.token_id,) if self._with_token_ids else ()
        if self._parser is not None:
            before = len(self.reasoning), len(self._content)
            parsed = self._parsed(self._parser.feed(delta.text), entries, token_ids)
            self.num_reasoning_tokens += len(self.reasoning) > before[0] and len(self._content) == before[1]
            return parsed
        if not (delta.text or entries or token_ids):
            return None
        return ChoiceDelta(index=self.index, text=delta.text, logprobs=entries, token_ids=token_ids)

    def end(self, reason: FinishReason) -> Iterator[ChoiceDelta]:
        """The text held back, if any, and the choice's end."""
        rest = self._assembler.flush()
        self.text += rest
        entries = () if self._with_logprobs else None
        if self._parser is not None:
            held = self._parsed([*self._parser.feed(rest), *self._parser.finish()], entries, ())
            if held is not None and (held.text or held.reasoning or held.calls):
                yield held
        elif rest:
            yield ChoiceDelta(index=self.index, text=rest, logprobs=entries)
        yield ChoiceDelta(index=self.index, finish_reason=self.finish_reason)

    @property
    def finish_reason(self) -> str | None:
        """As clients see it; None while the completion goes on."""
        reason = self.turn.finish_reason
        are_whole = bool(self.calls) and self._num_whole_calls == len(self.calls)
        return "tool_calls" if are_whole and reason == "stop" else reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the completion."""
        return self._assembler.stop_string

    @property
    def content(self) -> str:
        return self.text if self._parser is None else self._content

    @property
    def message(self) -> ChatMessage:
        """The answer as sessions record it."""
        fields: dict[str, Any] = {}
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {**call["function"], "arguments": read_arguments(call["function"]["arguments"])},
            }
            for call in self.calls
        ]
        if calls:
            fields["tool_calls"] = calls
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning.strip()
        return ChatMessage("assistant", self.content, json.dumps(fields) if fields else "")

    def _parsed(
        self,
        parts: Sequence[AnswerPart],
        entries: tuple[TokenLogprob, ...] | None,
        token_ids: tuple[int, ...],
    ) -> ChoiceDelta | None:
        """What a text's parts add; None where nothing can be delivered."""
        text, reasoning = (
            "".join(getattr(part, name) for part in parts) for name in ("content", "reasoning")
        )
        calls = [
            delta
            for part in parts
            if part.call is not None and (delta := self._called(part.call)) is not None
        ]
        self._content += text
        self.reasoning += reasoning
        if not self._shows_reasoning:
            reasoning = ""
        if not (text or reasoning or calls or entries or token_ids):
            return None
        return ChoiceDelta(
            index=self.index,
            text=text,
            reasoning=reasoning,
            calls=tuple(calls),
            logprobs=entries,
            token_ids=token_ids,
        )

    def _called(self, piece: CallPiece) -> ToolCallDelta | None:
        """Take what some text adds to the calls; returns None where the call is left out."""
        begins = piece.name is not None
        if begins:
            self._leaves_call_out = bool(self.calls) and not self._parallel_calls
        if self._leaves_call_out:
            return None
        if begins:
            function = CalledFunction(name=piece.name or "", arguments="")
            self.calls.append(
                ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=function)
            )
        call = self.calls[-1]
        call["function"]["arguments"] += piece.arguments
        self._num_whole_calls += piece.is_last
        return ToolCallDelta(
            index=len(self.calls) - 1,
            call=call,
            begins=begins,
            ends=piece.is_last,
            arguments=piece.arguments,
        )


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a response; `cached_tokens` equals `kv.reused_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class KvReport(TypedDict):
    """What a response's KV cache cost. Bytes are sums over choices, times those of the slowest choice.

    `reason` says why nothing was compressed, with method "full", or that compression saved no bytes of this
    prompt. `quality` and `retention` are there where the request gave a quality, `delta_bytes` where decode
    had retained KV of the session, `kept` and `kept_by_layer` where the request gave `kv_kept_bins`.
    `smaller_token_budget` is there where decode was short of memory and used a budget between the request's
    `min_token_budget` and its `token_budget`, `max_tokens` where the request's limit is above the room that
    the context has after the prompt.
    """

    method: str
    reason: NotRequired[str]
    quality: NotRequired[float]
    retention: NotRequired[float]
    smaller_token_budget: NotRequired[int]
    max_tokens: NotRequired[int]
    prompt_tokens: int
    reused_tokens: int
    history: NotRequired[HistorySource]
    history_tier: NotRequired[str]
    full_bytes: int
    shipped_bytes: int
    delta_bytes: NotRequired[int]
    cache_bytes: int
    prefill_ms: float
    transfer_ms: float
    kept: NotRequired[list[float]]
    kept_by_layer: NotRequired[list[list[float]]]


def kv_report(
    plan: CompressionPlan | None,
    quality: float | None,
    num_prompt_tokens: int,
    stats: Sequence[TurnStats],
    *,
    num_kept_bins: int = 0,
    max_tokens: int | None = None,
) -> KvReport:
    """The report of one response.

    Args:
        plan: the request's; None where it failed before it had one.
        quality: the quality that the request gave.
        stats: of each choice's turn.
        num_kept_bins: the request's `kv_kept_bins`.
        max_tokens: the answer's limit where it is below the request's.
    """
    first = stats[0].first
    report = KvReport(
        method=stats[0].method,
        prompt_tokens=num_prompt_tokens,
        reused_tokens=first.reused_tokens if first is not None else 0,
        full_bytes=first.full_bytes if first is not None else 0,
        shipped_bytes=0,
        cache_bytes=0,
        prefill_ms=0.0,
        transfer_ms=0.0,
    )
    for turn in stats:
        report["shipped_bytes"] += turn.shipped_bytes
        report["cache_bytes"] += turn.cache_bytes
        report["prefill_ms"] = max(report["prefill_ms"], round(turn.prefill_s * 1000, 3))
        report["transfer_ms"] = max(report["transfer_ms"], round(turn.transfer_s * 1000, 3))
        if turn.smaller_budget is not None:
            least = report.get("smaller_token_budget", turn.smaller_budget)
            report["smaller_token_budget"] = min(least, turn.smaller_budget)
        if turn.delta_bytes is not None:
            report["delta_bytes"] = report.get("delta_bytes", 0) + turn.delta_bytes
    if max_tokens is not None:
        report["max_tokens"] = max_tokens
    if plan is not None:
        if report["method"] == "full":
            report["reason"] = why_full(plan, num_prompt_tokens=num_prompt_tokens)
        elif (reason := _why_not_compress(plan, stats[0])) is not None:
            report["reason"] = reason
        if quality is not None and plan.budget.retention is not None:
            report["quality"], report["retention"] = quality, plan.budget.retention
    if first is not None:
        if first.history_source is not None:
            report["history"] = first.history_source
        if first.history_tier:
            report["history_tier"] = first.history_tier
        if first.retained_fractions:
            layers = _by_layer(first.retained_fractions, min(num_kept_bins, num_prompt_tokens))
            report["kept_by_layer"] = [[round(fraction, 4) for fraction in layer] for layer in layers]
            report["kept"] = [round(fmean(fractions), 4) for fractions in zip(*layers, strict=True)]
    return report


def _why_not_compress(plan: CompressionPlan, turn: TurnStats) -> str | None:
    """For a client: that its method was not worth using for this prompt.

    Returns: None where it was, and where bytes do not tell: with an attention that reads a part of what was
        shipped, and of a delta or several attempts.
    """
    first = turn.first
    if first is None or turn.replays or turn.delta_bytes is not None or plan.attention.name != "dense":
        return None
    if not turn.shipped_bytes or turn.shipped_bytes < first.full_bytes:
        return None
    return (
        f"method {first.method} shipped {turn.shipped_bytes} bytes, no fewer than the {first.full_bytes} of "
        "the full KV: it saves nothing for a prompt as short as this"
    )


def _by_layer(fractions: Sequence[float], num_bins: int) -> list[Sequence[float]]:
    return [fractions[start : start + num_bins] for start in range(0, len(fractions), num_bins)]
