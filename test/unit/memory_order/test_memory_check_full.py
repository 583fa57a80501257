"""--memory-check full: faults that are planted in a running engine, and the reports of what the device has found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_tiers import Tiers, hicache_runner, through_the_host
from scheduler_driver import Driver, answers, make_model_driver, request
from speculative_driver import make_driver as make_speculative_driver
from speculative_driver import models
from speculative_driver import requests as speculative_requests
from tiny_model import tiny_driver, tiny_requests

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache.page_tags import ANY_POSITION
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order import Device, OrderError, Point, Points, open_device
from fenceline.memory_order.edges import FORWARD_AFTER_LOAD, Edge, edge_of
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepOutput
from fenceline_proof import ranks, runs
from fenceline_proof.steps import make_config
from fenceline_sim import VirtualGpu
from fenceline_sim.device import VgpuDevice

__all__ = ["models"]  # a fixture

FLAGS = {"max_total_tokens": 256, "page_size": 16, "chunked_prefill_size": 32}


def full_driver(**flags: object) -> Driver:
    """Two requests that decode."""
    driver = make_model_driver(4, memory_check="full", **(FLAGS | flags))
    for rid, prompt in (("first", range(5, 60)), ("second", range(70, 90))):
        driver.send(request(rid, list(prompt), max_new_tokens=30, ignore_eos=True))
    for _ in range(8):
        driver.step()
    assert len(driver.scheduler.running.reqs) == 2
    return driver


def runner_of(driver: Driver) -> ModelRunner:
    assert isinstance(driver.worker, ModelRunner)
    return driver.worker


def report(driver: Driver) -> OrderError:
    with pytest.raises(OrderError) as caught:
        driver.run()
    return caught.value


@pytest.mark.parametrize(
    "flags",
    [
        {"debug_cuda_graph": True, "cuda_graph_bs": [2, 4]},
        {"page_size": 1, "disable_radix_cache": True, "disable_cuda_graph": True},
    ],
)
def test_the_engine_is_silent_and_its_tokens_are_the_same(flags: dict[str, object]) -> None:
    prompts = [list(range(5, 60)), list(range(5, 50)), [9] * 20, [7, 8], list(range(5, 60))]
    requests = [
        request(f"r{i}", ids, seed=i, temperature=0.9 * (i % 2), max_new_tokens=6 + 3 * i, ignore_eos=True)
        for i, ids in enumerate(prompts)
    ]
    driver = make_model_driver(4, memory_check="full", **(FLAGS | flags))
    assert answers(driver, requests) == answers(make_model_driver(4, **(FLAGS | flags)), requests)
    tags = runner_of(driver).parts.page_tags
    assert tags is not None and int(tags.clock[0]) == driver.scheduler.num_launched > 20
    assert (tags.tags[:, 0] < 0).any(), "retired pages have lost their leases"


def test_the_engine_on_vgpu() -> None:
    """Under the virtual GPU's detector: the comparisons themselves race with nothing."""
    expected = answers(tiny_driver("cpu"), tiny_requests())
    assert answers(tiny_driver(VgpuDevice(gpu=VirtualGpu(seed=5)), memory_check="full"), tiny_requests()) == expected


def test_off_has_no_tags() -> None:
    runner = runner_of(make_model_driver(4, **FLAGS))
    assert runner.parts.page_tags is None and not any(
        "PageTags" in repr(observer) for observer in runner.pages.observers
    )


def test_a_page_that_is_retired_too_early() -> None:
    driver = full_driver()
    page = driver.scheduler.running.reqs[0].pages[-1]
    runner_of(driver).pages.retire(np.array([page], np.int32), Points.none())
    error = report(driver)
    assert error.edges == ("retired_after",) and error.memory == f"kv_pool page {page}"
    assert "for request first" in str(error) and "the page has been retired" in str(error)
    assert f"(slots {16 * page}-{16 * page + 15})" in str(error)


def test_a_page_that_is_reused_too_early() -> None:
    driver = full_driver()
    victim = driver.scheduler.running.reqs[0]
    page = victim.pages[-1]
    runner_of(driver).pages.retire(np.array([page], np.int32), Points.none())
    driver.send(request("thief", [3] * 16, max_new_tokens=4, ignore_eos=True))
    error = report(driver)
    assert error.memory == f"kv_pool page {page}" and "written by another" in str(error)
    assert "for request first" in str(error) and "owner thief" in str(error)
    writer = re.search(r"step (\d+) writes it on forward .*\n  2. step (\d+) reads it", str(error))
    assert writer is not None and int(writer[1]) == int(writer[2]) - 1 == driver.scheduler.num_published - 1


def test_a_wrong_entry_of_a_page_table() -> None:
    driver = full_driver()
    first, second = driver.scheduler.running.reqs
    runner_of(driver).req_pool.page_table[second.row, 0] = first.pages[1]
    error = report(driver)
    assert error.memory == f"kv_pool page {first.pages[1]}" and error.edges == ("step_slots", "queued_match")
    assert f"should name page {second.pages[0]}" in str(error) and "for request second" in str(error)
    assert f"row {second.row}, tokens 0-15" in str(error)


def test_a_page_that_is_overwritten_while_a_step_reads_it() -> None:
    """Before the forward it is as it should be, and afterwards it is not."""
    driver = full_driver()
    runner = runner_of(driver)
    tags = runner.parts.page_tags
    assert tags is not None
    page, hidden_states = driver.scheduler.running.reqs[1].pages[0], runner.model.hidden_states

    def overwriting(batch):  # type: ignore[no-untyped-def]
        tags.tags[page, 0] += 1000
        return hidden_states(batch)

    runner.model.hidden_states = overwriting  # type: ignore[method-assign]
    error = report(driver)
    assert error.memory == f"kv_pool page {page}" and "found after its forward" in str(error)
    assert "for request second" in str(error) and "written by another" in str(error)


# --- tiers -------------------------------------------------------------------------------------------------


class LeasedTiers(Tiers):
    """Pages that are loaded are leased before: they were the second request's, which has ended by then."""

    def __init__(self, device: Device | None = None, **flags: object) -> None:
        super().__init__(hicache_runner(device or open_device("cpu"), memory_check="full", **flags))
        self.runner.pages.alloc(self.runner.pages.num_free)

    def load(self, device_pages: range | list[int], host_pages: range | list[int], after: Points) -> Ticket:
        self.runner.pages.retire(np.array(device_pages, np.int32), Points.none())
        assert self.runner.pages.alloc(len(device_pages)) is not None
        return super().load(device_pages, host_pages, after)


def found(result: StepOutput) -> OrderError:
    assert result.findings, "the device has found nothing"
    return result.findings[0].error("r", "")


@pytest.mark.parametrize("flags", [{}, {"piecewise_cuda_graph_tokens": (64, 128)}, {"hicache_io_backend": "direct"}])
def test_pages_that_went_to_the_host_and_back_are_right(flags: dict[str, object]) -> None:
    run = LeasedTiers(**flags)  # type: ignore[arg-type]
    for _ in range(2):
        expected, got = through_the_host(run)
        np.testing.assert_array_equal(got.tokens, expected.tokens)
        assert not expected.findings and not got.findings


def test_tiers_on_vgpu() -> None:
    device = VgpuDevice(gpu=VirtualGpu(seed=3))
    expected, got = through_the_host(LeasedTiers(device))
    assert not expected.findings and not got.findings


def test_a_load_that_is_not_awaited_on_vgpu() -> None:
    """The edge is lost between declaration and device: nobody but the device sees that."""
    gpu = VirtualGpu(seed=3, policy="laziest", detect=False)
    device = VgpuDevice(gpu=gpu)
    run = LeasedTiers(device)
    wait = device.forward.wait

    def losing(after: Point | Points, edge: Edge) -> None:
        if edge is not FORWARD_AFTER_LOAD:
            wait(after, edge)

    device.forward.wait = losing  # type: ignore[method-assign]
    expected, got = through_the_host(run)
    error = found(got)
    assert not expected.findings and error.edge == "forward_after_load" and "found before layer 0" in str(error)


def test_a_load_that_has_not_come_to_a_layer() -> None:
    run = LeasedTiers()
    tags = run.hicache._tags
    assert tags is not None
    loaded = tags.loaded

    def one_layer(stream, moved, number, layer):  # type: ignore[no-untyped-def]
        if layer == 0:
            loaded(stream, moved, number, layer)

    tags.loaded = one_layer  # type: ignore[method-assign]
    _, got = through_the_host(run)
    error = found(got)
    assert error.edge == "forward_after_load" and "has not been written since it was leased" in str(error)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_host_page_that_is_overwritten(layout: str) -> None:
    run = LeasedTiers(hicache_mem_layout=layout)
    copier = run.hicache._copier
    to_device = copier.to_device

    def overwriting(*args: object) -> None:
        run.hicache.host_pool.page(6)[-1][-1] ^= 1  # one bit of the third page
        to_device(*args)  # type: ignore[arg-type]
        copier.to_device = to_device  # type: ignore[method-assign]

    copier.to_device = overwriting  # type: ignore[method-assign]
    _, got = through_the_host(run)
    error = found(got)
    assert "did not hold what was backed up" in str(error) and "load_after_store" in error.edges
    assert error.memory == "kv_pool page 21" and "tokens 32-47" in str(error)


def test_a_backup_of_a_page_that_is_another_request_s_by_then() -> None:
    """The bytes arrive as they were, and were wrong before."""
    run = LeasedTiers()
    tags = run.runner.parts.page_tags
    assert tags is not None
    to_host = run.hicache._copier.to_host

    def late(*args: object) -> None:
        to_host(*args)  # type: ignore[arg-type]
        tags.tags[12, 0] += 100

    run.hicache._copier.to_host = late  # type: ignore[method-assign]
    _, got = through_the_host(run)
    error = found(got)
    assert "another's, or not yet complete, when it was backed up" in str(error) and error.memory == "kv_pool page 23"


def test_a_small_cache_over_a_host_tier_is_silent() -> None:
    """Evictions, loads, backups and retractions of the real scheduler, with the same tokens."""
    flags = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_write_policy": "write_back"}
    prompts = [list(range(i, i + 40)) for i in (5, 60, 110, 160, 210, 5)]
    requests = [request(f"r{i}", ids, max_new_tokens=20, ignore_eos=True) for i, ids in enumerate(prompts)]
    small = FLAGS | {"max_total_tokens": 160}
    driver = make_model_driver(4, memory_check="full", **small, **flags)
    expected = answers(make_model_driver(4, **FLAGS), requests)
    assert answers(driver, requests) == expected
    again = [request(f"again{i}", ids, max_new_tokens=20, ignore_eos=True) for i, ids in enumerate(prompts)]
    assert answers(driver, again) == expected
    counts = runner_of(driver).hicache.counts  # type: ignore[union-attr]
    assert all(count.num_pages > 0 for count in counts.values()), "pages went both ways"


# --- everything --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "draft", "topk"),
    [(SpeculativeAlgorithm.EAGLE3, "eagle3", 1), (SpeculativeAlgorithm.STANDALONE, "near", 3)],
)
def test_speculation_with_tiers_and_retractions_is_silent(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str, topk: int
) -> None:
    """Requests are retracted to the host and resumed, by chains and trees of random depths."""
    flags: dict[str, object] = {"max_total_tokens": 240, "num_rows": 5, "retract_policy": "offload"}
    flags |= {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "depth_seed": 1}
    reqs = speculative_requests(11, num=8, max_new_tokens=40)
    driver = make_speculative_driver(models, algorithm, draft, topk=topk, memory_check="full", **flags)  # type: ignore[arg-type]
    assert answers(driver, reqs) == answers(make_speculative_driver(models), reqs)
    assert driver.scheduler.stats.num_retractions > 0


def test_a_wrong_entry_in_a_speculative_step(models: dict[str, Path]) -> None:
    driver = make_speculative_driver(models, SpeculativeAlgorithm.EAGLE3, "eagle3", memory_check="full")
    driver.send(request("r", list(range(3, 50)), max_new_tokens=40, ignore_eos=True))
    for _ in range(6):
        driver.step()
    (req,) = driver.scheduler.running.reqs
    runner_of(driver).req_pool.page_table[req.row, 1] = req.pages[0]
    error = report(driver)
    assert error.memory == f"kv_pool page {req.pages[0]}" and f"should name page {req.pages[1]}" in str(error)


def test_pages_from_storage_are_loaded_without_a_checksum(tmp_path: Path) -> None:
    flags = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_storage_backend": "file"}
    flags |= {"hicache_storage_dir": str(tmp_path), "hicache_storage_prefetch_policy": "wait_complete"}
    outputs = []
    for _ in range(2):
        driver = make_model_driver(4, memory_check="full", **(FLAGS | flags | {"max_total_tokens": 960}))
        outputs.append(answers(driver, [request("r", list(range(5, 505)), max_new_tokens=8, ignore_eos=True)]))
        while driver.scheduler.memory.num_outstanding:
            driver.step()
        driver.scheduler.close()
    assert outputs[0] == outputs[1] and driver.scheduler.memory.cached_tokens["storage"] == 496
    tags = runner_of(driver).parts.page_tags
    assert tags is not None and (tags.tags[:, 1] == ANY_POSITION).sum() == 31


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give runs of the proof ``--memory-check full``."""

    def configured(flags: dict[str, Any], *args: Any) -> EngineConfig:
        return make_config({**flags, "memory_check": "full"}, *args)

    for module in (runs, ranks):
        monkeypatch.setattr(module, "make_config", configured)


@pytest.mark.long
@pytest.mark.parametrize("workload", ["everything", "speculation_tiers", "ranks_storage"])
def test_comparisons_race_with_nothing(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof's workloads under the virtual GPU's detector, with the oracle's tokens and no finding."""
    full(monkeypatch)
    outcome = runs.run(runs.Trial(workload, 2))
    assert outcome.clean and outcome.num_tokens > 0, outcome.report


@pytest.mark.long
@pytest.mark.parametrize(
    ("severed", "workload", "seeds"),
    [
        ("forward_after_load@HiCacheController.layer_ready", "spill", range(6)),
        ("forward_after_store", "spill", range(3)),
        ("load_after_forward", "swap", range(6)),
        ("host_page_reuse:host-load", "refill", range(6)),
        ("step_slots", "speculation", range(2)),
    ],
)
def test_what_is_severed_is_found_by_what_the_device_does(
    severed: str, workload: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the virtual GPU's detector, as on a real GPU: in some schedule the wrong bytes are read, or written. In
    no other schedule does a token differ."""
    full(monkeypatch)
    outcomes = [runs.run(runs.Trial(workload, seed, frozenset({severed}), detect=False)) for seed in seeds]
    found = [outcome for outcome in outcomes if outcome.checker == "memory-check"]
    assert found and all(edge_of(severed) in outcome.edges for outcome in found)
    assert all(outcome.clean for outcome in outcomes if outcome not in found)
