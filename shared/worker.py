"""The process of a prefill or decode worker: logs, traces, model, kernels, then its service, till a signal.

    run_worker ──► model, kernels ──► start (the service's own) ──► announced ──► signal ──► all closed

Knows neither service; each hands in how it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import structlog
import torch

from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.config import WorkerSettings
from kvferry.shared.kernel_paths import Role, choose_kernels
from kvferry.shared.logging import setup_logging
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.serving import Announce, announce_ready, wait_for_signal
from kvferry.shared.telemetry import setup_tracing

_log = structlog.get_logger(__name__)

Start = Callable[[LanguageModel, AsyncExitStack], Awaitable[dict[str, str]]]
"""Starts everything of a service, leaving its closing on the stack; returns the addresses."""


async def run_worker(
    settings: WorkerSettings, role: Role, start: Start, announce: Announce | None = None
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args: announce: told once, with the addresses, that the worker listens; the ready file is written besides.
    Raises: ConfigurationError, UnsupportedModel: the worker cannot start.
    """
    setup_logging(settings.log_level, settings.log_format, role)
    install_tables(settings.epsilon_tables)
    stop_tracing = setup_tracing(settings.otlp_endpoint, role)
    async with AsyncExitStack() as stack:
        stack.callback(stop_tracing)
        info = await start(await _load_model(settings), stack)
        announce_ready(settings.ready_file, info)
        if announce is not None:
            announce(info)
        _log.info(f"{role} listens", **info)
        await wait_for_signal()
        _log.info(f"{role} stops")


async def _load_model(settings: WorkerSettings) -> LanguageModel:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = await asyncio.to_thread(
        load_model,
        settings.model,
        name=settings.model_name,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
    )
    choose_kernels(settings.kernels, model.device)
    return model
