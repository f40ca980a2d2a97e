"""What one request, session or turn makes the router do, counted: part of `scale_simulation.py`.

The router's own code runs over workers that only count the calls they get. Counts do not depend on the
machine; times do.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvtest.redis_server import RedisServer
from simulated_cluster import STATUS_INTERVAL_S, SimulatedWorker

from kvferry.services.router.sessions.record import SessionRecord
from kvferry.services.router.sessions.redis_records import RedisRecords
from kvferry.services.router.sessions.stored_record import write_whole
from kvferry.services.router.turn import worker_pool
from kvferry.services.router.turn.runner import BackgroundTasks, TurnRunner, served_model
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.control.messages import HistoryInfo, PrefixRequest, SessionKey
from kvferry.shared.history.redis_client import AsyncRedisLink, RedisOptions
from kvferry.shared.model.chat_template import ChatMessage
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.telemetry.metrics import RouterMetrics

TURN_TOKENS, CHARACTERS_A_TOKEN = 556, 4
_TIMED = 200


class CountedWorker(SimulatedWorker):
    """Counts calls. Attributes: asked: for a stored prefix; told: to drop a session."""

    asked = told = 0

    async def prefix_info(self, request: PrefixRequest, *, timeout_s: float) -> HistoryInfo:
        self.asked += 1
        return HistoryInfo(num_tokens=0, size_bytes=0)

    async def drop_session(self, session: SessionKey, *, timeout_s: float) -> HistoryInfo:
        self.told += 1
        return HistoryInfo(num_tokens=0, size_bytes=0)


async def counts_by_workers(number: int, spec: ModelSpec) -> dict[str, float]:
    """Of one request, with so many workers of each role."""
    clients = {
        role: {f"{role}-{i}": CountedWorker(role, f"{role}-{i}", spec, 64) for i in range(number)}
        for role in ("prefill", "decode")
    }
    usual, worker_pool.MAX_STATUS_CALLS_PER_S = worker_pool.MAX_STATUS_CALLS_PER_S, float("inf")
    pools = {
        role: WorkerPool.of_clients(role, of_role, status_interval_s=1e6) for role, of_role in clients.items()
    }
    for pool in pools.values():
        await pool.start()
    worker_pool.MAX_STATUS_CALLS_PER_S = usual
    prefill, decode = pools["prefill"], pools["decode"]
    runner = TurnRunner(
        prefill=prefill,
        decode=decode,
        tasks=BackgroundTasks(),
        metrics=RouterMetrics(),
        max_recoveries=0,
        backoff_s=0.1,
        recovery_wait_s=0.1,
    )
    key, every = (
        SessionKey(owner="o", session_id="s"),
        [*clients["prefill"].values(), *clients["decode"].values()],
    )
    looked = _count_looks(decode, spec)
    await runner.with_prefix("o", tuple(range(256)), spec.fingerprint)
    asked = sum(client.asked for client in every)
    await runner.drop(key, addresses=("prefill-0", "decode-0"))
    expired = sum(client.told for client in every)
    await runner.drop(key)
    deleted = sum(client.told for client in every) - expired
    began_s = time.process_time()
    for _ in range(_TIMED):
        served_model(prefill, decode)
        prefill.choose(fingerprint=spec.fingerprint)
        decode.choose(fingerprint=spec.fingerprint)
    placing_s = (time.process_time() - began_s) / _TIMED
    for pool in pools.values():
        await pool.close()
    calls_per_s = 2 * number / (STATUS_INTERVAL_S + number / worker_pool.MAX_STATUS_CALLS_PER_S)
    return {
        "workers": number,
        "looked_at_per_choice": looked,
        "asked_for_a_prefix": asked,
        "told_of_an_expired_session": expired,
        "told_of_a_deleted_session": deleted,
        "status_calls_per_s_of_a_router": round(calls_per_s, 1),
        "placing_cpu_us": round(1e6 * placing_s, 1),
    }


def _count_looks(pool: WorkerPool[Any], spec: ModelSpec) -> int:
    load, looked = worker_pool._load, 0

    def counted(worker: Any) -> tuple[int, int]:
        nonlocal looked
        looked += 1
        return load(worker)

    worker_pool._load = counted
    try:
        pool.choose(fingerprint=spec.fingerprint)
    finally:
        worker_pool._load = load
    return looked


def record_after(turns: int) -> SessionRecord:
    """A chat's record with `TURN_TOKENS` a turn."""
    text = "x" * (TURN_TOKENS * CHARACTERS_A_TOKEN // 2)
    messages = [ChatMessage(role, text) for _ in range(turns) for role in ("user", "assistant")]
    return SessionRecord(
        kind="chat",
        model_fingerprint="f",
        token_ids=tuple(100_000 + number for number in range(turns * TURN_TOKENS)),
        messages=tuple(messages),
        assistant_ends=tuple(TURN_TOKENS * (number + 1) for number in range(turns)),
        turns=turns,
        commit_id=f"commit-{turns}",
        expires_at_s=time.time() + 3600.0,
        prefill_addresses=("prefill-0",),
        decode_address="decode-0",
    )


async def counts_by_turns(turns: int) -> dict[str, int]:
    """Bytes between a router and Redis in the turn after so many: of a router that has the record and of one
    that has not; and those that the commit of that turn writes."""
    key, record = SessionKey(owner="o", session_id="s"), None
    found: dict[str, int] = {"turns": turns, "record": len(write_whole(record_after(turns)).head)}
    with RedisServer.running() as server, server.client() as client:
        link = AsyncRedisLink(RedisOptions(url=server.url, timeout_s=30.0))
        records = RedisRecords(link, clock=time.time, name="counts")

        def traffic(direction: str) -> int:
            return int(client.info("stats")[f"total_net_{direction}_bytes"])

        async def commit(number: int, before: SessionRecord | None) -> SessionRecord | None:
            base = before.commit_id if before is not None else ""
            return await records.commit(key, "r.1", base, record_after(number), before=before)

        await records.acquire(key, "r.1", 30.0)
        for number in range(1, turns + 1):
            record = await commit(number, record)
        for name, known in (("read_by_its_router", record), ("read_by_another_router", None)):
            before = traffic("output")
            # The second one is a renewal by the same router.
            await records.acquire(key, "r.1", 30.0, known=known)
            found[name] = traffic("output") - before
        before = traffic("input")
        await commit(turns + 1, record)
        found["commit"] = traffic("input") - before
        await records.close()
    return found


async def counts(spec: ModelSpec, workers: list[int], turns: list[int]) -> dict[str, list[Any]]:
    return {
        "by_workers": [await counts_by_workers(number, spec) for number in workers],
        "by_turns": await asyncio.gather(*(counts_by_turns(number) for number in turns)),
    }
