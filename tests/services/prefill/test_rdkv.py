"""RDKV through the service: the packed layers on the wire are those of one process, in a later turn too."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from kvtest.prefill import as_sent, make_prompt, plan_of
from torch import Tensor

from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.compression.rdkv import epsilon
from kvferry.shared.control.client import GrpcPrefillClient
from kvferry.shared.control.messages import PrefillRequest, SessionKey, TransferDone
from kvferry.shared.control.server import serve_control
from kvferry.shared.errors import OTHER_RELEASE, Overloaded

if TYPE_CHECKING:
    from kvtest.prefill import Harness

PLAN = plan_for("rdkv", budget=Budget(retention=0.2))
METHODS = ("rdkv", "rdkv-draft")


def assert_tensors_are_the_oracles(
    harness: Harness, request: PrefillRequest, done: TransferDone, earlier: tuple[int, ...] | None = None
) -> None:
    _, expected = harness.oracle(request, earlier)
    harness.assert_sent(request, expected)
    sizes = dict.fromkeys(("codes", "scales", "rows", "index"), 0)
    for kept in as_sent(expected):
        for name, tensor in kept.items():
            if name != "layout":
                sizes[name if name in sizes else "rows"] += tensor.nbytes
    assert {kind: done.bytes_by_kind[kind] for kind in sizes} == sizes


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip_layers", [(), (0, 2)])
async def test_a_prompts_tensors_are_those_of_one_process(
    harness: Harness, skip_layers: tuple[int, ...], method: str
) -> None:
    plan = plan_for(method, budget=PLAN.budget, skip_layers=skip_layers)
    request = harness.request(make_prompt(331), plan=plan)
    first, done = await harness.run(request)
    assert first.method == method
    if not skip_layers:  # rows are shipped as they are computed, and counted as in the checkpoint
        assert sum(done.bytes_by_kind.values()) < first.full_bytes
    assert_tensors_are_the_oracles(harness, request, done)


async def test_the_first_token_says_whose_distortion_table_weighed_the_prompt(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = make_prompt(80)
    own, _ = await harness.run(harness.request(prompt, plan=PLAN))
    assert own.epsilon_table == ""
    monkeypatch.setattr(epsilon, "_tables", epsilon._Tables(measured=()))  # as for a model without one
    for method, name in (("rdkv", "LLaMA-3.1-8B"), ("rdkv-draft", "LLaMA-3.1-8B"), ("snapkv", "")):
        plan = plan_for(method, budget=PLAN.budget)
        first, _ = await harness.run(harness.request(prompt, plan=plan))
        assert first.epsilon_table == name


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_new", [7, 50])
async def test_a_second_turns_tensors_are_those_of_one_process_with_that_history(
    harness: Harness, num_new: int, method: str
) -> None:
    prompt, plan = make_prompt(331), plan_for(method, budget=PLAN.budget)
    second, done = await harness.second_turn(prompt, plan, num_new=num_new)
    assert_tensors_are_the_oracles(harness, second, done, earlier=prompt)


async def test_a_draft_reads_what_the_prompt_says_and_leaves_no_row_in_the_history(harness: Harness) -> None:
    """The same prompt with and without a draft: another selection, the same first token and history."""
    prompt, results = make_prompt(331), []
    for method in METHODS:
        session = SessionKey(owner="alice", session_id=method)
        request = harness.request(prompt, plan=plan_for(method, budget=PLAN.budget), session=session)
        await harness.run(request)
        assert (await harness.commit(request)).num_tokens == len(prompt)
        results.append((harness.drawn[request.request_id], harness.sent(request)))
    (one, layers), (others, drafted) = results
    assert one == others[:1]
    assert len(others) == 8
    assert any(
        not torch.equal(tensors["codes"], drafted[layer]["codes"]) for layer, tensors in enumerate(layers)
    )


async def test_a_request_that_is_cancelled_while_its_draft_runs_opens_no_transfer(harness: Harness) -> None:
    request = harness.request(make_prompt(331), plan=plan_for("rdkv-draft", budget=PLAN.budget))
    drafting, cancelled = threading.Event(), threading.Event()

    def wait_in_the_draft(layer: int, keys: Tensor) -> None:
        if keys.shape[1] == 333 and layer == 1:
            drafting.set()
            assert cancelled.wait(60)

    harness.model.on_layer = wait_in_the_draft
    running = asyncio.create_task(harness.run(request))
    assert await asyncio.to_thread(drafting.wait, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    cancelled.set()
    harness.model.on_layer = None
    first, _ = await harness.run(harness.request(make_prompt(50)))
    assert first.method == "full"
    assert all(manifest.request_id != request.request_id for manifest in harness.sink.manifests)


async def test_a_plan_of_another_release_is_refused_as_no_mistake_of_a_client(harness: Harness) -> None:
    request = harness.request(make_prompt(40), plan=plan_for("rdkv", budget=Budget(tokens=8)))
    resolved = plan_of(request)
    part = resolved.plan.representation
    other = replace(part, params={**part.params, "token_weights": "attention"})
    plan = replace(resolved, plan=replace(resolved.plan, representation=other))
    request = replace(request, ticket=replace(request.ticket, plan=plan))
    server = await serve_control(listen="127.0.0.1:0", prefill=harness.service)
    client = GrpcPrefillClient(server.address)
    try:
        with pytest.raises(Overloaded, match="format 'rdkv' does not know token_weights") as caught:
            await anext(client.prefill(request, timeout_s=60))
    finally:
        await client.close()
        await server.close(0)
    assert caught.value.reason == OTHER_RELEASE
