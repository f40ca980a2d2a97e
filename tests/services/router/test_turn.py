"""A turn read directly: an async generator over scripted workers, without HTTP, text or sessions' records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import pytest
from kvtest.router import SPEC, scripted_token
from kvtest.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, Wire, failing_at, lost
from kvtest.waiting import eventually

from kvferry.services.router.turn.attempt import Admitted, Finished, TurnRequest
from kvferry.services.router.turn.runner import BackgroundTasks, TurnRunner
from kvferry.services.router.turn.turn import Turn
from kvferry.services.router.turn.worker_pool import NUM_NEAR, WorkerPool
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import (
    GenerateRequest,
    HistoryInfo,
    PrefillPrompt,
    PrefixRequest,
    SessionKey,
    TurnPrompt,
)
from kvferry.shared.errors import DeadlineExceeded, WorkerUnavailable
from kvferry.shared.sampling.params import SampledToken, SamplingParams
from kvferry.shared.telemetry.metrics import RouterMetrics

PROMPT = (100, 101, 102)
NUM_TOKENS = 6


class Assembler:
    """No stop strings: no token ends the text."""

    stopped = False

    def push(self, token_id: int) -> Assembler:
        return self


class Workers:
    """One worker of each role, and a runner over them."""

    def __init__(self) -> None:
        wire = Wire()
        self.script = Script(spec=SPEC, token=scripted_token, new_assembler=lambda stop: Assembler())  # type: ignore[arg-type,return-value]
        self.prefill, self.decode = ScriptedPrefill(self.script, wire), ScriptedDecode(self.script, wire)
        self.tasks = BackgroundTasks()
        self.runner = TurnRunner(
            prefill=WorkerPool.of_clients("prefill", {"p": self.prefill}, status_interval_s=0.02),
            decode=WorkerPool.of_clients("decode", {"d": self.decode}, status_interval_s=0.02),
            tasks=self.tasks,
            metrics=RouterMetrics(),
            max_recoveries=3,
            backoff_s=0.01,
            recovery_wait_s=5.0,
        )

    def request(self, **fields: Any) -> TurnRequest:
        return TurnRequest(
            request_id="r",
            model=SPEC,
            prompt_token_ids=PROMPT,
            plan=plan_for("full"),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
            deadline_s=asyncio.get_running_loop().time() + fields.pop("time_s", 30.0),
            session=SessionKey(owner="o", session_id="s"),
            **fields,
        )


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers()
    await asyncio.gather(made.runner.prefill.start(), made.runner.decode.start())
    yield made
    await made.tasks.close(1.0)
    await asyncio.gather(made.runner.prefill.close(), made.runner.decode.close())


def expected(workers: Workers) -> list[int]:
    sampling = workers.request().sampling
    return [scripted_token(PROMPT, index, sampling) for index in range(NUM_TOKENS)]


async def test_a_turn_yields_admission_each_token_once_and_the_end(workers: Workers) -> None:
    turn = Turn(workers.runner, workers.request())
    events = [event async for event in turn.events()]
    assert isinstance(events[0], Admitted)
    assert [event.token_id for event in events if isinstance(event, SampledToken)] == expected(workers)
    assert events[-1] == Finished(reason="length")
    assert len(events) == NUM_TOKENS + 2
    assert turn.stats.first is not None
    assert workers.prefill.active == workers.decode.active == set()


@pytest.mark.parametrize("num_drafted", [1, 4, 5, 9])
async def test_the_tokens_of_a_draft_come_before_decodes(workers: Workers, num_drafted: int) -> None:
    workers.script.num_drafted = num_drafted
    turn = Turn(workers.runner, workers.request())
    events = [event async for event in turn.events()]
    tokens = [event for event in events if isinstance(event, SampledToken)]
    assert [token.token_id for token in tokens] == expected(workers)
    assert [token.index for token in tokens] == list(range(NUM_TOKENS))
    assert events[-1] == Finished(reason="length")


async def test_a_token_of_a_draft_does_not_wait_for_the_next(workers: Workers) -> None:
    workers.script.num_drafted = 3
    workers.script.may_draft.clear()
    tokens = []
    async for event in Turn(workers.runner, workers.request()).events():
        if isinstance(event, SampledToken):
            tokens.append(event.token_id)
            if len(tokens) == 1:
                workers.script.may_draft.set()
    assert tokens == expected(workers)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_workers_lost_during_a_draft_repeat_no_token(workers: Workers, role: str) -> None:
    workers.script.num_drafted = 3
    workers.script.may_draft.clear()
    tokens = []
    async for event in Turn(workers.runner, workers.request()).events():
        if isinstance(event, SampledToken):
            tokens.append(event.token_id)
            if len(tokens) == 1:
                getattr(workers, role).faults = [failing_at(1 if role == "prefill" else 0, lost())]
                workers.script.may_draft.set()
    assert tokens == expected(workers)


@pytest.mark.parametrize(("count", "num_drafted"), [(1, 0), (2, 0), (3, 2), (4, 2)])
async def test_lost_workers_repeat_neither_admission_nor_tokens(
    workers: Workers, count: int, num_drafted: int
) -> None:
    workers.script.num_drafted = num_drafted

    def lose(num_tokens: int) -> None:
        if num_tokens == count:
            raise WorkerUnavailable("gone")

    workers.decode.faults = [lose, lose]
    turn = Turn(workers.runner, workers.request())
    events = [event async for event in turn.events()]
    assert sum(isinstance(event, Admitted) for event in events) == 1
    assert [event.token_id for event in events if isinstance(event, SampledToken)] == expected(workers)
    assert turn.stats.replays == (1 if num_drafted else 2)  # the rest of the answer is then drafted
    assert turn.stats.token_ids == expected(workers)


async def test_closing_the_generator_frees_both_workers_and_what_prefill_staged(workers: Workers) -> None:
    workers.script.token_delay_s = 0.01
    async with aclosing(Turn(workers.runner, workers.request()).events()) as events:
        async for event in events:
            if isinstance(event, SampledToken):
                break
    assert workers.prefill.active == workers.decode.active == set()
    await eventually(lambda: workers.prefill.staged == {})
    assert len(workers.prefill.aborted) == 1


async def test_a_cut_turn_yields_no_more_tokens_and_ends(workers: Workers) -> None:
    workers.script.token_delay_s = 0.02
    turn = Turn(workers.runner, workers.request(keeps_cut_off=True))
    assert not turn.cut()  # nothing was delivered yet
    tokens, last = 0, None
    async for last in turn.events():
        if isinstance(last, SampledToken):
            tokens += 1
            assert tokens < 2 or turn.cut()
    assert tokens == 2
    assert isinstance(last, Finished)
    assert turn.stats.token_ids == expected(workers)[:2]


async def test_a_turn_run_for_its_effects_ends_at_its_deadline(workers: Workers) -> None:
    assert (await Turn(workers.runner, workers.request()).run()).token_ids == expected(workers)
    workers.script.may_prefill.clear()
    with pytest.raises(DeadlineExceeded):
        await Turn(workers.runner, workers.request(time_s=0.1)).run()
    assert workers.prefill.active == workers.decode.active == set()


async def test_workers_are_given_what_is_left_until_the_deadline(workers: Workers) -> None:
    def lose(num_tokens: int) -> None:
        if num_tokens == 1:
            raise WorkerUnavailable("gone")

    workers.decode.faults = [lose]
    await Turn(workers.runner, workers.request(time_s=20.0)).run()
    for worker in (workers.prefill, workers.decode):
        first_s, again_s = worker.timeouts_s
        assert 0 < again_s < first_s <= 20.0


async def test_both_workers_are_told_all_that_the_turn_has_of_its_prompt(workers: Workers) -> None:
    request = workers.request(
        owner="o",
        document=SessionKey(owner="o", session_id="document/d"),
        retained_bins=3,
        has_history=True,
        max_reused_tokens=1,
        priority=2,
    )
    await Turn(workers.runner, request).run()
    for worker, kind in ((workers.prefill, PrefillPrompt), (workers.decode, TurnPrompt)):
        (told,) = worker.requests
        names = [field.name for field in fields(kind)]
        assert {name: getattr(told, name) for name in names} == {
            name: getattr(request, name) for name in names
        }
        assert told.model_fingerprint == SPEC.fingerprint
        assert told.request_id.startswith("r.")
    (generate,) = workers.decode.requests
    assert isinstance(generate, GenerateRequest)
    assert generate.plan == request.plan
    assert generate.store_history


async def test_a_prompt_is_looked_for_at_a_few_workers_and_goes_to_one_of_them() -> None:
    it = Workers()
    clients = {f"p{number}": CountedPrefill(it.script, Wire()) for number in range(20)}
    it.runner.prefill = WorkerPool.of_clients("prefill", clients, status_interval_s=1000.0)
    await it.runner.prefill.start()
    prompt = tuple(range(200))
    first = await it.runner.with_prefix("me", prompt, SPEC.fingerprint)
    assert len(first) == 1
    assert sum(client.asked for client in clients.values()) == NUM_NEAR
    assert await it.runner.with_prefix("me", prompt, SPEC.fingerprint, prefer=("p1",)) == ("p1",)
    # Another router finds it there, and so does a prompt that only begins with it.
    clients[first[0]].history[SessionKey(owner="me", session_id="s")] = prompt
    assert await it.runner.with_prefix("me", (*prompt[:100], 7), SPEC.fingerprint, prefer=("p1",)) == first
    await it.runner.prefill.close()


class CountedPrefill(ScriptedPrefill):
    asked = 0

    async def prefix_info(self, request: PrefixRequest, *, timeout_s: float) -> HistoryInfo:
        self.asked += 1
        return await super().prefix_info(request, timeout_s=timeout_s)
