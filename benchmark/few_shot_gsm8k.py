#!/usr/bin/env python3
"""Few-shot GSM8K on a local JSONL file (fields question, answer) against any OpenAI-compatible server.

    python benchmark/few_shot_gsm8k.py --data-path test.jsonl --num-questions 200 --port 30000

The first --num-shots rows are the examples, the next --num-questions rows are asked (an example is never
asked itself). An answer's value is its last number, as usual for this benchmark. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from fenceline_demo.client import Reply, Server, ask_all, find_model, server_url

STOP = ["Question", "Assistant:", "<|separator|>"]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the file."""

    question: str
    answer: str

    def prompt(self) -> str:
        """The question, up to where the answer starts."""
        return f"Question: {self.question}\nAnswer:"


@dataclass(frozen=True, slots=True)
class Scores:
    """Fractions of right answers and of answers without any number."""

    accuracy: float
    invalid: float


def read_problems(path: Path, count: int) -> list[Problem]:
    """The first `count` problems of a JSONL file, or all if it has fewer.

    Raises ValueError if the file is missing or a row is not a problem.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [json.loads(line) for line in lines[:count]]
        return [Problem(row["question"], row["answer"]) for row in rows]
    except OSError as e:
        raise ValueError(
            f"cannot read {path} ({e.strerror}): give GSM8K's test.jsonl with --data-path, or write a small "
            "file of the kind with python -m fenceline_demo.gsm_file"
        ) from e
    except (json.JSONDecodeError, LookupError, TypeError) as e:
        raise ValueError(
            f"{path} is no GSM8K file ({e}): each line needs the fields question and answer"
        ) from e


def answer_value(text: str) -> float | None:
    """The last number in `text`, without thousands separators; None if there is none."""
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def score(problems: Sequence[Problem], replies: Sequence[Reply]) -> Scores:
    """Compares the values; a failed request is invalid."""
    labels = [answer_value(problem.answer) for problem in problems]
    if None in labels:
        raise ValueError("the data file has an answer without a number: is it GSM8K?")
    values = [answer_value(reply.text) for reply in replies]
    right = sum(value == label for value, label in zip(values, labels, strict=True))
    return Scores(right / len(labels), sum(value is None for value in values) / len(labels))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with SGLang's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-shots", type=int, default=5)
    parser.add_argument("--data-path", type=Path, default=Path("test.jsonl"))
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--parallel", type=int, default=128)
    parser.add_argument("--host", default="http://127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--base-url", help="server address, instead of --host and --port")
    parser.add_argument("--model", help="model name (default: the first one the server lists)")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    if args.num_questions < 1 or args.parallel < 1 or args.num_shots < 0:
        parser.error("--num-questions and --parallel must be at least 1, --num-shots at least 0")
    return args


def run(args: argparse.Namespace) -> int:
    """Asks and prints the four usual lines; returns the number of failed requests."""
    problems = read_problems(args.data_path, args.num_shots + args.num_questions)
    shots, asked = problems[: args.num_shots], problems[args.num_shots :]
    if not asked:
        raise ValueError(f"{args.data_path} has only {len(problems)} rows: lower --num-shots")
    url = server_url(args.base_url, args.host, args.port)
    server = Server(url, args.model or asyncio.run(find_model(url, args.api_key)), args.api_key)
    prefix = "".join(f"{shot.prompt()} {shot.answer}\n\n" for shot in shots)
    common = {"max_tokens": args.max_new_tokens, "temperature": args.temperature, "stop": STOP}
    bodies = [{**common, "prompt": prefix + problem.prompt()} for problem in asked]
    started = time.perf_counter()
    with tqdm(total=len(bodies), disable=not sys.stderr.isatty()) as bar:

        def advance(reply: Reply) -> None:
            bar.update()

        replies = asyncio.run(ask_all(server, "/v1/completions", bodies, args.parallel, advance))
    latency = time.perf_counter() - started
    scores = score(asked, replies)
    print(f"Accuracy: {scores.accuracy:.3f}")
    print(f"Invalid: {scores.invalid:.3f}")
    print(f"Latency: {latency:.3f} s")
    print(f"Output throughput: {sum(reply.completion_tokens for reply in replies) / latency:.3f} token/s")
    errors = [reply.error for reply in replies if reply.error]
    if errors:
        print(f"{len(errors)} requests failed, the first with: {errors[0]}", file=sys.stderr)
    return len(errors)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 when a request failed, 2 for bad input."""
    try:
        return 1 if run(parse_args(argv)) else 0
    except ValueError as e:
        print(f"few_shot_gsm8k: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
