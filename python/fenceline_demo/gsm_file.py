"""Writes GSM8K-shaped problems the demo model can solve, to try benchmark/few_shot_gsm8k.py offline.

python -m fenceline_demo.gsm_file problems.jsonl --num-questions 200
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import orjson

from .documents import gsm_answer
from .generators import make_word
from .items import HELD_OUT, TRAIN, sample


def gsm_rows(seed: int, num_shots: int, num_questions: int) -> list[dict[str, str]]:
    """`num_shots` trained problems (the few-shot examples), then `num_questions` held-out ones."""
    rng = random.Random(f"gsm:{seed}")
    items = [sample(make_word, rng, TRAIN) for _ in range(num_shots)]
    items += [sample(make_word, rng, HELD_OUT) for _ in range(num_questions)]
    return [{"question": item.question, "answer": gsm_answer(item)} for item in items]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-shots", type=int, default=5)
    parser.add_argument("--num-questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = gsm_rows(args.seed, args.num_shots, args.num_questions)
    args.output.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


if __name__ == "__main__":
    main()
