"""Shows what takes the time of a decode step, with and without speculation: GPU time by kernel, CPU time, idle time.

    python benchmark/h200/decode.py --shape 8b --batch 1,32
    python benchmark/h200/decode.py --shape llama-8b --server-args \\
        "--speculative-algorithm EAGLE --speculative-simulate-acceptance 3.0"
    python benchmark/h200/decode.py --shape 0.6b --batch 64 --memory-check off,order,full --steps 100 \\
        --server-args "--max-total-tokens 150000 --cuda-graph-bs 64"

Requests decode in steady state in the scheduler's real loop, without HTTP. "step" is the wall time of a step without a
profiler, "CPU" the loop's own part of it, "prompts" the time in which those of all requests were computed. The other
figures come from a profile of --profiled steps: "busy" is the share of the time in which a kernel or a copy ran, from
the beginning of the first one to the end of the last one, and "kernels" their number in a step. The table has the
kernels that took the most time, with their calls and microseconds per step. A kernel that begins before the preceding
one has ended waits for most of its time; "added" is the time that it takes after all preceding ones have ended, and
these times add up to the busy part of the step.

With several --memory-check an engine for each exists at the same time (--max-total-tokens lets them fit), and they
decode in turns: a step is the median over --turns, and a last table shows the kernels that differ from the first one's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from in_process import InProcessEngine
from shapes import SHAPES, make_model_dir
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fenceline.config.model_files import DEMOS

_WARM_STEPS = 30
_MOST_NAME = 90


@dataclass(frozen=True)
class Profile:
    """By the kernel's name, of all profiled steps: the microseconds that it adds, its own, and its calls."""

    added: Counter[str]
    times: Counter[str]
    calls: Counter[str]
    busy: float


def measure(engines: dict[str, InProcessEngine], batch: int, args: argparse.Namespace) -> None:
    """Print one batch size."""
    turns = args.turns if len(engines) > 1 else 1
    num_steps = _WARM_STEPS + turns * args.steps + args.profiled + 16
    prompts_s: dict[str, float] = {}
    for check, engine in engines.items():
        begin = time.perf_counter()
        engine.submit(batch, args.prompt_len, [num_steps * engine.runner.max_step_tokens])
        while len(engine.scheduler.running) < batch:
            engine.step()
        prompts_s[check] = time.perf_counter() - begin
        for _ in range(_WARM_STEPS):
            engine.step()
    took: dict[str, list[tuple[float, float]]] = {check: [] for check in engines}
    for _ in range(turns):
        for check, engine in engines.items():
            engine.device.synchronize()
            begin, blocked = time.perf_counter(), engine.blocked_s
            for _ in range(args.steps):
                engine.step()
            step_s = (time.perf_counter() - begin) / args.steps
            took[check].append((step_s * 1e3, (step_s - (engine.blocked_s - blocked) / args.steps) * 1e3))
            engine.device.synchronize()
    first: Profile | None = None
    for check, engine in engines.items():
        step_ms, cpu_ms = (statistics.median(column) for column in zip(*took[check], strict=True))
        which = f", --memory-check {check}" if len(engines) > 1 else ""
        print(f"batch {batch}{which}: step {step_ms:.3f} ms, CPU {cpu_ms:.3f} ms", end="")
        print(f", prompts {prompts_s[check]:.2f} s", end="", flush=True)
        if engine.device.kind == "cuda":
            found = profiled(engine, args.profiled)
            calls = found.calls.total() / args.profiled
            print(f", busy {found.busy:.3f}, {found.added.total() / args.profiled:.1f} us, kernels {calls:.0f}")
            print_table(found, args)
            if first is not None:
                print("\nin which it differs:")
                print_table(_difference(found, first), args)
            first = first or found
        print(flush=True)
        assert len(engine.scheduler.running) == batch, "no request has left"
    for engine in engines.values():
        engine.abort_all()


def profiled(engine: InProcessEngine, num_steps: int) -> Profile:
    """The kernels and copies of ``num_steps`` steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as result:
        for _ in range(num_steps):
            engine.step()
        engine.device.synchronize()
    found = Profile(Counter(), Counter(), Counter(), 0.0)
    end = 0.0
    kernels = [event for event in result.events() if event.device_type == DeviceType.CUDA]
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        first, last = event.time_range.start, event.time_range.end
        found.added[event.name] += max(0.0, last - max(first, end))
        end = max(end, last)
        found.times[event.name] += last - first
        found.calls[event.name] += 1
    span = end - min(event.time_range.start for event in kernels)
    return replace(found, busy=found.added.total() / span)


def _difference(one: Profile, other: Profile) -> Profile:
    def less(mine: Counter[str], theirs: Counter[str]) -> Counter[str]:
        return Counter({name: mine[name] - theirs[name] for name in mine.keys() | theirs.keys()})

    return Profile(less(one.added, other.added), less(one.times, other.times), less(one.calls, other.calls), 0.0)


def print_table(found: Profile, args: argparse.Namespace) -> None:
    """The kernels that add most, per step."""
    print("| added us a step | us | calls | kernel |\n|---|---|---|---|")
    for name, own in sorted(found.added.items(), key=lambda item: -abs(item[1]))[: args.most]:
        figures = (f"{value / args.profiled:.1f}" for value in (own, found.times[name], found.calls[name]))
        print(f"| {' | '.join(figures)} | {name[:_MOST_NAME]} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=[*SHAPES, *DEMOS])
    parser.add_argument("--batch", default="1", help="batch sizes")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200, help="decode steps that are timed together")
    parser.add_argument("--profiled", type=int, default=20, help="decode steps of the profile")
    parser.add_argument("--most", type=int, default=25, help="kernels to print")
    parser.add_argument("--memory-check", default="off", help="one, or several that are compared: off,order,full")
    parser.add_argument("--turns", type=int, default=5, help="of each of several engines, --steps each")
    parser.add_argument("--server-args", default="", help="more flags for the engine, as one word")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    model, flags = make_model_dir(args.shape, args.models), args.server_args.split()
    with ExitStack() as stack:
        engines = {
            check: stack.enter_context(InProcessEngine(model, [*flags, "--memory-check", check]))
            for check in args.memory_check.split(",")
        }
        for batch in map(int, args.batch.split(",")):
            measure(engines, batch, args)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # with several ranks NCCL's threads may hang in a destructor
