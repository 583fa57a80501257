"""Page copies between the KV pool and pinned host memory by SM kernels, against the copy engine.

    python benchmark/kernels/bench_page_copy.py [--megabytes 512] [--layers 36] [--ctas 1,2,4,8,16,32]

Copies random pages of a pool of the 8B's shape (8 KV heads of 128, bf16) into random host pages and back, all layers
in one launch. ``copy engine`` is one cudaMemcpyAsync of as many contiguous bytes: what the link gives at best.
GB = 1e9 bytes; the median of several copies, timed by CUDA events. Then what a copy takes from a product that runs
beside it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import fenceline_kernel
import torch
from fenceline_kernel import PagePools, gather_pages, scatter_pages

HEADS, HEAD_DIM = 8, 128


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median time of ``work`` on the current stream, after one run for warmth."""
    times = []
    for i in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if i > 0:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


class Bench:
    """A device pool and as much pinned memory, seen in every layout and page size."""

    def __init__(self, num_bytes: int, num_layers: int) -> None:
        self.row_bytes = HEADS * HEAD_DIM * 2
        self.num_layers = num_layers
        self.num_slots = num_bytes // (2 * num_layers * self.row_bytes) // 64 * 64
        shape = (self.num_slots, HEADS, HEAD_DIM)
        self.k = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(num_layers)]
        self.v = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(num_layers)]
        self.num_bytes = 2 * num_layers * self.num_slots * self.row_bytes
        self.host = torch.zeros(self.num_bytes // 2, dtype=torch.bfloat16).pin_memory()
        self.flat = torch.zeros_like(self.host, device="cuda")

    def engine(self) -> tuple[float, float]:
        """GB/s of one contiguous copy: host to device, device to host."""
        to_device = seconds(lambda: self.flat.copy_(self.host, non_blocking=True))
        to_host = seconds(lambda: self.host.copy_(self.flat, non_blocking=True))
        return self.num_bytes / to_device / 1e9, self.num_bytes / to_host / 1e9

    def pools(self, layout: str, page_size: int) -> PagePools:
        """The same memory, cut into pages of ``page_size``."""
        shape: tuple[int, ...] = (self.num_layers, 2, self.num_slots, HEADS, HEAD_DIM)
        if layout == "page_first":
            shape = (self.num_slots // page_size, self.num_layers, 2, page_size, HEADS, HEAD_DIM)
        return PagePools(self.k, self.v, self.host.view(shape), page_size, layout)  # type: ignore[arg-type]

    def kernel(self, layout: str, page_size: int, num_ctas: int) -> tuple[float, float]:
        """GB/s of all pages in random order: host to device, device to host."""
        pools = self.pools(layout, page_size)
        pages, others = (torch.randperm(pools.num_host_pages, device="cuda") for _ in range(2))
        to_device = seconds(lambda: scatter_pages(pools, pages, others, num_ctas=num_ctas))
        to_host = seconds(lambda: gather_pages(pools, others, pages, num_ctas=num_ctas))
        return self.num_bytes / to_device / 1e9, self.num_bytes / to_host / 1e9

    def beside_a_product(self, num_ctas: int) -> tuple[float, float]:
        """How many times as long a chain of products takes with a copy on another stream, for each direction."""
        pools = self.pools("page_first", 16)
        pages = torch.randperm(pools.num_host_pages, device="cuda")
        a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        stream, slower = torch.cuda.Stream(), []

        def products() -> None:
            for _ in range(20):
                torch.mm(a, b)

        alone = seconds(products)
        for copy in (scatter_pages, gather_pages):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(8):
                    copy(pools, pages, pages, num_ctas=num_ctas)
            slower.append(seconds(products, repeats=3) / alone)
            torch.cuda.synchronize()
        return slower[0], slower[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--ctas", default="1,2,4,8,16,32")
    parser.add_argument("--page-sizes", default="1,16,64")
    options = parser.parse_args(arguments)
    ctas = [int(word) for word in options.ctas.split(",")]
    why = fenceline_kernel.why_unavailable()
    if why is not None:
        raise SystemExit(f"bench_page_copy: {why}")
    bench = Bench(options.megabytes * 10**6, options.layers)
    engine = bench.engine()
    print(
        f"{torch.cuda.get_device_name()}, {bench.num_bytes / 1e6:.0f} MB, GB/s host to device / device to host"
    )
    print(f"copy engine, contiguous: {engine[0]:.1f} / {engine[1]:.1f}")
    print("layout       page  " + "".join(f"{num:>15} CTAs" for num in ctas))
    for layout in ("page_first", "layer_first"):
        for page_size in map(int, options.page_sizes.split(",")):
            row = [bench.kernel(layout, page_size, num) for num in ctas]
            print(f"{layout:12} {page_size:4}  " + "".join(f"{h2d:>11.1f} / {d2h:>6.1f}" for h2d, d2h in row))
            best = [max(one[i] for one in row) / engine[i] for i in (0, 1)]
            print(f"{'':12} best  of the copy engine: {best[0]:.3f} / {best[1]:.3f}")
    for num in ctas:
        slower = bench.beside_a_product(num)
        print(
            f"4096³ bf16 products beside a copy by {num:3} CTAs: {slower[0]:.3f} / {slower[1]:.3f} times as long"
        )


if __name__ == "__main__":
    main()
