"""The stack in one process: services call one another directly, and blocks are handed over in memory.

The services and their state machines are those of separate processes, without gRPC and ZeroMQ. There is one
event loop, and an engine thread each for prefill and decode. The weights are in memory once; each engine has
modules of its own over them, because modules run one pass at a time.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import torch

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.server import build_service as build_decode
from kvferry.services.launcher.config import ServeConfig
from kvferry.services.launcher.processes import divide_threads
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.server import build_service as build_prefill
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.server import start_router
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.process.config import ServiceSettings
from kvferry.shared.process.worker import load_workers_model, start_service
from kvferry.shared.telemetry.tracing import setup_tracing
from kvferry.shared.wire.in_process import InProcessHub

S = TypeVar("S", bound=ServiceSettings)

_WORKER = "in-process"


class InProcessStack:
    """Owns all services of this process.

    start ──► prefill ──► decode ──► router;  close: router ──► decode ──► prefill
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._open = AsyncExitStack()
        self.addresses: dict[str, str] = {}

    async def start(self) -> None:
        config = self._config
        calibrate = None
        if config.calibrate:
            from kvferry.tools.evaluation.calibrate import worker_calibration

            calibrate = worker_calibration(config.model, config.calibration)
        install_tables(config.epsilon_tables, calibration=config.calibration)
        self._open.callback(setup_tracing(config.otlp_endpoint, "serve"))
        prefill_threads, decode_threads = divide_threads(config.threads)
        torch.set_num_threads(prefill_threads)
        hub = InProcessHub()
        prefill_config = settings_of(
            PrefillConfig, config, metrics_listen=config.prefill_metrics_listen, threads=str(prefill_threads)
        )
        model = await load_workers_model(prefill_config)
        build = partial(build_prefill, prefill_config)
        prefill, prefill_metrics = await start_service(
            prefill_config, "prefill", model, build, hub, self._open, calibrate=calibrate
        )
        decode_config = settings_of(
            DecodeConfig, config, metrics_listen=config.decode_metrics_listen, threads=str(decode_threads)
        )
        decode, decode_metrics = await start_service(
            decode_config, "decode", model.twin(), partial(build_decode, decode_config), hub, self._open
        )
        metrics = {"prefill_metrics": prefill_metrics, "decode_metrics": decode_metrics}
        router_config = settings_of(RouterConfig, config, worker_metrics=",".join(metrics.values()))
        interval_s = router_config.status_interval_s
        address = await start_router(
            router_config,
            WorkerPool.of_clients("prefill", {_WORKER: prefill}, status_interval_s=interval_s),
            WorkerPool.of_clients("decode", {_WORKER: decode}, status_interval_s=interval_s),
            self._open,
        )
        self.addresses = {"address": address, **metrics}

    async def close(self) -> None:
        await self._open.aclose()


def settings_of(settings: type[S], config: ServeConfig, **chosen: str) -> S:
    """Return the settings of one service: those of `kvferry serve`, and what the launcher chose."""
    given = {field: getattr(config, field) for field in settings.model_fields}
    if settings is not RouterConfig:
        given["listen"] = "127.0.0.1:0"  # of a control server, which workers here do not have
    return settings(**{**given, **chosen})
