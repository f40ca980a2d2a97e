"""The stack as three processes: gRPC on loopback for control, ZeroMQ over ipc for blocks.

    prefill, decode start ──► both listen ──► router starts, knowing their addresses
    close: router (drains) ──► prefill, decode

A service that ends is started again on the same addresses. Settings travel in the environment, never on the
command line, where other users of the machine could read keys.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from kvferry.services.launcher.config import CONFIGS, HIDDEN_FROM_SERVE, Role, ServeConfig
from kvferry.services.launcher.process import ServiceProcess
from kvferry.shared.serving import announce_ready

_LAUNCHER_ONLY = HIDDEN_FROM_SERVE | {"listen", "ready_file", "threads", "log_level", "shutdown_timeout_s"}
_STOP_MARGIN_S = 1.0
# A Unix socket's path holds 107 bytes.
_MAX_IPC_PATH_BYTES = 107


class ProcessStack:
    """Owns the three processes and a temporary folder with their ready files and sockets."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-")
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
        prefill_threads, decode_threads = divide_threads(self._config.threads)
        metrics = {
            "prefill": self._config.prefill_metrics_listen,
            "decode": self._config.decode_metrics_listen,
        }
        threads = {"prefill": prefill_threads, "decode": decode_threads}
        await asyncio.gather(
            *(
                self._start(
                    role,
                    listen="127.0.0.1:0",
                    block_listen=self._block_endpoint(role),
                    metrics_listen=metrics[role],
                    threads=str(threads[role]),
                )
                for role in ("prefill", "decode")
            )
        )
        workers = [self._processes["prefill"].addresses, self._processes["decode"].addresses]
        for role in ("prefill", "decode"):
            announced = self._processes[role].addresses
            self._processes[role].pin(listen=announced["address"], metrics_listen=announced["metrics"])
        await self._start(
            "router",
            listen=self._config.listen,
            prefill_workers=workers[0]["address"],
            decode_workers=workers[1]["address"],
            worker_metrics=",".join(worker["metrics"] for worker in workers),
        )
        self._processes["router"].pin(listen=self._processes["router"].addresses["address"])
        self._supervisors = [
            asyncio.create_task(process.supervise(self._announce)) for process in self._processes.values()
        ]

    async def close(self) -> None:
        stop_s = self._config.stop_timeout_s
        if router := self._processes.get("router"):
            await router.stop(max(stop_s, self._config.shutdown_timeout_s + _STOP_MARGIN_S))
        await asyncio.gather(*(process.stop(stop_s) for process in self._processes.values()))
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._folder.cleanup()

    async def _start(self, role: Role, **chosen: str) -> None:
        """Start a service with what the user set of its options, and what the launcher chose."""
        config = self._config
        fields = CONFIGS[role].model_fields.keys() & config.model_fields_set - _LAUNCHER_ONLY
        given = {field: str(getattr(config, field)) for field in fields}
        self._processes[role] = ServiceProcess(
            role,
            settings={
                **given,
                "log_level": config.log_level,
                "shutdown_timeout_s": str(config.shutdown_timeout_s),
                **chosen,
            },
            environment=dict(os.environ),
            ready_file=Path(self._folder.name) / f"{role}.ready",
            restart_backoff_s=config.restart_backoff_s,
        )
        await self._processes[role].start(config.start_timeout_s)

    def _announce(self) -> None:
        """After a restart the pids in our ready file are others."""
        announce_ready(self._config.ready_file, {"service": "serve", **self.addresses})

    def _block_endpoint(self, role: Role) -> str:
        path = Path(self._folder.name) / f"{role}.blocks"
        return f"ipc://{path}" if len(os.fsencode(path)) <= _MAX_IPC_PATH_BYTES else "tcp://127.0.0.1:0"


def divide_threads(requested: int, num_cpus: int | None = None) -> tuple[int, int]:
    """CPU threads of prefill and decode: prefill, bound by arithmetic, gets two thirds of the processors.

    Args:
        requested: threads for each; 0 divides the processors that this process may use.
    """
    if requested:
        return requested, requested
    available = num_cpus or usable_cpus()
    decode = max(1, available // 3)
    return max(1, available - decode), decode


def usable_cpus() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
