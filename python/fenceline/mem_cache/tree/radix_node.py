"""What a radix tree is made of: its nodes, what its calls return, and the order in which nodes are given up."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.host.transfer import Ticket
from fenceline.memory_order.stream import Points

if TYPE_CHECKING:
    from fenceline.mem_cache.tree.host_tier import HostHold

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of whole pages that follows the parent's. Only the tree writes the fields.

    ``edge`` is the key under which ``parent.children`` holds the node. ``lock_ref`` counts the locks on this
    node and on all nodes below. ``after`` joins the Points of everybody who let go of the device pages, and
    ``host_after`` of the host pages: whoever reuses them waits for it. ``parent`` is None for the root and for a
    node that has left the tree. The pages are on the device, on the host, or on both; the lower fields stay
    at their defaults in a tree without a host tier.
    """

    id: int  # creation order: breaks ties deterministically
    tokens: Int32Array  # [num_pages * page_size], owned and contiguous
    pages: Int32Array  # device pages [num_pages], owned and contiguous; empty for a node that is only on the host
    edge: bytes
    parent: TreeNode | None
    last_access: int
    after: Points
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    hit_count: int = 0  # matches and inserts that went through
    version: int = 0  # moves when the device pages do, and when the node leaves the tree
    on_device: bool = True
    num_device_children: int = 0  # children on the device
    num_host_children: int = 0  # children with host pages
    host_pages: Int32Array | None = None  # [num_pages], owned and contiguous
    host_after: Points = Points.none()
    transfers: tuple[Ticket, ...] = ()  # not yet acknowledged, oldest first
    host_holds: tuple[HostHold, ...] = ()
    keys: list[bytes] | None = None  # storage keys of the pages, once somebody asked

    @property
    def num_pages(self) -> int:
        """Pages of this node's run alone, wherever they are."""
        return len(self.pages) if self.host_pages is None else len(self.host_pages)

    @property
    def num_device_pages(self) -> int:
        """Pages of this node on the device: all or none of its run."""
        return len(self.pages)

    @property
    def num_host_pages(self) -> int:
        """Pages of this node on the host: all or none of its run."""
        return 0 if self.host_pages is None else len(self.host_pages)

    def path(self) -> list[TreeNode]:
        """From the top down to this node, the root left out; empty for a node that has left the tree."""
        nodes: list[TreeNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    @property
    def is_evictable(self) -> bool:
        """Whether its device pages may go: unlocked, in a tree, on the device, and nothing on the device below."""
        return (
            self.num_device_children == 0
            and self.lock_ref == 0
            and self.parent is not None
            and self.on_device
        )

    @property
    def is_host_evictable(self) -> bool:
        """Whether its host pages may go: nobody uses them, and no node below is there in vain without them (below a
        node that is only on the host all are on the host)."""
        return (
            self.host_pages is not None
            and self.num_host_children == 0
            and self.lock_ref == 0
            and self.parent is not None
            and not self.host_holds
        )


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix.

    ``pages`` int32 in token order (a copy) are those on the device, ``num_tokens`` their tokens, a multiple of the
    page size, ``node`` the deepest node with device pages (the root if there is none). The pages stay the tree's:
    they are safe to read only while ``node`` is locked, and, where ``loading`` is not empty, after the Points of
    these tickets: loads that FORWARD has not waited for.

    ``num_host_tokens`` tokens (whole pages) follow that are only on the host, down to ``host_node``, which is
    ``node`` if there are none. ``version`` is that of ``node``, see :meth:`RadixCache.is_current`.
    """

    pages: Int32Array
    num_tokens: int
    node: TreeNode
    host_node: TreeNode
    num_host_tokens: int = 0
    loading: tuple[Ticket, ...] = ()
    version: int = 0

    def on_device(self) -> MatchResult:
        """The same match without what is only on the host."""
        return replace(self, host_node=self.node, num_host_tokens=0)


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of the caller's pages.

    With ``e = num_existing_tokens // page_size``: ``pages[e : e + num_taken_pages]`` of the caller's now belong
    to the tree. All others remain the caller's (or the tree's, where it got them from a match): it remaps its
    request onto ``pages`` and retires the duplicates among ``[:e]``. ``pages`` int32 (a copy) are those that
    hold the inserted range for everybody: the tree's, or the caller's own if the cache is disabled, so that
    remapping is then the identity. ``node`` is the deepest node of the range; lock it to keep using ``pages``.
    ``loading``: as in :class:`MatchResult`, for who moves onto pages that are being loaded for somebody else.
    """

    num_existing_tokens: int
    num_taken_pages: int
    pages: Int32Array
    node: TreeNode
    loading: tuple[Ticket, ...] = ()


class LruQueue:
    """Candidates by ``last_access``, the oldest first, ties by ``id``.

    A node has at most one entry, and touching a node does not touch the queue: an entry's tick may lag behind
    the node's, never run ahead. So an entry on top whose tick is exact is the oldest of all; one that lags
    goes back in with the new tick, one that is no candidate any more is dropped until it becomes one again.
    """

    def __init__(self, is_candidate: Callable[[TreeNode], bool]) -> None:
        """``is_candidate``: whether a node may be given up now."""
        self._is_candidate = is_candidate
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._members: set[TreeNode] = set()  # never iterated: the order of a set is not deterministic

    def __len__(self) -> int:
        """Entries, those of nodes that are no candidates any more included."""
        return len(self._heap)

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._members

    def push_if_evictable(self, node: TreeNode) -> None:
        """To be called whenever ``node`` may have become a candidate. O(log n)."""
        if self._is_candidate(node) and node not in self._members:
            self._members.add(node)
            heapq.heappush(self._heap, (node.last_access, node.id, node))

    def pop(self) -> TreeNode | None:
        """Remove and return the least recently used candidate; None if there is none. Amortised O(log n)."""
        while self._heap:
            tick, _, node = heapq.heappop(self._heap)
            self._members.remove(node)
            if not self._is_candidate(node):
                continue
            if tick == node.last_access:
                return node
            self.push_if_evictable(node)
        return None

    def clear(self) -> None:
        """Forget all entries."""
        self._members.clear()
        self._heap = []

    def check(self) -> None:
        """AssertionError naming the entry that breaks the rules above."""
        seen: set[TreeNode] = set()
        for tick, _, node in self._heap:
            assert node not in seen, f"node {node.id}: queued twice"
            seen.add(node)
            assert node in self._members, f"node {node.id}: in the queue without knowing it"
            assert tick <= node.last_access, f"node {node.id}: its queue entry is from the future"
        assert len(self._members) == len(seen), (
            f"{len(self._members)} nodes queued, {len(seen)} queue entries"
        )
