"""Finds the fastest configurations of our Triton attention on this GPU: each is timed as one layer in captured graphs.

    python benchmark/kernels/sweep_triton_attention.py [--models 8B 8B/2 ...] [--page-size 1] [--batches 1x1150 8x512]
        [--queries 1] [--jobs 8] [--top 4]

Prints, for each batch, the fastest configurations, and the backend's own choice (marked ``*``) with its rank. Decode is
in GB/s of keys and values, extend in TFLOP/s of the part that the causal mask leaves. Decode runs after
``rotate_and_store``, as in a model, and the time of that kernel alone is subtracted, so the figure includes the gain of
overlapping with it. With ``--queries`` above 1 it is the verification of chains with this many tokens.
Compiling takes most of the time, so ``--jobs`` processes do it first, in parallel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fenceline.layers.attention.triton_backend import TritonAttentionBackend
from fenceline.layers.forward_batch import QueryTree
from fenceline.layers.kernels.base import HeadLayout
from fenceline.layers.kernels.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    PagedRequests,
    decode_attention,
    query_tiles,
)
from fenceline.layers.kernels.extend_attention import ExtendConfig, extend_attention, extend_grid
from fenceline.layers.kernels.rotate_store import rotate_and_store
from fenceline.mem_cache.kv_pool import KVLayout, KVPool


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention, in bfloat16."""

    queries: int
    kv: int
    head_dim: int


MODELS = {
    "0.6B": Heads(16, 8, 128),
    "8B": Heads(32, 8, 128),
    "8B/2": Heads(16, 4, 128),  # one of two ranks
    "30B-A3B": Heads(32, 4, 128),
    "gpt-oss-20b": Heads(64, 8, 64),
}
LATENCY_BOUND = (1, 2)  # batches for which the configurations for few requests are tried
DECODE = (
    (1, 512), (1, 1150), (1, 4096), (4, 1150), (8, 512), (8, 16384), (16, 1150), (32, 384), (32, 1150), (64, 1150),
    (256, 512), (256, 1150),
)  # fmt: skip
EXTEND = (  # requests, new tokens of each, tokens of the prefix before them
    (1, 1024, 0), (8, 1024, 0), (8, 1024, 1024), (1, 1024, 7168), (8, 16, 1024), (1, 16, 8192),
)  # fmt: skip
# block_n, num_warps, num_stages, workers a multiprocessor, max_registers, blocks fetched before the wait
FEW = (
    (32, 2, 1, 2, None, 2), (32, 2, 1, 2, None, 0), (32, 2, 1, 4, None, 2), (32, 1, 1, 4, None, 2),
    (64, 4, 1, 2, None, 2), (64, 4, 3, 2, None, 2), (64, 4, 3, 2, None, 4), (64, 4, 5, 2, None, 2),
    (64, 4, 1, 1, None, 4), (64, 2, 1, 2, None, 2), (128, 8, 1, 1, None, 2), (128, 4, 1, 1, None, 2),
)  # fmt: skip
# With more queries each partial result is larger, so fewer workers are tried as well.
FEW_OF_CHAINS = (
    *FEW, (16, 2, 1, 2, None, 2), (32, 2, 1, 1, None, 2), (32, 2, 2, 1, None, 2), (32, 4, 1, 1, None, 2),
    (64, 4, 1, 1, None, 2), (64, 4, 2, 1, None, 2), (64, 4, 3, 1, None, 2), (64, 4, 3, 0.5, None, 2),
    (64, 8, 1, 2, None, 2), (64, 8, 1, 1, None, 2), (128, 4, 2, 0.5, None, 2), (128, 8, 2, 0.5, None, 2),
    (128, 8, 2, 1, None, 2), (128, 8, 3, 1, None, 2),
)  # fmt: skip
MERGED = (2048, 4096)  # elements that a warp merges at once, for few requests
MANY = (
    (64, 4, 3, 2, None, 2), (64, 4, 5, 2, None, 2), (64, 4, 5, 2, None, 0), (64, 4, 5, 2, None, 4),
    (64, 4, 7, 2, None, 2), (32, 2, 5, 4, None, 2), (32, 4, 5, 3, None, 2), (64, 8, 5, 2, 128, 2),
    (128, 8, 3, 1, None, 2), (128, 8, 5, 1, None, 2), (128, 8, 5, 1, None, 0), (128, 4, 5, 1, None, 2),
)  # fmt: skip
TILES = (
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2),
    (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 2), (64, 32, 4, 5), (128, 32, 8, 5),
)  # fmt: skip
SMALL_TILES = (
    (16, 64, 4, 3),
    (16, 64, 4, 5),
    (16, 32, 4, 5),
    (32, 64, 4, 3),
    (64, 64, 4, 3),
    (64, 64, 4, 5),
    (128, 64, 8, 3),
)
_POOL_BYTES = 12 << 30
_MAX_LAYERS = 28

Config = DecodeConfig | ExtendConfig
Step = Callable[[torch.Tensor, torch.Tensor], object]  # of a layer's keys and values


def make_pool(heads: Heads, page_size: int, num_tokens: int, max_layers: int) -> KVPool:
    """Random keys and values for ``num_tokens``, with so many layers that no layer is still in L2 in the next
    round."""
    layer_bytes = num_tokens * heads.kv * heads.head_dim * 4
    num_layers = min(max(_POOL_BYTES // layer_bytes, 4), max_layers)
    num_pages = -(-num_tokens // page_size) + 1
    layout = KVLayout.uniform(page_size, num_layers, heads.kv, heads.head_dim, torch.bfloat16)
    pool = KVPool(num_pages, layout, torch.device("cuda"))
    for layer in range(num_layers):
        pool.k(layer).normal_()
        pool.v(layer).normal_()
    return pool


def make_requests(pool: KVPool, batch: int, num_tokens: int) -> PagedRequests:
    """Requests of ``num_tokens`` each, on pages in random order."""
    columns = -(-num_tokens // pool.page_size)
    table = torch.zeros(batch, -(-columns // 16) * 16, dtype=torch.int32, device="cuda")
    pages = torch.randperm(pool.num_pages - 1, device="cuda")[: batch * columns] + 1
    table[:, :columns] = pages.view(batch, columns)
    rows = torch.arange(batch, device="cuda")
    return PagedRequests(table, rows, torch.full((batch,), num_tokens, device="cuda"), pool.page_size)


def time_us(step: Step, pool: KVPool) -> float:
    """Microseconds of ``step`` for one layer in a graph of all layers; the best of several replays."""
    num_layers = pool.num_layers
    step(pool.k(0), pool.v(0))
    # A graph may be captured and replayed on any stream: everything that it reads must have been written before.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            step(pool.k(layer), pool.v(layer))
    best = float("inf")
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1e3 / num_layers


@dataclass(frozen=True, slots=True)
class Front:
    """The kernel before decode attention: ``rotate_and_store`` of the last tokens of each request, one for each
    query."""

    heads: Heads
    requests: PagedRequests
    qkv: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    tree: QueryTree

    @classmethod
    def of(cls, heads: Heads, requests: PagedRequests, num_queries: int) -> Front:
        """An instance with random activations, which keep their size however often they are rotated."""
        page_size = requests.page_size
        width = (heads.queries + 2 * heads.kv) * heads.head_dim
        behind = torch.arange(num_queries, 0, -1, device="cuda")
        positions = (requests.seq_lens[:, None] - behind).flatten()
        rows = requests.rows.repeat_interleave(num_queries)
        pages = requests.page_table[rows, positions // page_size].long()
        return cls(
            heads,
            requests,
            torch.randn(len(rows), width, device="cuda").bfloat16(),
            torch.tensor([1.0, 1.0, 0.0], device="cuda")
            .repeat_interleave(heads.head_dim // 2)
            .repeat(int(positions.max()) + 1, 1),
            positions,
            pages * page_size + positions % page_size,
            QueryTree(num_queries, num_queries),
        )

    def rotate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rotate and store into one layer."""
        layout = HeadLayout(self.heads.queries, self.heads.kv, self.heads.head_dim)
        rotate_and_store(
            self.qkv, layout, None, self.table, self.positions, keys, values, self.out_slots, pdl=True
        )

    def attend(
        self, keys: torch.Tensor, values: torch.Tensor, workspace: DecodeWorkspace, config: DecodeConfig
    ) -> torch.Tensor:
        """Rotate and store into one layer, then attend."""
        self.rotate(keys, values)
        q = self.qkv.view(len(self.qkv), -1, self.heads.head_dim)[:, : self.heads.queries]
        return decode_attention(q, keys, values, self.requests, 0.1, workspace, config, self.tree)


def decode_configs(batch: int, num_sms: int, heads: Heads, num_queries: int) -> list[DecodeConfig]:
    """The configurations to try for a batch, with overlapped launches as in the backend."""
    few = FEW if num_queries == 1 else FEW_OF_CHAINS
    cuts, merged = (few, MERGED) if batch in LATENCY_BOUND else (MANY, MERGED[:1])
    return [
        DecodeConfig(
            block_n, max(int(num_sms * per_sm) // heads.kv, 1), num_warps, num_stages, True, registers, ahead,
            elements,
        )
        for block_n, num_warps, num_stages, per_sm, registers, ahead in cuts
        for elements in merged
    ]  # fmt: skip


def report(title: str, results: dict[str, float], own: str, work: float, unit: str, top: int) -> None:
    """Print the fastest of ``results`` (microseconds), and the rank of the backend's own choice; ``work`` per
    microsecond is in ``unit``."""
    ranked = sorted(results, key=lambda name: results[name])
    cells = [
        f"{'*' if name == own else ''}{name} {results[name]:.1f}us {work / results[name]:.0f}{unit}"
        for i, name in enumerate(ranked)
        if i < top or name == own
    ]
    print(f"{title}: " + " | ".join(cells), flush=True)


def describe(config: Config) -> str:
    """A configuration as short text for a table."""
    if isinstance(config, ExtendConfig):
        return f"{config.block_m}x{config.block_n}/w{config.num_warps}/s{config.num_stages}"
    cut = f"{config.block_n}/w{config.num_warps}/s{config.num_stages}/p{config.num_workers}/f{config.num_prefetched}"
    cut += f"/m{config.merge_elements}"
    return cut + (f"/r{config.max_registers}" if config.max_registers else "")


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sweep of one model. ``shard``: only compile, and only these of each batch's configurations."""

    name: str
    heads: Heads
    page_size: int
    top: int
    shard: slice | None
    batches: Collection[str]  # of decode; none: all
    num_queries: int  # of decode

    def decode(self) -> None:
        """All decode batches."""
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        tiles = query_tiles(self.num_queries * self.heads.queries // self.heads.kv)
        workspace = DecodeWorkspace(self.heads.kv, self.heads.head_dim, num_sms, torch.device("cuda"), tiles)
        for batch, num_tokens in DECODE:
            if self.batches and f"{batch}x{num_tokens}" not in self.batches:
                continue
            pool, requests, _ = self._make(batch, num_tokens, batch)
            front = Front.of(self.heads, requests, self.num_queries)
            group = self.heads.queries // self.heads.kv
            own = TritonAttentionBackend(pool).verify_config(batch, self.num_queries, group)
            steps: dict[Config, Step] = {
                config: partial(front.attend, workspace=workspace, config=config)
                for config in dict.fromkeys(
                    [own, *decode_configs(batch, num_sms, self.heads, self.num_queries)]
                )
            }
            work = batch * num_tokens * self.heads.kv * self.heads.head_dim * 4 / 1e3
            title = f"decode {batch}x{num_tokens}" + (
                f" of {self.num_queries}" if self.num_queries > 1 else ""
            )
            self._compare(title, steps, pool, own, work, "GB/s", front.rotate)

    def extend(self) -> None:
        """All extend batches."""
        for batch, new, prefix in EXTEND:
            pool, requests, q = self._make(batch, new + prefix, batch * new)
            starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * new
            backend = TritonAttentionBackend(pool)
            own = backend.extend_config(new * self.heads.queries // self.heads.kv)
            cuts = TILES if new > 64 else SMALL_TILES
            lens = np.full(batch, new), np.full(batch, new + prefix)
            steps: dict[Config, Step] = {}
            for config in dict.fromkeys([own, *(ExtendConfig(*cut) for cut in cuts)]):
                grid = extend_grid(*lens, (self.heads.queries, self.heads.kv), config, backend.num_sms)
                steps[config] = partial(
                    extend_attention, q, requests=requests, query_starts=starts, grid=grid, scale=0.1, config=config
                )  # fmt: skip
            pairs = batch * (new * prefix + new * (new + 1) / 2)
            work = 4 * pairs * self.heads.queries * self.heads.head_dim / 1e6
            self._compare(f"extend {batch}x{new} after {prefix}", steps, pool, own, work, "TF/s")

    def _make(
        self, batch: int, num_tokens: int, num_queries: int
    ) -> tuple[KVPool, PagedRequests, torch.Tensor]:
        room = batch * (num_tokens + self.page_size)
        pool = make_pool(self.heads, self.page_size, room, 1 if self.shard else _MAX_LAYERS)
        q = torch.randn(num_queries, self.heads.queries, self.heads.head_dim, device="cuda").bfloat16()
        return pool, make_requests(pool, batch, num_tokens), q

    def _compare(
        self,
        title: str,
        steps: Mapping[Config, Step],
        pool: KVPool,
        own: Config,
        work: float,
        unit: str,
        front: Step | None = None,
    ) -> None:
        results = {}
        front_us = time_us(front, pool) if front and not self.shard else 0.0
        for config, step in list(steps.items())[self.shard or slice(None)]:
            try:
                if self.shard:
                    step(pool.k(0), pool.v(0))
                else:
                    results[describe(config)] = time_us(step, pool) - front_us
            except Exception as error:  # a configuration that does not fit must not end the sweep
                print(f"{title} {describe(config)}: {str(error)[:120]}", file=sys.stderr)
        if not self.shard:
            report(f"{self.name} {title}", results, describe(own), work, unit, self.top)


def main() -> None:
    """Compile, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument(
        "--batches", nargs="+", default=(), metavar="NUMxTOKENS", help="of decode; all if not given"
    )
    parser.add_argument("--queries", type=int, default=1, help="of each request in decode")
    parser.add_argument("--only", choices=("decode", "extend"))
    parser.add_argument("--shard", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shard is None:
        command = [sys.executable, *sys.argv, "--jobs", str(args.jobs), "--shard"]
        for job in [subprocess.Popen([*command, str(i)]) for i in range(args.jobs)]:
            job.wait()
    for name in args.models:
        shard = None if args.shard is None else slice(args.shard, None, args.jobs)
        sweep = Sweep(name, MODELS[name], args.page_size, args.top, shard, args.batches, args.queries)
        if args.only != "extend":
            sweep.decode()
        if args.only != "decode":
            sweep.extend()


if __name__ == "__main__":
    main()
