"""RequestMemory: which pages and rows each request holds, and how they come and go.

All of a request's memory is retired after the request's own last flight, never freed: an in-flight step
may still read the pages and write the row. The tree receives whole pages of published steps only.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fenceline.managers.req import Req, no_pages
from fenceline.mem_cache.radix_cache import InsertResult, MatchResult, RadixCache
from fenceline.memory_order import LeasePool, Points

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Remap:
    """Page-table columns of a request that now name the tree's pages instead of its own copies."""

    req: Req
    first_column: int
    pages: I32


class RequestMemory:
    """Hands out and takes back KV pages and request rows, with the prefix tree between."""

    def __init__(self, pages: LeasePool, rows: LeasePool, tree: RadixCache, page_size: int) -> None:
        self.pages = pages
        self.rows = rows
        self.tree = tree
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        """Pages that requests and tree can hold together."""
        return self.pages.size - self.pages.reserved

    @property
    def num_available_pages(self) -> int:
        """Pages that could be handed out now: free ones and those the tree would give up."""
        return self.pages.num_free + self.tree.num_evictable_pages

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def match(self, req: Req) -> MatchResult:
        """The cached prefix this request can use; at least one token is left to compute."""
        tokens = req.token_ids()
        limit = len(tokens) - 1
        if req.source.return_logprob and req.source.logprob_start_len >= 0 and not req.output_ids:
            # The logprob of token i comes from computing token i - 1.
            limit = min(limit, max(req.source.logprob_start_len - 1, 0))
        return self.tree.match_prefix(tokens[:limit])

    def admit(self, req: Req, prefix: MatchResult) -> Points:
        """Give ``req`` a row, its cached prefix and pages for all its tokens; it must fit.

        The prefix's node is already locked for the request. Returns the Points of the memory.
        """
        num_new = self.num_pages_for(req.num_tokens) - len(prefix.pages)
        pages, after = self._alloc(num_new)
        leased = self.rows.alloc(1)
        assert leased is not None, "the caller has checked for a free row"
        row, row_after = leased
        req.row = int(row[0])
        req.pages = no_pages()
        req.pages.frombytes(prefix.pages.tobytes() + pages.tobytes())
        req.node = prefix.node
        req.shared_len = prefix.num_tokens
        req.computed_len = req.published_len = prefix.num_tokens
        return after.join(row_after)

    def grow(self, req: Req, num_pages: int) -> tuple[I32, Points]:
        """``num_pages`` more pages for a running request; they must be available."""
        pages, after = self._alloc(num_pages)
        req.pages.frombytes(pages.tobytes())
        return pages, after

    def cache_prompt(self, req: Req) -> Remap | None:
        """Put the request's published whole pages into the tree while it runs on.

        Where another request brought the same tokens first, this one moves onto the tree's pages and its
        own copies are retired after its last flight; the returned Remap must then reach the page table
        before its next step.
        """
        result = self._insert(req)
        old_shared, shared = (
            req.shared_len,
            result.num_existing_tokens + result.num_taken_pages * self.page_size,
        )
        if shared <= old_shared:
            return None
        assert req.node is not None
        self.tree.lock(result.node)
        self.tree.unlock(req.node, Points.none())
        req.node, req.shared_len = result.node, shared
        first, last = old_shared // self.page_size, result.num_existing_tokens // self.page_size
        if last <= first:
            return None
        duplicates = np.array(req.pages[first:last], dtype=np.int32)
        self.pages.retire(duplicates, after=req.last_flight)
        pages = result.pages[first:last]
        req.pages[first:last] = array("i", pages.tobytes())
        return Remap(req, first, pages)

    def release(self, req: Req) -> None:
        """The one door out: finished, aborted and retracted requests give everything back here."""
        assert req.left, "only requests that have left are released"
        if req.row == 0:
            return  # never admitted
        result = self._insert(req)
        shared = req.shared_len // self.page_size
        existing = result.num_existing_tokens // self.page_size
        taken_end = existing + result.num_taken_pages
        own = req.pages[shared : max(existing, shared)] + req.pages[max(taken_end, shared) :]
        self.pages.retire(np.array(own, dtype=np.int32), after=req.last_flight)
        assert req.node is not None
        self.tree.unlock(req.node, req.last_flight)
        self.rows.retire(np.array([req.row], dtype=np.int32), after=req.last_flight)
        req.row, req.pages, req.node = 0, no_pages(), None

    def flush(self, storage: bool = False) -> int:
        """Empty the tree, with ``storage`` the storage tier too. No request holds anything. Returns how many device
        pages are free again. Raises ValueError where there is no storage tier."""
        if storage:
            raise ValueError("there is no storage tier")
        return self.tree.reset()

    def check_books(self, every_page: bool = False) -> None:
        """When no request holds anything: every page is free or in the tree, every row is free.

        Compares counts, and page by page where they differ or with ``every_page``: half a million cached
        pages take 50 ms, for which the next request would wait. Raises ``RuntimeError`` naming what is lost.
        """
        if every_page or self.pages.num_leased != self.tree.num_pages:
            self._check_pages()
        if self.rows.num_leased:
            raise RuntimeError(f"request rows leased to nobody while idle: {self.rows.owned().tolist()[:8]}")
        if self.tree.num_locked_pages:
            raise RuntimeError(f"{self.tree.num_locked_pages} pages of the tree are locked while idle")

    def _check_pages(self) -> None:
        held, cached = self.pages.owned(), self.tree.all_pages()
        if not np.array_equal(held, cached):
            lost = np.setdiff1d(held, cached).tolist()
            foreign = np.setdiff1d(cached, held).tolist()
            raise RuntimeError(
                f"KV pages do not add up while idle: {len(lost)} leased to nobody {lost[:8]}, "
                f"{len(foreign)} in the tree but not leased {foreign[:8]}"
            )

    def _alloc(self, num_pages: int) -> tuple[I32, Points]:
        missing = num_pages - self.pages.num_free
        if missing > 0:
            self.tree.evict(missing)
        leased = self.pages.alloc(num_pages)
        assert leased is not None, f"{num_pages} pages were promised, {self.pages.num_free} are free"
        return leased

    def _insert(self, req: Req) -> InsertResult:
        num_pages = req.published_len // self.page_size
        tokens = req.token_ids()[: num_pages * self.page_size]
        pages = np.array(req.pages[:num_pages], dtype=np.int32)
        return self.tree.insert(tokens, pages, after=req.last_flight)
