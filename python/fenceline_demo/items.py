"""Questions with their answers, the hash that decides which of them training may see, and the words that they use."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _split(
    "Ada Alan Amy Anna Ben Bella Carl Clara Dan Dora Ed Ella Emma Eva Finn Fred Gina Greta Hans Hugo "
    "Ida Ivan Jack Jane Jim Joe Julia Karl Kate Leo Lena Lily Liam Luca Lucy Mark Mary Max Mia Mila "
    "Mira Nina Noah Nora Olga Oscar Otto Paul Pia Ray Rita Rosa Ruth Sam Sara Sofia Tara Theo Tim Tom "
    "Una Vera Will Zoe"
)

WORDS = _split(
    "apple arm axe ball band bank barn bat bean bear bed bell bench bike bird boat bone book boot bowl "
    "box brick bread bridge bus cake camp can candle cap car card cart cat chair cheese clock cloud coat "
    "coin corn cow cream crow cup deer desk dish dog door dress drum duck dust egg farm fan fence fig "
    "fire fish flag flute fog fork fox frog gate gift glass goat gold goose grape grass hand harp hat "
    "hen hill home hook horn horse house ice iron jam jar juice key king kite knife lake lamp leaf lemon "
    "lime lion lock log map mask melon milk mill mint moon moss mouse nail nest net nut oak oil olive "
    "onion oven owl pan park peach pear pen piano pie pig pin pine plum pond pony pot queen rain "
    "ring river road rock roof room rope rose sack salt sand seal seed sheep ship shoe silk silver sky "
    "snow soap sock spoon star stone sugar sun swan table tent tiger toad tower train tree wall wolf wood wool"
)

PLACES = _split("kitchen garden office school market library station harbor museum bakery theater forest")

THINGS = _split("apples books coins pens cups eggs stones shells nuts stamps cards balls")

COLORS = _split("red blue green black white yellow brown pink gray orange")


HELD_OUT_ONE_IN = 20
"""One operand set in this many is held out."""

TRAIN = "train"
HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its only right answer.

    `keys` identify the operands, whatever template the question uses: keys[0] those of the item itself, the others
    those of its steps (a product is worked out by an addition). An item without keys is a basic fact, such as a sum of
    two digits, which is always trained and never asked in the evaluation.
    """

    category: str
    question: str
    answer: str
    keys: tuple[str, ...]


Maker = Callable[[random.Random], Item]


def is_held_out(key: str) -> bool:
    """Whether the operands named by `key` belong to the held-out set (by a hash, which never changes)."""
    digest = blake2b(key.encode(), digest_size=8, person=b"fenceline-demo").digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def split_of(item: Item) -> str | None:
    """TRAIN if none of the item's keys is held out, HELD_OUT if its own (the first) is, otherwise None: it is not
    used."""
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
