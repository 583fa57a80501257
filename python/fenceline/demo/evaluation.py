"""Scores answers to held-out items, and compares two runs item by item."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from .client import Reply
from .heldout import CATEGORIES, EvalItem


@dataclass(frozen=True, slots=True)
class Answer:
    """One item as answered: `prompt_hash` names what was asked, so that runs compare like with like."""

    item_id: str
    category: str
    prompt_hash: str
    expected: str
    text: str
    correct: bool
    error: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs over the items they share; `loss_points` is the accuracy lost, in percentage points."""

    num_shared: int
    changed: tuple[str, ...]
    newly_wrong: tuple[str, ...]
    newly_right: tuple[str, ...]
    loss_points: float


def normalize(text: str) -> str:
    """An answer without its surrounding white space."""
    return text.strip()


def score(item: EvalItem, prompt_text: str, reply: Reply) -> Answer:
    """Right means: the whole answer, character for character (white space around it aside)."""
    digest = hashlib.blake2b(prompt_text.encode(), digest_size=8).hexdigest()
    text = normalize(reply.text)
    return Answer(
        item_id=item.item_id,
        category=item.item.category,
        prompt_hash=digest,
        expected=item.item.answer,
        text=text,
        correct=not reply.error and text == item.item.answer,
        error=reply.error,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
    )


def accuracy(answers: Sequence[Answer]) -> float:
    """The fraction of right answers.

    Raises ValueError for an empty run, which has none.
    """
    if not answers:
        raise ValueError("no answers to score: ask for at least one item")
    return sum(answer.correct for answer in answers) / len(answers)


def by_category(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers by category, in the order of CATEGORIES; empty categories left out."""
    groups = {name: [a for a in answers if a.category == name] for name in CATEGORIES}
    return {name: group for name, group in groups.items() if group}


def compare(before: Sequence[Answer], after: Sequence[Answer]) -> Comparison:
    """Pairs two runs' items by id.

    Raises ValueError where the runs share no item, or an item was asked with another prompt.
    """
    earlier = {answer.item_id: answer for answer in before}
    pairs = [(earlier[answer.item_id], answer) for answer in after if answer.item_id in earlier]
    if not pairs:
        raise ValueError("the two runs share no items: use the same --seed, --num-items and --categories")
    other = [b.item_id for a, b in pairs if a.prompt_hash != b.prompt_hash]
    if other:
        raise ValueError(
            f"{len(other)} items were asked with another prompt (first: {other[0]}): use the same --seed and --format"
        )
    wrong = tuple(b.item_id for a, b in pairs if a.correct and not b.correct)
    right = tuple(b.item_id for a, b in pairs if b.correct and not a.correct)
    return Comparison(
        num_shared=len(pairs),
        changed=tuple(b.item_id for a, b in pairs if a.text != b.text or bool(a.error) != bool(b.error)),
        newly_wrong=wrong,
        newly_right=right,
        loss_points=100.0 * (len(wrong) - len(right)) / len(pairs),
    )


def save_run(path: Path, meta: dict[str, object], answers: Sequence[Answer]) -> None:
    """Writes a run as JSON: what was asked of whom, accuracy per category, every answer."""
    run = {
        "meta": meta,
        "accuracy": accuracy(answers),
        "categories": {name: accuracy(group) for name, group in by_category(answers).items()},
        "items": [asdict(answer) for answer in answers],
    }
    path.write_bytes(orjson.dumps(run, option=orjson.OPT_INDENT_2))


def load_run(path: Path) -> list[Answer]:
    """The answers of an earlier run.

    Raises ValueError for a file that save_run did not write.
    """
    try:
        return [Answer(**item) for item in orjson.loads(path.read_bytes())["items"]]
    except (OSError, orjson.JSONDecodeError, LookupError, TypeError) as e:
        raise ValueError(f"{path} is no earlier run ({e}): give a file written with --json") from e
