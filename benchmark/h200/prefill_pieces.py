"""Compares prefill with and without graphs of its pieces: the CPU time of submitting the layers, and the first token.

    python benchmark/h200/prefill_pieces.py --shape 0.6b --tokens 64,256,1024,2048

One prompt at a time goes through the scheduler's real loop without HTTP, in one process, with and without graphs in
turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from in_process import InProcessEngine
from shapes import SHAPES, make_model_dir

from fenceline.layers.forward_batch import ForwardBatch
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner

_REPEATS = 11


class _Timed:
    """Runs the model's layers and measures their CPU and GPU time."""

    def __init__(self, engine: InProcessEngine, graphs: PiecewiseCudaGraphRunner | None) -> None:
        self._inner = graphs or engine.runner.model
        self.cpu_ms = 0.0
        self.first = torch.cuda.Event(enable_timing=True)
        self.last = torch.cuda.Event(enable_timing=True)

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """See ``CausalLM.hidden_states``."""
        self.first.record()
        begin = time.perf_counter()
        hidden = self._inner.hidden_states(batch)
        self.cpu_ms = (time.perf_counter() - begin) * 1e3
        self.last.record()
        return hidden


def measure(engine: InProcessEngine, num_tokens: int, graphs: PiecewiseCudaGraphRunner | None) -> tuple[float, ...]:
    """Medians in milliseconds: the layers' CPU time, their GPU time, the step's submission, the first token."""
    rows = []
    timed = _Timed(engine, graphs)
    engine.runner.extend.graphs = timed  # type: ignore[assignment]
    for _ in range(_REPEATS + 2):
        engine.submit(1, num_tokens, [1])
        engine.device.synchronize()
        begin = time.perf_counter()
        engine.step()
        submitted = time.perf_counter()
        engine.step_until(lambda: not engine.scheduler.reqs)
        done = time.perf_counter()
        engine.device.synchronize()
        gpu_ms = timed.first.elapsed_time(timed.last)
        rows.append((timed.cpu_ms, gpu_ms, (submitted - begin) * 1e3, (done - begin) * 1e3))
    engine.runner.extend.graphs = graphs
    return tuple(statistics.median(column) for column in zip(*rows[2:], strict=True))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--tokens", default="64,256,1024,2048", help="lengths of prompts")
    parser.add_argument("--max-tokens", type=int, default=2048, help="largest captured size")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    flags = ["--cuda-graph-bs", "1", "2", "--disable-radix-cache"]
    flags += ["--piecewise-cuda-graph-max-tokens", str(args.max_tokens)]
    with torch.inference_mode(), InProcessEngine(make_model_dir(args.shape, args.models), flags) as engine:
        graphs = engine.runner.prefill_graphs
        assert graphs is not None, "the flags ask for them"
        stats = graphs.stats
        print(f"captured in {stats.capture_s:.1f} s, {stats.capture_bytes / 2**20:.0f} MiB")
        print("| tokens | pieces | layers, CPU ms | layers, GPU ms | submitted ms | first token ms |")
        print("|---|---|---|---|---|---|")
        for num_tokens in map(int, args.tokens.split(",")):
            for name, chosen in (("no", None), ("yes", graphs)) * 2:
                figures = " | ".join(f"{value:.2f}" for value in measure(engine, num_tokens, chosen))
                print(f"| {num_tokens} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
