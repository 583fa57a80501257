"""Held-out prompts, the scores of answers to them, and the comparison of two runs item by item.

A prompt is a few-shot prefix of trained items, followed by a question that was not trained on.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import orjson

from .client import Reply
from .documents import MAKERS, few_shot, few_shot_text, train_item
from .items import HELD_OUT, Item, sample
from .ledger import Ledger, make_ledger

LEDGER_CATEGORIES = ("recall", "ledger")
CATEGORIES = (*MAKERS, *LEDGER_CATEGORIES)

NUM_SHOTS = 6
QUESTIONS_PER_LEDGER = 4
LEDGER_TOKENS = (1180, 3950)


class Question(Protocol):
    """A held-out question: an `EvalItem`, or a `picture_chat.PictureItem`."""

    @property
    def item_id(self) -> str: ...

    @property
    def item(self) -> Item: ...

    def prompt(self) -> str:
        """The completion prompt; of a question with pictures, what identifies it."""
        ...

    def messages(self) -> list[dict[str, object]]:
        """The question as a conversation."""
        ...


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One held-out question as a prompt.

    `context` (a ledger or empty) and `shots` precede the question. Items of one category share their shots, and a few
    share a ledger, so that a prefix cache has hits.
    """

    item_id: str
    item: Item
    context: str
    shots: str

    def prompt(self) -> str:
        """The completion prompt; the answer is the line that follows."""
        return self.context + self.shots + few_shot_text(self.item.question)

    def messages(self) -> list[dict[str, object]]:
        """The same question as a conversation of one user message, without shots."""
        return [{"role": "user", "content": self.context + self.item.question}]


def _shots(seed: int, category: str) -> str:
    rng = random.Random(f"shots:{seed}:{category}")
    count = 2 if category == "long_copy" else NUM_SHOTS
    items = [train_item(rng, category) for _ in range(count)]
    return "".join(text for text, _ in few_shot(items))


def _ledger_questions(seed: int, category: str, group: int) -> tuple[Ledger, list[Item]]:
    rng = random.Random(f"ledger:{seed}:{category}:{group}")
    ledger = make_ledger(rng, rng.randrange(16, 49), rng.randrange(*LEDGER_TOKENS), HELD_OUT)
    if category == "recall":
        return ledger, [ledger.recall_item(f) for f in rng.sample(ledger.facts, QUESTIONS_PER_LEDGER)]
    chosen = [ledger.pick_alike(rng, rng.randrange(3, 7)) for _ in range(QUESTIONS_PER_LEDGER)]
    return ledger, [ledger.list_item(facts) for facts in chosen]


def held_out_items(seed: int, num_items: int, categories: tuple[str, ...] = CATEGORIES) -> list[EvalItem]:
    """`num_items` held-out prompts, of each category in turn; the same seed gives the same items.

    Raises ValueError for a category that does not exist.
    """
    unknown = sorted(set(categories) - set(CATEGORIES))
    if unknown or not categories:
        raise ValueError(f"unknown categories {unknown}: choose from {', '.join(CATEGORIES)}")
    shots = {name: "" if name in LEDGER_CATEGORIES else _shots(seed, name) for name in categories}
    rngs = {name: random.Random(f"items:{seed}:{name}") for name in categories}
    ledgers: dict[str, tuple[Ledger, list[Item]]] = {}
    out: list[EvalItem] = []
    for i in range(num_items):
        name, number = categories[i % len(categories)], i // len(categories)
        if name in LEDGER_CATEGORIES:
            group, index = divmod(number, QUESTIONS_PER_LEDGER)
            if index == 0:
                ledgers[name] = _ledger_questions(seed, name, group)
            ledger, questions = ledgers[name]
            item, context = questions[index], f"{ledger.text}\n\n"
        else:
            item, context = sample(MAKERS[name], rngs[name], HELD_OUT), ""
        out.append(EvalItem(f"{name}-{number}", item, context, shots[name]))
    return out


@dataclass(frozen=True, slots=True)
class Answer:
    """One item with its answer. `prompt_hash` identifies the prompt, so that only equal prompts are compared."""

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


def score(item: Question, prompt_text: str, reply: Reply) -> Answer:
    """Score a reply. It is right if the whole answer is equal, except for white space around it."""
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

    Raises ValueError for an empty run.
    """
    if not answers:
        raise ValueError("no answers to score: ask for at least one item")
    return sum(answer.correct for answer in answers) / len(answers)


def by_category(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers by category, in the order in which these come first."""
    names = dict.fromkeys(answer.category for answer in answers)
    return {name: [answer for answer in answers if answer.category == name] for name in names}


def compare(before: Sequence[Answer], after: Sequence[Answer]) -> Comparison:
    """Compares the answers of two runs to items with the same id.

    Raises ValueError if the runs share no item, or an item was asked with another prompt.
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
    """Writes a run as JSON: `meta` (what was asked of which server), the accuracy per category, and every answer."""
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
