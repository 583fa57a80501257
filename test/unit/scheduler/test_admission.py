"""Who is admitted: never more than memory has, everybody in the end, and small bodies beside large ones at once."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, assert_right, make_driver, request

from fenceline.ipc.io_struct import AbortReq, TokenizedGenerateReq
from fenceline.mem_cache.tree.radix_cache import RadixCache
from fenceline.memory_order import LeasePool
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.admission import AdmissionState, Holdings, preempted, would_admit
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory

RESERVE = 80  # tokens; bodies of 20 at most may use it


def driver_of(num_rows: int = 40, num_pages: int = 250, **flags: object) -> Driver:
    """A pool, too small for a reserve, that has one nevertheless, and an estimate of what is asked for that is far too
    low."""
    flags = {"schedule_conservativeness": 0.05, "chunked_prefill_size": 32} | flags
    driver = make_driver(num_pages=num_pages, num_rows=num_rows, **flags)  # type: ignore[arg-type]
    keep(driver, RESERVE, 2)
    return driver


def keep(driver: Driver, tokens: int, rows: int) -> None:
    holdings = driver.scheduler.waiting.holdings
    holdings.reserve_tokens, holdings.reserve_rows = tokens, rows


def long(number: int, max_new_tokens: int = 200, **params: object) -> TokenizedGenerateReq:
    prompt = [number % 250 + 1, number // 250 + 1, 3]
    return request(f"long{number}", prompt, max_new_tokens=max_new_tokens, ignore_eos=True, **params)


def short(number: int, max_new_tokens: int = 15) -> TokenizedGenerateReq:
    return request(f"short{number}", [200, number % 250 + 1, 5], max_new_tokens=max_new_tokens, ignore_eos=True)


def steps(driver: Driver, num: int) -> None:
    for _ in range(num):
        driver.step()


def filled_by_long_ones(num: int = 24, **flags: object) -> Driver:
    """Long requests have all the memory that they get, and some of them wait for more."""
    driver = driver_of(**flags)  # type: ignore[arg-type]
    driver.send(*(long(number) for number in range(num)))
    while not driver.scheduler.stats.num_retractions:
        driver.step()
    return driver


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_short_request_does_not_wait_until_a_long_one_ends(policy: str) -> None:
    """Its first token comes with the next steps, and each step brings it another one, while the long ones that have
    all the memory go on to retract each other."""
    driver = filled_by_long_ones(schedule_policy=policy)
    for number in range(4):
        driver.send(one := short(number))
        steps(driver, 4)
        assert driver.answers[one.rid].output_ids, "the step in flight, a prefill step, and one to publish it"
        for _ in range(25):
            if driver.answers[one.rid].finish is None:
                driver.step()
        answer = driver.answers[one.rid]
        assert answer.last is not None and answer.last.num_retractions == 0
        assert answer.finish is not None
        assert_right(driver, one)
        steps(driver, 7)
    assert not any(answer.finish for rid, answer in driver.answers.items() if rid.startswith("long"))


@pytest.mark.parametrize("chunk", [8, 32], ids=["half-way", "whole"])
def test_long_requests_leave_the_reserve_free(chunk: int) -> None:
    """Whether they grow, or wait with prompts that would fit."""
    driver = filled_by_long_ones(chunked_prefill_size=chunk)
    scheduler = driver.scheduler
    driver.send(*(request(f"prompt{i}", [i + 30] * 60, max_new_tokens=20) for i in range(20)))
    for number in range(12):
        if number > 2:
            driver.send(request(f"short{number}", [200, number] * 6, max_new_tokens=6, ignore_eos=True))
        for _ in range(9):
            driver.step()
            free = scheduler.memory.num_available_pages * 4
            ending = sum(len(req.pages) for req in scheduler.reqs.values() if req.row and _is_last(driver, req))
            used = scheduler.waiting.holdings.used_tokens
            assert free + used + 4 * ending >= RESERVE - 8, "but for a step"
    assert len(scheduler.running) > 2
    scheduler.control.abort(AbortReq(abort_all=True))
    driver.run()


def _is_last(driver: Driver, req: Req) -> bool:
    """Whether the step in flight is the last of ``req``, or its first."""
    return req not in driver.scheduler.running.reqs and req is not driver.scheduler.population.chunked


def test_a_long_prompt_is_not_admitted_into_the_reserve() -> None:
    """Where it would have to be retracted at once."""
    driver = driver_of()
    driver.send(*(request(f"{i}", [i + 1] * 235, max_new_tokens=20, ignore_eos=True) for i in range(4)))
    driver.run()
    assert driver.scheduler.stats.num_retractions == 0


def test_beside_a_long_prompt_that_is_half_way_too() -> None:
    """What a half-way prompt leaves of its steps is for short ones also if one before them has no memory."""
    driver = driver_of(schedule_conservativeness=1.0)
    scheduler = driver.scheduler
    driver.send(request("half", [9, 9, 7] * 65, max_new_tokens=10))
    driver.step()
    driver.send(*(long(number, max_new_tokens=240) for number in range(5)), short(0))
    steps(driver, 3)
    assert scheduler.population.chunked is not None and scheduler.population.chunked.rid == "half"
    assert scheduler.reqs["long4"].row == 0
    assert scheduler.reqs["short0"].row != 0
    driver.run()


def test_a_short_request_needs_no_row_of_a_long_one() -> None:
    driver = driver_of(num_rows=12, schedule_conservativeness=0.01)
    driver.send(*(long(number, max_new_tokens=60) for number in range(20)))
    steps(driver, 12)
    assert driver.scheduler.memory.rows.num_free == 2
    driver.send(one := short(0))
    steps(driver, 4)
    assert driver.answers[one.rid].output_ids
    driver.scheduler.control.abort(AbortReq(abort_all=True))
    driver.run()


def test_short_requests_do_not_keep_long_ones_waiting() -> None:
    """They pass a long one only as long as all of them fit into the reserve: a new long one is admitted although more
    short ones come than memory is there for."""
    driver = driver_of(num_pages=150, num_rows=100, schedule_conservativeness=1.0)
    late = long(9, max_new_tokens=240)
    for number in range(300):
        driver.send(*(short(6 * number + i, max_new_tokens=15) for i in range(6)))
        if number == 40:
            driver.send(late)
        driver.step()
        if late.rid in driver.answers:
            break
    else:
        raise AssertionError("the long one has got nothing")
    driver.scheduler.control.abort(AbortReq(abort_all=True))
    driver.run()


def test_what_others_hold_of_the_reserve_counts_in_whole_pages() -> None:
    """Requests of a page and a few tokens take two pages each: they pass a long one only while it fits beside them."""
    driver = driver_of(num_pages=16, num_rows=100, page_size=16, chunked_prefill_size=64)
    late = request("late", [7] * 156, max_new_tokens=3, ignore_eos=True)
    for number in range(150):
        if driver.scheduler.waiting.num_reqs < 8:
            driver.send(
                *(request(f"{number}-{i}", [number % 250 + 1, i + 1] + [5] * 15, max_new_tokens=4) for i in range(8))
            )
        if number == 20:
            driver.send(late)
        driver.step()
        if late.rid in driver.answers:
            break
    else:
        raise AssertionError("the long one has got nothing")
    driver.scheduler.control.abort(AbortReq(abort_all=True))
    driver.run()


@pytest.mark.parametrize("chunk", [32, -1], ids=["half-way", "whole"])
def test_who_needs_the_reserve_too_is_not_passed_for_ever(chunk: int) -> None:
    """It is admitted when nothing else runs, which short ones without end would put off without end."""
    driver = driver_of(num_pages=80, num_rows=100, chunked_prefill_size=chunk)
    driver.send(*(short(i) for i in range(3)))
    steps(driver, 4)
    driver.send(late := request("late", [7] * 250, max_new_tokens=3, ignore_eos=True))
    for number in range(100):
        driver.send(short(100 + number, max_new_tokens=12))
        steps(driver, 4)
        if late.rid in driver.answers and driver.answers[late.rid].output_ids:
            break
    else:
        raise AssertionError("the long one has got nothing")
    driver.scheduler.control.abort(AbortReq(abort_all=True))
    driver.run()


def test_one_long_request_alone_may_have_everything() -> None:
    driver = driver_of(num_pages=70)
    keep(driver, 250, 0)  # more than it leaves
    driver.send(one := long(0, max_new_tokens=250))
    driver.run()
    assert driver.answers[one.rid].last is not None and driver.answers[one.rid].last.num_retractions == 0
    assert_right(driver, one)


@settings(max_examples=12, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(0, 3), st.integers(0, 12)),
        min_size=1,
        max_size=12,
    ),
    num_rows=st.sampled_from([3, 8, 40]),
    policy=st.sampled_from(["fcfs", "lpm", "random", "priority"]),
    overlap=st.booleans(),
)
def test_everybody_gets_the_right_tokens(
    arrivals: list[tuple[int, int, int, int]], num_rows: int, policy: str, overlap: bool
) -> None:
    """With a reserve in a pool that is small, of single requests and of bodies, with and without priorities."""
    priorities = policy == "priority"
    driver = make_driver(
        num_pages=60,
        page_size=4,
        num_rows=num_rows,
        chunked_prefill_size=32,
        schedule_conservativeness=0.05,
        schedule_policy="fcfs" if priorities else policy,
        enable_priority_scheduling=priorities,
        disable_overlap_schedule=not overlap,
    )
    keep(driver, 48, 1)
    sent = []
    for number, (prompt_len, max_new_tokens, body, pause) in enumerate(arrivals):
        prompt = [number % 250 + 1] + [5] * prompt_len
        one = request(
            f"r{number}",
            prompt,
            body=body,
            max_new_tokens=max_new_tokens,
            ignore_eos=True,
            priority=number % 3 if priorities else None,
        )
        sent.append(one)
        driver.send(one)
        steps(driver, pause)
    driver.run()
    assert_right(driver, *sent)
    assert driver.scheduler.waiting.holdings == Holdings(48, 1, page_size=4), "nobody holds anything"


def test_a_small_pool_has_no_reserve() -> None:
    assert Holdings.of(16_383, 256) == Holdings()
    assert Holdings.of(16_384, 256) == Holdings(1024, 8)


@pytest.mark.parametrize("max_new_tokens", [200, 12], ids=["of long ones", "of short ones"])
def test_a_large_body_leaves_room_for_a_newcomer(max_new_tokens: int) -> None:
    """Its next tokens come at once, however many requests of the body wait."""
    driver = driver_of(num_rows=20)
    driver.send(*(long(number, max_new_tokens=max_new_tokens, body=1) for number in range(60)))
    for number in range(4):
        steps(driver, 9)
        driver.send(one := short(number))
        steps(driver, 4)
        assert driver.answers[one.rid].output_ids
    driver.scheduler.control.abort(AbortReq(abort_all=True))
    driver.run()


def test_steps_that_need_no_page_do_not_look_at_memory() -> None:
    """Until somebody leaves: what the reserve lacks may be restored then."""
    driver = driver_of(page_size=16)
    driver.send(long(0), request("prompt", [9] * 20, max_new_tokens=1))
    running, looks = driver.scheduler.running, []
    right = running.num_pages_needed
    running.num_pages_needed = lambda *args: looks.append(args) or right(*args)  # type: ignore[method-assign, func-returns-value]
    steps(driver, 3)
    assert "prompt" not in driver.scheduler.reqs and len(running) == 1
    num_looks = len(looks)
    steps(driver, 4)
    assert len(looks) == num_looks, "the request has pages for all these steps"
    driver.send(request("waiting", [8] * 20, max_new_tokens=1), AbortReq(rid="waiting"))
    steps(driver, 1)
    assert len(looks) == num_looks + 1
    steps(driver, 1)
    assert len(looks) == num_looks + 1
    driver.scheduler.control.abort(AbortReq(abort_all=True))
    driver.run()


# --- would_admit, beside the accounts of the pool


def make_memory(num_pages: int, num_rows: int, page_size: int = 1) -> RequestMemory:
    pages = LeasePool("pages", 1 + num_pages)
    return RequestMemory(pages, LeasePool("rows", 1 + num_rows), RadixCache(pages, page_size), page_size)


def req_of(rid: str, prompt: list[int], body: int = 0, max_new: int = 1, rank: int = 0) -> Req:
    source = TokenizedGenerateReq(rid, array("i"), SamplingParams(), body=body)
    ids = np.array(prompt, np.int32)
    return Req(source, ids, ids, (), frozenset(), 0, max_new, 1, rank=rank)


def admit(memory: RequestMemory, req: Req) -> None:
    prefix = memory.match(req)
    memory.tree.lock(prefix.match.host_node)
    memory.admit(req, prefix)


def compute(memory: RequestMemory, req: Req) -> None:
    """The prompt of ``req`` has been computed and is in the tree."""
    req.allocated_len = req.committed_len = req.num_tokens
    memory.cache_prompt(req)


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14)
REQS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 2)), max_size=6)


@settings(max_examples=60)
@given(
    running=REQS,
    waiting=REQS,
    gone=st.sets(st.integers(0, 5)),
    num_pages=st.integers(14, 60),
    page_size=st.sampled_from([1, 2, 4]),
    num_rows=st.integers(1, 6),
    reserve=st.sampled_from([(0, 0), (12, 1), (24, 2)]),
    ratio=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_memory_is_promised_that_is_not_there(
    running: list[tuple[list[int], int, int]],
    waiting: list[tuple[list[int], int, int]],
    gone: set[int],
    num_pages: int,
    page_size: int,
    num_rows: int,
    reserve: tuple[int, int],
    ratio: float,
) -> None:
    """Neither now nor in a forecast: the pool gives exactly what was counted, after the same retractions."""
    memory, holdings = make_memory(num_pages, num_rows, page_size), Holdings(*reserve)
    held: list[Req] = []

    def state_now() -> AdmissionState:
        expected = sum(int(ratio * one.max_new_tokens) for one in held)
        return AdmissionState(memory, holdings, len(held), expected)

    for number, (prompt, max_new, body) in enumerate(running):
        req, state = req_of(f"r{number}", prompt, body, max_new), state_now()
        if would_admit(state, req):
            req.in_reserve = state.admit(req)
            holdings.admit(req, req.in_reserve)
            admit(memory, req)
            held.append(req)
            assert (state.num_pages, state.num_rows) == (memory.num_available_pages, memory.rows.num_free)
            if number % 3:
                compute(memory, req)
            assert holdings.used_tokens <= holdings.reserve_tokens
    newcomers = [req_of(f"w{number}", p, body, new) for number, (p, new, body) in enumerate(waiting)]
    for req in newcomers:
        memory.match(req)
    state = state_now()
    victims = [req for index, req in enumerate(held) if index in gone]
    for victim in victims:
        state.retract(victim, int(ratio * victim.max_new_tokens))
    admitted = [(req, state.admit(req)) for req in newcomers if would_admit(state, req)]
    for victim in victims:
        victim.left = True
        memory.release(victim)
        holdings.release(victim)
    for req, in_reserve in admitted:
        req.in_reserve = in_reserve
        holdings.admit(req, in_reserve)
        admit(memory, req)
    assert (state.num_pages, state.num_rows) == (memory.num_available_pages, memory.rows.num_free)
    assert state.holdings == holdings
    if not victims:  # what fits now, fits when there is more
        alone = AdmissionState(memory, Holdings(), 0, 0)
        alone.num_pages = memory.num_pages
        assert all(alone.num_rows == 0 or would_admit(alone, req) for req in newcomers if not req.row)


def test_a_prefix_that_splits_a_victim_s_node_is_not_free() -> None:
    memory = make_memory(7, 8)
    running = [req_of(rid, p, rank=9) for rid, p in (("a", [1, 2, 3, 4]), ("b", [8]), ("c", [9]))]
    for req in running:
        admit(memory, req)
        compute(memory, req)
    running[1].output_ids, running[2].output_ids = [7], [7]  # so that a goes first
    # The second one needs two of the pages that the first victim leaves, so even b would not be enough for it.
    wanted = [req_of("first", [5, 6]), req_of("second", [1, 2, 7], max_new=2)]
    for req in wanted:
        memory.match(req)
    state = AdmissionState(memory, Holdings(), len(running), 0)
    assert [req.rid for req in preempted(state, wanted, running, [0, 0, 0], 0)] == ["a"]
