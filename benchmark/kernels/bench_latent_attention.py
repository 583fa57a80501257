"""Measures attention over latent rows on a GPU (512 + 64 features, bf16 or FP8), as decode, verify and prefill run it.

    python benchmark/kernels/bench_latent_attention.py [--heads 16 20 128] [--kv bf16 fp8] [--sweep]

Each line is one layer's attention in a captured graph of 8 layers with rows of their own: microseconds, the rate at
which the rows are read once, in GB/s (1e9 bytes), and its share of --rate, or the TFLOP/s of a prefill. With --sweep
decode is timed with other configurations too (block, warps, stages, workers on each multiprocessor, fewest blocks of a
worker), best first. Not all compile: some need more shared memory than there is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import torch

from fenceline.config.kv_layout import KVLayout, latent
from fenceline.layers.attention import triton_backend
from fenceline.layers.attention.backends import AttentionSetting, MeasuredBatch, measure_us
from fenceline.layers.attention.base import LayerRules
from fenceline.layers.attention.triton_backend import TritonAttentionBackend
from fenceline.layers.forward_batch import ForwardMode
from fenceline.layers.kernels.triton.decode_attention import DecodeConfig
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order import Device, open_device

RANK, ROPE, LAYERS, PAGE = 512, 64, 8, 64
DECODE = ((1, 1024), (1, 8192), (1, 32_768), (8, 1024), (32, 576), (32, 1024), (64, 32_768), (256, 1152))
EXTEND = (MeasuredBatch(4, 1024), MeasuredBatch(1, 8192), MeasuredBatch(1, 33_280, prefix_len=32_768))
DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


class _Cut(TritonAttentionBackend):
    """Decodes with ``config`` if it is given."""

    config: DecodeConfig | None = None

    def decode_config(self, batch: int) -> DecodeConfig:
        return self.config or super().decode_config(batch)


def setting_of(device: Device, num_heads: int, dtype: str, batch: MeasuredBatch) -> AttentionSetting:
    """A pool that is as large as the batch."""
    pages = batch.num_requests * -(-batch.num_tokens // PAGE) + 1
    layout = KVLayout(PAGE, (latent(RANK + ROPE, dtype),) * LAYERS)
    pool = KVPool(pages, layout, device.torch_device, torch.bfloat16)
    for layer in range(LAYERS):  # bytes that are small numbers in both types
        pool.row(layer, "latent").view(torch.uint8).random_(0, 64)
    rules = LayerRules(rows=("latent", "latent"), value_dim=RANK)
    return AttentionSetting(pool, device, num_heads, batch.num_tokens, rules=dict.fromkeys(range(LAYERS), rules))


def backend_of(setting: AttentionSetting) -> _Cut:
    return _Cut(setting.kv_pool, 0, setting.rules, setting.num_heads)


def cuts(backend: _Cut, tiles: int) -> Iterator[DecodeConfig]:
    for block, warps, stages, each, blocks in itertools.product((16, 32, 64), (4, 8), (3, 5, 7), (1, 2), (1, 2, 8)):
        workers = max(backend.num_sms * each // tiles, 1)
        yield DecodeConfig(block, workers, warps, stages, backend._launch_pdl, min_blocks=blocks, merge_apart=True)


def sweep(backend: _Cut, setting: AttentionSetting, batch: MeasuredBatch) -> None:
    found = []
    given = backend.decode_config(batch.num_requests)
    for config in cuts(backend, -(-setting.num_heads // 64)):
        backend.config = config
        try:
            found.append((measure_us(backend, setting, ForwardMode.DECODE, batch), config))
        except triton_errors():
            continue
    backend.config = None
    for us, config in sorted(found, key=lambda pair: pair[0])[:5]:
        print(f"      {us:8.1f} us  {config}")
    print(f"      in use: {given}")


def triton_errors() -> tuple[type[Exception], ...]:
    """What a configuration raises that does not fit the GPU."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompilationError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 20, 128])
    parser.add_argument("--kv", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rate", type=float, default=4300.0, help="GB/s of the memory")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    device = open_device("cuda")
    assert triton_backend._LATENT_WORKERS_PER_SM >= 2, "the sweep has workspaces for two workers"
    for num_heads, kv in itertools.product(args.heads, args.kv):
        for requests, tokens in DECODE:
            batch = MeasuredBatch(requests, tokens)
            setting = setting_of(device, num_heads, DTYPES[kv], batch)
            backend = backend_of(setting)
            us = measure_us(backend, setting, ForwardMode.DECODE, batch)
            rate = requests * tokens * setting.kv_pool.row(0, "latent")[0].nbytes / us / 1e3
            case = f"{num_heads:4d} heads {kv} decode {requests:4d} x {tokens:6d}"
            print(f"{case} {us:9.1f} us {rate:7.0f} GB/s {rate / args.rate:6.1%}", flush=True)
            if args.sweep:
                sweep(backend, setting, batch)
        for batch in EXTEND:
            setting = setting_of(device, num_heads, DTYPES[kv], batch)
            us = measure_us(backend_of(setting), setting, ForwardMode.EXTEND, batch)
            new = batch.num_tokens - batch.prefix_len
            pairs = batch.num_requests * (new * batch.prefix_len + new * (new + 1) // 2)
            flops = 2 * pairs * num_heads * (2 * RANK + ROPE)
            case = f"{num_heads:4d} heads {kv} prefill {batch.num_requests} x {new} after {batch.prefix_len}"
            print(f"{case} {us:9.1f} us {flops / us / 1e6:7.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
