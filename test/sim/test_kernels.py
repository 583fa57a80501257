"""Kernels of one's own, exclusive resources, and the audit of what operations declare."""

from __future__ import annotations

from random import Random

import pytest
import torch
from audit import AuditError, Auditor, LaunchAuditor
from conformance_vgpu import make_gpu
from scheduler_driver import answers
from tiny_model import tiny_driver, tiny_requests

from fenceline.memory_order.kernel import declared, register_launcher
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import WORKLOADS
from fenceline_sim import RaceError, VgpuDevice, VirtualGpu, use
from fenceline_sim.kernels import launch_declared


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
    q, page = torch.ones(4, 4, device=device), torch.zeros(4, device=device)
    sm = gpu.resource("sm")
    forward, store = gpu.stream("forward"), gpu.stream("store")
    gpu.synchronize_all()
    with gpu.on(forward), gpu.using(sm):
        q.add_(1)
    if ordered:
        gpu.wait(store, gpu.record(forward))
    with gpu.on(store):
        page.add_(1)  # occupies no SMs
        with gpu.using(sm):
            page.add_(1)
    gpu.synchronize_all()


def test_users_of_an_exclusive_resource_must_be_ordered() -> None:
    for seed in range(5):
        attention_beside_a_copy(VirtualGpu(seed=seed), ordered=True)
        with pytest.raises(RaceError, match="exclusive on resource sm(.|\n)*add_ occupies it on store"):
            attention_beside_a_copy(VirtualGpu(seed=seed), ordered=False)


def test_audit_finds_an_undeclared_write() -> None:
    gpu, device = make_gpu()
    Auditor(gpu)
    x = torch.zeros(8, device=device)

    def kernel(x: torch.Tensor) -> None:
        x[:5] = 1

    declared("kernel", "x first", "-> first").launch(lambda x, first: kernel(x), x, x[:4])
    with pytest.raises(AuditError, match=r"kernel writes tensor \[8\].*bytes 1[678]\.\.20 without declaring"):
        gpu.synchronize_all()


def test_audit_finds_an_undeclared_read() -> None:
    gpu, device = make_gpu()
    Auditor(gpu)
    x, y = torch.ones(8, device=device), torch.zeros(4, device=device)

    def kernel(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x[4:])

    declared("kernel", "x y first", "first -> y").launch(lambda x, y, first: kernel(x, y), x, y, x[:4])
    with pytest.raises(AuditError, match="depends on memory that it does not declare"):
        gpu.synchronize_all()


def test_audit_finds_an_accumulation_declared_as_a_write() -> None:
    gpu, device = make_gpu()
    Auditor(gpu)
    x = torch.ones(4, device=device)
    declared("kernel", "x", "-> x").launch(lambda x: x.add_(1), x)
    with pytest.raises(AuditError, match="depends on memory"):
        gpu.synchronize_all()


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_accumulating_operators_of_torch_declare_that_they_read() -> None:
    gpu, device = make_gpu()
    Auditor(gpu)
    x, rows = torch.ones(4, 2, device=device), torch.tensor([1, 1, 3], device=device)
    x.index_put_((rows,), torch.ones(3, 2, device=device), accumulate=True)
    x.scatter_(0, torch.zeros(1, 2, dtype=torch.int64, device=device), x[1:2].clone(), reduce="add")
    x.index_add_(0, rows, torch.ones(3, 2, device=device))
    assert x[:, 0].tolist() == [4.0, 5.0, 1.0, 3.0]


def test_audit_is_content_with_honest_kernels() -> None:
    gpu, device = make_gpu()
    auditor = Auditor(gpu)
    pool, values = torch.zeros(8, 4, device=device), torch.ones(2, 4, device=device)
    rows = torch.tensor([1, 2], device=device)
    store_rows.run(pool, rows, values)
    declared("add", "x", "x -> x").launch(lambda x: x.add_(1), pool)
    assert pool.sum().item() == 40.0
    assert auditor.num_audited >= 5


@pytest.mark.parametrize("flags", [{}, {"cuda_graph_bs": (2, 4), "context_length": 64}], ids=["eager", "graphs"])
def test_the_engines_operators_touch_what_they_declare(flags: dict[str, object]) -> None:
    gpu = VirtualGpu()
    auditor = Auditor(gpu)
    expected = answers(tiny_driver("cpu", **flags), tiny_requests(2))
    assert answers(tiny_driver(VgpuDevice(gpu=gpu), **flags), tiny_requests(2)) == expected
    assert auditor.num_audited > 500


@pytest.mark.parametrize("workload", ["conversations", "experts", "speculation_trees", "flashinfer", "launched"])
def test_the_engines_kernels_touch_what_they_declare(workload: str) -> None:
    """Of all memory of their operands, whether they declare an access to it or not."""
    scenario, gpu = WORKLOADS[workload].make(Random(2)), VirtualGpu()
    auditor = LaunchAuditor(gpu, num_each=2)
    try:
        loop = Loop(make_config(scenario.flags, "vgpu"), VgpuDevice(gpu=gpu), scenario=scenario)
        auditor.start()
        loop.run()
    finally:
        register_launcher("vgpu", launch_declared)
    assert len(auditor.nums) > 5 and "skinny_linear" in auditor.nums
