"""``python -m fenceline_proof.replay FILE``: a flight recorder's steps again, on the virtual GPU with its detector.

The decisions are taken from the dump: the requests of each step, rows, pages, lengths, ends of requests, and which step
was still in flight at each launch. The real model runner, rings and sampler execute them with a tiny model. Its values
are not the recorded ones, but the order of accesses to memory does not depend on values.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from fenceline.config.engine_config import EngineConfig
from fenceline.constrained.matcher import all_tokens
from fenceline.memory_order import Point, Points
from fenceline.memory_order.edges import EDGES, GUARDS
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, HeldStep
from fenceline_proof.recording import Recording, Step, read_recording
from fenceline_proof.runs import Verdict, policy_of, verdict_of
from fenceline_proof.steps import make_config
from fenceline_proof.tiny_model import VOCAB_SIZE
from fenceline_sim.device import VgpuDevice
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.policy import POLICIES, make_policy

_DEFAULT_SEEDS = 8  # every policy at least once


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of one replay. The error is None if no check failed. ``num_launched``: steps until then."""

    seed: int
    policy: str
    num_launched: int
    verdict: Verdict | None


def replay(recording: Recording, seed: int, policy: str = "", severed: Sequence[str] = ()) -> Replay:
    """Run the recorded steps under ``policy`` (the seed's own unless named), without the edges in ``severed``."""
    policy = policy or policy_of(seed)
    device = VgpuDevice(frozenset(severed), VirtualGpu(seed=seed, policy=make_policy(policy, seed)))
    config = make_config(recording.flags, device.kind)
    launched: list[Step] = []
    try:
        _drive(recording, config, device, launched)
    except Exception as error:
        return Replay(seed, policy, len(launched), verdict_of(error))
    return Replay(seed, policy, len(launched), None)


def _drive(recording: Recording, config: EngineConfig, device: VgpuDevice, launched: list[Step]) -> None:
    """Launch every step, and wait for each result when the recorded scheduler had waited for it."""
    runner = ModelRunner(config, device, show_progress=False)
    recording.prepare(runner)
    flights: deque[ForwardResult] = deque()
    done: dict[int, Point] = {}
    for step in recording.steps:
        while len(flights) > step.in_flight:
            flights.popleft().wait()
        launched.append(step)
        result = runner.launch(dataclasses.replace(step.batch, after=_points(step, done)))
        if isinstance(result, HeldStep):  # its masks are not recorded: which tokens are drawn moves no access
            result.begin_masks()[:] = all_tokens(len(step.batch.constrained), -(-VOCAB_SIZE // 32))
            result = result.sample()
        done[step.done] = result.done
        flights.append(result)
    while flights:
        flights.popleft().wait()
    device.synchronize()


def _points(step: Step, done: dict[int, Point]) -> Points:
    """The Points that the step's memory came with. Points of steps that are no longer in the ring have passed. One
    between two steps is of a step whose sampling waited for masks, and lies after its forward: its end will do."""
    serials = [serial for name, serial in step.after.items() if name == "forward"]
    known = sorted(done)
    found = [bisect_left(known, serial) for serial in serials]
    pairs = zip(found, serials, strict=True)
    return Points.of(*[done[known[i]] for i, s in pairs if i < len(known) and (i > 0 or known[0] == s)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fenceline_proof.replay",
        description="Runs the steps of a flight recorder's dump on the virtual GPU. Exits with 0 if every checker is "
        "silent on every seed, with 1 if one is not, with 2 if the file cannot be replayed.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the dump")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=_DEFAULT_SEEDS, metavar="K", help="how many schedules to try")
    parser.add_argument("--policy", choices=POLICIES, help="of every schedule; the seed chooses unless given")
    parser.add_argument(
        "--sever", action="append", default=[], metavar="NAME", choices=(*EDGES, *GUARDS),
        help="without this edge or guard; may be given several times",
    )  # fmt: skip
    parser.add_argument("--last", type=int, metavar="N", help="only the dump's last N steps")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.seeds < 1 or (args.last is not None and args.last < 1):
        parser.error("--seeds and --last: give a number above 0")
    try:
        recording = read_recording(args.file, args.last)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not recording.steps:
        print(f"error: {args.file}: holds no steps", file=sys.stderr)
        return 2
    print(_about(recording))
    for problem in recording.problems:
        print(f"in the recording itself: {problem}")
    found = False
    for seed in tqdm(range(args.seed, args.seed + args.seeds), unit="schedule", disable=None):
        result = replay(recording, seed, args.policy or "", args.sever)
        if result.verdict is not None:
            found = True
            where = f"seed {seed} ({result.policy}), by step {result.num_launched} of {len(recording.steps)}"
            print(f"\n{where}: {result.verdict.checker}\n{result.verdict.report}")
            print(f"repeat: {_command(args, result)}")
            break
    if not found:
        print(f"{args.seeds} schedules: every checker is silent")
    return 1 if found or recording.problems else 0


def _about(recording: Recording) -> str:
    size = f"{recording.num_pages - 1} pages of {recording.page_size}, {recording.num_rows - 1} rows"
    if recording.num_pages != recording.recorded_pages:
        size += f" (pages renumbered: the recorded pool has {recording.recorded_pages - 1})"
    lines = [f"dump: {recording.reason}", f"{len(recording.steps)} steps, {size}"]
    if recording.wrapped:
        lines.append(
            f"earlier steps are not in it: memory counts as initialised, {len(recording.page_table)} rows start with "
            "the pages they are known to have had"
        )
    if recording.has_host_tier:
        lines.append(
            "the host tier's transfers are not recorded: steps run without them, and pages that were loaded count as "
            "initialised"
        )
    return "\n".join(lines)


def _command(args: argparse.Namespace, result: Replay) -> str:
    severed = "".join(f" --sever {name}" for name in args.sever)
    last = "" if args.last is None else f" --last {args.last}"
    which = f"--seed {result.seed} --seeds 1 --policy {result.policy}"
    return f"python -m fenceline_proof.replay {args.file} {which}{severed}{last}"


if __name__ == "__main__":
    sys.exit(main())
