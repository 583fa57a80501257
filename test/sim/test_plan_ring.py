"""The ring of plans on the virtual GPU: every schedule reads the plan it was given, and no edge can be left out."""

from __future__ import annotations

import pytest
import torch

from fenceline.memory_order.staging import PlanRing
from fenceline_sim import RaceError, VgpuDevice, VirtualGpu

POLICIES = ("fifo", "eager", "laziest", "random", "pct")
NUM_STEPS = 5
NBYTES = 64


def run(policy: str, seed: int, severed: frozenset[str] = frozenset(), depth: int = 2) -> list[int]:
    """Steps that are each planned with their number; what each of them read."""
    device = VgpuDevice(severed, VirtualGpu(policy=policy, seed=seed))
    ring = PlanRing(device, NBYTES, depth)
    device.synchronize()
    read = []
    for number in range(NUM_STEPS):
        with ring.planning() as slot:
            slot.host.fill_(number)
            # As a library does it: on the current stream.
            slot.device.copy_(slot.host, non_blocking=True)
        with device.forward.active():
            read.append(slot.device.clone())
    device.synchronize()
    return [int(tensor.cpu().unique()) for tensor in read]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_reads_its_own_plan(policy: str, depth: int) -> None:
    for seed in range(4):
        assert run(policy, seed, depth=depth) == list(range(NUM_STEPS))


@pytest.mark.parametrize("edge", ["staging_reuse", "schedule_after_forward", "forward_after_schedule"])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_edge_is_needed(policy: str, edge: str) -> None:
    """F12 is staging_reuse: the host writes the next plan over one whose copy has yet to run."""
    with pytest.raises(RaceError, match="plan_ring"):
        run(policy, 0, frozenset({edge}))


def test_the_slots_take_turns() -> None:
    device = VgpuDevice()
    ring = PlanRing(device, NBYTES)
    taken: list[torch.Tensor] = []
    for _ in range(4):
        with ring.planning() as slot:
            taken.append(slot.host)
    assert taken[0] is taken[2] and taken[1] is taken[3] and taken[0] is not taken[1]
    assert ring.num_plans == 4
