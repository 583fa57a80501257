"""bench_serving's arithmetic: SSE framing, token times, percentiles, peaks."""

from __future__ import annotations

import json
import time
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.benchmarking.client import Client, NativeRecorder, OpenAIRecorder, SseSplitter, TokenClock
from fenceline.benchmarking.determinism import compare
from fenceline.benchmarking.goodput import Trial, best_of, find_max_goodput
from fenceline.benchmarking.load import Conversation, LoadPlan, LoadResult, Ramp, arrival_times, run_load
from fenceline.benchmarking.metrics import (
    Summary,
    calculate_metrics,
    is_good,
    peak_concurrency,
    peak_token_rate,
    token_times,
)
from fenceline.benchmarking.records import BenchRequest, Call, Reply, RequestOutput, Turn

GAPS = st.lists(st.tuples(st.integers(0, 9), st.floats(0.001, 5.0)), min_size=1, max_size=30)


def native_event(num_tokens: int, *, text: str | None = None, ids: list[int] | None = None, **extra: object) -> bytes:
    meta = {"prompt_tokens": 7, "completion_tokens": num_tokens, "cached_tokens": 3, "finish_reason": None}
    event = {
        "text": "x" * num_tokens if text is None else text,
        "output_ids": list(range(num_tokens)) if ids is None else ids,
        "meta_info": meta | extra,
    }
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def openai_event(text: str, usage: dict[str, int] | None = None) -> bytes:
    event = {"choices": [{"text": text, "finish_reason": None}], "usage": usage}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def output(reply: Reply, index: int = 0, turn: int = 0) -> RequestOutput:
    return RequestOutput(index, turn, Call("hi", 4), 5, reply)


@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"").strip()), max_size=8), st.data())
def test_splitter_payloads_do_not_depend_on_the_cuts(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"data: " + p + b"\r\n\r\n: ping\n\n" for p in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    splitter = SseSplitter()
    got: list[bytes] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += splitter.feed(stream[begin:end])
    assert got == payloads


@given(GAPS)
def test_clock_gives_one_latency_per_token_and_loses_no_time(steps: list[tuple[int, float]]) -> None:
    clock = TokenClock(start=100.0)
    now, total, first, first_at, last_at = 100.0, 0, 0, 0.0, 0.0
    for new, gap in steps:
        now += gap
        total += new
        clock.advance(total, now)
        if new:
            last_at = now
            if first == 0:
                first, first_at = new, now
    assert clock.num_tokens == total
    assert len(clock.itl) == total - first
    assert sum(clock.itl) == pytest.approx(last_at - first_at if total else 0.0)
    assert clock.ttft == pytest.approx(first_at - 100.0 if total else 0.0)


def test_a_chunk_of_several_tokens_shares_its_gap() -> None:
    recorder = NativeRecorder(start=10.0)
    recorder.feed(native_event(1), 10.5)
    recorder.feed(native_event(5), 10.9)
    recorder.feed(native_event(6) + native_event(7), 11.1)  # two events in one read are one arrival
    recorder.feed(native_event(8, finish_reason={"type": "length"}) + b"data: [DONE]\n\n", 11.3)
    reply = recorder.finish(11.4)
    assert reply.success and reply.output_len == 8
    assert reply.ttft == pytest.approx(0.5)
    assert reply.itl == pytest.approx([0.1] * 4 + [0.1] * 2 + [0.2])
    assert reply.longest_gap == pytest.approx(0.4)  # what a reader waited, not its share
    assert reply.latency == pytest.approx(1.4)
    assert (reply.text, reply.output_ids) == ("x" * 8, list(range(8)))
    assert (reply.prompt_tokens, reply.cached_tokens) == (7, 3)


@pytest.mark.parametrize("whole_text", [False, True])
def test_an_incremental_native_stream_is_joined(whole_text: bool) -> None:
    recorder = NativeRecorder(start=0.0)
    for i in range(4):
        text = "".join(f"<{k}>" for k in range(i + 1)) if whole_text else f"<{i}>"
        recorder.feed(native_event(i + 1, text=text, ids=[40 + i]), 1.0 + i)
    recorder.feed(b"data: [DONE]\n\n", 5.0)
    reply = recorder.finish(5.0)
    assert reply.text == "<0><1><2><3>"
    assert reply.output_ids == [40, 41, 42, 43]
    assert reply.itl == pytest.approx([1.0] * 3)


def test_a_last_event_without_news_loses_nothing() -> None:
    for ids, text in (([5], "a"), ([], "")):  # everything so far, or increments
        recorder = NativeRecorder(start=0.0)
        recorder.feed(native_event(0, text="", ids=[]), 0.5)
        recorder.feed(native_event(1, text="a", ids=[5]), 1.0)
        recorder.feed(native_event(1, text=text, ids=ids) + b"data: [DONE]\n\n", 2.0)
        reply = recorder.finish(2.0)
        assert (reply.text, reply.output_ids, reply.ttft) == ("a", [5], 1.0)


def test_an_increment_that_repeats_is_no_whole_text() -> None:
    recorder = NativeRecorder(start=0.0)
    for i in range(3):
        recorder.feed(native_event(i + 1, text=" a", ids=[5]), 1.0 + i)
    recorder.feed(b"data: [DONE]\n\n", 5.0)
    assert recorder.finish(5.0).text == " a a a"


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (b"", "ended before"),
        (b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n', "out of memory"),
        (native_event(3, finish_reason={"type": "abort", "message": "gone"}) + b"data: [DONE]\n\n", "gone"),
        (b"data: [1]\n\ndata: [DONE]\n\n", "unexpected"),
    ],
)
def test_a_broken_native_stream_is_a_failure(last: bytes, reason: str) -> None:
    recorder = NativeRecorder(start=0.0)
    for i in range(3):
        recorder.feed(native_event(i + 1), 1.0 + i)
    recorder.feed(last, 9.0)
    reply = recorder.finish(9.0)
    assert not reply.success
    assert reason in reply.error


def test_openai_counts_come_from_usage_in_chunks() -> None:
    recorder = OpenAIRecorder("completions", start=0.0)
    recorder.feed(openai_event("ab", {"completion_tokens": 2, "prompt_tokens": 9}), 1.0)
    recorder.feed(openai_event("cdef", {"completion_tokens": 6, "prompt_tokens": 9}), 3.0)
    recorder.feed(b"data: [DONE]\n\n", 3.5)
    reply = recorder.finish(3.5)
    assert (reply.output_len, reply.prompt_tokens, reply.text) == (6, 9, "abcdef")
    assert reply.itl == pytest.approx([0.5] * 4)
    assert reply.longest_gap == pytest.approx(2.0)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(0, 3))
def test_openai_total_is_shared_over_chunks_without_counts(lens: list[int], extra: int) -> None:
    recorder = OpenAIRecorder("chat", start=0.0)
    total = sum(lens) + extra
    for i, length in enumerate(lens):
        delta = {"choices": [{"delta": {"content": "y" * length}}]}
        recorder.feed(b"data: " + json.dumps(delta).encode() + b"\n\n", 1.0 + i)
    usage = {"choices": [], "usage": {"completion_tokens": total}}
    recorder.feed(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n", 99.0)
    reply = recorder.finish(99.0)
    assert reply.success and reply.output_len == total
    assert reply.ttft == pytest.approx(1.0)
    assert sum(reply.itl) == pytest.approx(len(lens) - 1.0)
    assert reply.longest_gap == (1.0 if len(lens) > 1 else 0.0)
    assert len(reply.itl) <= total - 1 or len(lens) == 1
    if extra == 0:  # one token per character: exact
        assert reply.itl == pytest.approx([1.0 / n for n in lens[1:] for _ in range(n)])


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=60))
def test_percentiles_interpolate_between_sorted_values(values: list[float]) -> None:
    ms = sorted(v * 1000 for v in values)

    def expected(percent: float) -> float:
        place = percent / 100 * (len(ms) - 1)
        low = int(place)
        high = min(low + 1, len(ms) - 1)
        return ms[low] + (ms[high] - ms[low]) * (place - low)

    got = Summary.of_seconds(values)
    assert [got.median, got.p90, got.p95, got.p99] == pytest.approx([expected(p) for p in (50, 90, 95, 99)])
    assert got.max == pytest.approx(ms[-1])
    assert got.mean == pytest.approx(sum(ms) / len(ms))
    assert Summary.of_seconds([]) == Summary()


def test_metrics_of_a_known_run() -> None:
    times = {"start_time": 0.0, "latency": 2.0, "ttft": 1.0}
    one = Reply(True, text="a b c", output_len=3, itl=[0.5, 0.5], longest_gap=0.5, **times)  # type: ignore[arg-type]
    two = Reply(True, text="a", output_len=1, cached_tokens=4, start_time=1.0, latency=1.0, ttft=1.0)
    bad = Reply(False, error="HTTP 500", start_time=1.0)
    result = LoadResult([output(one), output(two, 1), output(bad, 2), output(bad, 3)], 0.0, 4.0)
    metrics = calculate_metrics(result, tokenizer=None)
    assert (metrics.completed, metrics.failed, metrics.errors) == (2, 2, (("HTTP 500", 2),))
    assert (metrics.total_input, metrics.total_output, metrics.total_cached) == (10, 4, 4)
    assert metrics.request_throughput == 0.5
    assert (metrics.input_throughput, metrics.output_throughput, metrics.total_throughput) == (2.5, 1.0, 3.5)
    assert metrics.tpot.mean == pytest.approx(500.0)  # (2 - 1) / (3 - 1); a single token has none
    assert metrics.ttft.mean == pytest.approx(1000.0)
    assert metrics.itl.max == pytest.approx(500.0)
    assert metrics.longest_gap.median == pytest.approx(500.0)  # a request of one token has none
    assert metrics.good is None and metrics.request_goodput is None
    assert metrics.e2e_latency.median == pytest.approx(1500.0)
    assert metrics.concurrency == pytest.approx(0.75)
    assert metrics.max_concurrent_requests == 2
    assert metrics.max_output_tokens_per_s == 3.0  # 1.5, 2.0 and 2.0
    assert metrics.turns == ()


def test_goodput_counts_who_met_every_limit_of_all_that_were_sent() -> None:
    def reply(ttft: float, tpot: float, num: int = 11) -> RequestOutput:
        return output(Reply(True, output_len=num, ttft=ttft, latency=ttft + tpot * (num - 1)))

    outputs = [reply(0.5, 0.025), reply(0.6, 0.01), reply(0.1, 0.03), reply(0.2, 0.0, num=1), output(Reply(False))]
    result = LoadResult(outputs, 0.0, 4.0)

    def good(**limits: float) -> int | None:
        return calculate_metrics(result, None, limits).good

    assert good(ttft=500.0, tpot=26.0) == 2  # a limit may be reached, and one token has no TPOT to miss
    assert (good(ttft=600.0), good(tpot=26.0), good(e2el=400.0), good(e2el=1.0)) == (4, 3, 2, 0)
    assert not is_good(Reply(True, latency=0.6), {"ttft": 500.0})  # no token came in time
    metrics = calculate_metrics(result, None, {"ttft": 500.0})
    assert (metrics.request_goodput, metrics.good_fraction) == (3 / 4.0, 3 / 5)


@pytest.mark.parametrize(("capacity", "limit"), [(20.0, 13.0), (20.0, 19.0), (20.0, 31.0), (20.0, 0.3)])
async def test_the_search_closes_in_on_the_highest_rate(capacity: float, limit: float) -> None:
    probed: list[tuple[float, int]] = []

    async def probe(rate: float, seed: int) -> Trial:
        probed.append((rate, seed))
        return Trial(rate, seed, min(rate, capacity), 0.0, 1.0 if rate <= limit else 0.98)

    trials = await find_max_goodput(probe, 0.99, seed=7)
    best = best_of(trials, 0.99)
    assert probed[0][0] == float("inf") and [seed for _, seed in probed] == list(range(7, 7 + len(probed)))
    assert len(probed) <= 7
    if limit < capacity / 20:
        assert best is None
    else:
        assert best is not None and 0.95 * limit <= best.request_rate <= limit


async def test_the_search_ends_where_no_rate_is_too_high_or_nothing_is_answered() -> None:
    for throughput, fraction in ((20.0, 1.0), (0.0, 0.0)):

        async def probe(rate: float, seed: int) -> Trial:
            return Trial(rate, seed, throughput, 0.0, fraction)  # noqa: B023

        assert len(await find_max_goodput(probe, 0.99, seed=1)) == 1


def test_ttft_by_turn() -> None:
    replies = [Reply(True, output_len=1, ttft=t, latency=t) for t in (1.0, 0.1, 3.0, 0.3)]
    outputs = [output(reply, index=i // 2, turn=i % 2) for i, reply in enumerate(replies)]
    turns = calculate_metrics(LoadResult(outputs, 0.0, 1.0), tokenizer=None).turns
    assert [t.turn for t in turns] == [1, 2]
    assert [t.ttft.mean for t in turns] == pytest.approx([2000.0, 200.0])
    assert [t.completed for t in turns] == [2, 2]


@given(st.lists(st.floats(0.0, 6.0), max_size=40))
def test_peak_rate_is_the_fullest_second(times: list[float]) -> None:
    array = np.sort(np.asarray(times))
    expected = max((sum(1 for t in times if begin <= t < begin + 1.0) for begin in times), default=0)
    assert peak_token_rate(array, duration=6.0) == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), max_size=20))
def test_peak_concurrency_counts_overlaps(spans: list[tuple[int, int]]) -> None:
    outputs = [output(Reply(True, start_time=float(a), latency=float(n))) for a, n in spans]
    expected = max((sum(1 for a, n in spans if a <= t < a + n) for t in range(31)), default=0)
    assert peak_concurrency(outputs) == expected


def test_token_times_place_every_token() -> None:
    reply = Reply(True, output_len=5, start_time=10.0, ttft=1.0, latency=4.0, itl=[0.5, 0.5])
    assert token_times([output(reply)]).tolist() == [11.0, 11.0, 11.0, 11.5, 12.0]


def test_arrivals_are_poisson_seeded_and_start_at_once() -> None:
    times = arrival_times(20_000, LoadPlan(10.0), np.random.default_rng(5))
    gaps = np.diff(times)
    assert times[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.05)  # an exponential's deviation is its mean
    assert (times == arrival_times(20_000, LoadPlan(10.0), np.random.default_rng(5))).all()
    assert (times[1:] == np.random.default_rng(5).exponential(0.1, 20_000).cumsum()[:-1]).all()
    assert (arrival_times(3, LoadPlan(), np.random.default_rng(5)) == 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 4.0, float("inf")])
def test_burstiness_changes_the_spread_and_not_the_rate(burstiness: float) -> None:
    gaps = np.diff(arrival_times(20_000, LoadPlan(10.0, burstiness), np.random.default_rng(5)))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1 / burstiness**0.5, rel=0.05, abs=1e-12)  # a gamma's coefficient of variation


def test_a_ramp_reaches_its_end_by_steps_or_by_ratios() -> None:
    def rates(strategy: str) -> list[float]:
        plan = LoadPlan(burstiness=float("inf"), ramp=Ramp(strategy, 2.0, 32.0))
        return list(1 / np.diff(arrival_times(6, plan, np.random.default_rng(5))))

    assert rates("linear") == pytest.approx([2, 8, 14, 20, 26])
    assert rates("exponential") == pytest.approx([2 * 16 ** (i / 5) for i in range(5)])
    spread = arrival_times(9, LoadPlan(ramp=Ramp("linear", 2.0, 32.0)), np.random.default_rng(5))
    assert len(set(np.diff(spread))) == 8 and (np.diff(spread) > 0).all()


def test_compare_names_the_first_difference() -> None:
    run = output(Reply(True, text="abcd", output_ids=[1, 2, 3, 4]), index=6, turn=1)
    assert compare(run, Reply(True, text="abcd", output_ids=[1, 2, 3, 4])) is None
    found = compare(run, Reply(True, text="abXd", output_ids=[1, 2, 9, 4]))
    assert found is not None
    assert (found.index, found.turn, found.unit, found.position) == (6, 1, "token", 2)
    assert (found.in_run, found.in_replay) == ("[3, 4]", "[9, 4]")
    shorter = compare(run, Reply(True, text="abc"))  # no ids: text decides
    assert shorter is not None
    assert (shorter.unit, shorter.position, shorter.in_replay) == ("character", 3, "(ended after 3)")


async def test_requests_are_not_sent_before_their_arrival() -> None:
    sent: list[float] = []

    class Stub:
        async def send(self, call: Call) -> Reply:
            sent.append(time.perf_counter())
            return Reply(True)

    requests = [BenchRequest((Turn("hi", 1, 1),))] * 12
    plan = LoadPlan(request_rate=200.0, seed=3)
    load = await run_load(cast(Client, Stub()), requests, plan, lambda: Conversation("plain"))
    arrivals = arrival_times(12, plan, np.random.default_rng([3, 1]))
    assert arrivals[-1] > 0.02
    # Lateness is the machine's business, earliness would be a fault (the event loop's clock ticks in ms).
    assert all(at - load.start_time > due - 0.002 for at, due in zip(sent, arrivals, strict=True))
