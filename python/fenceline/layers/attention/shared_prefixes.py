"""The pages with which several requests of a batch begin, and which should be read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# A prefix that requests share takes an extra call. It is worth it if it saves the reads of at least this many (query,
# token) pairs, which are those of all queries but one.
_WORTH_PAIRS = 2048
# Prefixes within prefixes are searched to this depth, which bounds the work, whatever a client sends.
_MAX_PREFIX_DEPTH = 16
_BLOCK = 64  # columns of the page table that are compared at a time


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """``num_pages`` pages with which all of ``requests`` begin; these are ascending indices into the batch."""

    requests: tuple[int, ...]
    num_pages: int


def find_shared_prefixes(page_table: I32, num_pages: I64, num_queries: I64, page_size: int) -> list[SharedPrefix]:
    """The prefixes to which all queries of several requests (or the many queries of one) should attend in one call.
    ``page_table`` [B, columns]; ``num_pages`` [B]: how many pages of each request lie wholly before its first query, so
    that all its queries see all their tokens; ``num_queries`` [B]. No request is in two prefixes. If requests share a
    short prefix and some of them a longer one, either all are together, or those that go on alike are: whichever way
    fewer tokens are read."""
    if int((num_pages * num_queries).sum()) * page_size < _WORTH_PAIRS:
        return []
    # Most requests of most batches share nothing. NumPy filters them out, so that they take no time in Python loops.
    _, branch, sizes = np.unique(page_table[:, 0], return_inverse=True, return_counts=True)
    candidates = np.flatnonzero((num_pages > 0) & ((sizes[branch] > 1) | (num_queries > 1)))
    if len(candidates) == 0:
        return []
    _, groups = _Grouping(page_table, num_pages).best(candidates.tolist(), 0, _MAX_PREFIX_DEPTH)
    queries = num_queries.tolist()
    return [
        group
        for group in groups
        if group.num_pages * page_size * (sum(queries[i] for i in group.requests) - 1) >= _WORTH_PAIRS
    ]


class _Grouping:
    def __init__(self, page_table: I32, num_pages: I64) -> None:
        self._table = page_table
        self._num_pages = num_pages.tolist()

    def best(self, requests: Sequence[int], depth: int, levels: int) -> tuple[int, list[SharedPrefix]]:
        """The number of pages that are read with the cheaper grouping of ``requests``, and this grouping. The first
        ``depth`` pages of the requests are the same; at most ``levels`` more levels are searched. The pages that a
        group shares are counted once, the other pages of each request on their own."""
        first, nums = requests[0], [self._num_pages[i] for i in requests]
        if len(requests) == 1:
            return nums[0], [SharedPrefix((first,), nums[0])]
        shared = depth + self._num_alike(requests, depth, min(nums))
        together = sum(nums) - shared * (len(requests) - 1)
        groups = [SharedPrefix(tuple(requests), shared)] if shared else []
        if levels == 0:
            return together, groups
        branches: dict[int, list[int]] = {}
        column = self._table[:, min(shared, self._table.shape[1] - 1)].tolist()
        for request, num in zip(requests, nums, strict=True):
            # A request that ends here is a branch of its own; page ids are not negative.
            branches.setdefault(column[request] if num > shared else -1 - request, []).append(request)
        if len(branches) == len(requests) and shared:
            return together, groups  # no two requests share more than all of them do
        parts = [self.best(branch, shared, levels - 1) for branch in branches.values()]
        apart = sum(cost for cost, _ in parts)
        if apart < together or not shared:
            return apart, list(chain.from_iterable(groups for _, groups in parts))
        return together, groups

    def _num_alike(self, requests: Sequence[int], first: int, last: int) -> int:
        """How many columns from ``first`` on, before ``last``, are the same in all rows."""
        rows = list(requests)
        for begin in range(first, last, _BLOCK):
            columns = self._table[:, begin : min(begin + _BLOCK, last)]
            alike = (columns[rows] == columns[rows[0]]).all(axis=0)
            if not alike.all():
                return begin - first + int(alike.argmin())
        return last - first
