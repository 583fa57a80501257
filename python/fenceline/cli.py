"""The console script ``fenceline``: ``serve``, ``bench`` and ``trace``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from fenceline.config.flags import did_you_mean
from fenceline.version import __version__

_USAGE = """\
usage: fenceline COMMAND [flags]

commands:
  serve   start the server, as in fenceline serve MODEL; the same as python -m fenceline.launch_server
  bench   measure a running server; the same as python -m fenceline.bench_serving
  trace   make a trace for Perfetto of a flight recorder's file

fenceline COMMAND --help lists a command's flags; fenceline --version prints the version.
"""


def _serve(argv: Sequence[str]) -> None:
    from fenceline.launch_server import main as serve

    serve(argv, prog="fenceline serve")


def _bench(argv: Sequence[str]) -> None:
    from fenceline.bench_serving import main as bench

    sys.exit(bench(list(argv)))


def _trace(argv: Sequence[str]) -> None:
    from fenceline.scheduler.flight_trace import main as trace

    sys.exit(trace(argv))


_COMMANDS: Mapping[str, Callable[[Sequence[str]], None]] = {"serve": _serve, "bench": _bench, "trace": _trace}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` (the process's own arguments unless given) names."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return
    if words[0] in ("-V", "--version"):
        print(f"fenceline {__version__}")
        return
    command = _COMMANDS.get(words[0])
    if command is None:
        hint = did_you_mean(words[0], _COMMANDS)
        print(f"fenceline: error: unknown command {words[0]}{hint}; see fenceline --help", file=sys.stderr)
        sys.exit(2)
    command(words[1:])
