"""RadixCache: which pages already hold the KV of which token prefix.

The tree maps token sequences to KV pages, a page at a time: an edge carries a run of whole pages, two
children of a node differ in their first page, so a lookup hashes one page per node and compares the rest with
numpy. It is policy and bookkeeping only (numpy, no torch, no device): it never touches the bytes of a page.

Ownership. Every page is owned by exactly one of the free list, the tree, or a request. ``insert`` hands pages
to the tree; requests that use them hold a *lock* on the deepest node they use, which pins the path up to the
root; ``evict`` and ``reset`` retire pages to their :class:`LeasePool`, after the Points of all their users.
The life of a request in terms of this class::

    m = cache.match_prefix(prompt)              # m.pages are readable as long as m.node is locked
    cache.lock(m.node)
    ...                                         # own pages hold prompt[m.num_tokens:], written by forwards
    r = cache.insert(tokens, pages)             # whole pages of published steps; own pages [taken] move in
    cache.lock(r.node)                          # remap the request onto r.pages, retire own duplicates
    cache.unlock(m.node, after=last_flight)     # the pages outlive the reads of that flight

A node handle stays valid while it is locked. Splitting keeps the handle on the *lower* half, so that a lock
taken before the split still covers both halves. An unlocked handle may be evicted at any time; locking it then
fails an assertion instead of reading somebody else's page.

One thread (the scheduler's) uses a cache; nothing here depends on wall-clock time or unordered iteration, so
ranks that make the same calls own the same trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fenceline.mem_cache.radix_node import Int32Array, IntArray, LruQueue, TreeNode
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points

__all__ = ["InsertResult", "MatchResult", "RadixCache", "TreeNode"]


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix. ``pages`` int32 in token order (a copy), ``num_tokens`` a multiple of the
    page size, ``node`` the deepest matched node (the root if nothing matched). The pages stay the tree's:
    they are safe to read only while ``node`` is locked."""

    pages: Int32Array
    num_tokens: int
    node: TreeNode


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of the caller's pages.

    With ``e = num_existing_tokens // page_size``: ``pages[e : e + num_taken_pages]`` of the caller's now belong
    to the tree. All others remain the caller's (or the tree's, where it got them from a match): it remaps its
    request onto ``pages`` and retires the duplicates among ``[:e]``. ``pages`` int32 (a copy) are those that
    hold the inserted range for everybody: the tree's, or the caller's own if the cache is disabled, so that
    remapping is then the identity. ``node`` is the deepest node of the range; lock it to keep using ``pages``.
    """

    num_existing_tokens: int
    num_taken_pages: int
    pages: Int32Array
    node: TreeNode


class RadixCache:
    """A radix tree over pages with LRU eviction.

    ``disabled`` makes a cache that never matches and never takes a page: ``match_prefix`` returns no pages and
    the root, ``insert`` returns the caller's pages, ``num_taken_pages == 0`` and the root. Locking the root
    costs nothing, so callers need no second code path.
    """

    def __init__(self, pages: LeasePool, page_size: int, disabled: bool = False) -> None:
        """``pages``: the pool that evicted pages are retired to. ``page_size``: tokens per page."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.disabled = disabled
        self._pool = pages
        self._clock = 0
        self._num_created = 0
        self._num_nodes = 0  # without the root
        self._num_evictable_pages = 0
        self._num_locked_pages = 0
        self._lru = LruQueue()
        nothing: Int32Array = np.empty(0, dtype=np.int32)
        self._root = self._new_node(nothing, nothing, b"", None, Points.none())

    # --- lookup and growth ---------------------------------------------------------------------------

    def match_prefix(self, token_ids: IntArray, extra_key: str = "") -> MatchResult:
        """The longest prefix of ``token_ids`` [n] in the tree, whole pages only; the tail is ignored.

        Splits the last node where the match ends inside it, and makes the matched path the most recently used.
        ``extra_key`` names an isolated namespace: prefixes of different namespaces never match.
        """
        tokens = _as_tokens(token_ids)
        path = self._walk(tokens[: len(tokens) // self.page_size * self.page_size], extra_key)
        pages = self._pages_of(path)
        return MatchResult(pages, len(pages) * self.page_size, path[-1])

    def insert(
        self, token_ids: IntArray, pages: IntArray, after: Points = Points.none(), extra_key: str = ""
    ) -> InsertResult:
        """Offer ``pages`` [n] holding the KV of ``token_ids`` [n * page_size]; the tree takes what it lacks.

        ``after``: the caller's own writes and reads of the taken pages so far; whoever reuses them waits for
        it. See :class:`InsertResult` for who owns what afterwards. Makes the inserted path the most recently
        used. The arrays are copied.
        """
        tokens = _as_tokens(token_ids)
        offered = np.array(pages, dtype=np.int32)
        assert tokens.size == offered.size * self.page_size, "the tree holds whole pages only"
        if self.disabled:
            return InsertResult(0, 0, offered, self._root)
        path = self._walk(tokens, extra_key)
        existing = self._pages_of(path)
        num_existing = len(existing) * self.page_size
        taken = offered[len(existing) :].copy()
        if taken.size:
            path.append(self._add_leaf(path[-1], tokens[num_existing:].copy(), taken, after, extra_key))
        return InsertResult(num_existing, taken.size, np.concatenate([existing, taken]), path[-1])

    # --- locks ---------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Pin the pages of ``node`` and of all its ancestors until the matching :meth:`unlock`."""
        assert self._is_attached(node), f"node {node.id} has been evicted: match again before locking"
        while node.parent is not None:
            if node.lock_ref == 0:
                self._num_evictable_pages -= node.num_pages
                self._num_locked_pages += node.num_pages
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: TreeNode, after: Points = Points.none()) -> None:
        """Give back one :meth:`lock` on ``node``. ``after``: the last reads of the path by this user; whoever
        reuses a page of the path waits for them."""
        assert self._is_attached(node), f"node {node.id} left the tree while it was locked"
        while node.parent is not None:
            assert node.lock_ref > 0, f"node {node.id} is unlocked more often than it was locked"
            node.lock_ref -= 1
            node.after = node.after.join(after)
            if node.lock_ref == 0:
                self._num_locked_pages -= node.num_pages
                self._num_evictable_pages += node.num_pages
                self._lru.push_if_evictable(node)
            node = node.parent

    # --- shrinking -----------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Retire at least ``num_pages`` pages, least recently used leaves first, whole nodes at a time.

        Returns the number of pages retired: more than asked for if the last node was larger, fewer if only
        locked nodes are left. Amortised O(log nodes) for each node that leaves.
        """
        assert num_pages >= 0, "cannot evict a negative number of pages"
        num_evicted = 0
        while num_evicted < num_pages:
            node = self._lru.pop()
            if node is None:
                break
            num_evicted += self._evict_leaf(node)
        return num_evicted

    def reset(self) -> int:
        """Retire every page. Nothing may be locked. Returns the number of pages retired."""
        assert self._num_locked_pages == 0, f"reset with {self._num_locked_pages} pages locked"
        num_retired = self._num_evictable_pages
        for node in list(self._nodes()):
            self._pool.retire(node.pages, node.after)
            node.parent = None
            node.children = {}
        self._root.children = {}
        self._lru.clear()
        self._num_nodes = 0
        self._num_evictable_pages = 0
        return num_retired

    # --- books ---------------------------------------------------------------------------------------

    @property
    def root(self) -> TreeNode:
        """The node of the empty prefix: owns no pages, may be locked at no cost, is never evicted."""
        return self._root

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, the root not counted."""
        return self._num_nodes

    @property
    def num_evictable_pages(self) -> int:
        """Pages on unlocked nodes: what ``evict`` can retire in all."""
        return self._num_evictable_pages

    @property
    def num_locked_pages(self) -> int:
        """Pages on locked nodes."""
        return self._num_locked_pages

    @property
    def num_pages(self) -> int:
        """Pages that the tree owns."""
        return self._num_evictable_pages + self._num_locked_pages

    def all_pages(self) -> Int32Array:
        """Every page that the tree owns, ascending, int32. Walks the tree: for audits."""
        return np.sort(np.concatenate([self._root.pages, *(node.pages for node in self._nodes())]))

    def check(self) -> None:
        """Recompute every counter and structural invariant the slow way; AssertionError names what is wrong."""
        self._lru.check()
        assert self._root.parent is None and self._root.num_pages == 0, "the root holds pages or has a parent"
        assert self._root.lock_ref == 0, "the root is locked"
        num_nodes = num_evictable = num_locked = num_queued = 0
        for node in self._nodes():
            self._check_node(node)
            num_nodes += 1
            num_locked += node.num_pages if node.lock_ref else 0
            num_evictable += 0 if node.lock_ref else node.num_pages
            num_queued += node.queued
        assert num_queued == len(self._lru), f"{num_queued} nodes queued, {len(self._lru)} queue entries"
        assert num_nodes == self._num_nodes, f"{num_nodes} nodes, counted {self._num_nodes}"
        assert num_evictable == self._num_evictable_pages, (
            f"{num_evictable} evictable pages, counted {self._num_evictable_pages}"
        )
        assert num_locked == self._num_locked_pages, (
            f"{num_locked} locked pages, counted {self._num_locked_pages}"
        )
        pages = self.all_pages()
        assert len(np.unique(pages)) == len(pages), f"pages held twice: {_duplicates(pages)}"
        lost = np.setdiff1d(pages, np.asarray(self._pool.owned(), dtype=np.int32))
        assert lost.size == 0, f"the tree holds pages that the pool has free or never had: {lost.tolist()}"

    def _check_node(self, node: TreeNode) -> None:
        name, parent, size = f"node {node.id}", node.parent, self.page_size
        assert parent is not None, f"{name}: in the tree without a parent"
        assert parent.children.get(node.edge) is node, f"{name}: its parent does not know it by its edge"
        assert node.num_pages > 0, f"{name}: holds no page"
        assert node.tokens.size == node.num_pages * size, f"{name}: tokens and pages disagree in length"
        assert node.edge.endswith(node.tokens[:size].tobytes()), (
            f"{name}: edge is not its first page's tokens"
        )
        assert parent is self._root or len(node.edge) == 4 * size, f"{name}: namespace below the first level"
        assert node.lock_ref >= sum(c.lock_ref for c in node.children.values()), (
            f"{name}: fewer locks than the nodes below it"
        )
        assert node.last_access <= self._clock, f"{name}: accessed in the future"
        assert parent is self._root or node.last_access <= parent.last_access, (
            f"{name}: newer than its parent"
        )
        assert node.queued or node.children or node.lock_ref, f"{name}: evictable but not queued"

    # --- inner parts ---------------------------------------------------------------------------------

    def _walk(self, tokens: Int32Array, extra_key: str) -> list[TreeNode]:
        """The nodes whose pages are a prefix of ``tokens`` (whole pages), root first; splits the last one where
        it matches in part, and touches all."""
        self._clock += 1
        path = [self._root]
        pos = 0
        while pos < tokens.size:
            child = path[-1].children.get(self._edge(path[-1], tokens[pos:], extra_key))
            if child is None:
                break
            num_matched = self._num_common_pages(child, tokens[pos:])
            whole = num_matched == child.num_pages
            path.append(child if whole else self._split(child, num_matched))
            path[-1].last_access = self._clock
            pos += num_matched * self.page_size
            if not whole:
                break
        return path

    def _edge(self, parent: TreeNode, tokens: Int32Array, extra_key: str) -> bytes:
        """Key of the child that continues with ``tokens``. The namespace is part of the first level only; a
        page's bytes have a fixed length, so the concatenation is unambiguous."""
        page = tokens[: self.page_size].tobytes()
        if parent is self._root and extra_key:
            return extra_key.encode("utf-8", "surrogatepass") + page
        return page

    def _num_common_pages(self, node: TreeNode, tokens: Int32Array) -> int:
        """Leading pages that ``node`` shares with ``tokens``; the first one is known to be shared."""
        if node.num_pages == 1:
            return 1
        length = min(node.tokens.size, tokens.size)
        differs = node.tokens[:length] != tokens[:length]
        first = int(differs.argmax())
        return (first if differs[first] else length) // self.page_size

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Cut ``node`` after ``num_pages`` pages; returns the new upper half. ``node`` stays the lower half, so
        locks held on it keep covering both; both halves have its Points, for both were read by its users."""
        assert 0 < num_pages < node.num_pages, "a split leaves pages on both sides"
        cut = num_pages * self.page_size
        # Copies: a view would keep the whole array alive after the other half is evicted.
        upper = self._new_node(
            node.tokens[:cut].copy(), node.pages[:num_pages].copy(), node.edge, node.parent, node.after
        )
        upper.lock_ref = node.lock_ref
        upper.last_access = node.last_access
        assert node.parent is not None, "the root has nothing to split"
        node.parent.children[node.edge] = upper
        node.tokens = node.tokens[cut:].copy()
        node.pages = node.pages[num_pages:].copy()
        node.edge = self._edge(upper, node.tokens, "")
        node.parent = upper
        upper.children[node.edge] = node
        self._num_nodes += 1
        return upper

    def _add_leaf(
        self, parent: TreeNode, tokens: Int32Array, pages: Int32Array, after: Points, extra_key: str
    ) -> TreeNode:
        leaf = self._new_node(tokens, pages, self._edge(parent, tokens, extra_key), parent, after)
        parent.children[leaf.edge] = leaf
        self._num_nodes += 1
        self._num_evictable_pages += leaf.num_pages
        self._lru.push_if_evictable(leaf)
        return leaf

    def _evict_leaf(self, node: TreeNode) -> int:
        """Retire the pages of an unlocked leaf and drop it; its parent may be the next candidate."""
        parent = node.parent
        assert parent is not None, "the root is never evicted"
        self._pool.retire(node.pages, node.after)
        del parent.children[node.edge]
        node.parent = None
        self._num_nodes -= 1
        self._num_evictable_pages -= node.num_pages
        self._lru.push_if_evictable(parent)
        return node.num_pages

    def _is_attached(self, node: TreeNode) -> bool:
        return node.parent is not None or node is self._root

    def _new_node(
        self, tokens: Int32Array, pages: Int32Array, edge: bytes, parent: TreeNode | None, after: Points
    ) -> TreeNode:
        self._num_created += 1
        return TreeNode(self._num_created, tokens, pages, edge, parent, self._clock, after)

    def _nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents first, siblings in the order of insertion."""
        stack = list(reversed(self._root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    @staticmethod
    def _pages_of(path: list[TreeNode]) -> Int32Array:
        return np.concatenate([node.pages for node in path])


def _as_tokens(token_ids: IntArray) -> Int32Array:
    """Token ids as contiguous int32 [n]. The vocabulary fits, and half the bytes are compared."""
    tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
    assert tokens.ndim == 1, "token ids are one-dimensional"
    return tokens


def _duplicates(ids: Int32Array) -> list[int]:
    values, counts = np.unique(ids, return_counts=True)
    return [int(v) for v in values[counts > 1]]
