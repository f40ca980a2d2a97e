"""Which worker a turn goes to: the clients of one role, their polled status, and the least loaded choice.

Every worker is asked for its status once a second; names are resolved again now and then, so that workers may
come and go. Runs no turns.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import structlog

from kvferry.services.router.discovery import Resolve, resolve_address
from kvferry.shared.control.messages import WorkerStatus
from kvferry.shared.errors import KvferryError, WorkerUnavailable
from kvferry.shared.model.spec import ModelSpec
from kvferry.shared.wire.messages import PROTOCOL_VERSION

Role = Literal["prefill", "decode"]


class WorkerClient(Protocol):
    """What placement needs of a client."""

    async def status(self, *, timeout_s: float) -> WorkerStatus: ...


ClientT = TypeVar("ClientT", bound=WorkerClient)


@dataclass
class Worker(Generic[ClientT]):
    """One worker as this router sees it.

        unknown ──status──► up ──missed status, lost turn──► down ──status──► up

    Attributes:
        status: the last one, None while down.
        model: the one it held when it was last up.
        in_flight: turns of this router at the worker.
    """

    address: str
    client: ClientT
    status: WorkerStatus | None = None
    model: ModelSpec | None = None
    instance_id: str = ""
    in_flight: int = 0

    def is_ready_for(self, fingerprint: str | None) -> bool:
        status = self.status
        return (
            status is not None
            and status.ready
            and status.protocol_version == PROTOCOL_VERSION
            and fingerprint in (None, status.model.fingerprint)
        )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Counts a turn as under way here."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class WorkerPool(Generic[ClientT]):
    """The workers of one role. Owns their clients.

    Args:
        targets: configured `host:port` names.
        connect: makes a client of an address; connects lazily.
        disconnect: closes an address's client.
        resolve: the addresses behind a target.
    """

    def __init__(
        self,
        role: Role,
        targets: Sequence[str],
        *,
        connect: Callable[[str], ClientT],
        disconnect: Callable[[str], Awaitable[None]] | None = None,
        resolve: Resolve = resolve_address,
        status_interval_s: float = 1.0,
        status_timeout_s: float = 2.0,
        resolve_interval_s: float = 5.0,
    ) -> None:
        self.role: Role = role
        self._targets = tuple(targets)
        self._connect = connect
        self._disconnect = disconnect
        self._resolve = resolve
        self._status_interval_s = status_interval_s
        self._status_timeout_s = status_timeout_s
        self._resolve_interval_s = resolve_interval_s
        self._workers: dict[str, Worker[ClientT]] = {}
        self._resolved: dict[str, tuple[str, ...]] = {}
        self._changed = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger(__name__).bind(role=role)

    async def start(self) -> None:
        """Resolve and ask every worker once, then go on doing so."""
        await self._refresh_addresses()
        await self._poll_all()
        self._loops = [
            asyncio.create_task(
                self._repeat(self._poll_all, self._status_interval_s), name=f"{self.role} status"
            ),
            asyncio.create_task(
                self._repeat(self._refresh_addresses, self._resolve_interval_s), name=f"{self.role} names"
            ),
        ]

    async def close(self) -> None:
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops = []
        for worker in list(self._workers.values()):
            await self._close_client(worker)
        self._workers.clear()

    def worker(self, address: str) -> Worker[ClientT] | None:
        return self._workers.get(address)

    def workers(self) -> list[Worker[ClientT]]:
        return list(self._workers.values())

    def ready_workers(self, fingerprint: str | None = None) -> list[Worker[ClientT]]:
        return [worker for worker in self._workers.values() if worker.is_ready_for(fingerprint)]

    def models(self, *, ready_only: bool) -> Counter[ModelSpec]:
        """The models that workers hold, with how many hold each."""
        workers = self.ready_workers() if ready_only else self.workers()
        return Counter(worker.model for worker in workers if worker.model is not None)

    def kernel_paths(self) -> dict[str, list[str]]:
        """Of each op of the workers that are up, the paths that they take."""
        paths: dict[str, set[str]] = {}
        for worker in self.workers():
            if worker.status is not None:
                for op, path in worker.status.kernel_paths.items():
                    paths.setdefault(op, set()).add(path)
        return {op: sorted(taken) for op, taken in sorted(paths.items())}

    def choose(
        self, *, fingerprint: str, prefer: Sequence[str] = (), avoid: Collection[str] = ()
    ) -> Worker[ClientT]:
        """The worker for a turn: the first preferred one that is ready, else the least loaded.

        Args:
            prefer: addresses that hold the session's history, best first.
            avoid: addresses to take only where there is no other.

        Raises: WorkerUnavailable where no worker is ready.
        """
        ready = self.ready_workers(fingerprint)
        if not ready:
            raise WorkerUnavailable(
                f"No {self.role} worker is ready; {len(self._workers)} known", retry_after_s=1.0
            )
        candidates = [worker for worker in ready if worker.address not in avoid] or ready
        by_address = {worker.address: worker for worker in candidates}
        for address in prefer:
            if address in by_address:
                return by_address[address]
        random.shuffle(candidates)  # equally idle workers take turns
        return min(candidates, key=_load)

    async def wait_ready(self, fingerprint: str, *, timeout_s: float) -> None:
        """Wait until some worker is ready; returns silently at the timeout, `choose` then tells."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready_workers(fingerprint):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def report_lost(self, address: str, instance_id: str) -> None:
        """A turn lost this worker: it is down until it answers a status again. Ignored where it has
        restarted since."""
        worker = self._workers.get(address)
        if worker is not None and worker.instance_id == instance_id:
            worker.status = None

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await work()
            except Exception:
                # The loop's top: without it the router would go on with the last status it saw.
                self._log.exception("worker polling failed")

    async def _refresh_addresses(self) -> None:
        for target in self._targets:
            found = await self._resolve(target)
            # A name that does not resolve for a moment does not make its workers vanish.
            if found or target not in self._resolved:
                self._resolved[target] = found
        addresses = {address for found in self._resolved.values() for address in found}
        for address in sorted(addresses - self._workers.keys()):
            self._workers[address] = Worker(address=address, client=self._connect(address))
            self._log.info("worker added", address=address)
        for address in sorted(self._workers.keys() - addresses):
            if self._workers[address].in_flight == 0:
                await self._close_client(self._workers.pop(address))
                self._log.info("worker removed", address=address)

    async def _close_client(self, worker: Worker[ClientT]) -> None:
        if self._disconnect is not None:
            await self._disconnect(worker.address)

    async def _poll_all(self) -> None:
        await asyncio.gather(*(self._poll(worker) for worker in list(self._workers.values())))
        self._changed.set()

    async def _poll(self, worker: Worker[ClientT]) -> None:
        try:
            async with asyncio.timeout(self._status_timeout_s):
                status = await worker.client.status(timeout_s=self._status_timeout_s)
        except (KvferryError, TimeoutError) as error:
            if worker.status is not None:
                self._log.warning("worker down", address=worker.address, error=str(error))
            worker.status = None
            return
        if worker.instance_id and worker.instance_id != status.instance_id:
            self._log.warning("worker restarted", address=worker.address, instance_id=status.instance_id)
        elif worker.status is None:
            self._log.info("worker up", address=worker.address, ready=status.ready)
        worker.instance_id = status.instance_id
        worker.model = status.model
        worker.status = status


def _load(worker: Worker[ClientT]) -> tuple[int, int]:
    """Fewest requests, then most free bytes. Our own count is newer than the polled one, which has the
    turns of other routers as well."""
    status = worker.status
    assert status is not None, "only ready workers are compared"
    return max(status.running + status.waiting, worker.in_flight), -status.free_bytes


def served_model(
    prefill: WorkerPool[Any], decode: WorkerPool[Any], *, ready_only: bool = False
) -> ModelSpec | None:
    """The model that workers of both roles hold; the more widely held one while a change rolls out.

    Args:
        ready_only: leave out what workers hold that are not ready now.
    """
    for only in (True,) if ready_only else (True, False):
        prefill_models, decode_models = prefill.models(ready_only=only), decode.models(ready_only=only)
        held = Counter({spec.fingerprint: count for spec, count in decode_models.items()})
        shared = [spec for spec in prefill_models if held[spec.fingerprint]]
        if shared:
            widths = {spec: prefill_models[spec] + held[spec.fingerprint] for spec in shared}
            return max(shared, key=lambda spec: (widths[spec], spec.fingerprint))
    return None
