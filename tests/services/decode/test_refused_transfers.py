"""Transfers that must be refused or fail, by name and on both sides, and leave no byte behind."""

import asyncio
import contextlib
import dataclasses

import pytest
import torch
from kvtest.compression import packed_tensors

from kvferry.shared.control.messages import (
    TokenGenerated,
    TransferAccepted,
)
from kvferry.shared.errors import LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.messages import EndRecord, NamedTensor, TransferKey


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
        ({"num_layers": 3}, "num_layers"),
        ({"layer_rows": (40, 40)}, "layer_rows"),
        ({"layer_rows": (40, 39)}, "layer_rows"),
        ({"plan_digest": "beef"}, "plan_digest"),
        ({"plan_digest": ""}, "plan_digest"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_manifest_that_does_not_match_is_refused_on_both_sides(
    harness, request_of, ticket_of, changes, name
):
    made = await harness()
    stream, ticket = await ticket_of(made.service, request_of())
    transfer = made.shipper.open(request_of(), ticket, **changes)
    for failed in (asyncio.to_thread(transfer.wait, 10), anext(stream)):
        with pytest.raises(ProtocolMismatch, match=f"manifest's {name} is") as caught:
            await failed
        assert caught.value.reason == f"manifest_{name}"
    assert await made.arena_is_free()
    assert made.value("receive_failed_total") == 1


async def test_another_plan_than_the_one_reserved_for_is_refused(harness, request_of, ticket_of):
    made = await harness()
    prompt = [i % 50 for i in range(100)]
    stream, ticket = await ticket_of(made.service, request_of(prompt, method="rocketkv", tokens=16))
    other = request_of(prompt, method="rocketkv", tokens=17)
    for failed in (asyncio.to_thread(made.shipper.ship, other, ticket), anext(stream)):
        with pytest.raises(ProtocolMismatch, match="manifest's plan_digest is") as caught:
            await failed
        assert caught.value.reason == "manifest_plan_digest"
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
    made.shipper.send(transfer, prompt_cache(made.shipper.model, request), last=1)
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
    cache.layers[0]["index"] = cache.layers[0]["index"].flip(1)
    made.shipper.send(transfer, cache, last=1)
    with pytest.raises(TransferFailed, match="must ascend") as caught:
        await asyncio.to_thread(transfer.wait, 10)
    assert caught.value.reason == "index"
    with pytest.raises(TransferFailed, match="must ascend"):
        await anext(stream)
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("full", lambda tensors: {"index": torch.zeros(2, 100, dtype=torch.int32), **tensors}),
        ("full", lambda tensors: {"values": tensors["values"], "keys": tensors["keys"]}),
        ("full", lambda tensors: tensors | {"keys": tensors["keys"].bfloat16()}),
        ("full", lambda tensors: {name: its[:, 1:].contiguous() for name, its in tensors.items()}),
        ("snapkv", lambda tensors: {name: its for name, its in tensors.items() if name != "index"}),
        ("h2o", lambda tensors: {name: its for name, its in tensors.items() if name != "state"}),
        ("rdkv", lambda tensors: {name: its for name, its in tensors.items() if name != "layout"}),
        ("rdkv", lambda tensors: tensors | {"codes": torch.zeros(1 << 20, dtype=torch.uint8)}),
        ("snapkv-kivi", lambda tensors: tensors | {"codes": tensors["codes"][:, :-1].contiguous()}),
    ],
    ids=[
        "an index", "another order", "another dtype", "fewer rows", "no index", "no state", "no layout",
        "a packed layer beyond its bound", "fewer codes",
    ],
)  # fmt: skip
async def test_a_layer_of_other_tensors_than_its_formats_fails_both_sides(
    harness, request_of, ticket_of, prompt_cache, method, change
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method=method, tokens=40 if method != "full" else None)
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    kinds, tensors = {"index": "index"} | dict(cache.formats[0].kinds), change(cache.layers[0])
    transfer = made.shipper.open(request, ticket)
    with contextlib.suppress(TransferFailed):  # at once, where the refusal comes early
        transfer.send_layer(
            0, [NamedTensor(name=name, tensor=its, kind=kinds[name]) for name, its in tensors.items()]
        )
    for failed in (asyncio.to_thread(transfer.wait, 10), anext(stream)):
        with pytest.raises(TransferFailed, match="layer 0: its tensors are") as caught:
            await failed
        assert caught.value.reason == "layer_header"
    assert made.value("receive_failed_total", reason="layer_header") == 1
    assert await made.arena_is_free()


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("method", ["full", "rocketkv", "kivi", "h2o", "adakv", "think"])
async def test_rows_that_are_not_finite_fail_both_sides_and_no_other_request(
    harness, request_of, ticket_of, prompt_cache, method, name
):
    made = await harness()
    tokens = 40 if method in ("rocketkv", "h2o", "adakv") else None
    request = request_of([i % 50 for i in range(100)], method=method, tokens=tokens)
    neighbour = request_of([i % 50 for i in range(100)], method=method, tokens=tokens)
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    with torch.inference_mode():
        cache.layers[0][name] = cache.layers[0][name].clone()
        cache.layers[0][name].view(-1)[-1] = torch.nan
    transfer = made.shipper.open(request, ticket)
    with contextlib.suppress(TransferFailed):  # at once, where the refusal comes early
        made.shipper.send(transfer, cache, last=1)
    for failed in (asyncio.to_thread(transfer.wait, 10), anext(stream)):
        with pytest.raises(TransferFailed, match=f"layer 0: 1 of .* {name} are not finite") as caught:
            await failed
        assert caught.value.reason == "not_finite"
    assert made.value("receive_failed_total", reason="not_finite") == 1
    assert await made.arena_is_free()
    stream, ticket = await ticket_of(made.service, neighbour)
    await asyncio.to_thread(made.shipper.ship, neighbour, ticket)
    assert isinstance(await anext(stream), TransferAccepted)
    assert isinstance(await anext(stream), TokenGenerated)
    await stream.aclose()


async def test_another_layout_version_is_a_mismatch_on_both_sides(
    harness, request_of, ticket_of, prompt_cache
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="rdkv", tokens=40)
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    with torch.inference_mode():
        cache.layers[0]["layout"][0] += 1
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, cache, last=1)
    for failed in (asyncio.to_thread(transfer.wait, 10), anext(stream)):
        with pytest.raises(ProtocolMismatch, match="layer 0: it is packed in layout version") as caught:
            await failed
        assert caught.value.reason == "layout_version"
    assert await made.arena_is_free()


async def test_packed_bytes_that_no_packer_writes_fail_both_sides(
    harness, request_of, ticket_of, prompt_cache
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="rdkv", tokens=40)
    stream, ticket = await ticket_of(made.service, request)
    cache = prompt_cache(made.shipper.model, request)
    with torch.inference_mode():
        packed = cache.formats[1].packed(cache.layers[1])
        packed.heads[1].positions[0] = 100
        cache.layers[1] = packed_tensors(packed)
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, cache)
    with pytest.raises(TransferFailed, match="positions of head 1") as caught:
        await asyncio.to_thread(transfer.wait, 10)
    assert caught.value.reason == "packed"
    with pytest.raises(TransferFailed, match="positions of head 1"):
        await anext(stream)
    assert await made.arena_is_free()


@pytest.mark.parametrize(
    ("rows", "message"),
    [((31, 30), "must share 60"), ((0, 60), "layer 0 has 0"), ((), "rows are of 0 layers")],
)
async def test_measured_rows_beyond_total_or_bounds_are_refused_on_both_sides(
    harness, request_of, ticket_of, rows, message
):
    made = await harness()
    request = request_of([i % 50 for i in range(100)], method="d2o", tokens=30)
    stream, ticket = await ticket_of(made.service, request)
    transfer = made.shipper.open(request, ticket, layer_rows=rows)
    for failed in (asyncio.to_thread(transfer.wait, 10), anext(stream)):
        with pytest.raises(ProtocolMismatch, match=message) as caught:
            await failed
        assert caught.value.reason == "manifest_layer_rows"
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
        cache.layers[1]["state"][7] = number
    transfer = made.shipper.open(request, ticket)
    made.shipper.send(transfer, cache)
    key = key_of(ticket)

    def finish():  # the refusal may come before the end is queued
        transfer.finish(EndRecord(key=key, num_blocks=0, payload_bytes=0, first_token=cache.first_token))
        transfer.wait(10)

    with pytest.raises(TransferFailed, match="layer 1: ") as caught:
        await asyncio.to_thread(finish)
    assert caught.value.reason == "state"
    with pytest.raises(TransferFailed, match="layer 1: "):
        await anext(stream)
    assert await made.arena_is_free()
