"""Measures what ``layers/kernels/launcher.py`` saves: CPU time of launches and steps with it and with Triton's launch.

    python benchmark/h200/triton_launches.py [--shape 0.6b] [--batch 8] [--turns 7]

The figures are microseconds of CPU time, medians over the turns. Both launchers run in turns in one process with one
model (dummy weights): single launches, then whole steps of the scheduler's loop without its waits for results. The last
two rows are steps without a graph, in which every layer launches its kernels. Takes less than a minute with 0.6b.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from in_process import InProcessEngine, percent
from shapes import SHAPES, make_model_dir

from fenceline.layers.kernels.launcher import Grid, KernelVariant, Tensors
from fenceline.layers.kernels.rms_norm import rms_norm
from fenceline.model_executor.decode_runner import decode_prologue

_LAUNCHES = 400  # the GPU's queue holds about 1,000
_DECODE_STEPS = 60
_PROMPTS = 5
_GRAPH_TOKENS = 512  # the longest prefill step that is captured in pieces
_LONG_PROMPT = 4096
_SAMPLED = {"temperature": 0.8, "top_p": 0.9}  # these need the whole sampler after the graph


@contextmanager
def launched_by_triton() -> Iterator[None]:
    """In the ``with`` block every launch goes through Triton, which looks up the variant each time."""

    def launch(self: KernelVariant, grid: Grid, tensors: Tensors, scalars: tuple[float, ...] = ()) -> None:
        self._kernel[grid](*tensors, *scalars, **self.constants, **self._options)

    ours = KernelVariant.launch
    KernelVariant.launch = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        KernelVariant.launch = ours  # type: ignore[method-assign]


def launch_us(launch: Callable[[], object]) -> float:
    """CPU time of one launch."""
    launch()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_LAUNCHES):
        launch()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / _LAUNCHES * 1e6


def decode_us(engine: InProcessEngine, num_reqs: int, **sampling: float) -> float:
    """CPU time of a decode step of ``num_reqs`` requests."""
    engine.submit(num_reqs, 32, [10_000], **sampling)
    engine.step_until(lambda: len(engine.scheduler.running) == num_reqs)
    for _ in range(10):
        engine.step()
    begin, blocked = time.perf_counter(), engine.blocked_s
    for _ in range(_DECODE_STEPS):
        engine.step()
    cpu_s = time.perf_counter() - begin - (engine.blocked_s - blocked)
    engine.abort_all()
    return cpu_s / _DECODE_STEPS * 1e6


def prefill_us(engine: InProcessEngine, num_tokens: int) -> float:
    """CPU time of the step that prefills a prompt of ``num_tokens``."""
    times = []
    for _ in range(_PROMPTS):
        engine.submit(1, num_tokens, [1])
        engine.device.synchronize()
        begin, blocked = time.perf_counter(), engine.blocked_s
        engine.step()
        times.append(time.perf_counter() - begin - (engine.blocked_s - blocked))
        engine.step_until(lambda: not engine.scheduler.reqs)
    return statistics.median(times) * 1e6


def measurements(engine: InProcessEngine, batch: int) -> dict[str, Callable[[], float]]:
    """The measurements by name, each in microseconds."""
    gpu = torch.device("cuda")
    x, weight = torch.randn(32, 1024, device=gpu).bfloat16(), torch.ones(1024, device=gpu).bfloat16()
    plan = torch.ones(3, 32, dtype=torch.int64, device=gpu).unbind()
    derived = torch.ones(4, 32, dtype=torch.int64, device=gpu).unbind()
    table = torch.zeros(64, 64, dtype=torch.int32, device=gpu)
    last_tokens = torch.zeros(64, dtype=torch.int64, device=gpu)
    return {
        "launch: rms_norm": lambda: launch_us(lambda: rms_norm(x, weight, 1e-6, pdl=True)),
        "launch: decode_prologue": lambda: launch_us(
            lambda: decode_prologue(plan[0], plan[1], plan[2], table, last_tokens, 16, *derived)
        ),
        f"decode of {batch}, a graph": lambda: decode_us(engine, batch),
        f"decode of {batch}, a graph and the whole sampler": lambda: decode_us(engine, batch, **_SAMPLED),
        f"prefill of {_GRAPH_TOKENS} tokens, graphs of pieces": lambda: prefill_us(engine, _GRAPH_TOKENS),
        f"prefill of {_LONG_PROMPT} tokens, no graph": lambda: prefill_us(engine, _LONG_PROMPT),
        f"decode of {batch + 1}, no graph": lambda: decode_us(engine, batch + 1),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=8, help="requests of a captured decode step")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    flags = ["--cuda-graph-bs", str(args.batch), "--piecewise-cuda-graph-max-tokens", str(_GRAPH_TOKENS)]
    flags += ["--chunked-prefill-size", str(_LONG_PROMPT), "--disable-radix-cache"]
    flags += [
        "--max-total-tokens",
        str((args.batch + 1) * 16_384),
        "--max-running-requests",
        str(args.batch + 1),
    ]
    with torch.inference_mode(), InProcessEngine(make_model_dir(args.shape, args.models), flags) as engine:
        measured = measurements(engine, args.batch)
        for measure in measured.values():  # a warm-up: both launchers compile and bind their kernels
            measure()
            with launched_by_triton():
                measure()
        ours: dict[str, list[float]] = {name: [] for name in measured}
        tritons: dict[str, list[float]] = {name: [] for name in measured}
        for _ in range(args.turns):
            for name, measure in measured.items():
                ours[name].append(measure())
                with launched_by_triton():
                    tritons[name].append(measure())
    print(f"{torch.cuda.get_device_name()}, {args.shape}, us of CPU time, medians of {args.turns} turns")
    print("| | ours | Triton's | difference |\n|---|---|---|---|")
    for name in measured:
        us, tritons_us = statistics.median(ours[name]), statistics.median(tritons[name])
        print(f"| {name} | {us:.1f} | {tritons_us:.1f} | {percent(tritons_us / us)} |")


if __name__ == "__main__":
    main()
