"""Which requests of a batch have the same pages at the beginning, so that these can be read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# A prefix is worth an extra call if that saves at least so many (query, token) pairs: those of all queries but one.
_WORTH_PAIRS = 2048
# Prefixes within prefixes are looked into so far. It bounds the work, whatever a client sends.
_MAX_DEPTH = 16
_BLOCK = 64  # columns that are compared at a time


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first ``num_pages`` pages of all of ``requests``, ascending indices into the batch."""

    requests: tuple[int, ...]
    num_pages: int


def find_shared_prefixes(
    page_table: I32, num_pages: I64, num_queries: I64, page_size: int
) -> list[SharedPrefix]:
    """The prefixes that are worth being attended to by all queries of several requests (or one's many) at once.

    ``page_table`` [B, columns]; ``num_pages`` [B]: how many pages of each request lie wholly before its first query, so
    that all its queries see all their tokens; ``num_queries`` [B]. No request is in two prefixes. Where requests
    share a short prefix and some of them a longer one, whatever leaves fewer tokens to be read is taken.
    """
    if int((num_pages * num_queries).sum()) * page_size < _WORTH_PAIRS:
        return []
    # Most requests of most batches share nothing: those cost no Python.
    _, branch, sizes = np.unique(page_table[:, 0], return_inverse=True, return_counts=True)
    candidates = np.flatnonzero((num_pages > 0) & ((sizes[branch] > 1) | (num_queries > 1)))
    if len(candidates) == 0:
        return []
    _, groups = _Grouping(page_table, num_pages).best(candidates.tolist(), 0, _MAX_DEPTH)
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
        """The cheapest grouping of ``requests``, whose first ``depth`` pages are the same, and the pages that are read
        with it: of each request those that it shares with its group once, and the others."""
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
            return together, groups  # nobody shares more than all do
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
