"""The form of an answer that a client asks for, before it is compiled."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

GRAMMAR_REMEDY = "pip install xgrammar, or start with --grammar-backend none"  # where the library is missing
MAX_GRAMMAR_CHARS = 1 << 17
# Characters of white space in one place of a JSON text. Without a limit a model may never stop writing them.
DEFAULT_MAX_WHITESPACE = 20
MAX_HEADER_TOKENS = 80  # enough for the name of a function of 64 characters
_WHITESPACE_PATTERN = re.compile(r"\[((?:[ ]|\\[ntrs])+)\](\*|\?|\{0,(\d{1,3})\})|")


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as it was sent: ``text`` in the language of ``kind``, JSON for json_schema and structural_tag."""

    kind: GrammarKind
    text: str


ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')  # response_format json_object


class ThinkTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens between which a model reasons; there no grammar is enforced. The sequence of tokens ``end`` ends the
    reasoning. ``is_open``: the prompt ends within the reasoning; else the answer may begin with ``start``.

    If answers are lists of messages, ``end``, and each sequence of ``or_end``, only begins the header of the message
    that is the answer. The reasoning then ends with that header: with ``header_end``, after at most
    ``MAX_HEADER_TOKENS`` other tokens. ``may_end``: the answer may end before, because messages that call tools are
    read as reasoning.

    ``calls``: tokens that begin a call. An answer that begins with one of them, after the reasoning if there is any,
    follows no grammar.
    """

    start: int
    end: tuple[int, ...]
    is_open: bool
    or_end: tuple[tuple[int, ...], ...] = ()
    header_end: tuple[int, ...] = ()
    may_end: bool = False
    calls: tuple[int, ...] = ()


def max_whitespace(pattern: str | None) -> int | None:
    """The largest number of white space characters in one place that --constrained-json-whitespace-pattern allows; None
    for any number. Raises ValueError with the remedy for a pattern that says something else."""
    if pattern is None:
        return DEFAULT_MAX_WHITESPACE
    found = _WHITESPACE_PATTERN.fullmatch(pattern)
    if found is None or (pattern and set(found[1].replace("\\s", "\\n\\t ")) != set("\\nt ")):
        raise ValueError(
            "--constrained-json-whitespace-pattern is the class [\\n\\t ] with *, ? or {0,N}, or empty for a single"
            f" space after commas and colons, got {pattern!r}"
        )
    match pattern and found[2]:
        case "":
            return 0
        case "*":
            return None
        case "?":
            return 1
        case _:
            return int(found[3])
