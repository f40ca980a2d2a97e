"""The checks of a service's options that need no model: they run before what takes seconds to import.

    kvferry serve | router | prefill | decode ──► options ──► check ──► torch, weights, sockets

Each reads options, small files or config.json. A new check is a function and a line of `_CHECKS`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from kvferry.services.decode.config import GROWTH_TOKENS, DecodeConfig, check_arena
from kvferry.services.launcher.config import CONFIGS, ServeConfig
from kvferry.services.launcher.process import may_use_gpu
from kvferry.services.router.config import RouterConfig
from kvferry.shared.compression.rdkv.epsilon import install_tables
from kvferry.shared.device.cuda_driver import no_cuda, torch_build
from kvferry.shared.errors import ConfigurationError, StoreUnavailable
from kvferry.shared.model.checkpoint import (
    GGUF_SUFFIX,
    SMOLLM2_NAME,
    read_object,
    resolve_model_path,
    weight_files,
)
from kvferry.shared.model.model_types import PARALLEL_TYPES, check_described
from kvferry.shared.process.config import StoredSettings, TracedSettings, WorkerSettings
from kvferry.shared.process.logging import setup_logging
from kvferry.shared.process.serving import bind
from kvferry.shared.trust.at_rest import AtRestKeys

_log = structlog.get_logger(__name__)


def check(config: TracedSettings, service: str) -> None:
    """Check a service's options, and begin its log.

    Raises: ConfigurationError, UnsupportedModel: it could not start.
    """
    setup_logging(config.log_level, config.log_format, service)
    for settings, checked in _CHECKS:
        if isinstance(config, settings):
            checked(config)


def _calibration(config: TracedSettings) -> None:
    if not getattr(config, "calibrate", False):  # which makes the folder
        install_tables(config.epsilon_tables, calibration=config.calibration)


def _keys(config: RouterConfig) -> None:
    from kvferry.services.router.http.access import KeyFile

    if config.api_keys_file:
        KeyFile(Path(config.api_keys_file))


def _tls(config: RouterConfig) -> None:
    if config.tls_cert:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_cert, config.tls_key)
        except OSError as error:
            raise ConfigurationError(
                f"tls_cert is {config.tls_cert!r} and tls_key {config.tls_key!r}; they do not load: {error}"
            ) from None


def _certs(config: TracedSettings) -> None:
    from kvferry.shared.trust.certs import PEERS, Certs

    for role, settings in CONFIGS.items():
        if isinstance(config, settings) and (certs := Certs.of(config.certs, role)) is not None:
            certs.client_context()
            if role in PEERS:
                certs.block_keys()


def _device(config: WorkerSettings) -> None:
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", config.device):
        raise ConfigurationError(f"device is {config.device!r}; it must be auto, cpu, cuda or cuda:N")
    cuda, hip = torch_build()
    if config.device.startswith("cuda") and not hip and not (cuda and may_use_gpu(config.device)):
        raise no_cuda(config.device, cuda)


def _model(config: TracedSettings) -> None:
    path = Path(config.model).expanduser()
    if not path.is_dir() and (path.is_file() or path.suffix == GGUF_SUFFIX):
        with suppress(OSError), path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return
        raise ConfigurationError(
            f"model is {config.model!r}; it must be demo, a folder, a GGUF file that can be read, or a hub id"
        )
    if config.model != SMOLLM2_NAME:
        folder = resolve_model_path(config.model, weights=False)
        if isinstance(config, WorkerSettings):
            if not (folder / "config.json").is_file():
                raise ConfigurationError(f"model {config.model!r} has no config.json")
            described = read_object(folder / "config.json")
            check_described(described)
            if path.is_dir():
                weight_files(path)
            if isinstance(config, DecodeConfig):
                _arena(config, described)


def _arena(config: DecodeConfig, described: Mapping[str, Any]) -> None:
    """Check the arena as it is whatever the dtype; a worker knows the tokens' size."""
    if described.get("model_type") in PARALLEL_TYPES:  # whose rows are plain K and V in each layer
        heads = described.get("num_attention_heads") or 1
        head_dim = described.get("head_dim") or (described.get("hidden_size") or 0) // heads
        row_bytes = 2 * 2 * (described.get("num_key_value_heads") or heads) * head_dim
        check_arena(config, GROWTH_TOKENS * (described.get("num_hidden_layers") or 0) * row_bytes)


def _redis(config: StoredSettings) -> None:
    from kvferry.shared.history.redis_client import RedisLink, RedisOptions

    if not config.history_redis:
        return
    timeout_s = config.history_redis_timeout_s
    link = RedisLink(RedisOptions(url=config.history_redis, timeout_s=timeout_s, max_attempts=1))
    try:
        link.call(lambda client: client.get("kvferry:"))  # PING would ask all nodes of a cluster
    except StoreUnavailable as error:
        problem = f"history_redis cannot be used: {error.message.rstrip('.')}"
        if isinstance(config, ServeConfig):
            raise ConfigurationError(f"{problem}; start that Redis, or give another's address") from None
        _log.warning(problem)  # services of a fleet may start while it is away, and do without it
    finally:
        link.close()


_CHECKS: tuple[tuple[type[TracedSettings], Callable[[Any], object]], ...] = (
    (TracedSettings, lambda config: bind("listen", config.listen).close()),
    (TracedSettings, _calibration),
    (TracedSettings, _certs),
    (RouterConfig, _keys),
    (RouterConfig, _tls),
    (StoredSettings, lambda config: AtRestKeys.read(config.at_rest_keys)),
    (WorkerSettings, _device),
    (TracedSettings, _model),
    (StoredSettings, _redis),
)
"""What is checked of which settings, in this order."""
