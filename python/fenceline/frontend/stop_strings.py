"""Finding stop strings in a text that grows, without ever letting out the beginning of one.

The automaton of Aho and Corasick ("Efficient string matching", CACM 18, 1975): its states are the beginnings of the
stop strings, and after each character it is in the longest one that the text ends with. A character costs a constant
number of steps on average, whatever the strings are. States are made when the text first gets there: a request pays
for its text and not for the length of strings that never come near a match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string found, and the text before it that was not yet let out."""

    stop: str
    text: str


class _State:
    """The beginning, ``depth`` characters long, that all of ``stops`` share.

    ``fallback`` is the longest other beginning with which this one ends (None for the empty one, which has no other).
    ``match`` is the longest stop string with which this beginning ends, "" if there is none; ``goes_on``: one of
    ``stops`` is longer.
    """

    __slots__ = ("_ahead", "_next", "depth", "fallback", "goes_on", "match")

    def __init__(self, depth: int, stops: Sequence[str], fallback: _State | None) -> None:
        self.depth = depth
        self.fallback = fallback
        self.match: str = "" if fallback is None else fallback.match
        self._next: dict[str, _State] = {}  # the states that were made, by the character that leads there
        self._ahead: dict[str, list[str]] = {}  # the stop strings of those that were not
        for stop in stops:
            if len(stop) == depth:
                self.match = stop
            else:
                self._ahead.setdefault(stop[depth], []).append(stop)
        self.goes_on = bool(self._ahead)

    def after(self, char: str) -> _State:
        """The state when ``char`` has followed."""
        state = self
        while True:
            following = state._next.get(char)
            if following is not None:
                return following
            if char in state._ahead:
                return state._make(char)
            if state.fallback is None:
                return state
            state = state.fallback

    def _make(self, char: str) -> _State:
        # Of the states that are made on the way, each shorter, no two belong to one stop string: the recursion is at
        # most as deep as there are stop strings.
        fallback = self if self.fallback is None else self.fallback.after(char)
        made = self._next[char] = _State(self.depth + 1, self._ahead.pop(char), fallback)
        return made


class StopScanner:
    """Holds back the longest end of the text that may yet become a stop string.

    The match is the one that completes first; of several completing with the same character the longest.
    That makes the outcome independent of how the text was cut into pieces.
    """

    __slots__ = ("_held", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        self._state = _State(0, list(stops), None)
        self._held = ""  # the beginning that ``_state`` stands for

    def feed(self, text: str, armed: bool = True) -> str | StopMatch:
        """Add ``text``. Returns what may be let out, or the match; a match while not ``armed`` is text."""
        state = self._state
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            state = state.after(char)
            if not state.match:
                continue
            if armed:
                return StopMatch(state.match, buffer[: end - len(state.match)])
            # A match that was passed over, and with which nothing longer begins.
            while not state.goes_on and state.fallback is not None:
                state = state.fallback
        self._state = state
        split = len(buffer) - state.depth
        self._held = buffer[split:]
        return buffer[:split]

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held
