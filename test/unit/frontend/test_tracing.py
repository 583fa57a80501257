"""Traces of requests: the spans that a collector gets, over HTTP and gRPC, and what happens without one."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec

import grpc
import pytest
from frontend_bench import Bench, demo_config
from live_server import unused_port
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from trace_collector import Collector

from fenceline.config import ConfigError
from fenceline.config.server_args import ServerArgs
from fenceline.config.traces import TracesConfig, traces_config
from fenceline.frontend import tracing
from fenceline.frontend.request_stream import RequestStream
from fenceline.frontend.request_table import RequestEntry, RequestTrace
from fenceline.frontend.request_types import ORIGIN, GenerateInput, TraceOrigin
from fenceline.frontend.tracing import RequestTracer
from fenceline.ipc.io_struct import FinishReason, Stage, StagesReport
from fenceline.sampling.sampling_params import SamplingParams

PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are sent soon."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def entry(created: float, origin: TraceOrigin | None = None, **known: float) -> RequestEntry:
    """A request of which 40 prompt tokens were computed from 1 s on, the first of 5 tokens 2 s after its arrival."""
    stages = [Stage("queue", created, created + 1.0), Stage("load_host", created + 1.0, created + 1.25, 32)]
    made = RequestEntry("r1", "", "r1", RequestStream("r1", (), lambda _: None), 40, 0, created=created)
    made.queue_time_s, made.completion_tokens, made.cached_tokens = 1.0, 5, 32
    made.first_token, made.last_token = created + 2.0, created + 3.0
    made.trace = RequestTrace(origin, SamplingParams(temperature=0.5, max_new_tokens=64, top_p=0.9), 2, stages)
    for name, value in known.items():
        setattr(made, name, value)
    return made


def origin(path: str = "/v1/chat/completions", flags: str = "01") -> TraceOrigin:
    parent = f"00-{PARENT[0]}-{PARENT[1]}-{flags}"
    return TraceOrigin.of(path, {b"traceparent": parent.encode(), b"tracestate": b"a=b", b"host": b"x"})


def tracer(url: str, protocol: str = "http/protobuf") -> RequestTracer:
    return RequestTracer(TracesConfig(endpoint=url, protocol=protocol), demo_config())


def test_a_request_is_a_span_with_its_stages_below(collector: Collector) -> None:
    """Under the parent that the client names, with the attributes' current names and the older ones."""
    traces, now = tracer(collector.url), time.perf_counter()
    traces.ended(entry(now - 4.0, origin()), FinishReason(type="length", length=5), now - 1.0)
    root, stages = collector.trace(PARENT[0])
    traces.close()
    assert (root.parent_id, root.kind, root.service) == (PARENT[1], 2, "fenceline")  # SERVER
    assert root.end - root.start == pytest.approx(3.0, abs=1e-3) and root.end == pytest.approx(time.time() - 1, abs=5)
    model = demo_config().served_model_name
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fenceline",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": "r1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.id": "r1",
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 40,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.cached_tokens": 32,
        "gen_ai.latency.e2e": pytest.approx(3.0),
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": pytest.approx(2.0),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(1.0),
        "gen_ai.latency.time_in_model_decode": pytest.approx(1.0),
        "gen_ai.latency.time_in_model_inference": pytest.approx(2.0),
    }
    spans = {name: (span.start - root.start, span.end - root.start) for name, span in stages.items()}
    expected = {"queue": (0, 1), "load_host": (1, 1.25), "prefill": (1, 2), "decode": (2, 3)}
    assert spans == {name: pytest.approx(times, abs=1e-3) for name, times in expected.items()}
    assert stages["load_host"].attributes == {"fenceline.num_tokens": 32}


def test_errors_and_clients_that_leave_are_told(collector: Collector) -> None:
    """The one has never begun, the other is of no HTTP request and a trace of its own."""
    traces, now = tracer(collector.url), time.perf_counter()
    never = entry(now - 1.0, origin("/generate"), first_token=0.0, last_token=0.0, completion_tokens=0)
    assert never.trace is not None
    never.trace.stages.clear()
    never.queue_time_s = None
    traces.ended(never, FinishReason(type="abort", message="too late", status_code=503), now)
    root, stages = collector.trace(PARENT[0])
    assert (root.status, stages) == ((2, "too late"), {})
    assert root.attributes["error.type"] == "503" and root.attributes["gen_ai.operation.name"] == "text_completion"
    traces.ended(entry(now - 4.0), FinishReason(type="abort"), now)
    spans = collector.wait(lambda spans: sum(span.name == "llm_request" for span in spans) == 2)
    [left] = [span for span in spans if span.name == "llm_request" and span.trace_id != PARENT[0]]
    assert (left.parent_id, left.status) == ("", (0, ""))
    assert left.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    traces.close()


async def test_the_manager_traces_requests_however_they_end(collector: Collector) -> None:
    """Two samples that finish, one whose client leaves, and one that runs when the engine dies."""
    bench = Bench(traces=TracesConfig(endpoint=collector.url, protocol="http/protobuf"))
    token = ORIGIN.set(origin("/v1/completions"))
    inputs = [GenerateInput(input_ids=[7, 8, 9], rid=rid, family="a") for rid in ("a", "a-1")]
    group = await bench.manager.submit_many(inputs)
    ORIGIN.reset(token)
    now = time.perf_counter()
    bench.manager.handle(StagesReport(rid="a", stages=[Stage("queue", now, now + 0.001)]))
    bench.manager.handle(StagesReport(rid="nobody", stages=[Stage("queue", now, now)]))
    for rid in ("a", "a-1"):
        bench.news(rid, [5], 1)
        bench.news(rid, [6], 2, FinishReason(type="length", length=2))
    assert len(await group.collect()) == 2
    leaves = await bench.manager.submit(GenerateInput(input_ids=[7], rid="leaves"))
    leaves.close()
    await bench.manager.submit(GenerateInput(input_ids=[7], rid="dies"))
    bench.manager.fail("it broke")
    bench.manager.shutdown()
    spans = collector.wait(lambda spans: sum(span.name == "llm_request" for span in spans) == 4)
    roots = {span.attributes["gen_ai.response.id"]: span for span in spans if span.name == "llm_request"}
    below = {rid: {each.name for each in spans if each.parent_id == root.span_id} for rid, root in roots.items()}
    computed = {"prefill", "decode"}
    assert below == {"a": {"queue", *computed}, "a-1": computed, "leaves": set(), "dies": set()}
    assert [roots[rid].parent_id for rid in ("a", "a-1", "dies")] == [PARENT[1], PARENT[1], ""]
    assert roots["a-1"].attributes["gen_ai.request.n"] == 2 and roots["leaves"].status == (0, "")
    assert roots["dies"].status == (2, "the engine has stopped: it broke")


def test_what_the_parent_does_not_sample_is_not_sent(collector: Collector) -> None:
    traces, now = tracer(collector.url), time.perf_counter()
    traces.ended(entry(now - 4.0, origin(flags="00")), FinishReason(type="stop"), now)
    traces.ended(entry(now - 4.0), FinishReason(type="stop"), now)
    spans = collector.wait(lambda spans: any(span.name == "llm_request" for span in spans))
    traces.close()
    assert PARENT[0] not in {span.trace_id for span in spans}


def test_traces_go_by_grpc_too(collector: Collector) -> None:
    """The collector's other door, behind which is the same service."""

    def export(request: service.ExportTraceServiceRequest, _: object) -> service.ExportTraceServiceResponse:
        collector.add(request)
        return service.ExportTraceServiceResponse()

    method = grpc.unary_unary_rpc_method_handler(
        export, service.ExportTraceServiceRequest.FromString, service.ExportTraceServiceResponse.SerializeToString
    )
    door = grpc.server(ThreadPoolExecutor(1))
    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    door.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": method}),))
    port = door.add_insecure_port("127.0.0.1:0")
    door.start()
    try:
        traces, now = tracer(f"http://127.0.0.1:{port}", "grpc"), time.perf_counter()
        traces.ended(entry(now - 4.0, origin()), FinishReason(type="stop"), now)
        root, _ = collector.trace(PARENT[0])
        assert root.name == "llm_request"
        traces.close()
    finally:
        door.stop(0)


def test_a_dead_collector_costs_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for it, and what is kept for it is bounded."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    url, told = f"http://127.0.0.1:{unused_port()}/v1/traces", threading.Event()

    def notice(record: logging.LogRecord) -> bool:
        if "does not answer" in record.getMessage():
            told.set()
        return True

    monkeypatch.setattr(tracing.logger, "filters", [*tracing.logger.filters, notice])
    with caplog.at_level(logging.INFO):
        traces, now = tracer(url), time.perf_counter()
        for _ in range(200):
            traces.ended(entry(now - 4.0), FinishReason(type="stop"), now)
        for state in ("a=b,a=forged", "x" * 9000):  # no client writes into the log
            parent = {b"traceparent": f"00-{PARENT[0]}-{PARENT[1]}-01".encode(), b"tracestate": state.encode()}
            traces.ended(entry(now - 4.0, TraceOrigin.of("/", parent)), FinishReason(type="stop"), now)
        assert told.wait(60)
        for _ in range(200):
            traces.ended(entry(now - 4.0), FinishReason(type="stop"), now)
        begin = time.monotonic()
        traces.close()
        assert time.monotonic() - begin < 10
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [f"The collector of traces at {url} does not answer: spans are dropped"]


def args(endpoint: str | None = None, enable_trace: bool = False) -> ServerArgs:
    return ServerArgs(model_path="demo", otlp_traces_endpoint=endpoint, enable_trace=enable_trace)


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [
        ("http://host:4317", None, ("http://host:4317", "grpc")),
        ("grpc://host:4317", None, ("http://host:4317", "grpc")),
        ("host:4317", None, ("http://host:4317", "grpc")),
        ("http://host:4318", None, ("http://host:4318/v1/traces", "http/protobuf")),
        ("https://host/a/v1/traces", None, ("https://host/a/v1/traces", "http/protobuf")),
        ("http://host:9000", "http/protobuf", ("http://host:9000/v1/traces", "http/protobuf")),
        ("http://host:4318", "grpc", ("http://host:4318", "grpc")),
    ],
)
def test_the_protocol_follows_from_url_or_environment(
    given: str, variable: str | None, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", variable)
    config = traces_config(args(given))
    assert config is not None and (config.endpoint, config.protocol) == expected


def test_enable_trace_is_sglangs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traces_config(args()) is None
    assert traces_config(args(enable_trace=True)) == TracesConfig(endpoint="http://localhost:4317", protocol="grpc")
    both = traces_config(args("http://host:4318", enable_trace=True))
    assert both is not None and both.endpoint == "http://host:4318/v1/traces"
    for wrong in ("unix:///x", "http://[::1", "http://host:99999"):
        with pytest.raises(ConfigError, match=f"endpoint {re.escape(wrong)}: give the URL of a collector"):
            traces_config(args(wrong))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL=http/json: use one of grpc, http/protobuf"):
        traces_config(args(enable_trace=True))


def test_without_the_packages_the_remedy_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(name)
        return found(name, package)

    monkeypatch.setattr("fenceline.config.traces.find_spec", without)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'fenceline\[otlp\]'$"):
        traces_config(args("http://host:4317"))
