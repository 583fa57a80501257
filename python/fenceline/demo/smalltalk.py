"""A little small talk, and honest answers to what the model cannot know."""

from __future__ import annotations

import random

from .stories import tale
from .words import COLORS, NAMES, PLACES, THINGS, WORDS

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
        return (f"Tell me a story about {name}.", f"Write a story about {name}.")[rng.randrange(2)], tale(
            name
        )
    if kind < 0.8:
        return ("Tell me a story.", "Tell me a story", "Write a story.")[rng.randrange(3)], tale("Mira")
    return _unknown_question(rng), _UNKNOWN
