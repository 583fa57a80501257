"""Compares configurations of kernels in their place: all layers of a decode or verify step in one graph, with products,
rotation and attention in their order.

    python benchmark/kernels/sweep_chain.py [--models Llama-8B] [--requests 1] [--queries 4] [--tokens 1150]
        [--seconds 150] [--table FILE]

In bench_skinny_gemm.py a product follows an equal one, which keeps the memory busy until its end. In a layer, the
product after attention follows a kernel that reads little, so the data that it fetches early cost no time, and another
configuration is best. The search begins with the backend's choice for attention and the package's table for products. A
configuration is replaced if another one makes the whole chain faster: first that of attention, then those of products,
in the order of how much they may hide. Times are medians over replays; a change must be faster twice. Products of more
than 16 rows are computed by cuBLAS and are not changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from bench_skinny_gemm import (
    MODELS,
    SHARED_LIMIT,
    Activations,
    Bench,
    CudaDenseWeight,
    Model,
    Product,
    weight_over,
)
from sweep_triton_attention import Front, Heads, decode_configs, describe, make_pool, make_requests

from fenceline.layers.attention.triton_backend import TritonAttentionBackend
from fenceline.layers.kernels.decode_attention import DecodeConfig, DecodeWorkspace, query_tiles
from fenceline.layers.kernels.skinny_table import (
    ROW_BUCKETS,
    CudaConfig,
    SkinnyChoice,
    SkinnyTable,
    choice_to_json,
    load_table,
    shared_bytes,
    table_key,
)

_LEAST_GAIN = 0.001  # as a fraction of the chain's time
_REPLAYS = 15
_ORDER = ("o", "gate_up", "down", "qkv")  # the product that follows attention is first
_MAX_WORKERS_PER_SM = 4
# Models with all of these products. The experts of a mixture are not products with one matrix.
_MODELS = [name for name, model in MODELS.items() if {one.name for one in model.layer} == set(_ORDER)]


@dataclass(frozen=True, slots=True)
class Cuts:
    """One configuration of all kernels in the chain."""

    attention: DecodeConfig
    products: dict[str, SkinnyChoice]  # by table_key; these replace entries of the package's table


class Chain:
    """A model's layers over ``requests`` of ``tokens`` tokens with ``queries`` rows each."""

    def __init__(self, bench: Bench, model: Model, requests: int, queries: int, tokens: int) -> None:
        self.bench, self.model, self.rows = bench, model, requests * queries
        self.bucket = next((size for size in ROW_BUCKETS if self.rows <= size), None)
        heads = self.heads = Heads(model.layer[1].k // 128, 8, 128)
        self.queries, self.requests = queries, requests
        self.pool = make_pool(heads, 1, requests * (tokens + 1), model.num_layers)
        assert self.pool.num_layers == model.num_layers, "each layer reads keys and values of its own"
        self.front = Front.of(heads, make_requests(self.pool, requests, tokens), queries)
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.tiles = query_tiles(queries * heads.queries // heads.kv)
        workers = max(self.num_sms * _MAX_WORKERS_PER_SM // heads.kv, 1)
        self.workspace = DecodeWorkspace(heads.kv, heads.head_dim, workers, torch.device("cuda"), self.tiles)
        self.entries = load_table(bench.gpu)._entries
        self.acts = Activations(model.products, self.rows)

    @property
    def present(self) -> Cuts:
        """The configurations that a server would use."""
        backend, group = TritonAttentionBackend(self.pool), self.heads.queries // self.heads.kv
        return Cuts(backend.verify_config(self.requests, self.queries, group), {})

    def key(self, product: Product) -> str:
        """The key of the product in the table."""
        assert self.bucket is not None
        return table_key(self.bucket, product.weight_rows, product.k, product.gated)

    def time_us(self, cuts: Cuts) -> float:
        """Microseconds of the whole chain; infinite if a kernel cannot be launched with this configuration."""
        table = SkinnyTable(self.bench.gpu, {**self.entries, **cuts.products})
        layers, head = self._weights(table)

        def run() -> None:
            for index, weights in enumerate(layers):
                for product, weight in zip(self.model.layer, weights, strict=True):
                    if product.name == "o":
                        self.front.attend(
                            self.pool.k(index), self.pool.v(index), self.workspace, cuts.attention
                        )
                    self.acts.run(product, weight)
            self.acts.run(self.model.head, head)

        try:
            return self.bench.time_us(run, _REPLAYS)
        except Exception as error:  # a cut that does not fit must not end the sweep
            print(f"  {str(error)[:160]}", file=sys.stderr)
            torch.cuda.synchronize()
            return float("inf")

    def _weights(self, table: SkinnyTable) -> tuple[list[list[CudaDenseWeight]], CudaDenseWeight]:
        products, offset = self.bench.products(table), 0

        def take(product: Product) -> CudaDenseWeight:
            nonlocal offset
            size = product.weight_rows * product.k
            values = self.bench.buffer[offset : offset + size].view(-1, product.k)
            offset += size
            return weight_over(values, products)

        layers = [[take(product) for product in self.model.layer] for _ in range(self.model.num_layers)]
        return layers, take(self.model.head)


def attention_cuts(chain: Chain, present: Cuts) -> Iterator[tuple[str, Cuts]]:
    """Other configurations of attention, each with a name."""
    for config in decode_configs(chain.requests, chain.num_sms, chain.heads, chain.queries):
        yield f"attention {describe(config)}", replace(present, attention=config)


def product_cuts(chain: Chain, present: Cuts, product: Product) -> Iterator[tuple[str, Cuts]]:
    """Configurations of a product that are close to the present one, each with a name."""
    key = chain.key(product)
    now = present.products.get(key, chain.entries.get(key))
    if not isinstance(now, CudaConfig):
        return
    sms = chain.num_sms
    others = [
        *(replace(now, prefetch_bytes=size) for size in (0, 2048, 4096, 8192, 32_768)),
        *(replace(now, num_ctas=ctas // now.cluster * now.cluster) for ctas in (0, sms, 2 * sms, 3 * sms)),
        *(replace(now, depth=depth) for depth in (2, 3, 4)),
        *(
            replace(now, warps_n=n, warps_k=k, tiles=tiles)
            for n, k in ((1, 8), (1, 16), (2, 4), (2, 8), (4, 2), (4, 4))
            for tiles in (2, 4, 6)
        ),
        replace(now, cluster=2, num_ctas=now.num_ctas // 2 * 2),
    ]
    for cut in dict.fromkeys(others):
        if cut != now and _fits(cut, product, chain.rows):
            yield f"{product.name} {cut}", replace(present, products=present.products | {key: cut})


def _fits(cut: CudaConfig, product: Product, rows: int) -> bool:
    block = cut.warps_n * cut.tiles * 8
    return (
        cut.warps_n * cut.warps_k <= 16
        and shared_bytes(cut, rows) <= SHARED_LIMIT
        and block <= product.weight_rows
        and cut.warps_k * cut.cluster * 32 <= product.k
        and (not product.gated or cut.warps_n * cut.tiles % 2 == 0)
    )


class Search:
    """The fastest configurations so far."""

    def __init__(self, chain: Chain, seconds: float) -> None:
        self.chain = chain
        self.deadline = time.monotonic() + seconds
        self.best = chain.present
        self.us = min(chain.time_us(self.best) for _ in range(3))
        print(f"  as it is: {self.us:.1f} us", flush=True)

    def descend(self, what: str, others: Iterator[tuple[str, Cuts]]) -> None:
        """Take the fastest of ``others`` if it is faster than the present one in two measurements."""
        found: list[tuple[float, str, Cuts]] = []
        for name, cuts in others:
            if time.monotonic() > self.deadline:
                break
            found.append((self.chain.time_us(cuts), name, cuts))
        found.sort(key=lambda one: one[0])
        print(f"  {what}: " + " | ".join(f"{name} {us:.1f}" for us, name, _ in found[:4]), flush=True)
        for us, name, cuts in found[:2]:
            again, before = self.chain.time_us(cuts), self.chain.time_us(self.best)
            most = self.us * (1 - _LEAST_GAIN)
            if us < most and again < min(most, before * (1 - _LEAST_GAIN)):
                self.best, self.us = cuts, min(us, again)
                print(f"  taken: {name}, {self.us:.1f} us", flush=True)
                return


def sweep(bench: Bench, model: Model, args: argparse.Namespace) -> dict[str, SkinnyChoice]:
    """Run the search and print it. Returns the configurations of products that are better than the table's."""
    print(
        f"{model.name}, {args.requests} requests of {args.tokens} tokens, {args.queries} rows each",
        flush=True,
    )
    chain = Chain(bench, model, args.requests, args.queries, args.tokens)
    search = Search(chain, args.seconds)
    search.descend("attention", attention_cuts(chain, search.best))
    if chain.bucket is not None:
        by_name = {product.name: product for product in model.layer}
        for name in (*_ORDER, "o"):
            search.descend(name, product_cuts(chain, search.best, by_name[name]))
    return search.best.products


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=_MODELS, default=["Llama-8B"])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--queries", type=int, default=4, help="rows of each request")
    parser.add_argument("--tokens", type=int, default=1150, help="of each request")
    parser.add_argument("--seconds", type=float, default=150.0, help="for one model")
    parser.add_argument("--table", type=Path, help="file in which better configurations replace entries")
    args = parser.parse_args(argv)
    models = [MODELS[name] for name in args.models]
    bench = Bench(max(model.nbytes for model in models))
    entries: dict[str, SkinnyChoice] = {}
    for model in models:
        entries |= sweep(bench, model, args)
    if args.table and entries:
        stored = json.loads(args.table.read_text())
        stored["entries"] |= {key: choice_to_json(choice) for key, choice in entries.items()}
        args.table.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
