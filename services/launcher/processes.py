"""The stack as three processes: gRPC on loopback for control, shared memory for blocks.

Where that is not supported, blocks go over ZeroMQ's ipc.

    start: prefill and decode ──► both listen ──► router, with their addresses
    close: router (drains) ──► prefill and decode

On a GPU decode starts once prefill listens: its arena is a part of the memory that prefill's weights leave.
It also does where prefill calibrates the model, because decode then finds the distortion table.

A service that ends is restarted on the same addresses. Settings are passed through a pipe, not on the command
line, where other users of the machine could read keys.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from functools import partial
from pathlib import Path

from kvferry.services.launcher.config import CONFIGS, HIDDEN_FROM_SERVE, Role, ServeConfig
from kvferry.services.launcher.process import ServiceProcess, may_use_gpu, process_context
from kvferry.shared.process.serving import announce_ready

_LAUNCHER_ONLY = HIDDEN_FROM_SERVE | {"listen", "ready_file", "threads"}
_ALWAYS_GIVEN = ("log_level", "shutdown_timeout_s")
"""`kvferry serve` has other defaults for these than the services."""
_STOP_MARGIN_S = 3.0
_MAX_IPC_PATH_BYTES = 107
"""The longest path of a Unix socket."""


class ProcessStack:
    """Owns the three processes and a temporary folder with their ready files and sockets."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-")
        self._context = process_context(config.device)
        self._processes: dict[Role, ServiceProcess] = {}
        self._supervisors: list[asyncio.Task[None]] = []

    @property
    def addresses(self) -> dict[str, str]:
        prefill, decode, router = (self._processes[role] for role in ("prefill", "decode", "router"))
        return {
            "address": router.addresses["address"],
            "prefill_metrics": prefill.addresses["metrics"],
            "decode_metrics": decode.addresses["metrics"],
        } | {f"{role}_pid": str(process.pid) for role, process in self._processes.items()}

    async def start(self) -> None:
        config = self._config
        prefill_threads, decode_threads = divide_threads(config.threads)
        start_prefill = partial(self._start_worker, "prefill", config.prefill_metrics_listen, prefill_threads)
        start_decode = partial(self._start_worker, "decode", config.decode_metrics_listen, decode_threads)
        if may_use_gpu(config.device) or config.calibrate:
            prefill, decode = await start_prefill(), await start_decode()
        else:
            prefill, decode = await asyncio.gather(start_prefill(), start_decode())
        await self._start(
            "router",
            listen=config.listen,
            prefill_workers=prefill["address"],
            decode_workers=decode["address"],
            worker_metrics=f"{prefill['metrics']},{decode['metrics']}",
        )
        self._supervisors = [
            asyncio.create_task(process.supervise(self._announce)) for process in self._processes.values()
        ]

    async def close(self) -> None:
        if router := self._processes.get("router"):
            await router.stop(self._config.shutdown_timeout_s + _STOP_MARGIN_S)
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._folder.cleanup()

    async def _start_worker(self, role: Role, metrics_listen: str, threads: int) -> dict[str, str]:
        path = Path(self._folder.name) / f"{role}.blocks"
        fits = len(os.fsencode(path)) <= _MAX_IPC_PATH_BYTES
        return await self._start(
            role,
            listen="127.0.0.1:0",
            block_listen=f"ipc://{path}" if fits else "tcp://127.0.0.1:0",
            metrics_listen=metrics_listen,
            threads=str(threads),
        )

    async def _start(self, role: Role, **chosen: str) -> dict[str, str]:
        """Start a service with those of its options that the user has set, and what the launcher chose.

        Restarted, it listens on the same addresses.
        """
        config = self._config
        set_by_user = CONFIGS[role].model_fields.keys() & config.model_fields_set - _LAUNCHER_ONLY
        given = {field: str(getattr(config, field)) for field in {*set_by_user, *_ALWAYS_GIVEN}}
        ready_file = Path(self._folder.name) / f"{role}.ready"
        process = ServiceProcess(role, settings=given | chosen, ready_file=ready_file, context=self._context)
        self._processes[role] = process
        addresses = await process.start(config.ready_within_s)
        bound = {"listen": addresses["address"], "metrics_listen": addresses["metrics"]}
        process.pin(**{field: bound[field] for field in bound.keys() & chosen})
        return addresses

    def _announce(self) -> None:
        """Write the ready file again: after a restart a process id in it has changed."""
        announce_ready(self._config.ready_file, {"service": "serve", **self.addresses})


def divide_threads(requested: int, num_cpus: int | None = None) -> tuple[int, int]:
    """Return CPU threads of prefill and decode. Prefill, bound by arithmetic, may use every processor.

    Both are seldom busy for long at the same time, and then the system divides the processors. Measured on
    two of them, that makes long prompts faster by a third and slows no decode step.

    Args: requested: threads for each; 0 goes by the processors that this process may use.
    """
    if requested:
        return requested, requested
    if not num_cpus:
        num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_cpus, max(1, num_cpus // 3)
