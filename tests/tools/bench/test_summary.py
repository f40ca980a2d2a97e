"""Figures of samples whose results are known."""

from __future__ import annotations

import json

import pytest

from kvferry.tools.bench.config import BenchConfig
from kvferry.tools.bench.sample import Reading, Sample
from kvferry.tools.bench.summary import is_good, median_of, summarise


def sample(due_s: float, first_s: float, last_s: float, tokens: int) -> Sample:
    return Sample(
        kind="9:5", turn=0, due_s=due_s, sent_s=due_s + 0.01, first_s=due_s + first_s, last_s=due_s + last_s,
        output_tokens=tokens, outcome="complete",
    )  # fmt: skip


def test_rates_latencies_and_goodput() -> None:
    samples = [sample(0.0, 0.1, 0.5, 5), sample(1.0, 0.3, 1.0, 8), sample(1.5, 0.2, 0.2, 1)]
    samples.append(Sample(kind="9:5", turn=0, due_s=1.9, sent_s=1.9, error=("http_503", "full")))
    cancelled = Sample(kind="9:5", turn=0, due_s=1.0, sent_s=1.0, first_s=1.1, last_s=1.2, output_tokens=2)
    cancelled.outcome = "cancelled"
    config = BenchConfig(first_token_bound_s=0.2, per_token_bound_s=0.1, total_bound_s=0.6)
    figures = summarise([*samples, cancelled], config, client_cpu_s=0.2)
    assert figures["duration_s"] == pytest.approx(2.0)
    assert (figures["requests"], figures["complete"], figures["cancelled"]) == (5, 3, 1)
    assert figures["failed"] == {"http_503": 1}
    assert figures["output_tokens_per_s"] == pytest.approx((5 + 8 + 1 + 2) / 2.0)
    assert figures["good_requests_per_s"] == pytest.approx(2 / 2.0)
    assert figures["good_share"] == pytest.approx(2 / 4)
    assert figures["per_token_ms"]["max"] == pytest.approx(100.0)
    assert figures["per_token_ms"]["mean"] == pytest.approx((400 / 4 + 700 / 7) / 2)
    assert figures["first_token_ms"]["p50"] == pytest.approx(150.0)
    assert figures["total_ms"]["p50"] == pytest.approx(500.0)
    assert figures["client"]["cpu_share"] == pytest.approx(0.1)
    assert "kv" not in figures


@pytest.mark.parametrize("field", ["first_token_bound_s", "per_token_bound_s", "total_bound_s"])
def test_each_bound_counts(field: str) -> None:
    within = sample(0.0, 0.1, 0.5, 5)
    assert is_good(within, BenchConfig())
    assert is_good(within, BenchConfig(**{field: 0.51}))
    assert not is_good(within, BenchConfig(**{field: 0.09}))


def test_the_median_is_of_each_figure() -> None:
    runs = [{"a": value, "b": {"p50": 10 - value}, "failed": {"cut": 1}} for value in (1, 5, 2)]
    assert median_of(runs) == {"a": 2, "b": {"p50": 8}, "failed": {"cut": 3}}


def read(*events: object, cancel_after: int | None = None) -> tuple[Sample, list[bool], str]:
    found = Sample(kind="9:5", turn=0, due_s=1.0)
    reading = Reading(found, 100.0, cancel_after)
    went_on = [
        reading.event(event if isinstance(event, bytes) else json.dumps(event).encode(), 101.5 + number)
        for number, event in enumerate(events)
    ]
    reading.end()
    return found, went_on, "".join(reading.answer)


def delta(finish: str | None = None, **fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}


def test_a_chats_role_is_no_token_and_its_end_is() -> None:
    found, _, answer = read(
        delta(role="assistant", content=""), delta(content="a"), delta(reasoning_content="b"),
        delta("stop"), USAGE | {"kv": {"method": "rdkv", "shipped_bytes": 7, "new_field": 1}}, b"[DONE]",
    )  # fmt: skip
    assert (found.outcome, answer) == ("complete", "a")
    assert found.first_token_s == pytest.approx(1.5)
    assert found.total_s == pytest.approx(3.5)
    assert found.per_token_s == pytest.approx(1.0)
    assert found.between_s == pytest.approx([1.0, 1.0])
    assert found.kv is not None
    assert (found.kv["method"], found.kv["shipped_bytes"]) == ("rdkv", 7)


def test_a_completions_empty_text_is_a_token() -> None:
    events = [{"choices": [{"text": text, "finish_reason": None}]} for text in ("", " a")]
    found, _, answer = read(*events, {"choices": [{"text": "", "finish_reason": "length"}]}, USAGE)
    assert found.first_token_s == pytest.approx(0.5)
    assert (found.outcome, answer, found.output_tokens) == ("complete", " a", 3)


def test_a_stream_that_is_cut_off_or_has_an_error_is_a_failure() -> None:
    found, _, _ = read(delta(content="a"))
    assert found.outcome == "failed"
    assert found.error is not None
    assert found.error[0] == "cut"
    found, _, _ = read(delta(content="a"), {"error": {"message": "no memory"}}, b"[DONE]")
    assert found.error == ("stream", "no memory")


def test_the_client_stops_reading_where_it_cancels() -> None:
    found, went_on, _ = read(delta(content="a"), delta(content="b"), cancel_after=2)
    assert went_on == [True, False]
    assert (found.outcome, found.output_tokens, found.total_s) == ("cancelled", 2, None)
