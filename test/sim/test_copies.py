"""Copies between host and device: their values, and what the detector makes of host memory. test_conformance.py has
when it is touched, and who waits."""

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
