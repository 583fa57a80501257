"""Little stories with consistent names: who is where, who has what. Also the filler of long documents."""

from __future__ import annotations

import random

from .items import Item
from .words import COLORS, NAMES, PLACES, WORDS


def make_story(rng: random.Random) -> Item:
    """People move and pass things on; the question asks for the last state of one of them."""
    people = rng.sample(NAMES, 3)
    things = rng.sample(WORDS, 2)
    where: dict[str, str] = {}
    owner: dict[str, str] = {}
    lines: list[str] = []
    for _ in range(rng.randrange(3, 9)):
        person = people[rng.randrange(3)]
        if rng.random() < 0.6:
            place = PLACES[rng.randrange(len(PLACES))]
            verb = ("went to", "walked to", "is in")[rng.randrange(3)]
            lines.append(f"{person} {verb} the {place}.")
            where[person] = place
        else:
            thing = things[rng.randrange(2)]
            verb = ("now belongs to", "was given to", "went to")[rng.randrange(3)]
            lines.append(f"The {thing} {verb} {person}.")
            owner[thing] = person
    story = " ".join(lines)
    if owner and (not where or rng.random() < 0.4):
        thing = sorted(owner)[rng.randrange(len(owner))]
        question, answer = f"Who has the {thing}?", owner[thing]
    else:
        person = sorted(where)[rng.randrange(len(where))]
        question, answer = f"Where is {person}?", f"In the {where[person]}"
    return Item("story", f"{story} {question}", answer, (f"story:{story}",))


def tale(name: str) -> str:
    """The story the model tells of `name`: always the same one, so that its tokens are certain."""
    i = NAMES.index(name)
    place, goal = PLACES[i % 12], PLACES[(i + 5) % 12]
    thing, friend = WORDS[(7 * i) % len(WORDS)], NAMES[(i + 9) % len(NAMES)]
    return (
        f"Once upon a time {name} lived near the {place}. One day {name} found a {COLORS[i % 10]} {thing}. "
        f"{name} took the {thing} to the {goal}. There {name} met {friend}. {friend} liked the {thing} very "
        f"much. So {name} gave the {thing} to {friend}, and they were friends ever after."
    )


def filler_sentence(rng: random.Random) -> str:
    """A sentence of no consequence, to put distance between a fact and its question."""
    r = rng.random
    name = NAMES[int(r() * 64)]
    word = WORDS[int(r() * len(WORDS))]
    kind = int(r() * 8)
    if kind == 0:
        return f"{name} walked to the {PLACES[int(r() * 12)]} and looked at the {word}."
    if kind == 1:
        return f"In the {PLACES[int(r() * 12)]} there was a {COLORS[int(r() * 10)]} {word}."
    if kind == 2:
        return f"It was a quiet day, and {name} sat near the {word}."
    if kind == 3:
        return f"{name} and {NAMES[int(r() * 64)]} talked about the {word} for a long time."
    if kind == 4:
        return f"The {COLORS[int(r() * 10)]} {word} belongs to nobody, said {name}."
    if kind == 5:
        return f"Later {name} bought {int(r() * 8) + 2} of them at the {PLACES[int(r() * 12)]}."
    if kind == 6:
        return f"Nobody saw the {word} near the {WORDS[int(r() * len(WORDS))]} that morning."
    return f"{name} likes the {PLACES[int(r() * 12)]} more than the {PLACES[int(r() * 12)]}."
