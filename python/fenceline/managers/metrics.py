"""Prometheus metrics of one server: what the main process sees of requests and what the scheduler reports.

Names follow SGLang's with the prefix ``fenceline:``. Histograms are kept as plain lists, because they are
touched for every chunk of every stream, and turned into prometheus_client's shapes when scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from fenceline.managers.io_struct import CudaGraphState, InternalState, TokenOut
from fenceline.managers.request_table import RequestEntry

_TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
)
_ITL_BUCKETS = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
)
_E2E_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_PREFIX = "fenceline:"


class Histogram:
    """Cumulative-on-scrape buckets: an observation costs a bisection and two additions."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` (seconds) ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) pairs ending with +Inf."""
        total = 0
        result = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return result


class Metrics:
    """Counts requests and tokens. One registry per server: two servers in one process do not meet."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._state: InternalState | None = None
        self._ttft = Histogram(_TTFT_BUCKETS)
        self._itl = Histogram(_ITL_BUCKETS)
        self._e2e = Histogram(_E2E_BUCKETS)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._cached_tokens = 0
        self._num_requests = 0
        self._num_aborted = 0
        self.registry.register(self)

    def observe(self, entry: RequestEntry, token: TokenOut, now: float) -> None:
        """News of a request arrived at ``now`` (``time.perf_counter()``)."""
        count = len(token.output_ids)
        self._generation_tokens += count
        if entry.first_token == 0.0:
            entry.first_token = now
            self._prompt_tokens += token.prompt_tokens
            self._cached_tokens += token.cached_tokens
            self._ttft.observe(now - entry.created)
        elif count:
            self._itl.observe((now - entry.last_token) / count, count)
        entry.last_token = now
        reason = token.finish_reason
        if reason is not None:
            self._num_requests += 1
            self._num_aborted += reason.type == "abort"
            self._e2e.observe(now - entry.created)

    def abandoned(self, entry: RequestEntry) -> None:
        """The consumer of a request went away."""
        self._num_requests += 1
        self._num_aborted += 1

    def report(self, state: InternalState) -> None:
        """The scheduler's latest report."""
        self._state = state

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        yield from self._gauges()
        yield self._counter("prompt_tokens", "Prompt tokens of all requests.", self._prompt_tokens)
        yield self._counter(
            "generation_tokens", "Tokens generated for all requests.", self._generation_tokens
        )
        yield self._counter("cached_tokens", "Prompt tokens found in the prefix cache.", self._cached_tokens)
        yield self._counter("num_requests", "Requests that have ended.", self._num_requests)
        yield self._counter("num_aborted_requests", "Requests that ended by an abort.", self._num_aborted)
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token.", self._ttft)
        yield self._histogram("inter_token_latency_seconds", "Between tokens of one request.", self._itl)
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", self._e2e)

    def _gauges(self) -> Iterator[Metric]:
        state = self._state
        if state is None:
            return
        yield self._gauge("num_running_reqs", "Requests being decoded.", state.num_running_reqs)
        yield self._gauge("num_queue_reqs", "Requests waiting.", state.num_queue_reqs)
        yield self._gauge("num_used_tokens", "KV cache tokens held by requests.", state.num_used_tokens)
        yield self._gauge("max_total_num_tokens", "Size of the KV cache.", state.max_total_num_tokens)
        yield self._gauge("token_usage", "Share of the KV cache held by requests.", state.token_usage)
        yield self._gauge("cache_hit_rate", "Share of prompt tokens found cached.", state.cache_hit_rate)
        yield self._gauge("gen_throughput", "Generated tokens per second.", state.gen_throughput)
        yield self._gauge("new_token_ratio", "Share of the answers' room kept free.", state.new_token_ratio)
        yield self._counter("num_retractions", "Requests sent back to the queue.", state.num_retractions)
        if state.cuda_graphs is not None:
            yield from self._graphs(state.cuda_graphs)

    def _graphs(self, graphs: CudaGraphState) -> Iterator[Metric]:
        eligible, replays = graphs.eligible_steps, graphs.replays
        yield self._counter("cuda_graph_eligible_steps", "Decode steps while graphs are on.", eligible)
        yield self._counter("cuda_graph_replays", "Decode steps that were replays of a graph.", replays)
        text = "Decode steps that ran without a graph, by reason."
        yield self._counters("cuda_graph_fallbacks", text, graphs.fallbacks)
        text = "Decode steps before which something wrong had to be put right, by reason."
        yield self._counters("cuda_graph_repairs", text, graphs.repairs)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], float(value))
        return family

    def _counters(self, name: str, text: str, by_reason: Mapping[str, int]) -> Metric:
        """A counter for each reason; the reason "none" of value 0 shows the metric where there is none yet."""
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model_name", "reason"])
        for reason, value in (by_reason or {"none": 0}).items():
            family.add_metric([self._model_name, reason], float(value))
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], histogram.buckets(), histogram.sum)
        return family
