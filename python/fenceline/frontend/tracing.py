"""Traces of requests for OpenTelemetry: one span for each request, with spans for its stages below it.

The middleware notes where a request comes from (``ORIGIN``), the scheduler sends the times of its stages, and
when the request has ended its spans are made at once, with their times in the past. A thread of
OpenTelemetry's exports them. Nothing here waits for it: if the collector is too slow or gone, spans are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from fenceline.config.engine_config import EngineConfig
from fenceline.config.traces import TracesConfig
from fenceline.frontend.request_table import RequestEntry, RequestTrace
from fenceline.frontend.request_types import OTHER_OPERATION
from fenceline.ipc.io_struct import FinishReason, Stage
from fenceline.sampling.sampling_params import TOP_K_ALL
from fenceline.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

SPAN_NAME = "llm_request"
_PROVIDER = "fenceline"
_CLOSE_S = 2.0

Value = str | bool | int | float | Sequence[str]


class RequestTracer:
    """Makes the spans of requests that have ended."""

    def __init__(self, traces: TracesConfig, config: EngineConfig) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = config.served_model_name
        resource = Resource.create()  # with what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: _PROVIDER}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = _Quiet(_exporter(traces), traces.endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", self._exporter)))
        self._tracer = self._provider.get_tracer("fenceline", __version__)
        self._propagator = TraceContextTextMapPropagator()
        logger.info("Sending traces to %s (%s)", traces.endpoint, traces.protocol)

    def ended(self, entry: RequestEntry, reason: FinishReason, now: float) -> None:
        """Make the spans of ``entry``. ``now``: ``time.perf_counter()``."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        trace = entry.trace
        if trace is None:
            return
        parent = None if trace.origin is None else self._propagator.extract(trace.origin.headers)
        clock = time.time_ns() - time.perf_counter_ns()  # of perf_counter() 0

        def at(seconds: float) -> int:
            return clock + int(seconds * 1e9)

        span = self._tracer.start_span(SPAN_NAME, parent, SpanKind.SERVER, start_time=at(entry.created))
        if span.is_recording():
            span.set_attributes(self._attributes(entry, trace, reason, now))
            _set_status(span, reason)
            below = set_span_in_context(span)
            for stage in [*trace.stages, *_computing(entry, trace.stages, now)]:
                child = self._tracer.start_span(stage.name, below, start_time=at(stage.start))
                if stage.num_tokens:
                    child.set_attribute("fenceline.num_tokens", stage.num_tokens)
                child.end(at(max(stage.end, stage.start)))
        span.end(at(now))

    def close(self) -> None:
        """Send what is left. A collector that answers gets two seconds for it."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(_CLOSE_S if self._exporter.answers else 0.0)

    def _attributes(
        self, entry: RequestEntry, trace: RequestTrace, reason: FinishReason, now: float
    ) -> dict[str, Value]:
        """Those of the semantic conventions, and those of vLLM and SGLang, which have older names."""
        params, first = trace.params, entry.first_token
        values: dict[str, Value] = {
            "gen_ai.operation.name": OTHER_OPERATION if trace.origin is None else trace.origin.operation,
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": entry.rid,
            "gen_ai.response.finish_reasons": [reason.type],
            "gen_ai.usage.input_tokens": entry.num_prompt_tokens,
            "gen_ai.usage.output_tokens": entry.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": entry.cached_tokens,
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            # Older names.
            "gen_ai.request.id": entry.rid,
            "gen_ai.request.n": trace.num_samples,
            "gen_ai.usage.prompt_tokens": entry.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": entry.completion_tokens,
            "gen_ai.usage.cached_tokens": entry.cached_tokens,
            "gen_ai.latency.e2e": now - entry.created,
        }
        if params.top_k != TOP_K_ALL:
            values["gen_ai.request.top_k"] = params.top_k
        if trace.num_samples > 1:
            values["gen_ai.request.choice.count"] = trace.num_samples
        if reason.status_code is not None:
            values["error.type"] = str(reason.status_code)
        if entry.queue_time_s is not None:
            values["gen_ai.latency.time_in_queue"] = entry.queue_time_s
        if first:
            values["gen_ai.latency.time_to_first_token"] = first - entry.created
            began = _begin(trace.stages, entry.created)
            values["gen_ai.latency.time_in_model_prefill"] = first - began
            values["gen_ai.latency.time_in_model_decode"] = entry.last_token - first
            values["gen_ai.latency.time_in_model_inference"] = entry.last_token - began
        return values


def _begin(stages: Sequence[Stage], created: float) -> float:
    """When a request's first step began."""
    return next((stage.end for stage in stages if stage.name == "queue"), created)


def _computing(entry: RequestEntry, stages: Sequence[Stage], now: float) -> list[Stage]:
    """The stages in which tokens were computed."""
    first, began = entry.first_token, _begin(stages, 0.0)
    if not began and not first:
        return []
    found = [Stage("prefill", began or entry.created, first or now, entry.num_prompt_tokens)]
    if first and entry.completion_tokens > 1:
        found.append(Stage("decode", first, entry.last_token, entry.completion_tokens))
    return found


def _set_status(span: Span, reason: FinishReason) -> None:
    from opentelemetry.trace import Status, StatusCode

    if reason.status_code is not None:
        span.set_status(Status(StatusCode.ERROR, reason.message))


def _exporter(traces: TracesConfig) -> SpanExporter:
    exporter: type[Any]
    if traces.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as exporter
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as exporter
    made: SpanExporter = exporter(endpoint=traces.endpoint)
    return made


class _Quiet:
    """An exporter that says once, and not with each batch, that the collector does not answer."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._exporter, self._endpoint = exporter, endpoint
        self._success, self._failure = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
        self.answers = True
        # Nor do clients write into the log, which quotes a malformed traceparent or tracestate.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See ``SpanExporter``, for which this stands."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # of any kind: traces are never worth more than a line
            result = self._failure
            logger.debug("traces could not be sent: %s", error)
        answers = result is self._success
        if answers is not self.answers:
            self.answers = answers
            if answers:
                logger.info("The collector of traces at %s answers again", self._endpoint)
            else:
                logger.warning("The collector of traces at %s does not answer: spans are dropped", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
