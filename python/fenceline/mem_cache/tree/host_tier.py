"""HostTier: the host pages of the tree's nodes, their order of eviction, and the holds that storage workers take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

import numpy as np

from fenceline.mem_cache.tree.in_transit import transfer_points
from fenceline.mem_cache.tree.radix_audit import check_owned
from fenceline.mem_cache.tree.radix_node import Int32Array, LruQueue, TreeNode
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points


class HostHold:
    """Somebody outside the tree uses these host pages: until the release they are neither evicted nor handed out.

    ``host_pages`` int32 [n] in token order, ``keys`` their storage keys (empty without storage). ``id`` stays good
    whatever becomes of the node: splits are followed, and pages whose node has left are retired at the last release.
    """

    __slots__ = ("host_pages", "id", "keys", "nodes", "orphans")

    def __init__(self, id: int, host_pages: Int32Array, keys: list[bytes], node: TreeNode) -> None:
        self.id = id
        self.host_pages = host_pages
        self.keys = keys
        self.nodes = [node]  # HostTier's: the nodes that have or had the pages
        self.orphans: list[Orphan] = []  # HostTier's


class Orphan:
    """Held pages whose node has left the tree, waiting for ``num_holds`` releases."""

    __slots__ = ("after", "num_holds", "pages")

    def __init__(self, pages: Int32Array, after: Points, num_holds: int) -> None:
        self.pages = pages
        self.after = after
        self.num_holds = num_holds


class HostTier:
    """Writes the host side of nodes; :class:`HiRadixCache` decides which."""

    def __init__(self, pool: LeasePool, drop: Callable[[TreeNode], None]) -> None:
        """``pool`` leases the host pages. ``drop`` takes a node out of the tree that is now on no tier."""
        self.pool = pool
        self._drop = drop
        self.lru = LruQueue(attrgetter("is_host_evictable"))
        self.num_pages = 0  # on nodes of the tree
        self.num_both_pages = 0  # of these, on nodes that are on the device too
        self.num_evicted_pages = 0  # since the start, to make room
        self._num_orphan_pages = 0
        self._num_created = 0
        self._holds: dict[int, HostHold] = {}

    @property
    def num_orphan_pages(self) -> int:
        """Pages that only a hold keeps leased."""
        return self._num_orphan_pages

    @property
    def num_holds(self) -> int:
        """Holds that have not been released."""
        return len(self._holds)

    def add(self, node: TreeNode, pages: Int32Array, after: Points) -> None:
        """``node`` gets ``pages`` [node.num_pages], leased from the pool; ``after``: their users so far."""
        assert node.host_pages is None, f"node {node.id} is on the host already"
        assert node.parent is not None, f"node {node.id} is in no tree"
        node.host_pages = pages
        node.host_after = after
        node.parent.num_host_children += 1
        self.num_pages += len(pages)
        self.num_both_pages += len(pages) if node.on_device else 0
        self.lru.push_if_evictable(node)

    def remove(self, node: TreeNode) -> int:
        """Retire ``node``'s host pages, now or, where somebody holds them, at the last release. How many."""
        assert node.host_pages is not None, f"node {node.id} is not on the host"
        assert node.parent is not None, f"node {node.id} is in no tree"
        pages, after = node.host_pages, node.host_after.join(transfer_points(node))
        if node.host_holds:
            self._orphan(node, pages, after)
        else:
            self.pool.retire(pages, after)
        self.num_pages -= len(pages)
        self.num_both_pages -= len(pages) if node.on_device else 0
        node.parent.num_host_children -= 1
        node.host_pages, node.host_after = None, Points.none()
        return len(pages)

    def split(self, upper: TreeNode, lower: TreeNode, num_pages: int) -> None:
        """``upper`` has been cut from ``lower``, whose first ``num_pages`` host pages it takes."""
        if lower.host_pages is None:
            return
        upper.host_pages = lower.host_pages[:num_pages].copy()
        lower.host_pages = lower.host_pages[num_pages:].copy()
        upper.num_host_children = 1
        upper.host_after = lower.host_after
        upper.host_holds = lower.host_holds
        for hold in lower.host_holds:
            hold.nodes.append(upper)

    def alloc(self, num_pages: int, protected: Collection[TreeNode]) -> tuple[Int32Array, Points] | None:
        """Lease pages, evicting where needed, but nothing ``protected``; None, and nothing is evicted, if that does
        not suffice."""
        missing = num_pages - self.pool.num_free
        if missing > self.num_pages:
            return None  # not even by evicting all
        if missing > 0:
            victims, num_found = self._choose(missing, protected)
            if num_found < missing:
                for node in victims:
                    self.lru.push_if_evictable(node)
                return None
            self._evict_all(victims)
        return self.pool.alloc(num_pages)

    def evict(self, num_pages: int) -> int:
        """Retire at least ``num_pages`` pages, the least recently used first, or all that may go; returns how many."""
        victims, _ = self._choose(num_pages, ())
        return self._evict_all(victims)

    def _choose(self, num_pages: int, protected: Collection[TreeNode]) -> tuple[list[TreeNode], int]:
        """Nodes with at least ``num_pages`` pages in all, the least recently used first, children before parents, as
        if each had gone when the next is chosen; their pages. They have left the queue."""
        victims: list[TreeNode] = []
        kept: list[TreeNode] = []
        num_found = 0
        while num_found < num_pages:
            node = self.lru.pop()
            if node is None:
                break
            if node in protected:
                kept.append(node)
                continue
            assert node.parent is not None, "the root has no pages"
            victims.append(node)
            num_found += node.num_host_pages
            node.parent.num_host_children -= 1  # so that the parent may be next
            self.lru.push_if_evictable(node.parent)
        for node in victims:
            assert node.parent is not None, "nobody has left yet"
            node.parent.num_host_children += 1
        for node in kept:
            self.lru.push_if_evictable(node)
        return victims, num_found

    def _evict_all(self, victims: Sequence[TreeNode]) -> int:
        num_evicted = 0
        for node in victims:
            parent = node.parent
            assert parent is not None, "the root has no pages"
            num_evicted += self.remove(node)
            if not node.on_device:
                self._drop(node)
            self.lru.push_if_evictable(parent)
        self.num_evicted_pages += num_evicted
        return num_evicted

    def hold(self, node: TreeNode, keys: list[bytes]) -> HostHold:
        """Pin the host pages of ``node`` until :meth:`release`."""
        assert node.host_pages is not None, f"node {node.id} is not on the host"
        self._num_created += 1
        hold = HostHold(self._num_created, node.host_pages.copy(), keys, node)
        node.host_holds += (hold,)
        self._holds[hold.id] = hold
        return hold

    def release(self, hold_id: int, after: Points) -> None:
        """Give back a hold. ``after``: its user's last accesses."""
        assert hold_id in self._holds, f"hold {hold_id} is released twice or was never taken"
        hold = self._holds.pop(hold_id)
        for node in hold.nodes:
            node.host_holds = tuple(other for other in node.host_holds if other is not hold)
            node.host_after = node.host_after.join(after)
            self.lru.push_if_evictable(node)
        for orphan in hold.orphans:
            orphan.after = orphan.after.join(after)
            orphan.num_holds -= 1
            if orphan.num_holds == 0:
                self._num_orphan_pages -= len(orphan.pages)
                self.pool.retire(orphan.pages, orphan.after)

    def _orphan(self, node: TreeNode, pages: Int32Array, after: Points) -> None:
        orphan = Orphan(pages, after, len(node.host_holds))
        for hold in node.host_holds:
            hold.orphans.append(orphan)
        node.host_holds = ()
        self._num_orphan_pages += len(pages)

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """AssertionError if the books disagree with the ``nodes`` of the tree."""
        self.lru.check()
        for node in nodes:
            name = f"node {node.id}"
            assert node in self.lru or not node.is_host_evictable, (
                f"{name}: evictable but not in the host queue"
            )
            assert node.num_host_children == sum(c.host_pages is not None for c in node.children.values()), (
                f"{name}: miscounts its children on the host"
            )
            for hold in node.host_holds:
                assert self._holds.get(hold.id) is hold and node in hold.nodes, f"{name}: unknown hold"
        pages = np.sort(host_pages_of(nodes))
        num_both = sum(node.num_host_pages for node in nodes if node.on_device)
        assert pages.size == self.num_pages, f"{pages.size} host pages, counted {self.num_pages}"
        assert num_both == self.num_both_pages, f"{num_both} pages on both, counted {self.num_both_pages}"
        check_owned(pages, self.pool)


def host_pages_of(nodes: Iterable[TreeNode]) -> Int32Array:
    """The host pages of ``nodes``, one after the other, int32 (a copy)."""
    parts = [node.host_pages for node in nodes if node.host_pages is not None]
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])
