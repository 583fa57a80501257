"""A two-tier tree with its pools, whose transfers end when the test decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hicache_world import WorldStream

from fenceline.mem_cache.transfer import PageMove, Ticket
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import InsertResult, MatchResult, TreeNode
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points

PAGE = 4


def prompt(*symbols: int) -> np.ndarray:
    """The tokens of one page for each symbol; pages differ only in their last token."""
    return np.array([[9, 9, 9, s] for s in symbols]).reshape(-1)


class Tiers:
    """``spilled`` has the nodes of each call to the spill callback. The callback backs them up if ``spill_to_host``."""

    def __init__(
        self,
        policy: str = "write_through",
        num_pages: int = 64,
        num_host_pages: int = 64,
        root_key: Callable[[str], bytes] | None = None,
    ) -> None:
        self.pool = LeasePool("KV pages", num_pages)
        self.host_pool = LeasePool("host KV pages", num_host_pages, reserved=0)
        self.tree = HiRadixCache(self.pool, PAGE, self.host_pool, policy, self._spill, root_key)
        self.forward, self.load, self.store = map(WorldStream, (StreamName.FORWARD, StreamName.LOAD, StreamName.STORE))
        self.num_tickets = 0
        self.spilled: list[list[TreeNode]] = []
        self.spill_to_host = True

    def pages(self, n: int) -> np.ndarray:
        got = self.pool.alloc(n)
        assert got is not None
        return got[0]

    def add(self, *symbols: int, after: Points = Points.none(), extra_key: str = "") -> InsertResult:
        """Insert a prompt like a request without a cached prefix."""
        pages = self.pages(len(symbols))
        got = self.tree.insert(prompt(*symbols), pages, after, extra_key)
        self.pool.retire(pages[: got.num_existing_tokens // PAGE], Points.none())
        return got

    def match(self, *symbols: int, extra_key: str = "") -> MatchResult:
        return self.tree.match_prefix(prompt(*symbols), extra_key)

    def back_up(self, *nodes: TreeNode, done: bool = False) -> tuple[Ticket, PageMove]:
        """Begin and submit a backup of exactly these nodes."""
        self.num_tickets += 1
        ticket = Ticket.store(self.num_tickets)
        move = self.tree.begin_backup(nodes, ticket)
        ticket.submit(Points.of(self.store.record()))
        if done:
            self.finish(ticket)
        return ticket, move

    def load_back(self, node: TreeNode, done: bool = False) -> tuple[Ticket, PageMove]:
        """Begin and submit a load of all nodes on the path to ``node`` that are only on the host."""
        self.num_tickets += 1
        ticket = Ticket.load(self.num_tickets)
        num_pages = sum(part.num_pages for part in node.path() if not part.on_device)
        move = self.tree.begin_load(node, self.pages(num_pages), ticket)
        point = self.load.record()
        ticket.submit(Points.of(point), (point,))
        if done:
            self.finish(ticket)
        return ticket, move

    def finish(self, ticket: Ticket) -> None:
        for point in ticket.points:
            point.stream.note_passed(point)
        self.tree.finish(ticket)

    def on_host(self, *symbols: int) -> TreeNode:
        """Make a prompt that is only on the host; returns its deepest node."""
        node = self.add(*symbols).node
        self.back_up(*(part for part in node.path() if part.host_pages is None), done=True)
        self.tree.evict(self.tree.num_evictable_pages)
        return node

    def _spill(self, nodes: Sequence[TreeNode]) -> None:
        self.spilled.append(list(nodes))
        if self.spill_to_host:
            self.back_up(*nodes)


def after_of(pool: LeasePool, pages: Sequence[int] | np.ndarray) -> set[Points]:
    """The Points that free ``pages`` carry."""
    wanted = {int(page) for page in pages}
    found = {after for ids, after in pool._pending if wanted & set(ids.tolist())}
    ready = set(pool._ready[: pool._num_ready].tolist())
    return found | ({Points.none()} if wanted & ready else set())
