"""The stack in one process: services call one another directly, blocks go over in-process channels.

The same services and state machines as with processes; no gRPC, no ZeroMQ. One event loop, with an engine
thread each for prefill and decode, which load the model each for itself (a model runs one pass at a time).
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TypeVar

import torch

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.decode.server import build_service as build_decode
from kvferry.services.decode.service import DecodeService
from kvferry.services.launcher.config import ServeConfig
from kvferry.services.launcher.processes import usable_cpus
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.prefill.server import build_service as build_prefill
from kvferry.services.prefill.service import PrefillService
from kvferry.services.router.app import create_app
from kvferry.services.router.config import RouterConfig
from kvferry.services.router.http.server import http_server
from kvferry.services.router.turn.worker_pool import WorkerPool
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.config import ServiceSettings, WorkerSettings
from kvferry.shared.control.interfaces import DecodeControl, PrefillControl
from kvferry.shared.kernel_paths import KernelCalls, choose_kernels
from kvferry.shared.metrics import DecodeMetrics, PrefillMetrics
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer
from kvferry.shared.serving import MetricsServer, close_within, serve_metrics
from kvferry.shared.wire.in_process import InProcessHub

S = TypeVar("S", bound=ServiceSettings)

_CLOSE_TIMEOUT_S = 10.0
_WORKER = "in-process"


class InProcessStack:
    """Owns all services of this process.

    start ──► prefill, decode, metrics ──► router;  close: router ──► decode ──► prefill ──► metrics
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._hub = InProcessHub()
        self._open = AsyncExitStack()
        self._addresses: dict[str, str] = {}

    @property
    def addresses(self) -> dict[str, str]:
        return dict(self._addresses)

    async def start(self) -> None:
        config = self._config
        install_tables(config.epsilon_tables)
        torch.set_num_threads(config.threads or max(1, usable_cpus() // 2))
        tokenizer = await asyncio.to_thread(ChatTokenizer.load, config.model)
        prefill, prefill_metrics = await self._start_prefill()
        decode, decode_metrics = await self._start_decode(tokenizer)
        router = settings_of(
            RouterConfig, config, worker_metrics=f"{prefill_metrics.address},{decode_metrics.address}"
        )
        address = await self._start_router(router, prefill, decode, tokenizer)
        self._addresses = {
            "address": address,
            "prefill_metrics": prefill_metrics.address,
            "decode_metrics": decode_metrics.address,
        }

    async def close(self) -> None:
        await self._open.aclose()

    async def _start_prefill(self) -> tuple[PrefillService, MetricsServer]:
        config = settings_of(PrefillConfig, self._config)
        model = await _load(config)
        choose_kernels(config.kernels, model.device)
        metrics = PrefillMetrics()
        KernelCalls("prefill", model.device).register(metrics.registry)
        served = self._serve_metrics(metrics, self._config.prefill_metrics_listen)
        service = build_prefill(
            config,
            model=model,
            sender=self._hub.sender(buffer_bytes=config.buffer_bytes, timeout_s=config.transfer_timeout_s),
            server_factory=self._hub.server,
            metrics=metrics,
        )
        self._open.push_async_callback(lambda: close_within(_CLOSE_TIMEOUT_S, "prefill", service.close()))
        await service.start()
        return service, served

    async def _start_decode(self, tokenizer: ChatTokenizer) -> tuple[DecodeService, MetricsServer]:
        config = settings_of(DecodeConfig, self._config)
        model = await _load(config)
        metrics = DecodeMetrics()
        KernelCalls("decode", model.device).register(metrics.registry)
        served = self._serve_metrics(metrics, self._config.decode_metrics_listen)
        service = build_decode(
            config,
            model=model,
            tokenizer=tokenizer,
            sender=self._hub.sender(
                buffer_bytes=config.send_buffer_bytes, timeout_s=config.history_timeout_s
            ),
            server_factory=lambda sink: self._hub.server(sink, on_late_block=metrics.late_blocks.inc),
            metrics=metrics,
        )
        self._open.push_async_callback(lambda: close_within(_CLOSE_TIMEOUT_S, "decode", service.close()))
        await service.start()
        return service, served

    async def _start_router(
        self,
        config: RouterConfig,
        prefill: PrefillControl,
        decode: DecodeControl,
        tokenizer: ChatTokenizer,
    ) -> str:
        interval_s = config.status_interval_s
        app = create_app(
            config,
            prefill=WorkerPool.of_clients("prefill", {_WORKER: prefill}, status_interval_s=interval_s),
            decode=WorkerPool.of_clients("decode", {_WORKER: decode}, status_interval_s=interval_s),
            tokenizer=tokenizer,
        )
        return await self._open.enter_async_context(http_server(app, config))

    def _serve_metrics(self, metrics: PrefillMetrics | DecodeMetrics, listen: str) -> MetricsServer:
        server = serve_metrics(metrics.registry, listen)
        self._open.callback(server.close)
        return server


def settings_of(settings: type[S], config: ServeConfig, **chosen: str) -> S:
    """One service's settings out of serve's, with what the launcher chose."""
    given = {field: getattr(config, field) for field in settings.model_fields}
    return settings(**{**given, **chosen})


async def _load(config: WorkerSettings) -> LanguageModel:
    return await asyncio.to_thread(
        load_model,
        config.model,
        name=config.model_name,
        device=config.device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
    )
