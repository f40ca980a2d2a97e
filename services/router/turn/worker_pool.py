"""The workers of one role: their addresses, clients and polled status, and the choice of one for a turn.

A configured name may resolve to many addresses, and to others later. Every worker is polled for its status,
and names are resolved again now and then, so that workers may come and go. A choice looks at only a few
workers: the ready ones are noted whenever a status changes. Runs no turns.
"""

from __future__ import annotations

import asyncio
import bisect
import ipaddress
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import structlog
import xxhash

from kvferry.shared.control.calls import WorkerControl
from kvferry.shared.control.messages import WorkerStatus
from kvferry.shared.errors import DeadlineExceeded, KvferryError, WorkerUnavailable
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.process.serving import format_address, parse_address

Role = Literal["prefill", "decode"]
Resolve = Callable[[str], Awaitable[tuple[str, ...]]]

NUM_COMPARED = 8
"""Workers that one choice compares, drawn at random where there are more."""
NUM_NEAR = 8
"""Workers that may have the prompts which begin alike; see `WorkerPool.near`."""
MAX_STATUS_CALLS_PER_S = 200.0
"""Of one pool. With more workers, each is asked less often."""
_STOOD_STILL_S = 1.0
"""A time limit that runs out so much later than it should says that this router stood still, and nothing of
the worker."""
_MISSES = 5
"""The router connects anew to a worker after so many missed statuses in a row, and again after as many more:
the connection may be at fault."""
_FOREIGN = ("damaged", "bad_answer")
"""Reasons for which an answer is not understood: the worker may be of another release."""
_RESOLVE_TIMEOUT_S = 5.0

ClientT = TypeVar("ClientT", bound=WorkerControl)


@dataclass
class Worker(Generic[ClientT]):
    """One worker as this router sees it.

        unknown ──status──► up ──refused, late twice, lost turn──► down ──status──► up
                                                                    └─ missed again: its turns are given up

    A worker that answers late twice stays as it is if one of its streams says something meanwhile, or if this
    router itself stood still: the machine is busy, and the worker is not dead.

    Attributes:
        status: the last one; None while the worker is down. The pool alone sets it.
        model, version: its model and block protocol when it was last up.
        missed: statuses since the last one that came.
        problem: why the last one was not understood; "" where it was, or none came.
        in_flight: this router's turns at the worker.
    """

    address: str
    client: ClientT
    status: WorkerStatus | None = None
    model: ModelSpec | None = None
    instance_id: str = ""
    version: int = 0
    missed: int = 0
    problem: str = ""
    in_flight: int = 0

    @property
    def ready_for(self) -> tuple[str, int] | None:
        """The fingerprint of the model that it can run turns of now, and the version of the block protocol in
        which it exchanges KV; None where it can run none."""
        status = self.status
        if status is None or not status.ready:
            return None
        return status.model.fingerprint, status.protocol_version

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a turn of this router as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class _Ready(Generic[ClientT]):
    """The ready workers of one model, or of all, as a ring: in the order of their addresses' digests."""

    def __init__(self, workers: Iterable[Worker[ClientT]]) -> None:
        ring = sorted((xxhash.xxh3_64_intdigest(one.address.encode()), one.address, one) for one in workers)
        self.places = tuple(place for place, _, _ in ring)
        self.workers = tuple(worker for _, _, worker in ring)
        self.versions = Counter(worker.version for worker in self.workers)

    def following(self, place: int, number: int) -> list[Worker[ClientT]]:
        first, number = bisect.bisect(self.places, place), min(number, len(self.workers))
        turned = max(0, first + number - len(self.workers))
        return [*self.workers[first : first + number], *self.workers[:turned]]


class WorkerPool(Generic[ClientT]):
    """All workers of one role.

    Args:
        targets: configured `host:port` names.
        connect: makes the client of an address; connects lazily.
        disconnect: closes a client that `connect` made.
        heard_s: when one of a client's streams last brought a message, on the event loop's clock.
        resolve: the addresses behind a target.
    """

    def __init__(
        self,
        role: Role,
        targets: Sequence[str],
        *,
        connect: Callable[[str], ClientT],
        disconnect: Callable[[ClientT], Awaitable[None]] | None = None,
        heard_s: Callable[[ClientT], float] = lambda client: 0.0,
        resolve: Resolve | None = None,
        status_interval_s: float,
        status_timeout_s: float = 2.0,
        resolve_interval_s: float = 5.0,
    ) -> None:
        self.role: Role = role
        self._targets = tuple(targets)
        self._connect = connect
        self._disconnect = disconnect
        self._heard_s = heard_s
        self._resolve = resolve or resolve_address
        self.status_interval_s = status_interval_s
        self._status_timeout_s = status_timeout_s
        self._resolve_interval_s = resolve_interval_s
        self._workers: dict[str, Worker[ClientT]] = {}
        self._resolved: dict[str, tuple[str, ...]] = {}
        self._ready: dict[tuple[str | None, int | None], _Ready[ClientT]] = {}
        """By model and version, and of all under None; empty after a change, until it is needed."""
        self._models: dict[bool, Counter[ModelSpec]] = {}
        """Of ready workers alone, and of all; likewise."""
        self._changed = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger(__name__).bind(role=role)

    @classmethod
    def of_clients(cls, role: Role, clients: Mapping[str, ClientT], **polling: Any) -> WorkerPool[ClientT]:
        """Return a pool of clients that the caller made and closes, by names that are not resolved."""

        async def unresolved(name: str) -> tuple[str, ...]:
            return (name,)

        return cls(role, tuple(clients), connect=clients.__getitem__, resolve=unresolved, **polling)

    async def start(self) -> None:
        """Resolve names and poll every worker once, then go on in the background."""
        await self._refresh_addresses()
        await self._poll_all()
        self._loops = [
            asyncio.create_task(self._repeat(self._poll_all, self.status_interval_s)),
            asyncio.create_task(self._repeat(self._refresh_addresses, self._resolve_interval_s)),
        ]

    async def close(self) -> None:
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops = []
        for worker in self.workers():
            await self._close_client(worker)
        self._workers.clear()

    def worker(self, address: str) -> Worker[ClientT] | None:
        return self._workers.get(address)

    def workers(self) -> list[Worker[ClientT]]:
        return list(self._workers.values())

    def ready_workers(
        self, fingerprint: str | None = None, version: int | None = None
    ) -> tuple[Worker[ClientT], ...]:
        return self._ring(fingerprint, version).workers

    @property
    def misunderstood(self) -> str:
        """The end of a sentence about a worker whose status is not understood; "" if there is none."""
        found = (worker for worker in self.workers() if worker.status is None and worker.problem)
        return next((f"; of the {self.role} worker {one.address}: {one.problem}" for one in found), "")

    def versions(self, fingerprint: str) -> Counter[int]:
        """Return the block protocols of the model's ready workers, and how many workers speak each."""
        return self._ring(fingerprint).versions

    def models(self, *, ready_only: bool) -> Counter[ModelSpec]:
        """Return the workers' models, and how many workers have each."""
        if ready_only not in self._models:
            workers = self.ready_workers() if ready_only else self.workers()
            self._models[ready_only] = Counter(worker.model for worker in workers if worker.model is not None)
        return self._models[ready_only]

    def kernel_paths(self) -> dict[str, list[str]]:
        """Return by op the kernel paths of the workers that are up."""
        up = [worker.status.kernel_paths for worker in self.workers() if worker.status is not None]
        ops = sorted({op for paths in up for op in paths})
        return {op: sorted({paths[op] for paths in up if op in paths}) for op in ops}

    def choose(
        self,
        *,
        fingerprint: str,
        version: int | None = None,
        prefer: Sequence[str] = (),
        avoid: Collection[str] = (),
    ) -> Worker[ClientT]:
        """Choose a worker for a turn: the first preferred ready one, else the least loaded of a few.

        Args:
            version: of the block protocol; None: any.
            prefer: addresses that may have the session's KV, best first.
            avoid: addresses to choose only where there is no other.

        Raises: WorkerUnavailable where no worker is ready.
        """
        ready = self.ready_workers(fingerprint, version)
        if not ready:
            raise WorkerUnavailable(
                f"No {self.role} worker is ready; {len(self._workers)} known{self.misunderstood}",
                retry_after_s=self.status_interval_s,
            )
        for address in prefer:
            worker = self._workers.get(address)
            if worker is not None and fits(worker, fingerprint, version) and address not in avoid:
                return worker
        # Drawn in random order, so that equally idle workers take turns.
        drawn = random.sample(ready, min(len(ready), NUM_COMPARED + len(avoid)))
        return min([worker for worker in drawn if worker.address not in avoid] or drawn, key=_load)

    def near(self, place: int, *, fingerprint: str) -> list[Worker[ClientT]]:
        """Return `NUM_NEAR` ready workers after a place on the ring of 64-bit digests, least loaded first.

        They are the same for every router that sees the same workers, and when a worker comes or goes all but
        one of them stay.
        """
        return sorted(self._ring(fingerprint).following(place, NUM_NEAR), key=_load)

    async def wait_ready(self, fingerprint: str, *, timeout_s: float) -> None:
        """Wait until some worker is ready; at the timeout it returns, and `choose` raises."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.ready_workers(fingerprint):
                    self._changed.clear()
                    await self._changed.wait()

    def report_lost(self, address: str, instance_id: str) -> None:
        """Mark a worker that a turn lost as down until its next status. Ignored if it has restarted since."""
        worker = self._workers.get(address)
        if worker is not None and worker.instance_id == instance_id:
            self._set_status(worker, None)

    def take_status(self, worker: Worker[ClientT], status: WorkerStatus) -> None:
        """Note what a worker has answered."""
        if worker.instance_id and worker.instance_id != status.instance_id:
            self._log.warning("worker restarted", address=worker.address, instance_id=status.instance_id)
        elif status.draining and (worker.status is None or not worker.status.draining):
            self._log.info("worker drains", address=worker.address, turns=worker.in_flight)
        elif worker.status is None:
            self._log.info("worker up", address=worker.address, ready=status.ready)
        worker.instance_id, worker.version = status.instance_id, status.protocol_version
        if worker.model != status.model:
            worker.model = status.model
            self._workers_changed()
        self._set_status(worker, status)

    def _set_status(self, worker: Worker[ClientT], status: WorkerStatus | None) -> None:
        before = worker.ready_for
        worker.status = status
        if worker.ready_for != before:
            self._workers_changed()

    def _workers_changed(self) -> None:
        self._ready.clear()
        self._models.clear()

    def _ring(self, fingerprint: str | None, version: int | None = None) -> _Ready[ClientT]:
        if (fingerprint, version) not in self._ready:
            found = (worker for worker in self.workers() if fits(worker, fingerprint, version))
            self._ready[fingerprint, version] = _Ready(found)
        return self._ready[fingerprint, version]

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await work()
            except Exception:
                # This loop must go on, or the router would keep the last status for ever.
                self._log.exception("worker polling failed")

    async def _refresh_addresses(self) -> None:
        for target in self._targets:
            found = await self._resolve(target)
            # A name that fails to resolve for a moment does not remove its workers.
            if found or target not in self._resolved:
                self._resolved[target] = found
        addresses = {address for found in self._resolved.values() for address in found}
        for address in sorted(addresses - self._workers.keys()):
            self._workers[address] = Worker(address=address, client=self._connect(address))
            self._log.info("worker added", address=address)
        for address in sorted(self._workers.keys() - addresses):
            worker = self._workers[address]
            drains = worker.status is not None and worker.status.draining  # it is still told of commits
            if worker.in_flight == 0 and not drains:
                self._workers.pop(address)
                self._workers_changed()
                await self._close_client(worker)
                self._log.info("worker removed", address=address)

    async def _close_client(self, worker: Worker[ClientT]) -> None:
        if self._disconnect is not None:
            await self._disconnect(worker.client)

    async def _poll_all(self) -> None:
        every = enumerate(self.workers())
        await asyncio.gather(*(self._poll(worker, i / MAX_STATUS_CALLS_PER_S) for i, worker in every))
        self._changed.set()

    async def _poll(self, worker: Worker[ClientT], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        status = await self._status_of(worker)
        if status is None and (worker.status is not None or worker.in_flight):
            # One answer may be late on a busy machine; after two the worker is down, and its turns go on
            # elsewhere.
            status = await self._status_of(worker)
        if status is not None:
            self.take_status(worker, status)
        elif worker.missed and (worker.in_flight or worker.missed % _MISSES == 0):
            await self._connect_anew(worker)

    async def _status_of(self, worker: Worker[ClientT]) -> WorkerStatus | None:
        """Ask once; a worker that refuses, or is late again, is marked down as `Worker` describes."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        try:
            async with asyncio.timeout(self._status_timeout_s):
                status = await worker.client.status(timeout_s=self._status_timeout_s)
                worker.missed, worker.problem = 0, ""
                return status
        except (KvferryError, TimeoutError) as error:
            worker.missed += 1
            if isinstance(error, TimeoutError | DeadlineExceeded):
                if worker.missed == 1:
                    return None
                stood_still = loop.time() - begin_s - self._status_timeout_s > _STOOD_STILL_S
                # measured from the first of the two calls
                was_heard = self._heard_s(worker.client) > begin_s - self._status_timeout_s
                if stood_still or was_heard:
                    worker.missed = 0
                    return None
            worker.problem = str(error) if getattr(error, "reason", "") in _FOREIGN else ""
            if worker.status is not None:
                self._log.warning("worker down", address=worker.address, error=str(error))
            self._set_status(worker, None)
            return None

    async def _connect_anew(self, worker: Worker[ClientT]) -> None:
        """Connect anew. This ends the worker's streams, and their turns are replayed elsewhere."""
        if self._disconnect is None:
            return
        if worker.in_flight:
            self._log.warning("worker's turns are given up", address=worker.address, turns=worker.in_flight)
        silent, worker.client = worker.client, self._connect(worker.address)
        await self._disconnect(silent)


def _load(worker: Worker[ClientT]) -> tuple[int, int]:
    """Return a sort key: fewest requests, then most free bytes. This router's own count is newer than the
    polled one, which has the turns of other routers as well."""
    status = worker.status
    assert status is not None, "only ready workers are compared"
    return max(status.running + status.waiting, worker.in_flight), -status.free_bytes


def fits(worker: Worker[Any], fingerprint: str | None, version: int | None) -> bool:
    """Return whether a worker is ready for turns of this model and block protocol version; None: any."""
    ready = worker.ready_for
    return ready is not None and fingerprint in (None, ready[0]) and version in (None, ready[1])


async def resolve_address(target: str) -> tuple[str, ...]:
    """Resolve a `host:port` target to sorted `host:port` addresses; empty if the name has none now."""
    host, port = parse_address("worker", target)
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return (target,)
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return ()
    hosts: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        hosts.setdefault(family, set()).add(str(address[0]))
    # A name with both families lists each machine twice; IPv4 alone lists it once.
    listed = hosts.get(socket.AF_INET) or hosts.get(socket.AF_INET6) or ()
    return tuple(sorted(format_address(host, port) for host in listed))
