"""What the proof drives: scenarios that reach what they are for, and schedules that are shrunk."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

from fenceline.memory_order import open_device
from fenceline_proof.runs import Trial, run
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import SCRIPTED, WORKLOADS
from fenceline_sim import RaceError, VgpuDevice, VirtualGpu, use

torch.set_num_threads(1)
_FOLDER = tempfile.TemporaryDirectory()


def make_loop(name: str, seed: int, device: VgpuDevice | None = None) -> Loop:
    scenario = WORKLOADS[name].make(Random(seed))
    kind = "cpu" if device is None else "vgpu"
    flags = dict(scenario.flags)
    if "hicache_storage_backend" in flags:
        flags["hicache_storage_dir"] = tempfile.mkdtemp(dir=_FOLDER.name)
    config = make_config(flags, kind)
    return Loop(config, device or open_device(kind), scenario=scenario)


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scenario_is_a_function_of_its_seed(name: str) -> None:
    make = WORKLOADS[name].make
    assert make(Random(1)) == make(Random(1)) != make(Random(2))


def test_workloads_reach_what_they_are_for() -> None:
    def loops(name: str) -> Iterator[Loop]:
        for seed in range(4):
            loop = make_loop(name, seed)
            loop.run()
            yield loop

    assert any(loop.scheduler.stats.num_retractions for loop in loops("retraction"))
    assert any(loop.scheduler.stats.num_aborts for loop in loops("aborts"))
    for loop in loops("prefixes"):
        assert loop.scheduler.stats.num_cached_tokens > 0
        prompts = loop.scheduler.stats.num_prompt_tokens
        assert prompts > loop.scheduler.memory.num_pages * 4, "without evictions it would not fit"


def test_a_row_refilled_while_its_last_owners_step_is_in_flight() -> None:
    """F13: the upload that hands the row to the next request must wait for the step in flight, by that edge."""
    edge = "schedule_after_forward"
    for cut in (False, True):
        gpu = VirtualGpu(seed=1)
        loop = make_loop("row_reuse", 1, VgpuDevice(gpu=gpu))
        rows = loop.scheduler.memory.rows
        while not any(exchange.ended for exchange in loop.transcript.exchanges.values()):
            loop.step()
        # The first request has just ended; its next step is in flight, and its row is free for the next request.
        assert loop._flight is not None and rows.num_leased == 0 and loop.scheduler.waiting
        ended = loop._flight.reqs[0]
        if not cut:
            loop.step()
            assert loop._flight.reqs[0] is not ended and loop._flight.batch.rows[0] == 1
            continue
        loop.scheduler.worker.device.schedule._severed = frozenset({edge})
        with pytest.raises(RaceError) as caught:
            loop.run()
        assert caught.value.edge == edge and "input_ring.device" in caught.value.memory
        assert "copy to device writes it on schedule" in str(caught.value)


def test_whatever_is_still_held_at_the_end_is_noticed() -> None:
    """F6: a lock, a hold and a leased host page that nobody gives back."""
    for spoil, message in (
        (lambda tiers, node: tiers.tree.lock(node), "nodes are locked"),
        (lambda tiers, node: tiers.tree.hold_host(node), "holds are open"),
        (lambda tiers, node: tiers.host_pages.alloc(1), "are leased, the tree has"),
    ):
        loop = make_loop("persistent", 0)
        while loop.busy:
            loop.step()
        tiers = loop.scheduler.memory.tiers
        assert tiers is not None
        node = next(node for node in tiers.tree._nodes() if node.host_pages is not None)
        spoil(tiers, node)
        with pytest.raises(AssertionError, match=message):
            loop.run()


@pytest.mark.parametrize("severed", [(), ("forward_after_schedule",)])
@pytest.mark.parametrize("workload", ["mixed", "speculation"])
def test_an_engine_is_freed_after_its_run(
    workload: str, severed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A campaign makes thousands of runs in one process."""
    made: list[weakref.ref[Loop]] = []
    begin = Loop.__init__

    def noting(self: Loop, *args: Any, **options: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **options)

    monkeypatch.setattr(Loop, "__init__", noting)
    assert run(Trial(workload, 1, frozenset(severed))).clean is not bool(severed)
    use(VirtualGpu())
    gc.collect()
    assert made
    assert all(loop() is None for loop in made)
