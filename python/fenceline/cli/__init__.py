"""The console script ``fenceline``: a command for each thing that is done with a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fenceline.version import __version__

# What the commands need is imported when one runs, so that --help and the completion answer at once.


@dataclass(frozen=True, slots=True)
class _Command:
    """``run`` takes the words after the command and returns the exit status, None for 0; ``parser`` has its flags."""

    help: str
    run: Callable[[Sequence[str]], int | None]
    parser: Callable[[], argparse.ArgumentParser]


def _serve(argv: Sequence[str]) -> None:
    from fenceline.launch_server import main as serve

    serve(argv, "fenceline serve")


def _serve_parser() -> argparse.ArgumentParser:
    from fenceline.config.model_files import DEMOS
    from fenceline.config.server_args import make_parser

    parser = make_parser("fenceline serve")
    parser.add_argument("model", metavar="MODEL", choices=DEMOS)  # stands alone, which no flag of the server does
    return parser


def _bench(argv: Sequence[str]) -> int:
    from fenceline.bench_serving import main as bench

    # ``bench serve`` as vLLM has it: it is what there is to measure.
    return bench(list(argv[1:] if argv[:1] == ["serve"] else argv), "fenceline bench")


def _bench_parser() -> argparse.ArgumentParser:
    from fenceline.benchmarking.args import build_parser

    return build_parser("fenceline bench")


def _chat(argv: Sequence[str]) -> int:
    from fenceline.cli.chat import main as chat

    return chat(argv)


def _chat_parser() -> argparse.ArgumentParser:
    from fenceline.cli.chat import build_parser

    return build_parser()


def _trace(argv: Sequence[str]) -> int:
    args = _trace_parser().parse_args(argv)
    from fenceline.scheduler.flight_trace import write_trace

    try:
        output = write_trace(args.file, args.output)
    except (ValueError, OSError) as error:
        print(f"fenceline trace: {error}", file=sys.stderr)
        return 2
    print(f"{output}: open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _trace_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fenceline trace",
        description="Makes a trace of a flight recorder's file, to be opened in https://ui.perfetto.dev or in "
        "chrome://tracing: streams and requests as rows, Points, and edges as arrows. Its time counts steps.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the flight recorder's file")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="instead of FILE.trace.json")
    return parser


def _fetch_demo(argv: Sequence[str]) -> int:
    from fenceline.cli.fetch_demo import main as fetch

    return fetch(argv)


def _fetch_demo_parser() -> argparse.ArgumentParser:
    from fenceline.cli.fetch_demo import build_parser

    return build_parser()


def _completion(argv: Sequence[str]) -> int:
    from fenceline.cli.completion import script

    shell = _completion_parser().parse_args(argv).shell
    commands = {name: (command.help, command.parser()) for name, command in _COMMANDS.items()}
    print(script(shell, commands), end="")
    return 0


def _completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fenceline completion",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Prints a script by which a shell completes this command, its flags and their values:\n\n"
        "  bash: source <(fenceline completion bash)      in ~/.bashrc\n"
        "  zsh:  source <(fenceline completion zsh)       in ~/.zshrc, after compinit\n"
        "  fish: fenceline completion fish | source       in ~/.config/fish/config.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    return parser


_COMMANDS: Mapping[str, _Command] = {
    "serve": _Command("start a server, which speaks the APIs of OpenAI and Anthropic", _serve, _serve_parser),
    "chat": _Command("talk to a running server in the terminal", _chat, _chat_parser),
    "bench": _Command("load a running server, and report throughput and latencies", _bench, _bench_parser),
    "trace": _Command("make a trace for Perfetto of a flight recorder's file", _trace, _trace_parser),
    "fetch-demo": _Command("download a small model that can talk", _fetch_demo, _fetch_demo_parser),
    "completion": _Command("print the completion of a shell: bash, zsh or fish", _completion, _completion_parser),
}


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    commands = "".join(f"  {name:{width}}  {command.help}\n" for name, command in _COMMANDS.items())
    return (
        f"usage: fenceline COMMAND [flags]\n\ncommands:\n{commands}\n"
        "examples:\n"
        "  fenceline serve demo                  a small model that is part of the package\n"
        "  fenceline serve Qwen/Qwen3-0.6B --port 8000 --enable-metrics\n"
        "  fenceline chat http://127.0.0.1:8000\n\n"
        "fenceline COMMAND --help lists a command's flags; fenceline --version prints the version.\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` (the process's own arguments unless given) names, and end the process with its
    exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage(), end="")
        return
    if words[0] in ("-V", "--version"):
        print(f"fenceline {__version__}")
        return
    command = _COMMANDS.get(words[0])
    if command is None:
        from fenceline.config.flags import did_you_mean

        hint = did_you_mean(words[0], _COMMANDS)
        print(f"fenceline: error: unknown command {words[0]}{hint}; see fenceline --help", file=sys.stderr)
        sys.exit(2)
    sys.exit(command.run(words[1:]))
