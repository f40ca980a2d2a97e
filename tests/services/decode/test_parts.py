"""A prompt's transfer in parts: each rank of a decode worker takes its heads' blocks, real processes."""

import asyncio
import contextlib
import dataclasses
from pathlib import Path

import pytest
from kvtest.decode import PromptCache, end_with, make_request, manifest_for, named
from kvtest.parallel import SETTINGS, same_or_tied, started

from kvferry.services.decode.config import DecodeConfig
from kvferry.shared.control.messages import GenerationFinished, TokenGenerated, TransferAccepted
from kvferry.shared.errors import Cancelled, KvferryError, LeaseExpired, TransferFailed
from kvferry.shared.process.worker import ProcessTransport, RankTransport
from kvferry.shared.trust.certs import Certs
from kvferry.shared.wire.channel import Received
from kvferry.shared.wire.receiver import BlockServer
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryListeningChannel
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel
from kvferry.tools.certs import make_certs
from kvferry.tools.oracle import OneProcessGenerator


class CountedTransport(ProcessTransport):
    """Counts what arrives at the first rank's block server, all frames."""

    num_bytes = 0

    def server(self, sink, *, on_late_block=None):
        channel = SharedMemoryListeningChannel(ZmqListeningChannel("tcp://127.0.0.1:0"))
        poll = channel.poll

        def counted(timeout_s):
            events = poll(timeout_s)
            for event in events:
                if isinstance(event, Received):
                    self.num_bytes += sum(memoryview(frame).nbytes for frame in event.frames)
            return events

        channel.poll = counted
        return BlockServer(channel, sink, on_late_block=on_late_block)


def request_for(model, number=0, **kwargs):
    settings = {"prompt": [i * 7 % 50 for i in range(150)], "logprobs": 2} | kwargs
    return make_request(request_id=str(number), model_fingerprint=model.spec.fingerprint, **settings)


def end(cache, part):
    return end_with(cache.first_token if part == 0 else None, cache.draft)


async def rest(stream):
    return [event async for event in stream]


def tokens_of(cache, events):
    generated = (event.token for event in events if isinstance(event, TokenGenerated))
    return [*cache.drawn, *generated]


@pytest.mark.parametrize("method", ["full", "rocketkv", "rdkv", "rdkv-draft", "compactor"])
async def test_each_rank_receives_its_heads_and_together_they_receive_what_one_rank_does(
    one, several, method
):
    request = request_for(one, method=method, tokens=None if method == "full" else 30)
    async with started(one, one) as made:
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        cache = PromptCache(one, request)
        whole = made.shipper.open(request, ticket, measured=cache.measured)
        await asyncio.to_thread(made.shipper.send, whole, cache)
        whole.finish(end(cache, 0))
        expected = tokens_of(cache, await rest(stream))
    hub = CountedTransport(SETTINGS, None)
    async with started(several, one, hub=hub) as made:
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        transfer = made.shipper.open(request, ticket, measured=cache.measured)
        await asyncio.to_thread(made.shipper.send, transfer, cache)
        transfer.finish(end(cache, 0))
        await asyncio.to_thread(transfer.wait, 20)
        own, other = (part.bytes_by_kind for part in transfer._parts)
        assert hub.num_bytes == sum(own.values())
        tokens = tokens_of(cache, await rest(stream))
    sent = {kind: own[kind] + other[kind] for kind in own if kind != "manifest"}
    assert sent == {kind: size for kind, size in whole.bytes_by_kind.items() if kind != "manifest"}
    if method == "full":
        assert sent["rows"] == 150 * one.spec.kv_token_bytes
        assert own["rows"] == other["rows"]
    assert same_or_tied([token.token_id for token in tokens], expected) > 0


@pytest.mark.parametrize("last", [0, 1])
async def test_a_sequence_begins_when_every_part_is_there(one, several, last):
    request = request_for(one)
    cache = PromptCache(one, request)
    async with started(several, one) as made:
        stream = made.service.generate(request, timeout_s=60)
        transfer = made.shipper.open(request, (await anext(stream)).ticket)
        await asyncio.to_thread(made.shipper.send, transfer, cache)
        transfer._parts[1 - last].finish(end(cache, 1 - last))
        await asyncio.to_thread(transfer._parts[1 - last].wait, 20)
        accepted = asyncio.create_task(anext(stream))
        await made.run(request_for(one, 1))  # whatever it was told before, every rank has done
        assert not accepted.done()
        transfer._parts[last].finish(end(cache, last))
        assert isinstance(await accepted, TransferAccepted)
        assert isinstance((await rest(stream))[-1], GenerationFinished)


@pytest.mark.parametrize("part", [0, 1])
async def test_a_part_that_fails_ends_the_request_and_the_other_part_at_once(one, several, part):
    request = request_for(one)
    cache = PromptCache(one, request)
    async with started(several, one) as made:
        stream = made.service.generate(request, timeout_s=60)
        transfer = made.shipper.open(request, (await anext(stream)).ticket)
        await asyncio.to_thread(made.shipper.send, transfer, cache, last=2)
        while not transfer._parts[part]._is_accepted:
            await asyncio.sleep(0.01)
        transfer._parts[part].abort("queue_full")
        with pytest.raises(TransferFailed, match="the transfer of the prompt's KV failed: aborted"):
            await rest(stream)

        def go_on():
            made.shipper.send(transfer, cache, first=2)
            transfer.finish(end(cache, 0))
            transfer.wait(20)

        with pytest.raises((TransferFailed, Cancelled)) as failed:
            await asyncio.to_thread(go_on)
        assert failed.value.reason != "timeout"
        assert await made.arena_is_free()


async def test_a_request_cancelled_in_mid_transfer_frees_its_range_for_the_next_in_every_rank(one, several):
    cancelled, request = request_for(one, 0, prompt=range(3, 49)), request_for(one, 1)
    caches = [PromptCache(one, each) for each in (cancelled, request)]
    async with started(one, one) as made:
        _, events = await made.run(request)
        expected = tokens_of(caches[1], events)
    async with started(several, one) as made:
        stream = made.service.generate(cancelled, timeout_s=60)
        old_ticket = (await anext(stream)).ticket
        transfer = made.shipper.open(cancelled, old_ticket)
        await asyncio.to_thread(made.shipper.send, transfer, caches[0], last=2)
        await stream.aclose()
        assert await made.arena_is_free()
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        whole = made.shipper.open(request, ticket)
        for layer in range(4):  # blocks of both at once
            await asyncio.to_thread(made.shipper.send, whole, caches[1], first=layer, last=layer + 1)
            with contextlib.suppress(TransferFailed):
                await asyncio.to_thread(made.shipper.send, transfer, caches[0], first=2 + layer // 2, last=3)
        whole.finish(end(caches[1], 0))
        tokens = tokens_of(caches[1], await rest(stream))
        with pytest.raises(KvferryError):  # it is told that its request was cancelled
            await asyncio.to_thread(transfer.wait, 60)
        while any(part.key in made.shipper.sender._transfers for part in transfer._parts):
            await asyncio.sleep(0.01)
        late = made.shipper.open(dataclasses.replace(cancelled, request_id="late"), old_ticket)
        with pytest.raises(LeaseExpired):
            late.wait(20)
    assert same_or_tied([token.token_id for token in tokens], expected) > 0


async def test_blocks_that_are_late_at_another_rank_count_as_those_of_the_first(one, several):
    requests = [request_for(one, number) for number in range(2)]
    cache = PromptCache(one, requests[0])
    async with started(several, one) as made:
        stream = made.service.generate(requests[0], timeout_s=60)
        transfer = made.shipper.open(requests[0], (await anext(stream)).ticket)
        while not all(part._is_accepted for part in transfer._parts):
            await asyncio.sleep(0.01)
        await stream.aclose()
        await made.run(requests[1])  # every rank has been told of the end
        assert made.value("late_blocks_total") == 0
        late = cache.formats[0].parts(cache.layers[0], 2)[1]
        transfer._parts[1].send_layer(0, named(cache.formats[0], late))
        with pytest.raises(LeaseExpired, match=r"the reservation of transfer 0x.* has ended"):
            await asyncio.to_thread(transfer._parts[1].wait, 20)
        while made.value("late_blocks_total") == 0:
            await asyncio.sleep(0.01)
        assert made.value("late_blocks_total") == 1
        transfer.abort("late")


async def test_a_transfer_that_nobody_reserved_for_is_refused_by_another_rank_at_once(one, several):
    request = request_for(one)
    cache = PromptCache(one, request)
    async with started(several, one) as made:
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        unknown = dataclasses.replace(
            ticket, endpoint=ticket.part_endpoints[0], transfer_id=7, generation=ticket.generation + 1000
        )
        manifest = manifest_for(one.spec, request, unknown, num_kv_heads=1)
        stray = made.prefill_sender.open(unknown, manifest, timeout_s=10)
        with pytest.raises(LeaseExpired, match=r"no reservation for transfer 0x7, "):
            await asyncio.to_thread(stray.wait, 20)
        while made.value("receive_failed_total", reason="unknown_transfer") == 0:
            await asyncio.sleep(0.01)
        transfer = made.shipper.open(request, ticket)
        await asyncio.to_thread(made.shipper.send, transfer, cache)
        transfer.finish(end(cache, 0))
        assert isinstance((await rest(stream))[-1], GenerationFinished)
        assert made.value("receive_failed_total") == 1


def sender_of(certs, role="prefill", timeout_s=20):
    """Over the network, as from another machine. Args: certs: the folder; None: without keys."""
    channel = ZmqConnectingChannel(None if certs is None else Certs(certs, role).block_keys())
    return BlockSender(channel, buffer_bytes=1 << 24, timeout_s=timeout_s)


async def test_with_certs_every_rank_takes_blocks_of_prefill_and_of_nobody_else(one, several, tmp_path):
    folders = [str(tmp_path / name) for name in ("ours", "strangers")]
    for folder in folders:
        make_certs(Path(folder), days=2, everything=False)
    ours, strangers = folders
    settings = DecodeConfig(tensor_parallel=2, certs=ours)
    request = request_for(one, method="rocketkv", tokens=30)
    cache = PromptCache(one, request)
    oracle = OneProcessGenerator(one).generate(
        list(request.prompt_token_ids), plan=request.plan, sampling=request.sampling
    )
    options = {"rank_transport": RankTransport.of(settings, "decode")}
    async with contextlib.AsyncExitStack() as stack:
        hub = ProcessTransport(settings, "decode")
        made = await stack.enter_async_context(started(several, one, hub=hub, **options))
        stream = made.service.generate(request, timeout_s=60)
        ticket = (await anext(stream)).ticket
        at_rank_1 = dataclasses.replace(
            ticket, endpoint=ticket.part_endpoints[0], transfer_id=(ticket.transfer_id + 1) % 2**64
        )
        manifest = manifest_for(one.spec, request, at_rank_1, measured=cache.measured, num_kv_heads=1)

        def try_to_send(certs, role):
            sender = sender_of(certs, role, timeout_s=1.5)
            with contextlib.closing(sender), pytest.raises(TransferFailed):
                sender.open(at_rank_1, manifest, timeout_s=1.5).wait(1.5)

        tries = ((None, ""), (strangers, "prefill"), (ours, "decode"))
        await asyncio.gather(*(asyncio.to_thread(try_to_send, *attempt) for attempt in tries))
        made.shipper.sender = stack.enter_context(contextlib.closing(sender_of(ours)))
        transfer = made.shipper.open(request, ticket, measured=cache.measured)
        await asyncio.to_thread(made.shipper.send, transfer, cache)
        transfer.finish(end(cache, 0))
        tokens = tokens_of(cache, await rest(stream))
        assert same_or_tied([token.token_id for token in tokens], oracle) > 0
        assert made.value("receive_failed_total") == made.value("late_blocks_total") == 0
