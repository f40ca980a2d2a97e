"""Traces: OpenTelemetry spans of a turn's stages, and their context over HTTP, gRPC and the block manifest.

Off unless a process calls `setup_tracing` with an endpoint; spans then cost nothing. One trace a turn:

    POST /v1/...                                            router
    ├── Decode/Generate                                     decode
    │   ├── admit            bytes asked for to reserved
    │   ├── first step       verified transfer to first token of its own
    │   └── decode           first token to last
    └── Prefill/Prefill                                     prefill
        ├── queue            submitted to begun
        ├── prefill          the prompt's pass
        │   ├── compress     one a layer
        │   ├── ship         one a layer: handing its blocks to the sender
        │   └── receive      decode: manifest to the last block verified
        └── acknowledge      first token to decode's word that all is there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_FLUSH_TIMEOUT_MS = 2_000
_EXPORT_TIMEOUT_S = 5
_NAME = "kvferry"
Attribute = str | int | float | bool
_propagator = TraceContextTextMapPropagator()


class _Tracing:
    """This process's tracer. Not the library's global one, at which other libraries would trace, too: a web
    framework every poll of /ready."""

    tracer: trace.Tracer = trace.NoOpTracer()


_tracing = _Tracing()


def setup_tracing(endpoint: str, service: str) -> Callable[[], None]:
    """Send this process's spans to an OTLP (gRPC) endpoint; nothing where it is empty.

    Args:
        endpoint: http://host:port, or https://host:port.
        service: the span resource's `service.name` is `kvferry-{service}`.

    Returns: sends what is left, for at most a few seconds, and ends it.
    """
    if not endpoint:
        return lambda: None
    # The exporter takes a moment to import and is wanted only here.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"kvferry-{service}"}))
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT_S
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracing.tracer = provider.get_tracer(_NAME)

    def close() -> None:
        _tracing.tracer = trace.NoOpTracer()
        provider.force_flush(_FLUSH_TIMEOUT_MS)
        provider.shutdown()

    return close


def current_context() -> Context:
    """What spans started here and now are children of; for work that goes on in another thread."""
    return otel_context.get_current()


def carrier() -> dict[str, str]:
    """The current context as W3C headers; empty outside any trace."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers


def context_of(headers: Mapping[str, str]) -> Context | None:
    """The context that W3C headers carry; None where they carry none that is valid."""
    found = _propagator.extract(dict(headers), context=Context())
    return found if trace.get_current_span(found).get_span_context().is_valid else None


def begin(name: str, parent: Context | None = None) -> Span:
    """A span that its owner ends, on whatever thread; one that records nothing where there is no trace.

    Args: parent: None takes the current context.
    """
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return trace.INVALID_SPAN
    return _tracing.tracer.start_span(name, context=parent)


def fail(error: BaseException) -> None:
    """Mark the current span as ended by an error."""
    trace.get_current_span().set_status(Status(StatusCode.ERROR, str(error)))


@contextmanager
def stage(name: str, parent: Context | None = None, **attributes: Attribute) -> Iterator[None]:
    """A span around a block, current within it; none where there is no trace. Attributes get the prefix
    `kvferry.`."""
    if not trace.get_current_span(parent).get_span_context().is_valid:
        yield
        return
    with entry(name, parent, SpanKind.INTERNAL, **attributes):
        yield


@contextmanager
def entry(
    name: str, parent: Context | None, kind: SpanKind = SpanKind.SERVER, **attributes: Attribute
) -> Iterator[None]:
    """The span of a request that arrives, current within the block; begins a trace where it has no parent."""
    named = {f"{_NAME}.{key}": value for key, value in attributes.items()}
    with _tracing.tracer.start_as_current_span(
        name, context=parent, kind=kind, attributes=named, record_exception=False
    ):
        yield
