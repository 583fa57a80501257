"""Measures two servers on one GPU in turns: that of another commit and this one's, or this one's with other flags.

    git archive df27d5d python sgl-kernel | tar x -C /tmp/before
    python benchmark/h200/compare.py --before /tmp/before                       # run.py's loads, three rounds
    python benchmark/h200/compare.py --shape llama-8b --load 32 --before-args="--disable-overlap-schedule"

Both run for the whole time with the same share of the GPU's memory, and only one at a time has requests. The loads and
the client are those of run.py: this checkout's bench_serving. Every second round begins with the other server. The
table shows medians over the rounds and the ratio of after to before; result.json has each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench_server import BenchServer
from run import ALL_LOADS, Row, loads_of, measure
from shapes import SHAPES, make_model_dir

SIDES = ("before", "after")
_MAX_TOTAL_TOKENS = {"0.6b": 330_000, "8b": 300_000, "llama-8b": 300_000, "tiny": 16_384}
_MAX_TOTAL_TOKENS |= {"qwen2.5-7b": 300_000, "qwen2.5-vl-7b": 300_000}  # two of each fit on one H200
HEADER = "| shape | load | tok/s before | after | ratio "
HEADER += "| TTFT ms before | after | ratio | TPOT ms before | after | ratio "
HEADER += "| ITL p99 ms before | after | ratio | longest gap ms before | after | ratio |"
GOODPUT_HEADER = " goodput requests/s before | after | ratio |"


def compare(shape: str, keys: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, list[Row]]]:
    """For each load, the runs of each side in their order. Raises ServerDied."""
    model_dir = make_model_dir(shape, args.models)
    size = ["--max-total-tokens", str(_MAX_TOTAL_TOKENS[shape])]
    with contextlib.ExitStack() as stack:
        servers = {}
        for side, source, flags in zip(SIDES, (args.before, None), (args.before_args, args.after_args), strict=True):
            log = args.out / f"{shape}-{side}.server.log"
            server = BenchServer(model_dir, [*size, *shlex.split(flags)], log, source=source)
            servers[side] = stack.enter_context(server)  # one after the other: some measure their steps at start
            print(f"{side}: {shlex.join(server.command)}: ready after {server.start_s:.1f} s", flush=True)
        rows: dict[str, dict[str, list[Row]]] = {key: {side: [] for side in SIDES} for key in keys}
        for round_ in range(args.rounds):
            for key in keys:
                for side in SIDES if round_ % 2 == 0 else SIDES[::-1]:
                    folder = args.out / f"{side}-{round_}"
                    folder.mkdir(exist_ok=True)
                    run_args = argparse.Namespace(**vars(args) | {"out": folder, "seed": args.seed + round_})
                    row = measure(servers[side], shape, key, run_args)
                    rows[key][side].append(row)
                    print(side, round_, row, flush=True)
        return rows


def table_row(shape: str, key: str, runs: dict[str, list[Row]]) -> str:
    """One row of the table: medians over the runs that did not fail. With --goodput it has three cells more."""
    cells = []
    columns = {"output_tok_s": 0, "ttft_ms": 1, "tpot_ms": 3, "itl_p99_ms": 2, "gap_ms": 2}
    if any(row.figures and row.figures.goodput_s is not None for side in SIDES for row in runs[side]):
        columns["goodput_s"] = 2
    for name, digits in columns.items():
        values = [[getattr(row.figures, name) for row in runs[side] if row.figures] for side in SIDES]
        if not all(values):
            return f"| {shape} | {ALL_LOADS[key]} | failed |"
        before, after = (median(side) for side in values)
        cells += [f"{before:,.{digits}f}", f"{after:,.{digits}f}", f"{after / before:.3f}" if before else ""]
    return f"| {shape} | {ALL_LOADS[key]} | {' | '.join(cells)} |"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, default=None, help="root of the other checkout (default: this one)")
    parser.add_argument("--before-args", default="", help="more flags for its server, as one word")
    parser.add_argument("--after-args", default="", help="more flags for the other server, as one word")
    parser.add_argument("--shape", nargs="+", default=["0.6b", "8b"], choices=list(SHAPES))
    parser.add_argument("--load", nargs="+", choices=list(ALL_LOADS), help="requests at a time (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load on each side")
    parser.add_argument("--bench-args", default="", help="more flags for bench_serving, as one word")
    parser.add_argument("--out", type=Path, default=None, help="folder for logs and figures")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "fenceline-bench-models")
    parser.add_argument("--seed", type=int, default=1, help="of the first round's load; the next ones count on")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one load may take")
    parser.add_argument("--quick", action="store_true", help="an eighth of every length and number")
    parser.add_argument("--fewer", type=int, default=1, metavar="N", help="an N-th of the requests, one wave at least")
    parser.add_argument(
        "--goodput", nargs="+", default=[], help="search the highest rate within limits, as run.py does"
    )
    args = parser.parse_args(argv)
    args.out = args.out or Path(tempfile.mkdtemp(prefix="fenceline-compare-"))
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a run failed."""
    args = parse(argv)
    table, runs = [], []
    for shape in args.shape:
        keys = args.load or loads_of(shape)
        rows = compare(shape, keys, args)
        table += [table_row(shape, key, rows[key]) for key in keys]
        runs += [{"side": side} | asdict(row) for sides in rows.values() for side in SIDES for row in sides[side]]
        (args.out / "result.json").write_text(json.dumps(runs, indent=1) + "\n")
    header = HEADER + (GOODPUT_HEADER if args.goodput else "")
    print("", header, "|---" * (header.count("|") - 1) + "|", *table, "", f"logs and figures: {args.out}", sep="\n")
    return 1 if any(run["error"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
