"""The demo corpus: what is held out is never trained on, and the tokenizer and rows are what they claim."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fenceline import demo_model_path
from fenceline_demo.corpus import ROW_LENGTHS, Curriculum, build_batch
from fenceline_demo.documents import MAKERS, ledger_document, short_document, train_item
from fenceline_demo.evaluation import CATEGORIES, held_out_items
from fenceline_demo.generators import add_key, sub_key
from fenceline_demo.items import HELD_OUT, TRAIN, Item, is_held_out, split_of
from fenceline_demo.tokenizer import FastEncoder, build_tokenizer

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


@pytest.mark.parametrize("category", sorted(MAKERS))
def test_both_splits_exist_and_training_items_are_trained(category: str) -> None:
    rng = random.Random(5)
    splits = [split_of(MAKERS[category](rng)) for _ in range(600)]
    assert splits.count(TRAIN) > 400
    assert splits.count(HELD_OUT) > 5
    assert all(split_of(train_item(rng, category)) == TRAIN for _ in range(100))


def test_operand_order_and_template_move_no_item_between_splits() -> None:
    assert add_key(347, 58) == add_key(58, 347)
    assert add_key(4, 5) == ()
    one = Item("add", "What is 347 + 58?", "405", add_key(347, 58))
    other = Item("add", "Add 58 and 347.", "405", add_key(58, 347))
    assert split_of(one) == split_of(other)


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


def test_recall_asks_over_more_than_a_thousand_tokens() -> None:
    items = held_out_items(seed=1, num_items=200, categories=("recall", "ledger"))
    lengths = [len(_tokenizer().encode(item.prompt()).ids) for item in items]
    assert min(lengths) > 1000
    assert 3000 < max(lengths) < 3800
    for item in items:
        assert all(value in item.context for value in re.findall(r"is ([^.]+)\.", item.item.answer))
    assert len({item.context for item in items}) < len(items) / 2  # ledgers are shared


def test_items_repeat_for_a_seed_and_differ_between_seeds() -> None:
    assert held_out_items(4, 30) == held_out_items(4, 30)
    assert held_out_items(4, 30) != held_out_items(5, 30)
    assert held_out_items(4, 30) == held_out_items(4, 60)[:30]
    with pytest.raises(ValueError, match="unknown categories"):
        held_out_items(0, 5, ("nonsense",))


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = _tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_names_and_words_are_single_tokens() -> None:
    tokenizer = _tokenizer()
    assert len(tokenizer.encode("4817").ids) == 4
    assert [len(tokenizer.encode(text).ids) for text in (" Mira", " river", "<|im_start|>")] == [1, 1, 1]


def test_shipped_tokenizer_is_the_one_the_corpus_builds() -> None:
    assert build_tokenizer().to_str() == _tokenizer().to_str()


def test_fast_encoder_equals_the_tokenizer_segment_by_segment() -> None:
    encoder, rng = FastEncoder(_tokenizer()), random.Random(2)
    for i in range(90):
        document = ledger_document(rng, 400) if i % 3 == 0 else short_document(rng)
        ids = [token for text, _ in document for token in encoder.encode(text)]
        assert ids == _tokenizer().encode("".join(text for text, _ in document)).ids


def test_batches_depend_on_seed_and_step_alone() -> None:
    encoder = FastEncoder(_tokenizer())
    ids, mask = build_batch(0, 7, 3, 512, encoder)
    again, _ = build_batch(0, 7, 3, 512, FastEncoder(_tokenizer()))
    assert ids.shape == mask.shape == (3, 513)
    assert (ids == again).all()
    assert (ids != build_batch(0, 8, 3, 512, encoder)[0]).any()
    assert 0.1 < mask.mean() < 0.7


def test_curriculum_starts_short_and_ends_with_every_length() -> None:
    curriculum = Curriculum(seed=0, warm_steps=1000)
    assert {curriculum.row_length(step) for step in range(300)} == {512}
    assert {curriculum.row_length(step) for step in range(1000, 1400)} == set(ROW_LENGTHS)


def test_data_package_imports_no_torch() -> None:
    code = (
        "import sys, importlib\n"
        "for name in ('documents', 'tokenizer', 'corpus', 'evaluation', 'client'):\n"
        "    importlib.import_module('fenceline_demo.' + name)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
