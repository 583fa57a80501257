"""StorageBackend: what the cache controller asks of a place that keeps pages, and what it counts."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fenceline.mem_cache.page_hash import PageKey

# A page's bytes where they lie in host memory, in order: one part for a page-first layout, one for each layer's K
# and V for a layer-first one. Parts are contiguous uint8; nothing is copied on the way.
PageParts = Sequence[NDArray[np.uint8] | memoryview]


class Reason(StrEnum):
    """Why a page was not read or not written."""

    FULL = "full"  # the size bound is reached and nothing may leave
    NO_SPACE = "no_space"  # the disk (or the user's quota) is full
    BUSY = "busy"  # another process held the directory's lock for too long
    IO = "io"  # the system refused; not one of the above
    FOREIGN = "foreign"  # something of a page's name that is not a file of this user's alone: removed
    LENGTH = "length"  # a file longer or shorter than its page: torn
    HEADER = "header"  # not our file, another format, or a damaged header
    KEY = "key"  # a sound page, but not the one that its name promises
    CHECKSUM = "checksum"  # damaged payload
    MAC = "mac"  # with a storage key: damaged, or written by somebody who does not have the key


class StorageError(Exception):
    """A page that could not be read or written. Stays inside the room: callers see a miss and a count."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Counts since the start, of pages unless named otherwise. ``errors`` explains misses and unwritten pages by
    :class:`Reason`; a key that is simply not there is no error. Bytes are payload; seconds are summed over threads."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    duplicates: int = 0  # set found the page already there
    unwritten: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0  # of files, of any model in the directory
    exists_seconds: float = 0.0
    get_seconds: float = 0.0
    set_seconds: float = 0.0
    errors: Mapping[Reason, int] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """The same counts of one call, while it runs."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    errors: Counter[Reason] = field(default_factory=Counter)


class StatsBook:
    """Sums tallies of calls that several threads make."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = Tally()

    def add(self, tally: Tally) -> None:
        """Take one call's counts in."""
        with self._lock:
            self._sum.counts.update(tally.counts)
            for call, seconds in tally.seconds.items():
                self._sum.seconds[call] += seconds
            self._sum.errors.update(tally.errors)

    def snapshot(self) -> StorageStats:
        """The sums so far."""
        with self._lock:
            counts, seconds = self._sum.counts, self._sum.seconds
            return StorageStats(
                hits=counts["hits"],
                misses=counts["misses"],
                writes=counts["writes"],
                duplicates=counts["duplicates"],
                unwritten=counts["unwritten"],
                read_bytes=counts["read_bytes"],
                written_bytes=counts["written_bytes"],
                evictions=counts["evictions"],
                evicted_bytes=counts["evicted_bytes"],
                exists_seconds=seconds["exists"],
                get_seconds=seconds["get"],
                set_seconds=seconds["set"],
                errors=dict(self._sum.errors),
            )


class StorageBackend(Protocol):
    """Pages by key. Calls are synchronous, block on the disk and may be made by several threads at once; the caller
    owns the threads, and the memory of the pages for as long as a call takes.

    A key determines the bytes, so a page is never updated. Keys of one call run from a prefix's first page to its
    last: that is the order in which pages are worth keeping. No call raises because of what the disk does: a page
    that cannot be read is a miss, one that cannot be written is not there later, and ``stats`` counts both.
    """

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page: the sum over the parts of every page handed in."""
        ...

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which pages are there, one answer for each key. Counts as use: a prefix somebody asks for stays. They are
        not verified, and may be gone by the time of ``get``."""
        ...

    def get(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        """Read each page into its parts. False: a miss, and the parts hold arbitrary bytes."""
        ...

    def set(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        """Keep each page. True: it is there now, or was before. The parts must not change meanwhile (if they do, the
        page is a miss later, by its checksum)."""
        ...

    def clear(self) -> int:
        """Remove every page of this model and shard. Returns how many."""
        ...

    def stats(self) -> StorageStats:
        """Counts since this object was made."""
        ...


def num_leading(found: Sequence[bool]) -> int:
    """How many pages from the start are there without a gap: what a prefix can use."""
    return next((i for i, there in enumerate(found) if not there), len(found))
