"""fenceline_kernel on a GPU: the kernels themselves against torch, eager, captured, on streams, at odd sizes."""

from __future__ import annotations

import random

import fenceline_kernel
import numpy as np
import pytest
import torch
from fenceline_kernel import FillField, FillPlan, PagePools
from kernel_package_cases import PageCase, random_fill_case
from page_pools import Shape, bytes_of, device_pages, host_pages, make_pools

from fenceline.mem_cache.host.page_copy import CudaCopier, RunCopier, make_page_copier
from fenceline.memory_order import open_device
from fenceline.memory_order.cuda import MIN_MAPPED_BYTES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """A GPU without a compiler or a prebuilt library is no failure of the kernels."""
    why = fenceline_kernel.why_unavailable()
    if why is not None:
        pytest.skip(why)


# --- arena fill


@pytest.mark.parametrize("seed", range(100))
def test_fill_copies_live_rows_and_pads_the_rest(seed: int) -> None:
    case = random_fill_case(seed, "cuda", pinned=seed % 2 == 1)
    num_live = random.Random(seed).randint(0, case.max_live)
    FillPlan(case.fields).fill(num_live)
    case.check(num_live)


def test_fill_of_a_large_page_table_with_fewer_columns() -> None:
    table = torch.full((512, 2500), 7, dtype=torch.int32, device="cuda")
    source = torch.arange(300 * 1999, dtype=torch.int32, device="cuda").view(300, 1999)
    fenceline_kernel.arena_fill([FillField(table, source, -3)], 300)
    assert torch.equal(table[:300, :1999], source)
    assert (table[:300, 1999:] == -3).all()
    assert (table[300:] == -3).all()


def test_captured_fill_reads_its_sources_at_replay() -> None:
    case = random_fill_case(3, "cuda")
    num_live = torch.zeros(1, dtype=torch.int64, device="cuda")
    plan = FillPlan(case.fields)
    plan.fill(num_live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.fill(num_live)
    sources = [field.src for field in case.fields if field.src is not None]
    for value in (case.max_live, 0, 1, 10**12, -1):
        num_live.fill_(value)
        for source in sources:
            source.copy_(source.flip(0))
        graph.replay()
        case.check(min(max(value, 0), 10**6))


def test_fill_runs_on_the_current_stream_or_the_one_named() -> None:
    """A fill on a stream that is held up must not show before the stream goes on."""
    stream = torch.cuda.Stream()
    target, source = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    plan = FillPlan([FillField(target, source, 0)])
    plan.fill(64)  # loads the kernel, which may wait for the GPU
    for named in (False, True):
        target.zero_()
        assert target.sum().item() == 0
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
            if not named:
                plan.fill(64)
        if named:
            plan.fill(64, stream=stream.cuda_stream)
        assert target.sum().item() == 0  # read on another stream, while the first still sleeps
        torch.cuda.synchronize()
        assert target.sum().item() == 64


def test_source_in_pageable_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pin_memory\(\)"):
        FillPlan([FillField(torch.zeros(4, device="cuda"), torch.zeros(4), 0)])


# --- page copy

IO_BACKENDS = ("kernel", "direct")
LAYOUTS = ("layer_first", "page_first")


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(16))
def test_pages_travel_both_ways_and_nothing_else_changes(io_backend: str, layout: str, seed: int) -> None:
    case = PageCase.random(seed, layout, "cuda")
    pools = case.pools(io_backend)
    case.check_to_host(pools)
    case.check_to_device(pools)


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_groups_of_layers(io_backend: str, layout: str, page_size: int) -> None:
    case = PageCase.random(7 + page_size, layout, "cuda", num_layers=6, heads=(2, 64), page_size=page_size)
    pools = case.pools(io_backend)
    for layers in (range(2, 4), range(1), range(5, 6), range(6)):
        case.check_to_host(pools, layers)
        case.check_to_device(pools, layers)


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_more_layers_than_one_launch_takes(io_backend: str) -> None:
    case = PageCase.random(2, "layer_first", "cuda", num_layers=130, heads=(1, 8))
    case.check_to_host(case.pools(io_backend))
    case.check_to_device(case.pools(io_backend))


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_one_token_and_lists_of_several_launches(io_backend: str, layout: str) -> None:
    case = PageCase.random(0, layout, "cuda", num_layers=2, page_size=1)
    generator = torch.Generator(device="cuda").manual_seed(0)
    case.k, case.v = ([_random_bytes((5000, 2, 8), generator) for _ in range(2)] for _ in range(2))
    shape = (2, 2, 5000, 2, 8) if layout == "layer_first" else (5000, 2, 2, 1, 2, 8)
    case.host = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=True)
    draw = np.random.default_rng(0)
    case.device_pages, case.host_pages = (draw.permutation(5000).astype(np.int32) for _ in range(2))
    case.device_pages[:1000] = np.sort(case.device_pages[:1000])  # some runs, short ones
    pools = case.pools(io_backend)
    case.copy(pools, True)
    torch.cuda.synchronize()
    device, host = torch.from_numpy(case.device_pages).long(), torch.from_numpy(case.host_pages).long()
    for layer in range(2):
        for c, tensor in enumerate((case.k[layer], case.v[layer])):
            there = case.host[layer, c] if layout == "layer_first" else case.host[:, layer, c, 0]
            assert torch.equal(there[host].view(torch.int16), tensor.cpu()[device].view(torch.int16))
    before = [tensor.clone() for tensor in (*case.k, *case.v)]
    for tensor in (*case.k, *case.v):
        tensor.zero_()
    case.copy(pools, False)
    after = (*case.k, *case.v)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("named", [True, False])
def test_a_copy_runs_on_the_current_stream_or_the_one_named(io_backend: str, named: bool) -> None:
    """Held up on its stream, it reads what is there when the stream gets to it; the host has gone on."""
    case = PageCase.random(3, "page_first", "cuda", num_layers=3, page_size=16)
    pools, stream = case.pools(io_backend), torch.cuda.Stream()
    case.copy(pools, True)  # loads the kernel, which may wait for the GPU
    torch.cuda.synchronize()
    case.host.zero_()
    for tensor in (*case.k, *case.v):
        tensor.fill_(1)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
        for tensor in (*case.k, *case.v):
            tensor.fill_(2)
    lists = case.device_pages, case.host_pages
    if named:
        pools.copy(*lists, to_host=True, stream=stream.cuda_stream)
    else:
        with torch.cuda.stream(stream):
            pools.copy(*lists, to_host=True)
    assert not case.host.any(), "the stream still sleeps"
    stream.synchronize()
    assert (case.host[torch.from_numpy(case.host_pages).long()] == 2).all()


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_copies_both_ways_on_two_streams_at_once(io_backend: str) -> None:
    case = PageCase.random(5, "page_first", "cuda", num_layers=4, heads=(8, 128), page_size=16)
    num_pages, half = 40, 20
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (num_pages * 16, 8, 128)
    case.k, case.v = ([_random_bytes(shape, generator) for _ in range(4)] for _ in range(2))
    host = torch.empty(num_pages, 4, 2, 16, 8, 128, dtype=torch.bfloat16, pin_memory=True)
    host.view(torch.int16).random_(-100, 100)
    case.host = host
    pools, numbers = case.pools(io_backend), np.arange(num_pages, dtype=np.int32)
    old_host, old = host.clone(), [tensor.clone() for tensor in (*case.k, *case.v)]
    load, store = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        pools.copy(numbers[:half], numbers[:half], to_host=True, stream=store.cuda_stream)
        for layer in range(4):
            pools.copy(
                numbers[half:], numbers[half:], to_host=False, layers=range(layer, layer + 1), stream=load.cuda_stream
            )  # fmt: skip
    torch.cuda.synchronize()
    for i, (now, before) in enumerate(zip((*case.k, *case.v), old, strict=True)):
        layer, c = i % 4, i // 4
        now, before = (
            now.view(num_pages, -1).view(torch.int16).cpu(),
            before.view(num_pages, -1).view(torch.int16).cpu(),
        )
        assert torch.equal(now[:half], before[:half])
        assert torch.equal(now[half:], old_host[half:, layer, c].flatten(1).view(torch.int16))
        assert torch.equal(host[:half, layer, c].flatten(1).view(torch.int16), before[:half])


def test_the_copy_engine_on_the_legacy_default_stream() -> None:
    """Which the batch call refuses: the copies then go one by one."""
    case = PageCase.random(11, "page_first", "cuda", num_layers=2, page_size=16)
    with torch.cuda.stream(torch.cuda.default_stream()):
        case.check_to_host(case.pools("direct"))
        case.check_to_device(case.pools("direct"))


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_round_trip_of_a_gigabyte_is_the_same_bytes(io_backend: str) -> None:
    """Many units for each thread, a copy that is no multiple of the grid, other pages on the way back."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (16 * 1021, 8, 128)
    k, v = ([_random_bytes(shape, generator) for _ in range(16)] for _ in range(2))
    host = torch.empty(1021, 16, 2, 16, 8, 128, dtype=torch.bfloat16, pin_memory=True)
    pools = PagePools(k, v, host, 16, "page_first", io_backend)  # type: ignore[arg-type]
    draw, straight = np.random.default_rng(0), np.arange(1021, dtype=np.int32)
    order, back = (draw.permutation(1021).astype(np.int32) for _ in range(2))
    before = [tensor.view(1021, -1).clone() for tensor in (*k, *v)]
    pools.copy(order, straight, to_host=True, num_ctas=7)
    pools.copy(back, straight, to_host=False, num_ctas=16)
    from_, to = torch.from_numpy(order).long().cuda(), torch.from_numpy(back).long().cuda()
    for tensor, old in zip((*k, *v), before, strict=True):
        assert torch.equal(tensor.view(1021, -1)[to].view(torch.int16), old[from_].view(torch.int16))


# --- through the engine's own rooms


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_copier_on_load_and_store(io_backend: str, layout: str, page_size: int) -> None:
    device = open_device("cuda")
    shape = Shape(num_device_pages=40, num_host_pages=50, page_size=page_size, num_layers=5, heads=(4, 128))
    kv_pool, host_pool = make_pools(device, layout, shape)  # type: ignore[arg-type]
    copier = make_page_copier(device, kv_pool, host_pool, io_backend)  # type: ignore[arg-type]
    assert isinstance(copier, CudaCopier)
    before, expected = device_pages(kv_pool), host_pages(host_pool)
    draw = np.random.default_rng(0)
    taken, there = (draw.permutation(n)[:30].astype(np.int32) for n in (40, 50))
    taken[:10], there[:10] = np.sort(taken[:10]), np.sort(there[:10])
    expected[there] = before[taken]
    copier.to_host(device.store, taken, there)
    device.synchronize()
    assert torch.equal(host_pages(host_pool), expected)
    back = draw.permutation(40)[:30].astype(np.int32)
    for first in (0, 2, 4):
        copier.to_device(device.load, there, back, range(first, min(first + 2, 5)))
    before[back] = expected[there]
    device.synchronize()
    assert torch.equal(device_pages(kv_pool), before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_own_copies_give_the_same(layout: str) -> None:
    device = open_device("cuda")
    kv_pool, host_pool = make_pools(device, layout, Shape())  # type: ignore[arg-type]
    copier = RunCopier(device, kv_pool, host_pool, uses_sm=False, strided=False)
    before, expected = device_pages(kv_pool), host_pages(host_pool)
    taken, there = np.array([2, 3, 4, 9], np.int32), np.array([7, 8, 9, 0], np.int32)
    expected[there] = before[taken]
    copier.to_host(device.store, taken, there)
    device.synchronize()
    assert torch.equal(host_pages(host_pool), expected)
    copier.to_device(device.load, there, taken[::-1].copy(), range(1, 3))
    moved = bytes_of(kv_pool.layout, range(1, 3))
    before[taken[::-1].copy(), moved] = expected[there, moved]
    device.synchronize()
    assert torch.equal(device_pages(kv_pool), before)


def test_a_host_pool_of_half_a_gigabyte_is_pinned_by_mapping() -> None:
    device = open_device("cuda")
    shape = Shape(num_device_pages=4, num_host_pages=2048, page_size=64, num_layers=1, heads=(8, 128))
    kv_pool, host_pool = make_pools(device, "page_first", shape)
    assert host_pool.nbytes >= MIN_MAPPED_BYTES
    assert host_pool.buffer.is_pinned()
    assert host_pool.buffer[-1:].is_pinned()
    for io_backend in IO_BACKENDS:
        copier = make_page_copier(device, kv_pool, host_pool, io_backend)  # type: ignore[arg-type]
        copier.to_host(device.store, np.array([1, 3], np.int32), np.array([0, 2047], np.int32))
        device.synchronize()
        assert torch.equal(host_pages(host_pool)[[0, 2047]], device_pages(kv_pool)[[1, 3]])
        host_pool.buffer.zero_()


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda", generator=generator)
    return bits.view(torch.bfloat16)
