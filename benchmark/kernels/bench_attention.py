"""Compares attention kernels: microseconds of one layer, in a graph's replay.

    python benchmark/kernels/bench_attention.py [--models 0.6B 8B] [--page-size 1]
    OMP_NUM_THREADS=1 python benchmark/kernels/bench_attention.py --device cpu     # the demo model's heads, float32

For decode, which reads its keys and values once, the table also has the bytes per second; for extend the TFLOP/s of the
causal half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fenceline.layers.attention.backends import (
    AttentionSetting,
    MeasuredBatch,
    make_attention_backends,
    measure_us,
)
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.attention.fa3_backend import Fa3AttentionBackend
from fenceline.layers.attention.flashinfer_backend import FlashInferAttentionBackend
from fenceline.layers.attention.torch_backend import TorchAttentionBackend
from fenceline.layers.forward_batch import ForwardMode
from fenceline.mem_cache.kv_pool import KVLayout, KVPool
from fenceline.memory_order import Device, open_device


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention."""

    queries: int
    kv: int
    head_dim: int


MODELS = {"0.6B": Heads(16, 8, 128), "8B": Heads(32, 8, 128)}
DECODE = [MeasuredBatch(*shape) for shape in ((1, 1024), (32, 384), (32, 1024), (256, 1152), (8, 16384))]
EXTEND = [
    MeasuredBatch(*shape)
    for shape in ((1, 128), (1, 1024), (8, 1024), (16, 128), (1, 8192), (8, 1024 + 16, 16), (1, 8192, 7168))
]
NUM_LAYERS = 8
CONTEXT_LENGTH = 32768

# The demo model's heads in batches that are hard for a CPU: many long requests, with different prompts or the same one.
DEMO = Heads(4, 2, 64)
CPU_DECODE = [
    MeasuredBatch(*shape) for shape in ((1, 100), (64, 100), (1, 3900), (114, 3900), (114, 3900, 0, 3840))
]
CPU_EXTEND = [
    MeasuredBatch(*shape)
    for shape in ((1, 128), (1, 4028, 3900), (8, 3916, 3900), (118, 3900, 3899), (118, 3900, 3899, 3840))
]


def backends(setting: AttentionSetting, mode: ForwardMode) -> dict[str, Callable[[], AttentionBackend]]:
    """The backends that are compared in ``mode``."""
    from fenceline.layers.attention.triton_backend import TritonAttentionBackend  # needs Triton

    pool, device, heads = setting.kv_pool, setting.device, setting.num_heads

    def flashinfer(prefill: str | None = None, tensor_cores: bool | None = None) -> AttentionBackend:
        return FlashInferAttentionBackend(pool, device, heads, prefill, tensor_cores)

    both: dict[str, Callable[[], AttentionBackend]] = {
        "triton": lambda: TritonAttentionBackend(pool),
        "fa3": lambda: Fa3AttentionBackend(pool),
    }
    if mode is ForwardMode.EXTEND:
        return both | {
            "flashinfer": flashinfer,
            "flashinfer fa2": lambda: flashinfer("fa2"),
        }
    return both | {
        "flashinfer cuda cores": lambda: flashinfer(tensor_cores=False),
        "flashinfer tensor cores": lambda: flashinfer(tensor_cores=True),
    }


def rate(heads: Heads, mode: ForwardMode, batch: MeasuredBatch, us: float) -> str:
    """Bytes or operations per second, as text."""
    if mode is ForwardMode.DECODE:
        nbytes = batch.num_requests * batch.num_tokens * heads.kv * heads.head_dim * 4
        return f"{nbytes / us / 1e6:5.2f} TB/s"
    total, prefix = batch.num_tokens, batch.prefix_len
    pairs = batch.num_requests * (total * total - prefix * prefix) / 2
    return f"{4 * pairs * heads.queries * heads.head_dim / us / 1e6:5.0f} TFLOP/s"


def compare(name: str, heads: Heads, page_size: int, device: Device) -> None:
    """Print the model's two tables."""
    layout = KVLayout.uniform(page_size, NUM_LAYERS, heads.kv, heads.head_dim, torch.bfloat16)
    pool = KVPool(400_000 // page_size, layout, device.torch_device)
    for layer in range(NUM_LAYERS):
        pool.k(layer).normal_()
        pool.v(layer).normal_()
    setting = AttentionSetting(pool, device, heads.queries, CONTEXT_LENGTH)
    for mode, batches in ((ForwardMode.DECODE, DECODE), (ForwardMode.EXTEND, EXTEND)):
        print(f"{name} {mode.value}, page size {page_size}")
        for label, make in backends(setting, mode).items():
            cells = []
            for batch in batches:
                try:
                    us = measure_us(make(), setting, mode, batch)
                    cells.append(f"{us:8.1f} us {rate(heads, mode, batch, us)}")
                except Exception as error:  # one that cannot run must not stop the others
                    cells.append(f"{type(error).__name__}: {str(error)[:80]}")
                    break
            print(f"  {label:24}", " | ".join(cells), flush=True)
        shapes = [
            f"{b.num_requests} x {b.num_tokens}" + f" ({b.prefix_len} cached)" * bool(b.prefix_len)
            for b in batches
        ]
        print(f"  {'':24}", " | ".join(shapes), flush=True)


def on_cpu(page_size: int) -> None:
    """Print how long the CPU takes for one layer's attention, without the plan, which all layers share."""
    device = open_device("cpu")
    pool = KVPool(
        120 * 4096 // page_size,
        KVLayout.uniform(page_size, 1, DEMO.kv, DEMO.head_dim, torch.float32),
        device.torch_device,
    )
    pool.k(0).normal_()
    pool.v(0).normal_()
    # The context is longer than a graph's plan would allow, because the CPU uses no graphs.
    setting = AttentionSetting(pool, device, DEMO.queries, 16384)
    for mode, batches in ((ForwardMode.DECODE, CPU_DECODE), (ForwardMode.EXTEND, CPU_EXTEND)):
        for batch in batches:
            us = measure_us(TorchAttentionBackend(pool), setting, mode, batch)
            shape = f"{batch.num_requests} x {batch.num_tokens}"
            shape += f", {batch.prefix_len} cached" * bool(batch.prefix_len)
            shape += f", {batch.shared_len} of them shared" * bool(batch.shared_len)
            print(f"{mode.value:6} {shape:45} {us / 1e3:8.2f} ms", flush=True)


def plan_cost(device: Device) -> None:
    """The CPU time of planning a decode step, which the kernels' times do not contain."""
    heads = MODELS["8B"]
    pool = KVPool(
        4096, KVLayout.uniform(16, 1, heads.kv, heads.head_dim, torch.bfloat16), device.torch_device
    )
    backend = FlashInferAttentionBackend(pool, device, heads.queries)
    table = torch.zeros(257, 2048, dtype=torch.int32, device=device.torch_device)
    from fenceline.layers.forward_batch import GraphDecodeInputs

    for size in (1, 32, 256):
        rows = torch.zeros(size, dtype=torch.int64, device=device.torch_device)
        backend.plan_graph(GraphDecodeInputs(table, rows, torch.ones_like(rows), CONTEXT_LENGTH))
        lens = np.random.default_rng(size).integers(1, 2000, size)
        begin = time.perf_counter()
        for _ in range(200):
            backend.before_replay(size, lens)
        print(f"plan of {size} requests: {(time.perf_counter() - begin) * 5e3:.0f} us of CPU")
        device.synchronize()


def main() -> None:
    """Print the tables of the chosen models, then the backends that auto chooses for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        with torch.inference_mode():
            on_cpu(args.page_size)
        return
    device = open_device("cuda")
    for name in args.models:
        compare(name, MODELS[name], args.page_size, device)
        torch.cuda.empty_cache()
    plan_cost(device)
    for name in args.models:
        heads = MODELS[name]
        layout = KVLayout.uniform(1, 8, heads.kv, heads.head_dim, torch.bfloat16)
        pool = KVPool(80_000, layout, device.torch_device)
        begin = time.perf_counter()
        chosen = make_attention_backends(
            "auto", "auto", AttentionSetting(pool, device, heads.queries, CONTEXT_LENGTH)
        )
        took = time.perf_counter() - begin
        print(
            f"auto, {name}: prefill {chosen.prefill_name}, decode {chosen.decode_name}, chosen in {took:.2f} s"
        )


if __name__ == "__main__":
    main()
