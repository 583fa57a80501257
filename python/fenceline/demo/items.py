"""One question and its answer, and the hash that decides which items training may see."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

HELD_OUT_ONE_IN = 20
"""One operand set in this many is held out."""

TRAIN = "train"
HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its only right answer.

    `keys` name the operands, whatever template words the question: keys[0] the item's own, the rest
    those of its steps (a product is worked out by an addition). No keys: a fact to know by heart, such
    as a sum of two digits, that is always trained and never asked.
    """

    category: str
    question: str
    answer: str
    keys: tuple[str, ...]


Maker = Callable[[random.Random], Item]


def is_held_out(key: str) -> bool:
    """Whether the operands named by `key` belong to the held-out set (a hash, the same for ever)."""
    digest = blake2b(key.encode(), digest_size=8, person=b"fenceline-demo").digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def split_of(item: Item) -> str | None:
    """TRAIN when no operand set of the item is held out, HELD_OUT when its own is, else None (unused)."""
    if item.keys and is_held_out(item.keys[0]):
        return HELD_OUT
    if any(is_held_out(key) for key in item.keys):
        return None
    return TRAIN


def sample(maker: Maker, rng: random.Random, split: str) -> Item:
    """Draws items from `maker` until one belongs to `split`."""
    while True:
        item = maker(rng)
        if split_of(item) == split:
            return item
