"""Measures attention over latent rows on a GPU (512 + 64 features, bf16 or FP8), as decode, verify and prefill run it.

    python benchmark/kernels/bench_latent_attention.py [--heads 16 20 128] [--kv bf16 fp8] [--batches 8x1024] [--sweep]
                                                       [--sparse]

Each line is one layer's attention in a captured graph of 8 layers with rows of their own: microseconds, the rate at
which the rows are read once, in GB/s (1e9 bytes), and its share of --rate, or the TFLOP/s of a prefill. A prefill of
new prompts attends to each head's own keys and values (192 and 128 features, or 256 and 256 of 20 heads). Lines of
sparse attention (2,048 tokens, chosen by an indexer of 64 heads of 128 features) compare it with attention to all
tokens; of its time, "attending" is what remains in a layer that shares another's selection. With --sweep other
configurations are timed too (block, warps, stages, for decode also workers on each multiprocessor and fewest blocks of
a worker), best first. Not all compile: some need more shared memory than there is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import triton

from fenceline.config.kv_layout import INDEX, KVLayout, index_keys, latent
from fenceline.layers.attention import triton_backend
from fenceline.layers.attention.backends import AttentionSetting, MeasuredBatch, measure_us
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.attention.triton_backend import TritonAttentionBackend
from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardMode, GraphDecodeInputs, IndexQueries
from fenceline.layers.kernels.index_rows import packed, rounded
from fenceline.layers.kernels.triton import select_tokens
from fenceline.layers.kernels.triton.decode_attention import DecodeConfig, query_tiles
from fenceline.layers.kernels.triton.extend_attention import ExtendConfig
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device, open_device
from fenceline.memory_order.guards import first_of_best

RANK, ROPE, LAYERS, PAGE = 512, 64, 8, 64
DECODE = ((1, 1024), (1, 8192), (1, 32_768), (8, 1024), (32, 576), (32, 1024), (64, 32_768), (256, 1152))
SPARSE = ((1, 8192), (1, 32_768), (8, 32_768), (64, 4096), (64, 8192), (64, 16_384), (64, 32_768))
TOP_K, INDEX_HEADS, INDEX_DIM = 2048, 64, 128
EXTEND = (MeasuredBatch(4, 1024), MeasuredBatch(1, 8192), MeasuredBatch(1, 33_280, prefix_len=32_768))
DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


class _Cut(TritonAttentionBackend):
    """Decodes with ``config`` and extends with ``extends`` if these are given."""

    num_heads = 0
    config: DecodeConfig | None = None
    extends: ExtendConfig | None = None

    def new_config(self, v: torch.Tensor) -> ExtendConfig:
        return self.extends or super().new_config(v)

    def decode_config(self, batch: int) -> DecodeConfig:
        return self.config or super().decode_config(batch)

    def extend_config(self, max_rows: int) -> ExtendConfig:
        return self.extends or super().extend_config(max_rows)


class _Selecting(TritonAttentionBackend):
    """Each layer selects the tokens to which it attends; with ``shares`` the first one does so for all."""

    shares = False

    def plan(self, inputs: AttentionInputs) -> AttentionPlan:
        return _SelectingPlan(super().plan(inputs), int(inputs.query_lens_cpu.sum()), self)

    def plan_graph(self, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        plan = super().plan_graph(inputs)
        assert plan is not None
        return _SelectingPlan(plan, len(inputs.rows), self)


class _SelectingPlan(AttentionPlan):
    def __init__(self, plan: AttentionPlan, num: int, backend: _Selecting) -> None:
        self._plan, self._backend, device = plan, backend, backend.kv_pool.device
        queries = torch.randn(num, INDEX_HEADS, INDEX_DIM, device=device).bfloat16()
        weights = torch.randn(num, INDEX_HEADS, device=device)
        self._index = IndexQueries(queries, weights, TOP_K, first_of_best)
        self._tokens: Sequence[torch.Tensor] = ()

    def forward(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        if layer_id == 0 or not self._backend.shares:
            self._tokens = self._plan.select(layer_id, self._index)
        return self._plan.forward_selected(layer_id, q, k, v, scale, self._tokens)


def setting_of(
    device: Device, num_heads: int, dtype: str, batch: MeasuredBatch, selects: bool = False
) -> AttentionSetting:
    """A pool that is as large as the batch. ``selects``: layers have an indexer."""
    pages = batch.num_requests * -(-batch.num_tokens // PAGE) + 1
    rows = latent(RANK + ROPE, dtype) + (index_keys(INDEX_DIM, dtype) if selects else ())
    pool = KVPool(pages, KVLayout(PAGE, (rows,) * LAYERS), device.torch_device, torch.bfloat16)
    for layer in range(LAYERS):  # bytes that are small numbers in both types
        pool.row(layer, "latent").view(torch.uint8).random_(0, 64)
        if selects:
            keys = torch.randn(pages * PAGE, 1, INDEX_DIM, device=device.torch_device)
            row = pool.row(layer, INDEX)
            row.copy_(packed(*rounded(keys)) if row.dtype == torch.uint8 else keys)
    rules = LayerRules(rows=("latent", "latent"), value_dim=RANK, selects=selects)
    return AttentionSetting(pool, device, num_heads, batch.num_tokens, rules=dict.fromkeys(range(LAYERS), rules))


def backend_of(setting: AttentionSetting) -> _Cut:
    backend = _Cut(setting.kv_pool, 0, setting.rules, setting.num_heads)
    backend.num_heads = setting.num_heads
    return backend


def cuts(backend: _Cut) -> Iterator[DecodeConfig]:
    """Warps, stages and registers that the sums of a tile fit in, with its block; then how the blocks are divided."""
    tiles, rows = query_tiles(backend.num_heads)
    shapes = [(32, 8, 2), (32, 8, 3), (64, 8, 2), (64, 8, 3)]
    if rows < 64:
        shapes = [(32, 4, 3), (32, 4, 4), (32, 8, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3)]
    for (block, warps, stages), (each, blocks) in itertools.product(shapes, ((1, 1), (1, 2), (2, 1), (2, 2))):
        workers = max(backend.num_sms * each // tiles, 1)
        registers = 128 if warps == 8 and each == 2 and rows < 64 else None
        yield DecodeConfig(
            block, workers, warps, stages, backend._launch_pdl, registers, min_blocks=blocks, merge_apart=True
        )


def sweep(backend: _Cut, setting: AttentionSetting, mode: ForwardMode, batch: MeasuredBatch) -> None:
    found: list[tuple[float, DecodeConfig | ExtendConfig]] = []
    if mode is ForwardMode.DECODE:
        configs: list[DecodeConfig | ExtendConfig] = [*cuts(backend)]
    else:
        configs = [ExtendConfig(64, *cut) for cut in ((32, 8, 2), (32, 8, 3), (64, 8, 2), (64, 8, 3))]
    for config in configs:
        backend.config = config if isinstance(config, DecodeConfig) else None
        backend.extends = config if isinstance(config, ExtendConfig) else None
        try:
            found.append((measure_us(backend, setting, mode, batch), config))
        except triton_errors():
            continue
    backend.config = backend.extends = None
    for us, config in sorted(found, key=lambda pair: pair[0])[:5]:
        print(f"      {us:8.1f} us  {config}", flush=True)
    given = backend.decode_config(batch.num_requests) if mode is ForwardMode.DECODE else backend.extend_config(1 << 20)
    print(f"      in use: {given}")


def compare_sparse(device: Device, num_heads: int, kv: str, sweeps: bool) -> None:
    """Time attention to selected tokens beside that to all of them, in decode and in a prefill's piece; if it
    ``sweeps``, also with other cuts of the kernel that selects."""
    pieces = [(ForwardMode.DECODE, MeasuredBatch(*sizes)) for sizes in SPARSE]
    pieces += [(ForwardMode.EXTEND, batch) for batch in EXTEND[1:]]
    for mode, batch in pieces:
        setting = setting_of(device, num_heads, DTYPES[kv], batch, selects=True)
        dense = measure_us(backend_of(setting), setting, mode, batch)
        backend = _Selecting(setting.kv_pool, 0, setting.rules, num_heads)
        sparse = measure_us(backend, setting, mode, batch)
        backend.shares = True
        shared = (measure_us(backend, setting, mode, batch) * LAYERS - sparse) / (LAYERS - 1)
        what = "decode" if mode is ForwardMode.DECODE else f"prefill after {batch.prefix_len}"
        case = f"{num_heads:4d} heads {kv} {what} {batch.num_requests:4d} x {batch.num_tokens:6d}"
        print(f"{case} dense {dense:9.1f} us sparse {sparse:9.1f} us, attending {shared:9.1f} us", flush=True)
        backend.shares = False
        for cut in itertools.product((4096, 8192, 16_384), (16, 32), (6, 8)) if sweeps else ():
            with select_cut(*cut):
                us = measure_us(backend, setting, mode, batch)
            print(f"      {us:8.1f} us with blocks of {cut[0]}, {cut[1]} warps, counts by {cut[2]} bits", flush=True)


@contextmanager
def select_cut(block: int, num_warps: int, bits: int) -> Iterator[None]:
    """Another cut of the kernel that selects."""
    given = select_tokens._SELECT_BLOCK, select_tokens._SELECT_WARPS, select_tokens._BITS
    try:
        select_tokens._SELECT_BLOCK, select_tokens._SELECT_WARPS, select_tokens._BITS = block, num_warps, bits
        select_tokens._select_variant.cache_clear()
        yield
    finally:
        select_tokens._SELECT_BLOCK, select_tokens._SELECT_WARPS, select_tokens._BITS = given
        select_tokens._select_variant.cache_clear()


def measure_new(backend: _Cut, num_heads: int, batch: MeasuredBatch) -> float:
    """TFLOP/s of a layer's attention of new prompts, without the products that give keys and values."""
    key_dim, value_dim = (256, 256) if num_heads == 20 else (192, 128)
    num, lens = batch.num_requests * batch.num_tokens, np.full(batch.num_requests, batch.num_tokens)
    q, k = (torch.randn(num, num_heads, key_dim, device="cuda").bfloat16() for _ in range(2))
    v = torch.randn(num, num_heads, value_dim, device="cuda").bfloat16()
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)])).int().cuda()
    attend = backend.plan_new(lens, starts)
    ms: float = triton.testing.do_bench(lambda: attend(q, k, v, key_dim**-0.5), return_mode="median")
    pairs = batch.num_requests * batch.num_tokens * (batch.num_tokens + 1) // 2
    return 2 * pairs * num_heads * (key_dim + value_dim) / ms / 1e9


def sweep_new(backend: _Cut, num_heads: int, batch: MeasuredBatch) -> None:
    found = []
    cuts = ((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3))
    for cut in cuts:
        backend.extends = ExtendConfig(*cut)
        try:
            found.append((measure_new(backend, num_heads, batch), cut))
        except triton_errors():
            continue
    backend.extends = None
    for rate, cut in sorted(found, reverse=True):
        print(f"      {rate:8.0f} TFLOP/s  {cut}", flush=True)


def triton_errors() -> tuple[type[Exception], ...]:
    """What a configuration raises that does not fit the GPU."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError


def batch_of(text: str) -> tuple[int, int]:
    requests, tokens = text.split("x")
    return int(requests), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 20, 128])
    parser.add_argument("--kv", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rate", type=float, default=4300.0, help="GB/s of the memory")
    parser.add_argument("--batches", nargs="+", type=batch_of, default=DECODE, help="decode's: REQUESTSxTOKENS")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--sparse", action="store_true", help="only sparse attention beside that to all tokens")
    args = parser.parse_args()
    device = open_device("cuda")
    assert triton_backend._LATENT_WORKERS_PER_SM >= 2, "the sweep has workspaces for two workers"
    for num_heads, kv in itertools.product(args.heads, args.kv):
        if args.sparse:
            compare_sparse(device, num_heads, kv, args.sweep)
            continue
        for requests, tokens in args.batches:
            batch = MeasuredBatch(requests, tokens)
            setting = setting_of(device, num_heads, DTYPES[kv], batch)
            backend = backend_of(setting)
            us = measure_us(backend, setting, ForwardMode.DECODE, batch)
            rate = requests * tokens * setting.kv_pool.row(0, "latent")[0].nbytes / us / 1e3
            case = f"{num_heads:4d} heads {kv} decode {requests:4d} x {tokens:6d}"
            print(f"{case} {us:9.1f} us {rate:7.0f} GB/s {rate / args.rate:6.1%}", flush=True)
            if args.sweep:
                sweep(backend, setting, ForwardMode.DECODE, batch)
        for batch in EXTEND:
            setting = setting_of(device, num_heads, DTYPES[kv], batch)
            backend = backend_of(setting)
            us = measure_us(backend, setting, ForwardMode.EXTEND, batch)
            new = batch.num_tokens - batch.prefix_len
            pairs = batch.num_requests * (new * batch.prefix_len + new * (new + 1) // 2)
            flops = 2 * pairs * num_heads * (2 * RANK + ROPE)
            case = f"{num_heads:4d} heads {kv} prefill {batch.num_requests} x {new} after {batch.prefix_len}"
            print(f"{case} {us:9.1f} us {flops / us / 1e6:7.0f} TFLOP/s", flush=True)
            if args.sweep:
                sweep(backend, setting, ForwardMode.EXTEND, batch)
            if batch.prefix_len or kv != args.kv[0]:
                continue
            rate, new_prompts = measure_new(backend, num_heads, batch), f"{batch.num_requests} x {batch.num_tokens}"
            print(f"{num_heads:4d} heads, new prompts {new_prompts:31s} {rate:7.0f} TFLOP/s", flush=True)
            if args.sweep:
                sweep_new(backend, num_heads, batch)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
