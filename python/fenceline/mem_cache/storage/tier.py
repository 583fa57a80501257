"""StorageTier: what the tree's host pages and the storage's workers have to do with each other.

Down: pages that were backed up to the host are held until a worker has written them. Up: for a request that waits,
pages behind what device and host have are looked for, fetched into leased host pages, and handed to the tree as they
come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.page_hash import page_keys
from fenceline.mem_cache.storage.controller import (
    Ack,
    Done,
    Failed,
    Fetched,
    Found,
    Storage,
    StorageTierStats,
    TimedOut,
    Written,
)
from fenceline.mem_cache.storage.worker import Prefetch
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import IntArray, MatchResult, TreeNode
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points

I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Wanted:
    """A prefetch and the prefix it is for."""

    op: Prefetch
    token_ids: IntArray  # the prefix that its keys end with
    first_page: int  # of the prefix that the keys name
    extra_key: str  # its namespace
    num_settled: int = 0  # leading host pages that are the tree's, or free again


class StorageTier:
    """The storage below a tree. One thread, the scheduler's, calls it."""

    def __init__(
        self,
        tree: HiRadixCache,
        host_pages: LeasePool,
        storage: Storage,
        page_size: int,
        prefetch_threshold: int,
    ) -> None:
        """``prefetch_threshold``: prefixes with fewer tokens beyond device and host are not looked for."""
        self._tree = tree
        self._host_pages = host_pages
        self._controller = storage.controller
        self._root_key = storage.root_key
        self._page_size = page_size
        self._threshold = prefetch_threshold
        self._num_prefetches = 0
        self._wanted: dict[int, _Wanted] = {}  # by the prefetch's handle

    # --- down ----------------------------------------------------------------------------------------

    def write(self, nodes: Sequence[TreeNode], after: Points) -> None:
        """Keep the host pages of ``nodes``, which hold their KV after ``after``."""
        for node in nodes:
            hold = self._tree.hold_host(node)
            self._controller.write(hold.keys, hold.host_pages, after, hold.id)

    # --- up ------------------------------------------------------------------------------------------

    def prefetch(self, token_ids: IntArray, match: MatchResult, extra_key: str = "") -> Prefetch | None:
        """Look for what follows ``match`` of the prompt ``token_ids`` in the namespace ``extra_key``; None where it is
        not worth it. The last token of a prompt is computed in any case."""
        num_known = match.num_tokens + match.num_host_tokens
        num_whole = (len(token_ids) - 1) // self._page_size * self._page_size
        if num_whole - num_known < max(self._threshold, 1):
            return None
        tokens = token_ids[:num_whole]
        first = num_known // self._page_size
        keys = page_keys(self._root_key(extra_key), tokens, self._page_size)[first:]
        self._num_prefetches += 1
        op = Prefetch(self._num_prefetches, keys)
        self._wanted[op.handle] = _Wanted(op, tokens, first, extra_key)
        self._controller.query(op)
        return op

    def may_schedule(self, op: Prefetch) -> bool:
        """Whether the policy lets the request go on with what is there."""
        return self._controller.may_schedule(op)

    def cancel(self, op: Prefetch) -> None:
        """The request goes on, or has left: what has not come by now need not come."""
        self._controller.cancel(op)

    # --- both ----------------------------------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        """Jobs that a worker has not done yet."""
        return self._controller.num_outstanding

    @property
    def num_fetch_pages(self) -> int:
        """Host pages leased for prefetches, which are not the tree's."""
        return sum(len(w.op.host_pages) - w.num_settled for w in self._wanted.values())

    def complete(self, acks: Sequence[Ack]) -> None:
        """Take in what the workers have done. Every step."""
        for ack in acks:
            match ack:
                case Written():
                    self._tree.release_hold(ack.handle)
                case Found():
                    self._fetch(ack.op)
                case Fetched():
                    self._settle(ack.op, ack.num_pages)
                case Done() | Failed():
                    self._end(ack.op)
                case TimedOut():  # ``may_schedule`` knows
                    pass

    def clear(self) -> int:
        """Remove every page of this model. Returns how many. Raises ``ValueError`` if that takes too long."""
        return self._controller.clear()

    def stats(self) -> StorageTierStats:
        """Counts since the start."""
        return self._controller.stats()

    def close(self) -> None:
        """End the workers."""
        self._controller.close()

    def _fetch(self, op: Prefetch) -> None:
        leased = None
        if op.num_found * self._page_size >= self._threshold:
            leased = self._tree.alloc_host(op.num_found)
        if leased is None:  # too little, or a host tier full of pages in use
            self._controller.cancel(op)
            return
        self._controller.fetch(op, *leased)

    def _settle(self, op: Prefetch, num_pages: int) -> None:
        """The next ``num_pages`` pages of a fetch hold their KV: the tree gets those that it lacks."""
        wanted = self._wanted[op.handle]
        first = wanted.num_settled
        wanted.num_settled = end = first + num_pages
        pages = op.host_pages[first:end]
        tokens = wanted.token_ids[: (wanted.first_page + end) * self._page_size]
        # The worker has waited for these Points; the streams that touch the pages next have not.
        spare = self._tree.insert_host(tokens, pages, op.after, wanted.extra_key)
        self._host_pages.retire(spare, op.after)

    def _end(self, op: Prefetch) -> None:
        wanted = self._wanted.pop(op.handle)
        unused = op.host_pages[wanted.num_settled :]
        self._host_pages.retire(unused, op.after)
