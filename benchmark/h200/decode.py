"""Shows what takes the time of a decode step, with and without speculation: GPU time by kernel, CPU time, idle time.

    python benchmark/h200/decode.py --shape 8b --batch 1,32
    python benchmark/h200/decode.py --shape llama-8b --server-args \\
        "--speculative-algorithm EAGLE --speculative-simulate-acceptance 3.0"

Requests decode in steady state in the scheduler's real loop, without HTTP. "step" is the wall time of a step without a
profiler, "CPU" the loop's own part of it. The other figures come from a profile of --profiled steps: "busy" is the
share of the time in which a kernel or a copy ran, from the beginning of the first one to the end of the last one, and
"kernels" their number in a step. The table has the kernels that took the most time, with their calls and microseconds
per step. A kernel that begins before the preceding one has ended waits for most of its time; "added" is the time that
it takes after all preceding ones have ended, and these times add up to the busy part of the step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from in_process import InProcessEngine
from shapes import SHAPES, make_model_dir
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_WARM_STEPS = 30
_MOST_NAME = 90


def measure(engine: InProcessEngine, batch: int, args: argparse.Namespace) -> None:
    """Print one batch size."""
    num_steps = _WARM_STEPS + args.steps + args.profiled + 16
    engine.submit(batch, args.prompt_len, [num_steps * engine.runner.max_step_tokens])
    engine.step_until(lambda: len(engine.scheduler.running) == batch)
    for _ in range(_WARM_STEPS):
        engine.step()
    engine.device.synchronize()
    begin, blocked = time.perf_counter(), engine.blocked_s
    for _ in range(args.steps):
        engine.step()
    step_s = (time.perf_counter() - begin) / args.steps
    cpu_s = step_s - (engine.blocked_s - blocked) / args.steps
    print(f"batch {batch}: step {step_s * 1e3:.3f} ms, CPU {cpu_s * 1e3:.3f} ms", end="", flush=True)
    if engine.device.kind == "cuda":
        engine.device.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as result:
            for _ in range(args.profiled):
                engine.step()
            engine.device.synchronize()
        print_profile(result, args)
    print(flush=True)
    assert len(engine.scheduler.running) == batch, "no request has left"
    engine.abort_all()


def print_profile(result: profile, args: argparse.Namespace) -> None:
    """The rest of the line, and the table of kernels."""
    times, added, calls = Counter[str](), Counter[str](), Counter[str]()
    busy_us = end = 0.0
    kernels = [event for event in result.events() if event.device_type == DeviceType.CUDA]
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        first, last = event.time_range.start, event.time_range.end
        own = max(0.0, last - max(first, end))
        busy_us += own
        added[event.name] += own
        end = max(end, last)
        times[event.name] += last - first
        calls[event.name] += 1
    span = end - min(event.time_range.start for event in kernels)
    print(f", busy {busy_us / span:.3f}, kernels {len(kernels) / args.profiled:.0f}")
    print("| added us a step | us | calls | kernel |\n|---|---|---|---|")
    for name, own in added.most_common(args.most):
        figures = (f"{value / args.profiled:.1f}" for value in (own, times[name], calls[name]))
        print(f"| {' | '.join(figures)} | {name[:_MOST_NAME]} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=list(SHAPES))
    parser.add_argument("--batch", default="1", help="batch sizes")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200, help="decode steps that are timed together")
    parser.add_argument("--profiled", type=int, default=20, help="decode steps of the profile")
    parser.add_argument("--most", type=int, default=25, help="kernels to print")
    parser.add_argument("--server-args", default="", help="more flags for the engine, as one word")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    with InProcessEngine(make_model_dir(args.shape, args.models), args.server_args.split()) as engine:
        for batch in map(int, args.batch.split(",")):
            measure(engine, batch, args)


if __name__ == "__main__":
    main()
