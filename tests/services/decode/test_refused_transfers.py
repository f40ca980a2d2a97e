"""Transfers that must be refused or fail, by name and on both sides, and leave no byte behind."""

import asyncio
import contextlib
import dataclasses

import pytest
import torch
from kvtest.compression import packed_tensors
from kvtest.decode import end_with
from kvtest.waiting import eventually

from kvferry.shared.control.messages import TokenGenerated, TransferAccepted
from kvferry.shared.errors import LeaseExpired, ProtocolMismatch, TransferFailed
from kvferry.shared.sampling.params import SampledToken
from kvferry.shared.wire.messages import NamedTensor

PROMPT = [i % 50 for i in range(100)]


async def assert_both_fail(made, stream, send, error, match, reason):
    """`send(timeout_s)` and the stream raise it, and no byte is kept."""
    for failed in (asyncio.to_thread(send, 10), anext(stream)):
        with pytest.raises(error, match=match) as caught:
            await failed
        assert caught.value.reason == reason
    assert await made.arena_is_free()


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
    match, reason = f"manifest's {name} is", f"manifest_{name}"
    await assert_both_fail(made, stream, transfer.wait, ProtocolMismatch, match, reason)
    assert made.value("receive_failed_total") == 1


async def test_another_plan_than_the_one_reserved_for_is_refused(harness, request_of, ticket_of):
    made = await harness()
    stream, ticket = await ticket_of(made.service, request_of(PROMPT, method="rocketkv", tokens=16))
    other = request_of(PROMPT, method="rocketkv", tokens=17)
    match, reason = "manifest's plan_digest is", "manifest_plan_digest"
    await assert_both_fail(
        made, stream, lambda timeout_s: made.shipper.ship(other, ticket), ProtocolMismatch, match, reason
    )


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


async def test_a_sender_that_gives_up_fails_the_request_at_once(begin, request_of):
    made, stream, transfer, cache = await begin(request_of())
    made.shipper.send(transfer, cache, last=1)
    await eventually(lambda: made.service.arena.bytes_by_state()["in_transfer"])
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
async def test_a_transfer_without_a_valid_first_token_fails(begin, request_of, first_token):
    made, stream, transfer, cache = await begin(request_of())
    made.shipper.send(transfer, cache)
    transfer.finish(end_with(first_token))
    await assert_both_fail(made, stream, transfer.wait, TransferFailed, "first token", "first_token")


async def test_an_index_that_does_not_ascend_fails_both_sides(begin, request_of):
    made, stream, transfer, cache = await begin(request_of(PROMPT, method="snapkv", tokens=40))
    cache.layers[0]["index"] = cache.layers[0]["index"].flip(1)
    made.shipper.offer(transfer, cache, last=1)
    await assert_both_fail(made, stream, transfer.wait, TransferFailed, "must ascend", "index")


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("full", lambda tensors: {"index": torch.zeros(2, 100, dtype=torch.int32), **tensors}),
        ("full", lambda tensors: {"values": tensors["values"], "keys": tensors["keys"]}),
        ("full", lambda tensors: tensors | {"keys": tensors["keys"].bfloat16()}),
        ("full", lambda tensors: {name: tensor[:, 1:].contiguous() for name, tensor in tensors.items()}),
        ("snapkv", lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "index"}),
        ("h2o", lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "state"}),
        ("rdkv", lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "layout"}),
        ("rdkv", lambda tensors: tensors | {"codes": torch.zeros(1 << 20, dtype=torch.uint8)}),
        ("snapkv-kivi", lambda tensors: tensors | {"codes": tensors["codes"][:, :-1].contiguous()}),
    ],
    ids=[
        "an index", "another order", "another dtype", "fewer rows", "no index", "no state", "no layout",
        "a packed layer beyond its bound", "fewer codes",
    ],
)  # fmt: skip
async def test_a_layer_of_other_tensors_than_its_formats_fails_both_sides(begin, request_of, method, change):
    tokens = 40 if method != "full" else None
    made, stream, transfer, cache = await begin(request_of(PROMPT, method=method, tokens=tokens))
    kinds, tensors = {"index": "index"} | dict(cache.formats[0].kinds), change(cache.layers[0])
    with contextlib.suppress(TransferFailed):  # at once, where the refusal comes early
        transfer.send_layer(
            0, [NamedTensor(name=name, tensor=tensor, kind=kinds[name]) for name, tensor in tensors.items()]
        )
    match = "layer 0: its tensors are"
    await assert_both_fail(made, stream, transfer.wait, TransferFailed, match, "layer_header")
    assert made.value("receive_failed_total", reason="layer_header") == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("method", ["full", "rocketkv", "kivi", "h2o", "adakv", "think"])
async def test_rows_that_are_not_finite_fail_both_sides_and_no_other_request(
    begin, request_of, ticket_of, method, name
):
    tokens = 40 if method in ("rocketkv", "h2o", "adakv") else None
    request, neighbour = (request_of(PROMPT, method=method, tokens=tokens) for _ in range(2))
    made, stream, transfer, cache = await begin(request)
    with torch.inference_mode():
        cache.layers[0][name] = cache.layers[0][name].clone()
        cache.layers[0][name].view(-1)[-1] = torch.nan
    made.shipper.offer(transfer, cache, last=1)
    match = f"layer 0: 1 of .* {name} are not finite"
    await assert_both_fail(made, stream, transfer.wait, TransferFailed, match, "not_finite")
    assert made.value("receive_failed_total", reason="not_finite") == 1
    stream, ticket = await ticket_of(made.service, neighbour)
    await asyncio.to_thread(made.shipper.ship, neighbour, ticket)
    assert isinstance(await anext(stream), TransferAccepted)
    assert isinstance(await anext(stream), TokenGenerated)
    await stream.aclose()


async def test_another_layout_version_is_a_mismatch_on_both_sides(begin, request_of):
    made, stream, transfer, cache = await begin(request_of(PROMPT, method="rdkv", tokens=40))
    with torch.inference_mode():
        cache.layers[0]["layout"][0] += 1
    made.shipper.offer(transfer, cache, last=1)
    match = "layer 0: it is packed in layout version"
    await assert_both_fail(made, stream, transfer.wait, ProtocolMismatch, match, "layout_version")


async def test_packed_bytes_that_no_packer_writes_fail_both_sides(begin, request_of):
    made, stream, transfer, cache = await begin(request_of(PROMPT, method="rdkv", tokens=40))
    with torch.inference_mode():
        packed = cache.formats[1].packed(cache.layers[1])
        packed.heads[1].positions[0] = 100
        cache.layers[1] = packed_tensors(packed)
    made.shipper.offer(transfer, cache)
    await assert_both_fail(made, stream, transfer.wait, TransferFailed, "positions of head 1", "packed")


@pytest.mark.parametrize(
    ("rows", "message"),
    [((31, 30), "must share 60"), ((0, 60), "layer 0 has 0"), ((), "rows are of 0 layers")],
)
async def test_measured_rows_beyond_total_or_bounds_are_refused_on_both_sides(
    harness, request_of, ticket_of, rows, message
):
    made = await harness()
    request = request_of(PROMPT, method="d2o", tokens=30)
    stream, ticket = await ticket_of(made.service, request)
    transfer = made.shipper.open(request, ticket, layer_rows=rows)
    await assert_both_fail(made, stream, transfer.wait, ProtocolMismatch, message, "manifest_layer_rows")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
async def test_scores_that_no_attention_sums_to_fail_both_sides(begin, request_of, number):
    made, stream, transfer, cache = await begin(request_of(PROMPT, method="h2o", tokens=40))
    with torch.inference_mode():
        cache.layers[1]["state"][7] = number
    made.shipper.offer(transfer, cache)

    def finish(timeout_s):  # the refusal may come before the end is queued
        transfer.finish(end_with(cache.first_token))
        transfer.wait(timeout_s)

    await assert_both_fail(made, stream, finish, TransferFailed, "layer 1: ", "state")
