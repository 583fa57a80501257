"""A storage backend with faults, for tests of its callers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.backend import PageParts, Reason, StorageBackend, StorageStats


class FaultyBackend:
    """``inner`` with faults, which are drawn from ``seed`` for each call or page.

    ``pause`` runs at the start of every call, to simulate a slow disk (let it wait for an event that the test sets).
    ``fail``: the probability that a page is not found, read or written. ``full``: nothing is written. ``damage`` is
    called with probability ``corrupt`` for each written page and changes what is stored. ``crash``: the probability
    that a call raises ``OSError``; no backend should do this, but callers must survive it.
    """

    def __init__(
        self,
        inner: StorageBackend,
        *,
        seed: int = 0,
        pause: Callable[[], None] | None = None,
        fail: float = 0.0,
        full: bool = False,
        corrupt: float = 0.0,
        damage: Callable[[PageKey], None] | None = None,
        crash: float = 0.0,
    ) -> None:
        assert corrupt == 0.0 or damage is not None, "corrupt needs damage"
        self.inner = inner
        self.pause = pause
        self.fail = fail
        self.full = full
        self.corrupt = corrupt
        self.damage = damage
        self.crash = crash
        self._random = Random(seed)
        self._errors: Counter[Reason] = Counter()
        self._misses = self._unwritten = 0

    @property
    def page_nbytes(self) -> int:
        return self.inner.page_nbytes

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        self._start()
        return [there and not self._fails() for there in self.inner.exists(keys)]

    def get(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        self._start()
        works = self._split(keys)
        self._misses += len(keys) - len(works)
        found = self.inner.get([keys[i] for i in works], [pages[i] for i in works])
        return self._spread(len(keys), works, found)

    def set(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        self._start()
        if self.full:
            self._errors[Reason.FULL] += len(keys)
            self._unwritten += len(keys)
            return [False] * len(keys)
        works = self._split(keys)
        self._unwritten += len(keys) - len(works)
        stored = self.inner.set([keys[i] for i in works], [pages[i] for i in works])
        for i, there in zip(works, stored, strict=True):
            if there and self.damage is not None and self._random.random() < self.corrupt:
                self.damage(keys[i])
        return self._spread(len(keys), works, stored)

    def clear(self) -> int:
        return self.inner.clear()

    def stats(self) -> StorageStats:
        stats = self.inner.stats()
        errors = Counter(stats.errors) + self._errors
        return dataclasses.replace(
            stats, misses=stats.misses + self._misses, unwritten=stats.unwritten + self._unwritten, errors=errors
        )

    def _start(self) -> None:
        if self.pause is not None:
            self.pause()
        if self.crash and self._random.random() < self.crash:
            raise OSError("the backend broke its promise, as the test asked")

    def _fails(self) -> bool:
        return self.fail > 0.0 and self._random.random() < self.fail

    def _split(self, keys: Sequence[PageKey]) -> list[int]:
        """The indices of the pages that are passed to ``inner``."""
        works = [i for i in range(len(keys)) if not self._fails()]
        self._errors[Reason.IO] += len(keys) - len(works)
        return works

    @staticmethod
    def _spread(num_keys: int, works: list[int], answers: list[bool]) -> list[bool]:
        there = {i for i, answer in zip(works, answers, strict=True) if answer}
        return [i in there for i in range(num_keys)]
