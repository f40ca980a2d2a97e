"""The router's options, each also a variable `KVFERRY_*`, with their defaults.

Values only: nothing is opened, resolved or loaded here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvferry.shared.compression.presets import check_names
from kvferry.shared.errors import ConfigurationError
from kvferry.shared.process.config import StoredSettings
from kvferry.shared.process.options import (
    ACCESS,
    COMPRESSION,
    HISTORY,
    MODEL,
    NETWORK,
    TIMEOUTS,
    Bytes,
    Seconds,
)
from kvferry.shared.process.serving import is_loopback, parse_address


def split_list(value: str) -> tuple[str, ...]:
    """Return the entries of a comma-separated option, without blanks."""
    return tuple(entry.strip() for entry in value.split(",") if entry.strip())


class RouterConfig(StoredSettings):
    """Options of `kvferry router`."""

    listen: Annotated[str, NETWORK] = Field(
        "127.0.0.1:8000", description="host:port of the HTTP server; port 0 picks a free one"
    )
    prefill_workers: Annotated[str, NETWORK] = Field(
        "127.0.0.1:9001",
        description="prefill workers' host:port, comma-separated; a name may resolve to many",
    )
    decode_workers: Annotated[str, NETWORK] = Field(
        "127.0.0.1:9002", description="decode workers' host:port, likewise"
    )
    worker_metrics: Annotated[str, NETWORK] = Field(
        "", description="host:port of the metrics that /metrics?all=1 includes"
    )
    model_aliases: Annotated[str, MODEL] = Field(
        "", description="further names of the model in requests, comma-separated; answers have its own"
    )
    generation_config: Annotated[str, MODEL] = Field(
        "auto",
        description="sampling of requests that say nothing: auto (the model's generation_config.json), none, "
        "or a folder that has one",
    )
    api_keys: Annotated[str, ACCESS] = Field(
        "", repr=False, description="accepted keys, comma-separated; empty accepts anyone"
    )
    tls_cert: Annotated[str, ACCESS] = Field(
        "", description="PEM file of the HTTP server's certificate and its chain; empty: plain HTTP"
    )
    tls_key: Annotated[str, ACCESS] = Field("", description="PEM file of the certificate's key")
    api_keys_file: Annotated[str, ACCESS] = Field(
        "", description="TOML file of hashed keys with scopes and limits; read again when it changes"
    )
    cors_origins: Annotated[str, ACCESS] = Field(
        "", description="origins whose pages may use the API, comma-separated; * for any; empty: none"
    )
    allowed_hosts: Annotated[str, ACCESS] = Field(
        "",
        description="names that requests without keys over plain HTTP may have for this server, beside "
        "addresses and names that only a local network has, comma-separated; * for any",
    )
    strict_fields: Annotated[bool, ACCESS] = Field(
        False, description="refuse requests with fields that are unknown here, in place of naming them"
    )
    metrics_access: Annotated[Literal["auto", "open", "key"], ACCESS] = Field(
        "auto",
        description="who may read /metrics: anyone, holders of a key, or auto (open on loopback)",
    )

    default_method: Annotated[str, COMPRESSION] = Field(
        "rdkv", description="method of requests that name none; rocketkv where it does not go with the model"
    )
    default_retention: Annotated[float, COMPRESSION] = Field(
        0.0, ge=0, le=1, description="share of a prompt that the default method retains; 0: its own budget"
    )
    allowed_methods: Annotated[str, COMPRESSION] = Field(
        "", description="methods a request may name; empty allows all"
    )
    session_ttl_s: Annotated[Seconds, HISTORY] = Field(
        604_800.0, gt=0, description="idle time after which a session expires"
    )
    session_wait_s: Annotated[Seconds, HISTORY] = Field(
        10.0, ge=0, description="how long a request waits for its busy session"
    )
    max_sessions: Annotated[int, HISTORY] = Field(
        10_000, ge=1, description="sessions in memory; the longest idle are dropped"
    )
    document_ttl_s: Annotated[Seconds, HISTORY] = Field(
        604_800.0, gt=0, description="time after which a document expires"
    )
    max_sessions_per_key: Annotated[int, HISTORY] = Field(
        1000, ge=1, description="sessions that one API key may store"
    )
    max_documents_per_key: Annotated[int, HISTORY] = Field(
        100, ge=0, description="documents that one API key may store"
    )
    max_history_tokens_per_key: Annotated[int, HISTORY] = Field(
        0, ge=0, description="tokens of one key's sessions together, and of its documents; 0: no limit"
    )
    max_stored_bytes_per_key: Annotated[Bytes, HISTORY] = Field(
        256 << 20,
        ge=0,
        description="bytes, without KV, of one key's sessions and responses together, of its documents, and "
        "of its prompts without a session; 0: no limit",
    )
    implicit_sessions: Annotated[int, HISTORY] = Field(
        16, ge=0, description="prompts without a session id whose KV stays reusable, per API key; 0: none"
    )
    implicit_session_ttl_s: Annotated[Seconds, HISTORY] = Field(
        600.0, gt=0, description="time after which such a prompt is dropped if none reuses it"
    )

    request_timeout_s: Annotated[Seconds, TIMEOUTS] = Field(
        600.0, gt=0, description="deadline of a whole request"
    )
    keepalive_s: Annotated[Seconds, TIMEOUTS] = Field(
        30.0, gt=0, description="interval of empty lines in a stream that is silent"
    )
    read_timeout_s: Annotated[Seconds, TIMEOUTS] = Field(
        30.0, gt=0, description="time for a client to send a head or a body"
    )
    write_timeout_s: Annotated[Seconds, TIMEOUTS] = Field(
        60.0, gt=0, description="a client that reads nothing this long is dropped"
    )
    max_connections: Annotated[int, ACCESS] = Field(
        0, ge=0, description="HTTP connections at a time; 0: what the limit of open files has room for"
    )
    max_body_bytes: Annotated[Bytes, ACCESS] = Field(8 << 20, ge=1024, description="largest request body")
    max_header_bytes: Annotated[Bytes, ACCESS] = Field(64 << 10, ge=1024, description="largest request head")

    status_interval_s: Annotated[Seconds, TIMEOUTS] = Field(
        1.0, gt=0, description="interval of status calls to workers"
    )
    max_recoveries: Annotated[int, TIMEOUTS] = Field(
        3, ge=0, description="how many lost workers one turn may survive"
    )
    recovery_wait_s: Annotated[Seconds, TIMEOUTS] = Field(
        20.0, ge=0, description="how long a replay waits for a ready worker"
    )
    readiness_window_s: Annotated[Seconds, TIMEOUTS] = Field(
        30.0, gt=0, description="/ready needs a successful turn this recent"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_address("listen", self.listen)
        for option in ("prefill_workers", "decode_workers", "worker_metrics"):
            for entry in split_list(getattr(self, option)):
                parse_address(option, entry)
        allowed = split_list(self.allowed_methods)
        check_names("default_method", [self.default_method])
        check_names("allowed_methods", allowed)
        if allowed and self.default_method not in allowed:
            raise ConfigurationError(
                f"default_method is {self.default_method!r}; allowed_methods are {self.allowed_methods}"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            given, missing = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise ValueError(f"{given} is {getattr(self, given)!r} and {missing} is empty; both are needed")
        if not (self.is_loopback or self.insecure or self.has_keys):
            raise ValueError(
                f"listen is {self.listen!r}, which other machines may reach, and there are no api_keys; give "
                "keys or api_keys_file, listen on 127.0.0.1, or set insecure"
            )
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names beside the model's own by which requests may call it."""
        return split_list(self.model_aliases)

    @property
    def has_keys(self) -> bool:
        return bool(split_list(self.api_keys) or self.api_keys_file)

    @property
    def http_scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def is_loopback(self) -> bool:
        """True if the HTTP server is reachable from this machine only."""
        host, _ = parse_address("listen", self.listen)
        return is_loopback(host)

    @property
    def metrics_are_open(self) -> bool:
        if self.metrics_access == "auto":
            return self.is_loopback or not self.has_keys
        return self.metrics_access == "open"
