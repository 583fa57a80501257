"""The scheduler's outcomes: every request gets exactly its own tokens, and all memory comes back."""

from __future__ import annotations

import dataclasses
import logging
import tracemalloc
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Answer, Driver, assert_right, capacity, expected_output, make_driver, request
from token_worker import TokenResult, TokenWorker

from fenceline.ipc.io_struct import (
    AbortReq,
    CancelFlushReq,
    ContinueGenerationReq,
    ControlReply,
    FinishReason,
    FlushCacheReq,
    GetInternalStateReq,
    Message,
    PauseGenerationReq,
    ShutdownReq,
    TickReq,
    TokenizedGenerateReq,
    TokenPairs,
    decode,
    encode,
)
from fenceline.model_executor.step import StepBatch
from fenceline.scheduler.schedule_policy import order_waiting


def test_one_request() -> None:
    driver = make_driver()
    req = request("a", [5, 6, 7], max_new_tokens=9, ignore_eos=True)
    driver.send(req)
    driver.run()
    assert_right(driver, req)
    assert driver.answers["a"].finish.length == 9


def test_stops_at_eos_and_stop_token_and_drops_the_next() -> None:
    driver = make_driver()
    free = request("free", [1, 2, 3], max_new_tokens=40, ignore_eos=True)
    driver.send(free)
    driver.run()
    stop = driver.answers["free"].output_ids[10]
    first = driver.answers["free"].output_ids.index(stop)
    driver.send(request("stop", [1, 2, 3], max_new_tokens=40, ignore_eos=True, stop_token_ids=(stop,)))
    driver.run()
    answer = driver.answers["stop"]
    assert answer.output_ids == driver.answers["free"].output_ids[: first + 1]
    assert answer.finish.type == "stop" and answer.finish.matched == stop


def test_second_request_reuses_the_prefix() -> None:
    driver = make_driver(page_size=4)
    prompt = list(range(20, 60))
    driver.send(request("a", prompt, max_new_tokens=5))
    driver.run()
    driver.send(request("b", [*prompt, 1, 2], max_new_tokens=5))
    driver.run()
    assert driver.answers["a"].last.cached_tokens == 0
    assert driver.answers["b"].last.cached_tokens == 40
    assert_right(driver, request("b", [*prompt, 1, 2], max_new_tokens=5))


def test_whole_prompt_cached_still_computes_one_token() -> None:
    driver = make_driver(page_size=4)
    prompt = list(range(20, 40))
    for rid in ("a", "b"):
        driver.send(request(rid, prompt, max_new_tokens=3))
        driver.run()
    assert driver.answers["b"].last.cached_tokens == 16
    assert driver.answers["a"].output_ids == driver.answers["b"].output_ids


def test_disabled_radix_cache_reuses_nothing() -> None:
    driver = make_driver(disable_radix_cache=True)
    reqs = [request(rid, list(range(20, 60)), max_new_tokens=5) for rid in "ab"]
    for req in reqs:
        driver.send(req)
        driver.run()
    assert driver.answers["b"].last.cached_tokens == 0
    assert_right(driver, *reqs)
    assert driver.worker.pages.num_leased == 0


def test_same_prompt_at_once_shares_pages_afterwards() -> None:
    """Requests that brought the same tokens at the same time move onto one copy."""
    driver = make_driver(num_pages=200, page_size=4, num_rows=8, chunked_prefill_size=-1)
    prompt = list(range(1, 41))
    reqs = [request(f"r{i}", [*prompt, 100 + i], max_new_tokens=12, ignore_eos=True) for i in range(6)]
    driver.send(*reqs)
    for _ in range(3):
        driver.step()
    tree, pages = driver.scheduler.memory.tree, driver.worker.pages
    assert tree.num_locked_pages >= 10
    # 10 shared pages once, and at most 7 pages of its own for each request's tail and output.
    assert pages.num_leased <= 10 + 6 * 7
    driver.run()
    assert_right(driver, *reqs)


def test_namespaces_share_no_page_and_find_their_own() -> None:
    driver = make_driver(num_pages=200, page_size=4, chunked_prefill_size=-1)
    prompt = list(range(20, 60))
    for index, (key, cached) in enumerate([("", 0), ("a", 0), ("b", 0), ("a", 40), ("", 40), ("b", 40), ("c", 0)]):
        req = request(f"r{index}", [*prompt, 1, 2], extra_key=key, max_new_tokens=5)
        driver.send(req)
        driver.run()
        assert driver.answers[req.rid].last.cached_tokens == cached, (index, key)
        assert_right(driver, req)


def test_twins_of_different_namespaces_stay_on_their_own_pages() -> None:
    """A request is moved onto the pages of one that brought the same tokens, but only within its namespace."""
    driver = make_driver(num_pages=200, page_size=4, num_rows=8, chunked_prefill_size=-1)
    prompt = list(range(1, 41))
    reqs = [
        request(f"{key}{i}", [*prompt, 100 + i], extra_key=key, max_new_tokens=12, ignore_eos=True)
        for i in range(2)
        for key in ("a", "b", "")
    ]
    driver.send(*reqs)
    for _ in range(4):
        driver.step()
    pages = {req.rid: req.pages[:10].tolist() for req in driver.scheduler.reqs.values()}
    for key in ("a", "b", ""):
        assert pages[f"{key}0"] == pages[f"{key}1"]
    assert len({page for columns in pages.values() for page in columns}) == 30
    driver.run()
    assert_right(driver, *reqs)


def test_longest_prefix_first_knows_namespaces() -> None:
    """Requests that share a prefix go one after the other, so that the later find it; others need not wait."""
    for keys, num_first in (("aa", 1), ("ab", 2)):
        driver = make_driver(num_pages=200, page_size=4, chunked_prefill_size=-1, schedule_policy="lpm")
        prompt = list(range(1, 41))
        driver.send(*(request(f"r{i}", [*prompt, 100 + i], extra_key=key) for i, key in enumerate(keys)))
        driver.send(request("other", [200] * 4))
        driver.scheduler.ingest(driver.drain(False))
        order = order_waiting(
            driver.scheduler.waiting, "lpm", driver.scheduler.memory.match, driver.scheduler.planner.shuffler
        )
        assert [req.rid for req in order].index("other") == num_first
        driver.run()


class _CountedTokens(np.ndarray):
    """Token ids that count how many of them are copied to be compared."""

    num_copied = 0

    def tobytes(self, *arguments: object) -> bytes:
        _CountedTokens.num_copied += self.size
        return super().tobytes(*arguments)


def test_the_order_of_a_shared_prefix_does_not_cost_its_length() -> None:
    driver = make_driver(num_pages=400, page_size=4, chunked_prefill_size=-1, schedule_policy="lpm")
    prompt = [index % 250 + 1 for index in range(160)]
    driver.send(request("first", prompt))
    driver.run()
    driver.send(*(request(f"r{i}", [*prompt, *[i % 2 + 1] * 40, i + 1], max_new_tokens=2) for i in range(20)))
    scheduler = driver.scheduler
    scheduler.ingest(driver.drain(False))
    for req in scheduler.waiting:
        req.prompt_ids = req.prompt_ids.view(_CountedTokens)
    order = order_waiting(scheduler.waiting, "lpm", scheduler.memory.match, scheduler.planner.shuffler)
    assert [req.rid for req in order[:2]] == ["r0", "r1"]
    assert sorted(req.rid for req in order) == sorted(req.rid for req in scheduler.waiting)
    assert _CountedTokens.num_copied <= 20 * 32
    driver.run()


@pytest.mark.parametrize("disable_overlap_schedule", [False, True])
def test_chunked_prefill_interleaves_with_nothing_lost(disable_overlap_schedule: bool) -> None:
    driver = make_driver(
        num_pages=128, page_size=4, chunked_prefill_size=8, disable_overlap_schedule=disable_overlap_schedule
    )
    reqs = [request(f"r{i}", [i + 1] * (13 + 17 * i), max_new_tokens=6, ignore_eos=True) for i in range(4)]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)


def test_a_prompt_of_many_steps_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver(chunked_prefill_size=8)
    driver.send(request("long", list(range(1, 91)), max_new_tokens=2))
    with caplog.at_level(logging.INFO):
        driver.run()
        driver.send(request("short", [*range(1, 41), 7], max_new_tokens=2))
        driver.run()
    lines = [line for line in caplog.messages if line.startswith("Prefill batch")]
    assert [line.partition(", token")[0] for line in lines] == [
        "Prefill batch, #new-seq: 1, #new-token: 90, #cached-token: 0",
        "Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 40",
    ]


def test_debug_follows_each_request_step_and_control_message(caplog: pytest.LogCaptureFixture) -> None:
    driver = make_driver()
    with caplog.at_level(logging.DEBUG):
        driver.send(request("r", [1, 2, 3], max_new_tokens=2, ignore_eos=True), FlushCacheReq(id="f", wait=True))
        driver.run()
    assert [line for line in caplog.messages if not line.startswith("Prefill")] == [
        "Request r: 3 tokens, at most 2 new ones",
        "Control message: FlushCacheReq",
        "Step 1: prefill of 1 requests",
        "Step 2: decode of 1 requests",
        "Request r leaves (length): 3 tokens, 0 of them cached, and 2 new ones, after 0 retractions",
    ]


def test_retraction_changes_no_token() -> None:
    """A pool far too small for all: requests are retracted, resume, and answer the same."""
    driver = make_driver(num_pages=24, page_size=4, num_rows=8, schedule_conservativeness=0.05)
    reqs = [request(f"r{i}", [i + 1, i + 2, i + 3], max_new_tokens=50, ignore_eos=True) for i in range(8)]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    assert driver.scheduler.stats.num_retractions > 0
    assert any(driver.answers[req.rid].last.num_retractions for req in reqs)


def test_abort_waiting_running_and_half_way() -> None:
    driver = make_driver(num_pages=64, page_size=4, num_rows=2, chunked_prefill_size=8)
    reqs = [request(f"r{i}", [i + 1] * 40, max_new_tokens=30, ignore_eos=True) for i in range(4)]
    driver.send(*reqs)
    driver.step()
    driver.step()
    assert driver.scheduler.population.chunked is not None
    driver.send(AbortReq(rid="r3"), AbortReq(rid=driver.scheduler.population.chunked.rid), AbortReq(rid="unknown"))
    for _ in range(9):
        driver.step()
    driver.send(AbortReq(rid="r1"))
    driver.run()
    assert {driver.answers[r].finish.type for r in ("r0", "r1", "r3")} == {"abort"}
    assert_right(driver, reqs[2])


def test_detokenizer_stop_is_silent() -> None:
    driver = make_driver()
    driver.send(request("a", [1, 2], max_new_tokens=100, ignore_eos=True))
    for _ in range(5):
        driver.step()
    driver.send(AbortReq(rid="a", silent=True))
    driver.run()
    assert driver.answers["a"].finish is None
    assert driver.scheduler.stats.num_aborts == 0


def test_row_is_reused_while_its_last_step_is_in_flight() -> None:
    """F13's shape: one row, its owner ends while a step that writes it is in flight, the next one gets it."""
    driver = make_driver(num_pages=64, page_size=1, num_rows=1)
    stop = expected_output(request("x", [9, 9], max_new_tokens=3, ignore_eos=True), 999)[2]
    reqs = [request(f"r{i}", [9, 9], max_new_tokens=30, ignore_eos=True, stop_token_ids=(stop,)) for i in range(5)]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_and_continue(mode: str) -> None:
    driver = make_driver()
    reqs = [request(f"r{i}", [i + 1, 5], max_new_tokens=20, ignore_eos=True) for i in range(3)]
    driver.send(*reqs)
    for _ in range(6):
        driver.step()
    driver.send(PauseGenerationReq(id="p", mode=mode))
    for _ in range(4):
        driver.step()
    steps = driver.worker.num_steps
    driver.send(GetInternalStateReq(id="s"))
    driver.step()
    assert driver.worker.num_steps == steps, "a paused scheduler launches nothing"
    state = next(r for r in driver.replies if isinstance(r, ControlReply) and r.id == "s").state
    assert state.paused
    assert state.num_running_reqs == {"abort": 0, "retract": 0, "in_place": 3}[mode]
    driver.send(ContinueGenerationReq(id="c"))
    driver.run()
    if mode == "abort":
        assert all(driver.answers[req.rid].finish.type == "abort" for req in reqs)
    else:
        assert_right(driver, *reqs)


def test_flush_only_when_idle() -> None:
    driver = make_driver()
    driver.send(request("a", list(range(30)), max_new_tokens=4))
    driver.step()
    driver.send(FlushCacheReq(id="busy"))
    driver.run()
    driver.send(FlushCacheReq(id="idle"))
    driver.step()
    replies = {r.id: r.success for r in driver.replies if isinstance(r, ControlReply)}
    assert replies == {"busy": False, "idle": True}
    assert driver.worker.pages.num_leased == 0


def test_a_flush_that_waits_happens_once_no_request_is_left() -> None:
    driver = make_driver()
    driver.send(request("a", list(range(30)), max_new_tokens=4), request("b", [3], max_new_tokens=9))
    driver.step()
    driver.send(FlushCacheReq(id="waits", wait=True), FlushCacheReq(id="gives up", wait=True))
    driver.step()
    assert driver.scheduler.reqs and not replies(driver)
    driver.send(CancelFlushReq(id="gives up"), CancelFlushReq(id="unknown"))
    driver.step()
    assert replies(driver) == {"gives up": False}
    driver.run()
    assert replies(driver) == {"gives up": False, "waits": True}
    assert driver.worker.pages.num_leased == 0
    driver.send(CancelFlushReq(id="waits"), FlushCacheReq(id="idle", wait=True))
    driver.step()
    assert replies(driver) == {"gives up": False, "waits": True, "idle": True}


def replies(driver: Driver) -> dict[str, bool]:
    return {reply.id: reply.success for reply in driver.replies if isinstance(reply, ControlReply)}


def test_a_flush_that_waits_is_not_kept_from_it_by_a_stop_string() -> None:
    driver = make_driver()
    driver.send(request("a", [3], max_new_tokens=40, ignore_eos=True))
    driver.step()
    driver.send(FlushCacheReq(id="waits", wait=True))
    driver.step()
    driver.send(AbortReq(rid="a", silent=True))
    driver.run()
    assert replies(driver) == {"waits": True}


def test_a_flush_is_cancelled_as_the_last_request_is_aborted() -> None:
    """Its prefix is locked until it is released: what lets go of the flush must not meet the lock."""
    driver = make_driver()
    driver.send(request("a", list(range(30)), max_new_tokens=40, ignore_eos=True))
    driver.step()
    driver.send(FlushCacheReq(id="waits", wait=True))
    driver.step()
    driver.send(AbortReq(rid="a"), CancelFlushReq(id="waits"))
    driver.run()
    assert replies(driver) == {"waits": True}
    assert driver.worker.pages.num_leased == 0


def test_requests_that_wait_or_run_too_long_are_ended() -> None:
    """By the clock in the inbox alone, from the first tick on that finds them so."""
    driver = make_driver(num_rows=1, req_waiting_timeout=10.0, req_running_timeout=20.0)
    for rid in ("runs", "waits"):
        driver.send(request(rid, [5, 6], max_new_tokens=200, ignore_eos=True))

    def tick(now: float) -> list[str]:
        driver.send(TickReq(now=now))
        driver.step()
        return sorted(driver.scheduler.reqs)

    driver.step()
    assert tick(1000.0) == tick(1010.0) == ["runs", "waits"]
    driver.send(PauseGenerationReq(id="p", mode="in_place"))
    assert tick(1500.0) == ["runs", "waits"]
    driver.send(ContinueGenerationReq(id="c"))
    assert tick(1505.0) == tick(1515.0) == ["runs", "waits"]
    assert tick(1515.1) == ["runs"]
    assert driver.answers["waits"].finish == FinishReason(
        type="abort", message="still waiting in the queue after 10 s (--req-waiting-timeout)", status_code=503
    )
    assert tick(1525.0) == ["runs"]
    assert tick(1525.1) == []
    assert driver.answers["runs"].finish.status_code == 503
    assert "--req-running-timeout" in driver.answers["runs"].finish.message
    assert driver.answers["runs"].output_ids
    late = request("late", [5, 6], max_new_tokens=3, ignore_eos=True)
    driver.send(late, TickReq(now=9999.0))
    driver.run()
    assert_right(driver, late)


def test_who_comes_with_many_ticks_may_be_scheduled_first() -> None:
    driver = make_driver(req_waiting_timeout=1.0)
    req = request("a", [5, 6], max_new_tokens=3, ignore_eos=True)
    driver.send(req, TickReq(now=1.0), TickReq(now=99.0))
    driver.run()
    assert_right(driver, req)


def test_the_time_of_a_request_begins_with_a_tick_after_it() -> None:
    """Not with one that came just before it and is taken in with it, nor with one before a short pause."""
    driver = make_driver(num_rows=1, req_waiting_timeout=10.0)
    driver.send(request("runs", [5, 6], max_new_tokens=200, ignore_eos=True))
    driver.step()

    def left_after(*messages: Message) -> list[str]:
        driver.send(*messages)
        driver.step()
        return sorted(driver.scheduler.reqs)

    late = request("late", [5, 6], max_new_tokens=3, ignore_eos=True)
    assert left_after(TickReq(now=1.0), late) == ["late", "runs"]
    assert left_after(TickReq(now=2.0)) == left_after(TickReq(now=12.0)) == ["late", "runs"]
    pause = PauseGenerationReq(id="p", mode="in_place")
    assert left_after(pause, ContinueGenerationReq(id="c")) == ["late", "runs"]
    assert left_after(TickReq(now=13.0)) == left_after(TickReq(now=23.0)) == ["late", "runs"]
    assert left_after(TickReq(now=23.1)) == ["runs"]


def test_an_abort_may_say_why() -> None:
    driver = make_driver()
    driver.send(request("a", [5], max_new_tokens=9), AbortReq(rid="a", message="for this reason", status_code=503))
    driver.run()
    assert driver.answers["a"].finish == FinishReason(type="abort", message="for this reason", status_code=503)


def test_a_storage_that_is_not_there_cannot_be_flushed() -> None:
    driver = make_driver()
    driver.send(FlushCacheReq(id="storage", storage=True))
    driver.step()
    reply = next(r for r in driver.replies if isinstance(r, ControlReply))
    assert (reply.success, reply.message) == (False, "cache not flushed: there is no storage tier")


def test_prompt_that_cannot_fit_is_refused() -> None:
    driver = make_driver(num_pages=8, page_size=4)
    driver.send(request("big", [1] * 32, max_new_tokens=4), request("none", [], max_new_tokens=4))
    driver.send(request("most", [1] * 31, max_new_tokens=4, ignore_eos=True))
    driver.run()
    assert driver.answers["big"].finish.status_code == driver.answers["none"].finish.status_code == 400
    assert len(driver.answers["most"].output_ids) == 1, "clipped to what the pool can ever hold"


def test_max_new_tokens_zero_scores_the_prompt() -> None:
    driver = make_driver(chunked_prefill_size=4)
    prompt = [7, 8, 9, 10, 11, 12, 13]
    driver.send(request("a", prompt, max_new_tokens=0, return_logprob=True, logprob_start_len=0))
    driver.run()
    answer = driver.answers["a"]
    assert answer.output_ids == []
    assert answer.last.input_logprobs.token_ids == prompt
    # The stand-in reports each scored position's own number.
    assert answer.last.input_logprobs.logprobs == [None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_prompt_logprobs_are_noted_once_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code for each position would keep the other requests waiting."""
    num_appended, right = [], TokenPairs.append

    def append(self: TokenPairs, logprobs: bytes, token_ids: bytes, num_positions: int = 1) -> None:
        num_appended.append(num_positions)
        right(self, logprobs, token_ids, num_positions)

    driver = make_driver(chunked_prefill_size=8)
    driver.send(request("a", list(range(1, 31)), max_new_tokens=0, return_logprob=True, logprob_start_len=0))
    monkeypatch.setattr(TokenPairs, "append", append)
    driver.run()
    assert num_appended[1:] == [8, 8, 8, 5], "after the position that has no logprob"


@pytest.mark.parametrize("start", [1, 3, 6])
def test_prompt_logprobs_recompute_no_more_than_needed(start: int) -> None:
    driver = make_driver(page_size=1)
    prompt = [7, 8, 9, 10, 11, 12, 13]
    driver.send(request("first", prompt, max_new_tokens=2))
    driver.run()
    driver.send(request("a", prompt, max_new_tokens=2, return_logprob=True, logprob_start_len=start))
    driver.run()
    last = driver.answers["a"].last
    assert last.cached_tokens == start
    log = driver.first_logprobs["a"]
    assert log.token_ids == prompt[start:]
    assert log.logprobs == [None, *range(start + 1, 7)]


def test_shutdown_drains() -> None:
    driver = make_driver()
    req = request("a", [1, 2, 3], max_new_tokens=10, ignore_eos=True)
    driver.send(req)
    driver.step()
    driver.send(ShutdownReq(drain=True))
    driver.run()
    assert driver.scheduler.stopped
    assert_right(driver, req)


def test_messages_of_unwatched_requests_are_few() -> None:
    driver = make_driver(context_length=512, num_pages=128)
    driver.send(request("quiet", [1], max_new_tokens=200, ignore_eos=True, stream=False))
    driver.send(request("loud", [2], max_new_tokens=200, ignore_eos=True, stream=True))
    driver.run()
    assert driver.answers["quiet"].num_messages <= 6
    assert driver.answers["loud"].num_messages == 200


def test_books_name_a_lost_page() -> None:
    driver = make_driver()
    driver.send(request("a", [1, 2, 3], max_new_tokens=2))
    driver.run()
    lost = driver.worker.pages.alloc(1)
    assert lost is not None
    driver.send(request("b", [1, 2, 3], max_new_tokens=2))
    with pytest.raises(RuntimeError, match=rf"leased to nobody \[{int(lost[0][0])}\]"):
        driver.run()


# Flags; what arrives at which step.
Workload = tuple[dict[str, object], list[tuple[int, Message]]]

# Few tokens, so that prefixes meet; some prompts are chunks of one long text, so that they share pages.
_TEXT = [1 + i * i % 7 for i in range(40)]
prompts = st.one_of(
    st.lists(st.integers(1, 3), min_size=1, max_size=24),
    st.builds(
        lambda length, tail: _TEXT[:length] + tail,
        st.integers(4, 40),
        st.lists(st.integers(1, 3), min_size=1, max_size=4),
    ),
)


@st.composite
def requests(draw: st.DrawFn, rid: str) -> TokenizedGenerateReq:
    prompt = draw(prompts)
    return_logprob = draw(st.integers(0, 3)) == 0
    return request(
        rid,
        prompt,
        seed=draw(st.integers(0, 1)),
        max_new_tokens=draw(st.integers(0, 24)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 210), max_size=12))),
        stream=draw(st.booleans()),
        return_logprob=return_logprob,
        logprob_start_len=draw(st.integers(-1, len(prompt))) if return_logprob else -1,
    )


@st.composite
def events(draw: st.DrawFn, when: int, num_reqs: int) -> Message:
    kind = draw(st.integers(0, 9))
    if kind < 5:
        return AbortReq(rid=f"r{draw(st.integers(0, num_reqs - 1))}", silent=kind < 2)
    if kind < 7:
        return PauseGenerationReq(id=f"p{when}", mode=draw(st.sampled_from(["retract", "in_place"])))
    return ContinueGenerationReq(id=f"c{when}") if kind == 7 else FlushCacheReq(id=f"f{when}")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    flags: dict[str, object] = {
        "page_size": draw(st.sampled_from([1, 2, 4])),
        "num_rows": draw(st.integers(1, 6)),
        **draw(
            st.sampled_from(
                [
                    {"schedule_policy": "fcfs"},
                    {"schedule_policy": "fcfs", "disable_radix_cache": True},
                    {"schedule_policy": "lpm"},
                    {"schedule_policy": "random"},
                ]
            )
        ),
        "disable_overlap_schedule": draw(st.booleans()),
        "schedule_conservativeness": draw(st.sampled_from([0.01, 0.3, 1.0])),
        "max_prefill_tokens": draw(st.sampled_from([16, 64])),
        "chunked_prefill_size": draw(st.sampled_from([4, 16, -1])),
        "quick_share": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "num_snapshots": draw(st.sampled_from([None, None, 0, 1, 3])),
    }
    flags["num_pages"] = draw(st.integers(48, 120)) // int(str(flags["page_size"]))
    num_reqs = draw(st.integers(1, 10))
    messages: list[tuple[int, Message]] = [(draw(st.integers(0, 20)), draw(requests(f"r{i}"))) for i in range(num_reqs)]
    for _ in range(draw(st.integers(0, 6))):
        when = draw(st.integers(0, 30))
        messages.append((when, draw(events(when, num_reqs))))
    return flags, messages


@pytest.mark.parametrize(("chunk_size", "prompt_len"), [(4, 22), (16, 26)])
def test_what_ends_by_a_known_result_leaves_its_memory(chunk_size: int, prompt_len: int) -> None:
    """Two requests fill all pages. The second ends with the first token of its prompt, and the first goes on."""
    driver = make_driver(num_pages=40, page_size=1, chunked_prefill_size=chunk_size, schedule_conservativeness=0.01)
    assert isinstance(driver.worker, TokenWorker)
    driver.worker.is_quick = lambda: True
    long = request("long", list(range(12)), max_new_tokens=10, ignore_eos=True)
    short = request("short", list(range(100, 100 + prompt_len)), max_new_tokens=1, ignore_eos=True)
    driver.send(long)
    driver.step()
    driver.step()
    driver.send(short)
    driver.run()
    assert_right(driver, long, short)


@pytest.mark.parametrize("quick", [False, True])
def test_first_tokens_do_not_wait_for_the_next_launch(quick: bool) -> None:
    """And a request that ends with its first token is not in the next step. Those that have to be waited for are
    announced."""
    driver, announced = make_driver(num_pages=64), []
    driver.scheduler.expect_tokens = lambda: announced.append(len(driver.answers))
    assert isinstance(driver.worker, TokenWorker)
    driver.worker.is_quick = lambda: quick
    launch, told = driver.worker.launch, []

    def recording(batch: StepBatch) -> TokenResult:
        told.append((len(driver.answers), 1 if not batch.is_decode else len(batch.rows)))
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    reqs = [request("a", [1, 2, 3], max_new_tokens=5, ignore_eos=True)]
    first = expected_output(request("b", [4, 5], max_new_tokens=1, ignore_eos=True), capacity(driver))[0]
    reqs.append(request("b", [4, 5], max_new_tokens=5, ignore_eos=True, stop_token_ids=(first,)))
    driver.send(*reqs)
    driver.run()
    assert told[:2] == ([(0, 1), (2, 1)] if quick else [(0, 1), (0, 2)])
    assert announced == ([] if quick else [0])
    assert_right(driver, *reqs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_cpu_no_token_waits_for_the_step_after_its_own(device: str) -> None:
    """Elsewhere a decode step is published while the next one runs. What a client has before each launch: a token for
    each step that has been launched, on a GPU without that of the last decode step."""
    driver = make_driver(num_pages=64)
    assert isinstance(driver.worker, TokenWorker)
    driver.worker.is_quick = lambda: True
    driver.scheduler.config = dataclasses.replace(driver.config, device=device)
    launch, told = driver.worker.launch, []

    def recording(batch: StepBatch) -> TokenResult:
        told.append(sum(len(answer.output_ids) for answer in driver.answers.values()))
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    req = request("a", [1, 2, 3], max_new_tokens=5, ignore_eos=True)
    driver.send(req)
    driver.run()
    assert told == ([0, 1, 2, 3, 4] if device == "cpu" else [0, 1, 1, 2, 3])
    assert_right(driver, req)


def assert_answer(driver: Driver, req: TokenizedGenerateReq, aborted: bool, silent: bool) -> None:
    """All of what it should say, or a beginning of that if it was aborted; logprobs of just that."""
    answer = driver.answers.get(req.rid, Answer())
    expected = expected_output(req, capacity(driver))
    ended = answer.finish is not None and answer.finish.type in ("stop", "length")
    if ended:
        assert answer.output_ids == expected
        stops = set(req.sampling_params.stop_token_ids) | (set() if req.sampling_params.ignore_eos else {0})
        assert answer.finish.type == ("stop" if expected and expected[-1] in stops else "length")
    else:
        assert aborted if answer.finish is not None else silent
        assert answer.output_ids == expected[: len(answer.output_ids)]
    if req.return_logprob:
        tokens = [-float(t) for t in answer.output_ids]
        assert driver.output_logprobs.get(req.rid, []) == tokens
    if req.logprob_start_len >= 0 and ended:
        log, start = driver.first_logprobs[req.rid], req.logprob_start_len
        assert log.token_ids == list(req.input_ids[start:])
        assert log.logprobs == [p if p > start else None for p in range(start, len(req.input_ids))]
    elif not ended and req.rid in driver.first_logprobs:
        log = driver.first_logprobs[req.rid]
        assert log.token_ids == list(req.input_ids[req.logprob_start_len :][: len(log.token_ids)])


@settings(max_examples=60)
@given(workloads())
def test_any_workload(workload: Workload) -> None:
    """Whatever arrives and leaves when: the right tokens, each once, and clean books at the end."""
    flags, messages = workload
    quick_share, seed = flags.pop("quick_share"), len(messages)
    driver = make_driver(**flags)  # type: ignore[arg-type]
    assert isinstance(driver.worker, TokenWorker) and isinstance(quick_share, float)
    random = Random(seed)
    driver.worker.is_quick = lambda: random.random() < quick_share
    for now in range(40):
        driver.send(*(message for when, message in messages if when == now))
        driver.step()
    driver.send(ContinueGenerationReq(id="last"))
    driver.run()
    aborts = [message for _, message in messages if isinstance(message, AbortReq)]
    for _, message in messages:
        if isinstance(message, TokenizedGenerateReq):
            mine = [abort for abort in aborts if abort.rid == message.rid]
            silent = any(abort.silent for abort in mine)
            assert_answer(driver, message, any(not abort.silent for abort in mine), silent)


def test_ids_of_a_waiting_prompt_are_kept_once() -> None:
    """A body may bring thousands of samples of long prompts: as lists they took five times as much."""
    num_prompts, length = 20, 4000
    driver = make_driver(num_pages=8192, context_length=2 * length)
    driver.send(PauseGenerationReq(id="p"))
    driver.step()
    ids = list(range(1000, 1000 + length))
    wire = [encode(request(f"r{number}", ids, max_new_tokens=1)) for number in range(num_prompts)]
    tracemalloc.start()
    try:
        driver.send(*map(decode, wire))
        driver.step()
        assert len(driver.scheduler.waiting) == num_prompts
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 12 * num_prompts * length
