"""One measured request, and how it is measured from the events of its stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

Outcome = Literal["complete", "cancelled", "failed"]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Kv(msgspec.Struct):
    """The fields of kvferry's report that a summary has."""

    method: str
    reused_tokens: int = 0
    full_bytes: int = 0
    shipped_bytes: int = 0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv: _Kv | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


@dataclass(kw_only=True)
class Sample:
    """One request. Times are seconds; moments count from the run's beginning.

    Attributes:
        kind: PROMPT:ANSWER of the load; turn: from 0.
        due_s: when the load has it sent; sent_s: when it was. Latencies count from `due_s`, so that a
            client that is late does not hide what a user would have waited.
        first_s, last_s: moments of the first and of the last token; None without one.
        between_s: times between two events with tokens.
        output_tokens: by the server's count; of a cancelled request, the events that came.
        error: of a failed one: its category, and what the server said.
        kv: kvferry's report.
    """

    kind: str
    turn: int
    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    between_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    outcome: Outcome = "failed"
    error: tuple[str, str] | None = None
    kv: dict[str, Any] | None = None

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def total_s(self) -> float | None:
        return None if self.last_s is None or self.outcome != "complete" else self.last_s - self.due_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time of a token after the first."""
        if (
            self.first_s is None
            or self.last_s is None
            or self.output_tokens < 2
            or self.outcome != "complete"
        ):
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    def record(self) -> dict[str, Any]:
        """Return the record for requests.jsonl: everything but the times between events."""
        fields = asdict(self)
        del fields["between_s"]
        return fields


class Reading:
    """The stream of one request as it arrives.

    Attributes: answer: the text so far.
    """

    def __init__(self, sample: Sample, began_s: float, cancel_after: int | None) -> None:
        """Args: began_s: the run's beginning by `time.perf_counter`."""
        self._sample = sample
        self._began_s = began_s
        self._cancel_after = cancel_after
        self._finished = False
        self._num_events = 0
        self.answer: list[str] = []
        self.cancelled = False
        self.said_error: str | None = None

    def event(self, data: bytes, now_s: float) -> bool:
        """Take one event. Returns False if the client closes the stream here."""
        if data == b"[DONE]":
            return True
        event = _EVENTS.decode(data)
        if event.error is not None:
            self.said_error = str(
                event.error.get("message") if isinstance(event.error, dict) else event.error
            )
            return True
        sample = self._sample
        if event.usage is not None:
            sample.prompt_tokens = event.usage.prompt_tokens
            sample.output_tokens = event.usage.completion_tokens
        if event.kv is not None:
            sample.kv = msgspec.to_builtins(event.kv)
        if not self._has_token(event):
            return True
        moment_s = now_s - self._began_s
        if sample.first_s is None:
            sample.first_s = moment_s
        elif sample.last_s is not None:
            sample.between_s.append(moment_s - sample.last_s)
        sample.last_s = moment_s
        self._num_events += 1
        self.cancelled = self._cancel_after is not None and self._num_events >= self._cancel_after
        return not self.cancelled

    def _has_token(self, event: _Event) -> bool:
        """Return whether an event has a token. A chat's first has only a role, its last may lack text."""
        found = False
        for choice in event.choices:
            delta = choice.delta
            text = choice.text if delta is None else delta.content
            if text:
                self.answer.append(text)
            if choice.finish_reason is not None:
                self._finished = found = True
            elif delta is None:
                found = found or choice.text is not None
            else:
                found = found or bool(text or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        return found

    def end(self) -> None:
        """Note how the stream has ended."""
        sample = self._sample
        if self.cancelled:
            sample.outcome, sample.output_tokens = "cancelled", self._num_events
        elif self.said_error is not None:
            sample.error = ("stream", self.said_error)
        elif not self._finished:
            sample.error = ("cut", "the stream ended without a finish reason")
        else:
            sample.outcome = "complete"
