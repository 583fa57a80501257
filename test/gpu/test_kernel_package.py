"""fenceline_kernel on a GPU: the kernels themselves against torch, eager, captured, on streams, at odd sizes."""

from __future__ import annotations

import random

import fenceline_kernel
import pytest
import torch
from fenceline_kernel import FillField, FillPlan, PagePools, gather_pages, scatter_pages
from kernel_package_cases import PageCase, random_fill_case

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


def test_fill_of_a_large_page_table_with_fewer_columns_in_the_source() -> None:
    table = torch.full((512, 2500), 7, dtype=torch.int32, device="cuda")
    source = torch.arange(300 * 1999, dtype=torch.int32, device="cuda").view(300, 1999)
    fenceline_kernel.arena_fill([FillField(table, source, -3)], 300)
    assert torch.equal(table[:300, :1999], source)
    assert (table[:300, 1999:] == -3).all()
    assert (table[300:] == -3).all()


def test_captured_fill_reads_its_sources_and_the_number_of_live_rows_at_replay() -> None:
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


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("seed", range(24))
def test_pages_travel_both_ways_and_nothing_else_changes(layout: str, seed: int) -> None:
    case = PageCase.random(seed, layout, "cuda")
    pools = case.pools()
    case.check_gather(pools)
    case.check_scatter(pools)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_some_layers_alone(layout: str) -> None:
    case = PageCase.random(7, layout, "cuda", num_layers=6, heads=(2, 64))
    pools = case.pools()
    for layers in (range(2, 4), range(1), range(5, 6), range(6)):
        case.check_gather(pools, layers)
        case.check_scatter(pools, layers)


def test_more_layers_than_one_launch_takes() -> None:
    case = PageCase.random(2, "layer_first", "cuda", num_layers=130, heads=(1, 8))
    case.check_gather(case.pools())
    case.check_scatter(case.pools())


def test_pages_out_of_bounds_are_skipped_and_counted_once_each() -> None:
    case = PageCase.random(1, "page_first", "cuda")
    pools, host = case.pools(), case.host.clone()
    rejected = torch.zeros(1, dtype=torch.int32, device="cuda")
    device_pages = torch.tensor([0, -1, pools.num_device_pages, 0], device="cuda")
    host_pages = torch.tensor([pools.num_host_pages, 0, 0, -(2**40)], device="cuda")
    gather_pages(pools, device_pages, host_pages, num_rejected=rejected)
    scatter_pages(pools, host_pages, device_pages, num_rejected=rejected)
    assert rejected.item() == 8
    assert torch.equal(case.host, host)


def test_captured_copy_reads_its_lists_at_replay() -> None:
    k, v = ([torch.randn(64, 2, 16, device="cuda") for _ in range(3)] for _ in range(2))
    host = torch.zeros(9, 3, 2, 4, 2, 16).pin_memory()
    pools = PagePools(k, v, host, 4, "page_first")
    device_pages, host_pages = (torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(2))
    host_pages[1] = 1
    gather_pages(pools, device_pages, host_pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_pages(pools, device_pages, host_pages)
    for pages in ([3, 5], [15, 0]):
        device_pages.copy_(torch.tensor(pages))
        graph.replay()
        torch.cuda.synchronize()
        for i, page in enumerate(pages):
            for layer in range(3):
                assert torch.equal(host[i, layer, 0], k[layer][page * 4 : page * 4 + 4].cpu())
                assert torch.equal(host[i, layer, 1], v[layer][page * 4 : page * 4 + 4].cpu())


def test_round_trip_of_a_gigabyte_is_the_same_bytes() -> None:
    """Many units for each thread, a copy that is no multiple of the grid, other pages on the way back."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (16 * 1021, 8, 128)
    k, v = ([_random_bytes(shape, generator) for _ in range(16)] for _ in range(2))
    host = torch.empty(1021, 16, 2, 16, 8, 128, dtype=torch.bfloat16, pin_memory=True)
    pools = PagePools(k, v, host, 16, "page_first")
    order, back = torch.randperm(1021, device="cuda"), torch.randperm(1021, device="cuda")
    before = [tensor.view(1021, -1).clone() for tensor in (*k, *v)]
    gather_pages(pools, order, torch.arange(1021, device="cuda"), num_ctas=7)
    scatter_pages(pools, torch.arange(1021, device="cuda"), back, num_ctas=16)
    for tensor, old in zip((*k, *v), before, strict=True):
        assert torch.equal(tensor.view(1021, -1)[back].view(torch.int16), old[order].view(torch.int16))


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda", generator=generator)
    return bits.view(torch.bfloat16)
