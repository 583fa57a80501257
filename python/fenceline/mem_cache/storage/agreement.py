"""Acks of storage that hold for all of several ranks.

Each rank keeps its own part of a page, under keys that name its rank, so a page is in storage when every rank has its
part. A rank sends its own storage's acks (``StorageAckCodec.encode``). Rank 0 combines them, without waiting for any
rank, into acks that hold for all (``StorageAgreement``). Each rank uses these in place of its own
(``StorageAckCodec.decode``). So a failure on one rank is a miss on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from fenceline.mem_cache.storage.controller import Ack, Done, Fetched, Found, TimedOut, Written
from fenceline.mem_cache.storage.worker import Outcome, Prefetch


class NewsKind(IntEnum):
    """Which ack a :class:`StorageNews` stands for."""

    WRITTEN = 1
    FOUND = 2
    FETCHED = 3
    TIMED_OUT = 4
    DONE = 5


class StorageNews(NamedTuple):
    """An ack as ranks send it to each other. ``handle``: that of the write or the prefetch, the same on all ranks."""

    kind: int
    handle: int
    num: int = 0  # pages written, found or fetched; for DONE the index of the outcome in ``Outcome``


_OUTCOMES = list(Outcome)


class StorageAckCodec:
    """Translates a rank's acks to news and back. Nothing is agreed on about a prefetch before every rank has sent an
    ack of it, so the rank knows the prefetch of all news that it receives."""

    def __init__(self) -> None:
        self._ops: dict[int, Prefetch] = {}
        self._num_fetched: Counter[int] = Counter()  # pages of the news received, by handle

    def encode(self, acks: Iterable[Ack]) -> list[StorageNews]:
        """The ``acks`` of this rank's own storage, as news for rank 0, in their order."""
        news = []
        for ack in acks:
            if not isinstance(ack, Written):
                self._ops[ack.op.handle] = ack.op
            match ack:
                case Written(handle, num_written):
                    news.append(StorageNews(NewsKind.WRITTEN, handle, num_written))
                case Found(op, num_pages):
                    news.append(StorageNews(NewsKind.FOUND, op.handle, num_pages))
                case Fetched(op, _, num_pages):
                    news.append(StorageNews(NewsKind.FETCHED, op.handle, num_pages))
                case TimedOut(op):
                    news.append(StorageNews(NewsKind.TIMED_OUT, op.handle))
                case Done(op, outcome):
                    news.append(StorageNews(NewsKind.DONE, op.handle, _OUTCOMES.index(outcome)))
        return news

    def decode(self, news: Iterable[tuple[int, int, int]]) -> list[Ack]:
        """The ``news`` that the ranks have agreed on, as acks of this rank's writes and prefetches."""
        return [self._ack(*each) for each in news]

    def _ack(self, kind: int, handle: int, num: int) -> Ack:
        if kind == NewsKind.WRITTEN:
            return Written(handle, num)
        if kind == NewsKind.DONE:
            del self._num_fetched[handle]
            return Done(self._ops.pop(handle), _OUTCOMES[num])
        op = self._ops[handle]
        if kind == NewsKind.FOUND:
            return Found(op, num)
        if kind == NewsKind.FETCHED:
            first = self._num_fetched[handle]
            self._num_fetched[handle] += num
            return Fetched(op, first, num)
        assert kind == NewsKind.TIMED_OUT, f"storage has no news of kind {kind}"
        return TimedOut(op)


@dataclass(slots=True)
class _Progress:
    """How far one prefetch is on one rank."""

    num_found: int | None = None  # None: not known yet
    num_fetched: int = 0
    timed_out: bool = False
    outcome: int | None = None  # None: it has not ended


class _AgreedPrefetch:
    """A prefetch on all ranks, and what has been agreed on."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks: list[_Progress | None] = [None] * num_ranks  # None: it has sent no ack yet
        self.found = False
        self.num_fetched = 0
        self.timed_out = False

    def news(self, handle: int) -> list[StorageNews]:
        """What holds on all ranks now and has not been returned before."""
        ranks = [progress for progress in self.ranks if progress is not None]
        if len(ranks) < len(self.ranks):
            return []
        news = []
        outcomes = [progress.outcome for progress in ranks if progress.outcome is not None]
        over = len(outcomes) == len(ranks)
        found = [progress.num_found for progress in ranks if progress.num_found is not None]
        if not self.found and not over and len(found) == len(ranks):
            self.found = True
            news.append(StorageNews(NewsKind.FOUND, handle, min(found)))
        num_fetched = min(progress.num_fetched for progress in ranks)
        if num_fetched > self.num_fetched:
            news.append(StorageNews(NewsKind.FETCHED, handle, num_fetched - self.num_fetched))
            self.num_fetched = num_fetched
        if not self.timed_out and not over and any(progress.timed_out for progress in ranks):
            self.timed_out = True
            news.append(StorageNews(NewsKind.TIMED_OUT, handle))
        if over:  # if one rank fails, all do
            complete = _OUTCOMES.index(Outcome.COMPLETE)
            outcome = next((outcome for outcome in outcomes if outcome != complete), complete)
            news.append(StorageNews(NewsKind.DONE, handle, outcome))
        return news


class StorageAgreement:
    """Rank 0 combines the acks of all ranks, which may come in any order between ranks, and returns each result once. A
    write has ended when it has ended on all ranks. For a prefetch, once every rank has sent an ack of it: the number of
    pages found is the smallest of all ranks, 0 if one has none; a page is fetched when all ranks have it; the request
    need not wait any longer as soon as one rank says so; it has ended when it has ended on all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._writes: dict[int, list[int]] = {}  # by handle: the pages that ranks have written
        self._prefetches: dict[int, _AgreedPrefetch] = {}

    def add(self, rank: int, news: Iterable[tuple[int, int, int]]) -> list[StorageNews]:
        """Process ``rank``'s news, in their order. Returns what all ranks agree on because of them."""
        agreed = []
        for kind, handle, num in news:
            if kind == NewsKind.WRITTEN:
                written = self._writes.setdefault(handle, [])
                written.append(num)
                if len(written) == self._num_ranks:
                    agreed.append(StorageNews(NewsKind.WRITTEN, handle, min(self._writes.pop(handle))))
                continue
            prefetch = self._prefetches.setdefault(handle, _AgreedPrefetch(self._num_ranks))
            progress = prefetch.ranks[rank] = prefetch.ranks[rank] or _Progress()
            match kind:
                case NewsKind.FOUND:
                    progress.num_found = num
                case NewsKind.FETCHED:
                    progress.num_fetched += num
                case NewsKind.TIMED_OUT:
                    progress.timed_out = True
                case NewsKind.DONE:
                    progress.num_found = progress.num_found or 0
                    progress.outcome = num
            told = prefetch.news(handle)
            agreed += told
            if told and told[-1].kind == NewsKind.DONE:
                del self._prefetches[handle]
        return agreed
