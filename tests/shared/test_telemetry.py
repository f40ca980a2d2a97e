"""Trace context in and out; nothing is traced that belongs to no trace."""

import pytest
from opentelemetry import trace

from kvferry.shared.telemetry.tracing import begin, carrier, context_of, setup_tracing, stage

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


INVALID = ["", "x", PARENT[:-3], PARENT.replace("0af", "xyz"), f"00-{'0' * 32}-{'0' * 16}-01"]


@pytest.mark.parametrize("value", INVALID)
def test_a_header_that_is_none_carries_no_context(value):
    assert context_of({"traceparent": value}) is None


def test_a_context_survives_its_headers():
    context = context_of({"traceparent": PARENT, "tracestate": "vendor=1"})
    with trace.use_span(trace.get_current_span(context)):
        assert carrier()["traceparent"] == PARENT


def test_outside_a_trace_nothing_is_recorded_or_carried():
    with stage("compress", layer=1):
        assert carrier() == {}
        assert not begin("queue").is_recording()


def test_without_an_endpoint_tracing_stays_off():
    setup_tracing("", "router")()
    with trace.use_span(trace.get_current_span(context_of({"traceparent": PARENT}))):
        assert not begin("any").is_recording()
