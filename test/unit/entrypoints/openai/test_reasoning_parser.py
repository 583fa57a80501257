"""The reasoning split: what counts as thinking, and that the cut into chunks never matters."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.config.flags import flags_of
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.openai.reasoning_parser import REASONING_FORMATS, ReasoningParser, ReasoningTokens

QWEN3 = REASONING_FORMATS["qwen3"]
R1 = REASONING_FORMATS["deepseek-r1"]

# Whole tags, broken tags and blank space are far likelier here than in any model's output.
PIECES = st.sampled_from(["<think>", "</think>", "<", ">", "</", "think", "<thi", "nk>", " ", "\n", "a", "é", "."])
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def reference(inside: bool, text: str) -> tuple[str, str]:
    """The same rules for a whole text, as one regular expression."""
    match = re.match(r"\s*<think>(.*)", text, re.DOTALL)
    if match is None and not inside:
        return "", text
    body = match.group(1) if match is not None else text
    if match is None and "<think>".startswith(text.lstrip()):
        return text.strip(), ""
    reasoning, found, content = body.partition("</think>")
    return reasoning.strip(), content.lstrip() if found else ""


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nA\n</think>\n\nB ", "A", "B "),
        (False, "\n<think>A</think>B", "A", "B"),
        (False, "B", "", "B"),
        (False, " B", "", " B"),
        (False, "", "", ""),
        (False, "B <think>A</think>", "", "B <think>A</think>"),
        (False, "<think>A", "A", ""),
        (False, "<think></think>B", "", "B"),
        (False, "<thinking>", "", "<thinking>"),
        (True, "A</think>B", "A", "B"),
        (True, "\nA  \n</think>B", "A", "B"),
        (True, "<think>A</think>B", "A", "B"),
        (True, "A", "A", ""),
        (True, "A < 3 </th", "A < 3 </th", ""),
        (True, "A</think>B</think>C", "A", "B</think>C"),
    ],
)
def test_split(inside, text, reasoning, content):
    parser = ReasoningParser(QWEN3, inside)
    fed, rest = parser.feed(text), parser.finish()
    assert (fed.reasoning + rest.reasoning, fed.content + rest.content) == (reasoning, content)
    assert reference(inside, text) == (reasoning, content)


@given(inside=st.booleans(), text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8))
def test_chunks_do_not_matter(inside, text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parser = ReasoningParser(QWEN3, inside)
    splits = [parser.feed(text[start:end]) for start, end in pairwise(edges)]
    splits.append(parser.finish())
    streamed = "".join(s.reasoning for s in splits), "".join(s.content for s in splits)
    assert streamed == reference(inside, text)


@given(inside=st.booleans(), text=TEXTS)
def test_nothing_is_held_back_longer_than_a_tag(inside, text):
    """What is fed and not out yet is blank space, plus less than a tag."""
    parser = ReasoningParser(QWEN3, inside)
    out = ""
    for char in text:
        split = parser.feed(char)
        out += split.reasoning + split.content
    rest = parser.finish()
    held = (rest.reasoning + rest.content).strip()
    assert len(held) < len("</think>")


class CountedText(str):
    """Text that counts the characters of the texts that are made of it."""

    work = 0

    def _made(self, text: str) -> CountedText:
        CountedText.work += len(text)
        return CountedText(text)

    def __add__(self, other: str) -> CountedText:
        return self._made(str.__add__(self, other))

    def __radd__(self, other: str) -> CountedText:
        return self._made(str.__add__(str(other), str(self)))

    def __getitem__(self, key: object) -> CountedText:
        return self._made(str.__getitem__(self, key))  # type: ignore[index]

    def lstrip(self, chars: str | None = None) -> CountedText:
        return self._made(str.lstrip(self, chars))

    def rstrip(self, chars: str | None = None) -> CountedText:
        return self._made(str.rstrip(self, chars))


@pytest.mark.parametrize(
    ("inside", "begin", "end", "whole"),
    [
        (False, "", "B", ("", "BLANKB")),
        (False, "", "<think>A</think>B", ("A", "B")),
        (True, "", "A</think>B", ("A", "B")),
        (False, "<think>A", "b</think>B", ("ABLANKb", "B")),
        (False, "<think>A", "</think>B", ("A", "B")),
        (False, "<think>A", "", ("A", "")),
        (False, "<think>A</think>", "B", ("A", "B")),
    ],
)
def test_white_space_costs_as_much_late_as_early(inside, begin, end, whole):
    """It may turn out to be dropped, so it is kept; but what is kept is not copied with each piece."""
    blank = "\n " * 20_000
    parser, CountedText.work = ReasoningParser(QWEN3, inside), 0
    splits = [
        parser.feed(CountedText(piece)) for piece in (begin, *(blank[i : i + 2] for i in range(0, len(blank), 2)))
    ]
    work = CountedText.work
    splits += [parser.feed(CountedText(end)), parser.finish()]
    assert work < 10 * len(blank)
    assert ("".join(s.reasoning for s in splits), "".join(s.content for s in splits)) == tuple(
        part.replace("BLANK", blank) for part in whole
    )


def test_text_arrives_as_early_as_it_can():
    parser = ReasoningParser(QWEN3, inside=False)
    fed = [parser.feed(piece) for piece in ("<think>", "so", " ", "it", " <", "b>", "</think", ">", " x", " ")]
    assert [split.reasoning for split in fed] == ["", "so", "", " it", "", " <b>", "", "", "", ""]
    assert [split.content for split in fed] == [""] * 8 + ["x", " "]


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3-thinking", "<|im_start|>assistant\n", True),
        ("seed_oss", "<seed:bos>assistant\n", False),
        ("seed_oss", "<seed:bos>assistant\n<seed:think>", True),
        ("deepseek-r1", "<|Assistant|>", True),
        ("deepseek-r1", "<|Assistant|><think>\n\n</think>\n\n", False),
        ("qwen3", "what does <think> mean?<|im_end|>assistant\n", False),
    ],
)
def test_prompt_tells_where_the_output_begins(name, prompt, inside):
    assert REASONING_FORMATS[name].is_open_after(prompt) is inside


@pytest.mark.parametrize(
    ("form", "begun", "inside"),
    [
        (QWEN3, "<think>so", True), (QWEN3, "<think>so</think>", False), (QWEN3, "Well", False), (R1, "so", True),
        (R1, "so</think>B", False),
    ],
)  # fmt: skip
def test_continued_answers(form, begun, inside):
    assert form.is_open_within(begun) is inside


def test_every_flag_value_has_a_format():
    assert set(flags_of(ServerArgs)["reasoning_parser"].spec.choices) == set(REASONING_FORMATS)


@pytest.mark.parametrize(
    ("in_messages", "ids", "num"),
    [(False, [1, 2, 9, 3, 9, 4], 3), (True, [1, 2, 9, 3, 9, 4], 5), (False, [1, 2], 2), (True, [9], 1), (False, [], 0)],
)  # fmt: skip
def test_tokens_of_reasoning_count_however_the_answer_is_cut(in_messages, ids, num):
    for cut in range(len(ids) + 1):
        tokens = ReasoningTokens(9, in_messages)
        tokens.add(ids[:cut])
        tokens.add(ids[cut:])
        assert tokens.num == num
