#!/usr/bin/env python3
"""Asks the demo model held-out items in several number formats or with several sets of flags, greedily, one engine
after the other, and compares each with the first, item by item.

    python benchmark/eval_formats.py
    python benchmark/eval_formats.py --formats none fp8 --num-items 1200 --max-loss 2
    python benchmark/eval_formats.py --formats none --flags "--tp-size 2" "--speculative-algorithm EAGLE3"

``perplexity`` is that of all tokens of the prompts and their right answers; it changes before an answer becomes wrong.
(The demo model is nearly certain of the answers alone.)
Exit code: 1 when one of them loses more than --max-loss points, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import fenceline
from fenceline.config.server_args import parse_args as parse_server_args
from fenceline_demo.client import Reply
from fenceline_demo.evaluation import CATEGORIES, Answer, EvalItem, accuracy, compare, held_out_items, score


def evaluate(engine: fenceline.Engine, items: Sequence[EvalItem]) -> tuple[list[Answer], float]:
    """Scored answers, and the perplexity of the prompts with the right answers."""
    prompts = [item.prompt() for item in items]
    limits = [{"temperature": 0.0, "max_new_tokens": len(item.item.answer) + 8, "stop": ["\n"]} for item in items]
    replies = _generate(engine, prompts, limits)
    answers = [
        score(item, prompt, Reply(reply["text"], "", reply["meta_info"]["prompt_tokens"]))
        for item, prompt, reply in zip(items, prompts, replies, strict=True)
    ]
    texts = [f"{prompt} {item.item.answer}\n" for prompt, item in zip(prompts, items, strict=True)]
    read = _generate(engine, texts, [{"max_new_tokens": 1}] * len(texts), return_logprob=True, logprob_start_len=0)
    logprobs = [entry[0] for known in read for entry in known["meta_info"]["input_token_logprobs"][1:]]
    return answers, math.exp(-sum(logprobs) / len(logprobs))


def _generate(
    engine: fenceline.Engine, prompts: Sequence[str], limits: Sequence[dict[str, Any]], **options: Any
) -> list[dict[str, Any]]:
    answers = engine.generate(list(prompts), list(limits), **options)
    assert isinstance(answers, list)
    return answers


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--formats", nargs="+", default=["none", "fp8", "int4"], help="values of --quantization; none: plain"
    )
    parser.add_argument(
        "--flags", nargs="+", default=[], metavar="LINE", help="flags of a further engine, in one string"
    )
    parser.add_argument("--num-items", type=int, default=400)
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), metavar="NAME", choices=CATEGORIES)
    parser.add_argument("--seed", type=int, default=0, help="which held-out items")
    parser.add_argument("--max-loss", type=float, metavar="POINTS", help="fail if a format loses more")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Asks and compares; returns the exit code."""
    args = parse_args(argv)
    items = held_out_items(args.seed, args.num_items, tuple(args.categories))
    first: list[Answer] | None = None
    worst = 0.0
    width = max(len(name) for name in [*args.formats, *args.flags, "format"]) + 2
    print(f"{'format':<{width}}{'right':>7}{'accuracy':>10}{'perplexity':>12}{'changed':>9}{'loss, points':>14}")
    for name in [*args.formats, *args.flags]:
        line = ["--model-path", args.model_path, "--device", args.device, "--log-level", "error"]
        if name in args.formats:
            line += [] if name == "none" else ["--quantization", name]
        else:
            line += shlex.split(name)
        try:
            engine = fenceline.Engine(**asdict(parse_server_args(line)))
        except ValueError as error:
            print(f"eval_formats: {error}", file=sys.stderr)
            return 2
        with engine:
            answers, perplexity = evaluate(engine, items)
        first = first or answers
        paired = compare(first, answers)
        worst = max(worst, paired.loss_points)
        right = sum(answer.correct for answer in answers)
        print(
            f"{name:<{width}}{right:>7}{accuracy(answers):>10.2%}{perplexity:>12.4f}{len(paired.changed):>9}"
            f"{paired.loss_points:>+14.2f}",
            flush=True,
        )
    return int(args.max_loss is not None and worst > args.max_loss)


if __name__ == "__main__":
    sys.exit(main())
