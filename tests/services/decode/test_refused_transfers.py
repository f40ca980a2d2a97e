"""Transfers that must be refused or fail, by name and on both sides, and leave no byte behind."""

import asyncio
import dataclasses

import pytest
import torch

from kvferry.shared.control.messages import (
    TokenGenerated,
    TransferAccepted,
)
from kvferry.shared.errors import KvferryError, LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.messages import EndRecord, Section, TransferKey


def key_of(ticket):
    return TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation)


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
