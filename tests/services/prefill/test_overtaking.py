"""A short prompt overtakes a long one in mid-pass; neither differs from one that runs alone."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from kvtest.lanes import some
from kvtest.prefill import key_of, make_prompt
from kvtest.waiting import eventually
from torch import Tensor

from kvferry.shared.compression.plan import Budget, CompressionPlan
from kvferry.shared.compression.presets import method_names, plan_for, preset
from kvferry.shared.control.messages import PrefillRequest, SessionKey
from kvferry.shared.errors import KvferryError

if TYPE_CHECKING:
    from kvtest.prefill import Harness

SESSION = SessionKey(owner="alice", session_id="a")
LONG, SHORT = 700, 40


def plan_for_method(method: str) -> CompressionPlan:
    return plan_for(method, budget=Budget(tokens=64) if preset(method).takes_budget else None)


class Overtaking:
    """Submits a short request when the long one is in a layer, and waits there until it is in the queue.

    Args: at_tokens: of the pass in which it is, history among them; None: of any.

    Attributes:
        layers: (tokens, layer) of every layer, in the order in which the engine came to them.
        on_short: called in each layer of the short one.
    """

    def __init__(
        self, harness: Harness, short: PrefillRequest, *, at_layer: int = 1, at_tokens: int | None = None
    ) -> None:
        self._harness = harness
        self._short = short
        self._at_layer = at_layer
        self._at_tokens = at_tokens
        self._loop = asyncio.get_running_loop()
        self.layers: list[tuple[int, int]] = []
        self.on_short: Callable[[int], None] = lambda layer: None
        self.tasks: list[asyncio.Task[object]] = []
        harness.model.on_layer = self._on_layer

    def _on_layer(self, layer: int, keys: Tensor) -> None:
        num_tokens = keys.shape[1]
        self.layers.append((num_tokens, layer))
        if num_tokens == len(self._short.prompt_token_ids):
            self.on_short(layer)
        elif layer == self._at_layer and self._at_tokens in (None, num_tokens) and not self.tasks:
            submitted = threading.Event()
            self._loop.call_soon_threadsafe(self._submit, submitted)
            assert submitted.wait(60)
            deadline = threading.Event()
            while self._harness.service._engine.num_waiting == 0:
                assert not deadline.wait(0.01)

    def _submit(self, submitted: threading.Event) -> None:
        self.tasks.append(asyncio.create_task(self._harness.run(self._short)))
        submitted.set()


def assert_is_the_oracles(harness: Harness, request: PrefillRequest) -> None:
    """Every tensor on the wire, and the answer's first token, bit for bit."""
    captured, expected = harness.oracle(request)
    harness.assert_sent(request, expected)
    assert captured.logits is not None
    end = harness.sink.ends[key_of(request)]
    assert end.first_token is not None
    assert (*end.draft, end.first_token.token_id)[0] == int(captured.logits.argmax())


@pytest.mark.parametrize(
    "method",
    some(
        method_names(),
        *(
            "full",
            "rocketkv",
            "d2o",
            "adakv",
            "compactor",
            "rdkv",
            "rdkv-draft",
            "rocketkv-kivi",
            "kvzip-rdkv",
        ),
    ),
)
async def test_a_short_prompt_overtakes_a_long_one_and_both_are_the_oracles(
    harness: Harness, method: str
) -> None:
    plan = plan_for_method(method)
    long = harness.request(make_prompt(LONG), plan=plan)
    short = harness.request(make_prompt(SHORT, seed=1), plan=plan)
    overtaking = Overtaking(harness, short)
    first, _ = await harness.run(long)
    await asyncio.gather(*overtaking.tasks)
    num_layers = harness.model.spec.num_layers
    # a draft's tokens or the prompt's repetition, if there is one, come after the prompt
    assert [record for record in overtaking.layers if record[0] in (LONG, SHORT)] == [
        (LONG, 0), (LONG, 1),
        *((SHORT, layer) for layer in range(num_layers)),
        *((LONG, layer) for layer in range(2, num_layers)),
    ]  # fmt: skip
    assert list(harness.sink.ends) == [key_of(short), key_of(long)]
    assert first.queue_s > 0
    for request in (long, short):
        assert_is_the_oracles(harness, request)


async def test_a_short_prompt_overtakes_one_that_is_being_repeated(harness: Harness) -> None:
    plan = plan_for("kvzip", budget=Budget(tokens=64), overrides={"chunk_tokens": 300})
    long, short = harness.request(make_prompt(LONG), plan=plan), harness.request(make_prompt(SHORT, seed=1))
    overtaking = Overtaking(harness, short, at_tokens=LONG + 308)
    await harness.run(long)
    await asyncio.gather(*overtaking.tasks)
    layers = range(harness.model.spec.num_layers)
    assert overtaking.layers == [
        *((num_tokens, layer) for num_tokens in (LONG, LONG + 300) for layer in layers),
        *((LONG + 308, layer) for layer in layers[:2]),
        *((SHORT, layer) for layer in layers),
        *((LONG + 308, layer) for layer in layers[2:]),
        *((LONG + 108, layer) for layer in layers),
    ]
    assert list(harness.sink.ends) == [key_of(short), key_of(long)]
    for request in (long, short):
        assert_is_the_oracles(harness, request)


async def test_a_short_prompt_overtakes_one_that_drafts_between_two_tokens(harness: Harness) -> None:
    plan = plan_for_method("rdkv-draft")
    long = harness.request(make_prompt(LONG), plan=plan, session=SESSION)
    bobs = SessionKey(owner="bob", session_id="b")
    short = harness.request(make_prompt(SHORT, seed=1), plan=plan, session=bobs)
    await harness.run(harness.request(make_prompt(LONG, seed=2), plan=plan, session=SESSION))  # is timed
    harness.sink.ends.clear()
    overtaking = Overtaking(harness, short, at_tokens=LONG + 2)
    await harness.run(long)
    await asyncio.gather(*overtaking.tasks)
    layers = range(harness.model.spec.num_layers)
    begun = [*((LONG + number, layer) for number in range(3) for layer in layers)]
    begun += [(SHORT, layer) for layer in layers]
    assert overtaking.layers[: len(begun)] == begun
    assert list(harness.sink.ends) == [key_of(short), key_of(long)]
    for request in (long, short):
        assert_is_the_oracles(harness, request)


async def test_a_prompt_overtakes_one_that_has_overtaken(harness: Harness) -> None:
    prompts = [make_prompt(num_tokens, seed=num_tokens) for num_tokens in (1900, 600, 50)]
    requests = [harness.request(prompt, plan=plan_for_method("rocketkv")) for prompt in prompts]
    first = Overtaking(harness, requests[1], at_layer=0)
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[object]] = []

    def submit_the_third(layer: int) -> None:
        if layer == 0 and not tasks:
            submitted = threading.Event()

            def submit() -> None:
                tasks.append(asyncio.create_task(harness.run(requests[2])))
                loop.call_soon(submitted.set)

            loop.call_soon_threadsafe(submit)
            assert submitted.wait(60)
            while harness.service._engine.num_waiting == 0:
                threading.Event().wait(0.01)

    first.on_short = submit_the_third
    await harness.run(requests[0])
    await asyncio.gather(*first.tasks, *tasks)
    assert list(harness.sink.ends) == [key_of(request) for request in reversed(requests)]
    for request in requests:
        assert_is_the_oracles(harness, request)


async def test_a_turn_with_a_long_history_and_a_short_message_overtakes(harness: Harness) -> None:
    history, message = make_prompt(900), make_prompt(30, seed=2)
    request = harness.request(history, session=SESSION)
    await harness.run(request)
    await harness.commit(request)
    turn = harness.request(history + message, session=SESSION, plan=plan_for_method("snapkv"))
    long = harness.request(make_prompt(LONG, seed=3), session=SessionKey(owner="bob", session_id="b"))
    overtaking = Overtaking(harness, turn)
    await harness.run(long)
    await asyncio.gather(*overtaking.tasks)
    assert list(harness.sink.ends)[-2:] == [key_of(turn), key_of(long)]
    assert_is_the_oracles(harness, long)
    staged = harness.store.turn(long.request_id)
    assert staged is not None
    assert (await harness.commit(long)).num_tokens == LONG


async def test_cancelling_an_overtaken_pass_frees_everything_and_leaves_the_other_alone(
    harness: Harness,
) -> None:
    long = harness.request(make_prompt(LONG), session=SESSION)
    short = harness.request(make_prompt(SHORT, seed=1))
    overtaking = Overtaking(harness, short)
    alive: list[weakref.ref[Tensor]] = []
    note = harness.model.on_layer
    assert note is not None

    def remember(layer: int, keys: Tensor) -> None:
        if keys.shape[1] == LONG:
            alive.append(weakref.ref(keys))
        note(layer, keys)

    harness.model.on_layer = remember
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(harness.run(long))
    cancelled = threading.Event()

    async def cancel() -> None:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        # The bytes of its history are free before the other is done.
        assert harness.store.size_bytes == 0
        cancelled.set()

    def in_short(layer: int) -> None:
        if layer == 1:
            asyncio.run_coroutine_threadsafe(cancel(), loop)
            assert cancelled.wait(60)

    overtaking.on_short = in_short
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.gather(*overtaking.tasks)
    assert_is_the_oracles(harness, short)
    await eventually(lambda: key_of(long) in harness.sink.aborted)
    assert (LONG, 2) not in overtaking.layers
    await eventually(lambda: not harness.service._engine._schedule.started)
    assert all(ref() is None for ref in alive)
    assert harness.store.turn(long.request_id) is None
    harness.model.on_layer = None
    await harness.run(harness.request(make_prompt(20)))
    assert harness.store.size_bytes == 0


async def test_an_error_in_the_pass_that_overtakes_leaves_the_other_alone(harness: Harness) -> None:
    long = harness.request(make_prompt(LONG), plan=plan_for_method("rocketkv"))
    overtaking = Overtaking(harness, harness.request(make_prompt(SHORT, seed=1), session=SESSION))

    def fail(layer: int) -> None:
        if layer == 2:
            raise RuntimeError("a kernel broke")

    overtaking.on_short = fail
    await harness.run(long)
    with pytest.raises(KvferryError, match="failed in prefill"):
        await overtaking.tasks[0]
    assert_is_the_oracles(harness, long)
    assert harness.store.size_bytes == 0


async def test_an_error_after_it_was_overtaken_leaves_the_other_alone(harness: Harness) -> None:
    long = harness.request(make_prompt(LONG), session=SESSION)
    short = harness.request(make_prompt(SHORT, seed=1), plan=plan_for_method("rocketkv"))
    overtaking = Overtaking(harness, short)
    note = harness.model.on_layer
    assert note is not None

    def fail(layer: int, keys: Tensor) -> None:
        if keys.shape[1] == LONG and layer == 2:
            raise RuntimeError("a kernel broke")
        note(layer, keys)

    harness.model.on_layer = fail
    with pytest.raises(KvferryError, match="failed in prefill"):
        await harness.run(long)
    await asyncio.gather(*overtaking.tasks)
    assert_is_the_oracles(harness, short)
    assert harness.store.size_bytes == 0


async def test_a_long_pass_is_cancelled_within_a_layer(harness: Harness) -> None:
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()
    cancelled = threading.Event()
    layers: list[int] = []
    request = harness.request(make_prompt(LONG), session=SESSION)
    task = asyncio.create_task(harness.run(request))

    def hold(layer: int, keys: Tensor) -> None:
        layers.append(layer)
        if layer == 1:
            loop.call_soon_threadsafe(reached.set)
            assert cancelled.wait(60)

    harness.model.on_layer = hold
    await asyncio.wait_for(reached.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cancelled.set()
    await eventually(lambda: key_of(request) in harness.sink.aborted)
    assert layers == [0, 1]
    assert harness.store.size_bytes == 0
