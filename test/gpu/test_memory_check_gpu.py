"""--memory-check full on a GPU: its kernels, an engine with everything on, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from demo_requests import greedy_requests, sampled_requests
from late_loads import late_loads
from model_tiers import Tiers, hicache_runner, through_the_host
from page_tag_cases import cases
from scheduler_driver import Driver, answers, make_model_driver, request

import fenceline
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order import Device, OrderError, Points, open_device
from fenceline.model_executor.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

FULL = {"memory_check": "full", "device": "cuda"}
DRAFT = {
    "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
    "speculative_draft_model_path": f"{fenceline.demo_model_path()}/eagle3",
}  # fmt: skip
TIER = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}


@pytest.mark.parametrize("name", cases("cuda"))
def test_the_kernels_compute_what_their_references_do(name: str) -> None:
    torch.manual_seed(0)
    check: Callable[..., None]
    check, *arguments = cases("cuda")[name]  # type: ignore[assignment]
    check(*arguments)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"page_size": 1},
        {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True},
        {"max_total_tokens": 512, **TIER},
        {"max_total_tokens": 512, "hicache_io_backend": "direct", "hicache_write_policy": "write_back", **TIER},
        DRAFT,
        {"max_total_tokens": 640, "speculative_algorithm": "NGRAM", **TIER},
        {"max_total_tokens": 640, "retract_policy": "offload", **TIER, **DRAFT},
        {"max_total_tokens": 640, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6, **TIER, **DRAFT},
    ],
    ids=str,
)
def test_an_engine_without_faults_is_silent(flags: dict[str, Any]) -> None:
    """Twice, so that prefixes come back from wherever they are."""
    driver = make_model_driver(**FULL, **flags)
    for requests in (greedy_requests(), sampled_requests()) * 2:
        driver.answers.clear()
        driver.output_logprobs.clear()
        driver.first_logprobs.clear()
        assert all(answers(driver, requests))
    tags = runner_of(driver).parts.page_tags
    assert tags is not None and int(tags.clock[0]) == driver.scheduler.num_launched
    assert int(tags.findings[0, 0]) == 0


# --- faults ------------------------------------------------------------------------------------------------


def runner_of(driver: Driver) -> ModelRunner:
    assert isinstance(driver.worker, ModelRunner)
    return driver.worker


def decoding(**flags: Any) -> Driver:
    driver = make_model_driver(4, **FULL, page_size=16, **flags)
    for rid, prompt in (("first", range(5, 60)), ("second", range(70, 90))):
        driver.send(request(rid, list(prompt), max_new_tokens=60, ignore_eos=True))
    while len(driver.scheduler.running.reqs) < 2:
        driver.step()
    for _ in range(4):
        driver.step()
    return driver


def report(driver: Driver) -> OrderError:
    with pytest.raises(OrderError) as caught:
        driver.run()
    return caught.value


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}, DRAFT], ids=["graph", "eager", "verify"])
def test_a_page_that_is_reused_too_early(flags: dict[str, Any]) -> None:
    driver = decoding(**flags)
    page = driver.scheduler.running.reqs[0].pages[-1]  # which the tree has not
    runner_of(driver).pages.retire(np.array([page], np.int32), Points.none())
    error = report(driver)
    assert error.memory == f"kv_pool page {page}" and "for request first" in str(error)
    assert error.edges == ("retired_after",)


@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}, DRAFT], ids=["graph", "eager", "verify"])
def test_a_wrong_entry_of_a_page_table(flags: dict[str, Any]) -> None:
    driver = decoding(**flags)
    first, second = driver.scheduler.running.reqs
    runner = runner_of(driver)
    with torch.inference_mode(), runner.device.forward.active():
        runner.req_pool.page_table[second.row, 0] = first.pages[1]
    error = report(driver)
    assert f"should name page {second.pages[0]}" in str(error) and "for request second" in str(error)


class LeasedTiers(Tiers):
    def __init__(self, device: Device, **flags: Any) -> None:
        super().__init__(hicache_runner(device, memory_check="full", **flags))
        self.runner.pages.alloc(self.runner.pages.num_free)

    def load(self, device_pages: range | list[int], host_pages: range | list[int], after: Points) -> Ticket:
        self.runner.pages.retire(np.array(device_pages, np.int32), Points.none())
        assert self.runner.pages.alloc(len(device_pages)) is not None
        return super().load(device_pages, host_pages, after)


@pytest.mark.parametrize("io_backend", ["direct", "kernel"])
@pytest.mark.parametrize("severed", ["", "forward_after_load", "store_after_forward"])
def test_transfers_with_and_without_their_edges(io_backend: str, severed: str) -> None:
    """Late loads. What is lost is found where the device has lost it."""
    device = open_device("cuda", frozenset({severed} if severed else ()))
    run = LeasedTiers(device, hicache_io_backend=io_backend)
    through_the_host(run)  # which compiles what is left
    late_loads(run, 20_000_000)
    expected, got = through_the_host(run)
    assert not expected.findings
    if severed != "store_after_forward":  # a backup may be late enough by chance
        assert bool(got.findings) == bool(severed)
    for finding in got.findings:
        assert set(finding.error("r", "").edges) & {"forward_after_load", "store_after_forward"}


def test_a_host_page_that_is_overwritten() -> None:
    run = LeasedTiers(open_device("cuda"))
    copier = run.hicache._copier
    to_device = copier.to_device

    def overwriting(*args: Any) -> None:
        run.runner.device.synchronize()
        run.hicache.host_pool.page(6)[-1][-1] ^= 1
        to_device(*args)
        copier.to_device = to_device  # type: ignore[method-assign]

    copier.to_device = overwriting  # type: ignore[method-assign]
    _, got = through_the_host(run)
    assert "did not hold what was backed up" in str(got.findings[0].error("r", ""))
    assert got.findings[0].page == 21
