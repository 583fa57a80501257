"""Sums, differences, products worked out in steps, and word problems."""

from __future__ import annotations

import random

from .items import Item
from .words import NAMES, THINGS


def add_key(a: int, b: int) -> tuple[str, ...]:
    """The key of a + b, in either order; none for two digits, which are facts to know by heart."""
    low, high = (a, b) if a <= b else (b, a)
    return (f"add:{low}+{high}",) if high >= 10 else ()


def sub_key(a: int, b: int) -> tuple[str, ...]:
    """The key of a - b; none where both are single digits."""
    return (f"sub:{a}-{b}",) if a >= 10 else ()


def _operand(rng: random.Random, max_digits: int = 3) -> int:
    digits = rng.randrange(max_digits) + 1
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def make_add(rng: random.Random) -> Item:
    """a + b, each of one to three digits."""
    a, b = _operand(rng), _operand(rng)
    question = (
        f"What is {a} + {b}?",
        f"{a} + {b} = ?",
        f"Add {a} and {b}.",
        f"Calculate {a} + {b}.",
        f"{a}+{b}",
    )[rng.randrange(5)]
    return Item("add", question, str(a + b), add_key(a, b))


def make_sub(rng: random.Random) -> Item:
    """a - b >= 0, each of one to three digits."""
    a, b = _operand(rng), _operand(rng)
    if a < b:
        a, b = b, a
    question = (
        f"What is {a} - {b}?",
        f"{a} - {b} = ?",
        f"Subtract {b} from {a}.",
        f"Calculate {a} - {b}.",
        f"{a}-{b}",
    )[rng.randrange(5)]
    return Item("sub", question, str(a - b), sub_key(a, b))


def product_steps(a: int, b: int) -> tuple[str, tuple[str, ...]]:
    """The worked product of a two-digit by a one-digit number, and the keys of its addition."""
    tens, ones = a // 10 * 10, a % 10
    steps = f"{tens} * {b} = {tens * b}. {ones} * {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}."
    return steps, add_key(tens * b, ones * b)


def make_mul(rng: random.Random) -> Item:
    """A two-digit number times a digit, worked out: tens, ones, sum."""
    a, b = rng.randrange(11, 100), rng.randrange(2, 10)
    if a % 10 == 0:
        a += 1
    steps, keys = product_steps(a, b)
    question = (
        f"What is {a} * {b}?",
        f"{a} * {b} = ?",
        f"Multiply {a} by {b}.",
        f"Calculate {a} * {b}.",
        f"{a}*{b}",
    )[rng.randrange(5)]
    return Item("mul", question, steps, (f"mul:{a}*{b}", *keys))


def make_word(rng: random.Random) -> Item:
    """A story of one or two additions or subtractions; the answer shows each step."""
    name, other = rng.sample(NAMES, 2)
    thing = THINGS[rng.randrange(len(THINGS))]
    total = rng.randrange(5, 100)
    story, steps = [f"{name} has {total} {thing}."], []
    keys: list[str] = []
    for _ in range(1 + (rng.random() < 0.4)):
        if rng.random() < 0.5:
            change = rng.randrange(2, 100)
            story.append(_gain(rng, name, other, change))
            steps.append(f"{total} + {change} = {total + change}.")
            keys += add_key(total, change)
            total += change
        else:
            change = rng.randrange(0, min(total, 99) + 1)
            story.append(_loss(rng, name, other, change))
            steps.append(f"{total} - {change} = {total - change}.")
            keys += sub_key(total, change)
            total -= change
    question = " ".join(story) + f" How many {thing} does {name} have now?"
    return Item("word", question, " ".join(steps), tuple(keys))


def _gain(rng: random.Random, name: str, other: str, n: int) -> str:
    return (
        f"{other} gives {name} {n} more.",
        f"{name} buys {n} more.",
        f"Then {name} finds {n} more.",
    )[rng.randrange(3)]


def _loss(rng: random.Random, name: str, other: str, n: int) -> str:
    return (
        f"{name} gives {n} to {other}.",
        f"{name} loses {n} of them.",
        f"Then {name} sells {n}.",
    )[rng.randrange(3)]
