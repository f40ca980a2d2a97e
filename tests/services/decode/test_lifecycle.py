"""Leases, aborts, refusals and cancellation: at every stage the arena gets back exactly what it gave."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import pytest
import torch

from kvferry.shared.compression.representations import stored_bytes
from kvferry.shared.control.messages import (
    GenerationFinished,
    HistoryReturned,
    TokenGenerated,
    TransferAccepted,
)
from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.oracle import OneProcessGenerator, OracleSession
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.messages import EndRecord, Section, TransferKey


def key_of(ticket):
    return TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation)


class HistorySink:
    """A prefill worker's end of the history return."""

    def __init__(self):
        self.manifest = None
        self.sections = {}
        self.committed = threading.Event()
        self.aborted = threading.Event()
        self.opened = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()

    def open(self, manifest):
        self.manifest = manifest
        self.opened.set()

    def write(self, header, payload):
        self.proceed.wait(20)
        self.sections.setdefault((header.layer, header.section), bytearray()).extend(payload)

    def commit(self, end):
        self.end = end
        self.committed.set()

    def abort(self, key, reason):
        self.aborted.set()


@contextlib.contextmanager
def history_server(made):
    sink = HistorySink()
    server = made.hub.server(sink)
    try:
        yield sink, server.endpoint
    finally:
        sink.proceed.set()
        server.close()


# ---- cancellation ----------------------------------------------------------------------------------------


async def test_closing_a_stream_whose_transfer_has_not_begun_frees_it_and_refuses_the_transfer(
    harness, request_of, ticket_of
):
    made = await harness()
    stream, ticket = await ticket_of(made.service, request_of())
    await stream.aclose()
    assert await made.arena_is_free()
    with pytest.raises(LeaseExpired):
        await asyncio.to_thread(made.shipper.ship, request_of(), ticket)


async def test_closing_a_stream_in_transfer_frees_it_and_drops_late_blocks(
    harness, request_of, ticket_of, prompt_cache
):
    made = await harness()
    request = request_of()
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, cache, layers=1)
    while not made.service.arena.bytes_by_state()["in_transfer"]:
        await asyncio.sleep(0.01)
    await stream.aclose()
    assert await made.arena_is_free()
    other, _ = await ticket_of(made.service, request)  # the same bytes have a new owner now
    before = made.service.arena.buffer(made.service._reservations.all()[0].allocation).clone()
    with contextlib.suppress(LeaseExpired):  # at once, where a block of layer 0 came late and was refused
        transfer.send(layer=1, section=Section.KEYS, tensor=cache.layers[1].keys)
    with pytest.raises(LeaseExpired):
        await asyncio.to_thread(transfer.wait, 10)
    after = made.service.arena.buffer(made.service._reservations.all()[0].allocation)
    assert torch.equal(before, after)
    assert made.value("late_blocks_total") >= 1
    await other.aclose()
    assert await made.arena_is_free()


@pytest.mark.parametrize("stage", ["waiting", "running"])
async def test_closing_a_stream_that_waits_or_runs_frees_it_and_spares_the_others(
    harness, request_of, small_model, stage
):
    made = await harness(max_batch_size=1 if stage == "waiting" else 2)
    survivor = request_of(range(5, 45), request_id="s", max_tokens=60)
    started, proceed = threading.Event(), threading.Event()

    def hold_first_step(token_ids):
        started.set()
        proceed.wait(20)

    made.model.before_step = hold_first_step
    surviving = asyncio.create_task(made.tokens(survivor))
    await asyncio.to_thread(started.wait, 20)
    stream = made.service.generate(request_of([8] * 30, request_id="c", max_tokens=400), timeout_s=30)
    ticket = (await anext(stream)).ticket
    await asyncio.to_thread(made.shipper.ship, request_of([8] * 30, max_tokens=400), ticket)
    assert isinstance(await anext(stream), TransferAccepted)
    proceed.set()
    if stage == "running":
        assert isinstance(await anext(stream), TokenGenerated)
    await stream.aclose()
    expected = OneProcessGenerator(small_model()).generate(
        list(survivor.prompt_token_ids), plan=survivor.plan, sampling=survivor.sampling
    )
    assert await surviving == [t.token_id for t in expected]
    assert await made.arena_is_free()


async def test_cancelling_the_task_that_reads_frees_the_memory(harness, request_of):
    made = await harness()
    started = threading.Event()
    made.model.before_step = lambda token_ids: started.set()
    task = asyncio.create_task(made.run(request_of(max_tokens=500)))
    await asyncio.to_thread(started.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await made.arena_is_free()


async def test_closing_a_stream_that_returns_history_aborts_the_return_and_frees_it(harness, request_of):
    made = await harness()
    with history_server(made) as (sink, endpoint):
        sink.proceed.clear()
        request = request_of(store_history=True, max_tokens=5)
        stream = made.service.generate(request, timeout_s=30)
        ticket = (await anext(stream)).ticket
        # the end cannot be under way yet when the stream closes: the credit is spent long before
        await asyncio.to_thread(
            made.shipper.ship, request, ticket, history_endpoint=endpoint, history_credit_bytes=64
        )
        while not isinstance(await anext(stream), GenerationFinished):
            pass
        await asyncio.to_thread(sink.opened.wait, 10)
        await stream.aclose()
        assert await made.arena_is_free()
        sink.proceed.set()
        assert await asyncio.to_thread(sink.aborted.wait, 10)
        assert not sink.committed.is_set()
    assert made.value("history_returned_bytes_total") == 0


async def test_returns_that_wait_for_a_thread_are_freed_when_their_stream_closes(harness, request_of):
    made = await harness(history_threads=1)
    with history_server(made) as (sink, endpoint):
        sink.proceed.clear()
        streams = []
        for i in range(2):
            request = request_of(store_history=True, max_tokens=5, request_id=str(i))
            stream = made.service.generate(request, timeout_s=30)
            ticket = (await anext(stream)).ticket
            await asyncio.to_thread(
                made.shipper.ship, request, ticket, history_endpoint=endpoint, history_credit_bytes=1 << 20
            )
            while not isinstance(await anext(stream), GenerationFinished):
                pass
            streams.append(stream)
        assert made.service.arena.bytes_by_state()["running"] > 0
        await streams[1].aclose()
        assert await made.arena_is_free()
        sink.proceed.set()
        assert (await anext(streams[0])).num_tokens == 4


# ---- leases ----------------------------------------------------------------------------------------------


async def test_a_reservation_that_nothing_ships_to_expires_by_name(harness, request_of, ticket_of):
    made = await harness(lease_s=0.1)
    stream, ticket = await ticket_of(made.service, request_of())
    assert ticket.lease_s == 0.1
    with pytest.raises(LeaseExpired, match="still reserved when its lease ended"):
        await anext(stream)
    assert await made.arena_is_free()
    assert made.value("leases_expired_total") == 1
    with pytest.raises(LeaseExpired):
        await asyncio.to_thread(made.shipper.ship, request_of(), ticket)


async def test_a_transfer_that_stalls_expires_although_the_event_loop_is_blocked(
    harness, request_of, ticket_of, prompt_cache
):
    made = await harness(lease_s=2.0)
    request = request_of()
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, cache, layers=1)
    deadline_s = time.monotonic() + 20
    while made.service.arena.free_bytes != made.service.arena.size_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)  # nothing runs on the loop; the sweeper has a clock of its own
    with pytest.raises(LeaseExpired, match="in_transfer"):
        await anext(stream)
    transfer.abort("test is over")


async def test_a_running_sequence_outlives_its_lease(harness, request_of):
    made = await harness(lease_s=0.3)
    slept = threading.Event()
    made.model.before_step = lambda token_ids: slept.wait(0.1)
    assert len(await made.tokens(request_of(max_tokens=8))) == 8
    assert made.value("leases_expired_total") == 0


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"purpose": "history"}, "purpose"),
        ({"model_fingerprint": "beef"}, "model_fingerprint"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"start": 1}, "start"),
        ({"num_tokens": 41}, "num_tokens"),
        ({"layer_rows": (40, 39)}, "layer_rows"),
        ({"resolved": None}, "resolved"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_manifest_that_does_not_match_is_refused_on_both_sides(
    harness, request_of, ticket_of, changes, name
):
    made = await harness()
    stream, ticket = await ticket_of(made.service, request_of())
    transfer = made.shipper.open(request_of(), ticket, **changes)
    with pytest.raises(KvferryError) as sender:
        await asyncio.to_thread(transfer.wait, 10)
    if isinstance(sender.value, ProtocolMismatch):
        with pytest.raises(ProtocolMismatch, match=f"manifest's {name} is"):
            await anext(stream)
    else:  # a manifest that its own codec refuses never gets as far as the sink
        assert changes.get("resolved", 0) is None or changes["purpose"] == "history"
        await stream.aclose()
    assert await made.arena_is_free()
    assert made.value("receive_failed_total") == 1


async def test_another_plan_than_the_one_reserved_for_is_refused(harness, request_of, ticket_of):
    made = await harness()
    prompt = [i % 50 for i in range(100)]
    stream, ticket = await ticket_of(made.service, request_of(prompt, method="rocketkv", tokens=16))
    other = request_of(prompt, method="rocketkv", tokens=17)
    with pytest.raises(ProtocolMismatch, match="manifest's"):
        await asyncio.to_thread(made.shipper.ship, other, ticket)
    with pytest.raises(ProtocolMismatch, match="manifest's"):
        await anext(stream)
    assert await made.arena_is_free()


async def test_an_outdated_generation_is_refused_and_leaves_the_reservation_alone(
    harness, request_of, ticket_of
):
    made = await harness()
    request = request_of()
    stream, ticket = await ticket_of(made.service, request)
    outdated = dataclasses.replace(ticket, generation=ticket.generation + 1)
    with pytest.raises(LeaseExpired, match="generation"):
        await asyncio.to_thread(made.shipper.ship, request, outdated)
    await asyncio.to_thread(made.shipper.ship, request, ticket)
    assert isinstance(await anext(stream), TransferAccepted)
    await stream.aclose()
    assert await made.arena_is_free()


async def test_a_reservation_takes_one_transfer(harness, request_of, ticket_of):
    made = await harness()
    request = request_of(max_tokens=400)
    stream, ticket = await ticket_of(made.service, request)
    await asyncio.to_thread(made.shipper.ship, request, ticket)
    with pytest.raises(LeaseExpired, match=r"takes one transfer|no reservation"):
        await asyncio.to_thread(made.shipper.ship, request, ticket)
    assert isinstance(await anext(stream), TransferAccepted)
    assert isinstance(await anext(stream), TokenGenerated)
    await stream.aclose()
    assert await made.arena_is_free()


async def test_a_sender_that_gives_up_fails_the_request_at_once(harness, request_of, ticket_of, prompt_cache):
    made = await harness()
    request = request_of()
    stream, ticket = await ticket_of(made.service, request)
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, prompt_cache(made.shipper.model, request), layers=1)
    while not made.service.arena.bytes_by_state()["in_transfer"]:
        await asyncio.sleep(0.01)
    transfer.abort("prefill was cancelled")
    with pytest.raises(TransferFailed) as caught:
        await asyncio.wait_for(anext(stream), 10)
    assert caught.value.reason == "aborted"
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    "first_token",
    [None, SampledToken(token_id=50, index=0), SampledToken(token_id=7, index=1)],
    ids=["missing", "outside the vocabulary", "wrong index"],
)
async def test_a_transfer_without_a_valid_first_token_fails(
    harness, request_of, ticket_of, prompt_cache, first_token
):
    made = await harness()
    request = request_of()
    stream, ticket = await ticket_of(made.service, request)
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, prompt_cache(made.shipper.model, request))
    transfer.finish(EndRecord(key=key_of(ticket), num_blocks=0, payload_bytes=0, first_token=first_token))
    with pytest.raises(TransferFailed, match="first token"):
        await asyncio.to_thread(transfer.wait, 10)
    with pytest.raises(TransferFailed, match="first token"):
        await anext(stream)
    assert await made.arena_is_free()


async def test_an_index_that_does_not_ascend_fails_both_sides(harness, request_of, ticket_of, prompt_cache):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="snapkv", tokens=40)
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    transfer = made.shipper.open(request, ticket)
    transfer.send(layer=0, section=Section.INDEX, tensor=cache.layers[0].positions.flip(1))
    with pytest.raises(TransferFailed, match="must ascend"):
        await asyncio.to_thread(transfer.wait, 10)
    with pytest.raises(TransferFailed, match="must ascend"):
        await anext(stream)
    assert await made.arena_is_free()


async def test_packed_bytes_that_no_packer_writes_fail_both_sides(
    harness, request_of, ticket_of, prompt_cache
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="rdkv", tokens=40)
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    with torch.inference_mode():
        cache.layers[1].packed.heads[1].positions[0] = 100
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, cache)
    with pytest.raises(TransferFailed, match="positions of head 1") as caught:
        await asyncio.to_thread(transfer.wait, 10)
    assert caught.value.reason == "packed"
    with pytest.raises(TransferFailed, match="positions of head 1"):
        await anext(stream)
    assert await made.arena_is_free()


@pytest.mark.parametrize("layers", [1, 2])
async def test_closing_a_stream_with_packed_layers_in_transfer_frees_it(
    harness, request_of, ticket_of, prompt_cache, layers
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="rdkv", tokens=40)
    stream, ticket = await ticket_of(made.service, request)
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, prompt_cache(made.shipper.model, request), layers=layers)
    while not made.service.arena.bytes_by_state()["in_transfer"]:
        await asyncio.sleep(0.01)
    await stream.aclose()
    assert await made.arena_is_free()
    transfer.abort("test is over")


@pytest.mark.parametrize("method", ["rdkv", "adakv", "snapkv-think", "snapkv-kivi"])
async def test_a_packed_sequence_counts_its_packed_bytes_and_its_new_rows(
    harness, request_of, ticket_of, prompt_cache, method
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method=method, tokens=30, max_tokens=6)
    _, events = await made.run(request)
    layers = prompt_cache(made.shipper.model, request).layers
    packed = [
        layer.packed.layout.size_bytes if layer.packed else stored_bytes(layer.stored) for layer in layers
    ]
    rows = 2 * 2 * 5 * 2 * 8 * 4  # layers, K and V, rows, heads, head_dim, bytes
    assert events[-1].cache_bytes == sum(packed) + rows
    stream, ticket = await ticket_of(made.service, request)
    assert events[-1].cache_bytes <= ticket.reserved_bytes
    await stream.aclose()


@pytest.mark.parametrize(("rows", "message"), [((31, 30), "must share 60"), ((0, 60), "layer 0 has 0")])
async def test_measured_rows_beyond_total_or_bounds_are_refused_on_both_sides(
    harness, request_of, ticket_of, rows, message
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="d2o", tokens=30)
    stream, ticket = await ticket_of(made.service, request)
    sizes = tuple(4 * 2 * (count + 1) for count in rows)
    transfer = made.shipper.open(request, ticket, layer_rows=rows, layer_state_bytes=sizes)
    with pytest.raises(ProtocolMismatch, match=message):
        await asyncio.to_thread(transfer.wait, 10)
    with pytest.raises(ProtocolMismatch, match=message):
        await anext(stream)
    assert await made.arena_is_free()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
async def test_scores_that_no_attention_sums_to_fail_both_sides(
    harness, request_of, ticket_of, prompt_cache, number
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="h2o", tokens=40)
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    with torch.inference_mode():
        cache.layers[1].state[7] = number
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, cache)
    key = key_of(ticket)
    transfer.finish(EndRecord(key=key, num_blocks=0, payload_bytes=0, first_token=cache.first_token))
    with pytest.raises(TransferFailed, match="layer 1 STATE") as caught:
        await asyncio.to_thread(transfer.wait, 10)
    assert caught.value.reason == "state"
    with pytest.raises(TransferFailed, match="layer 1 STATE"):
        await anext(stream)
    assert await made.arena_is_free()


@pytest.mark.parametrize("method", ["h2o", "d2o"])
async def test_a_cache_that_evicts_stays_at_its_size_over_a_thousand_tokens(
    harness, request_of, small_model, prompt_cache, method
):
    spec = dataclasses.replace(small_model().spec, max_model_len=1200)
    made = await harness(model=small_model(spec), prefill_model=small_model(spec))
    request = request_of([i * 7 % 50 for i in range(100)], method=method, tokens=20, max_tokens=1001)
    held = []

    def look(token_ids):
        caches = made.service._engine._running[0].caches
        held.append([t.shape for c in caches for t in (c.keys, c.values, *c.auxiliary)])
        assert all(c.keys[:, :-1].isfinite().all() and c.values[:, :-1].isfinite().all() for c in caches)

    made.model.before_step = look
    _, events = await made.run(request, timeout_s=240)
    assert events[-1].num_tokens == 1001
    assert len(held) == 1000
    assert all(shapes == held[0] for shapes in held)
    settled = prompt_cache(small_model(spec), request).settled
    rows = [layer.rows for layer in settled.layers]
    assert sum(rows) == 2 * 20
    # per head: K, V, scores, positions of S + 1 rows; D2O's threshold
    row_bytes, beside = 2 * 8 * 4 + 4 + 4, (4 if method == "d2o" else 0)
    assert events[-1].cache_bytes == 2 * sum((s + 1) * row_bytes + beside for s in rows)
    assert await made.arena_is_free()


async def test_returned_rows_of_an_evicting_cache_are_counted_beside_it(harness, request_of):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(100)]
    sizes = {}
    for store_history in (False, True):
        request = request_of(prompt, method="d2o", tokens=16, max_tokens=6, store_history=store_history)
        with history_server(made) as (_, endpoint):
            _, events = await made.run(request, history_endpoint=endpoint, history_credit_bytes=1 << 20)
        sizes[store_history] = next(e.cache_bytes for e in events if isinstance(e, GenerationFinished))
    # layers, K and V, heads, rows, head_dim, bytes
    assert sizes[True] - sizes[False] == 2 * 2 * 2 * 5 * 8 * 4


REBUDGETED = {"method": "rdkv", "tokens": 5, "overrides": {"rebudget_tokens": 32, "window": 5}}


async def test_generated_tokens_that_are_packed_take_less_memory(harness, request_of, ticket_of):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(150)]
    request = request_of(prompt, **REBUDGETED, max_tokens=70)
    rows_alone = request_of(prompt, **REBUDGETED | {"overrides": {"rebudget_tokens": 0}}, max_tokens=70)
    reserved = []
    for wanted in (request, rows_alone):
        stream, ticket = await ticket_of(made.service, wanted)
        reserved.append(ticket.reserved_bytes)
        await stream.aclose()
    _, events = await made.run(request, timeout_s=120)
    _, unpacked = await made.run(rows_alone, timeout_s=120)
    assert events[-1].num_tokens == unpacked[-1].num_tokens == 70
    # 64 of 69 rows are packed, with 5 / 150 of their bits, and scales
    row = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, bytes
    assert unpacked[-1].cache_bytes - events[-1].cache_bytes > 64 * row // 2
    assert reserved[1] > reserved[0]
    assert events[-1].cache_bytes <= reserved[0]
    assert await made.arena_is_free()


# ---- history return --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["full", "rocketkv", "rdkv", "h2o", "d2o", "adakv", "snapkv-think", "snapkv-kivi"]
)
async def test_generated_rows_return_to_prefill_as_the_model_made_them(
    harness, request_of, small_model, method
):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(100)]
    tokens = None if method == "full" else 16
    request = request_of(prompt, method=method, tokens=tokens, max_tokens=6, store_history=True)
    session = OracleSession()
    OneProcessGenerator(small_model()).generate(
        prompt, plan=request.plan, sampling=request.sampling, session=session
    )
    with history_server(made) as (sink, endpoint):
        _, events = await made.run(request, history_endpoint=endpoint, history_credit_bytes=1 << 20)
        assert [type(e) for e in events[-2:]] == [GenerationFinished, HistoryReturned]
        assert events[-1].num_tokens == 5
        assert sink.committed.is_set()
    assert (sink.manifest.purpose, sink.manifest.start, sink.manifest.num_tokens) == ("history", 100, 5)
    assert sink.manifest.layer_rows == (5, 5)
    assert sink.manifest.resolved is None
    assert sink.end.first_token is None
    for layer, (keys, values) in enumerate(session.layers):
        for section, full in ((Section.KEYS, keys), (Section.VALUES, values)):
            sent = torch.frombuffer(sink.sections[layer, section], dtype=torch.float32).view(2, 5, 8)
            assert torch.equal(sent, full[:, 100:])
    assert made.value("history_returned_bytes_total", model="small") == 5 * 256
    assert await made.arena_is_free()


@pytest.mark.parametrize("max_tokens", [33, 34, 66])
async def test_rows_of_packed_tokens_return_to_prefill_as_the_model_made_them(
    harness, request_of, small_model, max_tokens
):
    made = await harness()
    prompt = [i * 7 % 50 for i in range(150)]
    request = request_of(prompt, **REBUDGETED, max_tokens=max_tokens, store_history=True)
    session = OracleSession()
    OneProcessGenerator(small_model()).generate(
        prompt, plan=request.plan, sampling=request.sampling, session=session
    )
    with history_server(made) as (sink, endpoint):
        await made.run(request, timeout_s=120, history_endpoint=endpoint, history_credit_bytes=1 << 20)
        assert sink.committed.is_set()
    num_tokens = max_tokens - 1
    assert sink.manifest.num_tokens == num_tokens
    for layer, (keys, values) in enumerate(session.layers):
        for section, full in ((Section.KEYS, keys), (Section.VALUES, values)):
            sent = torch.frombuffer(sink.sections[layer, section], dtype=torch.float32).view(2, -1, 8)
            assert torch.equal(sent, full[:, 150:])
    assert await made.arena_is_free()


async def test_a_completion_of_one_token_has_no_rows_to_return(harness, request_of):
    made = await harness()
    with history_server(made) as (sink, endpoint):
        _, events = await made.run(
            request_of(max_tokens=1, store_history=True), history_endpoint=endpoint, history_credit_bytes=1
        )
        assert events[-1] == HistoryReturned(num_tokens=0)
        assert sink.manifest is None
    assert await made.arena_is_free()


async def test_a_return_that_fails_is_no_error_for_the_client(harness, request_of):
    made = await harness()
    _, events = await made.run(
        request_of(store_history=True), history_endpoint="inproc://nobody", history_credit_bytes=1 << 20
    )
    assert events[-1] == HistoryReturned(num_tokens=0)
    assert await made.arena_is_free()


async def test_a_probes_return_moves_no_byte_counter(harness, request_of):
    made = await harness()
    with history_server(made) as (_, endpoint):
        _, events = await made.run(
            request_of(store_history=True, probe=True),
            history_endpoint=endpoint,
            history_credit_bytes=1 << 20,
        )
    assert events[-1].num_tokens == 7
    assert made.value("history_returned_bytes_total") == 0
