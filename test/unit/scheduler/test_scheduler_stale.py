"""F5: what was derived from pages that have moved since is noticed, made anew and counted; what stayed is not."""

from __future__ import annotations

import dataclasses

import numpy as np
from scheduler_driver import Driver, assert_right, make_tiered_driver, request

from fenceline.memory_order import Points
from fenceline.model_executor.step import PageWrites, StepBatch
from fenceline.scheduler.req import Req


def recomputes(driver: Driver) -> dict[str, int]:
    state = driver.scheduler.control.state().hicache
    assert state is not None
    return state.recomputes


def warm(driver: Driver, *prompts: list[int]) -> None:
    for index, prompt in enumerate(prompts):
        driver.send(request(f"warm-{index}", prompt, max_new_tokens=1, ignore_eos=True))
        driver.run()


def test_a_queued_match_whose_pages_left_the_device_is_made_anew() -> None:
    """The request waits for a row with its prefix found on the device; a long prompt then drives the prefix to the
    host."""
    driver = make_tiered_driver(num_pages=24, num_rows=1)
    prefix = list(range(20, 60))
    warm(driver, prefix)
    memory = driver.scheduler.memory
    late = request("late", [*prefix, 1, 2, 3], max_new_tokens=3, ignore_eos=True)
    driver.send(late)
    driver.scheduler.ingest(driver.drain(False))
    (waiting,) = driver.scheduler.waiting
    found = memory.match(waiting)
    assert found.match.num_tokens == 40 and found.match.num_host_tokens == 0
    assert memory.match(waiting) is found, "what has not moved is not looked for again"
    before = recomputes(driver)["queued_match"]
    memory.tree.evict(memory.num_pages)  # the decision of somebody who needs the pages
    again = memory.match(waiting)
    assert again.match.num_tokens == 0 and again.match.num_host_tokens == 40
    assert recomputes(driver)["queued_match"] == before + 1
    driver.run()
    assert_right(driver, late)
    assert driver.answers["late"].last.cached_tokens == 40


def test_a_retracted_request_finds_its_pages_where_they_are() -> None:
    """Offloaded at its retraction, matched while it waits, driven to the host, and loaded into other slots."""
    driver = make_tiered_driver(num_pages=20, retract_policy="offload", schedule_conservativeness=0.01)
    reqs = [
        request(rid, [seed * 50 + i for i in range(9)], max_new_tokens=40, ignore_eos=True)
        for seed, rid in enumerate(("a", "b"), 1)
    ]
    driver.send(*reqs)
    scheduler = driver.scheduler
    while scheduler.stats.num_retractions == 0:
        driver.step()
    (waiting,) = [req for req in scheduler.waiting if req.num_retractions]
    before = recomputes(driver)["queued_match"]
    on_device = scheduler.memory.match(waiting)
    assert on_device.match.num_tokens > 0
    scheduler.memory.tree.evict(on_device.match.num_tokens // driver.config.server_args.page_size)
    moved = scheduler.memory.match(waiting)
    assert moved.match.num_host_tokens > 0 and moved.num_tokens == on_device.num_tokens
    assert recomputes(driver)["queued_match"] == before + 1
    driver.run()
    assert_right(driver, *reqs)


def test_a_remapped_row_that_was_not_written_is_written_whole() -> None:
    """Two requests bring one prompt; the second moves onto the first one's pages, and the write of that is lost."""
    driver = make_tiered_driver(num_pages=60, num_rows=2, chunked_prefill_size=-1)
    prompt = list(range(1, 41))
    reqs = [request(rid, [*prompt, tail], max_new_tokens=8, ignore_eos=True) for rid, tail in (("a", 7), ("b", 9))]
    driver.send(*reqs)
    scheduler = driver.scheduler
    while not scheduler.memory.remaps:
        driver.step()
    scheduler.memory.remaps.clear()
    assert recomputes(driver)["page_table"] == 0
    driver.run()
    assert recomputes(driver)["page_table"] == 1
    assert_right(driver, *reqs)


def test_constant_eviction_recomputes_nothing_that_did_not_move() -> None:
    """Conversations that never fit the device: each turn is matched, loaded and answered with no repair at all."""
    driver = make_tiered_driver(num_pages=30, num_host_pages=200)
    histories = [[tag * 23 + i for i in range(20)] for tag in range(6)]
    for turn in range(4):
        for tag, history in enumerate(histories):
            req = request(f"{turn}-{tag}", list(history), max_new_tokens=4, ignore_eos=True)
            driver.send(req)
            driver.run()
            assert_right(driver, req)
            history += driver.answers[req.rid].output_ids + [5, 6, 7]
    assert driver.scheduler.memory.num_evicted_pages > 100
    assert recomputes(driver) == {"queued_match": 0, "page_table": 0}


def test_a_write_that_is_out_of_date_does_not_count() -> None:
    """A row that moves twice is as its last move says, not as a write of the first."""
    driver = make_tiered_driver()
    tables = driver.scheduler.memory.tables
    first, second = tables.moved(3), tables.moved(3)
    tables.written(3, first)
    req = dataclasses.replace(_req(driver), row=3)
    req.pages.extend([5, 6])
    batch = tables.up_to_date(_batch(), [req])
    assert batch.page_writes.pages.tolist() == [5, 6] and tables.num_rewritten == 1
    tables.moved(3)
    tables.written(3, second + 1)
    batch = _batch()
    assert tables.up_to_date(batch, [req]) is batch and tables.num_rewritten == 1


def _req(driver: Driver) -> Req:
    driver.send(request("x", [1, 2, 3], max_new_tokens=2))
    driver.scheduler.ingest(driver.drain(False))
    return driver.scheduler.reqs["x"]


def _batch() -> StepBatch:
    none = np.zeros(0, dtype=np.int64)
    return StepBatch(none, none, none, none == 0, (), PageWrites(none, none, none.astype(np.int32)), Points.none())
