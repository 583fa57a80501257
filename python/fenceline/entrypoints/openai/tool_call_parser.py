"""--tool-call-parser: finds the tool calls in a model's output, for whole outputs and for streams.

Each format is a generator that reads the output from front to back: it yields what it has found, and None where it
needs more text. Text is passed on as early as possible; only what may still turn out to begin a call, or to be the
white space around one, is kept back. The result does not depend on how the text was cut into chunks. Text that begins
like a call but is not one is content. A call that is cut off by the end of the output keeps the arguments that have
arrived, as OpenAI clients expect of an answer that reached its limit.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning in front of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the function ``name`` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the latest call's arguments."""

    text: str


Found = Content | Reasoning | CallBegun | Arguments
T = TypeVar("T")
# The type of a part of a format: it yields what it has found, or None to get more text, and returns a T.
Reading = Generator[Found | None, None, T]


_FEED_CHARS = 4096
_MAX_NAME_CHARS = 128


class _NotACallError(Exception):
    """The text is not what the format has here, or ends too early."""


class Source:
    """The output as far as it has arrived. ``text[pos:]`` is to be read; what has been read is kept as long as it may
    turn out to be content: its end in ``text[:pos]``, and what is in front of that put aside, so that a new piece of
    text is not added to all of it."""

    __slots__ = ("_aside", "begun", "ended", "pos", "text", "tools")

    def __init__(self, tools: Mapping[str, JsonObject]) -> None:
        """``tools``: the request's functions by name."""
        self.text = ""
        self.pos = 0
        self.ended = False
        self.begun = False  # the call that is being read is one for certain
        self.tools = tools
        self._aside: list[str] = []

    def drop(self, blank: str = "") -> None:
        """What has been read is no longer needed, but for ``blank``, white space that counts as read."""
        self.text = self.text[self.pos :]
        self.pos = 0
        self._aside = [blank] if blank else []

    def unread(self) -> None:
        """All that has been read since the last :meth:`drop` is to be read again."""
        self.text = "".join(self._aside) + self.text
        self.pos = 0
        self._aside = []

    def read_text(self) -> str:
        """What has been read since the last :meth:`drop`."""
        return "".join(self._aside) + self.text[: self.pos]

    def more(self) -> Reading[None]:
        """Wait for more text. Raises _NotACallError if there will be none."""
        if self.ended:
            raise _NotACallError
        yield None

    def more_after(self, first: int) -> Reading[str]:
        """:meth:`more`, with what has been read put aside: ``text`` begins at ``pos`` then. Returns what was
        ``text[first:pos]``."""
        read = self.text[: self.pos]
        self._aside.append(read)
        self.text = self.text[self.pos :]
        self.pos = 0
        yield from self.more()
        return read[first:]


class CallTexts(NamedTuple):
    """What stands around a call's name, which is written as it is, and its arguments, which are JSON. ``mark`` is how
    ``before_name`` begins, and nothing but a call."""

    mark: str
    before_name: str
    before_arguments: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes its calls. ``marks``: texts in a chat template that tell the format. ``begins``: how an answer
    may begin that is a call; NAME stands for a function's name. ``has_special_tokens``: what marks a call is a special
    token, or may be; of other formats the tokenizer tells whether one of ``marks`` is. ``make_id`` makes the id of a
    call. ``texts``: None where a grammar cannot tell by text alone that a call begins, or where its arguments are no
    JSON. ``reads_reasoning``: the form is that of whole answers, of which the reasoning is a part."""

    read: Callable[[Source], Reading[None]]
    marks: tuple[str, ...]
    begins: tuple[str, ...]
    has_special_tokens: bool = False
    texts: CallTexts | None = None
    make_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"
    reads_reasoning: bool = False


class ToolCallParser:
    """The state of one output. Feed it all text in order, then call :meth:`finish` once."""

    __slots__ = ("_events", "_source", "make_id")

    def __init__(self, form: ToolCallFormat, tools: Mapping[str, JsonObject]) -> None:
        """``tools``: the request's functions by name, as OpenAI's ``function`` objects."""
        self.make_id = form.make_id
        self._source = Source(tools)
        self._events = form.read(self._source)

    def feed(self, text: str) -> list[Found]:
        """Add ``text``; returns what has been found in it."""
        found: list[Found] = []
        for first in range(0, len(text), _FEED_CHARS):  # reading copies what is left of a piece at each mark
            self._source.text += text[first : first + _FEED_CHARS]
            found += self._read()
        return found

    def finish(self) -> list[Found]:
        """What was held back. No more text comes after this."""
        self._source.ended = True
        return self._read()

    def _read(self) -> list[Found]:
        found: list[Found] = []
        for event in self._events:
            if event is None:
                break
            found.append(event)
        return found


# --- pieces of formats


def _content_until(source: Source, *marks: str) -> Reading[bool]:
    """Pass on content up to the first of ``marks``, which is read, or to the end of the output, which returns False.
    White space in front of a mark belongs to neither."""
    begin = re.compile("|".join(map(re.escape, marks)))
    blanks: list[str] = []
    while True:
        mark = begin.search(source.text, source.pos)
        if mark is not None:
            end = mark.start()
        elif source.ended:
            end = len(source.text)
        else:
            end = len(source.text) - max(_begun(source.text, mark) for mark in marks)
        text = source.text[source.pos : end]
        shown = text if mark is None and source.ended else text.rstrip()
        if shown or (mark is None and source.ended and blanks):
            yield Content("".join(blanks) + shown)
            blanks = []
        blanks.append(text[len(shown) :])
        source.pos = end
        source.drop("".join(blanks) if mark is not None else "")
        if mark is not None:
            source.pos = len(mark.group())
            return True
        if source.ended:
            return False
        yield None


def _rest(source: Source) -> Reading[None]:
    """Everything that is left is content."""
    while True:
        if source.text:
            yield Content(source.text)
        source.pos = len(source.text)
        source.drop()
        if source.ended:
            return
        yield None


def _begun(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark`` without completing it."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _blank(source: Source, also: str = "") -> Reading[str]:
    """Read white space, and characters of ``also``; returns the character that follows, "" at the end of the output."""
    while True:
        while source.pos < len(source.text):
            char = source.text[source.pos]
            if not (char.isspace() or char in also):
                return char
            source.pos += 1
        if source.ended:
            return ""
        yield from source.more_after(source.pos)


def _takes(source: Source, mark: str) -> Reading[bool]:
    """Read ``mark`` if it is what comes next."""
    while True:
        rest = source.text[source.pos : source.pos + len(mark)]
        if rest == mark:
            source.pos += len(mark)
            return True
        if source.ended or not mark.startswith(rest):
            return False
        yield None


def _expect(source: Source, mark: str) -> Reading[None]:
    if not (yield from _takes(source, mark)):
        raise _NotACallError


def _until(source: Source, *marks: str, most: int | None = None) -> Reading[tuple[str, str]]:
    """Read up to the first of ``marks``, which is left; returns the text in front and the mark. Raises _NotACallError
    where more than ``most`` characters are in front."""
    first, begin = source.pos, re.compile("|".join(re.escape(mark) for mark in marks))
    longest = max(map(len, marks))
    parts: list[str] = []
    while True:
        found = begin.search(source.text, source.pos)
        if found:
            if most is not None and found.start() - first > most:
                raise _NotACallError
            source.pos = found.start()
            return "".join(parts) + source.text[first : found.start()], found.group()
        if most is None:  # what was searched is not searched again, but for what may begin a mark
            source.pos = max(source.pos, len(source.text) - longest + 1)
            parts.append((yield from source.more_after(first)))
            first = 0
        elif len(source.text) - first > most + longest:
            raise _NotACallError
        else:
            yield from source.more()


_STRING_PART = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "\"'"}
_SCALAR_END = re.compile(r"[\s,\]}]")


class _Nesting:
    """Finds the end of a bracketed text that arrives in pieces, without checking its contents."""

    __slots__ = ("_depth", "_marks", "_quote")

    def __init__(self, marks: str = r'["\[\]{}]') -> None:
        """``marks``: a pattern of the brackets and quotes that count; the default is JSON's."""
        self._marks = re.compile(marks)
        self._depth = 0
        self._quote = ""  # of the string that has not ended

    def advance(self, text: str, pos: int) -> tuple[int, bool]:
        """How far it reaches in ``text``, which was read up to ``pos`` before, and whether it ends there."""
        while True:
            if self._quote:
                pos = _string_end(text, pos, self._quote)
                if not text.startswith(self._quote, pos):
                    return pos, False
                pos += 1
                self._quote = ""
            mark = self._marks.search(text, pos)
            if mark is None:
                return len(text), False
            pos = mark.end()
            if mark.group() in "\"'":
                self._quote = mark.group()
            else:
                self._depth += 1 if mark.group() in "([{" else -1
                if self._depth == 0:
                    return pos, True

    def read(self, source: Source) -> Reading[str]:
        """Read all of it; returns its text."""
        parts: list[str] = []
        first, done = source.pos, False
        while True:
            source.pos, done = self.advance(source.text, source.pos)
            if done:
                return "".join(parts) + source.text[first : source.pos]
            parts.append((yield from source.more_after(first)))
            first = 0


def _string_end(text: str, pos: int, quote: str) -> int:
    """Where the inside of a string ends, or as far as it has arrived, without half an escape."""
    part = _STRING_PART[quote].match(text, pos)
    assert part is not None  # it matches nothing at least
    return part.end()


def _string(source: Source) -> Reading[str]:
    """Read a JSON string; returns its value."""
    value: str = json.loads((yield from _string_text(source)), strict=False)
    return value


def _string_text(source: Source) -> Reading[str]:
    """Read a JSON string; returns its text, quotes included."""
    parts: list[str] = []
    first = source.pos
    yield from _expect(source, '"')
    while True:
        source.pos = _string_end(source.text, source.pos, '"')
        if source.text.startswith('"', source.pos):
            break
        parts.append((yield from source.more_after(first)))
        first = 0
    source.pos += 1
    text = "".join(parts) + source.text[first : source.pos]
    try:
        str(json.loads(text, strict=False)).encode()  # half of a surrogate pair cannot be sent
    except ValueError:
        raise _NotACallError from None
    return text


def _value(source: Source) -> Reading[str]:
    """Read a JSON value; returns its text."""
    if source.text[source.pos] in "{[":
        return (yield from _Nesting().read(source))
    if source.text[source.pos] == '"':
        return (yield from _string_text(source))
    parts: list[str] = []
    first = source.pos
    while not (end := _SCALAR_END.search(source.text, source.pos)):
        source.pos = len(source.text)
        parts.append((yield from source.more_after(first)))
        first = 0
    source.pos = end.start()
    return "".join(parts) + source.text[first : source.pos]


def _arguments(source: Source) -> Reading[None]:
    """Pass on a JSON object as the call's arguments while it arrives."""
    if not source.text.startswith("{", source.pos):
        raise _NotACallError
    source.drop()
    nesting, done = _Nesting(), False
    while not done:
        source.pos, done = nesting.advance(source.text, source.pos)
        if source.pos:
            yield Arguments(source.text[: source.pos])
        source.drop()
        if not done:
            yield from source.more()


def _block(source: Source, reading: Reading[None]) -> Reading[bool]:
    """Read one call by ``reading``, and the white space that follows. Returns False if it turned out to be none: then
    all that was read since the last ``drop`` is content, but what follows a certain call's beginning is left out."""
    source.begun = False
    try:
        yield from reading
    except _NotACallError:
        if source.ended:
            source.pos = len(source.text)
        if not source.begun and (text := source.read_text()):
            yield Content(text)
        source.drop()
        return False
    yield from _blank(source)
    source.drop()
    return True


def _call(source: Source, name: str, known: bool) -> CallBegun:
    """The call of ``name``. ``known``: only a function of the request makes a call of this text; otherwise the client
    learns of a function that there is not, so that it can tell the model."""
    if not (name in source.tools if known else re.fullmatch(r"[\w.:/-]{1,128}", name)):
        raise _NotACallError
    source.begun = True
    return CallBegun(name)


def _json_call(source: Source, known: bool = False) -> Reading[None]:
    """Read ``{"name": ..., "arguments": {...}}`` in any order; ``parameters`` is another word for the arguments."""
    yield from _expect(source, "{")
    early, told = "", False
    while (yield from _blank(source, also=",")) != "}":
        key = yield from _string(source)
        yield from _blank(source)
        yield from _expect(source, ":")
        opening = yield from _blank(source)
        if not opening:
            raise _NotACallError
        if key == "name" and not source.begun:
            name = yield from _string(source)
            yield _call(source, name, known)
            if early:
                yield Arguments(early)
                told = True
        elif key in ("arguments", "parameters") and not (told or early):
            if opening == "{" and source.begun:
                yield from _arguments(source)
                told = True
                continue
            # Or the object in a string.
            text = yield from (_string(source) if opening == '"' else _value(source))
            if source.begun:
                yield Arguments(text)
                told = True
            else:
                early = text
        elif source.begun or key in ("type", "id"):
            yield from _value(source)
        else:
            raise _NotACallError
    source.pos += 1
    if not source.begun:
        raise _NotACallError
    if not told:
        yield Arguments("{}")


# --- the formats


def _hermes(source: Source) -> Reading[None]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as often as there are calls."""
    while (yield from _content_until(source, "<tool_call>")):
        yield from _block(source, _hermes_call(source))


_HERMES_TEXTS = CallTexts("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")


def _hermes_call(source: Source) -> Reading[None]:
    yield from _blank(source)
    yield from _json_call(source)
    yield from _blank(source)
    yield from _takes(source, "</tool_call>")


def _granite(source: Source) -> Reading[None]:
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``; Granite 3.1 also writes ``<tool_call>`` around it."""
    while (yield from _content_until(source, "<|tool_call|>", "<tool_call>")):
        if (yield from _blank(source)) == "[":
            is_call = yield from _list(source, lambda: _json_call(source))
        else:
            is_call = yield from _block(source, _json_call(source))
        if is_call and (yield from _takes(source, "</tool_call>")):
            yield from _blank(source)
            source.drop()


def _llama3(source: Source) -> Reading[None]:
    """``{"name": ..., "parameters": {...}}``, with ``;`` between calls: an answer that begins so, or what follows
    ``<|python_tag|>``."""
    if (yield from _blank(source)) == "{":
        yield from _llama3_calls(source, known=True)
    else:
        source.unread()
    while (yield from _content_until(source, "<|python_tag|>")):
        yield from _llama3_calls(source, known=False)


def _llama3_calls(source: Source, known: bool) -> Reading[None]:
    yield from _blank(source)
    while (yield from _block(source, _json_call(source, known))):
        if (yield from _blank(source, also=";")) != "{":
            break
        source.drop()


def _mistral(source: Source) -> Reading[None]:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""
    while (yield from _content_until(source, "[TOOL_CALLS]")):
        if (yield from _blank(source)) == "[":
            yield from _list(source, lambda: _json_call(source))
        else:
            yield from _block(source, _named_call(source))


def _named_call(source: Source) -> Reading[None]:
    name, mark = yield from _until(source, "[CALL_ID]", "[ARGS]", "{", most=_MAX_NAME_CHARS)
    yield _call(source, name.strip(), known=False)
    if mark != "{":
        yield from _until(source, "{")
    yield from _arguments(source)


def _list(source: Source, call: Callable[[], Reading[None]]) -> Reading[bool]:
    """Read ``[call, call, ...]``, and the white space that follows; whether it ends so."""
    source.pos += 1
    yield from _blank(source)
    while (yield from _block(source, call())):
        if (yield from _blank(source, also=",")) == "]":
            source.pos += 1
            yield from _blank(source)
            source.drop()
            return True
        source.drop()
    return False


def _json_list(source: Source) -> Reading[None]:
    """``[{"name": ..., "parameters": {...}}, ...]`` and nothing else: what a grammar makes a model write."""
    if (yield from _blank(source)) == "[":
        yield from _list(source, lambda: _json_call(source, known=True))
    else:
        source.unread()
    yield from _rest(source)


def _pythonic(source: Source) -> Reading[None]:
    """``[name(key=value, ...), ...]``: an answer that begins so, perhaps after ``<|python_start|>``."""
    if (yield from _blank(source)) == "<" and (yield from _takes(source, "<|python_start|>")):
        yield from _blank(source)
    if source.text.startswith("[", source.pos):
        yield from _list(source, lambda: _python_call(source, known=True))
        yield from _takes(source, "<|python_end|>")
        source.drop()
    else:
        source.unread()
    yield from _rest(source)


def _olmo3(source: Source) -> Reading[None]:
    """``<function_calls>name(key=value, ...)</function_calls>``, with one call a line."""
    while (yield from _content_until(source, "<function_calls>")):
        yield from _blank(source)
        while (yield from _block(source, _python_call(source, known=False))):
            if (yield from _takes(source, "</function_calls>")):
                yield from _blank(source)
                source.drop()
                break


class _JsonConstants(ast.NodeTransformer):
    """OLMo 3 writes values as JSON does."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _python_call(source: Source, known: bool) -> Reading[None]:
    while not (name := re.compile(r"[\w.]*(?=[^\w.])").match(source.text, source.pos)):
        if len(source.text) - source.pos > _MAX_NAME_CHARS:
            raise _NotACallError
        yield from source.more()
    source.pos = name.end()
    yield from _expect(source, "(")
    source.pos = name.end()
    text = name.group() + (yield from _Nesting(r"[\"'()\[\]{}]").read(source))
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise _NotACallError
        values = {str(each.arg): ast.literal_eval(_JsonConstants().visit(each.value)) for each in tree.keywords}
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise _NotACallError from None
    yield _call(source, name.group(), known)
    yield Arguments(arguments)


def _deepseek(source: Source) -> Reading[None]:
    """V3: ``function<|tool_sep|>name`` and the arguments as a block of code; V3.1: ``name<|tool_sep|>`` and the
    arguments. Each stands between the marks of a call, and all between those of the calls (with other bars)."""
    while (yield from _content_until(source, _CALLS_BEGIN, _CALL_BEGIN, _CALLS_END)):
        if source.text.startswith(_CALL_BEGIN):
            yield from _block(source, _deepseek_call(source))
        else:
            yield from _blank(source)
            source.drop()


_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALL_SEPARATOR = "<｜tool▁sep｜>"


def _deepseek_call(source: Source) -> Reading[None]:
    name, _ = yield from _until(source, _CALL_SEPARATOR, most=_MAX_NAME_CHARS)
    source.pos += len(_CALL_SEPARATOR)
    if (yield from _blank(source)) != "{":
        name, _ = yield from _until(source, "\n", "{", most=_MAX_NAME_CHARS)
    yield _call(source, name.strip(), known=False)
    yield from _until(source, "{")
    yield from _arguments(source)
    yield from _until(source, _CALL_END)
    source.pos += len(_CALL_END)


def _harmony(source: Source) -> Reading[None]:
    """Messages, each ``<|start|>assistant<|channel|>CHANNEL<|message|>text`` up to a mark of its end. The first has no
    ``<|start|>assistant``, which the prompt ends with. A call is a message ``to=functions.NAME``, which stands before
    or after the channel; the channel ``analysis`` is the reasoning. Text without a header is content."""
    kind: type[Content | Reasoning | Arguments] | None = Content
    shown: set[object] = set()
    in_header = yield from _recipient_in_front(source)
    while in_header or (yield from _shown_as(kind, shown, _content_until(source, *_HARMONY_MARKS))):
        ended = not in_header and source.text.startswith(_HARMONY_ENDS)
        in_header, kind = False, Content
        if not ended:
            try:
                kind = yield from _harmony_header(source)
            except _NotACallError:
                if source.ended:  # it was cut off
                    source.pos = len(source.text)
                else:
                    yield Content(source.read_text())
        source.drop()


_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", *_HARMONY_ENDS)
_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _recipient_in_front(source: Source) -> Reading[bool]:
    """Read ``to=RECIPIENT``, with which the first message's header begins where the recipient stands before the
    channel, up to the mark that follows. Reads nothing where there is none."""
    try:
        if (yield from _blank(source)) and (yield from _takes(source, "to=")):
            _, mark = yield from _until(source, *_HARMONY_MARKS, most=2 * _MAX_NAME_CHARS)
            if mark in ("<|channel|>", "<|message|>"):
                return True
    except _NotACallError:
        pass
    source.unread()
    return False


def _harmony_header(source: Source) -> Reading[type[Content | Reasoning | Arguments] | None]:
    """Read a header, which begins with the mark or the recipient that has been read. Returns what the message's text
    is, None for what follows a call's arguments."""
    header = source.text[: source.pos]
    if header != "<|message|>":
        rest, _ = yield from _until(source, "<|message|>", most=2 * _MAX_NAME_CHARS)
        source.pos += len("<|message|>")
        header += rest
    header = header.replace("<|channel|>", " <|channel|>")
    to, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    recipient = "" if to is None else to[1]
    name = recipient.removeprefix("functions.")
    if not source.tools or (name == recipient and name not in source.tools):
        return Reasoning if channel is not None and channel[1] == "analysis" else Content
    yield _call(source, name, known=False)
    source.drop()
    opening = yield from _blank(source)
    if opening == "{":
        yield from _arguments(source)
        return None
    if opening in ("", "<"):
        yield Arguments("{}")
        return None
    return Arguments


def _shown_as(
    kind: type[Content | Reasoning | Arguments] | None, shown: set[object], reading: Reading[T]
) -> Reading[T]:
    """``reading`` with its content as ``kind``; None: left out. Where there has been text of the kind, a blank line
    separates what follows from it."""
    first = True
    while True:
        try:
            found = next(reading)
        except StopIteration as end:
            result: T = end.value
            return result
        if found is None:
            yield None
        elif kind is not None and isinstance(found, Content) and found.text:
            yield kind(("\n\n" if first and kind in shown and kind is not Arguments else "") + found.text)
            first = False
            shown.add(kind)


class ArgumentTags(NamedTuple):
    """What stands around arguments that are tagged one by one: ``key_begin`` KEY ``key_end`` ``value_begin`` VALUE and
    the first of ``value_ends``, which is read, or left where it begins what follows. A text is written as it is, other
    values as JSON. ``own_line``: a line break at either end of a text is not part of it."""

    key_begin: str
    key_end: str
    value_begin: str
    value_ends: tuple[str, ...]
    own_line: bool


def _tagged_arguments(source: Source, name: str, tags: ArgumentTags) -> Reading[None]:
    """Read the arguments of a call of ``name`` as far as they go, and the white space that follows."""
    separator = "{"
    while (yield from _blank(source)) and (yield from _takes(source, tags.key_begin)):
        key, _ = yield from _until(source, tags.key_end)
        source.pos += len(tags.key_end)
        key = key.strip().strip('"')
        if tags.value_begin:
            yield from _blank(source)
            if not (yield from _takes(source, tags.value_begin)):
                break
        if tags.own_line:
            yield from _takes(source, "\n")
        source.drop()
        yield Arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        kinds = _types(source.tools.get(name, {}), key)
        if kinds == {"string"}:
            yield from _tagged_text(source, tags)
        else:
            text, _ = yield from _until(source, *tags.value_ends)
            yield Arguments(_typed(text.strip(), kinds))
        yield from _takes(source, tags.value_ends[0])
        source.drop()
    yield Arguments("{}" if separator == "{" else "}")


def _tagged_text(source: Source, tags: ArgumentTags) -> Reading[None]:
    """Pass on a text that stands between tags as a JSON string while it arrives."""
    yield Arguments('"')
    line = "\n" if tags.own_line else ""
    end = re.compile(f"(?:{line})?(?:" + "|".join(map(re.escape, tags.value_ends)) + ")")
    while True:
        found = end.search(source.text)
        if found:
            source.pos = found.start()
        else:
            source.pos = len(source.text) - max(
                _begun(source.text, first + mark) for mark in tags.value_ends for first in ("", line)
            )
        if source.pos:
            yield Arguments(json.dumps(source.text[: source.pos], ensure_ascii=False)[1:-1])
        source.drop()
        if found:
            yield Arguments('"')
            if tags.own_line:
                yield from _takes(source, "\n")
            return
        yield from source.more()


def _qwen3_coder(source: Source, tag: str = "tool_call>") -> Reading[None]:
    """``<function=name><parameter=key>value</parameter>...</function>``, usually between a ``tag`` and its end."""
    while (yield from _content_until(source, f"<{tag}", "<function=")):
        yield from _block(source, _qwen3_coder_call(source, tag))


_QWEN3_CODER_TAGS = ArgumentTags("<parameter=", ">", "", ("</parameter>", "<parameter=", "</function>"), own_line=True)


def _qwen3_coder_call(source: Source, tag: str) -> Reading[None]:
    if source.text.startswith(f"<{tag}"):
        yield from _blank(source)
        yield from _expect(source, "<function=")
    name, _ = yield from _until(source, ">", most=_MAX_NAME_CHARS)
    source.pos += 1
    name = name.strip()
    yield _call(source, name, known=False)
    yield from _tagged_arguments(source, name, _QWEN3_CODER_TAGS)
    yield from _takes(source, "</function>")
    yield from _blank(source)
    yield from _takes(source, f"</{tag}")


def _glm(source: Source) -> Reading[None]:
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>``, perhaps in lines."""
    while (yield from _content_until(source, "<tool_call>")):
        yield from _block(source, _glm_call(source))


_GLM_TAGS = ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", ("</arg_value>",), own_line=False)


def _glm_call(source: Source) -> Reading[None]:
    yield from _blank(source)
    name, _ = yield from _until(source, "\n", "<", most=_MAX_NAME_CHARS)
    yield from _blank(source)
    for mark in (_GLM_TAGS.key_begin, "</tool_call>"):
        if (yield from _takes(source, mark)):
            source.pos -= len(mark)
            break
    else:
        raise _NotACallError
    yield _call(source, name.strip(), known=False)
    yield from _tagged_arguments(source, name.strip(), _GLM_TAGS)
    yield from _takes(source, "</tool_call>")


def _minimax(source: Source) -> Reading[None]:
    """``<invoke name="name"><parameter name="key">value</parameter>...</invoke>`` for each call, and all between the
    tags of ``minimax:tool_call``."""
    while (yield from _content_until(source, "<minimax:tool_call>")):
        yield from _blank(source)
        while (yield from _block(source, _minimax_call(source))):
            if (yield from _takes(source, "</minimax:tool_call>")):
                yield from _blank(source)
                source.drop()
                break


_MINIMAX_TAGS = ArgumentTags("<parameter name=", ">", "", ("</parameter>",), own_line=False)


def _minimax_call(source: Source) -> Reading[None]:
    yield from _expect(source, "<invoke name=")
    name, _ = yield from _until(source, ">", most=_MAX_NAME_CHARS)
    source.pos += 1
    name = name.strip().strip('"')
    yield _call(source, name, known=False)
    yield from _tagged_arguments(source, name, _MINIMAX_TAGS)
    yield from _takes(source, "</invoke>")


def _types(function: JsonObject, key: str) -> set[object]:
    """The JSON types that the function's schema names for the argument ``key``; a string if it names none."""
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    value = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(value, Mapping):
        return {"string"}
    found: set[object] = set()
    options = value.get("anyOf")
    for option in options if isinstance(options, list) else [value]:
        kinds = option.get("type", "any") if isinstance(option, Mapping) else "any"
        found.update(str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds]))
    return found


def _typed(text: str, kinds: set[object]) -> str:
    """The JSON value that ``text`` stands for; a string if it is no JSON, or only a string fits ``kinds``."""
    plain = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value = json.loads(plain, parse_constant=_refuse_constant)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        value = plain = text
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    fits = kinds & {"any", *_TYPES[type(value)]}
    return plain if fits or "string" not in kinds else json.dumps(text, ensure_ascii=False)


_TYPES: Mapping[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _mistral_id() -> str:
    return uuid.uuid4().hex[:9]  # its templates refuse ids of any other form


_FORMATS: Mapping[str, ToolCallFormat] = {
    "seed_oss": ToolCallFormat(
        partial(_qwen3_coder, tag="seed:tool_call>"), ("<seed:tool_call>",), ("<seed:tool_call>",)
    ),
    "qwen3_coder": ToolCallFormat(_qwen3_coder, ("<function=",), ("<tool_call>", "<function=")),
    "glm45": ToolCallFormat(_glm, ("<arg_key>",), ("<tool_call>",)),
    "granite": ToolCallFormat(_granite, ("<|tool_call|>",), ("<|tool_call|>", "<tool_call>"), has_special_tokens=True),
    "minimax-m2": ToolCallFormat(_minimax, ("<minimax:tool_call>",), ("<minimax:tool_call>",)),
    "qwen25": ToolCallFormat(_hermes, ("<tool_call>",), ("<tool_call>",), texts=_HERMES_TEXTS),
    "hermes": ToolCallFormat(_hermes, (), ("<tool_call>",), texts=_HERMES_TEXTS),
    "mistral": ToolCallFormat(
        _mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), has_special_tokens=True, make_id=_mistral_id
    ),
    "deepseekv3": ToolCallFormat(_deepseek, (_CALLS_BEGIN,), (_CALLS_BEGIN,), has_special_tokens=True),
    "deepseekv31": ToolCallFormat(_deepseek, (), (_CALLS_BEGIN,), has_special_tokens=True),
    "pythonic": ToolCallFormat(
        _pythonic, ("<|python_start|>", "[func_name1(param"), ("<|python_start|>", "[NAME("), has_special_tokens=True
    ),
    "olmo3": ToolCallFormat(_olmo3, ("<function_calls>",), ("<function_calls>",)),
    "gpt-oss": ToolCallFormat(_harmony, ("<|channel|>",), (), has_special_tokens=True, reads_reasoning=True),
    "llama3": ToolCallFormat(
        _llama3,
        ("<|python_tag|>", '"parameters": dictionary of argument name'),
        ("<|python_tag|>", '{"name": "NAME", "parameters": {'),
        has_special_tokens=True,
    ),
}
# What SGLang and vLLM call them besides.
_ALSO_CALLED = {
    "qwen": "qwen25",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "glm": "glm45",
    "glm47": "glm45",
    "minimax_m2": "minimax-m2",
    "openai": "gpt-oss",
}
TOOL_CALL_FORMATS = {**_FORMATS, **{name: _FORMATS[own] for name, own in _ALSO_CALLED.items()}}
JSON_CALLS = ToolCallFormat(_json_list, (), ())


def tool_call_format_of(template: str) -> str | None:
    """The format whose marks a chat template contains."""
    for name, form in _FORMATS.items():
        if any(mark in template for mark in form.marks):
            return name
    return None
