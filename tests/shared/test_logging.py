"""Log lines: one formatter for our loggers and the libraries', request ids, nothing secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
import transformers.utils.logging as transformers_logging

from kvferry.shared.process.logging import request_context, setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


def _lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_service_level_logger_and_fields() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", "decode", stream=stream)
    structlog.get_logger("kvferry.test").warning("transfer failed", reason="checksum", transfer_id=7)
    (line,) = _lines(stream)
    assert line.pop("timestamp")
    assert line == {
        "event": "transfer failed",
        "level": "warning",
        "logger": "kvferry.test",
        "service": "decode",
        "reason": "checksum",
        "transfer_id": 7,
    }


def test_request_id_is_in_lines_of_the_request_only() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", "router", stream=stream)
    log = structlog.get_logger("kvferry.test")
    with request_context("req-1"):
        log.info("inside")
        logging.getLogger("some.library").warning("also inside")
    log.info("outside")
    assert [line.get("request_id") for line in _lines(stream)] == ["req-1", "req-1", None]


def test_library_loggers_write_through_our_handler_once() -> None:
    logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler(io.StringIO()))
    logging.getLogger("uvicorn.error").propagate = False
    stream = io.StringIO()
    setup_logging("info", "json", "router", stream=stream)
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("grpc._server").error("broken %s", "pipe")
    transformers_logging.get_logger("transformers.modeling_utils").warning("weights")
    events = [line["event"] for line in _lines(stream)]
    assert events == ["started", "broken pipe", "weights"]


def test_level_filters_and_debug_opens_the_libraries() -> None:
    stream = io.StringIO()
    setup_logging("warning", "json", "prefill", stream=stream)
    structlog.get_logger("kvferry.test").info("quiet")
    logging.getLogger("uvicorn.error").info("quiet")
    assert _lines(stream) == []
    setup_logging("debug", "json", "prefill", stream=stream)
    logging.getLogger("httpx").debug("loud")
    assert [line["event"] for line in _lines(stream)] == ["loud"]


def test_secrets_are_hidden_at_the_top_and_in_headers() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", "router", stream=stream)
    structlog.get_logger("kvferry.test").info(
        "request", api_key="sk-one", headers={"Authorization": "Bearer sk-two", "accept": "*/*"}
    )
    assert "sk-" not in stream.getvalue()
    assert _lines(stream)[0]["headers"] == {"Authorization": "[hidden]", "accept": "*/*"}


def test_exceptions_become_one_json_line_with_their_traceback() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", "router", stream=stream)
    try:
        raise ValueError("odd")
    except ValueError:
        structlog.get_logger("kvferry.test").exception("failed")
    (line,) = _lines(stream)
    assert "ValueError: odd" in str(line["exception"])


def test_console_format_is_readable_text() -> None:
    stream = io.StringIO()
    setup_logging("info", "console", "router", stream=stream)
    structlog.get_logger("kvferry.test").info("listening", address="127.0.0.1:8000")
    assert "listening" in stream.getvalue()
    assert "address=127.0.0.1:8000" in stream.getvalue()


def test_auto_is_json_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    setup_logging("info", "auto", "router", stream=stream)
    structlog.get_logger("kvferry.test").info("listening")
    assert _lines(stream)[0]["event"] == "listening"


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_shows_no_local_variables(format: str) -> None:
    stream = io.StringIO()
    setup_logging("info", format, "router", stream=stream)
    prompt = f"quiet {'bridge'}"
    try:
        raise RuntimeError(len(prompt))
    except RuntimeError:
        structlog.get_logger("kvferry.test").exception("broken")
    assert "RuntimeError: 12" in stream.getvalue()
    assert "quiet bridge" not in stream.getvalue()
