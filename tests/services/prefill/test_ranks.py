"""A prefill worker of several ranks, real gloo processes: each ships its heads' blocks itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtest.parallel import in_ranks
from kvtest.prefill import ControlledModel, Harness, RecordingSink
from kvtest.waiting import eventually, until
from torch import Tensor

from kvferry.models import DEMO_MODEL
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.parts import PREFILL_RANK, PrefillRanks
from kvferry.services.prefill.server import build_store
from kvferry.services.prefill.service import PrefillService
from kvferry.shared.compression.kept import kept_fractions
from kvferry.shared.compression.plan import Budget
from kvferry.shared.compression.presets import plan_for
from kvferry.shared.control.messages import CommitTurnRequest, PrefillRequest, SessionKey
from kvferry.shared.errors import HistoryMiss, ProtocolMismatch, TransferFailed, WorkerUnavailable
from kvferry.shared.history.turn import StagedTurn
from kvferry.shared.model.parallel.model import ParallelModel
from kvferry.shared.process.worker import ProcessTransport
from kvferry.shared.telemetry.metrics import PrefillMetrics
from kvferry.shared.trust.certs import Certs
from kvferry.shared.wire.channel import ListeningChannel, Received, SendResult
from kvferry.shared.wire.frames import peek_key
from kvferry.shared.wire.in_process import InProcessHub
from kvferry.shared.wire.messages import TransferKey
from kvferry.shared.wire.receiver import BlockServer, part_key
from kvferry.shared.wire.sender import BlockSender
from kvferry.shared.wire.shared_memory import SharedMemoryListeningChannel
from kvferry.shared.wire.zmq import ZmqListeningChannel
from kvferry.tools.certs import make_certs

PROMPT = tuple(i * 7 % 50 for i in range(300))
SNAPKV = plan_for("snapkv", budget=Budget(tokens=40))


@pytest.fixture(scope="module")
def several() -> Iterator[ParallelModel]:
    with in_ranks(DEMO_MODEL, 2, PREFILL_RANK) as model:
        yield model


class Decode:
    """A decode worker's rank: records what it gets, and counts the bytes of all frames by transfer."""

    def __init__(self, keys: Any = None) -> None:
        self.sink = RecordingSink()
        self.num_bytes: Counter[TransferKey] = Counter()
        listen = "tcp://127.0.0.1:0"
        channel: ListeningChannel = (
            SharedMemoryListeningChannel(ZmqListeningChannel(listen))
            if keys is None
            else ZmqListeningChannel(listen, keys=keys)
        )
        poll = channel.poll

        def counted(timeout_s: float) -> Any:
            events = poll(timeout_s)
            for event in events:
                if isinstance(event, Received) and (key := peek_key(event.frames)) is not None:
                    self.num_bytes[key] += sum(memoryview(frame).nbytes for frame in event.frames)
            return events

        channel.poll = counted  # type: ignore[method-assign]
        self.server = BlockServer(channel, self.sink)


class Worker(Harness):
    """A prefill service whose prompts go to so many ranks of decode."""

    ranks: list[Decode]

    def to_ranks(self, **options: Any) -> PrefillRequest:
        request = self.request(PROMPT, **options)
        endpoint, *others = (rank.server.endpoint for rank in self.ranks)
        ticket = dataclasses.replace(request.ticket, endpoint=endpoint, part_endpoints=tuple(others))
        return dataclasses.replace(request, ticket=ticket)


@contextlib.asynccontextmanager
async def started(
    several: ParallelModel, *, num_ranks: int = 2, keys: Any = None, **options: Any
) -> AsyncIterator[Worker]:
    config = PrefillConfig(
        **{"tensor_parallel": 2, "transfer_timeout_s": 20.0, "history_bytes": 1 << 24} | options
    )
    metrics, model = PrefillMetrics(), ControlledModel(several)
    transport = ProcessTransport(config, "prefill")
    ranks = [Decode(keys) for _ in range(num_ranks)]
    store = build_store(config, spec=several.spec, metrics=metrics)
    sender = BlockSender(
        transport.connecting(lambda name: metrics.block_connections.labels(name).inc()),
        buffer_bytes=1 << 24,
        timeout_s=config.transfer_timeout_s,
    )
    service = PrefillService(
        model=model,
        store=store,
        ranks=PrefillRanks(several, sender),
        server_factory=transport.server,
        metrics=metrics,
        config=config,
        clock=time.monotonic,
    )
    await service.start()
    made = Worker(
        service=service,
        model=model,
        store=store,
        metrics=metrics,
        sink=ranks[0].sink,
        decode=ranks[0].server,
        hub=InProcessHub(),
    )
    made.ranks = ranks
    try:
        yield made
    finally:
        await service.close()
        for rank in ranks:
            rank.server.close()


def key_of(request: PrefillRequest, first_head: int = 0) -> TransferKey:
    ticket = request.ticket
    return part_key(TransferKey(transfer_id=ticket.transfer_id, generation=ticket.generation), first_head)


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["full", "rocketkv", "rdkv", "compactor"])
async def test_what_the_first_rank_sends_and_gets_is_its_own_heads_alone(
    several: ParallelModel, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    gathered, gather = list[int](), several.lead.gather

    def counted(part: Tensor) -> list[Tensor]:
        if part.shape[-2] > 1:  # not the engine's probe of one token
            gathered.append(part.nbytes)
        return gather(part)

    monkeypatch.setattr(several.lead, "gather", counted)
    async with started(several) as made:
        request = made.to_ranks(plan=plan_for(method, budget=None if method == "full" else Budget(tokens=40)))
        own_bytes = 0
        send = made.service._ranks.sender._channel.send

        def counted_send(peer: bytes, frames: Any) -> Any:
            nonlocal own_bytes
            result = send(peer, frames)
            if result is SendResult.SENT:
                own_bytes += sum(memoryview(frame).nbytes for frame in frames)
            return result

        monkeypatch.setattr(made.service._ranks.sender._channel, "send", counted_send)
        first, done = await made.run(request)
    keys = [key_of(request), key_of(request, 1)]
    sinks = [rank.sink for rank in made.ranks]
    arrived = sum((rank.num_bytes for rank in made.ranks), Counter[TransferKey]())
    assert own_bytes == arrived[keys[0]]
    assert sum(done.bytes_by_kind.values()) == arrived[keys[0]] + arrived[keys[1]]
    assert arrived[keys[0]] == pytest.approx(arrived[keys[1]], rel=0.2)
    assert gathered == []
    for key, sink in zip(keys, sinks, strict=True):
        (manifest,) = (candidate for candidate in sink.manifests if candidate.key == key)
        assert manifest.num_kv_heads == 1
        assert len(sink.layers[key]) == several.spec.num_layers
    assert [sink.ends[key].first_token for key, sink in zip(keys, sinks, strict=True)] == [first.token, None]
    if method == "full":
        assert done.bytes_by_kind["rows"] == len(PROMPT) * several.spec.kv_token_bytes


async def test_the_picture_of_kept_rows_is_of_all_heads(several: ParallelModel) -> None:
    async with started(several) as made:
        request = made.to_ranks(plan=SNAPKV, retained_bins=10)
        _, done = await made.run(request)
        positions = {}
        for layer in range(several.spec.num_layers):
            index = [made.ranks[head].sink.rows(key_of(request, head), layer, "index") for head in (0, 1)]
            positions[layer] = [head[0].numpy() for head in index]
    assert done.retained_fractions == kept_fractions(positions, num_tokens=len(PROMPT), num_bins=10)


async def test_a_prompt_that_is_run_again_ships_every_layer_once_in_every_rank(
    several: ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SessionKey(owner="o", session_id="s")
    async with started(several) as made:
        first, _ = await made.run(request := made.to_ranks(session=session))
        committed = CommitTurnRequest(
            request_id=request.request_id, session=session, token_ids=(*PROMPT, first.token.token_id)
        )
        await made.service.commit_turn(committed, timeout_s=5)
        load, layers = StagedTurn.load_prepared, list[int]()

        def lost_once(turn: StagedTurn, layer: int, prepare: Any) -> Any:
            layers.append(layer)
            if layers == [0, 1, 2]:
                raise HistoryMiss("its rows are gone", reason="test")
            return load(turn, layer, prepare)

        monkeypatch.setattr(StagedTurn, "load_prepared", lost_once)
        request = made.to_ranks(session=session, has_history=True)
        longer = (*PROMPT, first.token.token_id, 3, 4)
        plan = made.resolve(plan_for("full"), longer, request.sampling)
        request = dataclasses.replace(
            request, prompt_token_ids=longer, ticket=dataclasses.replace(request.ticket, plan=plan)
        )
        await made.run(request)
        assert layers[:3] == [0, 1, 2]
        for head, rank in enumerate(made.ranks):
            key = key_of(request, head)
            rows = [rank.sink.rows(key, layer, "keys").shape[:2] for layer in range(several.spec.num_layers)]
            assert rows == [(1, len(longer))] * several.spec.num_layers
            assert key in rank.sink.ends


@pytest.mark.parametrize("rank", [0, 1])
async def test_one_ranks_part_that_is_refused_fails_the_prompt_by_name_and_ends_the_other(
    several: ParallelModel, rank: int
) -> None:
    async with started(several) as made:
        made.ranks[rank].sink.refuse = TransferFailed("there is no room", reason="no_room")

        def go_on_when_it_is_refused(layer: int, keys: Tensor) -> None:
            until(lambda: layer != 1 or made.ranks[rank].sink.num_refused > 0)

        made.model.on_layer = go_on_when_it_is_refused
        with pytest.raises(TransferFailed, match="rank 1: there is no room" if rank else "^there is no room"):
            await made.run(request := made.to_ranks(plan=SNAPKV))
        await eventually(lambda: made.ranks[1 - rank].sink.aborted == [key_of(request, 1 - rank)])
        made.ranks[rank].sink.refuse, made.model.on_layer = None, None
        await made.run(made.to_ranks(plan=SNAPKV))


async def test_a_request_given_up_in_mid_transfer_ends_in_every_rank_and_the_next_is_served(
    several: ParallelModel,
) -> None:
    async with started(several) as made:
        request = made.to_ranks(plan=SNAPKV)
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(made.run(request))

        def give_up(layer: int, keys: Tensor) -> None:
            if layer == 2:
                until(lambda: all(rank.sink.manifests for rank in made.ranks))  # or there is nothing to end
                loop.call_soon_threadsafe(task.cancel)
                until(
                    lambda: all(rank.sink.aborted for rank in made.ranks),
                    what="it goes on although the pass still runs",
                )

        made.model.on_layer = give_up
        with pytest.raises(asyncio.CancelledError):
            await task
        expected = [[key_of(request)], [key_of(request, 1)]]
        await eventually(lambda: [rank.sink.aborted for rank in made.ranks] == expected)
        made.model.on_layer = None
        await made.run(made.to_ranks(plan=SNAPKV))
        assert made.service._engine._ranks._transfers == {}


async def test_a_rank_that_ends_in_mid_transfer_fails_the_prompt_as_the_workers_failure(
    several: ParallelModel,
) -> None:
    """As the leading rank is told of it; that the worker ends then is for the end-to-end tests."""
    async with started(several) as made:
        made.model.on_layer = lambda layer, keys: several.lead.on_note(1, None) if layer == 1 else None
        with pytest.raises(WorkerUnavailable, match="rank 1 of the prefill worker has ended"):
            await made.run(request := made.to_ranks(plan=SNAPKV))
        await eventually(lambda: made.ranks[0].sink.aborted == [key_of(request)])
        made.model.on_layer = None
        await made.run(made.to_ranks(plan=SNAPKV))


async def test_a_rank_of_decode_that_is_silent_fails_the_prompt_in_time(several: ParallelModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with started(several, transfer_timeout_s=2.0) as made:
            request = made.to_ranks(plan=SNAPKV)
            ticket = dataclasses.replace(
                request.ticket, part_endpoints=(f"tcp://127.0.0.1:{silent.getsockname()[1]}",)
            )
            with pytest.raises(TransferFailed, match=r"rank 1: .* was silent for more than 2.0 s"):
                await made.run(dataclasses.replace(request, ticket=ticket))


async def test_every_rank_authenticates_with_the_workers_keys(several: ParallelModel, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ours", "strangers")]
    for folder in folders:
        make_certs(folder, days=2, everything=False)
    keys = Certs(str(folders[0]), "decode").block_keys()
    for folder in folders:
        timeout_s = 30.0 if folder == folders[0] else 2.0
        async with started(several, keys=keys, certs=str(folder), transfer_timeout_s=timeout_s) as made:
            request = made.to_ranks(plan=SNAPKV)
            if folder == folders[0]:
                await made.run(request)
                assert [len(rank.sink.ends) for rank in made.ranks] == [1, 1]
            else:
                with pytest.raises(TransferFailed):
                    await made.run(request)
                assert not any(rank.sink.manifests for rank in made.ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_a_decode_worker_whose_ranks_are_no_multiple_is_refused_by_name(
    several: ParallelModel, num_ranks: int
) -> None:
    async with started(several, num_ranks=num_ranks) as made:
        with pytest.raises(
            ProtocolMismatch, match=f"has {num_ranks} ranks; it must have a multiple of the 2"
        ):
            await made.run(made.to_ranks(plan=SNAPKV))
        assert not any(rank.sink.manifests for rank in made.ranks)
