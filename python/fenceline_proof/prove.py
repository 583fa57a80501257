"""``python -m fenceline_proof.prove``: the engine is clean on all schedules tried, and every edge is necessary."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fenceline.config import num_usable_cores
from fenceline_proof.arms import Arm, all_arms
from fenceline_proof.campaign import Plan, carry_out, explore, prepare
from fenceline_proof.small_workloads import SMALL_WORKLOADS
from fenceline_proof.table import as_json, as_text, write_docs
from fenceline_proof.workloads import WORKLOADS

_SEEDS_PER_ARM = 6
_MAX_REPORTED = 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fenceline_proof.prove",
        description="Runs the engine on the virtual GPU: whole, over workloads and seeds, which must be clean; and "
        "with each edge and guard severed, which some run must show. Exits with 0 if both is so.",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N",
        help="runs of the intact engine; two rounds of all workloads unless given",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--edge", metavar="NAME", help="sever this edge or guard and do nothing else")
    parser.add_argument(
        "--exhaustive", action="store_true",
        help="all schedules with up to two preemptions of a few small workloads, and nothing else",
    )  # fmt: skip
    parser.add_argument("--workload", metavar="NAME", help="only this workload")
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help="processes; unless given the cores of this machine, or one for a part of the proof",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/internals/edges.md")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    prepare()
    with tqdm(total=None, unit="run", disable=None) as bar:
        plan = _plan(args, parser, bar)
        proof = explore(plan) if args.exhaustive else carry_out(plan)
    for failure in proof.telling[:_MAX_REPORTED]:
        print(f"{failure.trial.workload}, seed {failure.trial.seed}: {failure.checker}\n{failure.report}")
        print(f"repeat: {failure.trial.command}\n")
    print(as_text(proof))
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(proof), indent=1) + "\n")
    if args.write_docs:
        print("written:", *write_docs(proof.rows))
    return 0 if proof.clean else 1


def _plan(args: argparse.Namespace, parser: argparse.ArgumentParser, bar: tqdm) -> Plan:
    workloads = SMALL_WORKLOADS if args.exhaustive else WORKLOADS
    names = list(workloads)
    if args.workload is not None and args.workload not in names:
        parser.error(f"--workload {args.workload}: choose one of {', '.join(names)}")
    if args.exhaustive and (args.edge is not None or args.write_docs):
        parser.error("--exhaustive: goes without --edge and --write-docs")
    everything = args.edge is None and args.workload is None
    if args.write_docs and not everything:
        parser.error("--write-docs: needs a run of everything, without --edge and --workload")
    arms = _arms(args, parser) if args.edge is not None else [] if args.workload else all_arms()
    num_intact = args.seeds or sum(1 + workload.share for workload in WORKLOADS.values())
    num_per_arm = max(_SEEDS_PER_ARM, num_intact // 40)
    if args.edge is not None:
        num_per_arm, num_intact = args.seeds or _SEEDS_PER_ARM, 0
    if not args.exhaustive:
        bar.total = num_intact + sum(1 if everything else arm.num_runs(num_per_arm) for arm in arms)
    return Plan(
        arms=tuple(arms), workloads=tuple(workloads) if args.workload is None else (args.workload,),
        first_seed=args.seed, num_intact=num_intact, num_per_arm=num_per_arm, everything=everything,
        jobs=max(args.jobs or (num_usable_cores() if everything else 1), 1), progress=bar.update,
    )  # fmt: skip


def _arms(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Arm]:
    arms = {arm.name: arm for arm in all_arms()}
    if args.edge not in arms:
        parser.error(f"--edge {args.edge}: choose one of {', '.join(arms)}")
    arm = arms[args.edge]
    return [arm if args.workload is None else dataclasses.replace(arm, workload=args.workload)]


if __name__ == "__main__":
    sys.exit(main())
