"""Products of few rows on a GPU: compares cuBLAS with our kernels on the shapes of some models, in captured graphs.

Usage: bench_skinny_gemm.py [--models 0.6B 8B Llama-8B 30B-A3B 8B/2 ...] [--rows 1 2 ...] [--seconds 2] [--triton]
    [--table FILE] [--skip-sweep]

The sweep looks for the best configuration of each product. A graph runs it over 400 MB of copies of the weight, so that
each copy is read from memory. If cuBLAS is faster there, our best configuration is also tried in the model's chain, in
which our products begin before the preceding ones have ended, and the faster chain decides. Then the chain, in which
every layer has its own weights, is timed with cuBLAS, with Triton alone (guessed configurations) and with the best
configurations. Times are medians over replays. The floor is the weights' bytes divided by the rate of a
device-to-device copy, measured in the same run. The best configurations are written to --table, in the format of
layers/skinny_table.py. They replace the file's entries for the same products; other entries stay. A model
called NAME/2 has the products of one of two ranks, whose norms and sums belong to the all-reduce between them.
Products that only a draft of the model has are in the sweep but not in the chain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fenceline.layers.cuda_layers import CudaDenseWeight, CudaLayerKernels, SkinnyProducts, _find_cuda_product
from fenceline.layers.kernels.triton.skinny_gemm import SplitWorkspace, TritonConfig
from fenceline.layers.skinny_table import (
    MAX_CUDA_ROWS,
    CudaConfig,
    GpuTraits,
    SkinnyChoice,
    SkinnyTable,
    choice_to_json,
    load_table,
    shared_bytes,
    table_key,
)
from fenceline.layers.weight import RMSNorm, Weight

EPS = 1e-6
COLD_BYTES = 400 << 20
SHARED_LIMIT = 227 << 10


@dataclass(frozen=True, slots=True)
class Product:
    """One weight of a model, and the method of Weight that multiplies with it."""

    name: str
    weight_rows: int
    k: int
    function: str  # product | normed_product | gated_product | add_product; plain_gated: a gated product without norm

    @property
    def gated(self) -> bool:
        return self.function in ("gated_product", "plain_gated")

    @property
    def num_out(self) -> int:
        return self.weight_rows // 2 if self.gated else self.weight_rows

    @property
    def nbytes(self) -> int:
        return 2 * self.weight_rows * self.k


@dataclass(frozen=True, slots=True)
class Model:
    """A stack of equal layers, each the products of ``layer`` in order, and a head."""

    name: str
    num_layers: int
    layer: tuple[Product, ...]
    head: Product
    drafts: tuple[Product, ...] = ()  # products of EAGLE and EAGLE-3 heads that differ from the model's own

    @property
    def products(self) -> tuple[Product, ...]:
        return (*self.layer, self.head)

    @property
    def nbytes(self) -> int:
        return self.num_layers * sum(product.nbytes for product in self.layer) + self.head.nbytes


def make_model(
    name: str,
    num_layers: int,
    hidden: int,
    qkv: int,
    attended: int,
    size: int,
    vocab_size: int = 151_936,
    drafts: tuple[Product, ...] = (),
) -> Model:
    """``attended`` features go into o_proj, ``size`` is the MLP's. The vocabulary is Qwen3's if not given."""
    layer = (
        Product("qkv", qkv, hidden, "normed_product"),
        Product("o", hidden, attended, "add_product"),
        Product("gate_up", 2 * size, hidden, "gated_product"),
        Product("down", hidden, size, "add_product"),
    )
    return Model(name, num_layers, layer, Product("lm_head", vocab_size, hidden, "normed_product"), drafts)


_LLAMA_DRAFTS = (
    Product("fc", 4096, 8192, "product"),  # EAGLE's; that of EAGLE-3 has the size of Qwen3-8B's down projection
    Product("qkv", 6144, 8192, "product"),  # EAGLE-3's
    Product("d_head", 32_000, 4096, "normed_product"),
)


def part_of(model: Model, size: int) -> Model:
    """The products of one of ``size`` ranks."""

    def part(product: Product) -> Product:
        if product.function == "add_product":
            return replace(product, k=product.k // size, function="product")
        rows, function = -(-product.weight_rows // size), "plain_gated" if product.gated else "product"
        return replace(product, weight_rows=rows, function=function)

    layer = tuple(part(product) for product in model.layer)
    return Model(f"{model.name}, a rank of {size}", model.num_layers, layer, part(model.head))


MODELS = {
    "0.6B": make_model("Qwen3-0.6B", 28, 1024, 4096, 2048, 3072),
    "8B": make_model("Qwen3-8B", 36, 4096, 6144, 4096, 12_288),
    "Llama-8B": make_model("Llama-3.1-8B", 32, 4096, 6144, 4096, 14_336, 128_256, _LLAMA_DRAFTS),
    # Its experts are not products with one matrix.
    "30B-A3B": Model(
        "Qwen3-30B-A3B",
        48,
        (Product("qkv", 5120, 2048, "normed_product"), Product("o", 2048, 4096, "add_product")),
        Product("lm_head", 151_936, 2048, "normed_product"),
    ),
}
MODELS |= {f"{name}/{size}": part_of(MODELS[name], size) for name in tuple(MODELS) for size in (2, 4)}
MODELS["MiniCPM-SALA"] = make_model("MiniCPM-SALA", 32, 4096, 16_384, 4096, 16_384, 73_448)
MODELS["GLM-4.7-Flash"] = Model(
    "GLM-4.7-Flash",
    47,
    (
        Product("a", 1344, 2048, "normed_product"),
        Product("q_b", 5120, 768, "normed_product"),
        Product("o", 2048, 5120, "add_product"),
        Product("gate_up", 3072, 2048, "plain_gated"),  # of the shared expert
        Product("down", 2048, 1536, "add_product"),
    ),
    Product("lm_head", 154_880, 2048, "normed_product"),
)


class Bench:
    """The GPU, one large buffer that all weights are cut from, and the clock."""

    def __init__(self, most_bytes: int) -> None:
        self.device = torch.device("cuda")
        torch.manual_seed(0)
        self.buffer = torch.empty(most_bytes // 2, dtype=torch.bfloat16, device=self.device)
        for part in self.buffer.split(1 << 28):
            part.normal_(std=0.02)
        self.product, self.workspace = _find_cuda_product(self.device), SplitWorkspace(self.device)
        self.gpu = GpuTraits(
            torch.cuda.get_device_name(),
            torch.cuda.get_device_properties(0).multi_processor_count,
            torch.cuda.get_device_capability(),
            self.product is not None,
        )
        self.stream = torch.cuda.Stream()

    def products(self, table: SkinnyTable) -> SkinnyProducts:
        return SkinnyProducts(self.product, table, self.workspace)

    def fixed(self, choice: SkinnyChoice) -> SkinnyProducts:
        """Products that are all computed by ``choice``."""
        return self.products(FixedTable(self.gpu, choice))

    def time_us(self, run: Callable[[], object], num_replays: int = 9) -> float:
        """Median time of a graph of ``run`` in microseconds."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            run()
            graph.capture_begin()  # torch.cuda.graph would collect garbage first, which takes longer than a measurement
            run()
            graph.capture_end()
            graph.replay()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
        torch.cuda.synchronize()
        return 1000 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))

    def copy_rate(self) -> float:
        """Bytes read and written per microsecond by a large copy."""
        half = self.buffer.numel() // 2
        there, here = self.buffer[:half], self.buffer[half : 2 * half]
        return 4 * half / self.time_us(lambda: there.copy_(here))


class FixedTable(SkinnyTable):
    """A table with the same choice for all products."""

    def __init__(self, gpu: GpuTraits, choice: SkinnyChoice) -> None:
        super().__init__(gpu, {})
        self._choice = choice

    def choose(self, rows: int, weight_rows: int, k: int, gated: bool) -> SkinnyChoice:
        return self._choice

    def choose_quantized(
        self, rows: int, weight_rows: int, k: int, gated: bool, numbers: str, guess: SkinnyChoice
    ) -> SkinnyChoice:
        return self._choice


class Activations:
    """The tensors that the products of one model read and write besides the weights."""

    def __init__(self, products: Iterable[Product], rows: int) -> None:
        products = list(products)
        on_gpu = {"dtype": torch.bfloat16, "device": "cuda"}
        self.inputs = {p.k: torch.randn(rows, p.k, **on_gpu) for p in products}  # type: ignore[call-overload]
        kernels = CudaLayerKernels(torch.device("cuda"))
        with torch.device("cuda"):
            self.norms = {p.k: RMSNorm(p.k, EPS, torch.bfloat16, kernels) for p in products}
        for norm in self.norms.values():
            norm.weight.uniform_()
        self.residuals = {p.num_out: torch.zeros(rows, p.num_out, **on_gpu) for p in products}  # type: ignore[call-overload]

    def run(self, product: Product, weight: Weight) -> None:
        x = self.inputs[product.k]
        if product.function == "add_product":
            weight.add_product(self.residuals[product.num_out], x, None)
        elif product.gated:
            norm = self.norms[product.k]
            weight.gated_product(x, norm if product.function == "gated_product" else None, None, norm.kernels)
        elif product.function == "product":
            weight.product(x)
        else:
            weight.normed_product(x, self.norms[product.k])


def weight_over(values: torch.Tensor, products: SkinnyProducts) -> CudaDenseWeight:
    """The weight whose numbers are ``values`` [N, K], multiplied by ``products``."""
    weight = CudaDenseWeight(0, 0, values.dtype, products)
    weight.data = values
    return weight


def time_product(bench: Bench, product: Product, rows: int, products: SkinnyProducts) -> float:
    """Microseconds for one product in a chain of equal ones whose weights are not in L2."""
    copies = max(2, min(100, -(-COLD_BYTES // product.nbytes)))
    size = product.weight_rows * product.k
    views = [bench.buffer[i * size : (i + 1) * size].view(-1, product.k) for i in range(copies)]
    weights = [weight_over(view, products) for view in views]
    acts = Activations([product], rows)

    def run() -> None:
        for weight in weights:
            acts.run(product, weight)

    return bench.time_us(run) / copies


def time_chain(bench: Bench, model: Model, rows: int, products: SkinnyProducts) -> float:
    """Microseconds for all products of a step, in order."""
    acts = Activations(model.products, rows)
    work: list[tuple[Product, CudaDenseWeight]] = []
    offset = 0
    for product in [*model.layer * model.num_layers, model.head]:
        size = product.weight_rows * product.k
        values = bench.buffer[offset : offset + size].view(-1, product.k)
        work.append((product, weight_over(values, products)))
        offset += size

    def run() -> None:
        for product, weight in work:
            acts.run(product, weight)

    return bench.time_us(run)


class Sweep:
    """The search for one product's configuration: first over the shape of a CTA, then the other parameters around the
    best few."""

    bits = 16  # the size of the weight's numbers

    def __init__(self, bench: Bench, product: Product, rows: int, seconds: float) -> None:
        self.bench, self.product, self.rows = bench, product, rows
        self.deadline = time.monotonic() + seconds
        self.found: dict[SkinnyChoice, float] = {}

    def run(self, seeds: Iterable[SkinnyChoice], triton: bool) -> None:
        """Fills ``found`` with microseconds; stops at the deadline."""
        self.try_all([None, *seeds])
        if triton:
            seconds, self.deadline = self.deadline - time.monotonic(), math.inf
            self.try_all(self.triton())
            self.deadline = time.monotonic() + seconds  # it begins after Triton has compiled its kernels
        if self.bench.product is None:
            return
        self.try_all(
            CudaConfig(tiles, n, k, depth)
            for (n, k), tiles, depth in itertools.product(((1, 8), (1, 4), (2, 4), (1, 16), (2, 8)), (4, 2, 6, 3), (3,))
        )
        for _ in range(2):
            for best in self.best(3, CudaConfig):
                assert isinstance(best, CudaConfig)
                self.try_all(self.neighbours(best))

    def try_all(self, choices: Iterable[SkinnyChoice]) -> None:
        for choice in choices:
            if choice in self.found or time.monotonic() > self.deadline or not self.fits(choice):
                continue
            try:
                self.found[choice] = self.time(choice)
            except Exception as error:
                self.found[choice] = float("inf")
                print(f"  {self.product.name} x{self.rows} {choice}: {str(error)[:200]}", file=sys.stderr)
                torch.cuda.synchronize()

    def time(self, choice: SkinnyChoice) -> float:
        """Microseconds."""
        return time_product(self.bench, self.product, self.rows, self.bench.fixed(choice))

    def fits(self, choice: SkinnyChoice) -> bool:
        if isinstance(choice, TritonConfig):
            return choice.block_k <= self.product.k
        if choice is None or self.rows > MAX_CUDA_ROWS:
            return choice is None
        block = choice.warps_n * choice.tiles * 8
        compiled = choice.tiles != 3 or self.rows <= 8
        even = not self.product.gated or choice.warps_n * choice.tiles % 2 == 0
        wide = choice.warps_k * choice.cluster * 1024 <= self.product.k * self.bits
        shared = shared_bytes(choice, self.rows, self.bits, k=self.product.k)
        return compiled and even and wide and shared <= SHARED_LIMIT and block <= self.product.weight_rows

    def neighbours(self, config: CudaConfig) -> list[CudaConfig]:
        sms = self.bench.gpu.num_sms
        return [
            *(replace(config, depth=depth) for depth in (2, 3, 4, 6)),
            *(replace(config, num_ctas=ctas // config.cluster * config.cluster) for ctas in (0, sms, 2 * sms, 3 * sms)),
            *(replace(config, cluster=c, num_ctas=config.num_ctas // c * c) for c in (1, 2, 4)),
            *(replace(config, tiles=tiles) for tiles in (2, 3, 4, 6)),
            *(replace(config, prefetch_bytes=size) for size in (0, 2048, 32_768)),
            *(replace(config, warps_n=n, warps_k=k) for n, k in ((2, 4), (1, 8), (4, 2), (4, 4), (2, 8), (1, 4))),
            replace(config, pdl=not config.pdl),
        ]

    def triton(self) -> list[TritonConfig]:
        if self.rows == 1:
            few = ((4, 1024, 4), (8, 512, 4), (2, 1024, 4), (16, 256, 4), (4, 512, 4), (1, 1024, 2), (2, 2048, 4))
            return [TritonConfig(n, k, warps) for n, k, warps in few]
        cuts = (
            (64, 128, 4, 6),
            (64, 128, 4, 4),
            (64, 128, 4, 8),
            (64, 256, 4, 4),
            (64, 256, 4, 6),
            (64, 64, 4, 8),
            (64, 128, 8, 4),
            (128, 128, 8, 4),
            (128, 64, 8, 6),
            (128, 64, 8, 4),
            (128, 64, 4, 6),
            (128, 128, 8, 3),
            (64, 128, 4, 3),
        )
        found = [TritonConfig(n, k, warps, stages) for n, k, warps, stages in cuts]
        blocks = -(-self.product.num_out // 64)  # too few of them are split
        splits = [split for split in (2, 3, 4, 6, 8) if 60 <= blocks * split <= 300 and self.product.k >= 256 * split]
        found += [TritonConfig(64, k, 4, depth, split=n) for n in splits for k, depth in ((128, 4), (128, 6), (64, 8))]
        return found

    def best(self, count: int, kind: type | tuple[type, ...] | None = None) -> list[SkinnyChoice]:
        """The ``count`` best choices, the fastest first; ``kind``: only configurations of these types, None: all."""
        mine = [c for c in self.found if kind is None or isinstance(c, kind)]
        return sorted(mine, key=lambda c: self.found[c])[:count]


def sweep_model(
    bench: Bench, model: Model, rows: Sequence[int], seconds: float, triton: bool, rate: float
) -> dict[str, SkinnyChoice]:
    """The best configurations by table_key."""
    winners: dict[str, SkinnyChoice] = {}
    ours: dict[str, SkinnyChoice] = {}
    print(f"{model.name}\n{'product':8} rows   floor   cuBLAS  ours (us); the winner, of how many")
    for product in (*model.products, *model.drafts):
        torch.cuda.empty_cache()  # frees the pools of the preceding product's graphs
        seeds: list[SkinnyChoice] = []
        for num_rows in rows:
            sweep = Sweep(bench, product, num_rows, seconds)
            sweep.run(seeds, triton)
            seeds = [*sweep.best(6, CudaConfig), *sweep.best(2, TritonConfig)]
            winner = sweep.best(1)[0]
            key = table_key(num_rows, product.weight_rows, product.k, product.gated)
            winners[key] = winner
            if winner is None and sweep.best(1, CudaConfig) and product in model.products:
                ours[key] = sweep.best(1, CudaConfig)[0]
            times = [product.nbytes / rate, sweep.found[None]]
            times += [sweep.found[c] for kind in (CudaConfig, TritonConfig) for c in sweep.best(1, kind)]
            cells = " ".join(f"{us:7.2f}" for us in times)
            print(f"{product.name:8} {num_rows:4} {cells}   {winner} of {len(sweep.found)}", flush=True)
    for key, choice in ours.items():
        num_rows, trial = int(key.split("x")[0]), winners | {key: choice}
        chains = [
            time_chain(bench, model, num_rows, bench.products(SkinnyTable(bench.gpu, table)))
            for table in (winners, trial)
        ]
        print(f"{key} in the chain: cuBLAS {chains[0]:.1f} us, {choice} {chains[1]:.1f} us", flush=True)
        if chains[1] < chains[0]:
            winners = trial
    return winners


def report_chain(
    bench: Bench, model: Model, rows: Sequence[int], tables: dict[str, SkinnyTable], rate: float
) -> list[str]:
    """One line for each number of rows."""
    floor = model.nbytes / rate
    lines = [f"{model.name}: all products of a step, us; floor {floor:.0f} at {rate / 1e6:.2f} TB/s"]
    for num_rows in rows:
        times = {name: time_chain(bench, model, num_rows, bench.products(table)) for name, table in tables.items()}
        base = times["cuBLAS"]
        cells = "  ".join(f"{name} {us:8.1f} ({base / us:.2f}x, {floor / us:.0%})" for name, us in times.items())
        lines.append(f"  rows {num_rows:2}: {cells}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=2.0, help="for the sweep of one product and number of rows")
    parser.add_argument("--triton", action="store_true", help="sweep Triton's cuts as well (compiles each, slow)")
    parser.add_argument("--table", type=Path, help="file for the winners")
    parser.add_argument(
        "--skip-sweep", action="store_true", help="time the chains with the table that is in the package"
    )
    args = parser.parse_args()
    models = [MODELS[name] for name in args.models]
    bench = Bench(
        max(max(model.nbytes for model in models), COLD_BYTES + max(p.nbytes for m in models for p in m.products))
    )
    rate = bench.copy_rate()
    cublas = FixedTable(bench.gpu, None)
    lines: list[str] = []
    entries: dict[str, SkinnyChoice] = {}
    for model in models:
        tables: dict[str, SkinnyTable] = {"cuBLAS": cublas}
        if args.skip_sweep:
            tables["table"] = load_table(bench.gpu)
        else:
            winners = sweep_model(bench, model, args.rows, args.seconds, args.triton, rate)
            entries |= winners
            tables["winners"] = SkinnyTable(bench.gpu, winners)
        tables["guesses"] = SkinnyTable(bench.gpu, {})
        tables["Triton"] = SkinnyTable(replace(bench.gpu, has_cuda_kernels=False), {})
        lines += report_chain(bench, model, args.rows, tables, rate)
    if args.table and entries:
        stored = json.loads(args.table.read_text())["entries"] if args.table.exists() else {}
        stored |= {key: choice_to_json(choice) for key, choice in entries.items()}
        args.table.write_text(json.dumps({"gpu": bench.gpu.name, "entries": stored}, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
