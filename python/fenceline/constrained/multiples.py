"""Multiples of a number between two bounds, as rules of a grammar: the library enforces only one of the two."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

_MAX_DIGITS = 15  # up to which a whole number is exact everywhere
_MAX_RULES, _MAX_STATES = 3000, 20000

_State = tuple[int, int, int, int]  # digits left; what is wanted of them, modulo the step; their least and their most


def multiples(step: Fraction, low: Fraction | None, high: Fraction | None, name: str) -> list[str]:
    """Rules of which the first, ``name``, is that of the decimal numbers from ``low`` to ``high``, None for any of 15
    digits, that are multiples of ``step``. Raises ValueError if there are none, or too many rules."""
    digits = next((n for n in range(_MAX_DIGITS) if (step * 10**n).denominator == 1), _MAX_DIGITS)
    if digits == _MAX_DIGITS:  # after the point
        raise ValueError(f"it is a number with fewer than {_MAX_DIGITS} digits after the point")
    unit = 10**digits
    largest = 10**_MAX_DIGITS - 1
    least = -largest if low is None else max(-largest, math.ceil(low * unit))
    most = largest if high is None else min(largest, math.floor(high * unit))
    made = _Rules(int(step * unit), digits, name)
    branches = [*made.numbers("", max(least, 0), most), *made.numbers("-", max(-most, 1), -least)]
    if not branches:
        raise ValueError("there is no multiple between the bounds")
    return [f"{name} ::= {' | '.join(branches)}", *made.rules]


class _Rules:
    def __init__(self, step: int, digits: int, name: str) -> None:
        self._step = step
        self._digits = digits
        self._name = name
        self._known: dict[_State, str | None] = {}
        self.rules: list[str] = []

    def numbers(self, sign: str, least: int, most: int) -> Iterator[str]:
        """Expressions for ``sign`` and the multiples from ``least`` to ``most``, one for each number of digits."""
        for whole in range(1, _MAX_DIGITS - self._digits + 1):
            length = whole + self._digits
            low = max(least, 10 ** (length - 1) if whole > 1 else 0)
            high = min(most, 10**length - 1)
            if low <= high and (rest := self._rule((length, 0, low, high))) is not None:
                yield f'"{sign}" {rest}' if sign else rest

    def _rule(self, state: _State) -> str | None:
        """The name of the rule for the digits that are left; None if there are none that fit."""
        if state not in self._known:
            if len(self.rules) == _MAX_RULES or len(self._known) == _MAX_STATES:
                raise ValueError("it takes too many rules: choose a smaller step or narrower bounds")
            self._known[state] = None
            self._known[state] = self._made(state)
        return self._known[state]

    def _made(self, state: _State) -> str | None:
        left, wanted, low, high = state
        branches = []
        if left <= self._digits and wanted == 0 and low == 0:
            branches.append('""')  # only zeros after the point are left, which are not written
        if left:
            unit = 10 ** (left - 1)
            after: dict[str, str] = {}
            for digit in range(low // unit, high // unit + 1):
                rest = (
                    left - 1,
                    (wanted - digit * unit) % self._step,
                    max(low - digit * unit, 0),
                    min(high - digit * unit, unit - 1),
                )
                if (name := self._rule(rest)) is not None:
                    after[name] = after.get(name, "") + str(digit)
            point = '"." ' if left == self._digits else ""
            branches += [f"{point}[{digits}] {name}" for name, digits in after.items()]
        if not branches:
            return None
        name = f"{self._name}_{len(self.rules)}"
        self.rules.append(f"{name} ::= {' | '.join(branches)}")
        return name
