"""--tool-call-parser: finds the tool calls in a model's output, for whole outputs and for streams.

Each format is a generator that reads the output from front to back: it yields what it has found, and None where it
needs more text. Text is passed on as early as possible; only what may still turn out to begin a call, or to be the
white space around one, is kept back. The result does not depend on how the text was cut into chunks. Text that begins
like a call and turns out to be none is content. A call that the output's end cuts off keeps the arguments that there
are, as OpenAI clients expect of an answer that reached its limit.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the function ``name`` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the latest call's arguments."""

    text: str


Found = Content | CallBegun | Arguments
T = TypeVar("T")
# What a piece of a format is: it yields what it has found, None for more text, and returns a T.
Reading = Generator[Found | None, None, T]


_FEED_CHARS = 4096
_MAX_NAME_CHARS = 128


class _NotACallError(Exception):
    """The text is not what the format has here, or ends too early."""


class Source:
    """The output as far as it has arrived. ``text[pos:]`` is to be read; ``text[:pos]`` is kept as long as it may turn
    out to be content."""

    __slots__ = ("begun", "blank", "ended", "pos", "text", "tools")

    def __init__(self, tools: Mapping[str, JsonObject]) -> None:
        """``tools``: the request's functions by name."""
        self.text = ""
        self.pos = 0
        self.ended = False
        self.begun = False  # the call that is being read is one for certain
        self.blank = ""  # the white space in front of ``text``
        self.tools = tools

    def drop(self) -> None:
        """What has been read is no longer needed."""
        self.text = self.text[self.pos :]
        self.pos = 0
        self.blank = ""

    def more(self) -> Reading[None]:
        """Wait for more text. Raises _NotACallError if there will be none."""
        if self.ended:
            raise _NotACallError
        yield None


class CallTexts(NamedTuple):
    """What stands around a call's name, which is written as it is, and its arguments, which are JSON. ``mark`` is how
    ``before_name`` begins, and nothing but a call."""

    mark: str
    before_name: str
    before_arguments: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes its calls.

    ``marks``: texts in a chat template that tell the format. ``has_special_tokens``: its marks are special tokens,
    which the output must contain then. ``make_id`` makes the id of a call. ``texts``: None where a grammar cannot tell
    by text alone that a call begins, or where its arguments are no JSON.
    """

    read: Callable[[Source], Reading[None]]
    marks: tuple[str, ...]
    has_special_tokens: bool = False
    texts: CallTexts | None = None
    make_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser:
    """The state of one output. Feed it all text in order, then call :meth:`finish` once."""

    __slots__ = ("_events", "_source", "make_id")

    def __init__(self, form: ToolCallFormat, tools: Mapping[str, JsonObject]) -> None:
        """``tools``: the request's functions by name, as OpenAI's ``function`` objects."""
        self.make_id = form.make_id
        self._source = Source(tools)
        self._events = form.read(self._source)

    def feed(self, text: str) -> list[Found]:
        """Add ``text``; returns what it brings."""
        found: list[Found] = []
        for first in range(0, len(text), _FEED_CHARS):  # reading copies what is left of a piece at each mark
            self._source.text += text[first : first + _FEED_CHARS]
            found += self._read()
        return found

    def finish(self) -> list[Found]:
        """What was kept back. No more text comes after this."""
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

    White space in front of a mark belongs to neither.
    """
    begin = re.compile("|".join(map(re.escape, marks)))
    blank = ""
    while True:
        mark = begin.search(source.text, source.pos)
        if mark is not None:
            end = mark.start()
        elif source.ended:
            end = len(source.text)
        else:
            end = len(source.text) - max(_begun(source.text, mark) for mark in marks)
        text = blank + source.text[source.pos : end]
        shown = text.rstrip() if mark is not None or not source.ended else text
        if shown:
            yield Content(shown)
        blank = text[len(shown) :]
        source.pos = end
        source.drop()
        if mark is not None:
            source.pos, source.blank = len(mark.group()), blank
            return True
        if source.ended:
            return False
        yield None


def _rest(source: Source) -> Reading[None]:
    """All that is left is content."""
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
        yield None


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
    start = first
    while True:
        found = begin.search(source.text, start)
        if found:
            source.pos = found.start()
            return source.text[first : found.start()], found.group()
        if most is not None and len(source.text) - first > most + longest:
            raise _NotACallError
        start = max(first, len(source.text) - longest + 1)  # what was searched is not searched again
        yield from source.more()


_STRING_PART = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "\"'"}
_SCALAR_END = re.compile(r"[\s,\]}]")


class _Nesting:
    """Finds the end of something in brackets that arrives in pieces, without checking its inside."""

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
        first, done = source.pos, False
        while True:
            source.pos, done = self.advance(source.text, source.pos)
            if done:
                return source.text[first : source.pos]
            yield from source.more()


def _string_end(text: str, pos: int, quote: str) -> int:
    """Where the inside of a string ends, or as far as it has arrived, without half an escape."""
    part = _STRING_PART[quote].match(text, pos)
    assert part is not None  # it matches nothing at least
    return part.end()


def _string(source: Source) -> Reading[str]:
    """Read a JSON string; returns its value."""
    first = source.pos
    yield from _expect(source, '"')
    while True:
        source.pos = _string_end(source.text, source.pos, '"')
        if source.text.startswith('"', source.pos):
            break
        yield from source.more()
    source.pos += 1
    try:
        value = str(json.loads(source.text[first : source.pos], strict=False))
        value.encode()  # half of a surrogate pair cannot be sent
    except ValueError:
        raise _NotACallError from None
    return value


def _value(source: Source) -> Reading[str]:
    """Read a JSON value; returns its text."""
    first = source.pos
    if source.text[first] in "{[":
        return (yield from _Nesting().read(source))
    if source.text[first] == '"':
        yield from _string(source)
    else:
        while not (end := _SCALAR_END.search(source.text, source.pos)):
            source.pos = len(source.text)
            yield from source.more()
        source.pos = end.start()
    return source.text[first : source.pos]


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
        if source.pos and not source.begun:
            yield Content(source.blank + source.text[: source.pos])
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
            text = yield from (
                _string(source) if opening == '"' else _value(source)
            )  # or the object in a string
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


def _llama3(source: Source) -> Reading[None]:
    """``{"name": ..., "parameters": {...}}``, with ``;`` between calls: an answer that begins so, or what follows
    ``<|python_tag|>``."""
    if (yield from _blank(source)) == "{":
        yield from _llama3_calls(source, known=True)
    else:
        source.pos = 0
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


def _list(source: Source, call: Callable[[], Reading[None]]) -> Reading[None]:
    """Read ``[call, call, ...]``."""
    source.pos += 1
    yield from _blank(source)
    while (yield from _block(source, call())):
        if (yield from _blank(source, also=",")) == "]":
            source.pos += 1
            yield from _blank(source)
            source.drop()
            return
        source.drop()


def _json_list(source: Source) -> Reading[None]:
    """``[{"name": ..., "parameters": {...}}, ...]`` and nothing else: what a grammar makes a model write."""
    if (yield from _blank(source)) == "[":
        yield from _list(source, lambda: _json_call(source, known=True))
    else:
        source.pos = 0
    yield from _rest(source)


def _pythonic(source: Source) -> Reading[None]:
    """``[name(key=value, ...), ...]``: an answer that begins so, perhaps after ``<|python_start|>``."""
    if (yield from _blank(source)) == "<" and (yield from _takes(source, "<|python_start|>")):
        yield from _blank(source)
    if source.text.startswith("[", source.pos):
        yield from _list(source, lambda: _python_call(source))
        yield from _takes(source, "<|python_end|>")
        source.drop()
    else:
        source.pos = 0
    yield from _rest(source)


def _python_call(source: Source) -> Reading[None]:
    first = source.pos
    while not (name := re.compile(r"[\w.]*(?=[^\w.])").match(source.text, first)):
        if len(source.text) - first > _MAX_NAME_CHARS:
            raise _NotACallError
        yield from source.more()
    source.pos = name.end()
    yield from _expect(source, "(")
    source.pos = name.end()
    yield from _Nesting(r"[\"'()\[\]{}]").read(source)
    try:
        tree = ast.parse(source.text[first : source.pos], mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            raise _NotACallError
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise _NotACallError from None
    yield _call(source, name.group(), known=True)
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


def _qwen3_coder(source: Source) -> Reading[None]:
    """``<function=name><parameter=key>value</parameter>...</function>``, usually between the tags of ``tool_call``."""
    while (yield from _content_until(source, "<tool_call>", "<function=")):
        yield from _block(source, _tagged_call(source))


def _tagged_call(source: Source) -> Reading[None]:
    if source.text.startswith("<tool_call>"):
        yield from _blank(source)
        yield from _expect(source, "<function=")
    name, _ = yield from _until(source, ">", most=_MAX_NAME_CHARS)
    source.pos += 1
    name = name.strip()
    yield _call(source, name, known=False)
    separator = "{"
    while (yield from _blank(source)) and (yield from _takes(source, "<parameter=")):
        key, _ = yield from _until(source, ">")
        source.pos += 1
        yield from _takes(source, "\n")
        source.drop()
        yield Arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        kinds = _types(source.tools.get(name, {}), key)
        if kinds == {"string"}:
            yield from _tagged_text(source)
        else:
            text, _ = yield from _until(source, *_VALUE_ENDS)
            yield Arguments(_typed(text.strip(), kinds))
        yield from _takes(source, "</parameter>")
        source.drop()
    yield Arguments("{}" if separator == "{" else "}")
    yield from _takes(source, "</function>")
    yield from _blank(source)
    yield from _takes(source, "</tool_call>")


_VALUE_ENDS = ("</parameter>", "<parameter=", "</function>")


def _tagged_text(source: Source) -> Reading[None]:
    """Pass on a text that stands between tags as a JSON string while it arrives, without the line break before the
    end."""
    yield Arguments('"')
    end = re.compile("\n?(?:" + "|".join(_VALUE_ENDS) + ")")
    while True:
        found = end.search(source.text)
        if found:
            source.pos = found.start()
        else:
            source.pos = len(source.text) - max(
                _begun(source.text, first + mark) for mark in _VALUE_ENDS for first in ("", "\n")
            )
        if source.pos:
            yield Arguments(json.dumps(source.text[: source.pos], ensure_ascii=False)[1:-1])
        source.drop()
        if found:
            yield Arguments('"')
            yield from _takes(source, "\n")
            return
        yield from source.more()


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


# SGLang's names, and vLLM's where they differ.
TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    "qwen3_coder": ToolCallFormat(_qwen3_coder, ("<function=",)),
    "qwen25": ToolCallFormat(_hermes, ("<tool_call>",), texts=_HERMES_TEXTS),
    "hermes": ToolCallFormat(_hermes, (), texts=_HERMES_TEXTS),
    "mistral": ToolCallFormat(_mistral, ("[TOOL_CALLS]",), has_special_tokens=True, make_id=_mistral_id),
    "deepseekv3": ToolCallFormat(_deepseek, (_CALLS_BEGIN,), has_special_tokens=True),
    "deepseekv31": ToolCallFormat(_deepseek, (), has_special_tokens=True),
    "pythonic": ToolCallFormat(
        _pythonic, ("<|python_start|>", "[func_name1(params_name1="), has_special_tokens=True
    ),
    "llama3": ToolCallFormat(
        _llama3, ("<|python_tag|>", '"parameters": dictionary of argument name'), has_special_tokens=True
    ),
}
JSON_CALLS = ToolCallFormat(_json_list, ())


def tool_call_format_of(template: str) -> str | None:
    """The format whose marks a chat template contains."""
    for name, form in TOOL_CALL_FORMATS.items():
        if any(mark in template for mark in form.marks):
            return name
    return None
