"""A prefill or decode worker: loads the model, starts the service and its metrics, and closes all in reverse.

    run_worker ──► model, kernels ──► metrics ──► self-test, calibration ──► service ──► control calls ──►
    ready file ──► signal ──► drain ──► close   └── start_service: also of a stack in one process ┘

Each service brings a function that builds it from its model and its block transport.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from prometheus_client import CollectorRegistry

from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.control.server import serve_control
from kvferry.shared.device.cuda_driver import check_device
from kvferry.shared.device.kernel_paths import KernelCalls, KernelQuarantine, Role, choose_kernels
from kvferry.shared.device.self_test import model_shapes, self_test
from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.interface import LanguageModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.parallel.lead import FOLLOWER
from kvferry.shared.model.parallel.model import ParallelModel, load_parallel_model
from kvferry.shared.process.config import WorkerSettings
from kvferry.shared.process.logging import setup_logging
from kvferry.shared.process.serving import (
    close_within,
    end_process,
    end_within,
    serve_until_signal,
    share_free_memory,
)
from kvferry.shared.telemetry.metrics import certificate_expiry
from kvferry.shared.telemetry.metrics_server import serve_metrics
from kvferry.shared.telemetry.tracing import setup_tracing
from kvferry.shared.trust.certs import Certs
from kvferry.shared.wire.channel import Channel, ignore_transport
from kvferry.shared.wire.receiver import BlockServer, BlockSink
from kvferry.shared.wire.transports import make_transport
from kvferry.shared.wire.zmq import ZmqConnectingChannel, ZmqListeningChannel

_CLOSE_TIMEOUT_S = 30.0
_END_STREAMS_S = 2.0
"""Time for ended streams to tell their routers so."""
_END_MARGIN_S = 2.0


class BlockTransport(Protocol):
    """Makes a worker's ends of block transfers; `InProcessHub` is one for services in one process."""

    def connecting(self, on_connected: Callable[[str], None] = ...) -> Channel:
        """Make a sender's channel.

        Args: on_connected: gets the name of the transport to a receiver when it is known.
        """
        ...

    def server(self, sink: BlockSink, *, on_late_block: Callable[[], None] | None = None) -> BlockServer: ...


class ProcessTransport:
    """Blocks between processes, on one machine or several. Implements `BlockTransport`."""

    def __init__(self, settings: WorkerSettings, role: Role) -> None:
        """Raises: ConfigurationError: see `Certs` and `make_transport`."""
        certs = Certs.of(settings.certs, role)
        self._listen = settings.block_listen
        self._advertise = settings.block_advertise
        self._keys = certs.block_keys() if certs is not None else None
        self._transport = make_transport(settings)

    def connecting(self, on_connected: Callable[[str], None] = ignore_transport) -> Channel:
        return self._transport.connecting(ZmqConnectingChannel(self._keys), on_connected)

    def server(self, sink: BlockSink, *, on_late_block: Callable[[], None] | None = None) -> BlockServer:
        """Make a server. Raises: ConfigurationError: the address cannot be bound."""
        network = ZmqListeningChannel(self._listen, advertise=self._advertise, keys=self._keys)
        return BlockServer(self._transport.listening(network), sink, on_late_block=on_late_block)


@dataclass(frozen=True, kw_only=True)
class RankTransport:
    """Makes the block servers of a worker's other ranks, each in its own process, to which this is sent.

    Attributes: settings: the worker's, with the first rank's addresses.
    """

    settings: WorkerSettings
    role: Role

    @classmethod
    def of(cls, settings: WorkerSettings, role: Role) -> RankTransport | None:
        """Make the transport of the other ranks; None with one rank."""
        if settings.tensor_parallel == 1:
            return None
        return cls(settings=settings, role=role)

    def server(
        self, rank: int, sink: BlockSink, *, on_late_block: Callable[[], None] | None = None
    ) -> BlockServer:
        """Make a server. Raises: ConfigurationError: the address cannot be bound."""
        names = ("block_listen", "block_advertise")
        addresses = {name: _address_of_rank(getattr(self.settings, name), rank) for name in names}
        settings = self.settings.model_copy(update=addresses)
        return ProcessTransport(settings, self.role).server(sink, on_late_block=on_late_block)


def _address_of_rank(address: str, rank: int) -> str:
    """Return where a rank listens, given the first rank's address: as many ports later, or its own path."""
    head, colon, port = address.rpartition(":")
    if address.startswith("ipc://"):
        return f"{address}.{rank}"
    if not colon or not port.isdigit() or int(port) == 0:
        return address
    return f"{head}:{int(port) + rank}"


class WorkerService(Protocol):
    """The part of a service that `start_service` uses. Its control interface is for the router."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def block_endpoint(self) -> str: ...

    async def start(self) -> None: ...

    async def drain(self, timeout_s: float) -> None:
        """Take no new turns and let those that run end, for so long; then end the rest with the error
        `WorkerUnavailable.draining`, after which routers continue them elsewhere."""
        ...

    async def close(self) -> None: ...


ServiceT = TypeVar("ServiceT", bound=WorkerService)
Build = Callable[[LanguageModel, BlockTransport], Awaitable[tuple[ServiceT, CollectorRegistry]]]
"""Builds a service and the registry of its metrics. The model is used by that service alone."""
Calibrate = Callable[[LanguageModel, Callable[[], bool]], None]
"""Measures a model unless its calibration exists. Called in a thread; its argument says whether to give
up."""


async def run_worker(
    settings: WorkerSettings,
    role: Role,
    build: Build[ServiceT],
    *,
    follower_class: str = FOLLOWER,
    calibrate: Calibrate | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; then the process ends in bounded time even if a thread is stuck.

    Args: follower_class: as of `LeadingRank`, if there are several ranks.
    Raises: ConfigurationError, UnsupportedModel: the worker cannot start.
    """
    share_free_memory()
    setup_logging(settings.log_level, settings.log_format, role)
    install_tables(settings.epsilon_tables, calibration=settings.calibration)
    stop_tracing = setup_tracing(settings.otlp_endpoint, role)
    async with AsyncExitStack() as stack:
        stack.callback(stop_tracing)
        transport = ProcessTransport(settings, role)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        model = await _load_model(settings, stack, follower_class)
        service, metrics = await start_service(
            settings, role, model, build, transport, stack, calibrate=calibrate
        )
        interface: dict[str, Any] = {role: service}
        control = await serve_control(
            listen=settings.listen,
            certs=Certs.of(settings.certs, role),
            with_reflection=settings.grpc_reflection,
            **interface,
        )
        stack.push_async_callback(control.close, _END_STREAMS_S)
        info = {"address": control.address, "metrics": metrics, "blocks": service.block_endpoint}
        await serve_until_signal(role, info, settings.ready_file)
        end_within(settings.shutdown_timeout_s + _END_STREAMS_S + _CLOSE_TIMEOUT_S + _END_MARGIN_S)
        await control.announce_end()
        await service.drain(settings.shutdown_timeout_s)


async def _load_model(settings: WorkerSettings, stack: AsyncExitStack, follower_class: str) -> LanguageModel:
    """Load the model, in several ranks if the settings say so; the stack ends them."""
    if settings.tensor_parallel == 1:
        return await load_workers_model(settings)
    check_device(settings.device)
    model = await asyncio.to_thread(
        load_parallel_model,
        settings.model,
        num_ranks=settings.tensor_parallel,
        on_lost=end_process,
        name=settings.model_name,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        num_threads=settings.threads,
        follower_class=follower_class,
    )
    stack.callback(model.close)
    return model


async def load_workers_model(settings: WorkerSettings) -> TransformersModel:
    """Load the model that a worker's settings name.

    Raises: ConfigurationError, UnsupportedModel: see `check_device` and `load_model`.
    """
    check_device(settings.device)
    return await asyncio.to_thread(
        load_model,
        settings.model,
        name=settings.model_name,
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
    )


async def start_service(
    settings: WorkerSettings,
    role: Role,
    model: LanguageModel,
    build: Build[ServiceT],
    transport: BlockTransport,
    stack: AsyncExitStack,
    *,
    calibrate: Calibrate | None = None,
) -> tuple[ServiceT, str]:
    """Start a service and its metrics server; the stack closes both.

    Returns: the service and the address of its metrics.
    """
    choose_kernels(settings.kernels, model.device)
    service, registry = await build(model, transport)
    registry.register(KernelCalls(role, model.device))
    registry.register(KernelQuarantine(role))
    if (certs := Certs.of(settings.certs, role)) is not None:
        certificate_expiry(registry, certs.expires_at_s)
    stack.push_async_callback(lambda: close_within(_CLOSE_TIMEOUT_S, f"{role} service", service.close()))
    reason = "its kernels are tested"
    server = serve_metrics(
        registry, settings.metrics_listen, problem=lambda: "" if service.is_ready else reason, certs=certs
    )
    stack.callback(server.close)
    if settings.self_test:
        for shape in model_shapes(model.spec, model.device):
            await asyncio.to_thread(self_test, role, shape)
    if isinstance(model, ParallelModel):
        await asyncio.to_thread(
            model.prepare,
            role,
            kernels=settings.kernels,
            self_test=settings.self_test,
            epsilon_tables=settings.epsilon_tables,
            calibration=settings.calibration,
        )
    if calibrate is not None:
        reason = "its model is calibrated, which takes minutes"
        given_up = threading.Event()
        try:
            await asyncio.to_thread(calibrate, model, given_up.is_set)
        finally:
            given_up.set()
        install_tables(settings.epsilon_tables, calibration=settings.calibration)
    reason = "its engine warms up, does not answer, or is to end"
    await service.start()
    return service, server.address
