"""Log set-up of a process: structlog and the standard library's loggers through one formatter to stderr.

Called once, at a service's start. Everything else only asks `structlog.get_logger(__name__)`. A request's id
is bound with `request_context` and is then in every line that the request's task logs. Configures nothing on
import and opens no files.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.types import EventDict, Processor, WrappedLogger

from kvferry.shared.errors import ConfigurationError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
FORMATS = ("auto", "json", "console")

_SECRET_KEYS = frozenset({"api_key", "api_keys", "authorization", "password", "secret"})
# Libraries that install handlers of their own or log each request; their lines join ours from this level up.
_LIBRARY_LEVELS = {
    "uvicorn": logging.INFO,
    "uvicorn.error": logging.INFO,
    "uvicorn.access": logging.WARNING,
    "grpc": logging.WARNING,
    "asyncio": logging.WARNING,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "transformers": logging.WARNING,
}


def setup_logging(level: str, format: str, service: str, *, stream: TextIO | None = None) -> None:
    """Route all of this process's log lines through one formatter. A later call replaces an earlier one.

    Args:
        level: debug, info, warning or error.
        format: json (one object a line), console, or auto (console on a terminal, else json).
        service: name that every line carries.
        stream: where lines go; stderr if None.
    Raises: ConfigurationError for an unknown level or format.
    """
    if level not in LEVELS:
        raise ConfigurationError(f"log_level is {level!r}; it must be one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ConfigurationError(f"log_format is {format!r}; it must be one of {', '.join(FORMATS)}")
    out = stream or sys.stderr
    as_json = format == "json" or (format == "auto" and not out.isatty())

    shared: list[Processor] = [
        merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _ServiceName(service),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.StackInfoRenderer(),
        _hide_secrets,
    ]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_final(as_json, out.isatty())
        )
    )
    _adopt(handler, LEVELS[level])
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Put `request_id` into every line that this task (and tasks it starts) logs meanwhile."""
    with bound_contextvars(request_id=request_id):
        yield


def _final(as_json: bool, colors: bool) -> list[Processor]:
    """Rendering: from an event with its fields to one line (console tracebacks take more)."""
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if not as_json:
        return [drop, structlog.dev.ConsoleRenderer(colors=colors)]
    return [drop, structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _adopt(handler: logging.Handler, level: int) -> None:
    """Make `handler` the only one: on the root logger, with the libraries' own handlers removed."""
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    # transformers adds its handler when its logging module is first used; loaded, it must give it up itself.
    if library := sys.modules.get("transformers.utils.logging"):
        library.disable_default_handler()
        library.enable_propagation()
    for name, floor in _LIBRARY_LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(max(level, floor) if level > logging.DEBUG else level)


class _ServiceName:
    """Adds the process's service name to each event."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("service", self._service)
        return event


def _hide_secrets(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for key in event.keys() & _SECRET_KEYS:
        event[key] = "[hidden]"
    for key, value in event.items():
        if isinstance(value, dict):
            event[key] = _hide_in(value)
    return event


def _hide_in(values: dict[Any, Any]) -> dict[Any, Any]:
    """One nested level, such as a dict of headers."""
    return {k: "[hidden]" if str(k).lower() in _SECRET_KEYS else v for k, v in values.items()}
