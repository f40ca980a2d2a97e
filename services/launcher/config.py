"""Options of `kvferry serve`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.router.config import RouterConfig
from kvferry.shared.process.config import LogLevel, ServiceSettings
from kvferry.shared.process.options import CAPACITY, NETWORK, PROCESS, Seconds

Role = Literal["prefill", "decode", "router"]

CONFIGS: dict[Role, type[ServiceSettings]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "router": RouterConfig,
}


class ServeConfig(RouterConfig, DecodeConfig, PrefillConfig):
    """Options of `kvferry serve`: those of all services, except the addresses that the launcher chooses.

    An option that several services have goes to each of them; `listen` is the HTTP server's.
    """

    threads: Annotated[int, CAPACITY] = Field(
        0, ge=0, description="CPU threads of prefill, and of decode; 0: one a processor, and a third as many"
    )
    in_process: Annotated[bool, PROCESS] = Field(
        False, description="run router, prefill and decode in one process"
    )
    prefill_metrics_listen: Annotated[str, NETWORK] = Field(
        "127.0.0.1:0", description="host:port of prefill's metrics; port 0 picks a free one"
    )
    decode_metrics_listen: Annotated[str, NETWORK] = Field(
        "127.0.0.1:0", description="host:port of decode's metrics; port 0 picks a free one"
    )
    start_timeout_s: Annotated[Seconds, PROCESS] = Field(
        900.0,
        gt=0,
        description="how long the services may take to become ready; on a GPU, kernels are compiled at the "
        "first start. Not with --calibrate",
    )
    log_level: Annotated[LogLevel, PROCESS] = Field("warning", description="least severe messages to log")
    shutdown_timeout_s: Annotated[Seconds, PROCESS] = Field(
        2.0, ge=0, description="how long in-flight requests may still run at shutdown"
    )

    def _workers_listen(self) -> dict[str, str]:
        # `listen` is the router's, which has keys; the workers' traffic stays on this machine
        return {name: getattr(self, name) for name in ("prefill_metrics_listen", "decode_metrics_listen")}

    @property
    def ready_within_s(self) -> float:
        """The time in which the services must become ready; no limit with a calibration."""
        return math.inf if self.calibrate else self.start_timeout_s


HIDDEN_FROM_SERVE = frozenset(
    (
        "block_advertise",
        "block_listen",
        "decode_workers",
        "metrics_listen",
        "prefill_workers",
        "worker_metrics",
    )
)
"""Options of the services that `kvferry serve` sets itself."""
