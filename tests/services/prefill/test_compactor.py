"""Compactor through the service: its leverage needs keys before RoPE, those of the history too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import CommitTurnRequest, PrefillRequest, SessionKey
from kvferry.shared.wire.messages import TransferKey
from kvferry.tools.oracle import OneProcessGenerator

if TYPE_CHECKING:
    from kvtest.prefill import Harness

PLAN = plan_for("compactor", budget=Budget(retention=0.3))
SESSION = SessionKey(owner="alice", session_id="a")


def make_prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(10, 700, (num_tokens,), generator=generator).tolist())


def assert_rows_are_the_oracles(
    harness: Harness, request: PrefillRequest, earlier: tuple[int, ...] | None = None
) -> None:
    generator = OneProcessGenerator(harness.model.model)
    before = None if earlier is None else generator.capture(list(earlier))
    captured = generator.capture(list(request.prompt_token_ids), earlier=before)
    expected = generator.compress(captured, plan=PLAN, max_new_tokens=request.sampling.max_tokens).compressed
    key = TransferKey(transfer_id=request.ticket.transfer_id, generation=1)
    for layer, rows in enumerate(expected):
        sent = harness.sink.tensors(key, layer)
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
    request = harness.request(prompt, plan=PLAN, session=SESSION)
    await harness.run(request)
    await harness.service.commit_turn(
        CommitTurnRequest(request_id=request.request_id, session=SESSION, token_ids=prompt), timeout_s=10
    )
    second = harness.request(prompt + make_prompt(50, seed=1), plan=PLAN, session=SESSION)
    first, _ = await harness.run(second)
    assert first.reused_tokens == len(prompt)
    assert_rows_are_the_oracles(harness, second, earlier=prompt)
