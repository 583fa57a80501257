"""Measures page copies between the KV pool and pinned host memory, as a share of the rate of one plain copy.

    python benchmark/kernels/bench_page_copy.py [--models llama-3.1-8b,qwen3-0.6b] [--tokens 8192] [--skip sweeps]

For each model's shape (bf16): both io backends and layouts, pages of 1, 16 and 64 tokens, anywhere or in a row, to the
device and to the host; loads layer by layer with the CPU's time for submitting them; how many CTAs a kernel copy needs;
from how many pages in a row one strided copy is faster; how much copies slow down products that run at the same time.
The copies are those of ``PageCopier`` on LOAD and STORE. GB = 1e9 bytes; the median of several copies, timed by CUDA
events; copies of one-token pages move fewer tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import fenceline_kernel
import numpy as np
import torch
from fenceline_kernel import PagePools

from fenceline.config.kv_layout import KVLayout
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.page_copy import Pages, make_page_copier, make_page_pools
from fenceline.mem_cache.kv_pool import KVPool
from fenceline.memory_order.cuda import CudaDevice

HEADS, HEAD_DIM = 8, 128
NUM_LAYERS = {"llama-3.1-8b": 32, "qwen3-0.6b": 28}
LAYOUTS = ("layer_first", "page_first")
IO_BACKENDS = ("kernel", "direct")
ONE_TOKEN_SHARE = 4  # copies of one-token pages move the tokens divided by this


class SharedHostDevice(CudaDevice):
    """Uses the same pinned memory for all host pools, one after the other, so that it is pinned only once."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        begin = time.perf_counter()
        self.memory = super().host_buffer(nbytes)
        self.pin_seconds = time.perf_counter() - begin

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return self.memory[:nbytes]


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one transfer: seconds on its stream, seconds of the CPU."""

    seconds: float
    cpu_seconds: float


def timed(work: Callable[[], object], stream: torch.cuda.Stream, repeats: int = 3) -> Timed:
    """Medians of ``work``, which submits to ``stream``, after one run as warm-up."""
    seconds, cpu = [], []
    for i in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record(stream)
        begin = time.perf_counter()
        work()
        submitted = time.perf_counter() - begin
        end.record(stream)
        end.synchronize()
        if i > 0:
            seconds.append(start.elapsed_time(end) / 1e3)
            cpu.append(submitted)
    return Timed(statistics.median(seconds), statistics.median(cpu))


class Bench:
    """Pools of one model's shape, twice as large as a copy, and the rate of the link."""

    def __init__(self, device: SharedHostDevice, num_layers: int, num_tokens: int) -> None:
        self.device, self.num_layers, self.num_tokens = device, num_layers, num_tokens
        self.token_bytes = layout_of(1, num_layers).page_nbytes
        self.load, self.store = device.load.raw, device.store.raw  # type: ignore[attr-defined]
        flat = torch.empty(num_tokens * self.token_bytes, dtype=torch.uint8, device="cuda")
        host = device.memory[: flat.nbytes]
        self.to_device = flat.nbytes / timed(lambda: device.load.copy(flat, host), self.load).seconds
        self.to_host = flat.nbytes / timed(lambda: device.store.copy(host, flat), self.store).seconds

    def pools(self, layout: str, page_size: int) -> tuple[KVPool, HostPool]:
        num_pages = 2 * self.num_tokens // page_size
        kv_pool = KVPool(num_pages, layout_of(page_size, self.num_layers), self.device.torch_device)
        return kv_pool, HostPool(self.device, num_pages, kv_pool.layout, layout)  # type: ignore[arg-type]

    def lists(self, page_size: int, run: int | None = 1, tokens: int | None = None) -> tuple[Pages, Pages]:
        """Device and host pages of a copy: runs of ``run`` adjacent pages at random places (None: one run)."""
        tokens = self.num_tokens // (ONE_TOKEN_SHARE if page_size == 1 else 1) if tokens is None else tokens
        count, total = tokens // page_size, 2 * self.num_tokens // page_size
        run = count if run is None else run
        draw = np.random.default_rng(0)
        # A gap after each run, so that no two meet.
        starts = (draw.permutation(total // (run + 1))[: -(-count // run)] * (run + 1) for _ in range(2))
        device, host = (np.add.outer(one, np.arange(run)).ravel()[:count].astype(np.int32) for one in starts)
        return device, host

    def show(self, title: str, load: Timed, store: Timed, num_tokens: int) -> None:
        nbytes = num_tokens * self.token_bytes
        words = [title]
        for one, link in ((load, self.to_device), (store, self.to_host)):
            rate = nbytes / one.seconds
            words.append(f"{rate / 1e9:6.1f} GB/s {rate / link:5.1%} {one.cpu_seconds * 1e6:7.0f} us CPU")
        print("   ".join(words), flush=True)

    def copies(self, page_size: int, layout: str) -> None:
        """Print copies of all layers in both directions, by both io backends."""
        pools = self.pools(layout, page_size)
        every = range(self.num_layers)
        for io_backend in IO_BACKENDS:
            copier = make_page_copier(self.device, *pools, io_backend)  # type: ignore[arg-type]
            for words, run in (("anywhere", 1), ("in a row", None)):
                device, host = self.lists(page_size, run)
                load = timed(partial(copier.to_device, self.device.load, host, device, every), self.load)
                store = timed(partial(copier.to_host, self.device.store, device, host), self.store)
                title = f"{io_backend:7} {layout:11} {page_size:3} {words:9}"
                self.show(title, load, store, len(device) * page_size)

    def layer_wise(self, layout: str, page_size: int, io_backend: str) -> None:
        """Loads in groups of layers, a Point after each, as the controller submits them."""
        copier = make_page_copier(self.device, *self.pools(layout, page_size), io_backend)  # type: ignore[arg-type]
        device, host = self.lists(page_size)
        words = []
        for group in (1, 2, 4, self.num_layers):

            def submit(group: int = group) -> None:
                for first in range(0, self.num_layers, group):
                    layers = range(first, min(first + group, self.num_layers))
                    copier.to_device(self.device.load, host, device, layers)
                    self.device.load.record()

            one = timed(submit, self.load)
            share = self.num_tokens * self.token_bytes / one.seconds / self.to_device
            words.append(f"{group}: {share:5.1%} {one.cpu_seconds * 1e6:6.0f} us")
        print(f"{io_backend:7} {layout:11} {page_size:3}   " + "   ".join(words), flush=True)

    def both_ways(
        self, pools: PagePools, lists: tuple[Pages, Pages], num_ctas: int, min_rows: int
    ) -> tuple[Timed, Timed]:
        """A copy to the device, a copy to the host."""
        copy = partial(pools.copy, *lists, num_ctas=num_ctas, min_rows=min_rows)
        return (
            timed(partial(copy, to_host=False, stream=self.load.cuda_stream), self.load, 2),
            timed(partial(copy, to_host=True, stream=self.store.cuda_stream), self.store, 2),
        )

    def ctas(self, layout: str, page_size: int) -> None:
        """Kernel copies by few CTAs and by many."""
        pools, lists = page_pools(*self.pools(layout, page_size), "kernel"), self.lists(page_size)
        nbytes, words = len(lists[0]) * page_size * self.token_bytes, []
        for num in (1, 2, 4, 8, 16, 32):
            load, store = (nbytes / one.seconds for one in self.both_ways(pools, lists, num, 1))
            words.append(f"{num}: {load / self.to_device:.1%} / {store / self.to_host:.1%}")
        print(f"{layout:11} {page_size:3}   " + "   ".join(words), flush=True)

    def rows(self, page_size: int) -> None:
        """The copy engine on page_first: runs as one strided copy, or as plain copies of a batch."""
        pools, words = page_pools(*self.pools("page_first", page_size), "direct"), []
        for run in (2, 4, 16, 64):
            lists = self.lists(page_size, run, self.num_tokens // (16 if page_size == 1 else 1))
            nbytes = len(lists[0]) * page_size * self.token_bytes
            strided, plain = (self.both_ways(pools, lists, 1, min_rows) for min_rows in (1, 10**6))
            rates = [
                f"{nbytes / one.seconds / 1e9:.1f} ({one.cpu_seconds * 1e3:.1f} ms)"
                for way in (0, 1)
                for one in (strided[way], plain[way])
            ]
            words.append(f"{run:2}: {rates[0]} {rates[1]} / {rates[2]} {rates[3]}")
        print(f"{page_size:3}   " + "   ".join(words), flush=True)

    def beside_products(self, io_backend: str, num_ctas: int) -> None:
        """How many times as long a chain of products takes with copies on another stream."""
        pools = page_pools(*self.pools("page_first", 64), io_backend)
        device, host = self.lists(64)
        a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        forward, slower = torch.cuda.current_stream(), []

        def products() -> None:
            for _ in range(20):
                torch.mm(a, b)

        alone = timed(products, forward).seconds
        for to_host, stream in ((False, self.load), (True, self.store)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            for _ in range(3):
                pools.copy(device, host, to_host=to_host, num_ctas=num_ctas, stream=stream.cuda_stream)
            begin.record(forward)
            products()
            end.record(forward)
            torch.cuda.synchronize()
            slower.append(begin.elapsed_time(end) / 1e3 / alone)
        words = f"kernel, {num_ctas:2} CTAs" if io_backend == "kernel" else "direct         "
        print(f"{words}: {slower[0]:.3f} beside loads, {slower[1]:.3f} beside stores", flush=True)


def page_pools(kv_pool: KVPool, host_pool: HostPool, io_backend: str) -> PagePools:
    """Both pools as fenceline_kernel takes them."""
    return make_page_pools(kv_pool, host_pool, range(kv_pool.num_layers), io_backend)  # type: ignore[arg-type]


def layout_of(page_size: int, num_layers: int) -> KVLayout:
    """The layout of a page of a model with ``num_layers`` layers."""
    return KVLayout.uniform(page_size, num_layers, HEADS, HEAD_DIM, "bfloat16")


def tables(bench: Bench, sweeps: bool) -> None:
    """Print all tables for one model's shape; ``sweeps``: also those from which the defaults were chosen."""
    print("\nio backend, layout, page size: to the device, to the host; share of the link's rate")
    for page_size in (64, 16, 1):
        for layout in LAYOUTS:
            bench.copies(page_size, layout)
    print("\nloads by groups of 1, 2, 4 layers and all at once: share of the link's rate, CPU time in all")
    for io_backend in IO_BACKENDS:
        for layout in LAYOUTS:
            bench.layer_wise(layout, 64, io_backend)
    if not sweeps:
        return
    print("\nkernel copies by so many CTAs: share of the link's rate to the device / to the host")
    for page_size in (64, 1):
        for layout in LAYOUTS:
            bench.ctas(layout, page_size)
    print("\ndirect, page_first, runs of so many pages, GB/s (CPU): strided, plain to the device / to the host")
    for page_size in (64, 16, 1):
        bench.rows(page_size)
    print("\n4096³ bf16 products, times as long")
    for io_backend, num_ctas in (("kernel", 4), ("kernel", 8), ("kernel", 16), ("direct", 8)):
        bench.beside_products(io_backend, num_ctas)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NUM_LAYERS), help=f"of {', '.join(NUM_LAYERS)}")
    parser.add_argument("--tokens", type=int, default=8192, help="moved by a copy, a multiple of 64")
    parser.add_argument("--skip", choices=["sweeps"], help="leave out the tables from which the defaults were chosen")
    options = parser.parse_args(arguments)
    models = options.models.split(",")
    if not set(models) <= NUM_LAYERS.keys() or options.tokens < 64 or options.tokens % 64 != 0:
        raise SystemExit("bench_page_copy: see --help")
    why = fenceline_kernel.why_unavailable()
    if why is not None:
        raise SystemExit(f"bench_page_copy: {why}")
    most = max(layout_of(1, NUM_LAYERS[model]).page_nbytes for model in models)
    device = SharedHostDevice(2 * options.tokens * most)
    gigabytes = device.memory.nbytes / 1e9
    print(f"{torch.cuda.get_device_name()}; {gigabytes:.1f} GB pinned in {device.pin_seconds:.2f} s")
    for number, model in enumerate(models):
        bench = Bench(device, NUM_LAYERS[model], options.tokens)
        print(
            f"\n{model}, {options.tokens} tokens, {options.tokens * bench.token_bytes / 1e6:.0f} MB; one plain copy: "
            f"{bench.to_device / 1e9:.1f} GB/s to the device, {bench.to_host / 1e9:.1f} to the host"
        )
        tables(bench, sweeps=number == 0 and options.skip is None)


if __name__ == "__main__":
    main()
