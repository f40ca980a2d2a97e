"""Drafts at prefill: the answer's first tokens, told as they are drawn, to the completion's end at most."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kvtest.prefill import key_of, make_prompt
from kvtest.steps import CountingDevice
from torch import Tensor

from kvferry.services.prefill import engine
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import FirstToken, TokenGenerated, TransferDone
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.sampling.params import SamplingParams

if TYPE_CHECKING:
    from kvtest.prefill import Harness

PLAN = plan_for("rdkv-draft", budget=Budget(retention=0.2))
PROMPT = make_prompt(331)


async def drawn(harness: Harness, **sampling: Any) -> list[int]:
    params = SamplingParams(
        **({"max_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True} | sampling)
    )
    request = harness.request(PROMPT, plan=PLAN, sampling=params)
    await harness.run(request)
    tokens = harness.drawn[request.request_id]
    assert [token.index for token in tokens] == list(range(len(tokens)))
    end = harness.sink.ends[key_of(request)]
    assert end.first_token is not None
    ids = [token.token_id for token in tokens]
    assert [*end.draft, end.first_token.token_id] == ids
    return ids


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 1), (2, 2), (8, 8), (9, 9), (20, 9)])
async def test_a_draft_and_one_more_token_are_drawn(harness: Harness, max_tokens: int, expected: int) -> None:
    every = await drawn(harness)
    assert await drawn(harness, max_tokens=max_tokens) == every[:expected]


@pytest.mark.parametrize("at", [0, 3, 7])
async def test_nothing_is_drawn_after_the_end_of_the_completion(
    harness: Harness, demo_model_dir: Path, at: int
) -> None:
    every = await drawn(harness)
    first = every.index(every[at])
    assert await drawn(harness, stop_token_ids=(every[at],)) == every[: first + 1]
    tokenizer = ChatTokenizer.load(demo_model_dir)
    harness.service._tokenizer = lambda: tokenizer  # a service's is its checkpoint's
    text = tokenizer.decode([every[at]]).strip()
    if text:
        stopped = await drawn(harness, stop=(text,))
        assert stopped == every[: len(stopped)]
        assert len(stopped) <= first + 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CountingDevice:
    device = CountingDevice()
    monkeypatch.setattr(engine, "step_device", lambda model, priority: device)
    return device


async def test_one_captured_step_drafts_for_all_prompts(device: CountingDevice, harness: Harness) -> None:
    every = [await drawn(harness, seed=seed) for seed in (3, 4, 3)]
    assert every[0] == every[2] != every[1]
    assert device.num_captures == 1


async def test_tokens_are_told_before_the_next_is_drawn(harness: Harness) -> None:
    request = harness.request(PROMPT, plan=PLAN, sampling=SamplingParams(max_tokens=20, temperature=0.0))
    go_on = threading.Event()

    def wait_in_the_draft(layer: int, keys: Tensor) -> None:
        if keys.shape[1] == len(PROMPT) + 2:
            assert go_on.wait(60)

    harness.model.on_layer = wait_in_the_draft
    stream = harness.service.prefill(request, timeout_s=60)
    assert isinstance(await asyncio.wait_for(anext(stream), 60), FirstToken)
    assert isinstance(await asyncio.wait_for(anext(stream), 60), TokenGenerated)
    assert not harness.sink.manifests
    go_on.set()
    assert isinstance([event async for event in stream][-1], TransferDone)


async def test_siblings_have_a_draft_that_none_of_them_begins_with(harness: Harness) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    alone = harness.request(PROMPT, plan=PLAN, sampling=dataclasses.replace(sampling, temperature=0.0))
    await harness.run(alone)
    several = harness.request(PROMPT, plan=PLAN, sampling=sampling)
    several = dataclasses.replace(several, siblings=(dataclasses.replace(sampling, seed=4),))
    first, _ = await harness.run(several)
    assert len(harness.drawn[several.request_id]) == 1
    assert len(first.sibling_tokens) == 1
    for one, other in zip(harness.sent(alone), harness.sent(several), strict=True):
        assert {name for name in one if name not in other} == {"draft_keys", "draft_values"}
        assert all((one[name] == tensor).all() for name, tensor in other.items())
