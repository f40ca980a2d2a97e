"""`kv.reason`: when a request's method was not worth using."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.services.router.completion.choice import kv_report
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
    prefill_s=0.1,
    compress_s=0.0,
    queue_s=0.0,
)
TURN = TurnStats(first=FIRST, shipped_bytes=1000)


def reason(turn: TurnStats, method: str = "kivi") -> str | None:
    budget = None if method == "kivi" else Budget(tokens=8)
    report = kv_report(plan_for(method, budget=budget), None, 9, [turn])
    return report.get("reason")


def test_a_method_that_saves_no_bytes_of_a_prompt_says_so() -> None:
    assert reason(TURN) == (
        "method kivi shipped 1000 bytes, no fewer than the 1000 of the full KV: it saves nothing for a "
        "prompt as short as this"
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
