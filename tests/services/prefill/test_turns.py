"""Sessions at the prefill worker: what is reused, staged, returned, committed, dropped and missed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from kvtest.clock import Clock
from kvtest.prefill import key_of, make_prompt
from kvtest.waiting import eventually
from torch import Tensor

from kvferry.services.router.config import RouterConfig
from kvferry.services.router.server import grpc_pools
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import (
    IMPLICIT_PREFIX,
    CommitTurnRequest,
    HistoryInfo,
    PrefillRequest,
    SessionKey,
    Ticket,
)
from kvferry.shared.control.server import serve_control
from kvferry.shared.errors import HistoryMiss, InvalidRequest, LeaseExpired, ProtocolMismatch, SessionNotFound
from kvferry.shared.sampling.params import SamplingParams
from kvferry.shared.wire.messages import EndRecord, Manifest, NamedTensor, TransferKey
from kvferry.shared.wire.sender import BlockSender

if TYPE_CHECKING:
    from kvtest.prefill import Harness

A = SessionKey(owner="key-a", session_id="s")
B = SessionKey(owner="key-b", session_id="s")
NOTHING = HistoryInfo(num_tokens=0, size_bytes=0, tier="none")


class Returner:
    """What decode does at a turn's end, over the real wire."""

    def __init__(self, harness: Harness, request: PrefillRequest) -> None:
        self._harness = harness
        self._request = request
        cache = next(m for m in harness.sink.manifests if m.request_id == request.request_id)
        spec = harness.model.spec
        self.endpoint = cache.history_endpoint
        self.credit_bytes = cache.history_credit_bytes
        self.fields: dict[str, object] = {
            "purpose": "history",
            "key": cache.key,
            "request_id": cache.request_id,
            "model_fingerprint": spec.fingerprint,
            "dtype": spec.dtype,
            "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "start": cache.num_tokens,
        }

    async def send(self, rows: list[tuple[Tensor, Tensor]], **changes: object) -> None:
        """Ship `[H_kv, n, D]` rows of every layer; raises what the receiver answers."""
        fields: dict[str, object] = self.fields | {"num_tokens": rows[0][0].shape[1]} | changes
        manifest = Manifest(**fields)  # type: ignore[arg-type]
        ticket = Ticket(
            endpoint=self.endpoint,
            transfer_id=manifest.key.transfer_id,
            generation=manifest.key.generation,
            credit_bytes=self.credit_bytes,
            lease_s=10,
            reserved_bytes=0,
        )
        sender = BlockSender(self._harness.hub.connecting(), buffer_bytes=1 << 24, timeout_s=10)
        try:
            transfer = sender.open(ticket, manifest, timeout_s=10)
            for layer, (keys, values) in enumerate(rows):
                tensors = (("keys", keys), ("values", values))
                transfer.send_layer(
                    layer, [NamedTensor(name=name, tensor=tensor, kind="rows") for name, tensor in tensors]
                )
            transfer.finish(EndRecord(key=manifest.key, num_blocks=0, payload_bytes=0))
            await asyncio.to_thread(transfer.wait, 10.0)
        finally:
            sender.close()


class KVCollector:
    """Runs the model on its own, to have the true K and V of any tokens."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def history(self, layer: int) -> None:
        return None

    def layer_done(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layers.append((keys.clone(), values.clone()))


def true_kv(harness: Harness, tokens: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    collector = KVCollector()
    harness.model.prefill(torch.tensor(tokens), start=0, observer=collector)
    return collector.layers


def generated_rows(
    harness: Harness, prompt: tuple[int, ...], generated: tuple[int, ...]
) -> list[tuple[Tensor, Tensor]]:
    """K and V of all generated tokens but the last."""
    start, stop = len(prompt), len(prompt) + len(generated) - 1
    layers = true_kv(harness, prompt + generated)
    return [(k[:, start:stop].contiguous(), v[:, start:stop].contiguous()) for k, v in layers]


async def test_the_next_turn_runs_only_its_new_tokens_and_ships_the_same_rows(harness: Harness) -> None:
    prompt, generated, message = make_prompt(150), (20, 21, 22, 23), make_prompt(40, seed=1)
    request = harness.request(prompt, session=A)
    first, _ = await harness.run(request)
    assert first.reused_tokens == 0
    assert harness.metric("prefill_tokens_total") == 150
    await Returner(harness, request).send(generated_rows(harness, prompt, generated))
    token_bytes = harness.model.spec.kv_token_bytes
    info = await harness.commit(request, prompt + generated)
    assert info == HistoryInfo(num_tokens=153, size_bytes=153 * token_bytes)
    assert await harness.service.session_info(A, timeout_s=10) == info

    second_prompt = prompt + generated + message
    plan = plan_for("rocketkv", budget=Budget(tokens=48))
    second = harness.request(second_prompt, session=A, plan=plan)
    first, _ = await harness.run(second)
    assert first.reused_tokens == 153
    # The last generated token has no KV yet: it runs with the new message.
    assert harness.metric("prefill_tokens_total") == 150 + 1 + 40
    assert first.full_bytes == harness.model.spec.full_bytes(len(second_prompt))

    fresh = harness.request(second_prompt, plan=plan)
    fresh_first, _ = await harness.run(fresh)
    assert fresh_first.token == first.token
    # 41 new tokens leave the window whole, so both turns score with the same 32 queries.
    harness.assert_same_rows(second, fresh)


async def test_a_turn_with_a_session_names_where_generated_kv_returns(harness: Harness) -> None:
    await harness.run(harness.request(make_prompt(20), session=A))
    manifest = harness.sink.manifests[-1]
    assert manifest.history_endpoint == harness.service.block_endpoint
    assert manifest.history_credit_bytes > 0


async def test_a_prompt_without_a_session_ships_the_same_rows_from_a_stored_one(harness: Harness) -> None:
    prompt, plan = make_prompt(150), plan_for("rocketkv", budget=Budget(tokens=48))
    keys = [SessionKey(owner="key-a", session_id=f"{IMPLICIT_PREFIX}{number}") for number in range(2)]
    requests = [harness.request(prompt, session=key, plan=plan) for key in keys]
    firsts = []
    for request in requests:
        first, _ = await harness.run(request)
        await harness.commit(request, (*prompt, first.token.token_id))
        firsts.append(first)
    assert [(first.reused_tokens, first.reuse_source) for first in firsts] == [
        (0, "session"),
        (118, "prefix"),
    ]
    assert firsts[0].token == firsts[1].token
    for layer in range(harness.model.spec.num_layers):
        for name in ("keys", "values"):
            one, other = (harness.sink.rows(key_of(request), layer, name) for request in requests)
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    assert all(manifest.history_endpoint == "" for manifest in harness.sink.manifests)


async def test_a_method_that_looks_at_all_queries_stores_no_prompt_without_a_session(
    harness: Harness,
) -> None:
    key = SessionKey(owner="key-a", session_id=f"{IMPLICIT_PREFIX}0")
    request = harness.request(make_prompt(150), session=key, plan=plan_for("h2o", budget=Budget(tokens=48)))
    first, _ = await harness.run(request)
    assert first.reused_tokens == 0
    assert harness.store.size_bytes == 0
    with pytest.raises(HistoryMiss):
        await harness.commit(request, (*request.prompt_token_ids, first.token.token_id))


async def test_without_a_return_the_prompt_alone_is_committed(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    assert (await harness.commit(request, (*prompt, 20, 21))).num_tokens == 30


async def test_a_return_that_does_not_match_its_turn_is_refused(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    returner = Returner(harness, request)
    rows = generated_rows(harness, prompt, (20, 21, 22))
    staged_bytes = harness.store.size_bytes
    wrong_key = TransferKey(transfer_id=key_of(request).transfer_id, generation=2)
    with pytest.raises(LeaseExpired):
        await returner.send(rows, request_id="nosuch")
    with pytest.raises(LeaseExpired):
        await returner.send(rows, key=wrong_key)
    changes: list[dict[str, object]] = [
        {"model_fingerprint": "another"},
        {"start": 29},
        {"purpose": "cache"},
        {"dtype": "float16"},
        {"num_kv_heads": 1},
        {"head_dim": 63},
    ]
    for change in changes:
        with pytest.raises(ProtocolMismatch) as refused:
            await returner.send(rows, **change)
        assert refused.value.reason.startswith("manifest_")
    too_many = generated_rows(harness, prompt, tuple(range(20, 30)))
    with pytest.raises(ProtocolMismatch, match="0 to 8") as refused:
        await returner.send(too_many)
    assert refused.value.reason == "num_tokens"
    with pytest.raises(ProtocolMismatch, match="num_layers"):
        await returner.send([*rows, rows[0]], num_layers=len(rows) + 1)
    other = [(keys, values[:, :1].contiguous()) for keys, values in rows]
    with pytest.raises(ProtocolMismatch, match="layer 0 of returned history has tensors") as refused:
        await returner.send(other)
    assert refused.value.reason == "layer_tensors"
    assert harness.store.size_bytes == staged_bytes
    # None of these spoils the turn: the true return still goes through, once.
    await returner.send(rows)
    staged_bytes = harness.store.size_bytes
    # Over another connection it is acknowledged again, perhaps before its end, and not staged again.
    with contextlib.suppress(ProtocolMismatch):
        await returner.send(rows)
    assert harness.store.size_bytes == staged_bytes
    assert (await harness.commit(request, (*prompt, 20, 21, 22))).num_tokens == 32


async def test_a_return_after_the_turn_is_over_is_refused(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    await harness.commit(request, prompt)
    with pytest.raises(LeaseExpired):
        await Returner(harness, request).send(generated_rows(harness, prompt, (20, 21)))


async def test_abort_drops_what_was_staged_and_unknown_ids_are_no_error(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    assert harness.store.size_bytes == 30 * harness.model.spec.kv_token_bytes
    await harness.service.abort_turn(request.request_id, timeout_s=10)
    await harness.service.abort_turn("nosuch", timeout_s=10)
    assert harness.store.size_bytes == 0
    with pytest.raises(HistoryMiss):
        await harness.commit(request, prompt)


async def test_a_commit_for_another_session_is_refused(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    with pytest.raises(InvalidRequest):
        await harness.service.commit_turn(
            CommitTurnRequest(request_id=request.request_id, session=B, token_ids=prompt), timeout_s=10
        )
    assert await harness.service.session_info(B, timeout_s=10) == NOTHING


async def test_a_session_dropped_during_the_turn_stays_dropped(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    assert await harness.service.drop_session(A, timeout_s=10) == NOTHING
    with pytest.raises(SessionNotFound):
        await harness.commit(request, prompt)
    assert harness.store.size_bytes == 0


async def test_history_lost_in_mid_prompt_is_computed_again(harness: Harness) -> None:
    prompt = make_prompt(150)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    await harness.commit(request, prompt)
    plan = plan_for("full")
    longer = prompt + make_prompt(40, seed=1)
    layers_before_loss = []

    def drop_at_layer_two(layer: int, keys: Tensor) -> None:
        layers_before_loss.append(layer)
        if len(layers_before_loss) == 3:
            harness.store.drop(A)

    harness.model.on_layer = drop_at_layer_two
    second = harness.request(longer, session=A, plan=plan)
    first, _ = await harness.run(second)
    harness.model.on_layer = None
    assert layers_before_loss[:4] == [0, 1, 2, 0]
    assert first.reused_tokens == 0
    assert harness.metric("history_miss_total", reason="dropped") == 1
    # 40 tokens' pass broke off; the whole prompt ran after it.
    assert harness.metric("prefill_tokens_total") == 150 + 190

    fresh = harness.request(longer, plan=plan)
    fresh_first, _ = await harness.run(fresh)
    assert fresh_first.token == first.token
    harness.assert_same_rows(second, fresh)
    with pytest.raises(SessionNotFound):
        await harness.commit(second, longer)


@pytest.mark.parametrize(
    ("method", "num_new"), [("compactor", 40), ("h2o", 40), ("snapkv", 10), ("snapkv", 40)]
)
async def test_no_transfer_has_layers_of_two_runs(harness: Harness, method: str, num_new: int) -> None:
    """Of most of these the queries of all new tokens choose the rows, and after the loss more tokens are new.
    Of all, an answer in the history has rows that decode computed from a part of the cache."""
    prompt = make_prompt(150)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    await harness.commit(request, prompt)
    num_layers = []

    def drop_at_layer_two(layer: int, keys: Tensor) -> None:
        num_layers.append(layer)
        if len(num_layers) == 3:
            harness.store.drop(A)

    harness.model.on_layer = drop_at_layer_two
    plan = plan_for(method, budget=Budget(tokens=48))
    longer = prompt + make_prompt(num_new, seed=1)
    with pytest.raises(HistoryMiss):
        await harness.run(harness.request(longer, session=A, plan=plan))
    harness.model.on_layer = None
    first, _ = await harness.run(harness.request(longer, session=A, plan=plan))
    assert first.reused_tokens == 0


async def test_a_request_retried_under_its_id_replaces_its_turn(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A)
    await harness.run(request)
    again = harness.request(prompt, session=A, request_id=request.request_id)
    await harness.run(again)
    assert harness.store.size_bytes == 30 * harness.model.spec.kv_token_bytes
    assert (await harness.commit(again, prompt)).num_tokens == 30


@pytest.mark.parametrize("prefill_options", [{"turn_lease_s": 30.0}], ids=["short-lease"])
async def test_an_abandoned_turn_is_swept(harness: Harness, prefill_clock: Clock) -> None:
    request = harness.request(make_prompt(30), session=A)
    await harness.run(request)
    assert harness.store.turn(request.request_id) is not None
    prefill_clock.turn(30.0)
    await eventually(lambda: harness.store.size_bytes == 0)
    assert harness.store.turn(request.request_id) is None


async def test_a_turn_of_a_lost_router_is_swept_soon_after_its_requests_deadline(
    harness: Harness, prefill_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.services.prefill.job._COMMIT_GRACE_S", 0.5)
    request = harness.request(make_prompt(30), session=A)
    async for _ in harness.service.prefill(request, timeout_s=30.0):
        pass
    assert harness.store.turn(request.request_id) is not None
    prefill_clock.turn(30.5)
    await eventually(lambda: harness.store.size_bytes == 0)
    assert harness.store.turn(request.request_id) is None


async def test_what_a_lost_router_has_staged_goes_and_a_living_ones_stays(
    harness: Harness, prefill_clock: Clock
) -> None:
    server = await serve_control(listen="127.0.0.1:0", prefill=harness.service)
    pools = [grpc_pools(RouterConfig(prefill_workers=server.address))[0] for _ in range(2)]
    requests = [harness.request(make_prompt(30), session=session) for session in (A, B)]
    clients = []
    for pool, request in zip(pools, requests, strict=True):
        await pool.start()
        (worker,) = pool.workers()
        assert [event async for event in worker.client.prefill(request, timeout_s=600)]
        clients.append(worker.client)
    await pools[1].close()
    prefill_clock.turn(40.0)
    await clients[0].status(timeout_s=30)
    prefill_clock.turn(30.0)
    await eventually(lambda: harness.store.turn(requests[1].request_id) is None)
    turn = CommitTurnRequest(request_id=requests[0].request_id, session=A, token_ids=make_prompt(30))
    assert (await clients[0].commit_turn(turn, timeout_s=30)).num_tokens == 30
    await pools[0].close()
    await server.close(0)


@pytest.mark.parametrize("prefill_options", [{"history_bytes": 1000}], ids=["tiny-history"])
async def test_a_prompt_larger_than_the_history_is_served_without_it(harness: Harness) -> None:
    prompt = make_prompt(30)
    request = harness.request(prompt, session=A, sampling=SamplingParams(max_tokens=1, temperature=0.0))
    await harness.run(request)
    assert await harness.commit(request, prompt) == NOTHING
    assert harness.store.size_bytes == 0
