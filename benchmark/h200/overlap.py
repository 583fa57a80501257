"""Does the GPU wait for the CPU? Compares a decode step of the server's loop with the replay of its graph alone.

    python benchmark/h200/overlap.py                           # both shapes, batches of 1, 16, 64 and 256
    python benchmark/h200/overlap.py --shape 8b --batch 64 --server-args "--decode-attention-backend triton"
    python benchmark/h200/overlap.py --shape 0.6b --batch 1,64 --schema 4    # all requests have a JSON schema

N requests decode in steady state in the scheduler's real loop (receive, plan, launch, publish, send), and the wall time
of --steps steps is measured. Then the graph of that batch is replayed as often with nothing else, from the same state:
the same positions, the same pages. The bar is a ratio of 1.05. "CPU" is the loop's CPU time per step without its waits
for results, which must be less than the time of the replay.

With --schema every request has the schema of constrained.py, and the given number of threads fill masks. The loop's
steps then have a second phase, which the replay has not, and whose draw replaces the replay's. The medians of their
parts on the CPU are printed too: launch_next is the forward's submission, and publish includes the wait for the tokens
of the step before, filling the masks (fill_masks) and submitting the draw under them (sample_held), which come before
the tokens are told to anybody. If these are not done when the forward ends, or launch_next is not when the draw ends,
the GPU is idle.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from constrained import CompiledSchema
from in_process import InProcessEngine, call_times, owner_of
from shapes import SHAPES, make_model_dir

_WARM_STEPS = 30
_PARTS = ("launch_next", "publish", "fill_masks", "sample_held")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Milliseconds per step; ``replay_ms`` is None if the batch has no graph."""

    shape: str
    batch: int
    size: int | None
    step_ms: float
    cpu_ms: float
    replay_ms: float | None

    @property
    def ratio(self) -> float | None:
        """Step over replay."""
        return None if self.replay_ms is None else self.step_ms / self.replay_ms

    def __str__(self) -> str:
        replay = "no graph" if self.replay_ms is None else f"{self.replay_ms:.3f}"
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        cells = (self.shape, self.batch, self.size, f"{self.step_ms:.3f}", replay, ratio, f"{self.cpu_ms:.3f}")
        return f"| {' | '.join(map(str, cells))} |"


def measure(engine: InProcessEngine, shape: str, batch: int, args: argparse.Namespace) -> Overlap:
    """Measure one batch size: the loop runs ``--repeats`` times, each time followed by replays; medians are
    returned."""
    longest = _WARM_STEPS + args.repeats * args.steps + 64
    engine.submit(batch, args.prompt_len, [longest])
    engine.step_until(lambda: len(engine.scheduler.running) == batch)
    for _ in range(_WARM_STEPS):
        engine.step()
    graphs = engine.graphs
    sizes = () if graphs is None else graphs.sizes
    size = next((size for size in sizes if size >= batch), None)
    steps, cpus, replays = [], [], []
    for _ in range(args.repeats):
        engine.device.synchronize()
        state = None if size is None else _ReplayState(engine, size)
        engine.step()
        begin, blocked = time.perf_counter(), engine.blocked_s
        for _ in range(args.steps):
            engine.step()
        elapsed = time.perf_counter() - begin
        steps.append(elapsed / args.steps)
        cpus.append((elapsed - (engine.blocked_s - blocked)) / args.steps)
        if state is not None:
            replays.append(state.time_replays(args.steps))
    assert len(engine.scheduler.running) == batch, "no request has left"
    if args.schema:
        owners = {part: owner_of(engine.scheduler, part) for part in _PARTS}
        times = {part: call_times(owner, part) for part, owner in owners.items()}
        for _ in range(min(args.steps, 60)):
            engine.step()
        found = [f"{part} {statistics.median(times[part]):.0f}" for part in _PARTS]
        print(f"{shape}, {batch} at a time, us: {', '.join(found)}", flush=True)
        for part, owner in owners.items():
            delattr(owner, part)
    engine.abort_all()
    replay_ms = statistics.median(replays) * 1e3 if replays else None
    return Overlap(shape, batch, size, statistics.median(steps) * 1e3, statistics.median(cpus) * 1e3, replay_ms)


class _ReplayState:
    """Saves the state that replays change before the timed steps: the number of steps and the last tokens."""

    def __init__(self, engine: InProcessEngine, size: int) -> None:
        graphs = engine.graphs
        assert graphs is not None
        self._device = engine.device
        self._graph = graphs._captured[size].graph
        self._tensors = [graphs.arena["num_steps"], engine.runner.req_pool.last_tokens]
        self._values = [tensor.clone() for tensor in self._tensors]
        self._device.synchronize()  # the copies were on the default stream, which is not ordered with other streams

    def time_replays(self, num: int) -> float:
        """Seconds per replay. Afterwards everything is as the loop left it."""
        self._device.synchronize()
        left = [tensor.clone() for tensor in self._tensors]
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        self._device.synchronize()
        begin = time.perf_counter()
        for _ in range(num):
            self._graph.replay()
        self._device.synchronize()
        seconds = (time.perf_counter() - begin) / num
        for tensor, value in zip(self._tensors, left, strict=True):
            tensor.copy_(value)
        self._device.synchronize()
        return seconds


def run_shape(shape: str, args: argparse.Namespace) -> list[Overlap]:
    """All batch sizes on one engine."""
    found = []
    with InProcessEngine(make_model_dir(shape, args.models), args.server_args.split()) as engine:
        print(f"{shape}: ready after {engine.start_s:.1f} s", flush=True)
        if args.schema:
            longest = _WARM_STEPS + args.repeats * args.steps + 64
            compiled = CompiledSchema.make(longest, engine.config.model.vocab_size)
            engine.load_grammar(compiled.data, compiled.vocabulary)
            engine.scheduler.grammars.use_threads(args.schema)
        for batch in map(int, args.batch.split(",")):
            found.append(measure(engine, shape, batch, args))
            print(found[-1], flush=True)
        if engine.graphs is not None:
            print(engine.graphs.stats, flush=True)
    return found


COLUMNS = ["shape", "batch", "graph of", "step ms", "replay ms", "ratio", "CPU ms"]
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def main(argv: Sequence[str] | None = None) -> int:
    """One process for each shape; prints the table, writes --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="all", choices=["all", *SHAPES], help="all: 0.6b and 8b")
    parser.add_argument("--batch", default="1,16,64,256", help="batch sizes")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=300, help="decode steps that are timed together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schema", type=int, default=0, help="JSON schema: how many threads fill masks")
    parser.add_argument("--server-args", default="", help="more flags for the engine, as one word")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    args = parser.parse_args(argv)
    if args.shape == "all":
        words = list(sys.argv[1:] if argv is None else argv)
        statuses = [subprocess.call([sys.executable, __file__, *words, "--shape", s]) for s in ("0.6b", "8b")]
        return max(statuses)
    with torch.inference_mode():
        found = run_shape(args.shape, args)
    print("", HEADER, *found, sep="\n")
    if args.out is not None:
        with args.out.open("a") as file:
            file.writelines(json.dumps(asdict(o) | {"ratio": o.ratio}) + "\n" for o in found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
