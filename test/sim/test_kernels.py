"""Kernels of one's own, and exclusive resources."""

from __future__ import annotations

import pytest
import torch
from conformance_vgpu import make_gpu

from fenceline.memory_order.kernel import declared
from fenceline_sim import RaceError, VirtualGpu, use
from fenceline_sim.memory import whole


def compute_rows(pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    pool[rows] = values


store_rows = declared("store_rows", compute_rows, "values -> pool[rows]")


def test_a_kernel_runs_in_its_streams_order_on_the_rows_it_names() -> None:
    gpu, device = make_gpu()
    pool = torch.zeros(8, 4, device=device)
    values = torch.ones(2, 4, device=device)
    streams = [gpu.stream("a"), gpu.stream("b")]
    indexes = [torch.tensor([1, 2], device=device), torch.tensor([3, 4], device=device)]
    gpu.synchronize_all()
    for stream, rows in zip(streams, indexes, strict=True):
        with gpu.on(stream):
            store_rows.run(pool, rows, values)
    gpu.synchronize_all()
    assert pool.sum(1).tolist() == [0, 4, 4, 4, 4, 0, 0, 0]


def test_rows_that_meet_are_a_race_and_the_index_is_read() -> None:
    gpu, device = make_gpu(collect=True)
    pool, values = torch.zeros(8, 4, device=device), torch.ones(2, 4, device=device)
    gpu.name_memory(pool, "pool", row_bytes=16)
    a, b = gpu.stream("a"), gpu.stream("b")
    one, two = torch.tensor([1, 2], device=device), torch.tensor([2, 3], device=device)
    gpu.name_memory(two, "index")
    gpu.synchronize_all()
    with gpu.on(a):
        store_rows.run(pool, one, values)
        two.fill_(2)
    with gpu.on(b):
        store_rows.run(pool, two, values)
    gpu.synchronize_all()
    assert {race.memory.split(" bytes")[0] for race in gpu.races} == {"pool row 2", "index"}


def attention_beside_a_copy(gpu: VirtualGpu, ordered: bool) -> None:
    """F2: a persistent attention kernel beside a copy that needs the same SMs."""
    device = use(gpu)
    page = torch.zeros(4, device=device)
    sm = gpu.resource("sm")
    forward, store = gpu.stream("forward"), gpu.stream("store")
    gpu.synchronize_all()
    with gpu.on(forward):
        gpu.submit("attention", lambda: None, writes=[whole(sm)])
    if ordered:
        gpu.wait(store, gpu.record(forward))
    with gpu.on(store):
        page.add_(1)  # occupies no SMs
        gpu.submit("copy", lambda: None, writes=[whole(sm)])
    gpu.synchronize_all()


def test_users_of_an_exclusive_resource_must_be_ordered() -> None:
    for seed in range(5):
        attention_beside_a_copy(VirtualGpu(seed=seed), ordered=True)
        with pytest.raises(RaceError, match="exclusive on resource sm(.|\n)*copy occupies it on store"):
            attention_beside_a_copy(VirtualGpu(seed=seed), ordered=False)
