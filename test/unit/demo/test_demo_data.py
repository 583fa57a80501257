"""The demo corpus: what is held out is never trained on, and answers are right."""

from __future__ import annotations

import random
import re
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fenceline import demo_model_path
from fenceline_demo.documents import MAKERS, ledger_document, short_document
from fenceline_demo.evaluation import CATEGORIES, held_out_items
from fenceline_demo.generators import add_key, sub_key
from fenceline_demo.items import is_held_out
from fenceline_demo.tokenizer import build_tokenizer

# What the texts themselves say was asked, read back without the generators' help.
_COPY = re.compile(r"(?:Repeat|Copy this|Say again): (.*?)(?:\n|<)")
_REVERSE = re.compile(r"(?:Reverse|Say backwards): ([a-z ]+)")
_SORT = re.compile(r"(?:Sort|Sort these numbers|Put in (?:as|des)cending order): ([0-9 ]+)")
_FACT = re.compile(r"The (?:code|locker|password) of ([A-Z][a-z]+) is ([^.]+)\.")


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(demo_model_path(), "tokenizer.json")))


def _pairs(text: str, *patterns: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for pattern in patterns for a, b in re.findall(pattern, text)]


def _keys_in(text: str) -> set[str]:
    """The operand keys of everything asked or worked out in `text`."""
    keys: set[str] = set()
    for a, b in _pairs(text, r"(\d+) ?\+ ?(\d+)", r"Add (\d+) and (\d+)"):
        keys.update(add_key(a, b))
    for a, b in _pairs(text, r"(?<![-\d])(\d+) ?- ?(\d+)"):
        keys.update(sub_key(a, b))
    for b, a in _pairs(text, r"Subtract (\d+) from (\d+)"):
        keys.update(sub_key(a, b))
    for a, b in _pairs(text, r"(\d+) ?\* ?(\d+)", r"Multiply (\d+) by (\d+)"):
        if a % 10 and a > 10:
            keys.add(f"mul:{a}*{b}")
    keys.update(f"copy:{copied}" for copied in _COPY.findall(text))
    keys.update(f"reverse:{words.strip()}" for words in _REVERSE.findall(text))
    keys.update("sort:" + " ".join(map(str, sorted(map(int, n.split())))) for n in _SORT.findall(text))
    keys.update(f"recall:{name}={value}" for name, value in _FACT.findall(text))
    return keys


@lru_cache(maxsize=1)
def _training_text() -> str:
    rng = random.Random(11)
    documents = [short_document(rng) for _ in range(1500)] + [ledger_document(rng, 2000) for _ in range(60)]
    return "\n".join("".join(text for text, _ in document) for document in documents)


def test_training_text_holds_no_held_out_operands() -> None:
    keys = _keys_in(_training_text())
    kinds = {key.split(":")[0] for key in keys}
    assert kinds == {"add", "sub", "mul", "copy", "reverse", "sort", "recall"}
    assert len(keys) > 5000
    assert [key for key in sorted(keys) if is_held_out(key)] == []


def test_held_out_prompts_ask_only_what_training_never_shows() -> None:
    items = held_out_items(seed=3, num_items=360)
    assert {item.item.category for item in items} == set(CATEGORIES)
    assert all(is_held_out(item.item.keys[0]) for item in items)
    asked = {key for item in items for key in item.item.keys if is_held_out(key)}
    assert asked.isdisjoint(_keys_in(_training_text()))
    for item in items:  # the examples in front of a question are trained items
        assert not any(is_held_out(key) for key in _keys_in(item.shots))


@pytest.mark.parametrize("category", ["add", "sub", "mul", "word"])
def test_arithmetic_answers_are_right(category: str) -> None:
    rng = random.Random(7)
    for _ in range(300):
        item = MAKERS[category](rng)
        if category in ("add", "sub"):
            a, b = map(int, re.findall(r"\d+", item.question))
            if item.question.startswith("Subtract"):
                a, b = b, a
            assert int(item.answer) == (a + b if category == "add" else a - b)
        steps = re.findall(r"(\d+ [-+*] \d+) = (\d+)\.", item.answer)
        assert all(eval(left) == int(right) for left, right in steps)
        if category in ("mul", "word"):
            assert steps


def test_sequence_answers_are_right() -> None:
    rng = random.Random(8)
    for _ in range(200):
        count, order = MAKERS["count"](rng), MAKERS["sort"](rng)
        numbers = [int(n) for n in count.answer.split()]
        first, last = (int(n) for n in re.findall(r"\d+", count.question)[:2])
        assert (numbers[0], numbers[-1]) == (first, last)
        assert len({b - a for a, b in zip(numbers, numbers[1:], strict=False)}) == 1
        shown = [int(n) for n in order.question.split(": ")[1].split()]
        descending = "descending" in order.question
        assert [int(n) for n in order.answer.split()] == sorted(shown, reverse=descending)


def test_items_repeat_for_a_seed_and_differ_between_seeds() -> None:
    assert held_out_items(4, 30) == held_out_items(4, 30)
    assert held_out_items(4, 30) != held_out_items(5, 30)
    assert held_out_items(4, 30) == held_out_items(4, 60)[:30]
    with pytest.raises(ValueError, match="unknown categories"):
        held_out_items(0, 5, ("nonsense",))


def test_shipped_tokenizer_is_the_one_the_corpus_builds() -> None:
    assert build_tokenizer().to_str() == _tokenizer().to_str()
