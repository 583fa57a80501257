"""Finding stop strings in a text that grows, without ever letting out the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string found, and the text before it that was not yet let out."""

    stop: str
    text: str


class StopScanner:
    """Holds back the longest end of the text that may yet become a stop string.

    The match is the one that completes first; of several completing with the same character the longest.
    That makes the outcome independent of how the text was cut into pieces.
    """

    __slots__ = ("_held", "_max_len", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._max_len = max(map(len, stops))
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> str | StopMatch:
        """Add ``text``. Returns what may be let out, or the match; a match while not ``armed`` is text."""
        buffer = self._held + text
        if armed and text:
            match = self._find(buffer)
            if match is not None:
                self._held = ""
                return match
        split = self._hold_from(buffer)
        self._held = buffer[split:]
        return buffer[:split]

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> StopMatch | None:
        """The match that ends first; matches that end within the text held back were passed over before."""
        best_end, best_start, best = len(buffer) + 1, 0, ""
        num_held = len(self._held)
        for stop in self._stops:
            start = buffer.find(stop, max(0, num_held - len(stop) + 1))
            end = start + len(stop)
            if start >= 0 and (end, start) < (best_end, best_start):
                best_end, best_start, best = end, start, stop
        return StopMatch(best, buffer[:best_start]) if best else None

    def _hold_from(self, buffer: str) -> int:
        """Where the longest end of ``buffer`` starts that is a proper beginning of a stop string."""
        first = max(0, len(buffer) - self._max_len + 1)
        hold = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(first, len(buffer) - len(stop) + 1), hold)
            while start >= 0:
                if stop.startswith(buffer[start:]):
                    hold = start
                    break
                start = buffer.find(stop[0], start + 1, hold)
        return hold
