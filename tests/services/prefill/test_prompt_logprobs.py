"""The log-probabilities of a prompt's own tokens, against a plain transformers forward of the same prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest

if TYPE_CHECKING:
    from kvtest.prefill import Harness


@pytest.mark.parametrize("num_tokens", [1, 2, 300])
async def test_they_are_transformers_own_whatever_the_method_selects(
    harness: Harness, demo_model_dir: Path, num_tokens: int
) -> None:
    prompt = tuple(torch.randint(7, 600, (num_tokens,), generator=torch.Generator().manual_seed(3)).tolist())
    plan = plan_for("rocketkv", budget=Budget(tokens=16))
    first, _ = await harness.run(harness.request(prompt, plan=plan, prompt_logprobs=2))
    own = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = own(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    reported = first.prompt_logprobs
    assert [(token.index, token.token_id) for token in reported] == list(enumerate(prompt))[1:]
    for token in reported:
        logprobs = expected[token.index - 1]
        assert token.logprob == pytest.approx(float(logprobs[token.token_id]), abs=1e-3)
        values = [value for _, value in token.top_logprobs]
        assert values == pytest.approx(logprobs.topk(2).values.tolist(), abs=1e-3)
        for token_id, value in token.top_logprobs:
            assert value == pytest.approx(float(logprobs[token_id]), abs=1e-3)
    if num_tokens > 1:
        assert expected.std() > 0.2


async def test_a_prompt_that_does_not_ask_gets_none(harness: Harness) -> None:
    first, _ = await harness.run(harness.request((9, 10, 11)))
    assert first.prompt_logprobs == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be 0 to 20"),
        (
            {"prompt_logprobs": 0, "session": SessionKey(owner="o", session_id="s")},
            "must have no session and no document",
        ),
        (
            {"prompt_logprobs": 0, "document": SessionKey(owner="o", session_id="s")},
            "must have no session and no document",
        ),
    ],
)
async def test_requests_whose_tokens_are_not_all_run_are_refused(
    harness: Harness, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem) as raised:
        await harness.run(harness.request((9, 10, 11), **changes))
    assert raised.value.param == "prompt_logprobs"


async def test_more_values_than_a_message_holds_are_refused(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.services.prefill.service._MAX_REPORTED_LOGPROBS", 8)
    await harness.run(harness.request((9, 10, 11, 12), prompt_logprobs=1))
    with pytest.raises(InvalidRequest, match="that is 12 values; at most 8"):
        await harness.run(harness.request((9, 10, 11, 12), prompt_logprobs=2))
