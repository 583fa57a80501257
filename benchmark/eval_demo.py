#!/usr/bin/env python3
"""Asks a running server held-out items of the demo model's corpus, greedily, and prints its accuracy, and the
mean accept length of a server that speculates.

    python benchmark/eval_demo.py --port 30000
    python benchmark/eval_demo.py --pictures --alone --min-accuracy 0.95    # of a server with demo-vision
    python benchmark/eval_demo.py --num-items 1200 --json plain.json
    python benchmark/eval_demo.py --num-items 1200 --compare plain.json --max-loss 0.5

The third and fourth call make a paired comparison: the same items, once on a plain server, once with the
feature under test. In fp32 on the CPU every answer must be the same (--require-equal). --alone compares each item's
answer when the server computes nothing else with that in company.
Exit code: 1 when a request failed or a limit given on the command line was missed, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fenceline.ipc.progress import progress_bar
from fenceline_demo.client import Reply, Server, ask_all, find_model, flush_cache, mean_accept_length, server_url
from fenceline_demo.evaluation import (
    CATEGORIES,
    Answer,
    Comparison,
    Question,
    accuracy,
    by_category,
    compare,
    held_out_items,
    load_run,
    save_run,
    score,
)
from fenceline_demo.picture_chat import PICTURE_CATEGORIES, held_out_pictures


def request_body(item: Question, chat: bool) -> dict[str, object]:
    """The body of an item's request. A token is at least one byte, which bounds the answer's length."""
    body: dict[str, object] = {"max_tokens": len(item.item.answer) + 8, "temperature": 0.0}
    if chat:
        return {**body, "messages": item.messages()}
    return {**body, "prompt": item.prompt(), "stop": ["\n"]}


def ask(items: Sequence[Question], server: Server, chat: bool, concurrency: int) -> list[Answer]:
    """Asks every item and scores its reply; shows how far it is."""
    bodies = [request_body(item, chat) for item in items]
    endpoint = "/v1/chat/completions" if chat else "/v1/completions"
    with progress_bar(len(items), "item") as bar:

        def advance(reply: Reply) -> None:
            bar.update()

        replies = asyncio.run(ask_all(server, endpoint, bodies, concurrency, advance))
    prompts = [("chat:" if chat else "") + item.prompt() for item in items]
    return [score(*each) for each in zip(items, prompts, replies, strict=True)]


def print_report(answers: Sequence[Answer], duration_s: float, num_wrong_shown: int) -> None:
    """Accuracy per category and overall, prefix-cache hits, and the first wrong answers."""
    print(f"{'category':<12}{'items':>7}{'right':>7}{'accuracy':>10}{'prompt tokens':>16}")
    for name, group in by_category(answers).items():
        longest = max(a.prompt_tokens for a in group)
        print(f"{name:<12}{len(group):>7}{sum(a.correct for a in group):>7}{accuracy(group):>10.2%}{longest:>11} max")
    errors = [a for a in answers if a.error]
    right, cached = sum(a.correct for a in answers), sum(a.cached_tokens for a in answers)
    print(f"{'overall':<12}{len(answers):>7}{right:>7}{accuracy(answers):>10.2%}")
    asked = sum(a.prompt_tokens for a in answers)
    # A server reports no cached tokens unless started with --enable-cache-report.
    hits = f", {cached} of them from the prefix cache" if cached else ""
    print(f"{duration_s:.1f} s, {asked} prompt tokens{hits}, {len(errors)} errors")
    for a in [a for a in answers if not a.correct][:num_wrong_shown]:
        print(f"  {a.item_id}: expected {a.expected!r}, got {a.error or repr(a.text)}")


def print_comparison(name: str, result: Comparison) -> None:
    """What changed against the run called `name`."""
    print(
        f"against {name}, {result.num_shared} items: {len(result.changed)} answers differ, "
        f"{len(result.newly_wrong)} newly wrong, {len(result.newly_right)} newly right, "
        f"loss {result.loss_points:+.2f} points"
    )
    for item_id in result.changed[:10]:
        print(f"  differs: {item_id}")


def failures(args: argparse.Namespace, answers: Sequence[Answer], results: Sequence[Comparison]) -> list[str]:
    """The limits that were missed, one line each."""
    out = []
    errors = sum(bool(a.error) for a in answers)
    if errors:
        out.append(f"{errors} requests failed")
    if args.min_accuracy is not None and accuracy(answers) < args.min_accuracy:
        out.append(f"accuracy {accuracy(answers):.4f} is below --min-accuracy {args.min_accuracy}")
    for result in results:
        if args.max_loss is not None and result.loss_points > args.max_loss:
            out.append(f"loss {result.loss_points:.2f} points is above --max-loss {args.max_loss}")
        if args.require_equal and result.changed:
            out.append(f"{len(result.changed)} answers differ, and --require-equal was given")
    return out


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Exits with code 2 for values that make no sense.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="server address, instead of --host and --port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--model", help="model name (default: the first one the server lists)")
    parser.add_argument("--num-items", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight at once")
    parser.add_argument("--pictures", action="store_true", help="questions about pictures, as --format chat")
    parser.add_argument("--categories", nargs="+", metavar="NAME", help=f"of {CATEGORIES} or {PICTURE_CATEGORIES}")
    parser.add_argument("--format", choices=("completions", "chat"), default="completions")
    parser.add_argument("--seed", type=int, default=0, help="which held-out items")
    parser.add_argument("--alone", action="store_true", help="ask one at a time first, and compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the run with each answer")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with an earlier run's --json")
    parser.add_argument("--min-accuracy", type=float, metavar="FRACTION", help="fail below it, e.g. 0.95")
    parser.add_argument("--max-loss", type=float, metavar="POINTS", help="of a comparison: fail above it, e.g. 0.5")
    parser.add_argument("--require-equal", action="store_true", help="fail if any answer differs in a comparison")
    parser.add_argument("--show-wrong", type=int, default=5, metavar="N", help="wrong answers to print")
    args = parser.parse_args(argv)
    if args.num_items < 1 or args.concurrency < 1:
        parser.error("--num-items and --concurrency must be at least 1")
    if args.min_accuracy is not None and not 0 <= args.min_accuracy <= 1:
        parser.error("--min-accuracy is a fraction between 0 and 1, such as 0.95")
    if args.compare is None and not args.alone and (args.max_loss is not None or args.require_equal):
        parser.error("--max-loss and --require-equal need --compare FILE or --alone")
    known = PICTURE_CATEGORIES if args.pictures else CATEGORIES
    args.categories = args.categories or list(known)
    if unknown := sorted(set(args.categories) - set(known)):
        parser.error(f"unknown --categories {' '.join(unknown)}: choose from {', '.join(known)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Asks, reports, compares; returns the exit code."""
    args = parse_args(argv)
    chat = args.format == "chat" or args.pictures
    others: dict[str, list[Answer]] = {}
    try:
        if args.compare:
            others["the earlier run"] = load_run(args.compare)
        url = server_url(args.base_url, args.host, args.port)
        server = Server(url, args.model or asyncio.run(find_model(url, args.api_key)), args.api_key)
        make = held_out_pictures if args.pictures else held_out_items
        items: Sequence[Question] = make(args.seed, args.num_items, tuple(args.categories))
        if args.alone:
            others["each alone"] = ask(items, server, chat, 1)
            asyncio.run(flush_cache(server))  # otherwise nothing of the prompts would be computed in company
        started = time.perf_counter()
        answers = ask(items, server, chat, args.concurrency)
        duration_s = time.perf_counter() - started
        print_report(answers, duration_s, args.show_wrong)
        accept_length = asyncio.run(mean_accept_length(server))
        if accept_length is not None:
            print(f"mean accept length {accept_length:.3f} since the server's start")
        if args.json:
            meta = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "api_key"}
            save_run(args.json, {**meta, "server": asdict(server)["base_url"], "duration_s": duration_s}, answers)
        results = {name: compare(other, answers) for name, other in others.items()}
    except ValueError as e:
        print(f"eval_demo: {e}", file=sys.stderr)
        return 2
    for name, result in results.items():
        print_comparison(name, result)
    missed = failures(args, answers, list(results.values()))
    for line in missed:
        print(f"FAILED: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
