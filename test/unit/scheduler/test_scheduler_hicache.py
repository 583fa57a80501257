"""The scheduler over two tiers: prefixes that left the device come back from the host, and nobody's tokens change."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, assert_right, capacity, expected_output, make_tiered_driver, request
from token_worker import TokenTransfers

from fenceline.ipc.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    FlushCacheReq,
    InternalState,
    PauseGenerationReq,
    StatsReport,
    TickReq,
    TokenizedGenerateReq,
)

POLICIES = ("write_through", "write_through_selective", "write_back")


def transfers(driver: Driver) -> TokenTransfers:
    moved = driver.worker.hicache
    assert isinstance(moved, TokenTransfers)
    return moved


def serve(driver: Driver, *reqs: TokenizedGenerateReq) -> None:
    """Answer ``reqs``, which arrive together, and check what they were told."""
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)


def drain(driver: Driver) -> None:
    """Let every transfer end and be noticed."""
    moved = transfers(driver)
    while moved.num_in_flight:
        driver.scheduler.memory.complete(driver.worker.completions(None))


def fill_device(driver: Driver, tag: int) -> None:
    """Prompts that nobody shares, until everything older has left the device."""
    for index in range(3):
        prompt = [(tag * 7 + index * 31 + i) % 200 + 1 for i in range(56)]
        serve(driver, request(f"filler-{tag}-{index}", prompt, max_new_tokens=2, ignore_eos=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_comes_back_from_the_host(policy: str) -> None:
    driver = make_tiered_driver(hicache_write_policy=policy)
    prompt = list(range(20, 60))
    for rid in ("first", "again"):  # twice: a selective policy backs up what was used twice
        serve(driver, request(rid, prompt, max_new_tokens=2, ignore_eos=True))
    fill_device(driver, 1)
    before = transfers(driver).num_moved["load"]
    serve(driver, request("back", [*prompt, 7, 8, 9], max_new_tokens=4, ignore_eos=True))
    assert transfers(driver).num_moved["load"] - before == 10
    assert driver.answers["back"].last.cached_tokens == 40


def told(driver: Driver) -> InternalState:
    """What the front end knows once the scheduler waits for a message."""
    while driver.scheduler.memory.num_outstanding:
        driver.step()
    driver.send(TickReq(now=0.0))
    driver.step()
    return next(message.state for message in reversed(driver.replies) if isinstance(message, StatsReport))


def test_the_front_end_knows_the_state_of_an_idle_scheduler() -> None:
    """Its gauges are those of the last report, for hours if nobody asks anything."""
    driver = make_tiered_driver()
    prompt = list(range(20, 60))
    serve(driver, request("first", prompt, max_new_tokens=2, ignore_eos=True))
    state = told(driver)
    assert state == driver.scheduler.control.state()
    assert state.hicache is not None and state.hicache.pages["both"] == 10
    assert state.hicache.pages["in_transit"] == 0
    driver.send(FlushCacheReq(id="flush"))
    driver.step()
    *_, report, reply = driver.replies
    assert isinstance(reply, ControlReply) and reply.success
    assert isinstance(report, StatsReport), "whoever has the answer finds it in the metrics"
    assert report.state.hicache is not None and not any(report.state.hicache.pages.values())
    driver.send(PauseGenerationReq(id="pause", mode="retract"), request("waits", prompt, max_new_tokens=2))
    driver.step()
    assert told(driver).num_queue_reqs == 1
    driver.send(AbortReq(rid="waits"))
    driver.step()
    assert (told(driver).num_queue_reqs, told(driver).num_aborts) == (0, 1)
    num_reports = len(driver.replies)
    assert told(driver) == driver.scheduler.control.state()
    assert len(driver.replies) == num_reports, "what has not changed is not sent again"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_on_the_host_is_found_by_its_namespace_alone(policy: str) -> None:
    driver = make_tiered_driver(num_host_pages=200, hicache_write_policy=policy)
    prompt = list(range(20, 60))
    for rid in ("first", "again"):
        serve(driver, request(rid, prompt, extra_key="mine", max_new_tokens=2, ignore_eos=True))
    fill_device(driver, 1)
    before = transfers(driver).num_moved["load"]
    for key in ("", "other"):
        serve(driver, request(f"not-{key}", [*prompt, 7], extra_key=key, max_new_tokens=1))
        assert driver.answers[f"not-{key}"].last.cached_tokens == 0
    assert transfers(driver).num_moved["load"] == before
    serve(driver, request("back", [*prompt, 7, 8, 9], extra_key="mine", max_new_tokens=4, ignore_eos=True))
    assert transfers(driver).num_moved["load"] - before == 10
    assert driver.answers["back"].last.cached_tokens == 40


def test_write_back_stores_nothing_before_the_device_is_full() -> None:
    driver = make_tiered_driver(hicache_write_policy="write_back")
    serve(driver, request("a", list(range(20, 60)), max_new_tokens=2))
    assert transfers(driver).num_moved["store"] == 0
    fill_device(driver, 1)
    assert transfers(driver).num_moved["store"] > 0


def test_short_prefixes_are_computed_rather_than_loaded() -> None:
    driver = make_tiered_driver()
    serve(driver, request("a", list(range(20, 28)), max_new_tokens=1))
    fill_device(driver, 1)
    serve(driver, request("b", [*range(20, 28), 3], max_new_tokens=1))
    assert transfers(driver).num_moved["load"] == 0
    assert driver.answers["b"].last.cached_tokens == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("retract_policy", ["recompute", "offload"])
def test_conversations_under_constant_eviction(policy: str, retract_policy: str) -> None:
    """Turns of many conversations, more than the device holds: loads and evictions never stop, nothing is lost."""
    for seed in range(6):
        random = Random(seed)
        driver = make_tiered_driver(
            num_pages=30,
            num_host_pages=random.choice((12, 40, 100)),
            seed=seed,
            hicache_write_policy=policy,
            retract_policy=retract_policy,
            schedule_policy=random.choice(("fcfs", "lpm")),
            schedule_conservativeness=0.05,
            disable_overlap_schedule=random.random() < 0.2,
        )
        histories = [[random.randrange(1, 200) for _ in range(random.randint(10, 24))] for _ in range(7)]
        for turn in range(5):
            reqs = [
                request(f"{turn}-{i}", list(history), max_new_tokens=random.randint(1, 12), ignore_eos=True)
                for i, history in enumerate(histories)
                if random.random() < 0.7
            ]
            serve(driver, *reqs)
            for req in reqs:
                history = histories[int(req.rid.split("-")[1])]
                history += driver.answers[req.rid].output_ids
                history += [random.randrange(1, 200) for _ in range(random.randint(1, 5))]
        drain(driver)
        tree = driver.scheduler.memory.tree
        tree.check()
        assert tree.num_locked_pages == 0


def test_a_retracted_request_is_loaded_not_computed_again() -> None:
    """Two long answers in a pool for one: the one that is retracted brings its pages back, its last one included."""
    results = {}
    for policy in ("recompute", "offload"):
        driver = make_tiered_driver(num_pages=20, retract_policy=policy, schedule_conservativeness=0.01)
        reqs = [
            request(rid, [seed * 50 + i for i in range(9)], max_new_tokens=40, ignore_eos=True)
            for seed, rid in enumerate(("a", "b"), 1)
        ]
        serve(driver, *reqs)
        assert driver.scheduler.stats.num_retractions > 0
        results[policy] = driver.scheduler.stats.num_computed_prompt_tokens
        drain(driver)
        assert driver.scheduler.memory.tiers.num_outstanding == 0
    assert results["offload"] < results["recompute"]


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), policy=st.sampled_from(POLICIES))
def test_tails_go_to_the_host_and_back_in_any_order(seed: int, policy: str) -> None:
    """On a host with few pages, each of which changes hands while copies that use it have not run yet."""
    random = Random(seed)
    driver = make_tiered_driver(
        num_pages=40,
        num_host_pages=random.randint(1, 12),
        seed=seed,
        retract_policy="offload",
        hicache_write_policy=policy,
    )
    reqs = []
    for number in range(10):
        prompt = [random.randrange(200) for _ in range(random.randint(1, 20))]
        reqs.append(request(f"r{number}", prompt, max_new_tokens=random.randint(4, 24), ignore_eos=True))
        driver.send(reqs[-1])
        for _ in range(random.randint(0, 4)):
            driver.step()
        if random.random() < 0.4:
            driver.send(PauseGenerationReq(id="p", mode="retract"), ContinueGenerationReq(id="c"))
    driver.run()
    assert_right(driver, *reqs)
    drain(driver)


def test_a_retracted_request_may_be_aborted_while_it_waits() -> None:
    driver = make_tiered_driver(num_pages=20, retract_policy="offload", schedule_conservativeness=0.01)
    for seed, rid in enumerate(("a", "b"), 1):
        driver.send(request(rid, [seed * 50 + i for i in range(9)], max_new_tokens=40, ignore_eos=True))
    while driver.scheduler.stats.num_retractions == 0:
        driver.step()
    driver.send(AbortReq(abort_all=True))
    driver.run()
    drain(driver)
    driver.scheduler.memory.check_memory(every_page=True)


def test_flush_empties_both_tiers() -> None:
    driver = make_tiered_driver()
    serve(driver, request("a", list(range(20, 60)), max_new_tokens=2))
    driver.send(FlushCacheReq(id="flush"))
    driver.step()
    worker = driver.worker
    assert worker.pages.num_leased == 0 and worker.hicache.host_pages.num_leased == 0
    serve(driver, request("b", list(range(20, 60)), max_new_tokens=2))
    assert driver.answers["b"].last.cached_tokens == 0


def test_pure_decode_under_a_full_pool_lets_go_of_every_transfer() -> None:
    """F6: acks are taken in whatever the step is; nothing stays locked or in flight."""
    driver = make_tiered_driver(num_pages=40, num_rows=2)
    serve(driver, request("a", list(range(20, 60)), max_new_tokens=2))
    driver.send(request("long", [3, 4, 5], max_new_tokens=100, ignore_eos=True))
    for _ in range(80):
        driver.step()
    assert transfers(driver).num_in_flight == 0
    driver.run()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_anything_goes(data: st.DataObject) -> None:
    """Arrivals, aborts, flushes and retractions of all that run, at any step; whoever is answered is answered right,
    and has found no more cached than others of its namespace had brought."""
    seed = data.draw(st.integers(0, 10**6))
    random = Random(seed)
    driver = make_tiered_driver(
        num_pages=data.draw(st.integers(20, 40)),
        num_host_pages=data.draw(st.integers(1, 60)),
        num_snapshots=data.draw(st.sampled_from((None, 1, 2, 6))),
        num_host_states=data.draw(st.integers(1, 6)),
        seed=seed,
        hicache_write_policy=data.draw(st.sampled_from(POLICIES)),
        retract_policy=data.draw(st.sampled_from(("recompute", "offload"))),
        schedule_conservativeness=data.draw(st.sampled_from((0.01, 1.0))),
        schedule_policy=data.draw(st.sampled_from(("fcfs", "lpm", "dfs-weight", "random"))),
    )
    families = [[random.randrange(1, 200) for _ in range(20)] for _ in range(4)]
    sent: dict[str, TokenizedGenerateReq] = {}
    for number in range(data.draw(st.integers(1, 14))):
        prompt = random.choice(families)[: random.randint(1, 20)]
        prompt += [random.randrange(200) for _ in range(random.randint(1, 9))]
        key, num_tokens = random.choice(("", "", "a", "b")), random.randint(1, 14)
        req = request(f"r{number}", prompt, extra_key=key, max_new_tokens=num_tokens, ignore_eos=True)
        sent[req.rid] = req
        driver.send(req)
        for _ in range(random.randint(0, 5)):
            driver.step()
        if random.random() < 0.2:
            driver.send(AbortReq(rid=random.choice(list(sent))))
        if random.random() < 0.1:
            driver.send(FlushCacheReq(id=f"f{number}"))
        if random.random() < 0.3:
            driver.send(PauseGenerationReq(id=f"p{number}", mode="retract"), ContinueGenerationReq(id=f"c{number}"))
    driver.run()
    drain(driver)
    for rid, req in sent.items():
        answer = driver.answers[rid]
        if answer.finish.type != "abort":
            assert answer.output_ids == expected_output(req, capacity(driver)), rid
            others = [other for other in sent.values() if other is not req and other.extra_key == req.extra_key]
            brought = [[*other.input_ids, *expected_output(other, capacity(driver))] for other in others]
            shared = max((num_shared(req.input_ids, tokens) for tokens in brought), default=0)
            assert answer.last.cached_tokens <= shared, rid


def num_shared(one: list[int], other: list[int]) -> int:
    """Leading tokens that are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_lock_that_nobody_gives_back_is_noticed_on_the_host() -> None:
    driver = make_tiered_driver()
    serve(driver, request("a", list(range(20, 60)), max_new_tokens=2))
    fill_device(driver, 1)
    tree = driver.scheduler.memory.tree
    match = tree.match_prefix(np.arange(20, 60))
    assert match.num_host_tokens == 40
    tree.lock(match.host_node)  # pins no device page
    with pytest.raises(RuntimeError, match="locked while idle"):
        driver.scheduler.memory.check_memory()
