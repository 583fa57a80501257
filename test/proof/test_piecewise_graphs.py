"""Prefill in pieces on the virtual GPU: tokens are the CPU's on any schedule, and what keeps its memory right is named
by the checker that misses it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from scheduler_driver import answers
from tiny_model import tiny_driver, tiny_requests
from trace_runner import prefill_stats

from fenceline.mem_cache.transfer import TransferKind
from fenceline.memory_order import Device, open_device
from fenceline.memory_order.edges import ARENA_PAD, GRAPH_POOL, SINK, TOTAL_BUCKETS
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_proof.script import Scenario, Script
from fenceline_proof.steps import Loop, make_config
from fenceline_sim import VgpuDevice, VirtualGpu
from fenceline_sim.errors import BoundsError, CheckError, FreshnessError, RaceError, StaleMemoryError

POLICIES = ("fifo", "laziest", "eager", "pct", "random")
FLAGS: dict[str, object] = {"piecewise_cuda_graph_tokens": (3, 6, 16), "context_length": 64}
DECODE: dict[str, object] = {"cuda_graph_bs": (2, 4)}


def run(device: Device, **flags: object) -> list[list[int]]:
    """All requests twice, so that memory is handed on and prefixes are found. ``others`` is memory of every small size
    that is allocated after the captures: what these have freed, if the graphs have no pool of their own."""
    driver = tiny_driver(device, **(FLAGS | flags))
    with device.forward.active():
        others = [torch.zeros(128 << size, device=device.torch_device) for size in range(5)]
    first = answers(driver, tiny_requests(4))
    driver.answers.clear()
    second = answers(driver, tiny_requests(4))
    worker = driver.scheduler.worker
    assert isinstance(worker, ModelRunner)
    stats = prefill_stats(worker)
    assert stats.replays == stats.eligible_steps > 3 and not stats.fallbacks
    assert all(not other.any() for other in others)
    return first + second


@pytest.fixture(scope="module")
def without_graphs() -> list[list[int]]:
    return answers(tiny_driver("cpu"), tiny_requests(4)) * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_without_graphs_without_a_report(policy: str, without_graphs: list[list[int]]) -> None:
    assert run(VgpuDevice(gpu=VirtualGpu(seed=1, policy=policy)), **DECODE) == without_graphs


def test_graphs_of_prefill_need_none_of_decode(without_graphs: list[list[int]]) -> None:
    assert run(VgpuDevice(gpu=VirtualGpu(seed=2))) == run(open_device("cpu")) == without_graphs


@pytest.mark.parametrize(
    ("guard", "error"),
    [(ARENA_PAD, FreshnessError), (SINK, BoundsError), (GRAPH_POOL, StaleMemoryError), (TOTAL_BUCKETS, FreshnessError)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_guard_that_is_missing_is_named(guard: object, error: type[CheckError]) -> None:
    name = guard.name  # type: ignore[attr-defined]
    with pytest.raises(error) as caught:
        run(VgpuDevice(frozenset({name}), VirtualGpu(seed=1)))
    assert f"missing guard: {name}" in str(caught.value)


# --- with a host tier: loads in flight while the pieces are replayed -----------------------------------


def conversations(random: Random) -> Scenario:
    """Turns of conversations that the device forgets: their pages come back from the host layer by layer, while pieces
    of other steps, and of those that wait for them, are replayed."""
    script = Script(random)
    families = [script.prompt(9, 14) for _ in range(3)]
    for turn in range(8):
        script.add(2 * turn, families[turn % 3] + script.prompt(1, 5), random.randint(1, 4))
    return script.scenario(
        max_total_tokens=40,
        max_running_requests=3,
        chunked_prefill_size=16,
        page_size=4,
        enable_hierarchical_cache=True,
        hicache_ratio=4.0,
        hicache_write_policy="write_through",
        hicache_io_backend=random.choice(("direct", "kernel")),
        hicache_mem_layout=random.choice(("layer_first", "page_first")),
        piecewise_cuda_graph_tokens=(4, 16),
        cuda_graph_bs=(1, 3),
        context_length=64,
    )


def play(device: Device, make: Callable[[Random], Scenario], seed: int) -> Loop:
    scenario = make(Random(seed))
    config = make_config(scenario.flags, device.kind)
    loop = Loop(config, device, scenario=scenario)
    loop.run()
    return loop


@pytest.mark.parametrize("seed", range(len(POLICIES)))
def test_loads_in_flight_disturb_no_piece(seed: int) -> None:
    loop = play(VgpuDevice(gpu=VirtualGpu(seed=seed, policy=POLICIES[seed])), conversations, seed)
    stats = prefill_stats(loop.runner)
    assert stats.replays == stats.eligible_steps > 3
    assert loop.runner.hicache is not None
    assert loop.runner.hicache.counts[TransferKind.LOAD].num_transfers > 0


def test_without_the_wait_between_the_pieces_a_race_is_found() -> None:
    """forward_after_load is what orders a layer's piece after that layer's pages."""
    with pytest.raises(RaceError, match="forward_after_load"):
        for seed in range(4):
            play(VgpuDevice(frozenset({"forward_after_load"}), VirtualGpu(seed=seed)), conversations, seed)
