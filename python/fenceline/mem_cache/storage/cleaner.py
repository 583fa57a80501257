"""Which pages leave when a storage directory is full: the least recently used ones, of any model."""

from __future__ import annotations

from dataclasses import dataclass

from fenceline.mem_cache.storage.base import Tally
from fenceline.mem_cache.storage.directory import Books, PageFile, StorageDirectory

# Clocks of processes on one machine agree; what is stamped later than this from now was stamped by a wrong clock.
_FUTURE_NS = 10**9


@dataclass(frozen=True, slots=True)
class Cleaner:
    """Keeps ``directory`` within ``max_bytes``. A scan costs about 9 us a page, so each one makes room down to
    ``low_bytes``."""

    directory: StorageDirectory
    max_bytes: int
    low_bytes: int

    def make_room(
        self, books: Books, nbytes: int, now_ns: int, keep_since_ns: int | None, tally: Tally
    ) -> bool:
        """Whether ``nbytes`` more fit, after evicting what was last used before ``keep_since_ns`` if need be (None:
        all may go): without that bound a batch larger than the directory would push out its own first pages.
        The directory must be locked by the caller, who holds ``books``. Raises ``OSError``."""
        used = books.used
        if used is not None and used + nbytes <= self.max_bytes:
            return True
        return self.clean(books, nbytes, now_ns, keep_since_ns, tally)

    def clean(self, books: Books, nbytes: int, now_ns: int, keep_since_ns: int | None, tally: Tally) -> bool:
        """The same, with a scan in any case, which puts the books in order."""
        used, pages = self.directory.scan()
        if used + nbytes > self.max_bytes:
            used = self._evict(used, nbytes, _oldest_first(pages, now_ns, keep_since_ns), tally)
        books.write(used)
        return used + nbytes <= self.max_bytes

    def _evict(self, used: int, nbytes: int, pages: list[PageFile], tally: Tally) -> int:
        for page in pages:
            if used + nbytes <= max(self.low_bytes, nbytes):
                break
            try:
                self.directory.unlink(page.path)
            except FileNotFoundError:
                used -= page.nbytes
                continue
            except OSError:  # it stays, and counts
                continue
            used -= page.nbytes
            tally.counts["evictions"] += 1
            tally.counts["evicted_bytes"] += page.nbytes
        return used


def _oldest_first(pages: list[PageFile], now_ns: int, keep_since_ns: int | None) -> list[PageFile]:
    """Those that may go. A time in the future says nothing of a page's age (the clock was set back): it goes first,
    or it would stay for ever."""
    limit = now_ns + _FUTURE_NS

    def age(page: PageFile) -> tuple[int, str]:
        return (0 if page.mtime_ns > limit else page.mtime_ns, page.path)

    if keep_since_ns is not None:
        pages = [page for page in pages if not keep_since_ns <= page.mtime_ns <= limit]
    return sorted(pages, key=age)
