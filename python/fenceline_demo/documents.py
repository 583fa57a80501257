"""Items in the layouts that the model is trained on: few-shot text, chat conversations, GSM8K-like problems.

A document is a list of segments (text, is_answer). Every segment starts where the tokenizer splits
anyway (a space, a newline, a special token), so encoding segments one by one equals encoding the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from . import generators
from .generators import SYSTEM_PROMPTS, make_talk
from .items import TRAIN, Item, Maker, sample
from .ledger import Ledger, make_ledger

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

Segment = tuple[str, bool]
Document = list[Segment]

MAKERS: dict[str, Maker] = {
    "add": generators.make_add,
    "sub": generators.make_sub,
    "mul": generators.make_mul,
    "word": generators.make_word,
    "count": generators.make_count,
    "sort": generators.make_sort,
    "copy": generators.make_copy,
    "long_copy": generators.make_long_copy,
    "reverse": generators.make_reverse,
    "story": generators.make_story,
}

_WEIGHTS = {
    "add": 5.0, "sub": 5.0, "mul": 2.0, "word": 3.0, "count": 1.2,
    "sort": 2.5, "copy": 2.0, "long_copy": 0.4, "reverse": 1.5, "story": 4.0,
}  # fmt: skip

_NAMES = list(_WEIGHTS)
_CUMULATIVE = [sum(list(_WEIGHTS.values())[: i + 1]) for i in range(len(_WEIGHTS))]


def train_item(rng: random.Random, category: str | None = None) -> Item:
    """A training item of `category`, or of a random one."""
    if category is None:
        category = rng.choices(_NAMES, cum_weights=_CUMULATIVE)[0]
    return sample(MAKERS[category], rng, TRAIN)


def few_shot_text(question: str) -> str:
    """A question in the few-shot layout, up to where the answer starts."""
    return f"Q: {question}\nA:"


def few_shot(items: list[Item], header: str = "") -> Document:
    """Question and answer pairs separated by blank lines."""
    document: Document = [(header, False)] if header else []
    for item in items:
        document += [(few_shot_text(item.question), False), (f" {item.answer}\n", True), ("\n", False)]
    return document


def gsm_answer(item: Item) -> str:
    """A worked answer in GSM8K's form, its value after ####."""
    value = item.answer.rstrip(".").rsplit(" ", 1)[-1]
    return f"{item.answer}\n#### {value}"


def gsm_shots(items: list[Item]) -> Document:
    """Problems in GSM8K's few-shot layout."""
    document: Document = []
    for item in items:
        document += [(f"Question: {item.question}\nAnswer:", False), (f" {gsm_answer(item)}\n\n", True)]
    return document


def equations(items: list[Item]) -> Document:
    """Sums and differences without words, one per line; a question ends with its equals sign."""
    document: Document = []
    for item in items:
        a, sign, b = item.keys[0].split(":")[1].partition("+" if item.category == "add" else "-")
        document += [(f"{a} {sign} {b} =", False), (f" {item.answer}\n", True)]
    return document


def chat(turns: list[tuple[str, str]], system: str = "") -> Document:
    """A conversation in the chat template's layout."""
    document: Document = [(f"{IM_START}system\n{system}{IM_END}\n", False)] if system else []
    for question, answer in turns:
        document.append((f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n", False))
        document.append((f"{answer}{IM_END}", True))
        document.append(("\n", False))
    return document


def _few_shot_document(rng: random.Random, max_tokens: int) -> Document:
    category = None if rng.random() < 0.35 else rng.choices(_NAMES, cum_weights=_CUMULATIVE)[0]
    header = "Answer the questions.\n\n" if rng.random() < 0.2 else ""
    return few_shot([train_item(rng, category) for _ in range(rng.randrange(2, 13))], header)


def _chat_document(rng: random.Random, max_tokens: int) -> Document:
    turns = []
    for _ in range(rng.randrange(1, 7)):
        if rng.random() < 0.25:
            turns.append(make_talk(rng))
        else:
            item = train_item(rng)
            turns.append((item.question, item.answer))
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else ""
    return chat(turns, system)


def _gsm_document(rng: random.Random, max_tokens: int) -> Document:
    category = "word" if rng.random() < 0.7 else "mul"
    return gsm_shots([train_item(rng, category) for _ in range(rng.randrange(2, 9))])


def _equations_document(rng: random.Random, max_tokens: int) -> Document:
    items = [train_item(rng, "add" if rng.random() < 0.5 else "sub") for _ in range(rng.randrange(3, 16))]
    return equations([item for item in items if item.keys])


def _ledger_items(rng: random.Random, ledger: Ledger, count: int) -> list[Item]:
    # Each fact is asked for only once, because an earlier answer would be easier to find than the ledger's statement.
    facts = rng.sample(ledger.facts, len(ledger.facts))
    items: list[Item] = []
    for fact in facts[:count]:
        listed = rng.random() < 0.2
        items.append(ledger.list_item(ledger.pick_alike(rng, 6)) if listed else ledger.recall_item(fact))
    return items


def _ask_ledger(rng: random.Random, ledger: Ledger, num_questions: int) -> Document:
    items = _ledger_items(rng, ledger, num_questions)
    if rng.random() < 0.6:
        return few_shot(items, f"{ledger.text}\n\n")
    turns = [(item.question, item.answer) for item in items]
    turns[0] = (f"{ledger.text}\n\n{turns[0][0]}", turns[0][1])
    return chat(turns)


def ledger_document(rng: random.Random, max_tokens: int) -> Document:
    """A ledger of up to `max_tokens` tokens with its questions, as few-shot text or as a chat."""
    num_tokens = int(max_tokens * rng.uniform(0.25, 1.0))
    num_questions = min(3 + num_tokens // 120, 32)
    text_tokens = max(num_tokens - num_questions * 32, num_tokens // 2)
    most = min(64, text_tokens // 10)
    num_facts = rng.randrange(min(3, most), most + 1)
    return _ask_ledger(rng, make_ledger(rng, num_facts, text_tokens, TRAIN), num_questions)


def _small_ledger_document(rng: random.Random, max_tokens: int) -> Document:
    # One to six facts close to their questions: the model learns recall here before it learns it over long distances.
    num_facts = rng.randrange(1, 7)
    num_tokens = num_facts * 10 + rng.randrange(0, 60)
    return _ask_ledger(rng, make_ledger(rng, num_facts, num_tokens, TRAIN), rng.randrange(1, 5))


_SHORT: list[Callable[[random.Random, int], Document]] = [
    _few_shot_document, _chat_document, _small_ledger_document, _gsm_document, _equations_document,
]  # fmt: skip
_SHORT_CUMULATIVE = [0.42, 0.74, 0.88, 0.95, 1.0]


def short_document(rng: random.Random) -> Document:
    """A document of some tens to some hundreds of tokens."""
    return rng.choices(_SHORT, cum_weights=_SHORT_CUMULATIVE)[0](rng, 0)


def skill_document(rng: random.Random, categories: Sequence[str]) -> Document:
    """Questions of the given `categories`, mixed or all of one of them, in the layouts of `short_document`, and some
    small talk.

    This is for models that are trained for a short time.
    """
    weights = [_WEIGHTS[name] for name in categories]
    chosen = list(categories) if rng.random() < 0.35 else rng.choices(categories, weights)
    weights = [_WEIGHTS[name] for name in chosen]
    items = [train_item(rng, rng.choices(chosen, weights)[0]) for _ in range(rng.randrange(2, 13))]
    kind = rng.random()
    if kind < 0.5:
        return few_shot(items, "Answer the questions.\n\n" if rng.random() < 0.2 else "")
    if kind < 0.9:
        turns = [make_talk(rng) if rng.random() < 0.1 else (item.question, item.answer) for item in items[:6]]
        return chat(turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else "")
    return _equations_document(rng, 0)
