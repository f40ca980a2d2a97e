"""Process configuration: the base of each service's settings, one class a service, environment `KVFERRY_*`.

Every field is an option `--field-name` of the service's command and a variable `KVFERRY_FIELD_NAME`;
its description is the help text. Defaults stand here once. `command_line.py` makes the options; a service
gets a settings object and reads neither arguments nor environment.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "KVFERRY_"

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]
HistoryBits = Literal["model", "16", "8", "4"]
"""How many bits history rows are stored in; model: as they are computed."""


class ServiceSettings(BaseSettings):
    """Options that every service has."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    log_level: LogLevel = Field("info", description="debug, info, warning or error")
    log_format: LogFormat = Field("auto", description="json, console, or auto (console on a terminal)")
    ready_file: str = Field(
        "", description="file that gets one JSON line with the real addresses once the service listens"
    )


class PlanSettings(ServiceSettings):
    """Options of what makes compression plans exact. Whoever starts it hands `epsilon_tables` to
    `compression.rdkv.epsilon.install_tables` first."""

    epsilon_tables: str = Field(
        "",
        description="folder of distortion tables that rdkv may name (epsilon_table), each NAME.json; the "
        "same for router and workers",
    )


class TracedSettings(PlanSettings):
    """Options of the services that a turn passes through."""

    otlp_endpoint: str = Field(
        "", description="http(s)://host:port of an OTLP (gRPC) collector that gets traces; empty: no traces"
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"is {value!r}; it must begin with http:// or https://")
        return value


class WorkerSettings(TracedSettings):
    """Options that prefill and decode workers share."""

    model: str = Field("demo", description="local folder or hub id of the model; demo is the shipped one")
    model_name: str = Field("", description="public model id; the folder's name if empty")
    device: str = Field("auto", description="auto (CUDA where there is one), cpu, cuda, cuda:N")
    dtype: str = Field(
        "auto", description="auto (the model's own on CUDA, float32 on CPU), float32, float16, bfloat16"
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        "auto", description="auto (Triton on CUDA where it is installed), torch, triton (an error elsewhere)"
    )
    max_model_len: int = Field(0, ge=0, description="context window in tokens; 0 takes the model's own")
    threads: int = Field(0, ge=0, description="CPU threads for torch; 0 leaves torch's choice")
    listen: str = Field(
        "127.0.0.1:0", description="host:port of the control (gRPC) server; port 0 picks a free one"
    )
    block_listen: str = Field(
        "tcp://127.0.0.1:0", description="tcp://host:port or ipc://path where blocks arrive"
    )
    block_advertise: str = Field("", description="block address as peers reach it; empty: as bound")
    metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of the metrics (HTTP) server; port 0 picks a free one"
    )
    shutdown_timeout_s: float = Field(
        10.0, ge=0, description="requests under way at shutdown may take so long"
    )
