"""Short requests do not wait for the memory of long ones, which neither starve nor give more than a share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, assert_right, make_driver, request

from fenceline.ipc.io_struct import AbortReq, TokenizedGenerateReq
from fenceline.scheduler.req import Req
from fenceline.scheduler.schedule_policy import ShortShare

SHARE = ShortShare(80, 2)  # short requests have 20 tokens at most


def driver_of(num_rows: int = 40, num_pages: int = 250, **flags: object) -> Driver:
    """A pool, too small for a share of its own, that has one nevertheless, and an estimate of what is asked for that is
    far too low."""
    flags = {"schedule_conservativeness": 0.05, "chunked_prefill_size": 32} | flags
    driver = make_driver(num_pages=num_pages, num_rows=num_rows, **flags)  # type: ignore[arg-type]
    driver.scheduler.share = SHARE
    return driver


def long(number: int, max_new_tokens: int = 200, **params: object) -> TokenizedGenerateReq:
    prompt = [number % 250 + 1, number // 250 + 1, 3]
    return request(f"long{number}", prompt, max_new_tokens=max_new_tokens, ignore_eos=True, **params)


def short(number: int, max_new_tokens: int = 15) -> TokenizedGenerateReq:
    return request(
        f"short{number}", [200, number % 250 + 1, 5], max_new_tokens=max_new_tokens, ignore_eos=True
    )


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
def test_long_requests_leave_the_share_free(chunk: int) -> None:
    """Whether they grow, or wait with prompts that would fit; what short ones have counts, half-way through their
    prompt too."""
    driver = filled_by_long_ones(chunked_prefill_size=chunk)
    scheduler = driver.scheduler
    driver.send(*(request(f"prompt{i}", [i + 30] * 60, max_new_tokens=20) for i in range(20)))
    for number in range(12):
        if number > 2:
            driver.send(request(f"short{number}", [200, number] * 6, max_new_tokens=6, ignore_eos=True))
        for _ in range(9):
            driver.step()
            free = scheduler.memory.num_available_pages * 4
            ending = sum(
                len(req.pages) for req in scheduler.reqs.values() if req.row and _is_last(driver, req)
            )
            assert free + scheduler.short_share().held_tokens + 4 * ending >= SHARE.tokens - 8, (
                "but for a step"
            )
    assert len(scheduler.running) > 2
    scheduler.abort(AbortReq(abort_all=True))
    driver.run()


def _is_last(driver: Driver, req: Req) -> bool:
    """Whether the step in flight is the last of ``req``, or its first."""
    return req not in driver.scheduler.running.reqs and req is not driver.scheduler.chunked


def test_a_long_prompt_is_not_admitted_into_the_share() -> None:
    """Where it would have to be retracted at once."""
    driver = driver_of()
    driver.send(*(request(f"{i}", [i + 1] * 235, max_new_tokens=20, ignore_eos=True) for i in range(4)))
    driver.run()
    assert driver.scheduler.stats.num_retractions == 0


def test_a_short_prompt_that_is_half_way_has_its_part_of_the_share() -> None:
    driver = driver_of(chunked_prefill_size=8)
    driver.send(request("short", [200] * 14, max_new_tokens=5))
    driver.step()
    share = driver.scheduler.short_share()
    assert (share.held_tokens, share.final_tokens, share.held_rows) == (16, 18, 1)
    driver.run()


def test_beside_a_long_prompt_that_is_half_way_too() -> None:
    """What a half-way prompt leaves of its steps is for short ones also if one before them has no memory."""
    driver = driver_of(schedule_conservativeness=1.0)
    scheduler = driver.scheduler
    driver.send(request("half", [9, 9, 7] * 65, max_new_tokens=10))
    driver.step()
    driver.send(*(long(number, max_new_tokens=240) for number in range(5)), short(0))
    steps(driver, 3)
    assert scheduler.chunked is not None and scheduler.chunked.rid == "half"
    assert scheduler.reqs["long4"].row == 0
    assert scheduler.reqs["short0"].row != 0
    driver.run()


def test_a_body_gives_way_for_as_much_as_a_newcomer_needs_beside_the_share() -> None:
    driver = driver_of()
    prompts = [[number + 1] * 200 for number in range(4)]
    driver.send(
        *(request(f"{i}", p, body=1, max_new_tokens=40, ignore_eos=True) for i, p in enumerate(prompts))
    )
    while len(driver.scheduler.running) < 4:
        driver.step()
    newcomer = request("new", [77] * 110, max_new_tokens=20, ignore_eos=True)
    driver.send(newcomer)
    steps(driver, 4)
    assert driver.scheduler.stats.num_retractions == 1
    assert driver.scheduler.reqs["new"].row != 0
    driver.run()


def test_a_short_request_needs_no_row_of_a_long_one() -> None:
    driver = driver_of(num_rows=12, schedule_conservativeness=0.01)
    driver.send(*(long(number, max_new_tokens=60) for number in range(20)))
    steps(driver, 12)
    assert driver.scheduler.memory.rows.num_free == SHARE.rows
    driver.send(one := short(0))
    steps(driver, 4)
    assert driver.answers[one.rid].output_ids
    driver.scheduler.abort(AbortReq(abort_all=True))
    driver.run()


def test_short_requests_without_end_do_not_keep_long_ones_waiting() -> None:
    """They pass a long one only as long as all of them fit into their share: a new long one is admitted although more
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
    driver.scheduler.abort(AbortReq(abort_all=True))
    driver.run()


@pytest.mark.parametrize("chunk", [32, -1], ids=["half-way", "whole"])
def test_who_needs_of_the_share_too_is_not_passed_for_ever(chunk: int) -> None:
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
    driver.scheduler.abort(AbortReq(abort_all=True))
    driver.run()


def test_one_long_request_alone_may_have_everything() -> None:
    driver = driver_of(num_pages=70)
    driver.scheduler.share = ShortShare(250, 0)  # more than it leaves
    driver.send(one := long(0, max_new_tokens=250))
    driver.run()
    assert driver.answers[one.rid].last is not None and driver.answers[one.rid].last.num_retractions == 0
    assert_right(driver, one)


def test_a_small_pool_has_no_share() -> None:
    assert ShortShare.of(16_383, 256) == ShortShare(0, 0)
    assert not ShortShare.of(16_383, 256).is_short(1)
    share = ShortShare.of(16_384, 256)
    assert share == ShortShare(1024, 8)
    assert share.is_short(256) and not share.is_short(257)


@settings(max_examples=20, deadline=None)
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
    """With a share in a pool that is small, of single requests and of bodies, with and without priorities."""
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
    driver.scheduler.share = ShortShare(48, 1)
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
    assert driver.scheduler.waiting.num_short == 0
    driver.scheduler.running.drop_departed()  # as the next step would
    assert driver.scheduler.short_share() == driver.scheduler.share


def test_room_is_made_again_as_soon_as_somebody_has_left() -> None:
    """Steps in which no request needs a page do not look at memory at all. A request that leaves ends that, also if it
    was not in them: pages of a prefix that it shared stay in use, and the share for short ones may lack them."""
    driver = driver_of(page_size=16)
    driver.send(long(0), request("prompt", [9] * 20, max_new_tokens=1))
    running, looks = driver.scheduler.running, []
    right = driver.scheduler.has_room
    driver.scheduler.has_room = lambda *args: looks.append(args) or right(*args)  # type: ignore[method-assign, func-returns-value]
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
    driver.scheduler.abort(AbortReq(abort_all=True))
    driver.run()
