"""The storage tier under the tree: whatever the workers do, and whenever, each host page holds its own prefix's KV."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenceline.mem_cache.hicache import HiCache, StorageTier
from fenceline.mem_cache.page_hash import PageFingerprint, PageKey, PageRoots, page_keys
from fenceline.mem_cache.storage.controller import Ack, Done, Fetched, Found, Storage, StorageController, Written
from fenceline.mem_cache.storage.worker import Outcome, Prefetch
from fenceline.mem_cache.transfer import Ticket
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points
from fenceline.scheduler.request_memory import RequestMemory

PAGE = 2
NUM_PAGES, NUM_HOST_PAGES = 24, 14
SPACES = ("", "", "lora")


class ScriptedStorage:
    """Stands in for a StorageController: ``go_on`` says when a worker does its next piece of work, and with how many
    pages. ``host`` has what each host page holds, as the key of the KV; a worker writes its pages until the last
    moment."""

    def __init__(self, host: dict[int, PageKey]) -> None:
        self.host = host
        self.stored: set[PageKey] = set()
        self.writes: deque[tuple[int, list[PageKey], list[int]]] = deque()
        self.ops: list[Prefetch] = []

    @property
    def num_outstanding(self) -> int:
        return len(self.writes) + len(self.ops)

    def write(
        self, keys: Sequence[PageKey], host_pages: np.ndarray, after: Points, handle: int, state: int | None
    ) -> None:
        self.writes.append((handle, list(keys), host_pages.tolist()))

    def query(self, op: Prefetch) -> None:
        self.ops.append(op)

    def fetch(self, op: Prefetch, host_pages: np.ndarray, after: Points, state: int | None) -> None:
        op.host_pages, op.after = host_pages.copy(), after

    def cancel(self, op: Prefetch) -> None:
        op.cancelled = True

    def written(self) -> Ack:
        """The oldest write is carried out."""
        handle, keys, pages = self.writes.popleft()
        assert [self.host[page] for page in pages] == keys, "a page that is held was given to somebody else"
        self.stored.update(keys)
        return Written(handle, len(keys))

    def go_on(self, op: Prefetch, num_pages: int) -> Ack:
        """The next ack of a prefetch. A cancelled one may still write a page."""
        num_there = next((i for i, key in enumerate(op.keys) if key not in self.stored), len(op.keys))
        rest = slice(op.num_fetched, min(op.num_fetched + num_pages, len(op.host_pages)))
        pages, keys = op.host_pages[rest].tolist(), op.keys[rest]
        self.host.update(zip(pages, keys, strict=True))
        if not op.cancelled and pages:
            return Fetched(op, op.num_fetched, len(pages))
        if not op.cancelled and num_there and not len(op.host_pages):
            return Found(op, num_there)
        self.ops.remove(op)
        outcome = Outcome.COMPLETE if op.num_fetched else Outcome.ABSENT
        return Done(op, Outcome.CANCELLED if op.cancelled else outcome)


class Engine:
    """A tree of two tiers with storage below, and what its host pages hold."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.pool = LeasePool("KV pages", NUM_PAGES)
        self.host_pool = LeasePool("host KV pages", NUM_HOST_PAGES, reserved=0)
        self.roots = PageRoots(PageFingerprint("weights 0", "a layout", page_nbytes=4))
        self.tree = HiRadixCache(
            self.pool, PAGE, self.host_pool, "write_through", root_key=self.roots, lookahead=lookahead
        )
        self.host: dict[int, PageKey] = {}
        self.workers = ScriptedStorage(self.host)
        storage = Storage(cast("StorageController", self.workers), self.roots)
        self.tier = StorageTier(self.tree, self.host_pool, storage, PAGE, prefetch_threshold=1)
        tiers = cast("HiCache", SimpleNamespace(storage=self.tier))
        self.memory = RequestMemory(self.pool, LeasePool("rows", 2), self.tree, PAGE, tiers)
        self.locked: list[tuple[TreeNode, list[int]]] = []
        self.num_weights = 0

    def prefetch(self, tokens: np.ndarray, space: str) -> None:
        self.tier.prefetch(tokens, self.tree.match_prefix(tokens, space), space)

    def compute(self, tokens: np.ndarray, space: str) -> None:
        """A request computes a prompt; it is backed up, and from there written to storage."""
        num_pages = (len(tokens) - self.lookahead) // PAGE
        missing = num_pages - self.pool.num_free
        if missing > 0:
            self.tree.evict(missing)
        leased = self.pool.alloc(num_pages)
        if leased is None:
            return
        got = self.tree.insert(tokens[: num_pages * PAGE + self.lookahead], leased[0], extra_key=space)
        self.pool.retire(leased[0][: got.num_existing_tokens // PAGE], Points.none())
        ticket, nodes = Ticket.store(0), self.tree.backup_candidates(got.node)
        self.tree.begin_backup(nodes, ticket)
        ticket.submit(Points.none())
        backed_up = [node for node in nodes if ticket in node.transfers]
        for node in backed_up:
            assert node.host_pages is not None
            self.host.update(zip(node.host_pages.tolist(), self.keys_of(node), strict=True))
        self.tier.write(backed_up, Points.none())
        self.tree.finish(ticket)

    def lock(self, tokens: np.ndarray, space: str) -> None:
        """A request is about to load what is on the host alone."""
        node = self.tree.match_prefix(tokens, space).host_node
        self.tree.lock(node)
        self.locked.append((node, self.host_pages_above(node)))

    def unlock_all(self) -> None:
        for node, pages in self.locked:
            assert set(pages) <= set(self.host_pages_above(node)), "a locked page has left the host"
            self.tree.unlock(node, Points.none())
        self.locked.clear()

    def replace_weights(self) -> None:
        """No request waits for what is being fetched, or with several ranks its pages have been announced already."""
        self.unlock_all()
        self.memory.forget(())
        self.num_weights += 1
        self.roots.weights_replaced(f"weights {self.num_weights}")

    def keys_of(self, node: TreeNode) -> list[PageKey]:
        """The keys of a node's pages with the weights of now."""
        path = node.path()
        tokens = np.concatenate([part.tokens[self.lookahead if i else 0 :] for i, part in enumerate(path)])
        root = self.roots(self.tree.namespace(path[0]))
        return page_keys(root, tokens, PAGE, self.lookahead)[-node.num_pages :]

    def host_pages_above(self, node: TreeNode) -> list[int]:
        return [page for part in node.path() if part.host_pages is not None for page in part.host_pages.tolist()]

    def check(self) -> None:
        self.tree.check()
        for node in self.tree._nodes():
            if node.host_pages is not None:
                assert [self.host[page] for page in node.host_pages.tolist()] == self.keys_of(node)
        num_held = self.tree.host.num_pages + self.tree.host.num_orphan_pages + self.tier.num_fetch_pages
        assert self.host_pool.num_leased == num_held


@pytest.mark.parametrize("lookahead", [0, 1])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_each_host_page_holds_the_kv_of_its_own_prefix(lookahead: int, seed: int) -> None:
    """Prefetches of many batches, backups, evictions, cancellations and new weights, in any order."""
    random, engine = Random(seed), Engine(lookahead)
    tree, tier, workers = engine.tree, engine.tier, engine.workers
    for _ in range(80):
        symbols = [random.randrange(2) for _ in range(random.randint(1, 7))]
        tokens, space = np.repeat(symbols, PAGE)[: random.randint(PAGE + 1, 99)], random.choice(SPACES)
        match random.choice("ppppcccctttttttttwwweehhllux"):
            case "p":
                engine.prefetch(tokens, space)
            case "c":
                engine.compute(tokens, space)
            case "t" if workers.ops:
                op = random.choice(workers.ops)
                tier.complete([workers.go_on(op, random.randint(1, 3))])
            case "w" if workers.writes:
                tier.complete([workers.written()])
            case "e":
                tree.evict(random.randint(1, 8))
            case "h":
                tree.host.evict(random.randint(1, 4))
            case "l":
                engine.lock(tokens, space)
            case "u":
                engine.unlock_all()
            case "x" if random.random() < 0.5:
                engine.replace_weights()
            case "x" if workers.ops:
                tier.cancel(random.choice(workers.ops))
        engine.check()
    engine.unlock_all()
    while workers.writes:
        tier.complete([workers.written()])
    while workers.ops:
        tier.complete([workers.go_on(workers.ops[0], 2)])
    engine.check()
    tree.reset()
    assert (engine.host_pool.num_leased, engine.pool.num_leased, tier.num_outstanding) == (0, 0, 0)
