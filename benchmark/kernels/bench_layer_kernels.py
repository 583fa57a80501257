"""Times our Triton kernels other than attention and products, in captured graphs.

``python benchmark/kernels/bench_layer_kernels.py [--part norm silu rotate prologue sample] [--tune]``

Each figure is the time of one launch in a graph with a chain of launches (the best of several replays). So it contains
everything that a kernel costs in a decode step: launch, latency and drain. ``pdl`` is the same chain with programmatic
dependent launch, if the kernel supports it. Prints a table in Markdown; ``--part`` chooses rows, and ``--tune`` also
tries configurations other than the built-in ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from fenceline.layers.kernels import activation, rms_norm, rotate_store
from fenceline.layers.kernels.base import HeadLayout, QKNorm, TorchLayerKernels
from fenceline.layers.rotary import RotaryEmbedding
from fenceline.model_executor.decode_runner import decode_prologue
from fenceline.sampling.gumbel import GumbelSampler, mix_seeds
from fenceline.sampling.kernels.sample import sample_tokens

GPU = torch.device("cuda")
VOCAB = 151_936
REPLAYS = 10
REFERENCE = TorchLayerKernels()


def us_per_launch(launch: Callable[[], object], length: int = 200) -> float:
    """Microseconds of each of ``length`` launches in a captured graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # it may not have written the operands yet
    with torch.cuda.stream(side):
        launch()
        launch()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(length):
            launch()
    graph.replay()
    best = float("inf")
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1e3 / length


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=GPU).to(dtype)


def row(name: str, *figures: float, nbytes: int = 0) -> None:
    """Print one line: figures in microseconds (0 stands for none), and the bandwidth of the best one."""
    cells = " | ".join(f"{us:.2f}" if us else "" for us in figures)
    rate = f"{nbytes / min(us for us in figures if us) * 1e-6:.2f}" if nbytes else ""
    print(f"| {name} | {cells} | {rate} |", flush=True)


@contextmanager
def constants(module: ModuleType, **values: int) -> Iterator[None]:
    """Set tuning constants of ``module`` to ``values`` in the ``with`` block."""
    old = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(module, name, value)


def length_for(num_rows: int) -> int:
    return 200 if num_rows <= 512 else 8


def bench_norm(pdl: bool, tune: bool) -> None:
    for size in (1024, 4096):
        for num_rows in (1, 32, 256, 16_384):
            x, weight = random(num_rows, size), random(size)
            length = length_for(num_rows)
            figures = [
                us_per_launch(lambda x=x, w=weight, p=p: rms_norm.rms_norm(x, w, 1e-6, p), length)
                for p in (False, pdl)
            ]
            plain = us_per_launch(lambda x=x, w=weight: REFERENCE.rms_norm(x, w, 1e-6), length)
            row(f"rms_norm {num_rows}x{size}", *figures, plain, nbytes=2 * x.nbytes)
            for each, warps in ((8, 8), (16, 16), (4, 16)) if tune else ():
                with constants(rms_norm, _ELEMENTS_A_THREAD=each, _MAX_WARPS=warps):
                    us = us_per_launch(lambda x=x, w=weight: rms_norm.rms_norm(x, w, 1e-6), length)
                row(f"- {each} a thread, at most {warps} warps", us)


def bench_silu(pdl: bool, tune: bool) -> None:
    for size in (3072, 12_288):
        for num_rows in (32, 256, 8192):
            x, length = random(num_rows, 2 * size), length_for(num_rows)
            figures = [
                us_per_launch(lambda x=x, p=p: activation.silu_and_mul(x, p), length) for p in (False, pdl)
            ]
            row(f"silu_and_mul {num_rows}x{size}", *figures, 0, nbytes=x.nbytes * 3 // 2)
            for each, block in ((16, 1024), (8, 2048)) if tune else ():
                with constants(activation, _ELEMENTS_A_THREAD=each, _BLOCK=block):
                    us = us_per_launch(lambda x=x: activation.silu_and_mul(x), length)
                row(f"- {each} a thread, blocks of {block}", us)


def bench_rotate(pdl: bool, tune: bool) -> None:
    heads, weights = HeadLayout(32, 8, 128), random(2, 128)
    norms, table = QKNorm(weights[0], weights[1], 1e-6), RotaryEmbedding(128, 40_960, 1e6).table.to(GPU)
    for num_tokens in (1, 32, 256, 8192):
        qkv, cache = random(num_tokens, 48 * 128), random(2, 20_000, 8, 128)
        positions = torch.randint(0, 40_000, (num_tokens,), device=GPU)
        slots, length = torch.randperm(20_000, device=GPU)[:num_tokens], length_for(num_tokens)

        def run(p: bool, qkv: torch.Tensor = qkv, cache: torch.Tensor = cache,
                positions: torch.Tensor = positions, slots: torch.Tensor = slots) -> None:  # fmt: skip
            rotate_store.rotate_and_store(qkv, heads, norms, table, positions, cache[0], cache[1], slots, p)

        figures = [us_per_launch(lambda p=p: run(p), length) for p in (False, pdl)]
        nbytes = int(qkv.nbytes * (1 + 40 / 48 + 16 / 48))
        row(f"rotate_and_store {num_tokens}x48x128", *figures, 0, nbytes=nbytes)
        for tile, each in ((128, 4), (512, 8), (1024, 8), (1024, 32), (2048, 16)) if tune else ():
            with constants(rotate_store, _SMALL_TILE=tile, _LARGE_TILE=tile, _ELEMENTS_A_THREAD=each):
                us = us_per_launch(lambda: run(False), length)
            row(f"- tile {tile}, {each} a thread", us)


def bench_prologue(pdl: bool, tune: bool) -> None:
    page_table = torch.zeros(513, 700, dtype=torch.int32, device=GPU)
    last_tokens = torch.zeros(513, dtype=torch.int64, device=GPU)
    for size in (1, 32, 512):
        plan = torch.ones(3, size, dtype=torch.int64, device=GPU).unbind()
        out = torch.ones(4, size, dtype=torch.int64, device=GPU).unbind()

        def run(plan: tuple[torch.Tensor, ...] = plan, out: tuple[torch.Tensor, ...] = out) -> None:
            decode_prologue(plan[0], plan[1], plan[2], page_table, last_tokens, 64, *out)

        row(f"decode_prologue {size}", us_per_launch(run), 0, 0)


def bench_sample(pdl: bool, tune: bool) -> None:
    gumbel = GumbelSampler(VOCAB, GPU)
    for num_reqs in (1, 32, 256):
        logits, length = random(num_reqs, VOCAB) * 3, 20 if num_reqs < 256 else 5
        seed_keys = torch.from_numpy(mix_seeds(range(num_reqs))).to(GPU)
        positions, tokens = seed_keys.clone(), seed_keys.clone()
        ones, rows, last = torch.ones(num_reqs, device=GPU), tokens * 0, torch.zeros_like(tokens)

        def run(scales: torch.Tensor, logits: torch.Tensor = logits, keys: torch.Tensor = seed_keys,
                positions: torch.Tensor = positions, tokens: torch.Tensor = tokens,
                ones: torch.Tensor = ones, rows: torch.Tensor = rows, last: torch.Tensor = last) -> None:  # fmt: skip
            sample_tokens(logits, ones, scales, keys, positions, rows, last, tokens)

        plain = us_per_launch(lambda x=logits: x.argmax(dim=-1), length)
        draw = us_per_launch(  # the scores in float32 are not counted
            lambda x=logits.float(), k=seed_keys, p=positions: gumbel.draw(x, k, p),
            2,
        )
        for name, scales, other in (("greedy", ones * 0, plain), ("drawn", ones, draw)):
            us = us_per_launch(lambda s=scales: run(s), length)
            row(f"sample_tokens {num_reqs}x{VOCAB} {name}", us, 0, other, nbytes=logits.nbytes)


PARTS = {
    "norm": bench_norm,
    "silu": bench_silu,
    "rotate": bench_rotate,
    "prologue": bench_prologue,
    "sample": bench_sample,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    pdl = torch.cuda.get_device_capability()[0] >= 9
    print(
        f"{torch.cuda.get_device_name()}, us a launch in a graph{'' if pdl else ' (no dependent launch here)'}"
    )
    print("| kernel | plain | pdl | torch | TB/s |\n|---|---|---|---|---|")
    empty = torch.zeros(1, device=GPU)
    row("torch add_ to one number", us_per_launch(lambda: empty.add_(1)), 0, 0)
    with torch.inference_mode():
        for part in args.part:
            PARTS[part](pdl, args.tune)


if __name__ == "__main__":
    main()
