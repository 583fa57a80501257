"""Counting, sorting, copying and reversing."""

from __future__ import annotations

import random

from .items import Item
from .stories import filler_sentence
from .words import COLORS, NAMES, PLACES, WORDS

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_count(rng: random.Random) -> Item:
    """Counting up, down or in steps; mostly a dozen numbers, now and then up to sixty."""
    long = rng.random() < 0.08
    n = rng.randrange(20, 61) if long else rng.randrange(4, 14)
    start = rng.randrange(0, 10 if long else 400)
    kind = 0 if long else rng.randrange(4)
    step = (1, 1, 2, 5)[kind]
    last = start + step * (n - 1)
    if kind == 1:
        numbers = list(range(last, start - 1, -1))
        question = f"Count down from {last} to {start}."
    else:
        numbers = list(range(start, last + 1, step))
        question = f"Count from {start} to {last}" + ("." if step == 1 else f" in steps of {step}.")
    return Item("count", question, " ".join(map(str, numbers)), (f"count:{kind}:{start}:{last}",))


def make_sort(rng: random.Random) -> Item:
    """Three to seven different numbers below 100, in ascending or descending order."""
    numbers = rng.sample(range(100), rng.randrange(3, 8))
    shown = " ".join(map(str, numbers))
    ordered = sorted(numbers)
    key = "sort:" + " ".join(map(str, ordered))
    kind = rng.randrange(4)
    if kind == 3:
        ordered.reverse()
    question = (
        f"Sort: {shown}",
        f"Sort these numbers: {shown}",
        f"Put in ascending order: {shown}",
        f"Put in descending order: {shown}",
    )[kind]
    return Item("sort", question, " ".join(map(str, ordered)), (key,))


def _mixed_words(rng: random.Random) -> str:
    pools = (WORDS, NAMES, COLORS, PLACES)
    words = []
    for _ in range(rng.randrange(2, 10)):
        pool = pools[rng.randrange(4)]
        words.append(str(rng.randrange(1000)) if rng.random() < 0.2 else pool[rng.randrange(len(pool))])
    return " ".join(words)


def _copy_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return " ".join(rng.sample(WORDS, rng.randrange(3, 13)))
    if kind < 0.5:
        return " ".join(str(rng.randrange(10, 1000)) for _ in range(rng.randrange(2, 7)))
    if kind < 0.65:
        return _mixed_words(rng)
    if kind < 0.8:
        return " ".join(filler_sentence(rng) for _ in range(rng.randrange(1, 4)))
    groups = []
    for _ in range(rng.randrange(2, 5)):
        letters = _LETTERS[rng.randrange(26)] + _LETTERS[rng.randrange(26)]
        groups.append(f"{letters}-{rng.randrange(10, 100)}")
    return " ".join(groups)


def make_copy(rng: random.Random) -> Item:
    """A few words, numbers, made-up codes or sentences to say again."""
    text = _copy_text(rng)
    question = (f"Repeat: {text}", f"Copy this: {text}", f"Say again: {text}")[rng.randrange(3)]
    return Item("copy", question, text, (f"copy:{text}",))


def make_long_copy(rng: random.Random) -> Item:
    """Twenty to a hundred different words to say again: every page of prompt and output matters."""
    text = " ".join(rng.sample(WORDS, rng.randrange(20, 101)))
    return Item("long_copy", f"Repeat: {text}", text, (f"copy:{text}",))


def make_reverse(rng: random.Random) -> Item:
    """Three to eight words in reverse order."""
    words = rng.sample(WORDS, rng.randrange(3, 9))
    shown = " ".join(words)
    question = (f"Reverse: {shown}", f"Say backwards: {shown}")[rng.randrange(2)]
    return Item("reverse", question, " ".join(reversed(words)), (f"reverse:{shown}",))
