"""What the guards of --memory-check off cost: throughput with them, and in a build for benchmarks without them.

    python benchmark/h200/guards_cost.py [--shape 0.6b] [--batch 64,256] [--pairs 3]

Each run is a process of its own, with and without in turns, so that what drifts drifts for both. In each, for every
batch size, --rounds times that many requests of unequal length pass through the scheduler's real loop (admission,
decode, finish, prefix tree, retirement), and the tokens per second from the first full batch to the last one are
taken. "CPU" is the loop's own time per step, which mostly hides behind the GPU: a difference shows there first.
unguarded.py says what is taken out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from in_process import InProcessEngine

_OUTPUT_LENS = [128, 256, 192, 320, 160, 224, 384, 288]
Figures = dict[str, tuple[float, float]]  # batch → tokens per second, CPU microseconds per step


def child(args: argparse.Namespace) -> Figures:
    """One run, in this process."""
    import torch
    from in_process import InProcessEngine
    from shapes import make_model_dir

    flags = args.server_args.split()
    if args.child == "without":
        from unguarded import strip

        strip()
        flags += ["--flight-recorder-steps", "0"]
    found = {}
    with torch.inference_mode(), InProcessEngine(make_model_dir(args.shape, args.models), flags) as engine:
        for batch in map(int, args.batch.split(",")):
            _pass_through(engine, batch, batch + 1, args.prompt_len)  # what the first time costs
            found[str(batch)] = _pass_through(engine, batch, args.rounds * batch, args.prompt_len)
    return found


def _pass_through(engine: InProcessEngine, batch: int, num_reqs: int, prompt_len: int) -> tuple[float, float]:
    """Keep ``batch`` requests in the engine until ``num_reqs`` have been given to it; (tokens/s, us per step)."""
    scheduler = engine.scheduler
    left = num_reqs
    begin = tokens = blocked = 0.0
    num_steps = 0
    while left:
        free = min(batch - len(scheduler.reqs), left)
        if free:
            engine.submit(free, prompt_len, _OUTPUT_LENS[left % 8 :] + _OUTPUT_LENS[: left % 8])
            left -= free
        engine.step()
        num_steps += 1
        if not begin and len(scheduler.running) == batch:
            begin, num_steps = time.perf_counter(), 0
            tokens, blocked = scheduler.stats.num_generated_tokens, engine.blocked_s
    elapsed = time.perf_counter() - begin
    tokens = scheduler.stats.num_generated_tokens - tokens
    cpu_s = elapsed - (engine.blocked_s - blocked)
    engine.abort_all()
    return tokens / elapsed, cpu_s / num_steps * 1e6


def run_child(which: str, args: argparse.Namespace, words: Sequence[str]) -> Figures:
    """A run in a fresh process. Raises RuntimeError with its last words."""
    optimise = ["-O"] if which == "without" else []
    command = [sys.executable, *optimise, __file__, *words, "--child", which]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.timeout, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the run {which} guards failed with status {done.returncode}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(runs: dict[str, list[Figures]], batches: Sequence[str]) -> list[str]:
    """Medians of the runs; ratio is with over without, 1 where the guards are free."""
    columns = ["batch", "tok/s with", "tok/s without", "ratio", "pairs", "CPU us/step with", "without"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for batch in batches:
        rates = {w: [run[batch][0] for run in runs[w]] for w in runs}
        cpus = {w: statistics.median(run[batch][1] for run in runs[w]) for w in runs}
        pairs = [on / off for on, off in zip(rates["with"], rates["without"], strict=True)]
        on, off = statistics.median(rates["with"]), statistics.median(rates["without"])
        lines.append(
            f"| {batch} | {on:,.0f} | {off:,.0f} | {on / off:.4f} | {' '.join(f'{p:.3f}' for p in pairs)} "
            f"| {cpus['with']:.0f} | {cpus['without']:.0f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The pairs, and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--batch", default="64,256", help="requests at a time")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--server-args", default="", help="more flags for the engine, as one word")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    parser.add_argument("--child", choices=("with", "without"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(child(args)))
        return 0
    words = list(sys.argv[1:] if argv is None else argv)
    runs: dict[str, list[Figures]] = {"with": [], "without": []}
    for pair in range(args.pairs):
        for which in ("with", "without") if pair % 2 == 0 else ("without", "with"):
            runs[which].append(run_child(which, args, words))
            print(f"{args.shape}, {which} guards: {runs[which][-1]}", flush=True)
    print("", *table(runs, args.batch.split(",")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
