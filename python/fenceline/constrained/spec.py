"""What a client asks of an answer's form, before it is compiled."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]

MAX_GRAMMAR_CHARS = 1 << 17
# Where a JSON text may have white space at all, it may have so much of it: without a limit a model may go on with it.
DEFAULT_MAX_WHITESPACE = 20
_WHITESPACE_PATTERN = re.compile(r"\[((?:[ ]|\\[ntrs])+)\](\*|\?|\{0,(\d{1,3})\})|")


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as it was sent: ``text`` in the language of ``kind``, JSON for json_schema and structural_tag."""

    kind: GrammarKind
    text: str


ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')  # response_format json_object


class ThinkTokens(msgspec.Struct, frozen=True, array_like=True):
    """Between which tokens a model thinks; no grammar is imposed there. ``is_open``: the prompt ends within it; else
    the answer may begin with ``start``."""

    start: int
    end: int
    is_open: bool


def max_whitespace(pattern: str | None) -> int | None:
    """--constrained-json-whitespace-pattern as the most characters of white space in one place; None for any number.

    Raises ValueError with the remedy for a pattern that says something else.
    """
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
