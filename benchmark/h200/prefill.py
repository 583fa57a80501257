"""Shows what takes the time of a prefill step: submitting it on the CPU, and running it on the GPU.

    python benchmark/h200/prefill.py --shape 0.6b --tokens 128,1024,4096,8192
    python benchmark/h200/prefill.py --shape 8b --tokens 8192 --kernels --functions

One prompt at a time goes through the scheduler's real loop without HTTP. "submit" is the loop's own time until the step
is submitted, "step" the time until its token has arrived. ``--kernels`` prints the GPU's time by kernel,
``--functions`` the CPU's by function.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from pathlib import Path

import torch
from in_process import InProcessEngine
from shapes import SHAPES, make_model_dir


def run_prompt(engine: InProcessEngine, num_tokens: int) -> tuple[float, float]:
    """(submit, step) of one prompt in milliseconds."""
    engine.submit(1, num_tokens, [1])
    engine.device.synchronize()
    begin = time.perf_counter()
    engine.step()
    submitted = time.perf_counter()
    engine.step_until(lambda: not engine.scheduler.reqs)
    done = time.perf_counter()
    return (submitted - begin) * 1e3, (done - begin) * 1e3


def measure(engine: InProcessEngine, num_tokens: int, repeats: int) -> str:
    """A row of the table."""
    first = run_prompt(engine, num_tokens)
    times = [run_prompt(engine, num_tokens) for _ in range(repeats)]
    submit, step = (statistics.median(column) for column in zip(*times, strict=True))
    return f"| {num_tokens} | {submit:.2f} | {step:.2f} | {num_tokens / step:.1f} | {first[1]:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--tokens", default="128,1024,4096,8192")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--server-args", default="", help="more flags for the engine, as one word")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args()
    sizes = [int(size) for size in args.tokens.split(",")]
    flags = [*args.server_args.split(), "--disable-radix-cache"]
    with InProcessEngine(make_model_dir(args.shape, args.models), flags) as engine:
        print("| tokens | submit ms | step ms | tokens/ms | first step ms |\n|---|---|---|---|---|")
        for size in sizes:
            print(measure(engine, size, args.repeats), flush=True)
        if args.kernels:
            activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) as profile:
                run_prompt(engine, sizes[-1])
            print(
                profile.key_averages().table(
                    sort_by="self_device_time_total", row_limit=22, max_name_column_width=70
                )
            )
        if args.functions:
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(5):
                run_prompt(engine, sizes[0])
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    main()
