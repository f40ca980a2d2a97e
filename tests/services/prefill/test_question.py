"""A prompt's question through the service: what is shipped is what one process selects by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from kvtest.prefill import make_prompt

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.model.question import Question

if TYPE_CHECKING:
    from kvtest.prefill import Harness

METHODS = ("snapkv", "rocketkv", "adakv", "rdkv", "rdkv-draft")


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "question", [Question(num_tokens=1, num_after=5), Question(num_tokens=45, num_after=3)], ids=str
)
async def test_a_prompt_is_compressed_as_one_process_does_by_its_question(
    harness: Harness, method: str, question: Question
) -> None:
    plan = plan_for(method, budget=Budget(tokens=24))
    request = harness.request(make_prompt(331), plan=plan, question=question)
    await harness.run(request)
    harness.assert_sent(request, harness.oracle(request)[1])
    other = harness.request(make_prompt(331), plan=plan)
    await harness.run(other)
    assert any(
        not torch.equal(tensor, unknown[name])
        for layer, unknown in zip(harness.sent(request), harness.sent(other), strict=True)
        for name, tensor in layer.items()
        if tensor.shape == unknown[name].shape
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_new", [4, 11, 50])
async def test_in_a_session_the_new_tokens_of_the_question_select(
    harness: Harness, method: str, num_new: int
) -> None:
    """Fewer than the template's tokens after the question, fewer than the window, and more."""
    prompt, plan = make_prompt(331), plan_for(method, budget=Budget(tokens=24))
    session = SessionKey(owner="alice", session_id="a")
    request = harness.request(prompt, plan=plan, session=session)
    await harness.run(request)
    await harness.commit(request)
    second = harness.request(
        prompt + make_prompt(num_new, seed=1),
        plan=plan,
        session=session,
        question=Question(num_tokens=num_new, num_after=5),
    )
    first, _ = await harness.run(second)
    assert first.reused_tokens == len(prompt)
    harness.assert_sent(second, harness.oracle(second, earlier=prompt)[1])


@pytest.mark.parametrize(("question", "num_run"), [(None, 32), (Question(num_tokens=60, num_after=5), 37)])
async def test_the_question_and_what_is_after_it_are_run_again_where_another_prompt_is_reused(
    harness: Harness, question: Question | None, num_run: int
) -> None:
    prompt, plan = make_prompt(331), plan_for("snapkv", budget=Budget(tokens=24))
    for number, expected in ((1, 0), (2, len(prompt) - num_run)):
        session = SessionKey(owner="alice", session_id=f"implicit/{number}")
        request = harness.request(prompt, plan=plan, session=session, question=question)
        first, _ = await harness.run(request)
        assert first.reused_tokens == expected
        await harness.commit(request)


async def test_a_question_outside_the_prompt_is_as_an_unknown_one(harness: Harness) -> None:
    plan = plan_for("snapkv", budget=Budget(tokens=24))
    sent = []
    for question in (
        None,
        Question(num_tokens=4000, num_after=331),
        Question(num_tokens=1, num_after=2**32 - 1),
    ):
        request = harness.request(make_prompt(331), plan=plan, question=question)
        await harness.run(request)
        sent.append(harness.sent(request))
    for other in sent[1:]:
        for layer, expected in zip(other, sent[0], strict=True):
            assert all(torch.equal(layer[name], tensor) for name, tensor in expected.items())
