"""Regular expressions of texts within JSON, rewritten as those that the grammar library enforces.

The library knows no look-aheads, takes one pattern for a text and none beside a length, and reads some wrongly: to it
``(x[0-9]+)?`` matches ``5``. A pattern is read here and written as one that it reads rightly. Look-aheads and
several patterns become intersections and complements, which a deterministic automaton replaces by an ordinary
expression again (the states are derivatives of the expression). A limit of the length then becomes limits of its
repetitions. The result never matches more than what was asked for. It matches less in two cases: where several parts of
a text have no fixed length, its limit is divided among them (unless it leaves few characters), and a class that has
ordinary characters does not match those that JSON escapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LAST = 0x10FFFF
_MAX_STATES, _MAX_SIZE, _MAX_PATTERN = 200, 4000, 1 << 16
_SMALL = 8  # characters of one repetition that are not limited themselves
_FEW = 16  # more or fewer characters, for which each length of two or three parts is written out
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


@dataclass(frozen=True, slots=True)
class And:
    """All of the parts match the same text."""

    parts: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """Every text that ``part`` does not match."""

    part: Term


@dataclass(frozen=True, slots=True)
class Look:
    """A look-ahead, of which :func:`_resolved` makes an intersection."""

    part: Term
    is_negative: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """``^``, for which :func:`_begun` puts what it says."""


@dataclass(frozen=True, slots=True)
class End:
    """``$``."""


Term = Chars | Seq | Alt | Repeat | And | Not | Look | Begin | End
_EMPTY, _NOTHING = Seq(()), Alt(())
_ANY = Chars(((0, _LAST),))
_ALL = Repeat(_ANY, 0, None)
# What JSON writes as it is, and what it escapes with one letter.
_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))
_ESCAPED = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}


def within(
    patterns: Sequence[str], least: int = 0, most: int | None = None, is_whole: bool | None = None
) -> str:
    """A pattern for the texts of ``least`` to ``most`` characters that match all ``patterns``, as JSON writes them. A
    single pattern has to match the whole text; each of several where its anchors say, unless ``is_whole`` decides.
    Raises ValueError if that is not possible, or no text matches."""
    terms = []
    for pattern in patterns:
        term, low, high = _read(pattern, len(patterns) == 1 if is_whole is None else is_whole)
        terms.append(term)
        least, most = max(least, low), min((one for one in (most, high) if one is not None), default=None)
    term = _plain(_all_of(terms))
    limited = _limited(term, least, most)
    if limited == _NOTHING:
        raise ValueError("no text matches it" if term == _NOTHING else "no text of that length matches it")
    text = _written(limited)
    if len(text) > _MAX_PATTERN:
        raise ValueError("it is too long: simplify it")
    return text


def matches(pattern: str, text: str) -> bool:
    """Whether ``pattern`` matches somewhere in ``text``, as its anchors say. Raises ValueError for what is no
    pattern."""
    term, least, most = _read(pattern, is_whole=False)
    if not least <= len(text) <= (len(text) if most is None else most):
        return False
    for char in text:
        term = _derivative(term, ord(char))
    return _is_nullable(term)


# --- making terms


def _seq(*parts: Term) -> Term:
    flat: list[Term] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Seq) else (part,))
    if _NOTHING in flat:
        return _NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def _any_of(parts: Iterable[Term]) -> Term:
    flat: dict[Term, None] = {}
    chars: Ranges = ()
    for part in parts:
        for one in part.parts if isinstance(part, Alt) else (part,):
            if isinstance(one, Chars):
                chars = _union(chars, one.ranges)
            else:
                flat[one] = None
    if chars:
        flat[Chars(chars)] = None
    if _ALL in flat:
        return _ALL
    if _EMPTY in flat and len(flat) > 1:
        del flat[_EMPTY]
        return _repeat(_any_of(flat), 0, 1)
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(sorted(flat, key=repr)))


def _all_of(parts: Iterable[Term]) -> Term:
    flat: dict[Term, None] = {}
    for part in parts:
        for one in part.parts if isinstance(part, And) else (part,):
            flat[one] = None
    flat.pop(_ALL, None)
    if not flat:
        return _ALL
    if _NOTHING in flat:
        return _NOTHING
    if _EMPTY in flat:
        return _EMPTY if all(_is_nullable(one) for one in flat) else _NOTHING
    return next(iter(flat)) if len(flat) == 1 else And(tuple(sorted(flat, key=repr)))


def _none_of(part: Term) -> Term:
    if isinstance(part, Not):
        return part.part
    return _ALL if part == _NOTHING else _NOTHING if part == _ALL else Not(part)


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
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
# Members of Unicode's properties of emoji; not all of them, so these classes cannot be negated.
_PROPERTIES: dict[str, Ranges] = {
    "Extended_Pictographic": ((0x1F300, 0x1F321), (0x1F324, 0x1F393), (0x1F400, 0x1F4FD), (0x1F600, 0x1F64F),
        (0x1F680, 0x1F6C5), (0x1F910, 0x1F93A), (0x1F947, 0x1F9FF)),
    "Emoji_Component": ((0x200D, 0x200D), (0xFE0F, 0xFE0F), (0x1F1E6, 0x1F1FF), (0x1F3FB, 0x1F3FF)),
    "Regional_Indicator": ((0x1F1E6, 0x1F1FF),),
}  # fmt: skip


# --- reading


def _read(pattern: str, is_whole: bool) -> tuple[Term, int, int | None]:
    """``pattern`` as a term, and limits of the length that it has besides."""
    term = _Parser(pattern).whole()
    rest: Term = _EMPTY if is_whole else _ALL
    least, most = 0, None
    first, later = _begun(term, _EMPTY), _NOTHING if is_whole else _begun(term, _NOTHING)
    if later == _NOTHING:
        first, least, most = _split(first, is_whole)
    made = _resolved(first, rest)
    if first == later:
        made = _seq(_ALL, made)
    elif later != _NOTHING:
        made = _any_of((made, _seq(_ANY, _ALL, _resolved(later, rest))))
    return made, least, most


def _begun(term: Term, begin: Term) -> Term:
    """``term`` with ``begin`` in place of ``^``: the empty text at the beginning of the text, nothing later."""
    match term:
        case Begin():
            return begin
        case Seq():
            return _seq(*[_begun(part, begin) for part in term.parts])
        case Alt():
            return _any_of([_begun(part, begin) for part in term.parts])
        case Repeat():
            return _repeat(_begun(term.part, begin), term.least, term.most)
        case Look():
            return Look(_begun(term.part, begin), term.is_negative)
    return term


def _split(branch: Term, is_whole: bool) -> tuple[Term, int, int | None]:
    """``branch``, which begins where the text does, without what it says of the length of the whole text: counting it
    would take a state for each number.
    That are look-aheads of any characters, and a class that is all of the text."""
    parts = list(branch.parts) if isinstance(branch, Seq) else [branch]
    least, most = 0, None
    looks = [part for part in parts if isinstance(part, Look)]
    for look in looks:
        seen = look.part.parts if isinstance(look.part, Seq) else (look.part,)
        first = seen[0] if seen else _EMPTY
        if look.is_negative or parts[0] != look or not isinstance(first, Repeat):
            break
        if first.part not in (Chars(_DOT), _ANY):
            break
        if seen[-1] == End() and all(_is_nullable(part) for part in seen[1:-1]):
            most = min((one for one in (most, first.most) if one is not None), default=None)
        elif len(seen) > 1:
            break
        least = max(least, first.least)
        parts.pop(0)
    rest = [part for part in parts if not isinstance(part, Look | End)]
    ends = is_whole or (parts and parts[-1] == End())
    if ends and looks and len(rest) == 1 and isinstance(rest[0], Repeat) and isinstance(rest[0].part, Chars):
        only = rest[0]
        least = max(least, only.least)
        most = min((one for one in (most, only.most) if one is not None), default=None)
        parts[parts.index(only)] = Repeat(only.part, 0, None)
    return _seq(*parts), least, most


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> Term:
        """The whole pattern."""
        made = self._alternatives(is_first=True)
        if self._at < len(self._pattern):
            raise self._error("a parenthesis too many")
        return made

    def _alternatives(self, is_first: bool) -> Term:
        self._depth += 1
        if self._depth > 50:
            raise self._error("groups may be nested 50 deep")
        branches = [self._sequence(is_first)]
        while self._taken("|"):
            branches.append(self._sequence(is_first))
        self._depth -= 1
        return _any_of(branches)

    def _sequence(self, is_first: bool) -> Term:
        """``is_first``: nothing is before this."""
        parts: list[Term] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._quantified(self._atom(is_first))
            is_first = is_first and isinstance(part, Look | Begin)
            parts.append(part)
        return _seq(*parts) if parts else _EMPTY

    def _atom(self, is_first: bool) -> Term:
        char = self._pattern[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group(is_first)
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(_DOT)
            case "^":
                if not is_first:
                    raise self._error("^ is only possible at the beginning")
                return Begin()
            case "$":
                return End()
            case "\\":
                return Chars(self._escape())
            case "*" | "+" | "?":
                raise self._error(f"nothing before {char} to repeat")
        return Chars(((ord(char), ord(char)),))

    def _group(self, is_first: bool) -> Term:
        look = None
        if self._taken("?"):
            rest = self._pattern[self._at :]
            if rest.startswith(("=", "!")):
                look = rest[0] == "!"
                self._at += 1
            elif rest.startswith(":"):
                self._at += 1
            elif rest.startswith(("P<", "<")) and not rest.startswith(("<=", "<!")) and ">" in rest:
                self._at += rest.index(">") + 1
            else:
                raise self._error(
                    "only groups of the kinds (...), (?:...), (?<name>...), (?=...) and (?!...)"
                )
        part = self._alternatives(is_first)
        if not self._taken(")"):
            raise self._error("a parenthesis is not closed")
        return part if look is None else Look(part, look)

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
        if isinstance(part, Look | Begin | End) or (most != 1 and _has_begin(part)):
            raise self._error("a look-ahead, ^ or $ cannot be repeated")
        self._at += length
        self._taken("?")  # which of several matches is found first does not matter
        return _repeat(part, least, most)

    def _class(self) -> Ranges:
        is_negative = self._taken("^")
        if self._pattern.startswith("]", self._at):
            raise self._error("write ] in a class as \\]")
        members: list[tuple[int, int]] = []
        is_partial = False
        while not self._taken("]"):
            if self._at >= len(self._pattern):
                raise self._error("a class is not closed")
            is_partial = is_partial or self._pattern.startswith("\\p", self._at)
            low = self._member()
            if self._pattern.startswith("-", self._at) and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._member()
                if low[0][0] != low[-1][1] or high[0][0] != high[-1][1] or low > high:
                    raise self._error("a range of a class is not one")
                low = ((low[0][0], high[0][0]),)
            members += low
        ranges = _union(tuple(members), ())
        if is_negative and is_partial:
            raise self._error("\\p cannot be negated")
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
        if char == "p" and rest.startswith("{") and (name := rest[1:].partition("}")[0]) in _PROPERTIES:
            self._at += len(name) + 2
            return _PROPERTIES[name]
        if char in ("x", "u"):
            digits = rest[1:].partition("}")[0] if rest.startswith("{") else rest[: 2 if char == "x" else 4]
            if not digits or not all(one in "0123456789abcdefABCDEF" for one in digits) or len(digits) > 6:
                raise self._error(f"\\{char} takes hexadecimal digits")
            self._at += len(digits) + 2 * rest.startswith("{")
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


def _resolved(term: Term, rest: Term) -> Term:
    """``term`` and then ``rest``, in which look-aheads and ``$`` have become intersections."""
    if not _has_looks(term):
        return _seq(term, rest)
    match term:
        case End():
            return _all_of((_EMPTY, rest))
        case Look():
            seen = _resolved(term.part, _ALL)
            return _all_of((_none_of(seen) if term.is_negative else seen, rest))
        case Seq():
            for part in reversed(term.parts):
                rest = _resolved(part, rest)
            return rest
        case Alt():
            return _any_of([_resolved(part, rest) for part in term.parts])
        case Repeat():
            if (term.least, term.most) != (0, 1):
                raise ValueError("a look-ahead or $ within a repetition is not possible")
            return _any_of((_resolved(term.part, rest), rest))
    raise AssertionError(term)


def _has_begin(term: Term) -> bool:
    return _begun(term, _NOTHING) != term


def _has_looks(term: Term) -> bool:
    match term:
        case Look() | End():
            return True
        case Seq() | Alt():
            return any(map(_has_looks, term.parts))
        case Repeat():
            return _has_looks(term.part)
    return False


# --- the automaton


def _plain(term: Term) -> Term:
    """``term`` without intersections and complements. Raises ValueError if that would be too large."""
    if not _is_composed(term):
        return term
    groups = _groups(term)
    numbers, todo = {term: 0}, [term]
    edges: dict[tuple[int, int], Term] = {}
    for state in todo:
        for ranges in groups:
            after = _derivative(state, ranges[0][0])
            if after == _NOTHING:
                continue
            if after not in numbers:
                if len(numbers) == _MAX_STATES:
                    raise ValueError(
                        "its look-aheads and patterns are too many to be combined: simplify them"
                    )
                numbers[after] = len(numbers)
                todo.append(after)
            edge = (numbers[state], numbers[after])
            edges[edge] = _any_of((edges.get(edge, _NOTHING), Chars(ranges)))
    begin, end = -1, -2
    edges[begin, 0] = _EMPTY
    for state, number in numbers.items():
        if _is_nullable(state):
            edges[number, end] = _EMPTY
    left = set(numbers.values())
    while left:  # states are taken out, the ones with the fewest ways through them first
        ways_in: dict[int, list[tuple[int, Term]]] = {one: [] for one in left}
        ways_out: dict[int, list[tuple[int, Term]]] = {one: [] for one in left}
        for (source, target), way in edges.items():
            if source != target:
                ways_in.get(target, []).append((source, way))
                ways_out.get(source, []).append((target, way))
        one = min(left, key=lambda one: (len(ways_in[one]) * len(ways_out[one]), one))
        left.remove(one)
        around = _repeat(edges.get((one, one), _EMPTY), 0, None)
        for source, way_in in ways_in[one]:
            for target, way_out in ways_out[one]:
                known = edges.get((source, target), _NOTHING)
                made = edges[source, target] = _any_of((known, _seq(way_in, around, way_out)))
                if _size(made) > _MAX_SIZE:
                    raise ValueError("its look-aheads and patterns make it too long: simplify them")
        edges = {edge: way for edge, way in edges.items() if one not in edge}
    return edges.get((begin, end), _NOTHING)


def _is_composed(term: Term) -> bool:
    match term:
        case And() | Not():
            return True
        case Seq() | Alt():
            return any(map(_is_composed, term.parts))
        case Repeat():
            return _is_composed(term.part)
    return False


def _size(term: Term) -> int:
    match term:
        case Seq() | Alt() | And():
            return 1 + sum(map(_size, term.parts))
        case Repeat() | Not():
            return 1 + _size(term.part)
    return 1


def _groups(term: Term) -> list[Ranges]:
    """Sets of characters between which no class of ``term`` distinguishes."""
    classes: set[Ranges] = set()

    def collect(one: Term) -> None:
        match one:
            case Chars():
                classes.add(one.ranges)
            case Seq() | Alt() | And():
                for part in one.parts:
                    collect(part)
            case Repeat() | Not():
                collect(one.part)

    collect(term)
    groups: list[Ranges] = [((0, _LAST),)]
    for ranges in sorted(classes):
        split = [(_both(group, ranges), _both(group, _complement(ranges))) for group in groups]
        groups = [group for pair in split for group in pair if group]
    return groups


def _is_nullable(term: Term) -> bool:
    """Whether it matches the empty text."""
    match term:
        case Seq() | And():
            return all(map(_is_nullable, term.parts))
        case Alt():
            return any(map(_is_nullable, term.parts))
        case Repeat():
            return term.least == 0 or _is_nullable(term.part)
        case Not():
            return not _is_nullable(term.part)
        case End():
            return True
    return False


def _derivative(term: Term, char: int) -> Term:
    """What may follow after ``char``."""
    match term:
        case Chars():
            return _EMPTY if any(low <= char <= high for low, high in term.ranges) else _NOTHING
        case Seq():
            made = []
            for index, part in enumerate(term.parts):
                made.append(_seq(_derivative(part, char), *term.parts[index + 1 :]))
                if not _is_nullable(part):
                    break
            return _any_of(made)
        case Alt():
            return _any_of([_derivative(part, char) for part in term.parts])
        case And():
            return _all_of([_derivative(part, char) for part in term.parts])
        case Not():
            return _none_of(_derivative(term.part, char))
        case Repeat():
            least = 0 if _is_nullable(term.part) else max(term.least - 1, 0)
            most = None if term.most is None else term.most - 1
            return _seq(_derivative(term.part, char), _repeat(term.part, least, most))
    raise AssertionError(term)


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


def _limited_exactly(term: Seq, loose: int, least: int, most: int | None) -> Term:
    """``term`` limited for each length of its part ``loose``, before which the lengths are fixed."""
    before, after = _seq(*term.parts[:loose]), _seq(*term.parts[loose + 1 :])
    part, (low, high) = term.parts[loose], _lengths(term.parts[loose])
    fixed, rest_low = _lengths(before)[0], _lengths(after)[0]
    last = (least if most is None else most) - fixed - rest_low
    made = []
    for length in range(low, last + 1 if high is None else min(high, last) + 1):
        left = None if most is None else most - fixed - length
        rest = _limited(after, max(least - fixed - length, 0), left)
        made.append(_seq(before, _limited(part, length, length), rest))
    if most is None:
        made.append(_seq(before, _limited(part, last + 1, None), after))
    return _any_of(made)


def _limited_sequence(term: Seq, least: int, most: int | None) -> Term:
    bounds = [_lengths(part) for part in term.parts]
    highs: list[int | None] = [high for _, high in bounds]
    shortest = sum(low for low, _ in bounds)
    loose = [index for index, (low, high) in enumerate(bounds) if low != high]
    if 2 <= len(loose) <= 3 and (least - shortest if most is None else most - shortest) <= _FEW:
        return _limited_exactly(term, loose[0], least, most)
    if most is not None:
        room = most - shortest
        # The smallest needs first: what they leave is for the others.
        order = sorted(
            range(len(bounds)),
            key=lambda i: math.inf if (high := bounds[i][1]) is None else high - bounds[i][0],
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
    order = sorted(
        range(len(bounds)), key=lambda i: -(math.inf if (high := highs[i]) is None else high - lows[i])
    )
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
            return "".join(
                f"(?:{_written(one)})" if isinstance(one, Alt) else _written(one) for one in term.parts
            )
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
