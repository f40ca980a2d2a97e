"""The heads of one decode process that come in several transfers, as ranks of prefill ship them."""

import asyncio
import dataclasses
import time

import pytest
import torch
from kvtest.decode import MIXED, PromptCache, end_with, make_request, manifest_for, named
from kvtest.parallel import started

from kvferry.services.prefill.parts import PartedTransfer
from kvferry.shared.compression.formats import compresses_heads_apart, make_formats
from kvferry.shared.control.messages import GenerationFinished, TokenGenerated
from kvferry.shared.errors import LeaseExpired, MalformedMessage, TransferFailed

NUM_RANKS = 2
TOGETHER = {"adakv", "d2o", "random", "rocketkv-d2o"}
"""Methods that compress all heads together."""
CASES = [case for case in MIXED if case.get("method") not in TOGETHER - {"adakv"}]
"""`adakv`: parts of different sizes, as heads that are compressed together may be shipped, too."""


class RankedPrefill:
    """Ships a prompt as so many ranks of prefill do, each its heads."""

    def __init__(self, made, cache, ticket, ranks=range(NUM_RANKS), **changes):
        spec = made.shipper.model.spec
        own = dataclasses.replace(
            spec, num_heads=spec.num_heads // NUM_RANKS, num_kv_heads=spec.num_kv_heads // NUM_RANKS
        )
        self.cache = cache
        self.formats = make_formats(own, cache.measured, num_parts=NUM_RANKS)
        manifest = manifest_for(spec, cache.request, ticket, **changes)
        self.ranks = [
            PartedTransfer(
                made.prefill_sender,
                ticket,
                manifest,
                self.formats,
                timeout_s=10,
                rank=rank,
                num_ranks=NUM_RANKS,
            )
            for rank in ranks
        ]

    def send(self, rank, first=0, last=None):
        for layer in range(first, len(self.formats) if last is None else last):
            parts = self.cache.formats[layer].parts(self.cache.layers[layer], NUM_RANKS)
            self.ranks[rank].send_layer(layer, named(self.formats[layer], parts[rank]))

    def await_credit(self, rank):
        while not self.ranks[rank]._parts[0]._is_accepted:
            time.sleep(0.01)

    def finish(self, rank):
        token = self.cache.first_token if rank == 0 else None
        self.ranks[rank].finish(end_with(token))


def request_for(model, **kwargs):
    return make_request(
        **{"prompt": [i * 7 % 50 for i in range(150)]} | kwargs, model_fingerprint=model.spec.fingerprint
    )


async def rest(stream):
    return [event async for event in stream]


@pytest.mark.parametrize("number", range(len(CASES)))
async def test_the_cache_is_that_of_one_transfer(one, number):
    case, order = CASES[number], ("together", "last rank first")[number % 2]
    request = request_for(one, **case)
    cache = PromptCache(one, request)
    assert compresses_heads_apart(cache.resolved, cache.formats) == (case.get("method") != "adakv")
    async with started(one, one) as made:
        _, events = await made.run(request)
        expected = [its.token for its in events if isinstance(its, TokenGenerated)]
        stream = made.service.generate(request, timeout_s=60)
        ranked = RankedPrefill(made, cache, (await anext(stream)).ticket)
        if order == "together":
            for layer in range(len(cache.layers)):
                for rank in range(NUM_RANKS):
                    ranked.send(rank, layer, layer + 1)
            for rank in range(NUM_RANKS):
                ranked.finish(rank)
        else:
            for rank in reversed(range(NUM_RANKS)):
                ranked.send(rank)
                ranked.finish(rank)
                await asyncio.to_thread(ranked.await_credit, rank)
                # by which the answer's rows go back, whichever part came first
                assert all(its.manifest.key == its.key for its in made.service._reservations.all())
        for its in ranked.ranks:
            await asyncio.to_thread(its.wait, 20)
        events = await rest(stream)
        assert [its.token for its in events if isinstance(its, TokenGenerated)] == expected
        assert isinstance(events[-1], GenerationFinished)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_part_that_fails_ends_the_request_and_the_other_parts_at_once(one, rank):
    request = request_for(one)
    async with started(one, one) as made:
        stream = made.service.generate(request, timeout_s=60)
        ranked = RankedPrefill(made, PromptCache(one, request), (await anext(stream)).ticket)
        for its in range(NUM_RANKS):
            await asyncio.to_thread(ranked.send, its, 0, 2)
        while not all(part._is_accepted for its in ranked.ranks for part in its._parts):
            await asyncio.sleep(0.01)
        ranked.ranks[rank].abort("gone")
        with pytest.raises(TransferFailed, match="the transfer of the prompt's KV failed: aborted"):
            await rest(stream)

        def go_on():
            ranked.send(1 - rank, 2)
            ranked.finish(1 - rank)
            ranked.ranks[1 - rank].wait(20)

        with pytest.raises(LeaseExpired, match="has ended"):
            await asyncio.to_thread(go_on)


async def test_a_part_with_another_manifest_than_the_first_is_refused_by_name(one):
    request = request_for(one)
    cache = PromptCache(one, request)
    async with started(one, one) as made:
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        own = RankedPrefill(made, cache, ticket, ranks=[0])
        while not own.ranks[0]._parts[0]._is_accepted:
            await asyncio.sleep(0.01)
        other = RankedPrefill(made, cache, ticket, ranks=[1], request_id="other")
        with pytest.raises(
            MalformedMessage, match=r"part 1 of transfer 0x.* was sent twice, or its manifest"
        ):
            await asyncio.to_thread(other.ranks[0].wait, 20)
        with pytest.raises(MalformedMessage):
            await rest(stream)
        own.ranks[0].abort("refused")


async def test_a_part_of_other_tensors_than_its_format_has_fails_the_transfer(one):
    request = request_for(one, method="rocketkv", tokens=30)
    cache = PromptCache(one, request)
    async with started(one, one) as made:
        stream = made.service.generate(request, timeout_s=60)
        ranked = RankedPrefill(made, cache, (await anext(stream)).ticket)
        tensors = dict(cache.formats[0].parts(cache.layers[0], NUM_RANKS)[1])
        tensors["keys"] = torch.cat([tensors["keys"], tensors["keys"]])
        ranked.ranks[1]._parts[0].send_layer(0, named(ranked.formats[0], tensors))
        with pytest.raises(TransferFailed, match="layer 0: "):
            await rest(stream)
        for its in ranked.ranks:
            its.abort("refused")
