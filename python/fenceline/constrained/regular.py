"""Regular expressions of texts within JSON, rewritten as those that the grammar library enforces.

The library takes no length beside a pattern, and reads some patterns wrongly: to it ``(x[0-9]+)?`` matches ``5``. A
pattern is read here and written as one that it reads rightly; a limit of the length becomes limits of its repetitions.
The result never matches more than what was asked for. It matches less in two cases: where several parts of a text have
no fixed length, its limit is divided among them, and a class that has ordinary characters does not match those that
JSON escapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_LAST = 0x10FFFF
_MAX_PATTERN = 1 << 16
_SMALL = 8  # characters of one repetition that are not limited themselves
_MOST_OF_MANY = 128  # characters of a part without a limit, where several parts share one: each takes a state

Ranges = tuple[tuple[int, int], ...]  # of code points, ascending, apart from each other


@dataclass(frozen=True, slots=True)
class Chars:
    """One character."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """One part after the other."""

    parts: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Any of the parts."""

    parts: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``part``, ``least`` to ``most`` times; None: any number."""

    part: Term
    least: int
    most: int | None


Term = Chars | Seq | Alt | Repeat
_EMPTY, _NOTHING = Seq(()), Alt(())
_ALL = Repeat(Chars(((0, _LAST),)), 0, None)
# What JSON writes as it is, and what it escapes with one letter.
_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))
_ESCAPED = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}


def within(pattern: str, least: int = 0, most: int | None = None, is_whole: bool = True) -> str:
    """A pattern for the texts of ``least`` to ``most`` characters that match ``pattern``, as JSON writes them: as a
    whole, or where its anchors say. Raises ValueError if that is not possible, or no text matches."""
    limited = _limited(_read(pattern, is_whole), least, most)
    if limited == _NOTHING:
        raise ValueError("no text of that length matches it")
    text = _written(limited)
    if len(text) > _MAX_PATTERN:
        raise ValueError("it is too long: simplify it")
    return text


def matches(pattern: str, text: str) -> bool:
    """Whether ``pattern`` matches somewhere in ``text``. Raises ValueError for what is no pattern."""
    return re.fullmatch(_of_python(_read(pattern, is_whole=False)), text) is not None


def check_pattern(pattern: str) -> None:
    """Raise ValueError with the reason if the library would refuse a construct, or read it as something else: it
    ignores anchors in the middle, and takes unknown escapes for their letter."""
    _Parser(pattern).whole()


def _of_python(term: Term) -> str:
    match term:
        case Chars():
            return "[" + "".join(rf"\U{low:08x}-\U{high:08x}" for low, high in term.ranges) + "]"
        case Seq():
            return "".join(map(_of_python, term.parts))
        case Alt():
            return f"(?:{'|'.join(map(_of_python, term.parts))})"
        case Repeat():
            most = "" if term.most is None else term.most
            return f"(?:{_of_python(term.part)}){{{term.least},{most}}}"


# --- making terms


def _seq(*parts: Term) -> Term:
    flat: list[Term] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Seq) else (part,))
    if _NOTHING in flat:
        return _NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def _any_of(parts: Iterable[Term]) -> Term:
    flat = dict.fromkeys(one for part in parts for one in (part.parts if isinstance(part, Alt) else (part,)))
    if _EMPTY in flat and len(flat) > 1:
        del flat[_EMPTY]
        return _repeat(_any_of(flat), 0, 1)
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def _repeat(part: Term, least: int, most: int | None) -> Term:
    if most == 0 or part == _EMPTY:
        return _EMPTY
    if part == _NOTHING:
        return _NOTHING if least else _EMPTY
    if (least, most) == (1, 1):
        return part
    if isinstance(part, Repeat) and part.least in (0, 1) and part.most is None and least <= 1:
        return Repeat(part.part, min(part.least, least), None)
    return Repeat(part, least, most)


# --- sets of characters


def _union(one: Ranges, other: Ranges) -> Ranges:
    made: list[tuple[int, int]] = []
    for low, high in sorted((*one, *other)):
        if made and low <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], high))
        else:
            made.append((low, high))
    return tuple(made)


def _complement(ranges: Ranges) -> Ranges:
    made, begin = [], 0
    for low, high in ranges:
        if begin < low:
            made.append((begin, low - 1))
        begin = high + 1
    return (*made, (begin, _LAST)) if begin <= _LAST else tuple(made)


def _both(one: Ranges, other: Ranges) -> Ranges:
    return _complement(_union(_complement(one), _complement(other)))


_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
_ASCII: Ranges = ((0, 0x7F),)
# The opposites leave out characters that some implementations count as a digit, a letter or white space.
_CLASSES: dict[str, Ranges] = {
    "d": _DIGITS, "w": _WORD, "s": _SPACE, "D": _both(_complement(_DIGITS), _ASCII),
    "W": _both(_complement(_WORD), _ASCII),
    "S": _complement(_union(_SPACE, ((0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)))),
}  # fmt: skip
_DOT = _complement(((10, 10), (13, 13), (0x85, 0x85), (0x2028, 0x2029)))
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_HEX_DIGITS = {"x": 2, "u": 4}


# --- reading


def _read(pattern: str, is_whole: bool) -> Term:
    branches = _Parser(pattern).whole()
    if is_whole:
        return _any_of(term for _, term, _ in branches)
    return _any_of(_seq(_EMPTY if begins else _ALL, term, _EMPTY if ends else _ALL) for begins, term, ends in branches)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> list[tuple[bool, Term, bool]]:
        """The alternatives of the whole pattern, each with whether ``^`` is before it and ``$`` after it."""
        made: list[tuple[bool, Term, bool]] = []
        while not made or self._taken("|"):
            begins, term, ends = self._taken("^"), self._sequence(), self._taken("$")
            made.append((begins, term, ends))
        if self._at < len(self._pattern):
            is_closed = self._pattern[self._at] == ")"
            raise self._error("a parenthesis too many" if is_closed else "$ is only possible at the end")
        return made

    def _alternatives(self) -> Term:
        self._depth += 1
        if self._depth > 50:
            raise self._error("groups may be nested 50 deep")
        branches = [self._sequence()]
        while self._taken("|"):
            branches.append(self._sequence())
        self._depth -= 1
        return _any_of(branches)

    def _sequence(self) -> Term:
        parts: list[Term] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)$":
            parts.append(self._quantified(self._atom()))
        return _seq(*parts) if parts else _EMPTY

    def _atom(self) -> Term:
        char = self._pattern[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(_DOT)
            case "^":
                raise self._error("^ is only possible at the beginning, outside of groups")
            case "\\":
                return Chars(self._escape())
            case "*" | "+" | "?":
                raise self._error(f"nothing before {char} to repeat")
        return Chars(((ord(char), ord(char)),))

    def _group(self) -> Term:
        if self._taken("?"):
            rest = self._pattern[self._at :]
            if rest.startswith(":"):
                self._at += 1
            elif rest.startswith(("P<", "<")) and not rest.startswith(("<=", "<!")) and ">" in rest:
                self._at += rest.index(">") + 1
            else:
                raise self._error("only groups of the kinds (...), (?:...) and (?<name>...) are enforced")
        part = self._alternatives()
        if self._pattern.startswith("$", self._at):
            raise self._error("$ is only possible at the end, outside of groups")
        if not self._taken(")"):
            raise self._error("a parenthesis is not closed")
        return part

    def _quantified(self, part: Term) -> Term:
        rest = self._pattern[self._at :]
        least, length = 1, 0
        most: int | None = 1
        if rest[:1] in ("*", "+", "?"):
            least, most, length = {"*": (0, None, 1), "+": (1, None, 1), "?": (0, 1, 1)}[rest[0]]
        elif rest.startswith("{") and (end := rest.find("}")) > 0:
            low, comma, high = rest[1:end].partition(",")
            if f"{low}{high or 0}".isdecimal() and low and rest[1:end].isascii():
                if end > 20:
                    raise self._error("the numbers of a repetition are too large")
                least, length = int(low), end + 1
                most = int(high) if high else None if comma else least
                if most is not None and most < least:
                    raise self._error(f"{{{rest[1:end]}}} is not a range")
        if not length:
            return part
        self._at += length
        self._taken("?")  # which of several matches is found first does not matter
        return _repeat(part, least, most)

    def _class(self) -> Ranges:
        is_negative = self._taken("^")
        if self._pattern.startswith("]", self._at):
            raise self._error("write ] in a class as \\]")
        members: list[tuple[int, int]] = []
        while not self._taken("]"):
            if self._at >= len(self._pattern):
                raise self._error("a class is not closed")
            low = self._member()
            if self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._member()
                if low[0][0] != low[-1][1] or high[0][0] != high[-1][1] or low > high:
                    raise self._error("a range of a class is not one")
                low = ((low[0][0], high[0][0]),)
            members += low
        ranges = _union(tuple(members), ())
        return _complement(ranges) if is_negative else ranges

    def _member(self) -> Ranges:
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        if char == "\\":
            return self._escape()
        if not char:
            raise self._error("a class is not closed")
        return ((ord(char), ord(char)),)

    def _escape(self) -> Ranges:
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        rest = self._pattern[self._at :]
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _HEX_DIGITS:
            is_long = char == "u" and rest.startswith("{")
            digits = rest[1:].partition("}")[0] if is_long else rest[: _HEX_DIGITS[char]]
            is_whole = 0 < len(digits) <= 6 if is_long else len(digits) == _HEX_DIGITS[char]
            if not is_whole or not all(one in "0123456789abcdefABCDEF" for one in digits):
                raise self._error(f"\\{char} takes {_HEX_DIGITS[char]} hexadecimal digits")
            self._at += len(digits) + 2 * is_long
            code = int(digits, 16)
        elif char in _CONTROLS:
            code = _CONTROLS[char]
        elif not char or char.isalnum():
            raise self._error(f"\\{char} is not possible")
        else:
            code = ord(char)
        if code > _LAST:
            raise self._error(f"\\{char} is no character")
        return ((code, code),)

    def _taken(self, char: str) -> bool:
        found = self._pattern.startswith(char, self._at)
        self._at += found
        return found

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"the regular expression {self._pattern[:60]!r}: {reason}")


# --- lengths


def _lengths(term: Term) -> tuple[int, int | None]:
    """The smallest and the largest number of characters, None for any."""
    match term:
        case Chars():
            return 1, 1
        case Seq():
            parts = [_lengths(part) for part in term.parts]
            most = [high for _, high in parts]
            return sum(low for low, _ in parts), None if None in most else sum(high or 0 for high in most)
        case Alt():
            parts = [_lengths(part) for part in term.parts]
            most = [high for _, high in parts]
            least = min((low for low, _ in parts), default=0)
            return least, None if None in most else max((high or 0 for high in most), default=0)
        case Repeat():
            low, high = _lengths(term.part)
            if term.most is None or high is None:
                return low * term.least, 0 if high == 0 else None
            return low * term.least, high * term.most
    raise AssertionError(term)


def _limited(term: Term, least: int, most: int | None) -> Term:
    """A term for texts of ``term`` that have ``least`` to ``most`` characters."""
    low, high = _lengths(term)
    if low >= least and (most is None or (high is not None and high <= most)):
        return term
    if (most is not None and low > most) or (high is not None and high < least):
        return _NOTHING
    match term:
        case Alt():
            return _any_of([_limited(part, least, most) for part in term.parts])
        case Repeat():
            return _limited_repeat(term, least, most)
        case Seq():
            return _limited_sequence(term, least, most)
    return _NOTHING


def _limited_repeat(term: Repeat, least: int, most: int | None) -> Term:
    low, high = _lengths(term.part)
    if least and low == 0:  # empty ones add nothing
        term = Repeat(_limited(term.part, 1, None), 0, term.most)
        low, high = _lengths(term.part)
    if high is not None and high <= _SMALL:
        count = term.most if most is None else min(most // high, math.inf if term.most is None else term.most)
        fewest = max(term.least, -(-least // max(low, 1)))
        if count is None or fewest <= count:
            return _repeat(term.part, fewest, None if count is None else int(count))
    # Long repetitions: some of them, each of them limited.
    count = max(term.least, 1)
    share = None if most is None else most // count
    wanted = -(-least // count)
    part = _limited(term.part, wanted, share)
    fewest = term.least if not wanted else count
    if most is None:
        return _repeat(part, fewest, term.most)
    high = _lengths(part)[1] or 1
    room = max(count, most // high)
    return _repeat(part, fewest, room if term.most is None else min(room, term.most))


def _limited_sequence(term: Seq, least: int, most: int | None) -> Term:
    bounds = [_lengths(part) for part in term.parts]
    highs: list[int | None] = [high for _, high in bounds]
    shortest = sum(low for low, _ in bounds)
    if most is not None:
        room = most - shortest
        # The smallest needs first: what they leave is for the others.
        order = sorted(
            range(len(bounds)), key=lambda i: math.inf if (high := bounds[i][1]) is None else high - bounds[i][0]
        )
        for done, index in enumerate(order):
            low, high = bounds[index]
            share = room // (len(order) - done)
            if high is None and sum(after is None for _, after in bounds) > 1:
                share = min(share, _MOST_OF_MANY)
            taken = share if high is None else min(share, high - low)
            highs[index] = low + taken
            room -= taken
    lows = [low for low, _ in bounds]
    missing = least - sum(lows)
    order = sorted(range(len(bounds)), key=lambda i: -(math.inf if (high := highs[i]) is None else high - lows[i]))
    for index in order:
        if missing <= 0:
            break
        high = highs[index]
        more = missing if high is None else min(missing, high - lows[index])
        lows[index] += more
        missing -= more
    return _seq(*[_limited(part, lows[i], highs[i]) for i, part in enumerate(term.parts)])


# --- writing


def _written(term: Term) -> str:
    match term:
        case Chars():
            return _class_text(term.ranges)
        case Seq():
            return "".join(f"(?:{_written(one)})" if isinstance(one, Alt) else _written(one) for one in term.parts)
        case Alt():
            branches = [text for one in term.parts if (text := _apart(one)) is not None]
            if not branches:
                raise ValueError("it needs characters that a JSON text cannot have")
            return "|".join(branches)
        case Repeat():
            inner = _apart(term.part)
            if inner is None:
                if term.least:
                    raise ValueError("it needs characters that a JSON text cannot have")
                return ""
            inner = inner if inner.startswith("[") else f"(?:{inner})"
            return f"{inner}{{{term.least},{'' if term.most is None else term.most}}}"
    raise AssertionError(term)


def _apart(term: Term) -> str | None:
    """``term`` as an alternative or a part that is repeated; None if JSON has no such text. The empty groups around it
    give it a beginning and an end of its own: the library would merge them with those of what surrounds it, and go back
    to where a repetition is, or past it."""
    try:
        text = _written(term)
    except ValueError:
        return None
    if isinstance(term, Chars) and text.startswith("["):
        return text
    return f"(?:)(?:{text})(?:)" if isinstance(term, Alt) else f"(?:){text}(?:)"


def _class_text(ranges: Ranges) -> str:
    plain = _both(ranges, _PLAIN)
    if plain:
        return "[" + "".join(f"{_shown(low)}-{_shown(high)}" for low, high in plain) + "]"
    escaped = [sign for code, sign in _ESCAPED.items() if any(low <= code <= high for low, high in ranges)]
    if not escaped:
        raise ValueError("it needs characters that a JSON text cannot have")
    backslash = _shown(0x5C)
    return f"[{backslash}-{backslash}][{''.join(_shown(ord(sign)) for sign in escaped)}]"


def _shown(code: int) -> str:
    return f"\\u{{{code:X}}}"
