"""The radix tree and its page pool against a naive model that keeps one dict entry per page-aligned prefix."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hicache_world import SpyPool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from recording_device import LaggingStream

from fenceline.mem_cache.tree.radix_cache import RadixCache, TreeNode
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.stream import Points

POOL_SIZE = 24
# A prefix: its namespace and its pages, each page named by one symbol.
Prefix = tuple[str, tuple[int, ...]]
# What must have passed before a page is reused: the latest serial for each stream.
Serials = dict[StreamName, int]


@dataclass
class ModelPage:
    page: int
    last_access: int
    locks: int = 0
    after: Serials = field(default_factory=dict)


def join(into: Serials, points: Points) -> None:
    for point in points:
        into[point.stream.name] = max(into.get(point.stream.name, 0), point.serial)


class NaiveTree:
    """Every cached page under the whole prefix it ends, and the prefixes at which a node of the tree ends."""

    def __init__(self, disabled: bool) -> None:
        self.disabled = disabled
        self.pages: dict[Prefix, ModelPage] = {}
        self.ends: set[Prefix] = set()
        self.clock = 0

    def match(self, prefix: Prefix) -> list[int]:
        self.clock += 1
        space, symbols = prefix
        found: list[int] = []
        for n in range(1, len(symbols) + 1):
            entry = self.pages.get((space, symbols[:n]))
            if entry is None:
                break
            entry.last_access = self.clock
            found.append(entry.page)
        if found:
            self.ends.add((space, symbols[: len(found)]))
        return found

    def insert(self, prefix: Prefix, pages: list[int], after: Points) -> int:
        """Returns how many leading pages were there already."""
        if self.disabled:
            return 0
        space, symbols = prefix
        num_existing = len(self.match(prefix))
        for n in range(num_existing, len(symbols)):
            entry = ModelPage(pages[n], self.clock)
            join(entry.after, after)
            self.pages[space, symbols[: n + 1]] = entry
        if symbols:
            self.ends.add(prefix)
        return num_existing

    def lock(self, prefix: Prefix, step: int, after: Points) -> None:
        space, symbols = prefix
        for n in range(1, len(symbols) + 1):
            entry = self.pages[space, symbols[:n]]
            entry.locks += step
            join(entry.after, after)

    def node_pages(self, end: Prefix) -> list[Prefix]:
        """The prefixes of one node's pages: from its end back to the node above."""
        space, symbols = end
        own = [end]
        for n in range(len(symbols) - 1, 0, -1):
            if (space, symbols[:n]) in self.ends:
                break
            own.append((space, symbols[:n]))
        return own[::-1]

    def evict(self, num_pages: int) -> list[tuple[list[int], Serials]]:
        """(pages, what to wait for) of each node that goes, in order."""
        gone: list[tuple[list[int], Serials]] = []
        while sum(len(pages) for pages, _ in gone) < num_pages:
            leaves = [e for e in self.ends if self.pages[e].locks == 0 and not self.has_child(e)]
            if not leaves:
                break
            oldest = min(leaves, key=lambda e: self.pages[e].last_access)
            entries = [self.pages.pop(p) for p in self.node_pages(oldest)]
            self.ends.remove(oldest)
            gone.append(([e.page for e in entries], entries[-1].after))
        return gone

    def has_child(self, end: Prefix) -> bool:
        space, symbols = end
        return any(s == space and len(t) == len(symbols) + 1 and t[:-1] == symbols for s, t in self.pages)


@dataclass
class Running:
    """A request: a locked prefix of the tree's pages, then its own."""

    space: str
    symbols: tuple[int, ...]
    node: TreeNode
    num_shared: int  # pages that are the tree's
    pages: list[int]

    def prefix(self, num_pages: int) -> Prefix:
        return self.space, self.symbols[:num_pages]

    @property
    def own(self) -> list[int]:
        return self.pages[self.num_shared :]


symbols_of_prompt = st.lists(st.integers(0, 2), max_size=6).map(tuple)
spaces = st.sampled_from(["", "", "lora"])


class RadixMachine(RuleBasedStateMachine):
    page_size = 1
    disabled = False
    lookahead = 0

    @initialize()
    def start_empty(self) -> None:
        self.pool = SpyPool("pages", POOL_SIZE)
        self.pool.log = []
        self.cache = RadixCache(self.pool, self.page_size, self.disabled, self.lookahead)
        self.model = NaiveTree(self.disabled)
        self.streams = [LaggingStream(name, frozenset()) for name in (StreamName.FORWARD, StreamName.STORE)]
        self.running: list[Running] = []
        self.free_after: dict[int, Serials] = {}

    # --- requests ------------------------------------------------------------------------------------

    @rule(space=spaces, symbols=symbols_of_prompt, tail=st.integers(0, 100))
    def look_up(self, space: str, symbols: tuple[int, ...], tail: int) -> None:
        self.match(space, symbols, tail % self.page_size)

    @rule(space=spaces, symbols=symbols_of_prompt, tail=st.integers(0, 100))
    def begin(self, space: str, symbols: tuple[int, ...], tail: int) -> None:
        node, shared = self.match(space, symbols, tail % self.page_size)
        self.cache.lock(node)
        self.model.lock((space, symbols[: len(shared)]), 1, Points.none())
        req = Running(space, symbols, node, len(shared), shared)
        self.running.append(req)
        own = self.alloc(len(symbols) - len(shared))
        if own is None:
            self.leave(req, Points.none())
        else:
            req.pages += own

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish_part(self, data: st.DataObject) -> None:
        """A chunk is done: its pages go into the tree, the request moves onto the tree's."""
        req = data.draw(st.sampled_from(self.running))
        upto = data.draw(st.integers(req.num_shared, len(req.pages)))
        self.insert(req, upto, self.draw_points(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        req = data.draw(st.sampled_from(self.running))
        own = self.alloc(1)
        if own is not None:
            req.pages += own
            req.symbols = (*req.symbols, data.draw(st.integers(0, 2)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        req, after = data.draw(st.sampled_from(self.running)), self.draw_points(data)
        self.insert(req, len(req.pages), after)
        self.leave(req, after)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.running)), self.draw_points(data))

    # --- pressure and time ---------------------------------------------------------------------------

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        log = self.pool.log = []
        num_evicted = self.cache.evict(num_pages)
        expected = self.model.evict(num_pages)
        assert [ids for ids, _ in log] == [pages for pages, _ in expected]
        assert num_evicted == sum(len(pages) for pages, _ in expected)
        for (_, after), (pages, serials) in zip(log, expected, strict=True):
            assert self.serials(after) == self.pending(serials)
            self.free_after |= dict.fromkeys(pages, serials)

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.pool.log = []
        assert self.cache.reset() == len(self.model.pages)
        assert len(self.pool.log) == len(self.model.ends)
        for entry in self.model.pages.values():
            self.free_after[entry.page] = entry.after
        self.model.pages.clear()
        self.model.ends.clear()

    @rule(index=st.integers(0, 1), num_points=st.integers(1, 4))
    def time_passes(self, index: int, num_points: int) -> None:
        stream = self.streams[index]
        stream.passed_serial = min(stream.serial, stream.passed_serial + num_points)

    # --- what must always hold -----------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        self.cache.check()
        model = self.model.pages.values()
        assert self.cache.num_locked_pages == sum(e.locks > 0 for e in model)
        assert self.cache.num_evictable_pages == sum(e.locks == 0 for e in model)
        assert self.cache.num_pages == len(model)
        assert self.cache.num_nodes == len(self.model.ends)
        tree = self.cache.all_pages().tolist()
        outside = [page for req in self.running for page in req.own]
        assert tree == sorted(e.page for e in model)
        assert sorted(tree + outside) == self.pool.owned().tolist()
        assert self.pool.num_free == POOL_SIZE - 1 - len(tree) - len(outside)

    @invariant()
    def nodes_are_the_models(self) -> None:
        todo = [(node, "", ()) for node in self.cache.root.children.values()]
        seen = set()
        while todo:
            node, space, above = todo.pop()
            space = space if above else self.cache.namespace(node)
            last_of_page = node.tokens[self.lookahead :].reshape(node.num_pages, self.page_size)[:, -1]
            symbols = above + tuple(last_of_page.tolist())
            seen.add((space, symbols))
            own = self.model.node_pages((space, symbols))
            assert node.pages.tolist() == [self.model.pages[p].page for p in own]
            for prefix in own:
                entry = self.model.pages[prefix]
                assert node.lock_ref == entry.locks
                assert self.pending(self.serials(node.after)) == self.pending(entry.after)
            todo += [(child, space, symbols) for child in node.children.values()]
        assert seen == self.model.ends

    @invariant()
    def requests_read_their_own_tokens(self) -> None:
        for req in self.running:
            shared = [self.model.pages[req.prefix(n)].page for n in range(1, req.num_shared + 1)]
            assert req.pages[: req.num_shared] == shared

    # --- steps shared by the rules -------------------------------------------------------------------

    def tokens(self, symbols: tuple[int, ...]) -> np.ndarray:
        """Pages that differ in their last token only, so that a mismatch hides late in the page: in the last token of
        their lookahead, where they have one."""
        pages = np.full((len(symbols), self.page_size), 7)
        pages[:, -1] = symbols
        return np.concatenate([np.full(self.lookahead, 7), pages.reshape(-1)])

    def match(self, space: str, symbols: tuple[int, ...], tail: int) -> tuple[TreeNode, list[int]]:
        tokens = np.concatenate([self.tokens(symbols), np.full(tail, 7)])
        got = self.cache.match_prefix(tokens, extra_key=space)
        assert got.pages.tolist() == self.model.match((space, symbols))
        assert got.pages.dtype == np.int32
        assert got.num_tokens == len(got.pages) * self.page_size
        return got.node, got.pages.tolist()

    def insert(self, req: Running, upto: int, after: Points) -> None:
        """Offer the first ``upto`` pages, retire the duplicates, move the lock and the request."""
        tokens = self.tokens(req.symbols[:upto])
        got = self.cache.insert(tokens, np.array(req.pages[:upto]), after, extra_key=req.space)
        num_existing = self.model.insert(req.prefix(upto), req.pages, after)
        assert got.num_existing_tokens == num_existing * self.page_size
        if self.disabled:
            assert (got.num_taken_pages, got.node) == (0, self.cache.root)
            assert got.pages.tolist() == req.pages[:upto]
            return
        assert got.num_taken_pages == upto - num_existing
        self.retire(req.pages[req.num_shared : num_existing], after)
        self.cache.lock(got.node)
        self.model.lock(req.prefix(upto), 1, Points.none())
        self.cache.unlock(req.node, after)
        self.model.lock(req.prefix(req.num_shared), -1, after)
        req.pages[:upto] = got.pages.tolist()
        req.num_shared, req.node = upto, got.node

    def leave(self, req: Running, after: Points) -> None:
        self.running.remove(req)
        self.retire(req.own, after)
        self.cache.unlock(req.node, after)
        self.model.lock(req.prefix(req.num_shared), -1, after)

    def alloc(self, num_pages: int) -> list[int] | None:
        """Pages whose Points cover all that any earlier user left behind."""
        if self.pool.num_free < num_pages:
            self.evict(num_pages - self.pool.num_free)
        got = self.pool.alloc(num_pages)
        if got is None:
            assert self.pool.num_free < num_pages and self.cache.num_evictable_pages == 0
            return None
        pages, after = got[0].tolist(), self.serials(got[1])
        for page in pages:
            for stream, serial in self.pending(self.free_after.pop(page, {})).items():
                assert after.get(stream, 0) >= serial, f"page {page} forgot {stream} {serial}"
        return pages

    def retire(self, pages: list[int], after: Points) -> None:
        self.pool.retire(np.array(pages, dtype=np.int32), after)
        self.free_after |= dict.fromkeys(pages, self.serials(after))

    def draw_points(self, data: st.DataObject) -> Points:
        streams = data.draw(st.lists(st.sampled_from(self.streams), unique_by=id))
        return Points.of(*(stream.record() for stream in streams))

    def pending(self, serials: Serials) -> Serials:
        passed = {s.name: s.passed_serial for s in self.streams}
        return {name: serial for name, serial in serials.items() if serial > passed[name]}

    def serials(self, points: Points) -> Serials:
        return self.pending({p.stream.name: p.serial for p in points})


@pytest.mark.timeout(900)  # a failure needs minutes to shrink
@pytest.mark.parametrize(
    ("page_size", "disabled", "lookahead"), [(1, False, 0), (4, False, 0), (4, True, 0), (1, False, 2), (4, False, 1)]
)
def test_tree_and_pool_equal_the_naive_model(page_size: int, disabled: bool, lookahead: int) -> None:
    sizes = {"page_size": page_size, "disabled": disabled, "lookahead": lookahead}
    machine = type("Machine", (RadixMachine,), sizes)
    run_machine(
        machine,
        settings=settings(
            max_examples=25 if lookahead else 40,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
