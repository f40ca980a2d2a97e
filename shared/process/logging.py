"""Logging of a process: structlog and the standard library's loggers write through one formatter to stderr.

A service calls `setup_logging` once when it starts; all other code uses `structlog.get_logger(__name__)`.
Within `request_context`, every line has the request's id.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.types import EventDict, Processor, WrappedLogger

_SECRET_KEYS = frozenset({"api_key", "api_keys", "authorization", "password", "secret"})
# Libraries that install their own handlers or log each request; we log their lines from this level up.
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
    """Send all log lines of this process through one formatter. A later call replaces an earlier one.

    Args:
        level: debug, info, warning or error.
        format: json (one object per line), console, or auto (console on a terminal, else json).
        service: a field of every line.
        stream: where to write; stderr if None.
    """
    out = stream or sys.stderr
    as_json = format == "json" or (format == "auto" and not out.isatty())

    def add_service(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    shared: list[Processor] = [
        merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        add_service,
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
    _adopt(handler, logging.getLevelNamesMapping()[level.upper()])
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
    """Add `request_id` to every line logged within the block, by this task and by tasks that it starts."""
    with bound_contextvars(request_id=request_id):
        yield


def _final(as_json: bool, colors: bool) -> list[Processor]:
    """Return the processors that render an event and its fields as one line (tracebacks in the console take
    more)."""
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if not as_json:
        # The default, rich's, writes local variables, and prompts are in them.
        traceback = structlog.dev.plain_traceback
        return [drop, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=traceback)]
    return [drop, structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _adopt(handler: logging.Handler, level: int) -> None:
    """Install `handler` on the root logger as the only one and remove the libraries' own handlers."""
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    # transformers adds its handler when its logging module is first used; only transformers can remove it.
    if library := sys.modules.get("transformers.utils.logging"):
        library.disable_default_handler()
        library.enable_propagation()
    for name, floor in _LIBRARY_LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(max(level, floor) if level > logging.DEBUG else level)


def _hide_secrets(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Hide secrets in an event and one level deeper, such as in a dict of headers."""
    for key, value in event.items():
        if key in _SECRET_KEYS:
            event[key] = "[hidden]"
        elif isinstance(value, dict):
            event[key] = {k: "[hidden]" if str(k).lower() in _SECRET_KEYS else v for k, v in value.items()}
    return event
