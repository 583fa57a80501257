"""A collector of OpenTelemetry's traces on a free port, which keeps the spans that it gets, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from live_server import WAIT_S
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """A span as it arrived. Ids are hexadecimal, times seconds since 1970."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    status: tuple[int, str]
    service: str


class Collector:
    """Use as a context; ``url`` is what a server is given."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._news = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                collector.add(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of an export."""
        with self._news:
            for of_resource in request.resource_spans:
                service = _values(of_resource.resource.attributes)["service.name"]
                for of_scope in of_resource.scope_spans:
                    self._spans += [_span(span, service) for span in of_scope.spans]
            self._news.notify_all()

    def wait(self, enough: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans that have arrived, once they are ``enough``."""
        with self._news:
            assert self._news.wait_for(lambda: enough(self._spans), WAIT_S), f"the spans are {self._spans}"
            return list(self._spans)

    def trace(self, trace_id: str, num_requests: int = 1) -> tuple[Span, dict[str, Span]]:
        """The span of the request in a trace, and those of its stages by their names."""

        def of_trace(spans: list[Span]) -> list[Span]:
            return [span for span in spans if span.trace_id == trace_id]

        def is_whole(spans: list[Span]) -> bool:
            return sum(span.name == "llm_request" for span in of_trace(spans)) == num_requests

        spans = of_trace(self.wait(is_whole))
        [root] = [span for span in spans if span.name == "llm_request"]
        stages = {span.name: span for span in spans if span.parent_id == root.span_id}
        assert len(stages) == len(spans) - 1, "each stage once, below the request"
        return root, stages

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _span(span: Any, service: str) -> Span:
    return Span(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_values(span.attributes),
        status=(span.status.code, span.status.message),
        service=service,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
