"""Code that the HiCache benchmarks and the witness share."""

from __future__ import annotations

import random
import shlex
import urllib.error
import urllib.request
from collections.abc import Sequence


class RequestFailed(Exception):
    """The server refused the request, closed the connection, or returned something else than was asked for."""


def random_ids(rng: random.Random, num: int, vocab: int) -> list[int]:
    """``num`` plain token ids."""
    return rng.choices(range(vocab), k=num)


def flush(url: str) -> None:
    """Empty the prefix cache, all tiers. Raises RequestFailed while requests or transfers hold it."""
    try:
        with urllib.request.urlopen(f"{url}/flush_cache", timeout=60, data=b"") as response:
            response.read()
    except (urllib.error.URLError, OSError) as error:
        raise RequestFailed(f"flush_cache: {error}") from error


def words(flags: str) -> list[str]:
    """Flags given as one word."""
    return shlex.split(flags)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
