"""The `kv` object: when a request's method was not worth using, and what several prompts' have together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import get_type_hints

from kvferry.services.router.completion.compression import _ADDED, ChosenPlan, KvReport, kv_report, of_prompts
from kvferry.services.router.turn.attempt import TurnStats
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import FirstToken
from kvferry.shared.sampling.params import SampledToken

FIRST = FirstToken(
    token=SampledToken(token_id=1, index=0),
    method="kivi",
    reused_tokens=0,
    full_bytes=1000,
    queue_s=0.0,
)
TURN = TurnStats(first=FIRST, shipped_bytes=1000)


def reason(turn: TurnStats, method: str = "kivi") -> str | None:
    budget = None if method == "kivi" else Budget(tokens=8)
    report = kv_report(ChosenPlan(plan=plan_for(method, budget=budget)), 9, [turn])
    return report.get("reason")


def test_a_method_that_saves_no_bytes_of_a_prompt_says_so() -> None:
    assert reason(TURN) == (
        "method kivi shipped 1000 bytes, no fewer than the 1000 of the full KV in the checkpoint's dtype: "
        "the prompt is too short, or rows are in a wider dtype"
    )
    more = replace(TURN, first=replace(FIRST, method="rdkv"), shipped_bytes=1500)
    assert "method rdkv shipped 1500 bytes, no fewer than the 1000" in str(reason(more, "rdkv"))


@pytest.mark.parametrize(
    ("turn", "method"),
    [
        (replace(TURN, shipped_bytes=999), "kivi"),
        (replace(TURN, shipped_bytes=0), "kivi"),  # not shipped yet
        (replace(TURN, shipped_bytes=2000, replays=1), "kivi"),
        (replace(TURN, delta_bytes=10), "kivi"),
        (replace(TURN, first=None), "kivi"),
        (replace(TURN, first=replace(FIRST, method="quest")), "quest"),  # reads a part of what it ships
    ],
)
def test_otherwise_there_is_no_reason(turn: TurnStats, method: str) -> None:
    assert reason(turn, method) is None


def test_a_report_names_another_models_table_that_stood_in() -> None:
    assert "epsilon_table" not in report_of(TURN)
    reports = [
        report_of(replace(TURN, first=replace(FIRST, epsilon_table=name))) for name in ("LLaMA-3.1-8B", "")
    ]
    assert reports[0]["epsilon_table"] == "LLaMA-3.1-8B"
    assert of_prompts(reports)["epsilon_table"] == ["LLaMA-3.1-8B", None]


def report_of(turn: TurnStats, num_tokens: int = 9, **options: Any) -> KvReport:
    chosen = ChosenPlan(plan=plan_for("rocketkv", budget=Budget(tokens=8)))
    return kv_report(chosen, num_tokens, [turn], **options)


def test_choices_of_a_prompt_add_up_by_key() -> None:
    other = replace(TURN, shipped_bytes=5, transfer_s=0.2, delta_bytes=3, smaller_budget=6, cache_bytes=4)
    report = kv_report(ChosenPlan(plan=plan_for("kivi")), 9, [TURN, replace(other, smaller_budget=7), other])
    assert (report["prompt_tokens"], report["full_bytes"]) == (9, 1000), "of the prompt, not of each choice"
    assert (report["shipped_bytes"], report["cache_bytes"], report["delta_bytes"]) == (1010, 8, 6)
    assert (report["transfer_ms"], report["smaller_token_budget"]) == (200.0, 6)


def test_several_prompts_lose_nothing_of_any_of_them() -> None:
    full = replace(TURN, first=replace(FIRST, method="full", reused_tokens=3), shipped_bytes=7, cache_bytes=2)
    tight = replace(TURN, first=replace(FIRST, method="rocketkv"), shipped_bytes=5, prefill_s=0.5)
    tight = replace(tight, delta_bytes=4, smaller_budget=6)
    tighter = replace(tight, delta_bytes=2, smaller_budget=5)
    reports = [report_of(full, 4), report_of(tight), report_of(tighter, max_tokens=2)]
    assert of_prompts(reports) == {
        "method": ["full", "rocketkv", "rocketkv"],
        "reason": [reports[0]["reason"], None, None],
        "prompt_tokens": 22,
        "reused_tokens": 3,
        "full_bytes": 3000,
        "shipped_bytes": 17,
        "delta_bytes": 6,
        "cache_bytes": 2,
        "prefill_ms": 500.0,
        "transfer_ms": 0.0,
        "smaller_token_budget": 5,
        "max_tokens": [None, None, 2],
    }


def test_prompts_that_are_alike_have_one_value() -> None:
    reports = [report_of(replace(TURN, shipped_bytes=1)) for _ in range(2)]
    assert of_prompts(reports) == {**reports[0], "prompt_tokens": 18, "full_bytes": 2000, "shipped_bytes": 2}
    assert of_prompts(reports[:1]) == reports[0]


def test_every_key_of_numbers_adds_up_and_every_other_may_be_a_list() -> None:
    listed = {name for name, hint in get_type_hints(KvReport).items() if "list" in str(hint)}
    of_one_prompt = {"session"}  # a session's request has no other
    assert listed == set(KvReport.__annotations__) - _ADDED.keys() - of_one_prompt
