"""The engine's own code on the virtual GPU: rings, model runner and scheduler, intact and with edges severed."""

from __future__ import annotations

import gc
import weakref
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from model_parity import save_checkpoint
from ring_transfers import ring_transfers
from sala_reference import save_sala
from scheduler_driver import answers, make_model_driver, request
from tiny_model import tiny_driver, tiny_requests

from fenceline.layers.context import Shard
from fenceline.memory_order import MaskTable
from fenceline.memory_order.edges import RING_EDGES
from fenceline_sim import VgpuDevice, VgpuError, VirtualGpu, use

POLICIES = ("fifo", "eager", "laziest", "random", "pct")


@lru_cache
def expected() -> list[list[int]]:
    return answers(tiny_driver("cpu"), tiny_requests())


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_equal_those_of_the_cpu_without_a_report(policy: str) -> None:
    for seed in range(2):
        gpu = VirtualGpu(seed=seed, policy=policy)
        assert answers(tiny_driver(VgpuDevice(gpu=gpu)), tiny_requests()) == expected(), f"{policy} {seed}"
        assert gpu.detector is not None and gpu.detector.num_accesses > 3000


@pytest.mark.parametrize("name", ["nemotron-h-moe", "minicpm-sala"])
def test_models_with_other_layers_are_silent(name: str, tmp_path: Path) -> None:
    """Mamba2, attention, experts and MLPs, each in a layer of its own; lightning attention, and attention to selected
    blocks. Whole, and in pieces and graphs."""
    if name == "minicpm-sala":
        save_sala(tmp_path)
    else:
        save_checkpoint(name, tmp_path)

    def told(**flags: object) -> list[list[int]]:
        driver = make_model_driver(model_path=str(tmp_path), num_rows=4, max_total_tokens=512, **flags)  # type: ignore[arg-type]
        return answers(
            driver, [request(str(n), list(range(2, 2 + n)), temperature=0.0, max_new_tokens=6) for n in (5, 66, 90)]
        )

    for flags in ({}, {"chunked_prefill_size": 96, "piecewise_cuda_graph_tokens": (96,), "cuda_graph_bs": (2, 4)}):
        assert told(rank=(VgpuDevice(gpu=VirtualGpu(seed=1)), Shard()), **flags) == told()


def test_a_seed_repeats_a_run_of_the_engine() -> None:
    def run(gpu: VirtualGpu) -> tuple[list[list[int]], list[str]]:
        """Without an edge, so that there is something to report."""
        tokens = answers(tiny_driver(VgpuDevice(frozenset({"forward_after_schedule"}), gpu)), tiny_requests(2))
        return tokens, [str(race) for race in gpu.races]

    # Staging is poisoned, so only a schedule on which SCHEDULE happens to come first survives: eager does.
    first = run(VirtualGpu(policy="eager", collect=True))
    assert first[1], "an eager device hides the race from the tokens, not from the detector"
    assert run(VirtualGpu(policy="eager", collect=True)) == first


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rings_are_silent(policy: str) -> None:
    for seed in range(5):
        assert ring_transfers(VgpuDevice(gpu=VirtualGpu(seed=seed, policy=policy))) == [
            value for value in (4, 24, 44, 64, 84, 104) for _ in range(2)
        ]


@pytest.mark.parametrize("policy", POLICIES)
def test_masks_of_some_requests_are_in_their_rows(policy: str) -> None:
    for seed in range(3):
        device = VgpuDevice(gpu=VirtualGpu(seed=seed, policy=policy))
        with torch.inference_mode():
            table = MaskTable(device, 4, 32)
            drawn: list[torch.Tensor] = []
            device.synchronize()
            for step in range(3):
                table.begin(np.array([0, 2]), 3, 4)[:] = step
                masks = table.upload()
                with device.forward.active():
                    drawn.append(masks.flatten().clone())
                table.drawn(device.forward.record())
            device.synchronize()
        assert [masks.tolist() for masks in drawn] == [[step, -1, step, -1] for step in range(3)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("edge", [edge.name for edge in RING_EDGES])
def test_without_an_edge_the_detector_names_it(edge: str, policy: str) -> None:
    for seed in range(3):
        gpu = VirtualGpu(seed=seed, policy=policy, collect=True)
        ring_transfers(VgpuDevice(frozenset({edge}), gpu))
        cause = min(gpu.races, key=lambda race: race.order, default=None)
        assert cause is not None, f"{policy} {seed}: silent without {edge}"
        assert cause.edge == edge, str(cause)
        assert "_ring." in cause.memory and all("staging.py" in place for place in cause.places)


@pytest.mark.parametrize("edge", ["forward_after_schedule", "copy_after_forward", "host_after_copy"])
def test_the_scheduler_without_an_edge_is_caught(edge: str) -> None:
    named = set()
    for seed in range(4):
        gpu = VirtualGpu(seed=seed)
        with pytest.raises(VgpuError):
            answers(tiny_driver(VgpuDevice(frozenset({edge}), gpu)), tiny_requests())
        named |= {race.edge for race in gpu.races}
    assert edge in named


def test_a_gpu_that_has_seen_a_fault_is_freed_with_its_engine() -> None:
    """What it has raised refers to frames of the engine, and so to tensors with views, all of whose references Python's
    garbage collector takes for ones from outside."""

    def fault() -> weakref.ref[VirtualGpu]:
        gpu = VirtualGpu()
        with pytest.raises(VgpuError):
            answers(tiny_driver(VgpuDevice(frozenset({"forward_after_schedule"}), gpu)), tiny_requests())
        return weakref.ref(gpu)

    gpu = fault()
    use(VirtualGpu())
    gc.collect()
    assert gpu() is None
