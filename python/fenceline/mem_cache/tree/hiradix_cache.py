"""HiRadixCache: the radix tree over two tiers, device pages and host pages.

A node's pages are on the device, on the host, or on both; where they lie changes node by node.

* On the device the tree is closed upwards: above a node with device pages are only such nodes, so the device part
  of a match comes first. Eviction from the device takes nodes with nothing on the device below them.
* A node with a host copy leaves the device without loss; one without leaves the tree, and takes with it what is
  below (on the host alone, and of no use without its prefix).
* Eviction from the host takes nodes with nothing on the host below them; what is then on no tier leaves the tree.
* A lock pins both tiers of its path; a hold pins host pages alone, for workers outside the scheduler's thread.

Nothing is copied here. ``begin_load`` and ``begin_backup`` decide which page goes where, bind the pages to the nodes
at once and put the transfer's ticket on them; the caller submits the transfer. From then on the pages can be
matched, split and evicted like any others: pages retire with the Points of all tickets on their node.

    m = cache.match_prefix(prompt)                      # m.num_host_tokens of it only on the host
    cache.lock(m.host_node)
    pages, after = pool.alloc(m.num_host_tokens // page_size)   # after evicting, where needed
    load = cache.begin_load(m.host_node, pages, ticket)
    controller.load(ticket, load.device_pages, load.host_pages, load.after.join(after))
    ...                                                 # FORWARD waits for ticket.layer_points before it reads
    ...
    nodes = cache.backup_candidates(inserted.node)
    backup = cache.begin_backup(nodes, ticket)
    controller.store(ticket, backup.device_pages, backup.host_pages, backup.after)
    ...
    cache.finish(ticket)                                # every step, for each transfer that is done
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter

import numpy as np

from fenceline.mem_cache.kv_events import Medium
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.transfer import PageMove, Ticket, TransferKind
from fenceline.mem_cache.tree.radix_cache import (
    HostHold,
    Int32Array,
    IntArray,
    LruQueue,
    MatchResult,
    Orphan,
    RadixCache,
    TreeNode,
    as_tokens,
    check_owned,
)
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points

# Hits after which a node is copied to the host while it is on the device; write_back waits for eviction.
_BACKUP_HITS = {"write_through": 1, "write_through_selective": 2, "write_back": None}


class HiRadixCache(RadixCache):
    """A radix tree whose nodes can be on the device, on the host, or on both. One thread uses it."""

    def __init__(
        self,
        pages: LeasePool,
        page_size: int,
        host_pages: LeasePool,
        write_policy: str,
        spill: Callable[[Sequence[TreeNode]], None] | None = None,
        root_key: Callable[[str], PageKey] | None = None,
        lookahead: int = 0,
        states: tuple[LeasePool, LeasePool] | None = None,
    ) -> None:
        """``pages``, ``host_pages``: the pools of the two tiers. ``states``: those of snapshots on the device and on
        the host, of a model with recurrent layers. ``write_policy``: write_through, write_through_selective or
        write_back. ``root_key`` (with storage): ``PageFingerprint.root_key``. ``lookahead``
        as in :class:`RadixCache`. ``spill(nodes)`` (write_back) is called inside :meth:`evict` with all nodes that are
        about to lose their only copy; it calls :meth:`begin_backup` for them and submits the transfer before it
        returns. What it does not back up is lost. Raises ``ValueError`` for an unknown policy."""
        if write_policy not in _BACKUP_HITS:
            raise ValueError(f"write policy {write_policy!r} is none of {', '.join(_BACKUP_HITS)}")
        assert spill or write_policy != "write_back", "write_back needs a spill function"
        self.host = HostTier(
            host_pages,
            self._drop,
            self._note_move,
            partial(self._note_stored, Medium.CPU),
            partial(self._note_removed, Medium.CPU),
            None if states is None else states[1],
        )
        self.transit = InTransit()
        super().__init__(pages, page_size, lookahead=lookahead, states=None if states is None else states[0])
        self.write_policy = write_policy
        self._spill = spill if write_policy == "write_back" else None
        self._root_key = root_key
        self._leaving: frozenset[TreeNode] = frozenset()  # what evict() is about to take off the device

    # --- lookup --------------------------------------------------------------------------------------

    def match_prefix(self, token_ids: IntArray, extra_key: str = "") -> MatchResult:
        """As in :class:`RadixCache`. The result also says how many tokens follow that are only on the host, and for
        which loads of the path FORWARD has not waited."""
        path = self._walk(self._whole_pages(token_ids), extra_key)
        num_known = sum(node.num_pages for node in path) * self.page_size
        if self.ends_at_states:
            while path[-1] is not self.root and not path[-1].state and path[-1].host_state is None:
                path.pop()
        device = [node for node in path if node.on_device]
        pages = self._pages_of(device)
        num_host_pages = sum(node.num_pages for node in path[len(device) :])
        return MatchResult(
            pages=pages,
            num_tokens=len(pages) * self.page_size,
            node=device[-1],
            host_node=path[-1],
            num_host_tokens=num_host_pages * self.page_size,
            loading=self._loading(device),
            version=device[-1].version,
            state=path[-1].state,
            host_state=path[-1].host_state,
            num_known=num_known,
        )

    def is_current(self, match: MatchResult) -> bool:
        """As in :class:`RadixCache`, also for the part on the host and the state: False too if some of these has moved
        or gone."""
        end = match.host_node
        if match.node.version != match.version or not self._is_attached(end):
            return False
        if (end.state, end.host_state) != (match.state, match.host_state):
            return False
        if match.host_node is match.node:
            return True
        host_only = self._host_only(match.host_node)
        return sum(node.num_pages for node in host_only) * self.page_size == match.num_host_tokens

    # --- device <- host ------------------------------------------------------------------------------

    def begin_load(self, host_node: TreeNode, device_pages: IntArray, ticket: Ticket) -> PageMove:
        """Bind ``device_pages`` [n] to the nodes of ``host_node``'s path that are only on the host, n pages in all
        (``MatchResult.num_host_tokens`` of a current match), in token order, and make them part of ``ticket``. The tree
        owns the pages from here on. The caller submits the load, after the Points of the result and those of
        ``device_pages``, before it makes another call that may evict."""
        assert ticket.kind is TransferKind.LOAD, f"{ticket!r} does not load"
        assert self._is_attached(host_node), f"node {host_node.id} has left: match again before loading"
        pages = np.array(device_pages, dtype=np.int32)
        nodes = self._host_only(host_node)
        assert pages.size == sum(n.num_pages for n in nodes), "one device page for each page to load"
        after, pos = Points.none(), 0
        for node in nodes:
            after = after.join(node.host_after)
            self._bind(node, pages[pos : pos + node.num_pages].copy(), Points.none())
            self.transit.add(node, ticket)
            pos += node.num_pages
        ticket.add_pages(pos)
        return PageMove(pages, host_pages_of(nodes), after)

    def begin_load_state(self, node: TreeNode, slot: int, ticket: Ticket) -> PageMove:
        """Make the state that ``node`` has on the host a part of ``ticket``, which loads it into ``slot``. The node is
        on the device, at least by a load of the same ticket."""
        assert node.host_state is not None and node.on_device, f"node {node.id} has no state to load"
        after = node.host_after
        for other in node.transfers:
            if other is not ticket:
                after = after.join(other.points)
        self.transit.add(node, ticket)
        return PageMove(_NO_PAGES, _NO_PAGES, after, ((slot, node.host_state),))

    def finish(self, ticket: Ticket) -> None:
        """Call it when ``ticket``'s Points are known to have passed: nodes do not carry the ticket any longer."""
        self.transit.finish(ticket)

    # --- device -> host ------------------------------------------------------------------------------

    def backup_candidates(self, *nodes: TreeNode, force: bool = False) -> list[TreeNode]:
        """The nodes on the paths of ``nodes`` that the write policy wants on the host now and that are not there,
        parents before children, each once. ``force``: whatever the policy. Nodes that have left the tree are left out.
        """
        threshold = 0 if force else _BACKUP_HITS[self.write_policy]
        if threshold is None:
            return []
        on_paths = dict.fromkeys(part for node in nodes for part in node.path())
        return [part for part in on_paths if _is_only_on_device(part) and part.hit_count >= threshold]

    def begin_backup(self, nodes: Sequence[TreeNode], ticket: Ticket) -> PageMove:
        """Give ``nodes`` (parents before children) host pages, and host slots of their states, as part of ``ticket``;
        those that have some already or are not on the device are skipped. Makes room on the host by evicting there, but
        evicts nothing that is locked or held, and nothing on the paths of ``nodes``. Nodes that still do not fit are
        left out, and so are those below them. The caller submits the store (unless there is nothing to copy) before it
        makes another call that may evict."""
        assert ticket.kind is TransferKind.STORE, f"{ticket!r} does not store"
        protected = self._leaving.union(*(node.path() for node in nodes))
        backed_up: list[TreeNode] = []
        refused: set[TreeNode] = set()
        states: list[tuple[int, int]] = []
        after = Points.none()
        for node in nodes:
            if not node.on_device or not self._is_attached(node):
                continue
            in_flight = transfer_points(node)
            if node.host_pages is None:
                leased = None if node.parent in refused else self.host.alloc(node.num_pages, protected)
                if leased is None:
                    refused.add(node)
                    continue
                after = after.join(leased[1]).join(node.after).join(in_flight)
                self.host.add(node, leased[0], Points.none())
                self.transit.add(node, ticket)
                ticket.add_pages(node.num_pages)
                backed_up.append(node)
            if node.state and node.host_state is None and (slot := self.host.alloc_state(protected)) is not None:
                after = after.join(slot[1]).join(node.state_after).join(in_flight)
                self.host.add_state(node, slot[0])
                self.transit.add(node, ticket)
                states.append((node.state, slot[0]))
        pages = self._pages_of([self.root, *backed_up])
        return PageMove(pages, host_pages_of(backed_up), after, tuple(states))

    # --- shrinking -----------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Retire at least ``num_pages`` device pages, least recently used nodes first, whole nodes at a time. Nodes
        with a host copy stay in the tree. Under write_back the others are spilled first, all in one batch. Returns the
        number of device pages retired, see :meth:`RadixCache.evict`."""
        assert num_pages >= 0, "cannot evict a negative number of pages"
        victims: list[TreeNode] = []
        num_evicted = 0
        while num_evicted < num_pages:
            node = self._lru.pop()
            if node is None:
                break
            assert node.parent is not None, "the root is never evicted"
            victims.append(node)
            num_evicted += node.num_device_pages
            # The parent may be chosen next. The pages of all victims are evicted after this loop.
            node.parent.num_device_children -= 1
            self._lru.push_if_evictable(node.parent)
        self._spill_all(victims)
        for node in victims:  # children before parents
            self._leave_device(node)
        return num_evicted

    def reset(self) -> int:
        """Retire every page of both tiers. Nothing may be locked; transfers may be running and holds open: their
        pages retire after the transfers' Points, or at the release. Returns the number of device pages retired."""
        assert self.num_locked_nodes == 0, f"reset with {self.num_locked_nodes} nodes locked"
        num_retired = self.num_evictable_pages
        for node in list(self._nodes()):
            self._pool.retire(node.pages, node.after.join(transfer_points(node)))
            if node.on_device:
                self._note_removed(Medium.GPU, node)
            self._take_state(node)
            self.host.leave(node)
            self.transit.remove(node)
            self._detach(node)
        self.host.lru.clear()
        self.host.stateful.clear()
        self._clear()
        return num_retired

    # --- host pages from storage, and holds ------------------------------------------------------------

    def alloc_host(self, num_pages: int) -> tuple[Int32Array, Points] | None:
        """Lease host pages for the caller, evicting from the host if necessary; None if that does not free enough."""
        return self.host.alloc(num_pages, ())

    def insert_host(
        self, token_ids: IntArray, host_pages: IntArray, after: Points = Points.none(), extra_key: str = ""
    ) -> Int32Array:
        """Offer ``host_pages`` [n] with the KV of the *last* n pages of ``token_ids`` (whole pages, with lookahead).
        The tree takes those that it has on no tier, or none if it no longer has the prefix before them. Returns the
        pages that it has not taken, int32, which remain the caller's. ``after``: their writers. Arrays are copied."""
        tokens, offered = as_tokens(token_ids), np.array(host_pages, dtype=np.int32)
        num_pages = self._num_pages(tokens)
        assert tokens.size == num_pages * self.page_size + self.lookahead, "the tree holds whole pages only"
        first = num_pages - offered.size
        assert first >= 0, "more pages than tokens"
        path = self._walk(tokens, extra_key)
        num_cached = sum(node.num_pages for node in path)
        num_known = num_cached - first
        if num_known < 0 or num_known == offered.size:
            return offered
        own_tokens = tokens[num_cached * self.page_size :].copy()
        self._add_host_leaf(path[-1], own_tokens, offered[num_known:].copy(), after, extra_key)
        return offered[:num_known].copy()

    def insert_host_state(
        self, token_ids: IntArray, slot: int, after: Points = Points.none(), extra_key: str = ""
    ) -> None:
        """Hand over the host's ``slot`` of the state after ``token_ids`` [n], whole pages with lookahead, written after
        ``after``. It is retired if the tree does not have all of their pages, or has such a state."""
        tokens = as_tokens(token_ids)
        path = self._walk(tokens, extra_key, is_hit=False)
        node = path[-1]
        if node.host_state is not None or sum(each.num_pages for each in path) != self._num_pages(tokens):
            self.host.retire_state(slot, after)
            return
        self.host.add_state(node, slot, after)
        self.num_created += 1  # prefixes that have been looked up may now be longer

    def hold_host(self, node: TreeNode) -> HostHold:
        """Pin the host pages of ``node``, which has some, and its state, until :meth:`release_hold`, whatever happens
        to the node."""
        return self.host.hold(node, self.keys(node) if self._root_key is not None else [])

    def release_hold(self, hold_id: int) -> None:
        """Release a hold, whose user no longer accesses the pages."""
        self.host.release(hold_id)

    # --- counts --------------------------------------------------------------------------------------

    def all_host_pages(self) -> Int32Array:
        """Every host page that the tree owns, ascending, int32. Walks the tree: for audits."""
        return np.sort(host_pages_of(node for node in self._nodes() if node.host_pages is not None))

    def check(self) -> None:
        """As in :class:`RadixCache`, both tiers, holds and transfers."""
        super().check()
        nodes = list(self._nodes())
        self.host.check(nodes)
        self.transit.check(nodes)
        assert not self._leaving, "nodes are left over from an eviction"

    # --- internals -----------------------------------------------------------------------------------

    def _bind(self, node: TreeNode, pages: Int32Array, after: Points) -> None:
        """Give device ``pages`` to ``node``, which was only on the host; the nodes above it are on the device."""
        assert node.parent is not None and node.parent.on_device, "the device holds whole prefixes"
        node.pages, node.after, node.on_device = pages, after, True
        node.parent.num_device_children += 1
        if node.lock_ref:
            self.num_locked_pages += len(pages)
        else:
            self.num_evictable_pages += len(pages)
        self.host.num_both_pages += len(pages)
        self._note_move(node)
        self._lru.push_if_evictable(node)
        self._note_stored(Medium.GPU, node)

    def _adopt(self, path: list[TreeNode], pages: Int32Array, after: Points) -> int:
        """As in :class:`RadixCache`. The tokens of nodes that are only on the host have been computed again, so the
        caller's pages take the place of a load."""
        pos = 0
        for node in path:
            if not node.on_device:
                self._bind(node, pages[pos : pos + node.num_pages].copy(), after)
                pos += node.num_pages
        return pos

    def _loading(self, path: list[TreeNode]) -> tuple[Ticket, ...]:
        return loads_of(path)

    def _spill_all(self, victims: list[TreeNode]) -> None:
        """Under write_back, have the victims without a host copy backed up: parents and the most recently used nodes
        first, which matter most if the host is full."""
        nodes = [node for node in reversed(victims) if _is_only_on_device(node)]
        if self._spill is None or not nodes:
            return
        self._leaving = frozenset(victims)
        self._spill(nodes)
        self._leaving = frozenset()

    def _leave_device(self, node: TreeNode) -> None:
        """Retire the device pages of ``node``, which its parent no longer counts. It stays if it has a host copy."""
        in_flight = transfer_points(node)
        self._pool.retire(node.pages, node.after.join(in_flight))
        self._note_removed(Medium.GPU, node)
        self._take_state(node)
        self.num_evictable_pages -= len(node.pages)
        self.transit.remove(node)
        # A transfer that still runs uses the host pages too, and their next user does not find its ticket here any
        # more.
        node.host_after = node.host_after.join(in_flight)
        if node.host_pages is None:
            self._drop(node)
            return
        self.host.num_both_pages -= len(node.pages)
        node.pages, node.after, node.on_device = np.empty(0, dtype=np.int32), Points.none(), False
        self._note_move(node)
        self.host.lru.push_if_evictable(node)

    def _drop(self, node: TreeNode) -> None:
        """Remove ``node`` from the tree, with all nodes below it, which are only on the host."""
        parent = node.parent
        assert parent is not None, "the root never leaves"
        for below in reversed(list(self._nodes(node))):
            self.host.leave(below)
            self._detach(below)
            self.num_nodes -= 1
        self.host.leave(node)
        del parent.children[node.edge]
        self._detach(node)
        self.num_nodes -= 1

    def _add_host_leaf(
        self, parent: TreeNode, tokens: Int32Array, pages: Int32Array, after: Points, extra_key: str
    ) -> TreeNode:
        edge = self._edge(parent, tokens, extra_key)
        leaf = self._new_node(tokens, np.empty(0, dtype=np.int32), edge, parent, Points.none())
        leaf.on_device = False
        parent.children[edge] = leaf
        self.num_nodes += 1
        self.host.add(leaf, pages, after)
        return leaf

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """As in :class:`RadixCache`; tickets, holds and Points of the node belong to both halves."""
        upper = super()._split(node, num_pages)
        self.host.split(upper, node, num_pages)
        self.transit.split(upper, node)
        return upper

    def _offer(self, node: TreeNode) -> None:
        super()._offer(node)
        self.host.offer(node)

    def _give_up_state(self, node: TreeNode) -> None:
        """As in :class:`RadixCache`; under write_back it is spilled before, with its pages."""
        if self._spill is not None and node.host_state is None:
            self._spill([node])
        super()._give_up_state(node)

    def _take_state(self, node: TreeNode) -> None:
        """As in :class:`RadixCache`; a transfer may still use the snapshot."""
        if node.state:
            node.state_after = node.state_after.join(transfer_points(node))
        super()._take_state(node)

    def _host_only(self, node: TreeNode) -> list[TreeNode]:
        """The nodes from the top down to ``node`` that are not on the device."""
        return [part for part in node.path() if not part.on_device]


class HostTier:
    """Gives nodes their host pages and takes them back; :class:`HiRadixCache` decides which nodes."""

    def __init__(
        self,
        pool: LeasePool,
        drop: Callable[[TreeNode], None],
        moved: Callable[[TreeNode], None],
        stored: Callable[[TreeNode], None],
        removed: Callable[[TreeNode], None],
        states: LeasePool | None = None,
    ) -> None:
        """``pool`` leases the host pages, ``states`` the slots of states. ``drop`` removes a node from the tree that is
        on no tier any more; ``moved`` notes that what matches know of a node has changed, ``stored`` and ``removed``
        that its pages are now on the host, or no longer."""
        self.pool, self.states = pool, states
        self._drop, self._moved, self._stored, self._removed = drop, moved, stored, removed
        self.stateful = LruQueue(_has_free_host_state)
        self.num_states = 0  # on nodes of the tree
        self.num_orphan_states = 0  # that only a hold keeps leased
        self.lru = LruQueue(attrgetter("is_host_evictable"))
        self.num_pages = 0  # on nodes of the tree
        self.num_both_pages = 0  # of these, on nodes that are on the device too
        self.num_evicted_pages = 0  # since the start, to make room
        self.num_orphan_pages = 0  # that only a hold keeps leased
        self._num_created = 0
        self._holds: dict[int, HostHold] = {}

    @property
    def num_holds(self) -> int:
        """Holds that have not been released."""
        return len(self._holds)

    def add(self, node: TreeNode, pages: Int32Array, after: Points) -> None:
        """Give ``node`` the ``pages`` [node.num_pages], leased from the pool; ``after``: their users so far."""
        assert node.host_pages is None, f"node {node.id} is on the host already"
        assert node.parent is not None, f"node {node.id} is in no tree"
        node.host_pages = pages
        node.host_after = node.host_after.join(after)
        node.parent.num_host_children += 1
        self.num_pages += len(pages)
        self.num_both_pages += len(pages) if node.on_device else 0
        self.lru.push_if_evictable(node)
        self._stored(node)

    def remove(self, node: TreeNode) -> int:
        """Retire ``node``'s host pages, now or, if they are held, at the last release. Returns how many."""
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
        self._removed(node)
        node.host_pages = None
        if node.host_state is None:
            node.host_after = Points.none()
        return len(pages)

    def leave(self, node: TreeNode) -> None:
        """Give back what ``node``, which leaves the tree, has on the host."""
        if node.host_pages is not None:
            self.remove(node)
        self._remove_state(node)

    def offer(self, node: TreeNode) -> None:
        """What ``node`` has on the host may be evicted, if nothing else keeps it."""
        self.lru.push_if_evictable(node)
        self.stateful.push_if_evictable(node)

    def alloc_state(self, protected: Collection[TreeNode] = ()) -> tuple[int, Points] | None:
        """Lease a slot for a state. If there is none left, the node that has been used least recently loses its own,
        unless it is ``protected``; None if all are in use."""
        if self.states is None:
            return None
        if not self.states.num_free:
            kept: list[TreeNode] = []
            while (node := self.stateful.pop()) is not None and node in protected:
                kept.append(node)
            for other in kept:
                self.stateful.push_if_evictable(other)
            if node is None:
                return None
            self._remove_state(node)
            self._moved(node)
        leased = self.states.alloc(1)
        return None if leased is None else (int(leased[0][0]), leased[1])

    def add_state(self, node: TreeNode, slot: int, after: Points = Points.none()) -> None:
        """Give ``node`` the ``slot``, leased for the state after its tokens; ``after``: its users so far."""
        assert node.host_state is None and node.parent is not None, f"node {node.id} is in no tree, or has a state"
        node.host_state = slot
        node.host_after = node.host_after.join(after)
        self.num_states += 1
        self.stateful.push_if_evictable(node)
        if self.states is not None and len(self.stateful) > 2 * self.states.size:
            self.stateful.drop_others()

    def retire_state(self, slot: int, after: Points) -> None:
        """Give back a slot that no node has."""
        assert self.states is not None, "there are no states"
        self.states.retire(np.array([slot], dtype=np.int32), after)

    def _remove_state(self, node: TreeNode) -> None:
        if node.host_state is not None:
            self.retire_state(node.host_state, node.host_after.join(transfer_points(node)))
            node.host_state = None
            self.num_states -= 1

    def split(self, upper: TreeNode, lower: TreeNode, num_pages: int) -> None:
        """Note a split: ``upper`` has been cut from ``lower`` and takes its first ``num_pages`` host pages."""
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
        """Lease pages, evicting nodes that are not ``protected`` if necessary. If that would not free enough, nothing
        is evicted and the result is None."""
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
        """Retire at least ``num_pages`` pages, the least recently used first, whole nodes at a time, or all that may
        go: nodes that are locked, held, or needed by a node below stay. Returns how many."""
        assert num_pages >= 0, "cannot evict a negative number of pages"
        victims, _ = self._choose(num_pages, ())
        return self._evict_all(victims)

    def _choose(self, num_pages: int, protected: Collection[TreeNode]) -> tuple[list[TreeNode], int]:
        """Choose nodes with at least ``num_pages`` pages in all, the least recently used first, children before
        parents: each is chosen as if the ones before had been evicted. Returns them and their number of pages."""
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
            node.parent.num_host_children -= 1  # the parent may be chosen next
            self.lru.push_if_evictable(node.parent)
        for node in victims:
            assert node.parent is not None, "no node has been removed yet"
            node.parent.num_host_children += 1
        for node in kept:
            self.lru.push_if_evictable(node)
        return victims, num_found

    def _evict_all(self, victims: Sequence[TreeNode]) -> int:
        num_evicted = 0
        for node in victims:
            parent = node.parent
            assert parent is not None, "the root has no pages"
            assert node.lock_ref == 0 and not node.host_holds, f"node {node.id} is evicted while it is in use"
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
        hold = HostHold(self._num_created, node.host_pages.copy(), keys, [node])
        node.host_holds += (hold,)
        self._holds[hold.id] = hold
        return hold

    def release(self, hold_id: int) -> None:
        """Release a hold, whose user no longer accesses the pages."""
        assert hold_id in self._holds, f"hold {hold_id} is released twice or was never taken"
        hold = self._holds.pop(hold_id)
        for node in hold.nodes:
            node.host_holds = tuple(other for other in node.host_holds if other is not hold)
            self.offer(node)
        for orphan in hold.orphans:
            orphan.num_holds -= 1
            if orphan.num_holds == 0:
                self.num_orphan_pages -= len(orphan.pages)
                self.pool.retire(orphan.pages, orphan.after)
                if orphan.state is not None:
                    self.num_orphan_states -= 1
                    self.retire_state(orphan.state, orphan.after)

    def _orphan(self, node: TreeNode, pages: Int32Array, after: Points) -> None:
        orphan = Orphan(pages, after, len(node.host_holds), node.host_state)
        if node.host_state is not None:
            node.host_state = None
            self.num_states -= 1
            self.num_orphan_states += 1
        for hold in node.host_holds:
            hold.orphans.append(orphan)
        node.host_holds = ()
        self.num_orphan_pages += len(pages)

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """Raises AssertionError if the counts disagree with the ``nodes`` of the tree."""
        self.lru.check()
        for node in nodes:
            name = f"node {node.id}"
            assert node in self.lru or not node.is_host_evictable, f"{name}: evictable but not in the host queue"
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
        states = [node.host_state for node in nodes if node.host_state is not None]
        assert len(states) == self.num_states, f"{len(states)} host states, counted {self.num_states}"
        if self.states is not None:
            self.stateful.check()
            free = (node for node in nodes if _has_free_host_state(node))
            assert all(node in self.stateful for node in free), "a host state that cannot be evicted"
            check_owned(np.array(sorted(states), dtype=np.int32), self.states)


class InTransit:
    """Which nodes carry which tickets. Splits and departures update it, so that an acknowledgement looks up its ticket
    here and no other code has to remember a node (F15)."""

    def __init__(self) -> None:
        self._nodes: dict[Ticket, list[TreeNode]] = {}
        self.num_pages = 0  # of nodes that carry a ticket

    def add(self, node: TreeNode, ticket: Ticket) -> None:
        """Note that ``node``'s pages, or its state, are part of ``ticket``'s transfer."""
        if ticket in node.transfers:
            return
        if not node.transfers:
            self.num_pages += node.num_pages
        node.transfers += (ticket,)
        self._nodes.setdefault(ticket, []).append(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Note a split: ``upper`` has been cut from the front of ``lower``, and both are in the same transfers."""
        upper.transfers = lower.transfers
        for ticket in lower.transfers:
            self._nodes[ticket].append(upper)

    def remove(self, node: TreeNode) -> None:
        """Forget the tickets of ``node``, which has left the tree or the device, its Points passed on."""
        if node.transfers:
            self.num_pages -= node.num_pages
            node.transfers = ()

    def finish(self, ticket: Ticket) -> None:
        """Forget ``ticket``: its Points are known to have passed, so nodes need not carry it any longer."""
        assert ticket.points.passed, f"{ticket!r} is finished before it is done"
        for node in self._nodes.pop(ticket, ()):
            if ticket in node.transfers:
                node.transfers = tuple(other for other in node.transfers if other is not ticket)
                if not node.transfers:
                    self.num_pages -= node.num_pages

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """Raises AssertionError if the counts disagree with the ``nodes`` of the tree."""
        for node in nodes:
            assert node.on_device or not node.transfers, f"node {node.id}: in transit to no device page"
            for ticket in node.transfers:
                assert any(known is node for known in self._nodes.get(ticket, ())), (
                    f"node {node.id}: {ticket!r} does not know it"
                )
        num_pages = sum(node.num_pages for node in nodes if node.transfers)
        assert num_pages == self.num_pages, f"{num_pages} pages in transit, counted {self.num_pages}"


_NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)


def _is_only_on_device(node: TreeNode) -> bool:
    """Whether the pages of ``node``, or its state, are on the device alone."""
    return node.host_pages is None or (node.state != 0 and node.host_state is None)


def _has_free_host_state(node: TreeNode) -> bool:
    """Whether the host state of ``node`` may be evicted."""
    return node.host_state is not None and node.lock_ref == 0 and not node.host_holds


def host_pages_of(nodes: Iterable[TreeNode]) -> Int32Array:
    """The host pages of ``nodes``, one after the other, int32 (a copy)."""
    parts = [node.host_pages for node in nodes if node.host_pages is not None]
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])


def transfer_points(node: TreeNode) -> Points:
    """The Points after which all transfers of ``node``'s pages are done. They must have been submitted."""
    after = Points.none()
    for ticket in node.transfers:
        after = after.join(ticket.points)
    return after


def loads_of(path: Sequence[TreeNode]) -> tuple[Ticket, ...]:
    """Loads of the pages of ``path`` that FORWARD has not waited for, each once."""
    found = dict.fromkeys(
        ticket for node in path for ticket in node.transfers if ticket.kind is TransferKind.LOAD and not ticket.waited
    )
    return tuple(found)
