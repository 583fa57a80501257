"""Copies between host and device, pageable and pinned, blocking or not: when host memory is touched, and who waits."""

from __future__ import annotations

import pytest
import torch
from conformance_vgpu import make_gpu

from fenceline_sim import RaceError, VirtualGpu


def pinned_floats(gpu: VirtualGpu, *values: float) -> torch.Tensor:
    buffer = gpu.pinned.buffer(4 * len(values)).view(torch.float32)
    gpu.host_access(buffer, True, "fill")
    buffer.copy_(torch.tensor(values))
    return buffer


def test_pageable_to_device_is_staged_at_the_call() -> None:
    gpu, device = make_gpu("laziest", detect=False)
    x, host = torch.zeros(2, device=device), torch.tensor([1.0, 2.0])
    before = gpu.num_run
    x.copy_(host, non_blocking=True)
    assert gpu.num_run == before, "the host went on"
    host.fill_(9.0)
    assert x.tolist() == [1.0, 2.0]


def test_blocking_copy_to_device_waits_for_its_stream_alone() -> None:
    gpu, device = make_gpu("laziest", detect=False)
    x, y = torch.zeros(2, device=device), torch.zeros(2, device=device)
    gpu.synchronize_all()
    other = gpu.stream("other")
    with gpu.on(other):
        y.add_(1)
    x.add_(1)
    x.copy_(torch.tensor([1.0, 2.0]))
    assert not gpu.default_stream.queue and len(other.queue) == 1


def test_pinned_to_device_reads_host_memory_when_it_runs() -> None:
    gpu, device = make_gpu("laziest", detect=False)
    x, host = torch.zeros(2, device=device), pinned_floats(gpu, 1.0, 2.0)
    x.copy_(host, non_blocking=True)
    host.fill_(9.0)
    assert x.tolist() == [9.0, 9.0]


def test_device_to_pinned_arrives_when_it_runs() -> None:
    gpu, device = make_gpu("laziest", detect=False)
    x, host = torch.ones(2, device=device), pinned_floats(gpu, 5.0, 5.0)
    host.copy_(x, non_blocking=True)
    assert host.tolist() == [5.0, 5.0]
    gpu.synchronize_all()
    assert host.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_device_to_pageable_blocks(non_blocking: bool) -> None:
    _, device = make_gpu("laziest", detect=False)
    x, host = torch.ones(2, device=device), torch.zeros(2)
    host.copy_(x, non_blocking=non_blocking)
    assert host.tolist() == [1.0, 1.0]


def test_blocking_copy_to_pinned_blocks() -> None:
    gpu, device = make_gpu("laziest", detect=False)
    x, host = torch.ones(2, device=device), pinned_floats(gpu, 0.0, 0.0)
    host.copy_(x)
    assert host.tolist() == [1.0, 1.0]


def test_to_cpu_without_blocking_gives_pinned_memory_not_there() -> None:
    gpu, device = make_gpu("laziest", detect=False)
    x = torch.ones(2, device=device)
    host = x.to("cpu", non_blocking=True)
    assert host.isnan().all()
    gpu.synchronize_all()
    assert host.tolist() == [1.0, 1.0]


def test_copies_convert_and_broadcast() -> None:
    _, device = make_gpu("laziest", detect=False)
    x = torch.zeros(2, 3, dtype=torch.float64, device=device)
    x.copy_(torch.tensor([1, 2, 3]))
    assert x.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert x.to("cpu", torch.int32).tolist() == [[1, 2, 3]] * 2
    assert x.t().cpu().stride() == x.t().stride()
    assert x.to(torch.float32).dtype is torch.float32 and x.to(device) is x


def test_a_blocked_host_knows_what_ran() -> None:
    """What follows a blocking copy may use memory of any stream that the copy waited for."""
    gpu, device = make_gpu("random", detect=True)
    x = torch.zeros(2, device=device)
    gpu.synchronize_all()
    a, b = gpu.stream("a"), gpu.stream("b")
    with gpu.on(a):
        x.add_(1)
        x.cpu()
    with gpu.on(b):
        x.add_(1)
    gpu.synchronize_all()
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("policy", ["laziest", "eager", "random"])
def test_host_access_to_pinned_memory_is_watched(policy: str) -> None:
    gpu, device = make_gpu(policy, detect=True)
    x, host = torch.ones(2, device=device), pinned_floats(gpu, 0.0, 0.0)
    host.copy_(x, non_blocking=True)
    with pytest.raises(RaceError, match="RAW on pinned memory"):
        gpu.host_access(host, False, "read of a result")
        gpu.synchronize_all()


def test_a_query_that_succeeds_orders_the_host() -> None:
    gpu, device = make_gpu("eager", detect=True)
    x, host = torch.ones(2, device=device), pinned_floats(gpu, 0.0, 0.0)
    host.copy_(x, non_blocking=True)
    assert gpu.query(gpu.record(gpu.default_stream))
    gpu.host_access(host, False, "read of a result")
    assert host.tolist() == [1.0, 1.0]


def test_two_halves_of_a_pinned_buffer_do_not_meet() -> None:
    gpu, device = make_gpu("laziest", detect=True)
    buffer = pinned_floats(gpu, *[0.0] * 8)
    x = torch.ones(4, device=device)
    buffer[:4].copy_(x, non_blocking=True)
    gpu.host_access(buffer[4:], True, "write of the other half")
    gpu.synchronize_all()
