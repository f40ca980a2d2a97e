"""Models with states (recurrent layers, linear attention, convolutions) between real services: bytes shipped,
sessions that continue and branch at the ends of turns, every tier, long prompts, broken numbers."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from kvtest.families import FAMILIES
from kvtest.pair import SESSION, Pair, Turn, started_pair
from kvtest.transformers_model import Reference, greedy, plan_of, prompt_of

from kvferry.shared.compression.formats.state import StateLayer
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import SessionKey
from kvferry.shared.errors import InvalidRequest, KvferryError
from kvferry.tools.oracle import OracleSession

FULL = plan_for("full")
LONG = 700
"""A prompt that short ones may overtake."""
HYBRIDS = ("qwen3_next", "jamba", "falcon_h1", "lfm2")


@pytest.fixture
def family() -> str:
    return "qwen3_next"


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    made = FAMILIES[family]
    return replace(made, settings={**made.settings, "max_position_embeddings": 1024}).save(tmp_path / "model")


@pytest_asyncio.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with started_pair(folder, max_model_len=1024) as made:
        yield made


def state_bytes(pair: Pair) -> int:
    return sum(layer.state_bytes for layer in pair.model.spec.layers)


@pytest.mark.parametrize("family", [*HYBRIDS, "mamba2", "nemotron_h"])
async def test_states_are_shipped_whole_beside_the_rows_of_layers_that_attend(pair: Pair) -> None:
    spec, num_tokens = pair.model.spec, 101
    row_bytes = 2 * len(spec.row_layers) * spec.num_kv_heads * spec.row_bytes(0)
    turn = await pair.turn(prompt_of(num_tokens, seed=1), FULL)
    expected = {"state": state_bytes(pair), "rows": num_tokens * row_bytes}
    assert turn.shipped == {kind: size for kind, size in expected.items() if size}
    assert spec.full_bytes(num_tokens) == num_tokens * row_bytes + state_bytes(pair)
    # the rows of all tokens but the last, and the states after the prompt and after the turn
    num_stored = num_tokens + len(turn.tokens) - 1
    assert pair.store.size_bytes == num_stored * row_bytes + 2 * state_bytes(pair)
    returned = pair.decode_metrics.history_returned_bytes.labels(spec.name)._value.get()
    assert returned == (len(turn.tokens) - 1) * row_bytes + state_bytes(pair)
    if spec.row_layers:
        other = SessionKey(owner="o", session_id="other")
        turn = await pair.turn(prompt_of(num_tokens, seed=1), plan_of("snapkv"), session=other)
        assert turn.shipped["state"] == state_bytes(pair)
        assert turn.shipped["rows"] == 20 * row_bytes


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "method",
    [*("full", "snapkv", "rocketkv", "d2o", "compactor", "rdkv", "rdkv-draft"), "kvzip", "kvzip-rdkv"],
)
@pytest.mark.parametrize("family", HYBRIDS)
async def test_turns_and_branches_at_their_ends_equal_the_one_process_conversation(
    pair: Pair, method: str
) -> None:
    plan, oracle = plan_of(method), OracleSession()
    prompt, ends = prompt_of(90, seed=3), []
    before_branch = OracleSession()
    for number in range(3):
        turn = await pair.checked_turn(prompt, plan, oracle, sampling=greedy(12))
        assert turn.reused == (ends[-1] if ends else 0)
        ends.append(len(prompt) + len(turn.tokens) - 1)
        prompt = [*prompt, *turn.tokens, *prompt_of(20, seed=10 + number)]
        if number == 0:
            before_branch = copy.deepcopy(oracle)
    # another second turn after the first one's end
    branch = [*prompt[: ends[0]], *prompt_of(30, seed=20)]
    turn = await pair.checked_turn(branch, plan, before_branch, sampling=greedy(12))
    assert turn.reused == ends[0]


async def test_a_prompt_that_leaves_a_turn_in_its_middle_continues_from_the_end_before(
    pair: Pair, folder: Path
) -> None:
    reference, first = Reference(folder), prompt_of(70, seed=1)
    turn = await pair.turn(first, FULL, sampling=greedy(20))
    for cut, reused in ((89, 89), (80, 70), (71, 70), (70, 70), (60, 0)):
        prompt = [*first, *turn.tokens][:cut] + prompt_of(9, seed=cut)
        other = SessionKey(owner="o", session_id=f"cut {cut}")
        await pair.turn(first, FULL, session=other, sampling=greedy(20))
        branch = await pair.turn(prompt, FULL, session=other, sampling=greedy(8))
        assert branch.tokens == reference.tokens(prompt, 8)
        assert branch.reused == reused, cut


async def test_the_same_prompt_again_runs_from_the_end_before(pair: Pair, folder: Path) -> None:
    first = prompt_of(70, seed=1)
    turn = await pair.turn(first, FULL, sampling=greedy(20))
    prompt = [*first, *turn.tokens, *prompt_of(9, seed=2)]
    for _ in range(2):
        again = await pair.turn(prompt, FULL, sampling=greedy(20))
        assert again.reused == len(first) + 19
        assert again.tokens == Reference(folder).tokens(prompt, 20)


async def test_another_sessions_prompt_is_continued_at_its_end_only(pair: Pair, folder: Path) -> None:
    reference, shared = Reference(folder), prompt_of(96, seed=1)
    await pair.turn(shared, FULL, session=SessionKey(owner="o", session_id="one"))
    longer = [*shared, *prompt_of(40, seed=2)]
    turn = await pair.turn(longer, FULL, session=SessionKey(owner="o", session_id="two"), sampling=greedy(16))
    assert turn.reused == len(shared)
    assert turn.tokens == reference.tokens(longer, 16)
    partly = [*shared[:80], *prompt_of(40, seed=3)]
    turn = await pair.turn(
        partly, FULL, session=SessionKey(owner="o", session_id="three"), sampling=greedy(16)
    )
    assert turn.reused == 0
    assert turn.tokens == reference.tokens(partly, 16)
    turn = await pair.turn(longer, FULL, session=SessionKey(owner="p", session_id="two"), sampling=greedy(16))
    assert turn.reused == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("tier", ["disk", "redis"])
@pytest.mark.parametrize("family", [*HYBRIDS, "mamba2"])
async def test_a_session_goes_on_from_a_tier_when_its_prefill_worker_is_gone(
    pair: Pair, folder: Path, tmp_path: Path, redis_server: Any, tier: str
) -> None:
    reference = Reference(folder)
    options: dict[str, object] = (
        {"history_disk": str(tmp_path / "history"), "history_disk_bytes": 1 << 26}
        if tier == "disk"
        else {"history_redis": redis_server.socket_url}
    )
    await pair.start_prefill(**options)
    prompt, ends = prompt_of(60, seed=5), [0]
    prompts = []
    for number in range(3):
        turn = await pair.turn(prompt, FULL, sampling=greedy(12))
        assert turn.tokens == reference.tokens(prompt, 12)
        assert turn.reused == ends[-1]
        ends.append(len(prompt) + len(turn.tokens) - 1)
        prompts.append(prompt)
        prompt = [*prompt, *turn.tokens, *prompt_of(15, seed=30 + number)]
        await pair.prefill.close()
        await pair.start_prefill(**options)
    # a branch at the end of the first turn, which only the tier has
    branch = [*prompt[: ends[1]], *prompt_of(25, seed=40)]
    turn = await pair.turn(branch, FULL, sampling=greedy(12))
    assert turn.tokens == reference.tokens(branch, 12)
    assert turn.reused == ends[1]
    before = pair.prefill_metrics.history_reused_tokens.labels(tier)._value.get()
    assert before == ends[1] + ends[2] + ends[1]


async def test_a_damaged_state_on_disk_is_a_miss_and_the_prompt_is_run(
    pair: Pair, folder: Path, tmp_path: Path
) -> None:
    options: dict[str, object] = {"history_disk": str(tmp_path / "history"), "history_disk_bytes": 1 << 26}
    await pair.start_prefill(**options)
    first = prompt_of(60, seed=5)
    turn = await pair.turn(first, FULL, sampling=greedy(12))
    await pair.prefill.close()
    states = [
        path for path in (tmp_path / "history").rglob("*.safetensors") if b'"0.0"' not in path.read_bytes()
    ]
    assert len(states) == 2
    for path in states:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(bytes(content))
    await pair.start_prefill(**options)
    prompt = [*first, *turn.tokens, *prompt_of(9, seed=6)]
    turn = await pair.turn(prompt, FULL, sampling=greedy(12))
    assert turn.tokens == Reference(folder).tokens(prompt, 12)
    assert turn.reused == 0
    assert pair.prefill_metrics.history_miss.labels("corrupt")._value.get() == 1


async def test_a_turn_is_replayed_on_other_workers_with_the_tokens_delivered_so_far(
    pair: Pair, folder: Path
) -> None:
    """As the router does when it loses a worker: the delivered tokens are part of the prompt."""
    reference, first = Reference(folder), prompt_of(60, seed=7)
    expected = reference.tokens(first, 30)
    stream = asyncio.create_task(pair.turn(first, FULL, sampling=greedy(30)))
    while pair.decode.arena.bytes_by_state()["running"] == 0:
        await asyncio.sleep(0.005)
    await pair.decode.close()
    with pytest.raises(KvferryError):
        await stream
    await pair.start_decode()
    rest = await pair.turn([*first, *expected[:11]], FULL, sampling=greedy(19))
    assert rest.tokens == expected[11:]
    await pair.prefill.close()
    await pair.start_prefill()
    prompt = [*first, *expected, *prompt_of(9, seed=8)]
    turn = await pair.turn(prompt, FULL, sampling=greedy(12))
    assert turn.tokens == reference.tokens(prompt, 12)


class _Watched:
    """A model whose prefill tells when a long prompt comes to a layer."""

    def __init__(self, model: Any, on_layer: Callable[[int], None]) -> None:
        self._model, self._on_layer = model, on_layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prefill(
        self, token_ids: torch.Tensor, *, start: int, observer: Any, states: Any = None, **rest: Any
    ) -> Any:
        model = self

        class States:
            def load(self, layer: int) -> Any:
                if len(token_ids) >= LONG:
                    model._on_layer(layer)
                return states.load(layer)

            def store(self, layer: int, state: Any) -> None:
                states.store(layer, state)

        given = States() if states is not None else None
        return self._model.prefill(token_ids, start=start, observer=observer, states=given, **rest)


@pytest.mark.parametrize("family", HYBRIDS)
async def test_a_long_prompt_is_overtaken_between_the_layers_and_has_its_own_states(
    pair: Pair, folder: Path
) -> None:
    reference, loop = Reference(folder), asyncio.get_running_loop()
    short = [prompt_of(30, seed=number) for number in range(2)]
    tasks: list[asyncio.Task[Turn]] = []

    def submit() -> None:
        for number, prompt in enumerate(short):
            session = SessionKey(owner="o", session_id=f"short {number}")
            tasks.append(asyncio.create_task(pair.turn(prompt, FULL, session=session, sampling=greedy(10))))

    def on_layer(layer: int) -> None:
        if not tasks and layer == max(pair.model.spec.state_layers):
            submitted = threading.Event()
            loop.call_soon_threadsafe(lambda: (submit(), submitted.set()))
            assert submitted.wait(60)
            while pair.prefill._engine.num_waiting < len(short):
                assert not threading.Event().wait(0.005)

    watched = _Watched(pair.model, on_layer)
    pair.model, model = watched, pair.model  # type: ignore[assignment]
    await pair.start_prefill()
    pair.model = model
    prompt = prompt_of(LONG, seed=50)
    turn = await pair.turn(prompt, FULL, session=SESSION, sampling=greedy(10))
    answers = await asyncio.gather(*tasks)
    assert turn.tokens == reference.tokens(prompt, 10)
    assert [answer.tokens for answer in answers] == [
        reference.tokens(short_prompt, 10) for short_prompt in short
    ]
    prompt = [*prompt, *turn.tokens, *prompt_of(LONG // 4, seed=51)]
    turn = await pair.turn(prompt, FULL, session=SESSION, sampling=greedy(10))
    assert turn.reused == LONG + 9
    assert turn.tokens == reference.tokens(prompt, 10)


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "mamba2"])
async def test_a_state_that_is_not_finite_ends_its_own_sequence_alone(pair: Pair, folder: Path) -> None:
    reference, decode = Reference(folder), pair.decode
    prompts = [prompt_of(40 + number, seed=number) for number in range(3)]
    expected = [reference.tokens(prompt, 80) for prompt in prompts]
    poisoned: list[str] = []
    runner = decode._engine._batch.lanes[0]
    run = runner.launch

    def launch(**given: int) -> Any:
        running = decode._engine._running
        if len(running) == len(prompts) and not poisoned:
            victim = next(
                sequence for sequence in running if len(sequence.request.prompt_token_ids) == len(prompts[1])
            )
            poisoned.append(victim.request.request_id)
            for cache in victim.caches:
                if isinstance(cache, StateLayer):
                    for region in cache.regions.values():
                        region.fill_(torch.nan)
        return run(**given)

    runner.launch = launch  # type: ignore[method-assign]
    turns = [
        pair.turn(prompt, FULL, session=SessionKey(owner="o", session_id=f"s{number}"), sampling=greedy(80))
        for number, prompt in enumerate(prompts)
    ]
    first, failed, last = await asyncio.gather(*turns, return_exceptions=True)
    assert poisoned
    assert isinstance(failed, KvferryError)
    assert failed.reason == "invalid_logits"
    assert isinstance(first, Turn)
    assert isinstance(last, Turn)
    assert [first.tokens, last.tokens] == [expected[0], expected[2]]


async def test_states_move_with_their_sequences_and_wait_on_the_host(pair: Pair, folder: Path) -> None:
    await pair.decode.close()
    await pair.start_decode(arena_bytes=64 << 10)
    reference, prompts = Reference(folder), [prompt_of(40 + number, seed=number) for number in range(3)]
    turns = [
        pair.turn(prompt, FULL, session=SessionKey(owner="o", session_id=f"s{number}"), sampling=greedy(200))
        for number, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*turns)
    assert [answer.tokens for answer in answers] == [reference.tokens(prompt, 200) for prompt in prompts]
    assert pair.decode_metrics.preempted.labels(pair.model.spec.name)._value.get() > 0


@pytest.mark.parametrize("family", ["mamba2"])
async def test_a_model_without_attention_takes_no_method_but_full(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match=r"no layer attends.*methods that do: full"):
        await pair.turn(prompt_of(40, seed=1), plan_of("snapkv"))
