"""The reasoning split: what counts as thinking, and that the cut into chunks never matters."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.config.flags import flags_of
from fenceline.config.server_args import ServerArgs
from fenceline.entrypoints.openai.reasoning_parser import REASONING_FORMATS, ReasoningParser

QWEN3 = REASONING_FORMATS["qwen3"]
R1 = REASONING_FORMATS["deepseek-r1"]

# Whole tags, broken tags and blank space are far likelier here than in any model's output.
PIECES = st.sampled_from(
    ["<think>", "</think>", "<", ">", "</", "think", "<thi", "nk>", " ", "\n", "a", "é", "."]
)
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


def test_text_arrives_as_early_as_it_can():
    parser = ReasoningParser(QWEN3, inside=False)
    fed = [
        parser.feed(piece) for piece in ("<think>", "so", " ", "it", " <", "b>", "</think", ">", " x", " ")
    ]
    assert [split.reasoning for split in fed] == ["", "so", "", " it", "", " <b>", "", "", "", ""]
    assert [split.content for split in fed] == [""] * 8 + ["x", " "]


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3-thinking", "<|im_start|>assistant\n", True),
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
