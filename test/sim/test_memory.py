"""The allocator: poison, reuse, tenancies."""

from __future__ import annotations

import gc

import pytest
import torch
from conformance_vgpu import make_gpu

from fenceline_sim import KernelError, RaceError, VirtualGpu, use
from fenceline_sim.errors import BoundsError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_memory_without_a_value_is_nan(dtype: torch.dtype) -> None:
    _, device = make_gpu()
    assert torch.empty(5, dtype=dtype, device=device).isnan().all()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_integers_without_a_value_are_beyond_any_index(dtype: torch.dtype) -> None:
    _, device = make_gpu()
    assert (torch.empty(5, dtype=dtype, device=device) > 30_000).all()


def test_an_index_that_nobody_wrote_is_an_illegal_access() -> None:
    _, device = make_gpu()
    table, index = torch.zeros(100, device=device), torch.empty(2, dtype=torch.int64, device=device)
    with pytest.raises(BoundsError, match="index_select"):
        table.index_select(0, index).cpu()
    device = use(VirtualGpu(detect=False))
    table, index = torch.zeros(100, device=device), torch.empty(2, dtype=torch.int64, device=device)
    with pytest.raises(KernelError, match="index_select"):
        table.index_select(0, index).cpu()


def test_freed_memory_is_handed_out_again_at_once_and_poisoned() -> None:
    gpu, device = make_gpu()
    x = torch.ones(64, device=device)
    region = x.allocation.tag.region
    view = x[2:]
    del x
    y = torch.empty(64, device=device)
    assert y.allocation.tag.region is not region, "a view keeps it"
    del view
    z = torch.empty(64, device=device)
    assert z.allocation.tag.region is region and z.isnan().all()
    del y
    gpu.synchronize_all()


def test_memory_returns_to_the_stream_it_was_allocated_on() -> None:
    gpu, device = make_gpu()
    a, b = gpu.stream("a"), gpu.stream("b")
    with gpu.on(a):
        x = torch.ones(64, device=device)
        region = x.allocation.tag.region
    with gpu.on(b):
        del x
        assert torch.empty(64, device=device).allocation.tag.region is not region
    with gpu.on(a):
        assert torch.empty(64, device=device).allocation.tag.region is region
    gpu.synchronize_all()


def test_reuse_on_one_stream_is_ordered_by_the_stream() -> None:
    """A tensor that is dropped while queued work still needs it keeps its values for that work."""
    gpu, device = make_gpu("laziest")
    total = torch.zeros(64, device=device)
    for value in range(5):
        total += torch.full((64,), float(value), device=device)
    assert total[0].item() == 10.0 and gpu.pool.used_bytes <= 4 * 512


@pytest.mark.parametrize("policy", ["fifo", "eager", "laziest", "random", "pct"])
def test_dropping_a_tensor_that_another_stream_uses_is_a_race(policy: str) -> None:
    for seed in range(3):
        gpu, device = make_gpu(policy, seed=seed)
        other = gpu.stream("other")
        x = torch.ones(64, device=device)
        gpu.synchronize_all()
        with gpu.on(other):
            y = x + 1
        with pytest.raises(RaceError, match=r"wrong stream: .* belongs to default, and is used on other"):
            del x
            gc.collect()
            gpu.synchronize_all()
        del y


def test_without_the_detector_it_gives_wrong_values() -> None:
    def wrong(seed: int) -> bool:
        gpu, device = make_gpu("random", seed=seed, detect=False)
        other = gpu.stream("other")
        x = torch.ones(64, device=device)
        gpu.synchronize_all()
        with gpu.on(other):
            y = x + 1
        del x
        gpu.synchronize_all()
        return bool(y.isnan().any())

    assert {wrong(seed) for seed in range(20)} == {True, False}


def test_out_of_memory_is_torchs_error() -> None:
    gpu, device = make_gpu(total_bytes=1 << 20)
    kept = torch.empty(1 << 17, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="524288 of 1048576 left"):
        torch.empty(1 << 18, device=device)
    del kept
    torch.empty(1 << 17, device=device)
    assert gpu.pool.used_bytes == 1 << 19


def test_names_appear_with_rows_or_bytes() -> None:
    gpu, device = make_gpu(collect=True)
    table, blob = torch.zeros(10, 4, device=device), torch.zeros(64, device=device)
    gpu.name_memory(table, "table", row_bytes=16)
    gpu.name_memory(blob, "blob")
    other = gpu.stream("other")
    gpu.synchronize_all()
    for stream in (gpu.default_stream, other):
        with gpu.on(stream):
            table[2:5].fill_(1)
            blob[8:12].fill_(1)
    gpu.synchronize_all()
    assert {race.memory for race in gpu.races} == {"table rows 2-4", "blob bytes 32..48"}
