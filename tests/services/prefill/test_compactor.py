"""Compactor through the service: its leverage needs keys before RoPE, those of the history too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kvtest.prefill import make_prompt

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import PrefillRequest

if TYPE_CHECKING:
    from kvtest.prefill import Harness

PLAN = plan_for("compactor", budget=Budget(retention=0.3))


def assert_rows_are_the_oracles(
    harness: Harness, request: PrefillRequest, earlier: tuple[int, ...] | None = None
) -> None:
    _, expected = harness.oracle(request, earlier)
    for sent, rows in zip(harness.sent(request), expected.compressed, strict=True):
        assert torch.equal(sent["index"], rows["index"])
        torch.testing.assert_close(sent["keys"], rows["keys"])
        torch.testing.assert_close(sent["values"], rows["values"])


async def test_a_prompts_rows_on_the_wire_are_those_of_one_process(harness: Harness) -> None:
    request = harness.request(make_prompt(331), plan=PLAN)
    first, _ = await harness.run(request)
    assert first.method == "compactor"
    assert_rows_are_the_oracles(harness, request)


async def test_a_second_turns_rows_are_those_of_one_process_with_that_history(harness: Harness) -> None:
    prompt = make_prompt(331)
    second, _ = await harness.second_turn(prompt, PLAN, num_new=50)
    assert_rows_are_the_oracles(harness, second, earlier=prompt)
