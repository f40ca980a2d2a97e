"""Options of the launcher's own commands, and which settings classes share one environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvferry.services.decode.config import DecodeConfig
from kvferry.services.prefill.config import PrefillConfig
from kvferry.services.router.config import RouterConfig
from kvferry.shared.config import LogLevel, ServiceSettings
from kvferry.tools.evaluation.calibration_config import CalibrateEpsilonConfig, CalibrateQualityConfig
from kvferry.tools.evaluation.config import EvalConfig

Role = Literal["prefill", "decode", "router"]

CONFIGS: dict[Role, type[ServiceSettings]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "router": RouterConfig,
}


class ServeConfig(RouterConfig, DecodeConfig, PrefillConfig):
    """Options of `kvferry serve`: those of all services, less the addresses that the launcher chooses.

    An option that several services have goes to each of them; `listen` is the HTTP server's.
    """

    model: str = Field("demo", description="local folder or hub id of the model; demo is the shipped one")
    threads: int = Field(
        0, ge=0, description="CPU threads of prefill, and of decode; 0 divides the processors between them"
    )
    in_process: bool = Field(False, description="run router, prefill and decode in one process")
    prefill_metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of prefill's metrics; port 0 picks a free one"
    )
    decode_metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of decode's metrics; port 0 picks a free one"
    )
    start_timeout_s: float = Field(
        300.0, gt=0, description="give up if the services are not ready after so long"
    )
    log_level: LogLevel = Field("warning", description="debug, info, warning or error")
    shutdown_timeout_s: float = Field(
        2.0, ge=0, description="requests under way at shutdown may take so long"
    )


HIDDEN_FROM_SERVE = frozenset(
    {
        "block_advertise",
        "block_listen",
        "decode_workers",
        "metrics_listen",
        "prefill_workers",
        "worker_metrics",
    }
)
"""Options of the services that `kvferry serve` sets by itself."""


class ChatConfig(ServiceSettings):
    """Options of `kvferry chat`."""

    url: str = Field("http://127.0.0.1:8000", description="address of the router")
    api_key: str = Field("", repr=False, description="key to send, if the router wants one")
    chat_model: str = Field("", description="model to ask for; the first that the router has if empty")
    session: str = Field("", description="session id to continue; a new one if empty")
    method: str = Field("", description="compression method; the router's default if empty")
    token_budget: int = Field(0, ge=0, description="token budget per turn; 0 leaves it to the router")
    max_tokens: int = Field(0, ge=0, description="longest answer in tokens; 0 leaves it to the router")
    temperature: float = Field(0.0, ge=0, le=2, description="0 always takes the likeliest token")
    chat_timeout_s: float = Field(300.0, gt=0, description="give up if nothing comes for so long")


KNOWN_CONFIGS: tuple[type[ServiceSettings], ...] = (
    *CONFIGS.values(),
    ServeConfig,
    ChatConfig,
    EvalConfig,
    CalibrateEpsilonConfig,
    CalibrateQualityConfig,
)
"""One environment may hold variables of all of these."""
