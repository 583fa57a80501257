"""Vector clocks: what has happened before, as a position in the order of each agent (a stream, or the host)."""

from __future__ import annotations

Clock = tuple[int, ...]


def joined(a: Clock, b: Clock) -> Clock:
    """The element-wise maximum; ``a`` itself, the same object, if ``b`` adds nothing."""
    if a is b or not b:
        return a
    if len(a) < len(b):
        a, b = b, a
    result = tuple([x if x > y else y for x, y in zip(a, b, strict=False)])
    if len(a) > len(b):
        result += a[len(b) :]
    return a if result == a else result
