"""Which prefixes attention on a CPU reads once for several requests: whether they are shared, and the fewest pages are
read.

Answers do not depend on the choice. So it is made for random page tables, and compared with a plain search.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from fenceline.layers.attention import torch_backend
from fenceline.layers.attention.torch_backend import find_shared_prefixes

_NUM_TABLES = 40


def compare_shared_prefixes(random: Random) -> str:
    """The first choice that is not right, "" if all are."""
    for _ in range(_NUM_TABLES):
        tables, nums = _requests(random)
        wrong = _difference(tables, nums, [random.choice((1, 1, 3)) for _ in nums])
        if wrong:
            return f"shared prefixes: {wrong} (of {tables} with {nums} pages)"
    return ""


def _requests(random: Random) -> tuple[list[list[int]], list[int]]:
    """Rows of a page table, which begin with pages of each other, and how many pages count of each."""
    width, num_pages = random.choice((2, 3, 3, 4, 5, 7)), 1
    tables: list[list[int]] = []
    for _ in range(random.choice((2, 3, 4, 5, 9, 9))):
        kept = random.randrange(width + 1) if tables else 0
        stem = random.choice(tables)[:kept] if tables else []
        tables.append([*stem, *range(num_pages, num_pages + width - kept)])
        num_pages += width
    return tables, [random.choice((width, width, random.randint(0, width))) for _ in tables]


def _difference(tables: list[list[int]], nums: list[int], queries: list[int]) -> str:
    page_size = max(torch_backend._WORTH_PAIRS, 1)  # so that each page is worth a call for two queries
    groups = find_shared_prefixes(
        np.array(tables, np.int32), np.array(nums, np.int64), np.array(queries, np.int64), page_size
    )
    left = set(range(len(nums)))
    num_read = 0
    for group in groups:
        if not left.issuperset(group.requests) or list(group.requests) != sorted(set(group.requests)):
            return f"{group} has requests of another group"
        left -= set(group.requests)
        if not 0 < group.num_pages <= _num_shared(group.requests, tables, nums):
            return f"{group} shares fewer pages"
        if sum(queries[one] for one in group.requests) < 2:
            return f"{group} has one query"
        num_read += sum(nums[one] for one in group.requests) - group.num_pages * (len(group.requests) - 1)
    num_read += sum(nums[one] for one in left)
    least = _least(list(range(len(nums))), tables, nums)
    if len(nums) < torch_backend._MAX_PREFIX_DEPTH and num_read != least:
        return f"{groups} read {num_read} pages, and {least} are enough"
    # One request's own pages are worth a call of their own if all its queries read them.
    alone = [one for one in left if queries[one] > 1 and nums[one]]
    return f"{alone[0]} has several queries, and its pages are read for each" if alone else ""


def _num_shared(part: Sequence[int], tables: list[list[int]], nums: list[int]) -> int:
    """Leading pages that are the same in all of ``part``."""
    num = 0
    while all(num < nums[one] and tables[one][num] == tables[part[0]][num] for one in part):
        num += 1
    return num


def _least(part: list[int], tables: list[list[int]], nums: list[int]) -> int:
    """The fewest pages that are read if ``part`` is one group, or if those that go on alike are divided like this."""
    num_shared = _num_shared(part, tables, nums)
    together = sum(nums[one] for one in part) - num_shared * (len(part) - 1)
    branches: dict[object, list[int]] = {}
    for one in part:
        ends = num_shared == nums[one]
        branches.setdefault(("alone", one) if ends else tables[one][num_shared], []).append(one)
    if len(branches) == len(part):
        return together
    return min(together, sum(_least(branch, tables, nums) for branch in branches.values()))
