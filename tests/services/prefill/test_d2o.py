"""D2O and H2O through the service: tensors and rows per layer on the wire are those of one process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from kvtest.prefill import make_prompt, plan_of

from kvferry.shared.compression.plan import Budget, is_measured, plan_digest
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import PrefillRequest, SessionKey, TransferDone
from kvferry.shared.errors import HistoryMiss, ProtocolMismatch

if TYPE_CHECKING:
    from kvtest.prefill import Harness

SESSION = SessionKey(owner="alice", session_id="a")


def assert_tensors_are_the_oracles(
    harness: Harness, request: PrefillRequest, done: TransferDone, earlier: tuple[int, ...] | None = None
) -> None:
    _, expected = harness.oracle(request, earlier)
    harness.assert_sent(request, expected)
    manifest, rows = harness.sink.manifests[-1], tuple(layer.rows for layer in expected.resolved.layers)
    assert manifest.plan_digest == plan_digest(plan_of(request))
    assert manifest.layer_rows == (rows if is_measured(plan_of(request)) else ())
    assert tuple(kept["keys"].shape[1] for kept in expected.compressed) == rows
    state_bytes = sum(kept["state"].nbytes for kept in expected.compressed if "state" in kept)
    assert done.bytes_by_kind["state"] == state_bytes
    method = plan_of(request).plan.method
    assert harness.metric("kv_transfer_bytes_total", kind="state", method=method) >= state_bytes


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["d2o", "h2o", "rocketkv-d2o", "compactor-hsa"])
@pytest.mark.parametrize("skip_layers", [(), (0, 2)])
async def test_a_prompts_tensors_are_those_of_one_process(
    harness: Harness, method: str, skip_layers: tuple[int, ...]
) -> None:
    plan = plan_for(method, budget=Budget(tokens=48), skip_layers=skip_layers)
    request = harness.request(make_prompt(331), plan=plan)
    first, done = await harness.run(request)
    assert first.method == method
    assert_tensors_are_the_oracles(harness, request, done)


async def test_rows_per_layer_are_the_prompts_and_come_to_the_budget(harness: Harness) -> None:
    request = harness.request(make_prompt(331), plan=plan_for("d2o", budget=Budget(tokens=48)))
    await harness.run(request)
    manifest, num_layers = harness.sink.manifests[-1], harness.model.spec.num_layers
    assert sum(manifest.layer_rows) == 48 * num_layers
    assert len(set(manifest.layer_rows)) > 1
    assert [layer.rows for layer in plan_of(request).layers] == [48] * num_layers


@pytest.mark.parametrize("num_new", [7, 50])
async def test_a_second_turn_selects_from_the_full_history(harness: Harness, num_new: int) -> None:
    prompt, plan = make_prompt(331), plan_for("d2o", budget=Budget(retention=0.2))
    second, done = await harness.second_turn(prompt, plan, num_new=num_new)
    assert_tensors_are_the_oracles(harness, second, done, earlier=prompt)


async def test_only_measured_budgets_hold_the_layers_of_a_prompt(harness: Harness) -> None:
    for method, most in (("h2o", 2), ("d2o", harness.model.spec.num_layers)):
        live = harness.count_live()
        await harness.run(harness.request(make_prompt(300), plan=plan_for(method, budget=Budget(tokens=48))))
        assert len(live) == harness.model.spec.num_layers >= 4
        assert max(live) <= most
        assert method == "h2o" or max(live) > 2


async def test_a_history_that_turns_out_gone_in_mid_pass_changes_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, plan = make_prompt(211), plan_for("d2o", budget=Budget(tokens=48))
    request = harness.request(prompt, plan=plan, session=SESSION)
    await harness.run(request)
    await harness.commit(request)
    begin = harness.store.begin

    def begin_and_lose(*args: object, **options: object) -> object:
        turn = begin(*args, **options)  # type: ignore[arg-type]
        load = turn.load_prepared

        def lose(layer: int, prepare: object) -> object:
            if layer == 2 and turn.reused_tokens:
                raise HistoryMiss("the history is gone", reason="evicted")
            return load(layer, prepare)

        monkeypatch.setattr(turn, "load_prepared", lose)
        return turn

    monkeypatch.setattr(harness.store, "begin", begin_and_lose)
    second = harness.request(prompt + make_prompt(20, seed=1), plan=plan, session=SESSION)
    first, done = await harness.run(second)
    assert first.reused_tokens == 0
    assert_tensors_are_the_oracles(harness, second, done)


async def test_a_refusal_after_the_pass_fails_the_request_with_its_reason(harness: Harness) -> None:
    harness.sink.refuse = ProtocolMismatch("not these rows", reason="manifest_layer_rows")
    request = harness.request(make_prompt(211), plan=plan_for("d2o", budget=Budget(tokens=48)))
    with pytest.raises(ProtocolMismatch, match="not these rows"):
        await harness.run(request)
    harness.sink.refuse = None
    first, _ = await harness.run(harness.request(make_prompt(211), plan=plan_of(request).plan))
    assert first.method == "d2o"


async def test_cancelling_while_layers_wait_opens_no_transfer(harness: Harness) -> None:
    request = harness.request(make_prompt(211), plan=plan_for("d2o", budget=Budget(tokens=48)))
    harness.model.hold.clear()
    running = asyncio.create_task(harness.run(request))
    await asyncio.to_thread(harness.model.entered.wait, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    harness.model.hold.set()
    first, _ = await harness.run(harness.request(make_prompt(50)))
    assert first.method == "full"
    assert all(manifest.request_id != request.request_id for manifest in harness.sink.manifests)
