"""What a ModelRunner does once, in which order and on which stream, and what it says where memory or kernels are
missing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from step_traces import TraceShape
from trace_runner import make_runner

from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.forward_batch import AttentionPlan, GraphDecodeInputs
from fenceline.memory_order.device import CpuDevice
from fenceline.model_executor import parts
from fenceline.model_executor.decode_runner import DecodeRunner
from fenceline.model_executor.graph_runner import GraphRunner
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner

torch.set_num_threads(1)
SHAPE = TraceShape(num_rows=4, num_pages=40)


def test_plans_of_graphs_are_made_on_the_stream_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device, depth, made = CpuDevice(), [0], []

    @contextmanager
    def active() -> Iterator[None]:
        depth[0] += 1
        yield
        depth[0] -= 1

    def plan_graph(self: CpuAttentionBackend, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        made.append(depth[0])
        return original(self, inputs)

    original = CpuAttentionBackend.plan_graph
    monkeypatch.setattr(device.forward, "active", active)
    monkeypatch.setattr(CpuAttentionBackend, "plan_graph", plan_graph)
    make_runner(device, SHAPE, (1, 2), context_length=128)
    assert made == [1, 1]


def test_request_rows_are_there_before_the_rest_becomes_kv_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of page tables take up to a gigabyte: pages that did not know of it would take it from activations."""
    order = []
    for name in ("ReqPool", "num_kv_pages"):
        original = getattr(parts, name)
        monkeypatch.setattr(parts, name, lambda *args, n=name, f=original: order.append(n) or f(*args))
    make_runner(CpuDevice(), SHAPE, (), context_length=128)
    assert order == ["ReqPool", "num_kv_pages"]


@pytest.mark.parametrize(
    ("free", "allocator", "message"),
    [
        (
            10_000,
            "KVPool",
            "--max-total-tokens 640: the KV cache would take 0.0 GB, and 0.0 GB are free .*; give at most",
        ),
        (
            100,
            "ReqPool",
            "--max-running-requests 4: with --context-length 128 their page tables take 0.0 GB, and 0.0 G",
        ),
    ],
)
def test_what_memory_does_not_hold_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, free: int, allocator: str, message: str
) -> None:
    def unused(*args: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(CpuDevice, "memory_info", lambda self: (free, free))
    monkeypatch.setattr(parts, allocator, unused)
    with pytest.raises(ValueError, match=message) as caught:
        make_runner(CpuDevice(), SHAPE, (), context_length=128)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (DecodeRunner, "decode graphs .*lower --mem-fraction-static.*--disable-cuda-graph"),
        (PiecewiseCudaGraphRunner, "prefill graphs .*lower --mem-fraction.*--disable-piecewise-cuda-graph"),
    ],
)
def test_memory_too_small_for_graphs_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, runner: type[GraphRunner], message: str
) -> None:
    def capture(self: GraphRunner, *args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(runner, "capture", capture)
    with pytest.raises(ValueError, match=message):
        make_runner(CpuDevice(), SHAPE, (1, 2), context_length=128, piecewise_cuda_graph_tokens=(4,))


def test_kernels_that_cannot_be_used_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fenceline.memory_order import cuda

    class KernelUnavailable(Exception):
        pass

    def load(device: torch.device) -> None:
        raise KernelUnavailable("nvcc was not found: install the CUDA 13 toolkit")

    monkeypatch.setattr(cuda, "fenceline_kernel", SimpleNamespace(load=load, KernelUnavailable=KernelUnavailable))
    with caplog.at_level(logging.WARNING):
        assert cuda._load_kernels(torch.device("cuda")) is None
    assert "nvcc was not found: install the CUDA 13 toolkit" in caplog.text


@pytest.mark.parametrize(
    ("shared_kib", "used"), [(227, True), (163, True), (99, False)], ids=["sm_90", "sm_80", "sm_89"]
)
def test_the_skinny_gemm_is_left_out_where_its_cuts_do_not_fit(
    shared_kib: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from fenceline.layers import cuda_layers as cuda_kernels

    class KernelUnavailable(Exception):
        pass

    properties = SimpleNamespace(shared_memory_per_block_optin=shared_kib << 10)
    package = SimpleNamespace(KernelUnavailable=KernelUnavailable, load=lambda device: None)
    skinny = SimpleNamespace(SkinnyConfig=object, SkinnyGemm=lambda library, bits: object())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda_kernels, "_is_product_right", lambda device, product: True)
    monkeypatch.setitem(sys.modules, "fenceline_kernel", package)
    monkeypatch.setitem(sys.modules, "fenceline_kernel.skinny", skinny)
    assert (cuda_kernels._find_cuda_product(torch.device("cuda")) is not None) == used


# What run_scheduler finds when it imports the scheduler's process.
_ENTRY = """
import os, sys
from types import SimpleNamespace
from fenceline.entrypoints.child_entries import run_scheduler

def scheduler_process(*args):
    print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)

sys.modules["fenceline.scheduler.process"] = SimpleNamespace(run_scheduler_process=scheduler_process)
run_scheduler(SimpleNamespace(device=sys.argv[1]), None)
"""


@pytest.mark.parametrize(
    ("device", "given", "policy"), [("cpu", None, "passive"), ("cpu", "active", "active"), ("cuda", None, "None")]
)
def test_threads_of_a_cpu_do_not_spin_between_operations(device: str, given: str | None, policy: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"OMP_WAIT_POLICY": given} if given else {}
    command = [sys.executable, "-c", _ENTRY, device]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert told == [policy, "False"], "torch reads it when it is imported"
