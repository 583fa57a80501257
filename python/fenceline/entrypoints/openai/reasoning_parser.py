"""--reasoning-parser: separates a model's reasoning from its answer, for whole outputs and for streams.

The reasoning is between two tags at the beginning of the output. White space around the tags belongs to neither part.
Text is passed on as early as possible: only text that may still turn out to be a tag, or the white space before one,
is kept back. The result does not depend on how the text was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning. ``assumed``: the output begins with reasoning even without a start tag.
    ``in_messages``: the answer is a list of messages, of which the reasoning is one, and only the last begins after
    ``end``; the tool-call format of that name reads them all. Headers of messages may say more than ``start`` and
    ``end`` do: ``answer_header`` and ``call_header`` are how those of an answer and of a call begin, and
    ``header_end`` is how each ends. ``end_token``: the special token that ends each message but the last.
    """

    start: str
    end: str
    assumed: bool
    end_token: str = ""
    in_messages: bool = False
    answer_header: str = ""
    call_header: str = ""
    header_end: str = ""

    def is_open_after(self, prompt: str) -> bool:
        """Whether output that follows ``prompt`` begins inside the reasoning. A template may write the start tag
        itself, and also the end tag if reasoning is switched off."""
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return True
        return self.assumed and not tail.endswith(self.end)

    def is_open_within(self, text: str) -> bool:
        """Whether ``text``, the beginning of an answer that is to be continued, ends inside the reasoning."""
        if self.in_messages:
            return False  # what is continued is the text of the last
        if self.start in text or self.end in text:
            return text.rfind(self.start) > text.rfind(self.end)
        return self.assumed


_THINK = ReasoningFormat("<think>", "</think>", assumed=False)
_THINK_ASSUMED = ReasoningFormat("<think>", "</think>", assumed=True)
_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek-r1": _THINK_ASSUMED,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "gpt-oss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        assumed=True,
        end_token="<|end|>",
        in_messages=True,
        answer_header="<|channel|>final",
        call_header="<|channel|>commentary",
        header_end="<|message|>",
    ),
    "mimo": _THINK,
    "minimax": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK_ASSUMED,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", assumed=False),
}
# What SGLang and vLLM call them besides.
_ALSO_CALLED = {
    "deepseek_r1": "deepseek-r1",
    "deepseek_v3": "deepseek-v3",
    "glm47": "glm45",
    "minimax_m2": "minimax",
    "openai_gptoss": "gpt-oss",
}
REASONING_FORMATS = {**_FORMATS, **{name: _FORMATS[own] for name, own in _ALSO_CALLED.items()}}


class ReasoningTokens:
    """Counts the tokens of an answer's reasoning: those up to the token ``end``, which is the last of them.
    ``in_messages``: ``end`` ends every message but the last; all but that are counted."""

    __slots__ = ("_all", "_end", "_in_messages", "_until_end")

    def __init__(self, end: int, in_messages: bool = False) -> None:
        self._end = end
        self._in_messages = in_messages
        self._all = 0
        self._until_end: int | None = None

    def add(self, ids: list[int]) -> None:
        """The next tokens of the answer."""
        if self._end in ids:
            if self._in_messages:
                self._until_end = self._all + len(ids) - ids[::-1].index(self._end)
            elif self._until_end is None:
                self._until_end = self._all + ids.index(self._end) + 1
        self._all += len(ids)

    @property
    def num(self) -> int:
        """How many, all while the reasoning has not ended."""
        return self._all if self._until_end is None else self._until_end


@dataclass(frozen=True, slots=True)
class Split:
    """New text of each part; either may be empty."""

    reasoning: str
    content: str


class _Stage(Enum):
    START = auto()  # not enough text yet to tell whether the output begins with the tag
    REASONING_START = auto()  # inside, only white space so far
    REASONING = auto()
    CONTENT_START = auto()  # after the end tag, only white space so far
    CONTENT = auto()


class ReasoningParser:
    """The state of one output. Feed it all text in order, then call :meth:`finish` once."""

    __slots__ = ("_blanks", "_format", "_held", "_inside", "_stage")

    def __init__(self, form: ReasoningFormat, inside: bool) -> None:
        """``inside``: the output begins inside the reasoning. A start tag may come all the same and is dropped."""
        self._format = form
        self._inside = inside
        self._stage = _Stage.START
        self._blanks: list[str] = []  # white space that belongs to a part if more of it follows
        self._held = ""  # what follows it: less than a tag, except while a piece is read

    def feed(self, text: str) -> Split:
        """Add ``text``; returns what can now be assigned to either part."""
        if self._stage is _Stage.CONTENT:
            return Split("", text)
        self._held += text
        if self._stage is _Stage.START:
            self._try_start()
        if self._stage is _Stage.REASONING_START:
            self._skip_blank(_Stage.REASONING)
        reasoning = self._take_reasoning() if self._stage is _Stage.REASONING else ""
        if self._stage is _Stage.CONTENT_START:
            self._skip_blank(_Stage.CONTENT)
        return Split(reasoning, self._take_all() if self._stage is _Stage.CONTENT else "")

    def finish(self) -> Split:
        """The text that was kept back. No more text comes after this."""
        rest = self._take_all()
        match self._stage:
            case _Stage.START:
                return Split(rest.strip(), "") if self._inside else Split("", rest)
            case _Stage.REASONING:
                return Split(rest.rstrip(), "")
        return Split("", "")

    def _try_start(self) -> None:
        tag, text = self._format.start, self._held.lstrip()
        self._blanks.append(self._held[: len(self._held) - len(text)])
        self._held = text
        if text.startswith(tag):
            self._held = text[len(tag) :]
            self._stage = _Stage.REASONING_START
        elif not tag.startswith(text):  # neither the tag nor the beginning of it
            self._stage = _Stage.REASONING_START if self._inside else _Stage.CONTENT

    def _skip_blank(self, then: _Stage) -> None:
        self._blanks.clear()
        self._held = self._held.lstrip()
        if self._held:
            self._stage = then

    def _take_reasoning(self) -> str:
        text, end = self._held, self._format.end
        found = text.find(end)
        ready = found if found >= 0 else len(text) - _tag_begun(text, end)
        self._held = text[ready:]
        shown = text[:ready].rstrip()
        blank = text[len(shown) : ready]
        if shown:
            shown = "".join([*self._blanks, shown])
            self._blanks.clear()
        self._blanks.append(blank)
        if found >= 0:
            self._held = text[found + len(end) :]
            self._stage = _Stage.CONTENT_START
        return shown

    def _take_all(self) -> str:
        text = "".join([*self._blanks, self._held])
        self._blanks.clear()
        self._held = ""
        return text


def _tag_begun(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag`` without completing it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
