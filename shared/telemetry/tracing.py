"""Traces: OpenTelemetry spans of a request's stages. Their context travels over HTTP, gRPC and block
manifests.

Tracing is off, and spans cost nothing, unless a process calls `setup_tracing` with an endpoint. The trace of
a request:

    POST /v1/...                                            router
    ├── Decode/Generate                                     decode
    │   ├── admit            from asking for memory to its reservation
    │   ├── first step       from the verified transfer to decode's first token
    │   └── decode           from the first token to the last
    └── Prefill/Prefill                                     prefill
        ├── queue            waiting for the engine
        ├── prefill          the prompt's pass
        │   ├── compress     one per layer
        │   ├── ship         one per layer: passing its blocks to the sender
        │   └── receive      decode: from the manifest to the last block's verification
        └── acknowledge      from the first token to decode's acknowledgement
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvferry.shared.errors import InvalidRequest

_FLUSH_TIMEOUT_MS = 2_000
_EXPORT_TIMEOUT_S = 5
_NAME = "kvferry"
Attribute = str | int | float | bool
_propagator = TraceContextTextMapPropagator()


class _Tracing:
    """This process's tracer. The library's global one is not used, because other libraries trace with it: a
    web framework, for example, every poll of /ready."""

    tracer: trace.Tracer = trace.NoOpTracer()


_tracing = _Tracing()


def setup_tracing(endpoint: str, service: str) -> Callable[[], None]:
    """Send this process's spans to an OTLP (gRPC) endpoint; an empty one leaves tracing off.

    Args:
        endpoint: http://host:port, or https://host:port.
        service: the span resource's `service.name` is `kvferry-{service}`.

    Returns: a function that sends the remaining spans, for at most a few seconds, and ends tracing.
    """
    if not endpoint:
        return lambda: None
    # Imported here because the exporter takes time to import.
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
    """Return the context of the current span, for work that continues in another thread."""
    return otel_context.get_current()


def carrier() -> dict[str, str]:
    """Return the current context as W3C headers; empty outside any trace."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers


def context_of(headers: Mapping[str, str]) -> Context | None:
    """Return the context in W3C headers; None if there is none or it is invalid."""
    found = _propagator.extract(dict(headers), context=Context())
    return found if trace.get_current_span(found).get_span_context().is_valid else None


def begin(name: str, parent: Context | None = None) -> Span:
    """Start a span that the caller ends, on any thread. Without a trace it records nothing.

    Args: parent: None takes the current context.
    """
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return trace.INVALID_SPAN
    return _tracing.tracer.start_span(name, context=parent)


def fail(error: BaseException) -> None:
    """Mark the current span as ended by an error, without the message of a caller's mistake, which quotes the
    request."""
    text = f"{type(error).__name__}: {error.reason}" if isinstance(error, InvalidRequest) else str(error)
    trace.get_current_span().set_status(Status(StatusCode.ERROR, text))


def answered(model: str, *, input_tokens: int, output_tokens: int, finish_reasons: Sequence[str]) -> None:
    """Give the current span a completion's attributes by OpenTelemetry's conventions for generative AI."""
    trace.get_current_span().set_attributes(
        {
            "gen_ai.provider.name": "kvferry",
            "gen_ai.operation.name": "chat",
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": list(finish_reasons),
            "gen_ai.usage.input_tokens": input_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
        }
    )


@contextmanager
def stage(name: str, parent: Context | None = None, **attributes: Attribute) -> Iterator[None]:
    """Open a span around a block, current within it; none without a trace. Attributes get the prefix
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
    """Open an incoming request's span, current within the block; without a parent it starts a trace."""
    named = {f"{_NAME}.{key}": value for key, value in attributes.items()}
    with _tracing.tracer.start_as_current_span(
        name,
        context=parent,
        kind=kind,
        attributes=named,
        record_exception=False,
        set_status_on_exception=False,
    ):
        try:
            yield
        except Exception as error:
            fail(error)
            raise
