"""A cluster as a discrete-event simulation: part of `scale_simulation.py`.

Routers, masters of Redis, prefill queues, links and decode batches, in virtual time. Placement is that of the
router (`WorkerPool.choose` and `near`, each router with its own pools, with statuses as old as its status
calls make them). Everything else is a server with a queue and a service time that the caller gives. No KV, no
tokens, no processes.

    arrives ─► router ─► Redis ─► choose ─► prefill queue ─► link ─► decode batch ─► Redis, router ─► idle

Decode runs a step of all its sequences at a time: with b of them a step takes `step_s(b)`, and each gets a
token from it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvferry.services.router.turn import worker_pool
from kvferry.services.router.turn.worker_pool import Role, Worker, WorkerPool
from kvferry.shared.control.messages import WorkerStatus
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import PROTOCOL_VERSION

STATUS_INTERVAL_S = 1.0
_BYTES_OF_A_SLOT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Service times in seconds.

    Attributes:
        request_s, token_s: of a router's CPU; redis_s: of Redis, a request.
        prefill_s: of one prompt, by how many of its tokens are new.
        transfer_s: from the first token to decode's first step; link_s: of it, while the link is busy. Both
            by whether decode has the session's earlier rows.
        step_s: of a step with so many sequences.
    """

    request_s: float
    token_s: float
    redis_s: float
    prefill_s: Callable[[int], float]
    transfer_s: Callable[[bool], float]
    link_s: Callable[[bool], float]
    step_s: Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What clients send.

    Attributes:
        rate: turns a second, at random moments.
        sessions: how many there are; a turn is of one of them, or with `new_share` the first of a new one.
        first_tokens, further_tokens: new tokens of a session's first and of its later prompts.
    """

    rate: float
    sessions: int
    new_share: float
    first_tokens: int
    further_tokens: int
    answer_tokens: int


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), action))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()


class Server:
    """One at a time, in order. Attributes: busy_s: how long it has worked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_at_s = 0.0
        self.busy_s = 0.0

    def serve(self, service_s: float, then: Callable[[], None]) -> None:
        self.busy_s += service_s
        self._free_at_s = max(self._clock.now_s, self._free_at_s) + service_s
        self._clock.at(self._free_at_s, then)


class SimulatedWorker:
    """What both roles have; the client of the router's pools."""

    def __init__(self, role: Role, address: str, spec: ModelSpec, max_batch: int) -> None:
        self.role, self.address, self._spec, self._max_batch = role, address, spec, max_batch
        self.running = 0
        self.waiting = 0

    async def status(self, *, timeout_s: float) -> WorkerStatus:
        return self.current()

    def current(self) -> WorkerStatus:
        free_bytes = max(0, self._max_batch - self.running) * _BYTES_OF_A_SLOT
        return WorkerStatus(
            role=self.role,
            instance_id=self.address,
            protocol_version=PROTOCOL_VERSION,
            ready=True,
            running=self.running,
            waiting=self.waiting,
            free_bytes=free_bytes,
            total_bytes=self._max_batch * _BYTES_OF_A_SLOT,
            model=self._spec,
            methods=("full",),
            kernel_paths={},
        )


class PrefillWorker(SimulatedWorker):
    def __init__(self, clock: Clock, address: str, spec: ModelSpec) -> None:
        super().__init__("prefill", address, spec, max_batch=1)
        self.engine, self.link = Server(clock), Server(clock)

    def compute(self, service_s: float, then: Callable[[], None]) -> None:
        self.waiting += 1

        def done() -> None:
            self.waiting -= 1
            then()

        self.engine.serve(service_s, done)


class DecodeWorker(SimulatedWorker):
    """Sequences that share steps. Progress is counted in steps, so that a step is no event."""

    def __init__(
        self, clock: Clock, address: str, spec: ModelSpec, step_s: Callable[[int], float], max_batch: int
    ) -> None:
        super().__init__("decode", address, spec, max_batch)
        self._clock, self._step_s = clock, step_s
        self._steps, self._counted_at_s, self._version = 0.0, 0.0, 0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._numbers = itertools.count()

    def join(self, num_steps: int, then: Callable[[], None]) -> None:
        self._count()
        self._queue.append((num_steps, then))
        self._admit()

    def _count(self) -> None:
        if self._ends:
            self._steps += (self._clock.now_s - self._counted_at_s) / self._step_s(len(self._ends))
        self._counted_at_s = self._clock.now_s

    def _admit(self) -> None:
        while self._queue and len(self._ends) < self._max_batch:
            num_steps, then = self._queue.popleft()
            heapq.heappush(self._ends, (self._steps + num_steps, next(self._numbers), then))
        self.running, self.waiting = len(self._ends), len(self._queue)
        self._version += 1
        if self._ends:
            version, left = self._version, max(0.0, self._ends[0][0] - self._steps)
            due_s = self._clock.now_s + left * self._step_s(len(self._ends))
            self._clock.at(due_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # the batch has changed since
        self._count()
        self._steps = max(self._steps, self._ends[0][0])
        _, _, then = heapq.heappop(self._ends)
        self._admit()
        then()


@dataclass(eq=False)
class SimulatedRouter:
    """Its CPU and its own view of the workers."""

    cpu: Server
    pools: dict[Role, WorkerPool[Any]]


@dataclass
class Figures:
    """What turns met after the warm-up."""

    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    turns: int = 0
    at_their_worker: int = 0
    batches: list[int] = field(default_factory=list)


class Cluster:
    """All of it. `start` first, then `run`."""

    def __init__(
        self,
        costs: Costs,
        *,
        spec: ModelSpec,
        routers: int,
        prefill: int,
        decode: int,
        max_batch: int,
        masters: int = 1,
    ) -> None:
        self.clock, self._costs, self._spec = Clock(), costs, spec
        self.masters = [Server(self.clock) for _ in range(masters)]
        self._of_role: dict[Role, list[Any]] = {
            "prefill": [PrefillWorker(self.clock, f"prefill-{i}", spec) for i in range(prefill)],
            "decode": [
                DecodeWorker(self.clock, f"decode-{i}", spec, costs.step_s, max_batch) for i in range(decode)
            ],
        }
        self.routers = [SimulatedRouter(Server(self.clock), self._pools()) for _ in range(routers)]
        self.figures = Figures()
        self._measured_from_s = 0.0

    @property
    def decode_workers(self) -> list[DecodeWorker]:
        return self._of_role["decode"]

    @property
    def prefill_workers(self) -> list[PrefillWorker]:
        return self._of_role["prefill"]

    def _pools(self) -> dict[Role, WorkerPool[Any]]:
        return {
            role: WorkerPool.of_clients(
                role, {worker.address: worker for worker in workers}, status_interval_s=1e6
            )
            for role, workers in self._of_role.items()
        }

    async def start(self) -> None:
        """Each router's first status calls; later ones are events."""
        usual, worker_pool.MAX_STATUS_CALLS_PER_S = worker_pool.MAX_STATUS_CALLS_PER_S, float("inf")
        try:
            for router in self.routers:
                for pool in router.pools.values():
                    await pool.start()
        finally:
            worker_pool.MAX_STATUS_CALLS_PER_S = usual
        for router in self.routers:
            for pool in router.pools.values():
                pause_s = 1 / worker_pool.MAX_STATUS_CALLS_PER_S
                period_s = STATUS_INTERVAL_S + len(pool.workers()) * pause_s
                offset_s = random.uniform(0.0, period_s)
                for index, worker in enumerate(pool.workers()):
                    self._poll_at(offset_s + index * pause_s, pool, worker, period_s)

    async def close(self) -> None:
        for router in self.routers:
            for pool in router.pools.values():
                await pool.close()

    def _poll_at(self, time_s: float, pool: WorkerPool[Any], worker: Worker[Any], period_s: float) -> None:
        def poll() -> None:
            pool.take_status(worker, worker.client.current())
            self._poll_at(self.clock.now_s + period_s, pool, worker, period_s)

        self.clock.at(time_s, poll)

    def run(self, load: Load, *, warm_up_s: float, measured_s: float) -> Figures:
        """Virtual seconds. Returns the figures of the measured ones."""
        self._load = load
        self._homes: dict[int, tuple[str, str]] = {}
        self._measured_from_s = warm_up_s
        self._arrive_next()
        self.clock.run(warm_up_s)
        for server in (*self.masters, *(router.cpu for router in self.routers)):
            server.busy_s = 0.0
        self.clock.run(warm_up_s + measured_s)
        self.figures.batches = [worker.running for worker in self.decode_workers]
        return self.figures

    def _arrive_next(self) -> None:
        def arrive() -> None:
            self._arrive_next()
            self._turn(random.randrange(self._load.sessions), random.random() < self._load.new_share)

        self.clock.at(self.clock.now_s + random.expovariate(self._load.rate), arrive)

    def _turn(self, session: int, is_new: bool) -> None:
        router, costs, load = random.choice(self.routers), self._costs, self._load
        redis = self.masters[session % len(self.masters)]
        began_s, cpu_s = self.clock.now_s, (costs.request_s + costs.token_s * load.answer_tokens) / 2

        def place() -> None:
            prefer = () if is_new else self._home(session)
            prefill = self._choose(router, "prefill", prefer[:1], session)
            decode = self._choose(router, "decode", prefer[1:], session)
            self._homes[session] = (prefill.address, decode.address)
            prefill.in_flight += 1
            decode.in_flight += 1
            hit = prefer[:1] == (prefill.address,)
            has_rows = prefer[1:] == (decode.address,)
            new_tokens = load.further_tokens if hit else load.first_tokens

            def computed() -> None:
                first_s = self.clock.now_s
                rest_s = costs.transfer_s(has_rows) - costs.link_s(has_rows)
                prefill.in_flight -= 1
                prefill.client.link.serve(
                    costs.link_s(has_rows),
                    lambda: self.clock.at(
                        self.clock.now_s + rest_s,
                        lambda: decode.client.join(load.answer_tokens - 1, lambda: ended(first_s)),
                    ),
                )

            def ended(first_s: float) -> None:
                decode.in_flight -= 1
                redis.serve(costs.redis_s / 2, lambda: router.cpu.serve(cpu_s, lambda: None))
                if self.clock.now_s >= self._measured_from_s:
                    self.figures.turns += 1
                    self.figures.at_their_worker += hit
                    self.figures.first_token_s.append(first_s - began_s)
                    self.figures.per_token_s.append((self.clock.now_s - first_s) / (load.answer_tokens - 1))

            prefill.client.compute(costs.prefill_s(new_tokens), computed)

        router.cpu.serve(cpu_s, lambda: redis.serve(costs.redis_s / 2, place))

    def _home(self, session: int) -> tuple[str, str]:
        """Where the session's last turn was; at random where that was before the simulation began."""
        if session not in self._homes:
            homes = tuple(random.choice(workers).address for workers in self._of_role.values())
            self._homes[session] = (homes[0], homes[1])
        return self._homes[session]

    def _choose(
        self, router: SimulatedRouter, role: Role, prefer: tuple[str, ...], session: int
    ) -> Worker[Any]:
        pool = router.pools[role]
        if role == "prefill" and not prefer and len(self.prefill_workers) > worker_pool.NUM_NEAR:
            place = hash((session, self.figures.turns)) % (1 << 64)
            prefer = (pool.near(place, fingerprint=self._spec.fingerprint)[0].address,)
        return pool.choose(fingerprint=self._spec.fingerprint, prefer=prefer)
