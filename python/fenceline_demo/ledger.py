"""Long-range recall: a long text with facts in it (a ledger), and questions about some of them at its end."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .generators import filler_sentence
from .items import HELD_OUT, NAMES, WORDS, Item, is_held_out

CHARS_PER_TOKEN = 3.7
"""Characters per token of the ledgers' text under the demo tokenizer (measured; rounded down)."""

MAX_FACTS = len(NAMES)

KINDS = ("code", "locker", "password")


@dataclass(frozen=True, slots=True)
class Fact:
    """The fact that something about `name` is `value`; `kind` chooses the wording of statement and question."""

    kind: int
    name: str
    value: str

    @property
    def key(self) -> str:
        return f"recall:{self.name}={self.value}"

    def statement(self) -> str:
        """The sentence that states the fact, in the text and in the answer."""
        return f"The {KINDS[self.kind]} of {self.name} is {self.value}."

    def question(self) -> str:
        """The question that the fact answers."""
        return f"What is the {KINDS[self.kind]} of {self.name}?"


@dataclass(frozen=True, slots=True)
class Ledger:
    """A long text and the facts in it, in the order of their statements."""

    text: str
    facts: tuple[Fact, ...]

    def recall_item(self, fact: Fact) -> Item:
        """The question about one fact."""
        return Item("recall", fact.question(), fact.statement(), (fact.key,))

    def list_item(self, facts: list[Fact]) -> Item:
        """The question about several facts of one kind, for which the model must find several places in the text."""
        assert len({fact.kind for fact in facts}) == 1, "a list asks for one kind of fact"
        names = ", ".join(fact.name for fact in facts)
        answer = " ".join(fact.statement() for fact in facts)
        question = f"List the {KINDS[facts[0].kind]}s of {names}."
        return Item("ledger", question, answer, tuple(fact.key for fact in facts))

    def pick_alike(self, rng: random.Random, most: int) -> list[Fact]:
        """Up to `most` different facts of one kind, in random order."""
        kind = rng.choice(self.facts).kind
        alike = [fact for fact in self.facts if fact.kind == kind]
        return rng.sample(alike, min(most, len(alike)))


def _value(rng: random.Random, kind: int) -> str:
    if kind == 0:
        return f"{rng.randrange(10000):04d}"
    if kind == 1:
        return str(rng.randrange(100, 1000))
    return f"{WORDS[rng.randrange(len(WORDS))]} {WORDS[rng.randrange(len(WORDS))]}"


def make_fact(rng: random.Random, name: str, split: str) -> Fact:
    """A fact about `name` whose (name, value) pair belongs to `split`."""
    kind = rng.randrange(3)
    while True:
        fact = Fact(kind, name, _value(rng, kind))
        if is_held_out(fact.key) == (split == HELD_OUT):
            return fact


def make_ledger(rng: random.Random, num_facts: int, num_tokens: int, split: str) -> Ledger:
    """A text of about `num_tokens` tokens: facts about different names, and as much filler as fits.

    Facts and filler are shuffled; every (name, value) pair belongs to `split`.
    """
    names = rng.sample(NAMES, min(num_facts, MAX_FACTS))
    facts = tuple(make_fact(rng, name, split) for name in names)
    statements = [fact.statement() for fact in facts]
    num_left = int(num_tokens * CHARS_PER_TOKEN) - sum(map(len, statements)) - len(statements)
    filler: list[str] = []
    while num_left > 0:
        filler.append(filler_sentence(rng))
        num_left -= len(filler[-1]) + 1
    slots = sorted(rng.sample(range(len(statements) + len(filler)), len(statements)))
    sentences = filler
    for slot, statement in zip(slots, statements, strict=True):
        sentences.insert(slot, statement)
    return Ledger(" ".join(sentences), facts)
