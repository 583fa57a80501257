"""Speculative steps on the virtual GPU: tokens are those without speculation on any schedule, in graphs or not,
and what keeps their memory right is named by the checker that misses it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from scheduler_driver import answers
from speculative_driver import (
    DRAFTS,
    EAGLE,
    EAGLE3,
    NEXTN,
    STANDALONE,
    count_tokens,
    make_driver,
    models,
    plain_answers,
    requests,
)

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.memory_order.edges import ARENA_PAD, GRAPH_POOL, SINK, TOTAL_BUCKETS
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_sim import VgpuDevice, VirtualGpu
from fenceline_sim.errors import BoundsError, CheckError, FreshnessError, StaleMemoryError

__all__ = ["models"]  # a fixture
FLAGS: dict[str, object] = {"num_steps": 2, "num_rows": 5, "max_total_tokens": 640}


@pytest.mark.parametrize(("algorithm", "draft"), DRAFTS)
def test_tokens_are_those_without_speculation(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None
) -> None:
    """On a random schedule; the proof's runs have all kinds of them."""
    device = VgpuDevice(gpu=VirtualGpu(seed=1, policy="random"))
    reqs = requests(3, num=6, max_new_tokens=9)
    driver = make_driver(models, algorithm, draft, device=device, cuda_graph_bs=(2, 5), **FLAGS)  # type: ignore[arg-type]
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert isinstance(driver.worker, ModelRunner) and driver.worker.graph_stats is not None
    stats = driver.worker.graph_stats
    assert stats.replays == stats.eligible_steps > 3 and not stats.fallbacks


@pytest.mark.parametrize("page_size", [1, 4])
def test_prefill_in_pieces(models: dict[str, Path], page_size: int) -> None:
    """The pieces leave the hidden states that an EAGLE-3 head reads: as many drafts are accepted as without them."""
    reqs = requests(3, num=6, max_new_tokens=9)

    def run(**flags: object) -> tuple[object, Counter[int], ModelRunner]:
        device = VgpuDevice(gpu=VirtualGpu(seed=4, policy="random"))
        driver = make_driver(models, EAGLE3, "eagle3", device=device, page_size=page_size, **FLAGS, **flags)  # type: ignore[arg-type]
        counts = count_tokens(driver)
        assert isinstance(driver.worker, ModelRunner)
        return answers(driver, reqs), counts, driver.worker

    plain, plain_counts, _ = run()
    pieces, counts, worker = run(piecewise_cuda_graph_tokens=(8, 32))
    assert pieces == plain and counts == plain_counts
    assert worker.prefill_graph_stats is not None and worker.prefill_graph_stats.replays > 0


@pytest.mark.parametrize(
    ("algorithm", "draft", "policy"),
    [
        (EAGLE3, "eagle3", "laziest"),
        (STANDALONE, "near", "random"),
        pytest.param(EAGLE, "eagle", "pct", marks=pytest.mark.long),
    ],
)
def test_trees(models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str, policy: str) -> None:
    device = VgpuDevice(gpu=VirtualGpu(seed=5, policy=policy))
    reqs = requests(3, num=6, max_new_tokens=9)
    sizes: dict[str, object] = {"num_steps": 3, "num_rows": 5, "max_total_tokens": 640, "topk": 2}
    driver = make_driver(models, algorithm, draft, device=device, cuda_graph_bs=(2, 5), **sizes)  # type: ignore[arg-type]
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert isinstance(driver.worker, ModelRunner) and driver.worker.graph_stats is not None
    stats = driver.worker.graph_stats
    assert stats.replays == stats.eligible_steps > 3 and not stats.fallbacks


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "draft", "topk"),
    [(EAGLE3, "eagle3", 1), (NEXTN, "mtp", 1), (STANDALONE, "target", 1), (EAGLE, "eagle", 2), (STANDALONE, "near", 2)],
)
def test_each_depth_has_graphs_of_its_own(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str, topk: int
) -> None:
    device = VgpuDevice(gpu=VirtualGpu(seed=6, policy="random"))
    reqs = requests(3, num=6, max_new_tokens=9)
    flags: dict[str, object] = {**FLAGS, "topk": topk, "num_steps": 3, "cuda_graph_bs": (2, 5)}
    driver = make_driver(models, algorithm, draft, device=device, depth_seed=1, **flags)  # type: ignore[arg-type]
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert isinstance(driver.worker, ModelRunner) and driver.worker.graph_stats is not None
    stats, steps = driver.worker.graph_stats, driver.scheduler.stats.num_steps_by_depth
    assert stats.replays == stats.eligible_steps == steps.total() and not stats.fallbacks
    assert set(steps) == {0, 1, 3}


def test_without_graphs(models: dict[str, Path]) -> None:
    device = VgpuDevice(gpu=VirtualGpu(seed=2, policy="random"))
    reqs = requests(4, num=6, max_new_tokens=9)
    driver = make_driver(models, EAGLE3, "eagle3", device=device, disable_cuda_graph=True, **FLAGS)  # type: ignore[arg-type]
    assert answers(driver, reqs) == plain_answers(models, reqs)


@pytest.mark.parametrize(
    ("guard", "error"),
    [(ARENA_PAD, FreshnessError), (SINK, BoundsError), (GRAPH_POOL, StaleMemoryError), (TOTAL_BUCKETS, FreshnessError)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_guard_that_is_missing_is_named(models: dict[str, Path], guard: object, error: type[CheckError]) -> None:
    name = guard.name  # type: ignore[attr-defined]
    device = VgpuDevice(frozenset({name}), VirtualGpu(seed=1))
    with pytest.raises(error) as caught:
        driver = make_driver(models, EAGLE3, "eagle3", device=device, cuda_graph_bs=(2, 5), **FLAGS)  # type: ignore[arg-type]
        # Penalties are memory that is allocated after the captures.
        answers(driver, requests(3, num=6, max_new_tokens=9, frequency_penalty=0.5))
    assert f"missing guard: {name}" in str(caught.value)
