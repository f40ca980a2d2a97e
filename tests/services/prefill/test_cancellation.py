"""Failure and cancellation at every stage: what was held is freed, and the next request is served."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from kvtest.clock import Clock, turn_loop_clock
from kvtest.prefill import key_of, make_prompt, plan_of
from kvtest.waiting import eventually
from torch import Tensor

from kvferry.shared.compression.plan import CompressionPlan, Part, ResolvedPlan
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import FirstToken, SessionKey
from kvferry.shared.errors import (
    CapacityExceeded,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    LeaseExpired,
    ProtocolMismatch,
    WorkerUnavailable,
)
from kvferry.shared.sampling.params import SamplingParams

if TYPE_CHECKING:
    from kvtest.prefill import Harness

A = SessionKey(owner="key-a", session_id="s")


async def assert_serves(harness: Harness) -> None:
    """The service is whole: nothing held, nothing running, and a new request goes through."""
    await eventually(lambda: harness.store.size_bytes == 0)
    status = await harness.service.status(timeout_s=1)
    assert (status.running, status.waiting) == (0, 0)
    await harness.run(harness.request(make_prompt(20, seed=9)))


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_a_waiting_request_never_runs_it(harness: Harness) -> None:
    harness.model.hold.clear()
    running = asyncio.create_task(harness.run(harness.request(make_prompt(20))))
    await eventually(harness.model.entered.is_set)
    waiting = asyncio.create_task(harness.run(harness.request(make_prompt(30), session=A)))
    await asyncio.sleep(0)
    status = await harness.service.status(timeout_s=1)
    assert (status.running, status.waiting) == (1, 1)
    await cancel(waiting)
    harness.model.hold.set()
    await running
    await assert_serves(harness)
    assert harness.metric("prefill_tokens_total") == 20 + 20


async def test_cancelling_in_mid_prompt_stops_at_the_next_layer(harness: Harness) -> None:
    layers: list[int] = []
    loop = asyncio.get_running_loop()
    reached = asyncio.Event()
    cancelled = threading.Event()

    def hold_at_layer_one(layer: int, keys: Tensor) -> None:
        layers.append(layer)
        if layer == 1:
            loop.call_soon_threadsafe(reached.set)
            assert cancelled.wait(60)

    request = harness.request(make_prompt(150), session=A)
    harness.model.on_layer = hold_at_layer_one
    task = asyncio.create_task(harness.run(request))
    await asyncio.wait_for(reached.wait(), 60)
    await eventually(lambda: harness.store.size_bytes > 0)  # staged by another thread
    await cancel(task)
    cancelled.set()
    await eventually(lambda: key_of(request) in harness.sink.aborted)
    harness.model.on_layer = None
    await assert_serves(harness)
    assert layers == [0, 1]
    assert harness.store.turn(request.request_id) is None


async def test_closing_the_stream_after_the_first_token_aborts_transfer_and_turn(harness: Harness) -> None:
    harness.sink.gate.clear()
    request = harness.request(make_prompt(50), session=A)
    stream = harness.service.prefill(request, timeout_s=60)
    assert isinstance(await anext(stream), FirstToken)
    assert harness.store.size_bytes > 0
    await stream.aclose()
    assert harness.store.size_bytes == 0
    harness.sink.gate.set()
    await assert_serves(harness)


async def test_a_cancellation_that_comes_as_a_wait_ends_is_heeded(harness: Harness) -> None:
    service, work = harness.service, asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service._before(service._clock() + 60, work, "the transfer"))
    await asyncio.sleep(0)
    work.set_result(1.0)
    await cancel(task)


async def test_cancelling_while_awaiting_the_acknowledgement_aborts(harness: Harness) -> None:
    harness.sink.gate.clear()
    request = harness.request(make_prompt(50), session=A)
    task = asyncio.create_task(harness.run(request))
    await eventually(harness.sink.is_committing.is_set)
    await cancel(task)
    harness.sink.gate.set()
    await assert_serves(harness)


async def test_closing_the_stream_after_its_last_event_keeps_the_turn(harness: Harness) -> None:
    request = harness.request(make_prompt(50), session=A)
    stream = harness.service.prefill(request, timeout_s=60)
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    assert harness.store.size_bytes == 50 * harness.model.spec.kv_token_bytes
    assert harness.store.turn(request.request_id) is not None


async def test_the_deadline_frees_everything(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.model.hold.clear()
    request = harness.request(make_prompt(50), session=A)
    with pytest.raises(DeadlineExceeded):
        [event async for event in harness.service.prefill(request, timeout_s=0.3)]
    harness.model.hold.set()
    await assert_serves(harness)

    before, waits = harness.service._before, asyncio.Event()

    async def noted(deadline_s: float, work: Any, what: str) -> Any:
        waiting = asyncio.ensure_future(before(deadline_s, work, what))
        await asyncio.sleep(0)
        if what == "the transfer":
            waits.set()
        return await waiting

    monkeypatch.setattr(harness.service, "_before", noted)
    harness.sink.gate.clear()
    request = harness.request(make_prompt(50), session=A)
    stream = harness.service.prefill(request, timeout_s=60)
    assert isinstance(await anext(stream), FirstToken)
    acknowledged = asyncio.create_task(anext(stream))
    await asyncio.wait_for(waits.wait(), 30)
    turn_loop_clock(60)
    with pytest.raises(DeadlineExceeded, match="the transfer"):
        await acknowledged
    harness.sink.gate.set()
    await assert_serves(harness)


async def test_a_refused_transfer_drops_the_turn_and_is_counted_by_reason(harness: Harness) -> None:
    harness.sink.refuse = LeaseExpired("no such reservation", reason="unknown_key")
    with pytest.raises(LeaseExpired):
        await harness.run(harness.request(make_prompt(150), session=A))
    assert harness.metric("transfer_failed_total", reason="unknown_key") == 1
    assert harness.metric("kv_transfer_bytes_total") == 0
    harness.sink.refuse = None
    await assert_serves(harness)


async def test_an_unexpected_error_fails_its_request_alone(harness: Harness) -> None:
    def fail(layer: int, keys: Tensor) -> None:
        if layer == 2:
            raise RuntimeError("a kernel broke")

    harness.model.on_layer = fail
    with pytest.raises(KvferryError, match="failed in prefill"):
        await harness.run(harness.request(make_prompt(50), session=A))
    harness.model.on_layer = None
    await assert_serves(harness)


async def test_closing_the_service_fails_what_is_under_way(harness: Harness) -> None:
    harness.model.hold.clear()
    tasks = [asyncio.create_task(harness.run(harness.request(make_prompt(20), session=A))) for _ in range(3)]
    await eventually(harness.model.entered.is_set)
    closing = asyncio.create_task(harness.service.close())
    await eventually(lambda: harness.service._engine._stopping)
    harness.model.hold.set()
    await closing
    for task in tasks:
        with pytest.raises(WorkerUnavailable):
            await task
    assert harness.store.size_bytes == 0
    with pytest.raises(WorkerUnavailable):
        await harness.run(harness.request(make_prompt(20)))


def session(owner: str, number: int) -> SessionKey:
    return SessionKey(owner=owner, session_id=str(number))


@pytest.mark.parametrize("prefill_clock", [Clock()], ids=["equal times"])
async def test_owners_share_the_engine_fairly(harness: Harness) -> None:
    harness.model.hold.clear()
    blocker = asyncio.create_task(harness.run(harness.request(make_prompt(20))))
    await eventually(harness.model.entered.is_set)
    names = ["a1", "a2", "a3", "b1", "b2", "c1"]
    tasks = []
    for number, name in enumerate(names):
        request = harness.request(make_prompt(20), session=session(name[0], number), request_id=name)
        tasks.append(asyncio.create_task(harness.run(request)))
        await asyncio.sleep(0)
    harness.model.hold.set()
    await asyncio.gather(blocker, *tasks)
    served = [manifest.request_id for manifest in harness.sink.manifests[1:]]
    assert served == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_owners_share_the_engine_without_sessions(harness: Harness) -> None:
    harness.model.hold.clear()
    blocker = asyncio.create_task(harness.run(harness.request(make_prompt(20))))
    await eventually(harness.model.entered.is_set)
    tasks = []
    for name in ["a1", "a2", "a3", "b1"]:
        request = harness.request(make_prompt(20), owner=name[0], request_id=name)
        tasks.append(asyncio.create_task(harness.run(request)))
        await asyncio.sleep(0)
    harness.model.hold.set()
    await asyncio.gather(blocker, *tasks)
    served = [manifest.request_id for manifest in harness.sink.manifests[1:]]
    assert served == ["a1", "b1", "a2", "a3"]


@pytest.mark.parametrize("prefill_clock", [Clock()], ids=["at once"])
@pytest.mark.parametrize("prefill_options", [{"max_waiting": 2}], ids=["two-may-wait"])
async def test_a_full_queue_refuses_with_a_reason(harness: Harness) -> None:
    harness.model.hold.clear()
    running = asyncio.create_task(harness.run(harness.request(make_prompt(20))))
    await eventually(harness.model.entered.is_set)
    waiting = [asyncio.create_task(harness.run(harness.request(make_prompt(20)))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityExceeded) as caught:
        await harness.run(harness.request(make_prompt(20)))
    assert caught.value.reason == "queue_full"
    assert caught.value.retry_after_s == 1.0, "the least, because no pass has been timed yet"
    harness.model.hold.set()
    await asyncio.gather(running, *waiting)


@pytest.mark.parametrize("prefill_options", [{"max_waiting": 3}], ids=["three-may-wait"])
async def test_in_a_full_queue_the_key_that_has_most_of_it_gives_way(harness: Harness) -> None:
    harness.model.hold.clear()
    running = asyncio.create_task(harness.run(harness.request(make_prompt(20))))
    await eventually(harness.model.entered.is_set)
    tasks = {}
    for number, name in enumerate(["a1", "a2", "a3", "b1", "b2", "a4"]):
        request = harness.request(make_prompt(20), session=session(name[0], number), request_id=name)
        tasks[name] = asyncio.create_task(harness.run(request))
        await asyncio.sleep(0)
    await eventually(lambda: tasks["a3"].done() and tasks["b2"].done() and tasks["a4"].done())
    harness.model.hold.set()
    ended = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
    await running
    refused = {name: outcome for name, outcome in ended.items() if isinstance(outcome, BaseException)}
    # b's second would have as many as a, and a's fourth more.
    assert refused.keys() == {"a3", "b2", "a4"}
    assert {error.reason for error in refused.values() if isinstance(error, CapacityExceeded)} == {
        "queue_full"
    }


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"model_fingerprint": "another"}, ProtocolMismatch, "another"),
        ({"prompt_token_ids": ()}, InvalidRequest, "0 tokens"),
        ({"prompt_token_ids": (5, 704)}, InvalidRequest, "704"),
        ({"prompt_token_ids": (-1,)}, InvalidRequest, "-1"),
        ({"prompt_token_ids": (5,) * 9000}, ContextLengthExceeded, "9000"),
        ({"sampling": SamplingParams(max_tokens=9000)}, ContextLengthExceeded, "9000"),
        ({"sampling": SamplingParams(max_tokens=0)}, InvalidRequest, "max_tokens is 0"),
        ({"sampling": SamplingParams(max_tokens=1, logit_bias={704: 1.0})}, InvalidRequest, "704"),
    ],
)
async def test_bad_requests_are_refused_before_they_run(
    harness: Harness, changes: dict[str, object], error: type[KvferryError], named: str
) -> None:
    request = dataclasses.replace(harness.request((5, 6, 7)), **changes)  # type: ignore[arg-type]
    if request.prompt_token_ids and request.sampling.max_tokens:
        plan = harness.resolve(plan_for("full"), request.prompt_token_ids, request.sampling)
        request = dataclasses.replace(request, ticket=dataclasses.replace(request.ticket, plan=plan))
    with pytest.raises(error, match=named):
        await harness.run(request)
    assert harness.metric("prefill_tokens_total") == 0
    assert harness.metric("transfer_failed_total") == 0
    assert not harness.sink.manifests


def with_layer(plan: ResolvedPlan, **changes: object) -> ResolvedPlan:
    """The plan with another first layer."""
    first, *rest = plan.layers
    return dataclasses.replace(plan, layers=(dataclasses.replace(first, **changes), *rest))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda plan: None, "the ticket has no plan"),
        (
            lambda plan: dataclasses.replace(plan, num_prompt_tokens=4),
            "the ticket's plan has num_prompt_tokens 4; the request has 3",
        ),
        (
            lambda plan: dataclasses.replace(plan, max_new_tokens=9),
            "the ticket's plan has max_new_tokens 9; 1 to 8 are allowed",
        ),
        (lambda plan: dataclasses.replace(plan, layers=plan.layers[1:]), "number of layers 3"),
        (lambda plan: with_layer(plan, rows=4), "4 rows in layer 0; 1 to 3 are allowed"),
        (lambda plan: with_layer(plan, rows=0), "0 rows in layer 0; 1 to 3 are allowed"),
        (lambda plan: dataclasses.replace(plan, plan=CompressionPlan(method="nosuch")), "nosuch"),
        (lambda plan: with_layer(plan, representation=Part(name="nosuch")), "nosuch"),
        (lambda plan: with_layer(plan, attention=Part(name="nosuch")), "nosuch"),
        (lambda plan: with_layer(plan, attention=Part(name="quest")), "quest"),
        (lambda plan: with_layer(plan, attention=Part(name="hsa", params={"pages": 3})), "hsa"),
        (lambda plan: with_layer(plan, representation=Part(name="rdkv")), "rdkv"),
        (lambda plan: with_layer(plan, representation=Part(name="kivi", params={"bits": 3})), "bits is 3"),
        (
            lambda plan: dataclasses.replace(plan, plan=dataclasses.replace(plan.plan, skip_layers=(9,))),
            "skip_layers",
        ),
    ],
)
async def test_a_ticket_without_this_requests_plan_is_refused_by_name(
    harness: Harness, change: Callable[[ResolvedPlan], ResolvedPlan | None], named: str
) -> None:
    request = harness.request((5, 6, 7))
    ticket = dataclasses.replace(request.ticket, plan=change(plan_of(request)))
    with pytest.raises(InvalidRequest, match=named):
        await harness.run(dataclasses.replace(request, ticket=ticket))
    assert harness.metric("prefill_tokens_total") == 0
    assert not harness.sink.manifests
    await assert_serves(harness)
