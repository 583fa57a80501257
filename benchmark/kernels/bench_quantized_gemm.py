"""Products of few rows with quantised weights on a GPU: our CUDA and Triton kernels, the GPU's own FP8 product, and
bfloat16 weights, on the shapes of a model's layers, in captured graphs.

Usage: bench_quantized_gemm.py [--models 8B] [--formats fp8 int4 ...] [--rows 1 2 ...] [--seconds 0.6] [--table FILE]
    [--skip-sweep] [--triton] [--processes 12]

The method is that of bench_skinny_gemm.py. The sweep looks for the best configuration of each product. It reads so many
copies of the weight in turn that each comes from memory. Then all products of a step's layers (not the head, which is
not quantised) are timed one after the other, with the best configurations, with the guesses, and with --triton by
Triton alone. --triton also tries Triton's kernels, which take seconds to compile; those for int4 are compiled ahead by
--processes processes, and their results are compared with the library's. The best configurations are written to --table
in the format of layers/skinny_table.py and replace the file's entries for the same products.

"library" makes the matrix plain and multiplies by cuBLAS, or is the GPU's FP8 product. "bf16" is a plain matrix with
the best kernel for it. The sums are of the products of a step's layers, each timed alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from bench_skinny_gemm import (
    COLD_BYTES,
    MODELS,
    SHARED_LIMIT,
    Activations,
    Bench,
    FixedTable,
    Model,
    Product,
    Sweep,
    time_product,
)

from fenceline.config.quantization import QuantConfig
from fenceline.layers.cuda_quantized import (
    CudaQuantizedWeight,
    QuantizedProducts,
    direct_takes,
    find_quantized_products,
    numbers_name,
)
from fenceline.layers.kernels.triton.int4_gemm import Int4Config
from fenceline.layers.kernels.triton.skinny_gemm import SplitWorkspace, TritonConfig
from fenceline.layers.quantized import FP8, QuantizedFormat, make_format
from fenceline.layers.skinny_table import (
    MAX_CUDA_ROWS,
    MAX_DIRECT_ROWS,
    MAX_DIRECT_WARPS,
    CudaConfig,
    GpuTraits,
    SkinnyChoice,
    SkinnyTable,
    choice_to_json,
    load_table,
    shared_bytes,
    table_key,
)

FORMATS = {
    "fp8": QuantConfig(method="on-line", kind="fp8"),
    "fp8-blocks": QuantConfig(method="on-line", kind="fp8", scales="block"),
    "int4": QuantConfig(method="on-line", kind="int4", group_size=128),
    "int4-64": QuantConfig(method="on-line", kind="int4", group_size=64),
    "int4-32": QuantConfig(method="on-line", kind="int4", group_size=32),
}
BITS = {"fp8": 8, "int4": 4}


def random_weight(config: QuantConfig, product: Product, bench: Bench) -> QuantizedFormat:
    """A weight with random numbers of about the size of a model's weights."""
    with bench.device:
        stored = make_format(config, product.weight_rows, product.k, torch.bfloat16)
    words = stored.data.view(torch.int32)
    words.random_(0, 0x3F3F3F3F)  # no code of E4M3 is NaN
    if stored.data.dtype == FP8:
        words &= 0x3F3F3F3F
    stored.scales.uniform_(0.005, 0.01)
    return stored


def nbytes(stored: QuantizedFormat) -> int:
    return stored.data.nbytes + stored.scales.nbytes + (0 if stored.zeros is None else stored.zeros.nbytes)


def with_table(found: QuantizedProducts, table: SkinnyTable | None, cuda: bool = True) -> QuantizedProducts:
    """``found`` with other measurements (None: without any); without the CUDA kernel if ``cuda`` is false."""
    products = copy.copy(found)
    products._table = table
    if not cuda:
        products._cuda_product = None
    return products


@dataclass(frozen=True, slots=True)
class Copies:
    """So many weights of one product that they do not fit in L2 together."""

    stored: list[QuantizedFormat]

    def time_us(self, bench: Bench, product: Product, rows: int, products: QuantizedProducts) -> float:
        """Microseconds for one product."""
        weights = [CudaQuantizedWeight(stored, products) for stored in self.stored]
        acts = Activations([product], rows)

        def run() -> None:
            for weight in weights:
                acts.run(product, weight)

        return bench.time_us(run) / len(weights)


# Rows of the weight and inputs of a block, warps, stages, by the rows of x in a block.
_FEW = ((64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 6), (128, 128, 8, 4))
_MANY = ((128, 64, 8, 4), (128, 128, 8, 3), (128, 128, 8, 2), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 2))
_INT4_CUTS = {16: _FEW, 32: _FEW, 64: (*_FEW, (128, 64, 8, 5), (128, 128, 8, 3)), 128: (*_MANY, (256, 64, 16, 3))}


def int4_configs(product: Product, rows: int, group: int, num_sms: int) -> list[Int4Config]:
    """The configurations to try for a product with a weight in int4."""
    found = []
    for block_rows, cuts in _INT4_CUTS.items():
        if block_rows < min(rows, 64) or (block_rows > 16 and block_rows >= 2 * rows):
            continue
        for block_n, block_k, num_warps, num_stages in cuts:
            tiles = -(-product.weight_rows // block_n) * -(-rows // block_rows)
            for split in (1, 2, 4, 8):
                if split > 1 and tiles * split > (3.2 if block_rows <= 64 else 2.1) * num_sms:
                    break
                if tiles * split < 0.4 * num_sms or group % block_k:
                    continue
                config = Int4Config(block_n, block_rows, block_k, num_warps, num_stages, split)
                found += [config, replace(config, reorder=True)]
    return found


def compile_ahead(name: str, models: Sequence[str], rows: Sequence[int], num_sms: int, processes: int) -> None:
    """Compile all configurations for int4 in processes of their own, into Triton's cache on disk."""
    begin = time.monotonic()
    work: dict[tuple[Product, Int4Config], int] = {}
    for model, num_rows in itertools.product(models, rows):
        for product in MODELS[model].layer if num_rows > 1 else ():
            for config in int4_configs(product, num_rows, FORMATS[name].group_size, num_sms):
                work.setdefault((product, config), num_rows)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        jobs = [(product, config, num_rows) for (product, config), num_rows in work.items()]
        with suppress(BrokenProcessPool):
            list(pool.map(partial(compile_one, name), jobs, chunksize=4))
    print(f"{len(work)} configurations compiled in {time.monotonic() - begin:.0f} s", flush=True)


def compile_one(name: str, job: tuple[Product, Int4Config, int]) -> None:
    """Run one configuration. The sweep reports errors."""
    product, config, rows = job
    products = QuantizedProducts(1, (9, 0), None, None, int4=SplitWorkspace(torch.device("cuda")))
    products._table = FixedTable(GpuTraits("", 1, (9, 0), has_cuda_kernels=False), config)
    with torch.device("cuda"):
        stored = make_format(FORMATS[name], product.weight_rows, product.k, torch.bfloat16)
    with suppress(Exception):
        Activations([product], rows).run(product, CudaQuantizedWeight(stored, products))
        torch.cuda.synchronize()


class QuantizedSweep(Sweep):
    """The search of ``Sweep`` for a quantised weight."""

    def __init__(
        self,
        bench: Bench,
        product: Product,
        rows: int,
        seconds: float,
        copies: Copies,
        products: QuantizedProducts,
        triton: bool,
    ) -> None:
        super().__init__(bench, product, rows, seconds)
        self.copies, self.quantized = copies, products
        self.bits = BITS[copies.stored[0].kind]
        self.acts = Activations([product], rows)
        self.expected = self.result(None)
        self.try_all([None])
        if triton:
            guess = products._guess_triton(rows, copies.stored[0], product.gated)
            self.deadline = math.inf
            if rows > 1 and self.bits == 4 and products._int4 is not None:
                self.try_all(int4_configs(product, rows, copies.stored[0].group, bench.gpu.num_sms))
            elif rows == 1 or self.bits == 8:
                self.try_all([guess, *(self.triton() if rows > 1 else [])])
        self.deadline = time.monotonic() + seconds  # the time begins after Triton has compiled its kernels
        self.try_all(self.direct())

    def direct(self) -> list[SkinnyChoice]:
        """All configurations of the kernel whose weights go into registers."""
        return [
            CudaConfig(tiles=2, warps_n=n, warps_k=k, depth=depth, prefetch_bytes=prefetched, direct=True)
            for n, k, depth, prefetched in itertools.product(
                (1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4, 6, 8, 12), (2, 4), (0, 1 << 15)
            )
            if 4 <= n * k <= MAX_DIRECT_WARPS
        ]

    def time(self, choice: SkinnyChoice) -> float:
        products = with_table(self.quantized, FixedTable(self.bench.gpu, choice))
        us = self.copies.time_us(self.bench, self.product, self.rows, products)
        if isinstance(choice, Int4Config):
            error = (self.result(choice) - self.expected).norm() / self.expected.norm()
            if not error < 0.02:
                raise AssertionError(f"the result is wrong by {error.item():.3f}")
        return us

    def result(self, choice: SkinnyChoice) -> torch.Tensor:
        """The product of the first weight, computed by ``choice``."""
        products = with_table(self.quantized, FixedTable(self.bench.gpu, choice))
        weight, product = CudaQuantizedWeight(self.copies.stored[0], products), self.product
        x, norm = self.acts.inputs[product.k], self.acts.norms[product.k]
        if product.function == "add_product":
            y = weight.add_product(torch.zeros_like(self.acts.residuals[product.num_out]), x, None)
        elif product.gated:
            y = weight.gated_product(x, norm if product.function == "gated_product" else None, None, norm.kernels)
        elif product.function == "product":
            y = weight.product(x)
        else:
            y = weight.normed_product(x, norm)
        return y.float()

    def fits(self, choice: SkinnyChoice) -> bool:
        if isinstance(choice, Int4Config):
            return True
        if isinstance(choice, CudaConfig) and self.rows > 2 * MAX_CUDA_ROWS:
            return False
        if isinstance(choice, TritonConfig) and self.rows > 1:
            stored = self.copies.stored[0]
            if stored.group < stored.shape[1] and stored.group % choice.block_k:
                return False
        if isinstance(choice, CudaConfig) and choice.direct:
            shared = shared_bytes(choice, self.rows, self.bits, k=self.product.k)
            takes = self.rows <= MAX_DIRECT_ROWS and direct_takes(self.copies.stored[0])
            is_one = choice.tiles == 2 and choice.depth in (2, 4) and not choice.num_ctas
            is_one &= choice.cluster == 1 and choice.warps_n * choice.warps_k <= MAX_DIRECT_WARPS
            return takes and is_one and shared <= SHARED_LIMIT
        if isinstance(choice, CudaConfig):
            tiles = (2, 4, 6) if self.rows <= 8 and self.copies.stored[0].group >= 128 else (2, 4)
            if choice.tiles not in tiles:
                return False
            if self.rows > MAX_CUDA_ROWS:
                return self.of_one_launch().fits(choice)
        return super().fits(choice)

    def of_one_launch(self) -> Sweep:
        """The search for the most rows that one launch takes."""
        one = Sweep(self.bench, self.product, MAX_CUDA_ROWS, 0)
        one.bits = self.bits
        return one


def sweep_format(
    bench: Bench, model: Model, name: str, products: QuantizedProducts, args: argparse.Namespace, rate: float
) -> dict[str, SkinnyChoice]:
    """The best configuration of each product, by table_key."""
    winners: dict[str, SkinnyChoice] = {}
    sums = {rows: [0.0, 0.0, 0.0] for rows in args.rows}
    print(
        f"{model.name} {name}, us; the winner, of how many\n"
        f"{'product':8} rows    floor  library     CUDA   Triton     bf16"
    )
    for product in model.layer:
        torch.cuda.empty_cache()
        first = random_weight(FORMATS[name], product, bench)
        number = max(2, min(100, -(-COLD_BYTES // nbytes(first))))
        copies = Copies([first, *(random_weight(FORMATS[name], product, bench) for _ in range(number - 1))])
        seeds: list[SkinnyChoice] = []
        for rows in args.rows:
            sweep = QuantizedSweep(bench, product, rows, args.seconds, copies, products, args.triton)
            sweep.run(seeds, triton=False)
            seeds = sweep.best(8, CudaConfig)
            winner = sweep.best(1)[0]
            key = table_key(rows, product.weight_rows, product.k, product.gated, numbers_name(first))
            winners[key] = winner
            dense = time_product(bench, product, rows, bench.products(load_table(bench.gpu)))
            best = [sweep.best(1, kind) for kind in (CudaConfig, (TritonConfig, Int4Config))]
            times = [nbytes(first) / rate, sweep.found.get(None)]
            times += [sweep.found[found[0]] if found else None for found in best]
            for place, us in enumerate((sweep.found[None], sweep.found[winner], dense)):
                sums[rows][place] += us * model.num_layers
            cells = " ".join("       -" if us is None else f"{us:8.2f}" for us in (*times, dense))
            print(f"{product.name:8} {rows:4} {cells}   {winner} of {len(sweep.found)}", flush=True)
            if args.triton:
                for choice in sweep.best(4, Int4Config)[1:]:
                    print(f"{'':13} {sweep.found[choice]:.2f} {choice}")
    for rows, (library, winner_us, dense) in sums.items():
        print(f"sum of {rows} rows: library {library:.0f}, winners {winner_us:.0f}, bf16 {dense:.0f}")
    return winners


def report_chain(
    bench: Bench, model: Model, name: str, rows: Sequence[int], tables: dict[str, QuantizedProducts], rate: float
) -> list[str]:
    """One line for each number of rows."""
    torch.cuda.empty_cache()
    work = [
        (product, random_weight(FORMATS[name], product, bench))
        for _ in range(model.num_layers)
        for product in model.layer
    ]
    floor = sum(nbytes(stored) for _, stored in work) / rate
    lines = [f"{model.name} {name}: all products of a step's layers, us; floor {floor:.0f}"]
    for num_rows in rows:
        acts = Activations(model.layer, num_rows)
        cells = []
        for label, products in tables.items():
            weights = [(product, CudaQuantizedWeight(stored, products)) for product, stored in work]

            def run(weights: list[tuple[Product, CudaQuantizedWeight]] = weights, acts: Activations = acts) -> None:
                for product, weight in weights:
                    acts.run(product, weight)

            us = bench.time_us(run)
            cells.append(f"{label} {us:8.1f} ({floor / us:.0%})")
        lines.append(f"  rows {num_rows:2}: {'  '.join(cells)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8B"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["fp8", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=0.6, help="for the sweep of one product and number of rows")
    parser.add_argument("--triton", action="store_true", help="try Triton's kernels")
    parser.add_argument("--processes", type=int, default=12, help="that compile for int4 with --triton")
    parser.add_argument("--table", type=Path, help="file for the best configurations")
    parser.add_argument(
        "--skip-sweep", action="store_true", help="time the chains with the table that is in the package"
    )
    args = parser.parse_args()
    bench = Bench(COLD_BYTES + max(p.nbytes for name in args.models for p in MODELS[name].layer))
    rate = bench.copy_rate()
    print(f"{bench.gpu.name}, {rate / 1e6:.2f} TB/s copied")
    lines: list[str] = []
    entries: dict[str, SkinnyChoice] = {}
    for model in (MODELS[name] for name in args.models):
        for name in args.formats:
            found = find_quantized_products(bench.device, FORMATS[name].kind)
            tables = {}
            if args.skip_sweep:
                tables["table"] = found
            else:
                if args.triton and FORMATS[name].kind == "int4":
                    compile_ahead(name, args.models, args.rows, bench.gpu.num_sms, args.processes)
                winners = sweep_format(bench, model, name, found, args, rate)
                entries |= winners
                tables["winners"] = with_table(found, SkinnyTable(bench.gpu, winners))
            tables["guesses"] = with_table(found, None)
            tables["library"] = with_table(found, FixedTable(bench.gpu, None))
            if args.triton:
                tables["Triton"] = with_table(found, None, cuda=False)
            lines += report_chain(bench, model, name, args.rows, tables, rate)
    if args.table and entries:
        stored = json.loads(args.table.read_text())["entries"] if args.table.exists() else {}
        stored |= {key: choice_to_json(choice) for key, choice in entries.items()}
        args.table.write_text(json.dumps({"gpu": bench.gpu.name, "entries": stored}, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
