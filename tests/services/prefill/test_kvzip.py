"""KVzip through the service: what repeats the prompt there is what does in one process, and can be ended."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from kvtest.prefill import make_prompt
from torch import Tensor

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest

if TYPE_CHECKING:
    from kvtest.prefill import Harness

METHODS = ("kvzip", "kvzip-rdkv")
CHUNK = 100


def plan_in_chunks(method: str = "kvzip", skip_layers: tuple[int, ...] = ()) -> CompressionPlan:
    return plan_for(
        method,
        budget=Budget(retention=0.2),
        overrides={"chunk_tokens": CHUNK},
        skip_layers=skip_layers,
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip_layers", [(), (0, 2)])
async def test_a_prompts_tensors_are_those_of_one_process(
    harness: Harness, skip_layers: tuple[int, ...], method: str
) -> None:
    request = harness.request(make_prompt(331), plan=plan_in_chunks(method, skip_layers))
    first, done = await harness.run(request)
    assert first.method == method
    assert sum(done.bytes_by_kind.values()) < 331 * harness.model.spec.kv_token_bytes
    harness.assert_sent(request, harness.oracle(request)[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_new", [7, 150])
async def test_a_second_turn_repeats_the_whole_prompt(harness: Harness, num_new: int, method: str) -> None:
    prompt = make_prompt(331)
    second, _ = await harness.second_turn(prompt, plan_in_chunks(method), num_new=num_new)
    harness.assert_sent(second, harness.oracle(second, earlier=prompt)[1])


async def test_the_repetition_leaves_no_row_in_the_history(harness: Harness) -> None:
    prompt, session = make_prompt(231), SessionKey(owner="alice", session_id="a")
    request = harness.request(prompt, plan=plan_in_chunks(), session=session)
    seen: list[int] = []
    harness.model.on_layer = lambda layer, keys: seen.append(keys.shape[1]) if layer == 1 else None
    await harness.run(request)
    # the prompt, then each chunk behind it, but for the first behind 8 tokens that lead to it
    assert seen == [231, 331, 339, 270]
    assert (await harness.commit(request)).num_tokens == len(prompt)


async def test_a_request_that_is_cancelled_while_its_prompt_is_repeated_opens_no_transfer(
    harness: Harness,
) -> None:
    request = harness.request(make_prompt(331), plan=plan_in_chunks())
    repeating, cancelled, seen = threading.Event(), threading.Event(), list[int]()

    def wait_in_the_second_chunk(layer: int, keys: Tensor) -> None:
        seen.append(keys.shape[1])
        if keys.shape[1] == 331 + CHUNK + 8 and layer == 1:
            repeating.set()
            assert cancelled.wait(60)

    harness.model.on_layer = wait_in_the_second_chunk
    running = asyncio.create_task(harness.run(request))
    assert await asyncio.to_thread(repeating.wait, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    cancelled.set()
    harness.model.on_layer = None
    first, _ = await harness.run(harness.request(make_prompt(50)))
    assert first.method == "full"
    # not in the third chunk, whose pass is as long
    assert seen.count(331 + CHUNK + 8) <= harness.model.spec.num_layers
    assert all(manifest.request_id != request.request_id for manifest in harness.sink.manifests)


async def test_a_prompt_without_room_behind_it_is_refused_before_its_pass(harness: Harness) -> None:
    num_tokens = harness.model.spec.max_model_len - 40
    seen: list[int] = []
    harness.model.on_layer = lambda layer, keys: seen.append(layer)
    with pytest.raises(InvalidRequest, match="has room for 40, and it must be at least 72"):
        await harness.run(harness.request(make_prompt(num_tokens), plan=plan_in_chunks()))
    assert not seen
