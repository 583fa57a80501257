"""The cost of the guards that are active with --memory-check off: the throughput with them and without them.

    python benchmark/h200/guards_cost.py [--shape 0.6b] [--batch 64,256] [--turns 9]

Three processes, one with guards and two without, exist at the same time and run in turns, so that drift, above all of
the GPU's clock, affects all of them; the others wait meanwhile. In a turn, --rounds times, a batch of requests of
different lengths passes through the scheduler's real loop (admission, decode, finish, prefix tree, retirement), and the
tokens per second from the first full batch to the last one are measured. A ratio is the median over the turns of a
process's throughput over that of the first one without guards. The ratio of the second one without guards is the noise:
the difference between two processes that do the same. "CPU" is the loop's own time per step. Most of it overlaps with
the GPU's, so it shows a difference first. unguarded.py lists what is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shapes import make_model_dir

if TYPE_CHECKING:
    from in_process import InProcessEngine

_OUTPUT_LENS = [128, 256, 192, 320, 160, 224, 384, 288]
Figures = dict[str, list[float]]  # batch → tokens per second, CPU microseconds per step


def child(args: argparse.Namespace) -> None:
    """One of the three engines, in this process. For each batch size read from stdin it makes a turn and writes a line
    with its figures; the first line, an empty list, says that it is ready. Libraries print to stdout, so the lines go
    to ``--answers``."""
    import torch
    from in_process import InProcessEngine

    batches = [int(word) for word in args.batch.split(",")]
    tokens = max(batches) * (args.prompt_len + max(_OUTPUT_LENS) + 16)
    flags = ["--max-total-tokens", str(tokens), *args.server_args.split()]  # room for all three on one GPU
    if args.child != "with":
        from unguarded import strip

        strip()
        flags += ["--flight-recorder-steps", "0"]
    model = make_model_dir(args.shape, args.models)  # the parent has made it
    answers = open(args.answers, "w", buffering=1)  # noqa: SIM115 - until the process ends
    with torch.inference_mode(), InProcessEngine(model, flags) as engine:
        for batch in batches:
            _pass_through(engine, batch, batch + 1, args.prompt_len)  # warm-up
        print("[]", file=answers)
        for line in sys.stdin:
            batch = int(line)
            figures = _pass_through(engine, batch, args.rounds * batch, args.prompt_len)
            print(json.dumps(figures), file=answers)


def _pass_through(engine: InProcessEngine, batch: int, num_reqs: int, prompt_len: int) -> tuple[float, float]:
    """Keep ``batch`` requests in the engine until ``num_reqs`` have been given to it. Returns (tokens/s, us per
    step)."""
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


class Engine:
    """A child process. Use it in a ``with`` block. Methods raise RuntimeError if it has ended, or writes nothing for
    ``timeout_s`` seconds."""

    def __init__(self, which: str, args: Sequence[str], timeout_s: float) -> None:
        self._which = which
        self._timeout_s = timeout_s
        optimise = [] if which == "with" else ["-O"]
        # The child's own children do not inherit it, so it closes when the child ends.
        read, write = os.pipe()
        self._answers = os.fdopen(read)
        self._process = subprocess.Popen(
            [sys.executable, *optimise, __file__, *args, "--child", which, "--answers", str(write)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            bufsize=0,
            pass_fds=[write],
            start_new_session=True,
        )
        os.close(write)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # this includes the process that receives its messages
        self._process.wait()
        self._answers.close()

    def answer(self) -> list[float]:
        """The figures in the child's next line."""
        if not select.select([self._answers], [], [], self._timeout_s)[0]:
            raise RuntimeError(f"the engine {self._which} has said nothing for {self._timeout_s:g} s (--timeout)")
        line = self._answers.readline()
        if not line:
            raise self._ended()
        answer: list[float] = json.loads(line)
        return answer

    def turn(self, batch: str) -> list[float]:
        """Tokens per second and CPU microseconds per step of a turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{batch}\n".encode())
        except BrokenPipeError:
            raise self._ended() from None
        return self.answer()

    def _ended(self) -> RuntimeError:
        with suppress(subprocess.TimeoutExpired):  # its pipes are closed, so it ends now
            self._process.wait(10)
        return RuntimeError(f"the engine {self._which} ended with status {self._process.returncode}")


def table(runs: dict[str, list[Figures]], batches: Sequence[str]) -> list[str]:
    """A row for each process except the first one without guards, with which the others are compared."""
    columns = ["batch", "guards", "tok/s", "without", "ratio", "turns", "CPU us/step", "without"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for batch in batches:
        rates = {w: [run[batch][0] for run in runs[w]] for w in runs}
        cpus = {w: statistics.median(run[batch][1] for run in runs[w]) for w in runs}
        for which in ("with", "without again"):
            ratios = [one / off for one, off in zip(rates[which], rates["without"], strict=True)]
            cells = [batch, which, *(f"{statistics.median(rates[w]):,.0f}" for w in (which, "without"))]
            cells += [f"{statistics.median(ratios):.4f}", " ".join(f"{ratio:.3f}" for ratio in ratios)]
            cells += [f"{cpus[w]:.0f}" for w in (which, "without")]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The turns, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--batch", default="64,256", help="requests at a time")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--server-args", default="", help="more flags for the engine, as one word")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for a start or a turn")
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=("without", "with", "without again"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.turns < 1 or args.rounds < 2:
        parser.error("--turns must be at least 1, --rounds at least 2")
    if args.child:
        child(args)
        return 0
    make_model_dir(args.shape, args.models)  # once, before three processes need it
    words = list(sys.argv[1:] if argv is None else argv)
    names = ["without", "with", "without again"]
    runs: dict[str, list[Figures]] = {name: [] for name in names}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(name, words, args.timeout)) for name in names}
        for engine in engines.values():
            engine.answer()
        for turn in range(args.turns):
            order = names[turn % 3 :] + names[: turn % 3]
            figures = {name: {batch: engines[name].turn(batch) for batch in args.batch.split(",")} for name in order}
            for name in names:
                runs[name].append(figures[name])
            print(f"{args.shape}, turn {turn + 1}: {figures}", flush=True)
    print("", *table(runs, args.batch.split(",")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
