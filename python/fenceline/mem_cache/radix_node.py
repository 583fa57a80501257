"""What a radix tree is made of: its nodes, and the order in which unlocked leaves are given up."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.stream import Points

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of whole pages that follows the parent's. Only :class:`RadixCache` writes the fields.

    ``edge`` is the key under which ``parent.children`` holds the node. ``lock_ref`` counts the locks on this
    node and on all nodes below. ``after`` joins the Points of everybody who let go of these pages: whoever
    reuses them waits for it. ``parent`` is None for the root and for a node that has left the tree.
    """

    id: int  # creation order: breaks ties deterministically
    tokens: Int32Array  # [num_pages * page_size], owned and contiguous
    pages: Int32Array  # [num_pages], owned and contiguous
    edge: bytes
    parent: TreeNode | None
    last_access: int
    after: Points
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    queued: bool = False  # has an entry in the eviction queue

    @property
    def num_pages(self) -> int:
        """Pages on this node alone."""
        return len(self.pages)

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf of a tree."""
        return not self.children and self.lock_ref == 0 and self.parent is not None


class LruQueue:
    """Evictable nodes by ``last_access``, the oldest first, ties by ``id``.

    A node has at most one entry, and touching a node does not touch the queue: an entry's tick may lag behind
    the node's, never run ahead. So an entry on top whose tick is exact is the oldest of all; one that lags
    goes back in with the new tick, one that is no candidate any more is dropped until it becomes one again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TreeNode]] = []

    def __len__(self) -> int:
        """Entries, those of nodes that are no candidates any more included."""
        return len(self._heap)

    def push_if_evictable(self, node: TreeNode) -> None:
        """To be called whenever ``node`` may have become an unlocked leaf. O(log n)."""
        if node.is_evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def pop(self) -> TreeNode | None:
        """Remove and return the least recently used candidate; None if there is none. Amortised O(log n)."""
        while self._heap:
            tick, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.is_evictable and tick == node.last_access:
                return node
            self.push_if_evictable(node)
        return None

    def clear(self) -> None:
        """Forget all entries."""
        for _, _, node in self._heap:
            node.queued = False
        self._heap = []

    def check(self) -> None:
        """AssertionError naming the entry that breaks the rules above."""
        seen: set[TreeNode] = set()
        for tick, _, node in self._heap:
            assert node not in seen, f"node {node.id}: queued twice"
            seen.add(node)
            assert node.queued, f"node {node.id}: in the queue without knowing it"
            assert node.parent is not None, f"node {node.id}: queued although it left the tree"
            assert tick <= node.last_access, f"node {node.id}: its queue entry is from the future"
