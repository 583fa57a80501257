"""StorageBackend: what the controller asks of a place that keeps pages, and what it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fenceline.mem_cache.page_hash import PageKey

# The bytes of a page where they lie in host memory, in order: one piece with page_first, one for each part of the
# layout with layer_first. Pieces are contiguous uint8 and are not copied on the way.
PageParts = Sequence[NDArray[np.uint8] | memoryview]


class Reason(StrEnum):
    """Why a page was not read or not written."""

    FULL = "full"  # the size bound is reached and nothing may be evicted
    NO_SPACE = "no_space"  # the disk (or the user's quota) is full
    BUSY = "busy"  # another process held the directory's lock for too long
    IO = "io"  # the system refused; not one of the above
    FOREIGN = "foreign"  # it has a page's name but is not a file of this user alone: it is removed
    LENGTH = "length"  # a file longer or shorter than its page: torn
    HEADER = "header"  # not our file, another format, or a damaged header
    KEY = "key"  # a sound page, but not the one that its name promises
    CHECKSUM = "checksum"  # damaged payload
    MAC = "mac"  # with a storage key: damaged, or written without the key


class StorageError(Exception):
    """A page that could not be read or written. Raised inside this folder only: callers see a miss and a count."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(detail or reason.value)
        self.reason = reason


@dataclass(slots=True)
class StorageStats:
    """Counts, of pages unless named otherwise: of one call while it runs, and of all since the start. ``errors``
    explains misses and unwritten pages by :class:`Reason`; a missing key is no error. Bytes are payload."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    duplicates: int = 0  # set found the page already there
    unwritten: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0  # of files, of any model in the directory
    errors: Counter[Reason] = field(default_factory=Counter)

    def add(self, other: StorageStats) -> None:
        for name in (entry.name for entry in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class StorageBackend(Protocol):
    """Pages by key. Calls are synchronous, block on the disk and may be made by several threads at once; the caller
    owns the threads, and the memory of the pages for as long as a call takes. A key determines the bytes, so a page is
    never updated. Keys of one call run from a prefix's first page to its last: that is the order in which pages are
    worth keeping. No call raises because of what the disk does: a page that cannot be read is a miss, one that cannot
    be written is not there later, and ``stats`` counts both."""

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page: the sum over the parts of every page handed in."""
        ...

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which pages exist, one answer for each key. This counts as use, so the prefix of a request is not evicted.
        The pages are not verified, and may be gone by the time of ``get``."""
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
    """How many pages before the first missing one: a prefix can use only these."""
    return next((i for i, there in enumerate(found) if not there), len(found))
