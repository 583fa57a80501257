"""Priorities: who goes first, who is retracted for whom; and the order of dfs-weight."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, assert_right, make_driver, make_tiered_driver, request

from fenceline.ipc.io_struct import AbortReq, TokenizedGenerateReq
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.scheduler.admission import AdmissionState
from fenceline.scheduler.prefill import PrefillPlan
from fenceline.scheduler.req import Req
from fenceline.scheduler.schedule_policy import order_waiting


def driver_with_priorities(**flags: object) -> Driver:
    flags.setdefault("enable_priority_scheduling", True)
    return make_driver(**flags)  # type: ignore[arg-type]


def waiting_order(driver: Driver) -> list[str]:
    """The queue as the next step would try it; nothing runs."""
    driver.scheduler.ingest(driver.drain(False))
    return [req.rid for req in driver.scheduler.planner.candidates()]


@pytest.mark.parametrize(("low_first", "order"), [(False, "cbdae"), (True, "aebdc")])
def test_the_better_priority_goes_first_and_then_who_came_first(low_first: bool, order: str) -> None:
    driver = driver_with_priorities(schedule_low_priority_values_first=low_first)
    for rid, priority in zip("abcde", (-1, 3, 7, 3, -1), strict=True):
        driver.send(request(rid, [5], priority=priority, max_new_tokens=2))
    assert waiting_order(driver) == list(order)
    driver.run()


def test_without_the_flag_the_order_is_that_of_arrival() -> None:
    driver = make_driver()
    for rid, priority in zip("abc", (-1, 3, 7), strict=True):
        driver.send(request(rid, [5], priority=priority, max_new_tokens=2))
    assert waiting_order(driver) == ["a", "b", "c"]
    driver.run()


@pytest.mark.parametrize(
    ("flags", "gap", "preempts"),
    [
        ({}, 10, False),
        ({}, 11, True),
        ({"priority_scheduling_preemption_threshold": 0}, 0, False),
        ({"priority_scheduling_preemption_threshold": 0}, 1, True),
        ({"disable_priority_preemption": True}, 1000, False),
        ({"enable_priority_scheduling": False}, 1000, False),
        ({"schedule_low_priority_values_first": True}, 1000, False),
        ({"schedule_low_priority_values_first": True}, -11, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("scarce", ["rows", "pages"])
def test_a_running_request_makes_room_for_a_better_one(
    flags: dict[str, object], gap: int, preempts: bool, scarce: str
) -> None:
    sizes = {"num_rows": 1} if scarce == "rows" else {"num_pages": 20}
    driver = driver_with_priorities(page_size=4, **sizes, **flags)
    low = request("low", [3] * 30, priority=5, max_new_tokens=30, ignore_eos=True)
    high = request("high", [4] * 40, priority=5 + gap, max_new_tokens=20, ignore_eos=True)
    driver.send(low)
    for _ in range(4):
        driver.step()
    driver.send(high)
    driver.step()
    assert (driver.scheduler.reqs["high"].row != 0) is preempts
    assert (driver.scheduler.reqs["low"].row == 0) is preempts
    driver.run()
    assert_right(driver, low, high)
    assert driver.answers["low"].last.num_retractions == int(preempts)
    assert driver.answers["high"].last.num_retractions == 0


def test_as_few_as_suffice_are_retracted_the_lowest_first() -> None:
    driver = driver_with_priorities(num_pages=64, page_size=4, num_rows=8, schedule_conservativeness=0.01)
    rest = [request(f"r{p}", [p + 1] * 30, priority=p, max_new_tokens=40, ignore_eos=True) for p in (3, 1, 2, 4)]
    driver.send(*rest)
    for _ in range(4):
        driver.step()
    assert len(driver.scheduler.running) == 4
    high = request("high", [9] * 150, priority=50, max_new_tokens=10, ignore_eos=True)
    driver.send(high)
    driver.step()
    retracted = sorted(req.rid for req in driver.scheduler.reqs.values() if req.row == 0)
    assert retracted == ["r1", "r2"]
    driver.run()
    assert_right(driver, high, *rest)


def test_nobody_is_retracted_for_what_does_not_fit_even_so() -> None:
    driver = driver_with_priorities(num_pages=40, page_size=4, num_rows=8)
    same = request("same", [8] * 90, priority=50, max_new_tokens=40, ignore_eos=True)
    low = request("low", [7] * 10, priority=0, max_new_tokens=8, ignore_eos=True)
    driver.send(same, low)
    for _ in range(3):
        driver.step()
    assert len(driver.scheduler.running) == 2
    high = request("high", [9] * 100, priority=50, max_new_tokens=20, ignore_eos=True)
    driver.send(high)
    driver.step()
    assert driver.scheduler.reqs["low"].row and not driver.scheduler.reqs["high"].row
    driver.run()
    assert_right(driver, same, low, high)


def test_a_request_that_cannot_fit_costs_a_step_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked about in every step, and there may be hundreds of running requests to look at."""
    driver = driver_with_priorities(num_pages=64, page_size=4, num_rows=16, schedule_conservativeness=0.01)
    same = request("same", [8] * 90, priority=50, max_new_tokens=90, ignore_eos=True)
    lows = [request(f"low{i}", [i + 1] * 9, priority=0, max_new_tokens=20, ignore_eos=True) for i in range(6)]
    driver.send(same, *lows)
    for _ in range(8):
        driver.step()
    assert len(driver.scheduler.running) == 7
    high = request("high", [9] * 200, priority=50, max_new_tokens=20, ignore_eos=True)
    driver.send(high)
    released: list[str] = []
    retract = AdmissionState.retract

    def counting(self: AdmissionState, req: Req, num_expected: int) -> None:
        released.append(req.rid)
        retract(self, req, num_expected)

    monkeypatch.setattr(AdmissionState, "retract", counting)
    for _ in range(8):
        driver.step()
    assert not driver.scheduler.reqs["high"].row
    assert not released
    driver.run()
    assert_right(driver, same, high, *lows)


def test_nobody_gives_way_to_a_prompt_that_has_to_wait_anyway() -> None:
    driver = driver_with_priorities(
        num_pages=64, page_size=4, num_rows=3, chunked_prefill_size=-1, max_prefill_tokens=12
    )
    low = [request(f"low{i}", [i + 1] * 3, priority=0, max_new_tokens=30, ignore_eos=True) for i in range(3)]
    driver.send(*low)
    for _ in range(4):
        driver.step()
    assert len(driver.scheduler.running) == 3
    high = [request(f"high{i}", [i + 9] * 8, priority=20, max_new_tokens=9, ignore_eos=True) for i in range(2)]
    driver.send(*high)
    driver.step()
    rows = {rid for rid, req in driver.scheduler.reqs.items() if req.row}
    assert "high0" in rows and "high1" not in rows and len(rows) == 3, "8 + 8 tokens are more than 12"
    driver.run()
    assert_right(driver, *low, *high)


def test_a_burst_of_better_requests_goes_in_one_step() -> None:
    driver = driver_with_priorities(num_pages=200, page_size=4, num_rows=6)
    low = [request(f"low{i}", [i + 1] * 9, priority=0, max_new_tokens=30, ignore_eos=True) for i in range(6)]
    driver.send(*low)
    for _ in range(3):
        driver.step()
    high = [request(f"high{i}", [i + 9] * 9, priority=20, max_new_tokens=9, ignore_eos=True) for i in range(5)]
    driver.send(*high)
    driver.step()
    assert sum(req.row != 0 for req in driver.scheduler.reqs.values() if req.rid.startswith("high")) == 5
    assert sum(req.row != 0 for req in driver.scheduler.reqs.values() if req.rid.startswith("low")) == 1
    driver.run()
    assert_right(driver, *low, *high)


@pytest.mark.parametrize(
    ("num_tokens", "scores", "num_gone"),
    [(40, False, 1), (9, False, 2), (40, True, 2)],
    ids=["it waits", "the prompt is short", "it is scored"],
)
def test_nobody_gives_way_to_a_sample_that_would_wait(num_tokens: int, scores: bool, num_gone: int) -> None:
    driver = driver_with_priorities(num_pages=200, page_size=4, num_rows=4)
    low = [request(f"low{i}", [i + 1] * 9, priority=0, max_new_tokens=30, ignore_eos=True) for i in range(4)]
    driver.send(*low)
    for _ in range(3):
        driver.step()
    scored: dict[str, object] = {"return_logprob": True, "logprob_start_len": 0} if scores else {}
    high = [
        request(f"high{i}", list(range(1, num_tokens + 1)), priority=20, body=1, max_new_tokens=9, **scored)
        for i in range(2)
    ]
    driver.send(*high)
    driver.step()
    assert driver.scheduler.stats.num_retractions == num_gone
    driver.run()
    assert_right(driver, *low)
    assert all(len(driver.answers[req.rid].output_ids) for req in high)
    assert driver.scheduler.stats.num_retractions == 2, "the second sample runs when its prompt is cached"


@pytest.mark.parametrize("lengths", [(45,), (21, 25)], ids=["one", "two"])
def test_who_gives_way_takes_no_place_of_better_prefixes(lengths: tuple[int, ...]) -> None:
    driver = make_tiered_driver(
        num_pages=36,
        num_host_pages=12,
        num_rows=2,
        enable_priority_scheduling=True,
        chunked_prefill_size=128,
        hicache_write_policy="write_through_selective",
        retract_policy="offload",
    )
    prompts = [[(100 * i + j) % 250 + 1 for j in range(length)] for i, length in enumerate(lengths)]
    for i in range(3 * len(prompts)):
        driver.send(request(f"before{i}", prompts[i // 3], max_new_tokens=1))
        driver.run()
    driver.send(request("large", [7] * 125, max_new_tokens=1))  # evicts them from the device
    driver.run()
    low = [request(f"low{i}", [i + 1] * 3, max_new_tokens=40, ignore_eos=True, priority=0) for i in range(2)]
    driver.send(*low)
    for _ in range(20):
        driver.step()
    high = [request(f"high{i}", prompt, max_new_tokens=4, priority=30) for i, prompt in enumerate(prompts)]
    driver.send(*high)
    driver.run()
    assert_right(driver, *low, *high)
    for req, prompt in zip(high, prompts, strict=True):
        last = driver.answers[req.rid].last
        assert last is not None and last.cached_tokens == len(prompt) // 4 * 4
    assert driver.scheduler.stats.num_retractions == len(prompts)


def test_a_shared_prefix_left_behind_is_not_counted_as_room() -> None:
    """The better request uses the very pages that the other one lets go of: they cannot be evicted for it."""
    driver = driver_with_priorities(num_pages=30, page_size=4, num_rows=4)
    shared = list(range(1, 61))
    low = request("low", [*shared, 99], priority=0, max_new_tokens=20, ignore_eos=True)
    driver.send(low)
    for _ in range(3):
        driver.step()
    high = request("high", [*shared, *range(100, 130)], priority=50, max_new_tokens=20, ignore_eos=True)
    driver.send(high)
    driver.run()
    assert_right(driver, low, high)


def test_when_memory_runs_short_the_lowest_priority_is_retracted() -> None:
    driver = driver_with_priorities(
        num_pages=24, page_size=4, num_rows=8, schedule_conservativeness=0.05, disable_priority_preemption=True
    )
    reqs = [request(f"r{p}", [p + 1, p + 2, p + 3], priority=p, max_new_tokens=50, ignore_eos=True) for p in range(6)]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    assert driver.scheduler.stats.num_retractions > 0
    assert driver.answers["r5"].last.num_retractions == 0


@pytest.mark.parametrize("num_steps", [14, 16], ids=["alone", "beside a half-way prompt"])
def test_a_retraction_is_counted_whatever_is_left_running(num_steps: int) -> None:
    """The only request that decodes gives way, so the decode step waits."""
    driver = driver_with_priorities(num_pages=64, page_size=1, chunked_prefill_size=8, schedule_conservativeness=0.01)
    worse = request("worse", [5, 6, 7], max_new_tokens=40, ignore_eos=True)
    better = request("better", list(range(1, 43)), max_new_tokens=2, ignore_eos=True, priority=1)
    driver.send(worse)
    for _ in range(num_steps):
        driver.step()
    driver.send(better)
    driver.run()
    assert driver.answers["worse"].last.num_retractions == 1
    assert driver.scheduler.control.state().num_retractions == 1
    assert_right(driver, worse, better)


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, TokenizedGenerateReq | AbortReq]]:
    found: list[tuple[int, TokenizedGenerateReq | AbortReq]] = []
    for number in range(draw(st.integers(2, 9))):
        prompt = [draw(st.integers(1, 3))] * draw(st.integers(1, 40))
        req = request(
            f"r{number}",
            prompt,
            priority=draw(st.sampled_from([0, 0, 5, 11, 30])),
            extra_key=draw(st.sampled_from(["", "", "x"])),
            max_new_tokens=draw(st.integers(1, 30)),
            ignore_eos=True,
        )
        when = draw(st.integers(0, 25))
        found.append((when, req))
        if draw(st.integers(0, 4)) == 0:
            found.append((when + draw(st.integers(0, 9)), AbortReq(rid=req.rid)))
    return found


@settings(max_examples=50)
@given(arrivals(), st.booleans(), st.sampled_from([0, 10]), st.sampled_from([-1, 16, 64]), st.booleans())
def test_any_priorities(
    messages: list[tuple[int, TokenizedGenerateReq | AbortReq]], tiered: bool, threshold: int, chunk: int, offload: bool
) -> None:
    """The right tokens, clean books, and whoever is retracted makes room for a request that is then admitted."""
    flags: dict[str, object] = {
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": threshold,
        "chunked_prefill_size": chunk,
        "schedule_conservativeness": 0.3,
    }
    if tiered:
        flags["retract_policy"] = "offload" if offload else "recompute"
        driver = make_tiered_driver(num_pages=24, page_size=4, num_rows=4, **flags)
    else:
        driver = make_driver(num_pages=24, page_size=4, num_rows=4, **flags)  # type: ignore[arg-type]
    scheduler = driver.scheduler
    plan_prefill, preempt = scheduler.planner.plan_prefill, scheduler.planner.preempt
    preempted = False

    def noted_preempt(threshold: int) -> None:
        nonlocal preempted
        before = scheduler.stats.num_retractions
        preempt(threshold)
        preempted = scheduler.stats.num_retractions > before

    def checked_plan(num_decodes: int) -> PrefillPlan | None:
        nonlocal preempted
        plan = plan_prefill(num_decodes)
        assert plan is not None or not preempted, "retracted for nobody"
        preempted = False
        return plan

    scheduler.planner.preempt = noted_preempt  # type: ignore[method-assign]
    scheduler.planner.plan_prefill = checked_plan  # type: ignore[method-assign]
    for now in range(40):
        driver.send(*(message for when, message in messages if when == now))
        driver.step()
    driver.run()
    aborted = {message.rid for _, message in messages if isinstance(message, AbortReq)}
    assert_right(driver, *(m for _, m in messages if isinstance(m, TokenizedGenerateReq) and m.rid not in aborted))


# --- dfs-weight ---------------------------------------------------------------------------------------


def test_dfs_weight_goes_first_where_most_of_the_requests_are() -> None:
    driver = make_driver(num_pages=200, page_size=4, num_rows=8, schedule_policy="dfs-weight")
    a, b = [1] * 16, [2] * 16
    a_left, a_right = [*a, *[3] * 8], [*a, *[4] * 8]
    for index, prompt in enumerate((a_left, a_right, b)):
        driver.send(request(f"cached{index}", [*prompt, 9], max_new_tokens=1))
        driver.run()
    for rid, prompt in (
        ("none", [7] * 9),
        ("b", [*b, 5]),
        ("a", [*a, 6, 6, 6, 6, 6]),
        ("left", [*a_left, 5]),
        ("right1", [*a_right, 5]),
        ("right2", [*a_right, 6]),
        ("salted", [*a_right, 6]),
    ):
        driver.send(request(rid, prompt, extra_key="x" if rid == "salted" else "", max_new_tokens=1))
    assert waiting_order(driver) == ["right1", "right2", "left", "a", "b", "none", "salted"]
    driver.run()


def test_dfs_weight_depends_on_the_queue_and_the_tree_alone() -> None:
    driver = make_driver(num_pages=500, page_size=4, num_rows=8, schedule_policy="dfs-weight", context_length=4096)
    random = Random(3)
    prompts = [[random.randrange(1, 3) for _ in range(random.randrange(8, 60))] for _ in range(40)]
    for index, prompt in enumerate(prompts[:20]):
        driver.send(request(f"c{index}", prompt, max_new_tokens=1))
    driver.run()
    driver.send(*(request(f"r{index}", prompt, max_new_tokens=1) for index, prompt in enumerate(prompts)))
    first = waiting_order(driver)
    scheduler = driver.scheduler
    again = order_waiting(list(scheduler.waiting), "dfs-weight", scheduler.memory.match, Random(9))
    assert sorted(first) == sorted(f"r{i}" for i in range(40))
    assert len({req.rid for req in again}) == 40
    assert waiting_order(driver) == [req.rid for req in again]
    driver.run()


def test_dfs_weight_walks_a_deep_tree() -> None:
    driver = make_driver(num_pages=3000, page_size=1, num_rows=8, schedule_policy="dfs-weight", context_length=4096)
    prompt = [i % 7 + 1 for i in range(2600)]
    driver.send(request("deep", prompt, max_new_tokens=1))
    driver.run()
    for length in range(2598, 0, -2):  # a node for every second token: the first one is cut each time
        driver.scheduler.memory.tree.match_prefix(np.array(prompt[:length]))
    assert driver.scheduler.memory.tree.num_nodes > 1200
    driver.send(*(request(f"r{i}", prompt[: 500 * i + 3], max_new_tokens=1) for i in range(5)))
    assert waiting_order(driver) == ["r4", "r3", "r2", "r1", "r0"]
    driver.run()


def test_dfs_weight_looks_at_each_node_but_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests wait below it: the order is made in each step."""
    driver = make_driver(num_pages=3000, page_size=1, num_rows=8, schedule_policy="dfs-weight", context_length=4096)
    prompt = [i % 7 + 1 for i in range(402)]
    driver.send(request("deep", prompt, max_new_tokens=1))
    driver.run()
    scheduler, num_hashed = driver.scheduler, 0
    for length in range(398, 0, -2):
        scheduler.memory.tree.match_prefix(np.array(prompt[:length]))
    driver.send(*(request(f"r{i}", [*prompt[:400], 8, i], max_new_tokens=1) for i in range(100)))
    order = waiting_order(driver)  # and all prefixes are known now
    assert order == [f"r{i}" for i in range(100)]
    hash_of = TreeNode.__hash__

    def counting(node: TreeNode) -> int:
        nonlocal num_hashed
        num_hashed += 1
        return hash_of(node)

    monkeypatch.setattr(TreeNode, "__hash__", counting)
    again = [req.rid for req in scheduler.planner.candidates()]
    monkeypatch.undo()
    assert 200 < num_hashed < 5_000
    assert again == order
    driver.run()
