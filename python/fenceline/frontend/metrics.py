"""Prometheus metrics of one server: what the main process sees of requests and what the scheduler reports.

Names follow SGLang's with the prefix ``fenceline:``; those that SGLang has are shown with the prefix ``sglang:`` too
(--metrics-prefix), as copies made when scraped. Histograms are kept as plain lists, because they are
touched for every chunk of every stream, and turned into prometheus_client's shapes when scraped.
"""

from __future__ import annotations

import multiprocessing
import platform
import resource
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from fenceline.frontend.request_table import RequestEntry
from fenceline.frontend.request_types import RequestError
from fenceline.ipc.io_struct import CudaGraphState, HiCacheState, InternalState, TokenOut, TransferState
from fenceline.version import __version__

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_E2E_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LENGTH_BUCKETS = (1, *(2**power for power in range(4, 21)))  # up to a million tokens
_PREFIX = "fenceline:"
_SGLANG_PREFIX = "sglang:"
_MAX_REASONS = 100  # there are two dozen
# Our metrics that SGLang has, by its names (without the endings that come with a metric's kind).
_SGLANG_NAMES = {
    name: name
    for name in (
        "num_running_reqs", "num_queue_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage",
        "cache_hit_rate", "gen_throughput", "new_token_ratio", "prompt_tokens", "generation_tokens", "cached_tokens",
        "num_requests", "num_aborted_requests", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "e2e_request_latency_seconds", "queue_time_seconds", "hicache_host_used_tokens", "hicache_host_total_tokens",
        "prompt_tokens_histogram", "generation_tokens_histogram", "evicted_tokens", "load_back_tokens",
        "load_back_duration_seconds", "prefetched_tokens", "backuped_tokens",
    )
} | {"num_retractions": "num_retracted_requests"}  # fmt: skip


_LABELS = ("process", "pid")


def build_labels() -> Mapping[str, str]:
    """The versions of what answers."""
    try:
        torch = version("torch")  # without importing it
    except PackageNotFoundError:
        torch = ""
    return {"version": __version__, "python_version": platform.python_version(), "torch_version": torch}


def process_metrics() -> Iterator[Metric]:
    """The metrics of this process and its children, read now; processes that end meanwhile are left out."""
    memory = GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", labels=_LABELS)
    virtual = GaugeMetricFamily("process_virtual_memory_bytes", "Virtual memory.", labels=_LABELS)
    cpu = CounterMetricFamily("process_cpu_seconds", "CPU time of user and system.", labels=_LABELS)
    started = GaugeMetricFamily("process_start_time_seconds", "Unix time of the start in seconds.", labels=_LABELS)
    files = GaugeMetricFamily("process_open_fds", "Open file descriptors.", labels=_LABELS)
    most_files = GaugeMetricFamily("process_max_fds", "Most file descriptors that may be open.", labels=_LABELS)
    names = {child.pid: child.name for child in multiprocessing.active_children()}
    for pid, name in {psutil.Process().pid: "main", **names}.items():
        labels = (name, str(pid))
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                used, times = process.memory_info(), process.cpu_times()
                num_files, created = process.num_fds(), process.create_time()
            memory.add_metric(labels, used.rss)
            virtual.add_metric(labels, used.vms)
            cpu.add_metric(labels, times.user + times.system)
            started.add_metric(labels, created)
            files.add_metric(labels, num_files)
    # The children inherit the limit.
    most_files.add_metric(("main", str(psutil.Process().pid)), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from (memory, virtual, cpu, started, files, most_files)


class Histogram:
    """A histogram whose buckets are summed up when it is scraped: an observation is a bisection and two additions."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` (seconds or tokens) ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> tuple[float, int]:
        """The sum and the number of all observations."""
        return self.sum, sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) pairs ending with +Inf."""
        total = 0
        result = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            result.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return result


class Metrics:
    """Counts requests and tokens. One registry per server: two servers in one process do not share it."""

    def __init__(self, model_name: str, has_tiers: bool = False, prefix: str = "both", num_replicas: int = 1) -> None:
        """``has_tiers``: with HiCache, where cached tokens are counted by the tier in which they were found.
        ``prefix``: ``fenceline``, ``sglang`` or ``both``. With several replicas what a scheduler reports carries the
        label ``dp_rank``."""
        self.registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._has_tiers = has_tiers
        self._prefix = prefix
        self._states: list[InternalState | None] = [None] * num_replicas
        self._ttft = Histogram(_TTFT_BUCKETS)
        self._itl = Histogram(_ITL_BUCKETS)
        self._e2e = Histogram(_E2E_BUCKETS)
        self._queue_time = Histogram(_QUEUE_BUCKETS)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._cached_tokens = {"device": 0, "host": 0, "storage": 0}
        self._refused: dict[tuple[str, str], int] = {}  # by status and reason
        self._prompt_lengths = Histogram(_LENGTH_BUCKETS)
        self._generation_lengths = Histogram(_LENGTH_BUCKETS)
        self._finish_reasons = Counter({"stop": 0, "length": 0, "abort": 0})
        self._build = build_labels()
        self.registry.register(self)

    def latency(self) -> dict[str, tuple[float, int]]:
        """Sums in seconds and counts since the start: of the times to first tokens, and of those between tokens."""
        return {"ttft": self._ttft.total, "itl": self._itl.total}

    def observe(self, entry: RequestEntry, token: TokenOut, now: float) -> None:
        """Output of a request has arrived at ``now`` (``time.perf_counter()``)."""
        count = len(token.output_ids)
        self._generation_tokens += count
        if entry.first_token == 0.0:
            entry.first_token = now
            self._prompt_tokens += token.prompt_tokens
            self._count_cached(token)
            self._ttft.observe(now - entry.created)
            if entry.queue_time_s is not None:
                self._queue_time.observe(entry.queue_time_s)
        elif count:
            self._itl.observe((now - entry.last_token) / count, count)
        entry.last_token = now
        reason = token.finish_reason
        if reason is not None:
            self._finish_reasons[reason.type] += 1
            self._e2e.observe(now - entry.created)
            if reason.type != "abort":
                self._prompt_lengths.observe(token.prompt_tokens)
                self._generation_lengths.observe(token.completion_tokens)

    def _count_cached(self, token: TokenOut) -> None:
        details = token.cached_tokens_details
        if details is None:
            self._cached_tokens["device"] += token.cached_tokens
            return
        self._cached_tokens["device"] += details.device
        self._cached_tokens["host"] += details.host
        self._cached_tokens["storage"] += details.storage

    def abandoned(self) -> None:
        """The consumer of a request went away."""
        self._finish_reasons["abort"] += 1

    def refused(self, error: RequestError) -> None:
        """An HTTP request was answered with ``error``. Its code is the reason, or else its type."""
        pair = str(error.status), error.code or error.type.removesuffix("_error")
        if pair not in self._refused and len(self._refused) >= _MAX_REASONS:
            pair = "other", "other"
        self._refused[pair] = self._refused.get(pair, 0) + 1

    def report(self, state: InternalState, replica: int = 0) -> None:
        """The latest report of ``replica``'s scheduler."""
        self._states[replica] = state

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics():
            if self._prefix != "sglang":
                yield metric
            if self._prefix != "fenceline":
                yield from _as_sglang(metric)
        yield from process_metrics()

    def _metrics(self) -> Iterator[Metric]:
        yield from self._reported()
        yield self._counter("prompt_tokens", "Prompt tokens of all requests.", self._prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated for all requests.", self._generation_tokens)
        yield self._cached()
        reasons = self._finish_reasons
        yield self._counter("num_requests", "Requests that have ended.", reasons.total())
        yield self._counter("num_aborted_requests", "Requests that ended by an abort.", reasons["abort"])
        text = "Requests that have ended, by how."
        yield self._counters("finished_requests", text, "finish_reason", reasons)
        yield self._refusals()
        yield self._histogram("time_to_first_token_seconds", "From arrival to the first token.", self._ttft)
        yield self._histogram("inter_token_latency_seconds", "Between tokens of one request.", self._itl)
        yield self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", self._e2e)
        yield self._histogram("queue_time_seconds", "From arrival to the first step.", self._queue_time)
        text = "Tokens of the prompts of requests that have ended by themselves."
        yield self._histogram("prompt_tokens_histogram", text, self._prompt_lengths)
        text = "Tokens generated for each of these requests."
        yield self._histogram("generation_tokens_histogram", text, self._generation_lengths)
        text, versions = "The versions of what answers.", [(tuple(self._build.values()), 1)]
        yield self._family(GaugeMetricFamily, "build_info", text, versions, *self._build)

    def _reported(self) -> Iterator[Metric]:
        """The metrics that schedulers report, each once with the samples of all schedulers."""
        if len(self._states) == 1:
            if self._states[0] is not None:
                yield from self._gauges(self._states[0])
            return
        metrics: dict[str, Metric] = {}
        for replica, state in enumerate(self._states):
            for metric in () if state is None else self._gauges(state):
                samples = [
                    sample._replace(labels={**sample.labels, "dp_rank": str(replica)}) for sample in metric.samples
                ]
                if metric.name in metrics:
                    samples = metrics[metric.name].samples + samples
                metric.samples = samples
                metrics[metric.name] = metric
        yield from metrics.values()

    def _gauges(self, state: InternalState) -> Iterator[Metric]:
        yield self._gauge("num_running_reqs", "Requests being decoded.", state.num_running_reqs)
        yield self._gauge("num_queue_reqs", "Requests waiting.", state.num_queue_reqs)
        yield self._gauge("num_used_tokens", "KV cache tokens held by requests.", state.num_used_tokens)
        yield self._gauge(
            "kv_evictable_tokens", "KV cache tokens of prefixes that no request holds.", state.num_evictable_tokens
        )
        yield self._gauge("max_total_num_tokens", "Size of the KV cache.", state.max_total_num_tokens)
        yield self._gauge("token_usage", "Share of the KV cache held by requests.", state.token_usage)
        yield self._gauge("cache_hit_rate", "Share of prompt tokens found cached.", state.cache_hit_rate)
        yield self._gauge("gen_throughput", "Generated tokens per second.", state.gen_throughput)
        if state.avg_spec_accept_length is not None:
            what = "Tokens per decode step of a request, on average."
            yield self._gauge("spec_accept_length", what, state.avg_spec_accept_length)
        if state.spec_steps_by_depth is not None:
            what = "Decode steps by the number of tokens that the draft proposed one after the other."
            yield self._counters("spec_steps", what, "depth", state.spec_steps_by_depth)
        yield self._gauge(
            "new_token_ratio", "Share of the possible output for which memory is kept.", state.new_token_ratio
        )
        yield self._counter("num_retractions", "Requests sent back to the queue.", state.num_retractions)
        if state.cuda_graphs is not None:
            yield from self._graphs("", "Decode steps", state.cuda_graphs)
        if state.piecewise_cuda_graphs is not None:
            yield from self._graphs("prefill_", "Prefill steps", state.piecewise_cuda_graphs)
        if state.hicache is not None:
            yield from self._hicache(state.hicache)

    def _graphs(self, prefix: str, steps: str, graphs: CudaGraphState) -> Iterator[Metric]:
        name = f"{prefix}cuda_graph"
        text = f"{steps} that are meant for graphs."
        yield self._counter(f"{name}_eligible_steps", text, graphs.eligible_steps)
        yield self._counter(f"{name}_replays", f"{steps} that were replays of a graph.", graphs.replays)
        text = f"{steps} that ran without a graph, by reason."
        yield self._counters(f"{name}_fallbacks", text, "reason", graphs.fallbacks)
        text = f"{steps} before which inputs of the graph had to be written again, by reason."
        yield self._counters(f"{name}_repairs", text, "reason", graphs.repairs)

    def _refusals(self) -> Metric:
        text = "HTTP requests that were answered with an error, by status and reason."
        refused = self._refused or {("none", "none"): 0}
        return self._family(CounterMetricFamily, "num_refused_requests", text, refused.items(), "status", "reason")

    def _cached(self) -> Metric:
        """Prompt tokens found cached: SGLang's counter with its label, which is there only where there are tiers."""
        name, text = "cached_tokens", "Prompt tokens found in the prefix cache."
        if self._has_tiers:
            return self._counters(name, text, "cache_source", self._cached_tokens)
        return self._counter(name, text, self._cached_tokens["device"])

    def _hicache(self, state: HiCacheState) -> Iterator[Metric]:
        used, total = state.num_used_host_tokens, state.num_host_tokens
        yield self._gauge("hicache_host_used_tokens", "Tokens whose KV the host tier holds.", used)
        yield self._gauge("hicache_host_total_tokens", "Size of the host tier in tokens.", total)
        text, pages = "Pages of the prefix cache by tier.", [((name,), value) for name, value in state.pages.items()]
        yield self._family(GaugeMetricFamily, "hicache_pages", text, pages, "state")
        yield self._gauge("hicache_locked_nodes", "Nodes of the tree in use.", state.num_locked_nodes)
        text = "Tokens whose KV left a tier."
        yield self._counters("evicted_tokens", text, "cache_source", state.evicted_tokens)
        yield from self._transfers("load_back", "from host to device", state.load)
        yield from self._transfers("hicache_backup", "from device to host", state.store)
        yield from self._transfers("prefetched", "from storage to host", state.storage_read)
        yield from self._transfers("backuped", "from host to storage", state.storage_write)
        text = "Reads ahead from the storage, by how they ended."
        yield self._counters("hicache_prefetches", text, "outcome", state.prefetches)
        text = "Pages that were looked up in the storage and could not be found or read."
        yield self._counter("hicache_storage_misses", text, state.num_storage_misses)
        text = "Pages that could not be read from or written to the storage, by reason."
        yield self._counters("hicache_storage_errors", text, "reason", state.storage_errors)
        text = "Values derived from pages that had moved since, which were computed again, by reason."
        yield self._counters("hicache_recomputes", text, "reason", state.recomputes)

    def _transfers(self, name: str, way: str, transfers: TransferState) -> Iterator[Metric]:
        yield self._counter(f"{name}_tokens", f"Tokens whose KV was copied {way}.", transfers.num_tokens)
        yield self._counter(f"{name}_bytes", f"Bytes copied {way}.", transfers.num_bytes)
        family = SummaryMetricFamily(f"{_PREFIX}{name}_duration_seconds", f"Transfers {way}.", labels=["model_name"])
        family.add_metric([self._model_name], transfers.num_transfers, transfers.seconds)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, [((), value)])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, [((), value)])

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        """A counter for each value of ``label``; "none" of value 0 shows the metric where there is none yet."""
        of_labels = [((value_of_label,), value) for value_of_label, value in (values or {"none": 0}).items()]
        return self._family(CounterMetricFamily, name, text, of_labels, label)

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: Iterable[tuple[Sequence[str], float]],
        *labels: str,
    ) -> Metric:
        """A metric with a value for each combination of values of ``labels``."""
        family = kind(_PREFIX + name, text, labels=["model_name", *labels])
        for of_labels, value in values:
            family.add_metric([self._model_name, *of_labels], float(value))
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], histogram.buckets(), histogram.sum)
        return family


def _as_sglang(metric: Metric) -> Iterator[Metric]:
    """``metric`` under SGLang's name, if it has one."""
    name = _SGLANG_NAMES.get(metric.name.removeprefix(_PREFIX))
    if name is None:
        return
    copy = Metric(_SGLANG_PREFIX + name, metric.documentation, metric.type)
    copy.samples = [
        sample._replace(name=copy.name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    yield copy
