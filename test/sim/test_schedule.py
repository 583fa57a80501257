"""Schedules: what each policy does, and that a seed repeats a run."""

from __future__ import annotations

import pytest
import torch

from fenceline_sim import DeadlockError, KernelError, VirtualGpu, use
from fenceline_sim.place import here
from fenceline_sim.policy import POLICIES, Policy, make_policy
from fenceline_sim.streams import Operation


def outcome(policy: str | Policy, seed: int = 0, ordered: bool = False) -> tuple[list[float], VirtualGpu]:
    """Two streams write one tensor, without an order unless told."""
    gpu = VirtualGpu(seed=seed, policy=policy, detect=ordered)
    device = use(gpu)
    x = torch.zeros(2, device=device)
    a, b = gpu.stream("a"), gpu.stream("b")
    gpu.synchronize_all()
    with gpu.on(a):
        for _ in range(3):
            x.add_(1)
    if ordered:
        gpu.wait(b, gpu.record(a))
    with gpu.on(b):
        for _ in range(3):
            x.mul_(2)
    gpu.synchronize_all()
    return x.tolist(), gpu


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_schedule(policy: str) -> None:
    for seed in range(5):
        one, other = outcome(policy, seed), outcome(policy, seed)
        assert one[0] == other[0]


@pytest.mark.parametrize("policy", ["random", "pct"])
def test_seeds_reach_different_interleavings(policy: str) -> None:
    assert len({tuple(outcome(policy, seed)[0]) for seed in range(40)}) > (5 if policy == "random" else 2)


def test_eager_runs_at_once_and_the_laziest_only_what_is_needed() -> None:
    for policy, expected in (("eager", 2), ("laziest", 0), ("fifo", 0)):
        gpu = VirtualGpu(policy=policy)
        device = use(gpu)
        torch.zeros(2, device=device).add_(1)
        assert gpu.num_run == expected, policy


def test_the_laziest_does_not_run_unawaited_streams() -> None:
    gpu = VirtualGpu(policy="laziest")
    device = use(gpu)
    x, y = torch.zeros(2, device=device), torch.zeros(2, device=device)
    gpu.synchronize_all()
    a, b = gpu.stream("a"), gpu.stream("b")
    with gpu.on(a):
        x.add_(1)
    with gpu.on(b):
        y.add_(1)
        mark = gpu.record(b)
    gpu.synchronize(mark)
    assert len(a.queue) == 1 and not b.queue


def test_work_that_can_never_run_is_a_deadlock() -> None:
    gpu = VirtualGpu(policy="laziest")
    stream = gpu.stream("stuck")
    never = Operation("never submitted", here(), None)
    never.where = "nowhere"
    gpu.wait(stream, never)
    never.stream = stream
    with pytest.raises(DeadlockError, match="stuck waits for nowhere"):
        gpu.synchronize(gpu.record(stream))


def test_a_failing_kernel_is_reported_where_it_was_submitted() -> None:
    gpu = VirtualGpu(policy="laziest")
    device = use(gpu)
    x = torch.zeros(4, device=device)
    matrix = torch.ones(2, 2, device=device)
    y = torch.linalg.cholesky(matrix - 2 * matrix)  # the culprit: not positive definite
    with pytest.raises(KernelError, match=r"linalg\w* on default failed(.|\n)*# the culprit"):
        y.cpu()
    with pytest.raises(KernelError, match="cholesky"):
        x.cpu()


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of fifo"):
        make_policy("sometimes", 0)
