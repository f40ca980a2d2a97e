"""The choices of a response: each a turn's tokens as text with log-probabilities.

`TextAssembler` holds back text that may begin a stop string.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypedDict

from kvferry.services.router.completion.requests import ChatRequest
from kvferry.services.router.completion.texts import TextRequest
from kvferry.services.router.completion.tools import read_arguments
from kvferry.services.router.turn.turn import Turn
from kvferry.shared.control.messages import FinishReason
from kvferry.shared.model.chat_template import ChatMessage
from kvferry.shared.model.text import TextAssembler
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.telemetry.metrics import RouterMetrics

if TYPE_CHECKING:
    from kvferry.shared.model.answer import AnswerParser
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
        """Note that decode has reserved memory for one of the request's choices."""
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
        """Count the request as neither waiting nor running any more. Idempotent."""
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
        request: where it wants log-probabilities or token ids, each token has a delta, even without text; it
            may leave out thoughts, and all calls but the first.
    """

    def __init__(
        self,
        index: int,
        turn: Turn,
        tokenizer: ChatTokenizer,
        parser: AnswerParser | None,
        timer: RequestTimer,
        request: ChatRequest | TextRequest,
    ) -> None:
        self.index = index
        self.turn = turn
        self.text = ""
        self._tokenizer = tokenizer
        self._assembler = TextAssembler(
            tokenizer,
            request.stop_strings,
            min_tokens=request.min_tokens or 0,
            includes_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
            shows_special=parser is not None,
        )
        self._timer = timer
        self._request = request
        self._with_logprobs = request.num_alternatives is not None
        self._with_token_ids = bool(request.return_token_ids)
        self._parser = parser
        self._parallel_calls = request.parallel_tool_calls is not False
        self._shows_reasoning = request.include_reasoning is not False
        self.reasoning = ""
        self.num_reasoning_tokens = 0
        self.calls: list[ToolCall] = []
        self._num_whole_calls = 0
        self._leaves_call_out = False
        self._content = ""
        self.prompt_tokens: PromptTokens | None = None
        self._offset = 0
        self._last_token_s: float | None = None

    async def show_prompt(self, text: str, token_ids: tuple[int, ...]) -> ChoiceDelta | None:
        """Decode the prompt's tokens; return what comes before the first, if the request wants it."""
        request, first = self._request, self.turn.stats.first
        assert first is not None, "there is a first token"
        if request.num_prompt_alternatives is not None:
            self.prompt_tokens = await asyncio.to_thread(
                prompt_tokens,
                token_ids,
                first.prompt_logprobs,
                TextAssembler(self._tokenizer),
                num_listed=request.num_alternatives or 0,
            )
        if not isinstance(request, TextRequest) or not request.echo:
            return None
        shown = self.prompt_tokens if request.logprobs is not None else None
        self.text, self._offset = text, len(text)
        return ChoiceDelta(index=self.index, text=text, logprobs=shown.entries if shown is not None else None)

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
        before = len(self.reasoning), len(self._content)
        added = self._added(delta.text, entries, token_ids)
        self.num_reasoning_tokens += len(self.reasoning) > before[0] and len(self._content) == before[1]
        return added

    def end(self, reason: FinishReason) -> Iterator[ChoiceDelta]:
        """Yield the text held back, if any, and the choice's end."""
        rest = self._assembler.flush()
        self.text += rest
        held = self._added(rest, () if self._with_logprobs else None, ends=True)
        if held is not None:
            yield held
        yield ChoiceDelta(index=self.index, finish_reason=self.finish_reason)

    @property
    def finish_reason(self) -> str | None:
        """The reason as clients see it; None while the completion goes on."""
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
        if self.calls:
            fields["tool_calls"] = [
                {**call, "function": {**function, "arguments": read_arguments(function["arguments"])}}
                for call, function in ((call, call["function"]) for call in self.calls)
            ]
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning.strip()
        return ChatMessage("assistant", self.content, json.dumps(fields) if fields else "")

    def _added(
        self,
        text: str,
        entries: tuple[TokenLogprob, ...] | None,
        token_ids: tuple[int, ...] = (),
        *,
        ends: bool = False,
    ) -> ChoiceDelta | None:
        """Return what a text adds, in parts if there is a parser; None if nothing can be delivered."""
        reasoning, calls = "", list[ToolCallDelta]()
        if self._parser is not None:
            parts = [*self._parser.feed(text), *(self._parser.finish() if ends else ())]
            text, reasoning = (
                "".join(getattr(part, name) for part in parts) for name in ("content", "reasoning")
            )
            called = [self._called(part.call) for part in parts if part.call is not None]
            calls = [delta for delta in called if delta is not None]
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
        """Take what some text adds to the calls; returns None if the call is left out."""
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


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details={"cached_tokens": cached_tokens},
    )


class PromptLogprob(TypedDict):
    logprob: float
    decoded_token: str


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """A prompt's tokens as text with their log-probabilities.

    Attributes:
        entries: one a token, its text's place counted in the tokens' texts. The first has no log-probability.
        by_id: for each token its own log-probability and its alternatives', by token id; None for the first.
    """

    entries: tuple[TokenLogprob, ...]
    by_id: tuple[dict[str, PromptLogprob] | None, ...]


def prompt_tokens(
    token_ids: Sequence[int], reported: Sequence[SampledToken], assembler: TextAssembler, *, num_listed: int
) -> PromptTokens:
    """Decode a prompt token by token.

    Args:
        reported: every token after the first.
        assembler: a new one, without stop strings.
        num_listed: how many alternatives each entry has.
    """
    assert len(reported) == len(token_ids) - 1, "prefill reports every token after the first"
    entries: list[TokenLogprob] = []
    by_id: list[dict[str, PromptLogprob] | None] = []
    offset = 0
    for token_id, token in zip(token_ids, (None, *reported), strict=True):
        # Alternatives are decoded in the token's place, so before the token itself is taken.
        top = tuple(
            (other, assembler.token_text(other), value)
            for other, value in (token.top_logprobs if token is not None else ())
        )
        text = assembler.push(token_id).token_text
        logprob = token.logprob if token is not None else None
        listed = tuple(TokenLogprob(text=name, logprob=value) for _, name, value in top[:num_listed])
        entries.append(TokenLogprob(text=text, logprob=logprob, offset=offset, top=listed))
        offset += len(text)
        if logprob is None:
            by_id.append(None)
            continue
        own = {str(token_id): PromptLogprob(logprob=logprob, decoded_token=text)}
        others = {str(other): PromptLogprob(logprob=value, decoded_token=name) for other, name, value in top}
        by_id.append(own | others | own)  # itself first
    return PromptTokens(entries=tuple(entries), by_id=tuple(by_id))
