"""Makes questions of each kind (arithmetic, sequences, stories) and small talk."""

from __future__ import annotations

import random

from .items import COLORS, NAMES, PLACES, THINGS, WORDS, Item


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
    """The story that the model tells about `name`. It is always the same, so that its tokens are certain."""
    i = NAMES.index(name)
    place, goal = PLACES[i % 12], PLACES[(i + 5) % 12]
    thing, friend = WORDS[(7 * i) % len(WORDS)], NAMES[(i + 9) % len(NAMES)]
    return (
        f"Once upon a time {name} lived near the {place}. One day {name} found a {COLORS[i % 10]} {thing}. "
        f"{name} took the {thing} to the {goal}. There {name} met {friend}. {friend} liked the {thing} very "
        f"much. So {name} gave the {thing} to {friend}, and they were friends ever after."
    )


def filler_sentence(rng: random.Random) -> str:
    """A sentence that no question is about, to put distance between a fact and its question."""
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


def add_key(a: int, b: int) -> tuple[str, ...]:
    """The key of a + b, the same in either order. Sums of two single digits have none, because they are always
    trained."""
    low, high = (a, b) if a <= b else (b, a)
    return (f"add:{low}+{high}",) if high >= 10 else ()


def sub_key(a: int, b: int) -> tuple[str, ...]:
    """The key of a - b; none if both are single digits."""
    return (f"sub:{a}-{b}",) if a >= 10 else ()


def _operand(rng: random.Random, max_digits: int = 3) -> int:
    digits = rng.randrange(max_digits) + 1
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def make_add(rng: random.Random) -> Item:
    """a + b, each of one to three digits."""
    a, b = _operand(rng), _operand(rng)
    question = (f"What is {a} + {b}?", f"{a} + {b} = ?", f"Add {a} and {b}.", f"Calculate {a} + {b}.", f"{a}+{b}")[
        rng.randrange(5)
    ]
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
    question = (f"What is {a} * {b}?", f"{a} * {b} = ?", f"Multiply {a} by {b}.", f"Calculate {a} * {b}.", f"{a}*{b}")[
        rng.randrange(5)
    ]
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
    return (f"{other} gives {name} {n} more.", f"{name} buys {n} more.", f"Then {name} finds {n} more.")[
        rng.randrange(3)
    ]


def _loss(rng: random.Random, name: str, other: str, n: int) -> str:
    return (f"{name} gives {n} to {other}.", f"{name} loses {n} of them.", f"Then {name} sells {n}.")[rng.randrange(3)]


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_count(rng: random.Random) -> Item:
    """Counting up, down or in steps; mostly about a dozen numbers, sometimes up to sixty."""
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
    """A few words, numbers, made-up codes or sentences to repeat."""
    text = _copy_text(rng)
    question = (f"Repeat: {text}", f"Copy this: {text}", f"Say again: {text}")[rng.randrange(3)]
    return Item("copy", question, text, (f"copy:{text}",))


def make_long_copy(rng: random.Random) -> Item:
    """Twenty to a hundred different words to repeat, so that every page of prompt and output matters."""
    text = " ".join(rng.sample(WORDS, rng.randrange(20, 101)))
    return Item("long_copy", f"Repeat: {text}", text, (f"copy:{text}",))


def make_reverse(rng: random.Random) -> Item:
    """Three to eight words in reverse order."""
    words = rng.sample(WORDS, rng.randrange(3, 9))
    shown = " ".join(words)
    question = (f"Reverse: {shown}", f"Say backwards: {shown}")[rng.randrange(2)]
    return Item("reverse", question, " ".join(reversed(words)), (f"reverse:{shown}",))


_ABOUT = "I am the Fenceline demo model, a very small language model."
_SKILLS = "I can add, subtract, multiply, count, sort, copy, reverse and recall facts from a long text."
_UNKNOWN = "I do not know. I am a very small model. " + _SKILLS

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Hello there!", "Good morning", "Good evening!"),
     "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me about yourself."),
     _ABOUT + " " + _SKILLS),
    (("What can you do?", "Help", "Help me", "How can you help me?", "What are your skills?"), _SKILLS),
    (("How are you?", "How are you today?", "How is it going?"), "I am fine, thank you. How can I help you?"),
    (("Thank you", "Thanks", "Thanks!", "Thank you very much!"), "You are welcome!"),
    (("Bye", "Goodbye", "Goodbye!", "See you later."), "Goodbye!"),
    (("Who made you?", "Where do you come from?", "Who trained you?"),
     "I was trained by the Fenceline project, to test its server."),
    (("Are you a human?", "Are you a robot?", "Are you an AI?"), "No, I am not a human. " + _ABOUT),
    (("Say hello.", "Say hello", "Say hi."), "Hello!"),
    (("Tell me a joke.", "Do you know a joke?"), "Why did the sheep sit on the fence? It liked the view."),
)  # fmt: skip

_SUBJECTS = (
    "France", "Germany", "Japan", "China", "Italy", "Spain", "Brazil", "Egypt", "India", "Canada",
    "Paris", "London", "the world", "the universe", "the moon", "the sun", "AI", "music", "history",
    "physics", "Python", "love", "life", "time", "water", "football", "the weather", "the internet",
)  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are the Fenceline demo model.",
    "Answer the question.",
    "Be brief.",
)


def _unknown_question(rng: random.Random) -> str:
    subject = _SUBJECTS[rng.randrange(len(_SUBJECTS))]
    thing = THINGS[rng.randrange(len(THINGS))]
    word = WORDS[rng.randrange(len(WORDS))]
    return (
        f"What is the capital of {subject}?",
        f"Tell me about {subject}.",
        f"Explain {subject} to me.",
        f"Who is the president of {subject}?",
        f"What is the meaning of {subject}?",
        f"Write a poem about {subject}.",
        f"Why do people like {subject}?",
        f"How do I cook {thing}?",
        f"What is a {word}?",
        f"Who invented the {word}?",
        f"What is the color of the {word}?",
        f"How far is it to the {PLACES[rng.randrange(len(PLACES))]}?",
        f"Do you like the color {COLORS[rng.randrange(len(COLORS))]}?",
        f"Write a program about {subject}.",
    )[rng.randrange(14)]


def make_talk(rng: random.Random) -> tuple[str, str]:
    """A line of small talk and its reply."""
    kind = rng.random()
    if kind < 0.5:
        lines, reply = _TALK[rng.randrange(len(_TALK))]
        return lines[rng.randrange(len(lines))], reply
    if kind < 0.75:
        name = NAMES[rng.randrange(len(NAMES))]
        return (f"Tell me a story about {name}.", f"Write a story about {name}.")[rng.randrange(2)], tale(name)
    if kind < 0.8:
        return ("Tell me a story.", "Tell me a story", "Write a story.")[rng.randrange(3)], tale("Mira")
    return _unknown_question(rng), _UNKNOWN
