"""Held-out prompts: few-shot prefixes of trained items in front of questions that were not trained on."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .documents import MAKERS, few_shot, few_shot_text, train_item
from .items import HELD_OUT, Item, sample
from .ledger import Ledger, make_ledger

LEDGER_CATEGORIES = ("recall", "ledger")
CATEGORIES = (*MAKERS, *LEDGER_CATEGORIES)

NUM_SHOTS = 6
QUESTIONS_PER_LEDGER = 4
LEDGER_TOKENS = (1180, 3950)


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One held-out question as a prompt.

    `context` (a ledger, else empty) and `shots` precede the question; items of one category share their
    shots and a few share a ledger, so that a prefix cache has something to find.
    """

    item_id: str
    item: Item
    context: str
    shots: str

    def prompt(self) -> str:
        """The completion prompt; the answer is the line that follows."""
        return self.context + self.shots + few_shot_text(self.item.question)

    def messages(self) -> list[dict[str, str]]:
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
    """`num_items` held-out prompts, the categories taking turns; the same seed gives the same items.

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
