"""Which regular expressions the grammar library enforces exactly as they are written.

xgrammar refuses some constructs with an error, but reads others as something else: anchors in the middle are ignored,
and unknown escapes stand for their letter. These are refused here. Patterns of texts within JSON are not handed to it,
see :mod:`fenceline.constrained.regular`.
"""

from __future__ import annotations

_CLASSES = "dDwWsS"
_CONTROLS = "nrtfv"
_HEX_DIGITS = {"x": 2, "u": 4}


def check_pattern(pattern: str) -> None:
    """Raise ValueError with the reason if the library would read a construct as something else.

    The pattern has to match the whole text, as in xgrammar. Whether it is well-formed is checked by the library.
    """
    _Scan(pattern).run()


class _Scan:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._in_class = False

    def run(self) -> None:
        """Check one character, escape or opening of a group after the other."""
        while self._at < len(self._pattern):
            start = self._at
            char = self._pattern[start]
            self._at += 1
            if char == "\\":
                self._escape()
            elif self._in_class:
                self._in_class = char != "]"
            elif char == "[":
                self._in_class = True
                # A ] at the beginning of a class would be a member of the class.
                if self._pattern[self._at : self._at + 1] == "^":
                    self._at += 1
                if self._pattern[self._at : self._at + 1] == "]":
                    raise self._error("write ] in a class as \\]")
            elif char == "(":
                self._depth += 1
                self._group()
            elif char == ")":
                self._depth -= 1
            elif char == "^":
                before = self._pattern[:start]
                if before and not (before.endswith("|") and self._depth == 0):
                    raise self._error("^ is only possible at the beginning")
            elif char == "$":
                after = self._pattern[self._at :]
                if after and not (after.startswith("|") and self._depth == 0):
                    raise self._error("$ is only possible at the end")

    def _group(self) -> None:
        rest = self._pattern[self._at :]
        if not rest.startswith("?") or rest.startswith("?:"):
            return
        named = rest.startswith(("?P<", "?<")) and not rest.startswith(("?<=", "?<!"))
        end = rest.find(">")
        if not named or end < 0:
            raise self._error("only groups of the kinds (...), (?:...) and (?<name>...) are possible")
        self._at += end + 1

    def _escape(self) -> None:
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        if char in _HEX_DIGITS:
            digits = self._pattern[self._at : self._at + _HEX_DIGITS[char]]
            if len(digits) != _HEX_DIGITS[char] or not all(d in "0123456789abcdefABCDEF" for d in digits):
                raise self._error(f"\\{char} takes {_HEX_DIGITS[char]} hexadecimal digits")
            self._at += len(digits)
        elif not char or (char.isalnum() and char not in _CLASSES + _CONTROLS):
            raise self._error(f"\\{char} is not possible")

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"the regular expression {self._pattern[:60]!r}: {reason}")
