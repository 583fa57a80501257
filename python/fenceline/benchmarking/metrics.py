"""Computes the figures of a run from its replies. The names are SGLang's; every latency is in milliseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fenceline.benchmarking.load import LoadResult
from fenceline.benchmarking.records import Reply, RequestOutput
from fenceline.benchmarking.tokenizer import Tokenizer

_PEAK_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, median, standard deviation, percentiles (interpolated linearly) and maximum, in milliseconds."""

    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> Summary:
        """Summarise values in seconds. All figures are 0 if there are no values."""
        if not len(seconds):
            return cls()
        ms = np.asarray(seconds, dtype=np.float64) * 1000.0
        median, p90, p95, p99 = (float(v) for v in np.percentile(ms, [50, 90, 95, 99]))
        return cls(float(ms.mean()), median, float(ms.std()), p90, p95, p99, float(ms.max()))


@dataclass(frozen=True, slots=True)
class TurnMetrics:
    """The figures of one turn (counted from 1) in all conversations."""

    turn: int
    completed: int
    ttft: Summary


@dataclass(frozen=True, slots=True)
class BenchmarkMetrics:
    """The figures of one run. Counts are of successful requests, and each turn counts as a request. ``duration`` is in
    seconds. ``total_output_retokenized`` and ``total_cached`` are None if they are not known. ``longest_gap`` is over
    requests: of each the longest time between two arrivals. ``good`` is the number of requests that met every limit of
    --goodput, None without it. ``max_output_tokens_per_s`` is the largest number of tokens that arrived within one
    second, and ``max_concurrent_requests`` the largest number of requests in flight at the same time."""

    duration: float
    completed: int
    failed: int
    total_input: int
    total_cached: int | None
    total_output: int
    total_output_retokenized: int | None
    concurrency: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    e2e_latency: Summary
    ttft: Summary
    tpot: Summary
    itl: Summary
    longest_gap: Summary
    good: int | None = None
    turns: tuple[TurnMetrics, ...] = ()
    errors: tuple[tuple[str, int], ...] = ()

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def request_goodput(self) -> float | None:
        """Requests a second that met every limit."""
        return None if self.good is None else self.good / self.duration

    @property
    def good_fraction(self) -> float | None:
        """The share of all requests, failed ones included, that met every limit."""
        return None if self.good is None else self.good / max(1, self.completed + self.failed)

    @property
    def input_throughput(self) -> float:
        return self.total_input / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration

    @property
    def total_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration


def calculate_metrics(
    result: LoadResult, tokenizer: Tokenizer | None, limits: Mapping[str, float] | None = None
) -> BenchmarkMetrics:
    """Compute the figures of a run. With a tokenizer, the tokens of the output texts are also counted by it.
    ``limits``: those of --goodput, see :func:`is_good`."""
    good = [output for output in result.outputs if output.reply.success]
    replies = [output.reply for output in good]
    cached = [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]
    failures = Counter(output.reply.error for output in result.outputs if not output.reply.success)
    return BenchmarkMetrics(
        duration=result.duration,
        completed=len(good),
        failed=len(result.outputs) - len(good),
        total_input=sum(output.prompt_len for output in good),
        total_cached=sum(cached) if cached else None,
        total_output=sum(reply.output_len for reply in replies),
        total_output_retokenized=_retokenized(good, tokenizer),
        concurrency=sum(reply.latency for reply in replies) / result.duration,
        max_output_tokens_per_s=peak_token_rate(token_times(good), result.duration),
        max_concurrent_requests=peak_concurrency(good),
        e2e_latency=Summary.of_seconds([reply.latency for reply in replies]),
        ttft=Summary.of_seconds([reply.ttft for reply in replies]),
        tpot=Summary.of_seconds([reply.tpot for reply in replies if reply.output_len > 1]),
        itl=Summary.of_seconds([gap for reply in replies for gap in reply.itl]),
        longest_gap=Summary.of_seconds([reply.longest_gap for reply in replies if reply.itl]),
        good=sum(is_good(reply, limits) for reply in replies) if limits else None,
        turns=_turn_metrics(result.outputs),
        errors=tuple(failures.most_common()),
    )


def is_good(reply: Reply, limits: Mapping[str, float]) -> bool:
    """Whether a successful request met all ``limits``: milliseconds by the names ttft, tpot and e2el. A reply without
    tokens, as of embeddings, has begun when it ends."""
    first = reply.ttft if reply.output_len else reply.latency
    times = {"ttft": first, "tpot": reply.tpot, "e2el": reply.latency}
    return all(times[name] * 1000.0 <= limit for name, limit in limits.items())


def _retokenized(outputs: list[RequestOutput], tokenizer: Tokenizer | None) -> int | None:
    if tokenizer is None:
        return None
    return sum(len(tokenizer.encode(output.reply.text, add_special_tokens=False)) for output in outputs)


def _turn_metrics(outputs: list[RequestOutput]) -> tuple[TurnMetrics, ...]:
    """The figures of each turn; none if no conversation has more than one turn."""
    num_turns = 1 + max((output.turn for output in outputs), default=0)
    if num_turns == 1:
        return ()
    ttfts: list[list[float]] = [[] for _ in range(num_turns)]
    for output in outputs:
        if output.reply.success:
            ttfts[output.turn].append(output.reply.ttft)
    return tuple(TurnMetrics(i + 1, len(t), Summary.of_seconds(t)) for i, t in enumerate(ttfts))


def token_times(outputs: list[RequestOutput]) -> np.ndarray:
    """When the generated tokens arrived, sorted: float64 [number of tokens], in seconds of perf_counter."""
    parts = [np.zeros(0)]
    for output in outputs:
        reply = output.reply
        if reply.output_len == 0:
            continue
        first = reply.start_time + reply.ttft
        num_first = max(1, reply.output_len - len(reply.itl))  # the first chunk may contain several
        parts.append(np.full(num_first, first))
        parts.append(first + np.cumsum(np.asarray(reply.itl)))
    return np.sort(np.concatenate(parts))


def peak_token_rate(times: np.ndarray, duration: float) -> float:
    """The highest number of tokens per second within a window of one second, or of the whole run if that is shorter."""
    if not len(times):
        return 0.0
    window = min(_PEAK_WINDOW_S, duration)
    ends = np.searchsorted(times, times + window, side="left")
    return float((ends - np.arange(len(times))).max()) / window


def peak_concurrency(outputs: list[RequestOutput]) -> int:
    """The largest number of requests in flight at the same time. One that ends when another starts does not overlap."""
    changes = [(output.reply.start_time, 1) for output in outputs]
    changes += [(output.reply.start_time + output.reply.latency, -1) for output in outputs]
    level = peak = 0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak
