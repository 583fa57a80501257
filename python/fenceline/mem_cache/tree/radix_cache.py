"""RadixCache: which pages already hold the KV of which token prefix.

The tree maps token sequences to KV pages, a page at a time: an edge carries a run of whole pages, two
children of a node differ in their first page, so a lookup hashes one page per node and compares the rest with
numpy. It is policy and bookkeeping only (numpy, no torch, no device): it never touches the bytes of a page.

With a ``lookahead`` of L, a page's bytes depend on the L tokens behind it as well: it is found only where these
follow too. (The draft's KV of EAGLE is computed from the next token; SGLang's bigram keys are a lookahead of 1.)
Then n pages stand for ``n * page_size + L`` tokens.

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
fails an assertion, so it cannot lead to another request's page.

States. A model with recurrent layers goes on from a prefix only with their state after its last token. So a node may
have a snapshot of the state after its own tokens, and a match ends at the deepest node that has one. ``lease_state``
hands out snapshots, taking those least recently used from their nodes, which keep their pages; ``give_state`` hands one
to a node; a node that leaves retires its own. A request that begins with a snapshot copies it at once, so that a lock
on a node does not keep it.

One thread (the scheduler's) uses a cache; nothing here depends on wall-clock time or unordered iteration, so
ranks that make the same calls own the same trees.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from fenceline.mem_cache.image_keys import ImageKeys
from fenceline.mem_cache.kv_events import KVEventLog, Medium, PageRun
from fenceline.mem_cache.page_hash import PageKey, page_keys
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of whole pages that follows the parent's. Only the tree writes the fields. ``edge`` is the key under which
    ``parent.children`` holds the node. ``lock_ref`` counts the locks on this node and on all nodes below. ``after``
    joins the Points of all users that have released the device pages, and ``host_after`` those of the host pages: the
    next user waits for them. ``parent`` is None for the root and for a node that has left the tree. The pages are on
    the device, on the host, or on both; the lower fields stay at their defaults in a tree without a host tier."""

    id: int  # creation order: breaks ties deterministically
    tokens: Int32Array  # [num_pages * page_size + lookahead], owned and contiguous
    pages: Int32Array  # device pages [num_pages], owned and contiguous; empty for a node that is only on the host
    edge: bytes
    parent: TreeNode | None
    last_access: int
    after: Points
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    lock_ref: int = 0
    hit_count: int = 0  # how many matches and inserts have used the node
    version: int = 0  # counts moves of the device pages, and the departure from the tree
    state: int = 0  # the slot of the snapshot of the state after ``tokens``; 0: there is none
    state_after: Points = Points.none()  # its users on FORWARD
    on_device: bool = True
    num_device_children: int = 0  # children on the device
    num_host_children: int = 0  # children with host pages
    host_pages: Int32Array | None = None  # [num_pages], owned and contiguous
    host_after: Points = Points.none()
    host_state: int | None = None  # the slot on the host of the state after ``tokens``; wherever the pages are
    transfers: tuple[Ticket, ...] = ()  # not yet acknowledged, oldest first
    host_holds: tuple[HostHold, ...] = ()
    keys: list[PageKey] | None = None  # of the pages (``page_hash``), None until they are needed

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
        """The nodes from the top down to this one, without the root; empty for a node that has left the tree."""
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
        return self.num_device_children == 0 and self.lock_ref == 0 and self.parent is not None and self.on_device

    @property
    def is_host_evictable(self) -> bool:
        """Whether its host pages may be evicted: they are not in use, and no node below would be useless without them
        (below a node that is only on the host all are on the host)."""
        return (
            self.host_pages is not None
            and self.num_host_children == 0
            and self.lock_ref == 0
            and self.parent is not None
            and not self.host_holds
        )


@dataclass(slots=True, eq=False)
class HostHold:
    """Host pages that are used outside the tree: until the release they are neither evicted nor handed out.
    ``host_pages`` int32 [n] in token order, ``keys`` their storage keys (empty without storage). ``id`` stays valid
    whatever happens to the node: splits are followed, and pages whose node has left are retired at the last release."""

    id: int
    host_pages: Int32Array
    keys: list[bytes]
    nodes: list[TreeNode]  # the nodes that have or had the pages; HostTier keeps them
    orphans: list[Orphan] = field(default_factory=list)  # kept by HostTier


@dataclass(slots=True, eq=False)
class Orphan:
    """Held pages whose node has left the tree, and the host slot of its state, waiting for ``num_holds`` releases."""

    pages: Int32Array
    after: Points
    num_holds: int
    state: int | None = None


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix.

    ``pages`` int32 in token order (a copy) are those on the device, ``num_tokens`` their tokens, a multiple of the
    page size, ``node`` the deepest node with device pages (the root if there is none). The pages stay the tree's:
    they are safe to read only while ``node`` is locked, and, where ``loading`` is not empty, after the Points of
    these tickets: loads that FORWARD has not waited for. ``state`` is the slot of the snapshot of the state at
    the end of the prefix, 0 for none, ``host_state`` its slot on the host. Behind the prefix, up to ``num_known``,
    there are pages without a state.

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
    state: int = 0
    host_state: int | None = None
    num_known: int = 0

    @property
    def loads_state(self) -> bool:
        """Whether the state is on the host alone."""
        return not self.state and self.host_state is not None

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
    ``loading``: as in :class:`MatchResult`; the range may include pages that are being loaded for another request.
    """

    num_existing_tokens: int
    num_taken_pages: int
    pages: Int32Array
    node: TreeNode
    loading: tuple[Ticket, ...] = ()


class LruQueue:
    """Candidates by ``last_access``, the oldest first, ties by ``id``. A node has at most one entry, and touching a
    node does not touch the queue: an entry's tick may lag behind the node's, never run ahead. So an entry on top whose
    tick is exact is the oldest of all; one that lags goes back in with the new tick, one that is no candidate any more
    is dropped until it becomes one again."""

    def __init__(self, is_candidate: Callable[[TreeNode], bool]) -> None:
        """``is_candidate``: whether a node may be evicted now."""
        self._is_candidate = is_candidate
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._members: set[TreeNode] = set()  # never iterated: the order of a set is not deterministic

    def __len__(self) -> int:
        """Number of entries, including those of nodes that are no longer candidates."""
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

    def drop_others(self) -> None:
        """Drop the entries of nodes that are no longer candidates. O(entries)."""
        self._heap = [entry for entry in self._heap if self._is_candidate(entry[2])]
        heapq.heapify(self._heap)
        self._members = {node for _, _, node in self._heap}

    def clear(self) -> None:
        self._members.clear()
        self._heap = []

    def check(self) -> None:
        """Raises AssertionError that names an entry which breaks the rules above."""
        seen: set[TreeNode] = set()
        for tick, _, node in self._heap:
            assert node not in seen, f"node {node.id}: queued twice"
            seen.add(node)
            assert node in self._members, f"node {node.id}: in the queue without knowing it"
            assert tick <= node.last_access, f"node {node.id}: its queue entry is from the future"
        assert len(self._members) == len(seen), f"{len(self._members)} nodes queued, {len(seen)} queue entries"


class RadixCache:
    """A radix tree over pages with LRU eviction. ``disabled`` makes a cache that never matches and never takes a page:
    ``match_prefix`` returns no pages and the root, ``insert`` returns the caller's pages, ``num_taken_pages == 0`` and
    the root. Locking the root costs nothing, so callers need no second code path."""

    def __init__(
        self,
        pages: LeasePool,
        page_size: int,
        disabled: bool = False,
        lookahead: int = 0,
        states: LeasePool | None = None,
    ) -> None:
        """``pages``: the pool to which evicted pages are retired. ``page_size``: tokens per page. ``lookahead``: tokens
        behind a page on which its bytes depend. ``states``: the pool of snapshots of a model with recurrent layers,
        None for another. Raises ``ValueError`` if ``page_size`` is less than 1."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.lookahead = lookahead
        self.disabled = disabled
        self.images = ImageKeys()
        """What stands for the tokens of images in the keys that the methods call token ids."""
        self.events: KVEventLog | None = None  # where changes are noted, if anybody wants to know; see ``note_events``
        self._root_key: Callable[[str], PageKey] | None = None
        self._pool = pages
        self.states = states
        self.ends_at_states = states is not None
        """Whether a match ends where there is a state."""
        self._stateful = LruQueue(_has_state)
        self._clock = 0
        # Of nodes: how many were made, also by splits (while this does not change, no match has become longer), and are
        # there, without the root; how many are locked, themselves or through a node below; how often pages of one have
        # moved or left (while this does not change, every match is current).
        self.num_created = self.num_nodes = self.num_locked_nodes = self.num_moves = 0
        # Pages on unlocked nodes, which ``evict`` can retire in all, and on locked ones.
        self.num_evictable_pages = self.num_locked_pages = 0
        self.num_states = 0  # snapshots of nodes
        self._lru = LruQueue(attrgetter("is_evictable"))
        nothing: Int32Array = np.empty(0, dtype=np.int32)
        # The node of the empty prefix: owns no pages, may be locked at no cost, is never evicted.
        self.root = self._new_node(nothing, nothing, b"", None, Points.none())

    # --- lookup and growth ---------------------------------------------------------------------------

    def match_prefix(self, token_ids: IntArray, extra_key: str = "") -> MatchResult:
        """The longest prefix of ``token_ids`` [n] in the tree, whole pages with their lookahead only; the tail is
        ignored. Splits the last node where the match ends inside it, and makes the matched path the most recently used.
        ``extra_key`` names an isolated namespace: prefixes of different namespaces never match."""
        path = self._walk(self._whole_pages(token_ids), extra_key)
        num_known = sum(node.num_pages for node in path) * self.page_size
        if self.ends_at_states:
            while path[-1] is not self.root and not path[-1].state:
                path.pop()
        pages = self._pages_of(path)
        node = path[-1]
        num_tokens = len(pages) * self.page_size
        return MatchResult(pages, num_tokens, node, node, version=node.version, state=node.state, num_known=num_known)

    def is_current(self, match: MatchResult) -> bool:
        """Whether ``match`` still says where its prefix is. False once any of its pages has moved or gone (F5): match
        again before using it. True does not promise that it is still the longest. Constant time. One node's version
        stands for the whole path: pages are evicted from the leaves up, so the deepest node loses its pages first."""
        return match.node.version == match.version

    def insert(
        self, token_ids: IntArray, pages: IntArray, after: Points = Points.none(), extra_key: str = ""
    ) -> InsertResult:
        """Offer ``pages`` [n] holding the KV of ``token_ids`` [n * page_size + lookahead]; the tree takes what it
        lacks. ``after``: the caller's own writes and reads of the taken pages so far; their next user waits for it. See
        :class:`InsertResult` for who owns what afterwards. Makes the path the most recently used. Arrays are copied."""
        tokens = as_tokens(token_ids)
        offered = np.array(pages, dtype=np.int32)
        num_tokens = max(tokens.size - self.lookahead, 0)
        assert num_tokens == offered.size * self.page_size, "the tree holds whole pages only"
        if self.disabled:
            return InsertResult(0, 0, offered, self.root)
        path = self._walk(tokens, extra_key)
        existing = self._pages_of(path)
        num_existing = len(existing) * self.page_size
        taken = offered[len(existing) :].copy()
        num_adopted = self._adopt(path, taken, after)
        if taken.size > num_adopted:
            own_tokens = tokens[num_existing + num_adopted * self.page_size :].copy()
            own_pages = taken[num_adopted:].copy() if num_adopted else taken
            path.append(self._add_leaf(path[-1], own_tokens, own_pages, after, extra_key))
        loading = self._loading(path)
        return InsertResult(num_existing, taken.size, np.concatenate([existing, taken]), path[-1], loading)

    # --- states --------------------------------------------------------------------------------------

    def lease_state(self) -> tuple[int, Points] | None:
        """The slot of a snapshot that nobody has, and the Points after which it may be accessed. The node that has been
        used least recently loses its own if there is none left. None if there are no snapshots at all, or all are those
        of steps that are not published."""
        assert self.states is not None, "the model has no states"
        if not self.states.num_free:
            node = self._stateful.pop()
            if node is None:
                return None
            self._give_up_state(node)
        leased = self.states.alloc(1)
        return None if leased is None else (int(leased[0][0]), leased[1])

    def give_state(self, token_ids: IntArray, slot: int, after: Points = Points.none(), extra_key: str = "") -> None:
        """Hand over the snapshot ``slot`` of the state after the first n of ``token_ids`` [n + lookahead], whole pages,
        which has been written after ``after``. It is retired if the tree does not have all of their pages, or has such
        a state."""
        tokens = as_tokens(token_ids)
        path = self._walk(tokens, extra_key, is_hit=False)
        node = path[-1]
        num_tokens = sum(each.num_pages for each in path) * self.page_size
        if node.state or num_tokens + self.lookahead != tokens.size:
            self.retire_state(slot, after)
            return
        self.set_state(node, slot, after)

    def set_state(self, node: TreeNode, slot: int, after: Points) -> None:
        """Give ``node``, which has no snapshot, ``slot``, the state after its tokens, written after ``after``."""
        assert not node.state and node.on_device, f"node {node.id} has a state, or no pages before it"
        node.state, node.state_after = slot, after
        self.num_states += 1
        self.num_created += 1  # prefixes that have been looked up may now be longer
        self._stateful.push_if_evictable(node)
        if self.states is not None and len(self._stateful) > 2 * self.states.size:
            self._stateful.drop_others()

    def read_state(self, node: TreeNode, done: Points) -> None:
        """Note that the snapshot of ``node`` is read until ``done``."""
        node.state_after = node.state_after.join(done)

    def retire_state(self, slot: int, after: Points) -> None:
        """Give back a snapshot that no node has; others may access it after ``after``."""
        assert self.states is not None, "the model has no states"
        self.states.retire(np.array([slot], dtype=np.int32), after)

    def _give_up_state(self, node: TreeNode) -> None:
        """Take the snapshot of ``node``, which stays, for another state."""
        self._take_state(node)

    def _take_state(self, node: TreeNode) -> None:
        """``node`` has no snapshot any more: matches that end there are stale."""
        if node.state:
            self.retire_state(node.state, node.state_after)
            node.state = 0
            self.num_states -= 1
            self._note_move(node)

    # --- locks ---------------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Pin the pages of ``node`` and of all its ancestors until the matching :meth:`unlock`."""
        assert self._is_attached(node), f"node {node.id} has been evicted: match again before locking"
        while node.parent is not None:
            if node.lock_ref == 0:
                self.num_evictable_pages -= len(node.pages)
                self.num_locked_pages += len(node.pages)
                self.num_locked_nodes += 1
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: TreeNode, after: Points = Points.none()) -> None:
        """Release one :meth:`lock` on ``node``. ``after``: the last reads of the path by this user; the next user of
        a page of the path waits for them."""
        assert self._is_attached(node), f"node {node.id} left the tree while it was locked"
        while node.parent is not None:
            assert node.lock_ref > 0, f"node {node.id} is unlocked more often than it was locked"
            node.lock_ref -= 1
            node.after = node.after.join(after)
            if node.lock_ref == 0:
                self.num_locked_pages -= len(node.pages)
                self.num_evictable_pages += len(node.pages)
                self.num_locked_nodes -= 1
                self._offer(node)
            node = node.parent

    # --- shrinking -----------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Retire at least ``num_pages`` pages, least recently used leaves first, whole nodes at a time. Returns the
        number of pages retired: more than asked for if the last node was larger, fewer if only locked nodes are left.
        Amortised O(log nodes) for each node that leaves."""
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
        assert self.num_locked_nodes == 0, f"reset with {self.num_locked_pages} pages locked"
        num_retired = self.num_evictable_pages
        for node in list(self._nodes()):
            self._pool.retire(node.pages, node.after)
            self._note_removed(Medium.GPU, node)
            self._take_state(node)
            self._detach(node)
        self._clear()
        return num_retired

    def _clear(self) -> None:
        """Set the counts to those of an empty tree, after all nodes have been detached."""
        self.root.children = {}
        self.root.num_device_children = self.root.num_host_children = 0
        self._lru.clear()
        self._stateful.clear()
        self.num_nodes = 0
        self.num_evictable_pages = 0

    # --- keys and events -----------------------------------------------------------------------------

    def note_events(self, log: KVEventLog, root_key: Callable[[str], PageKey]) -> None:
        """Note all changes in ``log`` from now on; the tree is empty. ``root_key``: ``PageFingerprint.root_key``, which
        a tree above a storage has already."""
        assert not self.num_nodes, "the log would lack the pages that are in the tree"
        self.events, self._root_key, log.images = log, self._root_key or root_key, self.images

    def keys(self, node: TreeNode) -> list[PageKey]:
        """The keys of ``node``'s pages (``page_hash``), in token order; none for the root or a node that has left the
        tree, and none from a page on with an image that has been forgotten. They are computed at the first call and
        then kept on the nodes."""
        assert self._root_key is not None, "the tree was made without storage and events"
        before: PageKey | None = None
        for part in node.path():
            if part.keys is None:
                if before is None:
                    before = self._root_key(self.namespace(part))
                part.keys = page_keys(before, part.tokens, self.page_size, self.lookahead, self.images)
            if len(part.keys) < part.num_pages:
                return list(part.keys) if part is node else []
            before = part.keys[-1]
        return list(node.keys or ())

    def run(self, node: TreeNode) -> PageRun | None:
        """The pages of ``node`` that have keys, for an event; None if there are none."""
        keys, parent = self.keys(node), node.parent
        if not keys or self.events is None or parent is None:
            return None
        if parent is self.root:
            return self.events.run(keys, node.tokens, None, self.namespace(node))
        assert parent.keys, "a page with a key follows one with a key"
        return self.events.run(keys, node.tokens, parent.keys[-1], "")

    def _note_stored(self, medium: Medium, node: TreeNode) -> None:
        """The pages of ``node`` are on ``medium`` now."""
        if self.events is not None and (run := self.run(node)) is not None:
            self.events.stored(medium, run)

    def _note_removed(self, medium: Medium, node: TreeNode) -> None:
        """The pages of ``node`` are no longer on ``medium``."""
        if self.events is not None and node.keys:
            self.events.removed(medium, node.keys)

    # --- counts --------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Device pages that the tree owns."""
        return self.num_evictable_pages + self.num_locked_pages

    def all_pages(self) -> Int32Array:
        """Every page that the tree owns, ascending, int32. Walks the tree: for audits."""
        return np.sort(np.concatenate([self.root.pages, *(node.pages for node in self._nodes())]))

    def all_states(self) -> Int32Array:
        """The slot of every snapshot that the tree owns, ascending, int32."""
        return np.array(sorted(node.state for node in self._nodes() if node.state), dtype=np.int32)

    def check(self) -> None:
        """Recompute all counts and check all structural invariants. Raises AssertionError that names what is wrong."""
        self._lru.check()
        assert self.root.parent is None and self.root.num_pages == 0, "the root holds pages or has a parent"
        assert self.root.lock_ref == 0, "the root is locked"
        nodes = list(self._nodes())
        for node in nodes:
            check_node(node, self.root, self.page_size, self.lookahead)
            assert node.last_access <= self._clock, f"node {node.id}: accessed in the future"
            assert node in self._lru or not node.is_evictable, f"node {node.id}: evictable but not queued"
        num_evictable = sum(node.num_device_pages for node in nodes if node.lock_ref == 0)
        num_locked = sum(node.num_device_pages for node in nodes if node.lock_ref)
        num_queued = sum(node in self._lru for node in nodes)
        for counted, number, what in (
            (len(self._lru), num_queued, "queued nodes"),
            (self.num_nodes, len(nodes), "nodes"),
            (self.num_states, sum(node.state != 0 for node in nodes), "states"),
            (self.num_evictable_pages, num_evictable, "evictable pages"),
            (self.num_locked_pages, num_locked, "locked pages"),
            (self.num_locked_nodes, sum(node.lock_ref > 0 for node in nodes), "locked nodes"),
        ):
            assert counted == number, f"{number} {what}, counted {counted}"
        check_owned(self.all_pages(), self._pool)
        if self.states is not None:
            self._stateful.check()
            assert all(node in self._stateful for node in nodes if node.state), "a state that cannot be evicted"
            check_owned(self.all_states(), self.states)

    # --- internals -----------------------------------------------------------------------------------

    def namespace(self, node: TreeNode) -> str:
        """The ``extra_key`` of the prefixes of ``node``, which is a child of the root."""
        return node.edge[: -4 * (self.page_size + self.lookahead)].decode("utf-8", "surrogatepass")

    def _num_pages(self, tokens: Int32Array) -> int:
        """Number of whole pages of ``tokens`` whose lookahead is in ``tokens`` too."""
        return max(tokens.size - self.lookahead, 0) // self.page_size

    def _whole_pages(self, token_ids: IntArray) -> Int32Array:
        """The tokens of the whole pages of ``token_ids``, with their lookahead."""
        tokens = as_tokens(token_ids)
        return tokens[: self._num_pages(tokens) * self.page_size + self.lookahead]

    def _walk(self, tokens: Int32Array, extra_key: str, is_hit: bool = True) -> list[TreeNode]:
        """The nodes whose pages are a prefix of ``tokens`` (whole pages), root first; splits the last one where
        it matches in part, and touches all. ``is_hit``: whether it counts as a use of the nodes."""
        self._clock += 1
        path = [self.root]
        pos = 0
        while pos + self.lookahead < tokens.size:
            child = path[-1].children.get(self._edge(path[-1], tokens[pos:], extra_key))
            if child is None:
                break
            num_matched = self._num_common_pages(child, tokens[pos:])
            whole = num_matched == child.num_pages
            path.append(child if whole else self._split(child, num_matched))
            path[-1].last_access = self._clock
            path[-1].hit_count += is_hit
            pos += num_matched * self.page_size
            if not whole:
                break
        return path

    def _edge(self, parent: TreeNode, tokens: Int32Array, extra_key: str) -> bytes:
        """Key of the child that continues with ``tokens``. The namespace is part of the first level only; a
        page's bytes have a fixed length, so the concatenation is unambiguous."""
        page = tokens[: self.page_size + self.lookahead].tobytes()
        if parent is self.root and extra_key:
            return extra_key.encode("utf-8", "surrogatepass") + page
        return page

    def _num_common_pages(self, node: TreeNode, tokens: Int32Array) -> int:
        """Leading pages that ``node`` shares with ``tokens``; the first one is known to be shared."""
        if node.num_pages == 1:
            return 1
        length = min(node.tokens.size, tokens.size)
        differs = node.tokens[:length] != tokens[:length]
        first = int(differs.argmax())
        return ((first if differs[first] else length) - self.lookahead) // self.page_size

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Cut ``node`` after ``num_pages`` pages; returns the new upper half. ``node`` stays the lower half, so
        locks held on it keep covering both; both halves have its Points, for both were read by its users."""
        assert 0 < num_pages < node.num_pages, "a split leaves pages on both sides"
        cut = num_pages * self.page_size
        # Copies: a view would keep the whole array alive after the other half is evicted.
        upper = self._new_node(
            node.tokens[: cut + self.lookahead].copy(),
            node.pages[:num_pages].copy(),
            node.edge,
            node.parent,
            node.after,
        )
        upper.lock_ref = node.lock_ref
        self.num_locked_nodes += upper.lock_ref > 0
        upper.last_access = node.last_access
        upper.hit_count = node.hit_count
        upper.on_device = node.on_device
        upper.num_device_children = int(node.on_device)
        assert node.parent is not None, "the root has nothing to split"
        node.parent.children[node.edge] = upper
        node.tokens = node.tokens[cut:].copy()
        node.pages = node.pages[num_pages:].copy()
        if node.keys is not None:
            upper.keys, node.keys = node.keys[:num_pages], node.keys[num_pages:]
        node.edge = self._edge(upper, node.tokens, "")
        node.parent = upper
        upper.children[node.edge] = node
        self.num_nodes += 1
        return upper

    def _add_leaf(
        self, parent: TreeNode, tokens: Int32Array, pages: Int32Array, after: Points, extra_key: str
    ) -> TreeNode:
        leaf = self._new_node(tokens, pages, self._edge(parent, tokens, extra_key), parent, after)
        leaf.hit_count = 1
        parent.children[leaf.edge] = leaf
        parent.num_device_children += 1
        self.num_nodes += 1
        self.num_evictable_pages += len(pages)
        self._lru.push_if_evictable(leaf)
        self._note_stored(Medium.GPU, leaf)
        return leaf

    def _adopt(self, path: list[TreeNode], pages: Int32Array, after: Points) -> int:
        """Give the first of the caller's ``pages`` to nodes of ``path`` that lack device pages. Returns how many."""
        return 0

    def _loading(self, path: list[TreeNode]) -> tuple[Ticket, ...]:
        """Loads of ``path``'s pages that FORWARD has not waited for."""
        return ()

    def _offer(self, node: TreeNode) -> None:
        """``node`` has no lock any more: it may be evicted."""
        self._lru.push_if_evictable(node)

    def _evict_leaf(self, node: TreeNode) -> int:
        """Retire the pages of an unlocked leaf and drop it; its parent may be the next candidate."""
        parent = node.parent
        assert parent is not None, "the root is never evicted"
        self._pool.retire(node.pages, node.after)
        self._note_removed(Medium.GPU, node)
        self._take_state(node)
        del parent.children[node.edge]
        parent.num_device_children -= 1
        self._detach(node)
        self.num_nodes -= 1
        self.num_evictable_pages -= len(node.pages)
        self._lru.push_if_evictable(parent)
        return len(node.pages)

    def _detach(self, node: TreeNode) -> None:
        """Clear the links of ``node``, which has left the tree, and change its version: matches of it are stale."""
        node.parent = None
        node.children = {}
        node.num_device_children = node.num_host_children = 0
        self._note_move(node)

    def _note_move(self, node: TreeNode) -> None:
        """Note that ``node``'s pages are elsewhere now, or have gone."""
        node.version += 1
        self.num_moves += 1

    def _is_attached(self, node: TreeNode) -> bool:
        return node.parent is not None or node is self.root

    def _new_node(
        self, tokens: Int32Array, pages: Int32Array, edge: bytes, parent: TreeNode | None, after: Points
    ) -> TreeNode:
        self.num_created += 1
        return TreeNode(self.num_created, tokens, pages, edge, parent, self._clock, after)

    def _nodes(self, below: TreeNode | None = None) -> Iterator[TreeNode]:
        """All nodes below ``below`` (the root), parents first, siblings in the order of insertion."""
        stack = list(reversed((below or self.root).children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    @staticmethod
    def _pages_of(path: list[TreeNode]) -> Int32Array:
        return np.concatenate([node.pages for node in path])


def _has_state(node: TreeNode) -> bool:
    return node.state != 0


def as_tokens(token_ids: IntArray) -> Int32Array:
    """Token ids as contiguous int32 [n]. The vocabulary fits, and half the bytes are compared."""
    tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
    assert tokens.ndim == 1, "token ids are one-dimensional"
    return tokens


def check_node(node: TreeNode, root: TreeNode, page_size: int, lookahead: int) -> None:
    """Raises AssertionError that names what is wrong with ``node``, below ``root``, or between it and its parent."""
    name, parent = f"node {node.id}", node.parent
    assert parent is not None, f"{name}: in the tree without a parent"
    assert parent.children.get(node.edge) is node, f"{name}: its parent does not know it by its edge"
    assert node.num_pages > 0, f"{name}: holds no page"
    num_tokens = node.num_pages * page_size + lookahead
    assert node.tokens.size == num_tokens, f"{name}: tokens and pages disagree in length"
    if parent is not root:
        last = parent.tokens[parent.tokens.size - lookahead :]
        assert np.array_equal(node.tokens[:lookahead], last), f"{name}: does not begin as its parent ends"
    assert node.num_device_pages == (node.num_pages if node.on_device else 0), f"{name}: partly on the device"
    assert parent.on_device or not node.on_device, f"{name}: on the device below a node that is not"
    assert node.num_device_children == sum(child.on_device for child in node.children.values()), (
        f"{name}: miscounts its children on the device"
    )
    assert node.keys is None or len(node.keys) == node.num_pages, f"{name}: not one key for each page"
    page = node.tokens[: page_size + lookahead].tobytes()
    assert node.edge.endswith(page), f"{name}: edge is not its first page's tokens"
    assert parent is root or len(node.edge) == len(page), f"{name}: namespace below the first level"
    assert node.lock_ref >= sum(child.lock_ref for child in node.children.values()), (
        f"{name}: fewer locks than the nodes below it"
    )
    assert parent is root or node.last_access <= parent.last_access, f"{name}: newer than its parent"


def check_owned(pages: Int32Array, pool: LeasePool) -> None:
    """Raises AssertionError unless ``pages`` (ascending) are all different and all leased from ``pool``."""
    again = np.unique(pages[1:][pages[1:] == pages[:-1]])
    assert again.size == 0, f"{pool.name} held twice: {again.tolist()}"
    lost = np.setdiff1d(pages, np.asarray(pool.owned(), dtype=np.int32))
    assert lost.size == 0, f"the tree holds {pool.name} that the pool has free or never had: {lost.tolist()}"
