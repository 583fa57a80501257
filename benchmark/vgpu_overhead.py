"""Measures the CPU time of operations on the virtual GPU: ``python benchmark/vgpu_overhead.py``."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fenceline_sim import VirtualGpu, use

_ROUNDS = 7
_OPS = 2000


def best_us(run: Callable[[], None]) -> float:
    """Microseconds of CPU time for each of the ``_OPS`` operations of ``run``."""
    times = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times) / _OPS * 1e6


def eager(x: torch.Tensor, operator: Callable[[torch.Tensor], object], finish: Callable[[], None]) -> None:
    """Submit and run ``_OPS`` operations."""
    for _ in range(_OPS):
        operator(x)
    finish()


OPERATORS: dict[str, Callable[[torch.Tensor], object]] = {
    "x + x": lambda x: x + x,
    "x.add_(1)": lambda x: x.add_(1),
    "linear(x, x)": lambda x: torch.nn.functional.linear(x, x),
    "x.view(-1)": lambda x: x.view(-1),
}


def main() -> None:
    """Print a table in Markdown."""
    torch.set_num_threads(1)
    print("| us per operation | plain CPU | vgpu | with detector | replayed | with detector |")
    print("|---|---|---|---|---|---|")
    with torch.inference_mode():
        for name, operator in OPERATORS.items():
            plain = torch.ones(8, 8)
            row = [best_us(lambda: eager(plain, operator, lambda: None))]  # noqa: B023
            replayed = []
            for detect in (False, True):
                gpu = VirtualGpu(policy="fifo", detect=detect)
                x = torch.ones(8, 8, device=use(gpu))
                row.append(best_us(lambda: eager(x, operator, gpu.synchronize_all)))  # noqa: B023
                graph = gpu.graph()
                with gpu.capture(graph):
                    for _ in range(_OPS):
                        operator(x)
                replayed.append(best_us(lambda: (graph.replay(), gpu.synchronize_all())))  # noqa: B023
            print(f"| `{name}` | " + " | ".join(f"{us:.1f}" for us in (*row, *replayed)) + " |")


if __name__ == "__main__":
    main()
