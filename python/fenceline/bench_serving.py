"""Benchmark online serving: ``python -m fenceline.bench_serving --backend fenceline --num-prompts 100``.

Flags, report and JSONL keys are those of ``sglang.bench_serving``; docs/use/bench_serving.md has the rest.
"""

from __future__ import annotations

import sys

from fenceline.benchmarking.args import build_parser
from fenceline.benchmarking.comparison import compare_results
from fenceline.benchmarking.runner import exit_status, run_benchmark

__all__ = ["main", "run_benchmark"]


def main(argv: list[str] | None = None, prog: str = "python -m fenceline.bench_serving") -> int:
    """The command line ``prog``; ``argv`` are the words after its name (``sys.argv[1:]`` if None). Returns: 0 fine, 1
    the run could not be made or every request failed, 3 the determinism check found a difference, 130 interrupted.
    (argparse itself leaves with 2 on unknown flags.)"""
    args = build_parser(prog).parse_args(argv)
    try:
        if args.compare:
            print(compare_results(*args.compare))
            return 0
        return exit_status(run_benchmark(args))
    except ValueError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench_serving: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
