"""The choice of a turn's way: measurements in, decisions out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.services.prefill.history_cost import HistoryChoice, HistoryCosts, TurnOutlook

TOKEN_BYTES = 4096
ROW_BYTES = 1 << 20


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def outlook(
    *, prompt: int = 1000, memory: int = 0, redis: int = 0, decode_holds: bool = False
) -> TurnOutlook:
    return TurnOutlook(
        num_prompt_tokens=prompt,
        tiers=(("memory", memory), ("redis", redis)),
        decode_holds=decode_holds,
        method="rocketkv",
        row_bytes=ROW_BYTES,
    )


def measured(
    *,
    run_token_s: float = 1e-4,
    redis_byte_s: float = 1e-9,
    memory_byte_s: float = 1e-10,
    wire_byte_s: float = 1e-9,
    delta_ratio: float = 0.4,
    pack_s: tuple[float, float] = (0.001, 0.001),
    clock: Clock | None = None,
) -> HistoryCosts:
    """Costs that have seen turns of every size; pack_s: of whole selections and of deltas."""
    costs = HistoryCosts(token_bytes=TOKEN_BYTES, half_life_s=60.0, clock=clock or Clock())
    for num_tokens in (2**power for power in range(14)):
        for _ in range(3):
            for prompt in (2**power for power in range(14)):
                costs.ran(num_tokens, num_prompt_tokens=prompt, seconds=run_token_s * num_tokens)
            size_bytes = num_tokens * TOKEN_BYTES
            costs.loaded((("memory", num_tokens),), seconds=memory_byte_s * size_bytes)
            costs.loaded((("memory", 7), ("redis", num_tokens)), seconds=redis_byte_s * size_bytes)
    for _ in range(3):
        for size_bytes in (2**power for power in range(24)):
            costs.shipped(
                "another", size_bytes, "whole", size_bytes=size_bytes, seconds=wire_byte_s * size_bytes
            )
        for shipment, ratio, seconds in (("whole", 1.0, pack_s[0]), ("delta", delta_ratio, pack_s[1])):
            size_bytes = round(ratio * ROW_BYTES)
            costs.shipped(
                "rocketkv", ROW_BYTES, shipment, size_bytes=size_bytes, seconds=wire_byte_s * size_bytes
            )
            costs.packed(ROW_BYTES, shipment, seconds=seconds)
    return costs


def unmeasured() -> HistoryCosts:
    return HistoryCosts(token_bytes=TOKEN_BYTES, half_life_s=60.0, clock=Clock())


def way(way: str, reused: int, *, by_cost: bool = False) -> HistoryChoice:
    return HistoryChoice(way=way, reused_tokens=reused, by_cost=by_cost)  # type: ignore[arg-type]


@pytest.mark.parametrize("costs", [unmeasured(), measured()], ids=["unmeasured", "quick tiers"])
def test_the_standing_order_is_delta_then_fetch_then_recompute(costs: HistoryCosts) -> None:
    assert costs.choose(outlook(redis=900, decode_holds=True)) == way("delta", 900)
    assert costs.choose(outlook(memory=500, redis=400)) == way("fetch", 900)
    assert costs.choose(outlook()) == way("recompute", 0)
    assert costs.choose(outlook(decode_holds=True)) == way("recompute", 0)


def test_a_slow_redis_is_not_waited_for_and_what_memory_holds_is_still_used() -> None:
    # 900 tokens: 37 s from Redis, 0.1 s to run
    costs = measured(redis_byte_s=1e-5)
    assert costs.choose(outlook(redis=900)) == way("recompute", 0, by_cost=True)
    assert costs.choose(outlook(redis=900, decode_holds=True)) == way("recompute", 0, by_cost=True)
    assert costs.choose(outlook(memory=500, redis=400)) == way("recompute", 500, by_cost=True)
    assert costs.choose(outlook(memory=900)) == way("fetch", 900)
    assert costs.choose(outlook(redis=900), by_cost=False) == way("fetch", 900)


def test_a_slow_model_waits_for_a_slow_redis() -> None:
    assert measured(redis_byte_s=1e-5, run_token_s=0.1).choose(outlook(redis=900)) == way("fetch", 900)


def test_a_slow_wire_makes_the_delta_worth_a_wait() -> None:
    # running saves 3.5 s of Redis; the whole selection costs 5.9 s more on the wire than its delta
    slow = {"redis_byte_s": 1e-6, "wire_byte_s": 1e-5}
    assert measured(**slow).choose(outlook(redis=900, decode_holds=True)) == way("delta", 900)
    assert measured(redis_byte_s=1e-6).choose(outlook(redis=900, decode_holds=True)).way == "recompute"


def test_a_delta_that_takes_long_to_make_gives_way_to_the_whole_selection() -> None:
    costs = measured(pack_s=(0.01, 2.0))
    assert costs.choose(outlook(memory=900, decode_holds=True)) == way("fetch", 900, by_cost=True)


def test_a_small_saving_changes_nothing() -> None:
    # 20 tokens: 41 ms from Redis, 1 ms to run
    costs = measured(redis_byte_s=5e-7, run_token_s=5e-5)
    assert costs.choose(outlook(prompt=40, redis=20)) == way("fetch", 20)
    # 900 tokens: 180 ms from Redis, 100 ms to run
    costs = measured(redis_byte_s=5e-8)
    assert costs.choose(outlook(redis=900)) == way("fetch", 900)


def test_giving_up_counts_as_slow_before_the_redis_was_ever_seen_to_answer() -> None:
    costs = unmeasured()
    for _ in range(3):
        costs.loaded((("memory", 0), ("redis", 900)), seconds=10.0)
        costs.ran(1000, num_prompt_tokens=1000, seconds=0.1)
        costs.packed(ROW_BYTES, "whole", seconds=0.001)
        assert costs.choose(outlook(redis=900)) == way("fetch", 900)
        costs.shipped("rocketkv", ROW_BYTES, "whole", size_bytes=ROW_BYTES, seconds=0.001)
    assert costs.choose(outlook(redis=900)) == way("recompute", 0, by_cost=True)


def test_a_slow_redis_is_tried_again_when_its_figures_have_decayed() -> None:
    clock = Clock()
    costs = measured(redis_byte_s=1e-5, clock=clock)
    clock.now_s = 30.0
    assert costs.choose(outlook(redis=900)).way == "recompute"
    clock.now_s = 61.0
    for _ in range(3):  # the model went on running meanwhile
        costs.ran(1000, num_prompt_tokens=1000, seconds=0.1)
    assert costs.choose(outlook(redis=900)) == way("fetch", 900)


BYTE_S = st.floats(1e-11, 1e-4)
SITUATIONS = st.builds(
    outlook,
    prompt=st.integers(2001, 4000),
    memory=st.integers(0, 1000),
    redis=st.integers(0, 1000),
    decode_holds=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(
    situation=SITUATIONS,
    redis_byte_s=BYTE_S,
    memory_byte_s=BYTE_S,
    wire_byte_s=BYTE_S,
    run_token_s=st.floats(1e-6, 1.0),
    delta_ratio=st.floats(0.01, 2.0),
    pack_s=st.tuples(st.floats(0, 3), st.floats(0, 3)),
    slower=st.floats(1.0, 1e4),
    slower_tier=st.sampled_from(["redis", "memory"]),
)
def test_a_choice_is_possible_and_a_slower_tier_never_gives_more(
    situation: TurnOutlook,
    redis_byte_s: float,
    memory_byte_s: float,
    wire_byte_s: float,
    run_token_s: float,
    delta_ratio: float,
    pack_s: tuple[float, float],
    slower: float,
    slower_tier: str,
) -> None:
    speeds = {"redis": redis_byte_s, "memory": memory_byte_s}
    chosen = []
    for factor in (1.0, slower):
        scaled = speeds | {slower_tier: speeds[slower_tier] * factor}
        costs = measured(
            redis_byte_s=scaled["redis"],
            memory_byte_s=scaled["memory"],
            wire_byte_s=wire_byte_s,
            run_token_s=run_token_s,
            delta_ratio=delta_ratio,
            pack_s=pack_s,
        )
        choice = costs.choose(situation)
        memory, redis = (num_tokens for _, num_tokens in situation.tiers)
        if choice.way == "recompute":
            assert choice.reused_tokens in {0, memory}
            assert choice.reused_tokens < memory + redis or memory + redis == 0
        else:
            assert choice.reused_tokens == memory + redis > 0
        assert situation.decode_holds or choice.way != "delta"
        assert choice == costs.choose(situation)
        chosen.append(dict(situation.used(choice.reused_tokens)))
    assert chosen[1][slower_tier] <= chosen[0][slower_tier]
