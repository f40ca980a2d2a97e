"""An OTLP collector for tests."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc


class Collector(rpc.TraceServiceServicer):
    """A real OTLP endpoint that keeps what it is sent: (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        rpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [(names["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def of(self, trace_id: str = "") -> list[tuple[str, Any]]:
        """The spans of one trace, or all."""
        with self._lock:
            return [(service, span) for service, span in self.spans if trace_id in ("", span.trace_id.hex())]

    def wait_for(self, trace_id: str, count: int) -> list[tuple[str, Any]]:
        deadline = time.monotonic() + 180
        while len(found := self.of(trace_id)) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def close(self) -> None:
        self._server.stop(None).wait(30)
