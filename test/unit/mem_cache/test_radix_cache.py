"""The radix tree by example: who owns which page, what a split keeps, what its own audit notices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hicache_tiers import after_of, prompt
from hypothesis import given
from hypothesis import strategies as st
from recording_device import LaggingStream

from fenceline.mem_cache.tree.radix_cache import RadixCache, TreeNode
from fenceline.memory_order import Points
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.lease import LeasePool

PAGE = 4


class Tree:
    """A cache with its pool, and the pages handed out by hand."""

    def __init__(self, num_pages: int = 64, disabled: bool = False, lookahead: int = 0) -> None:
        self.pool = LeasePool("pages", num_pages)
        self.cache = RadixCache(self.pool, PAGE, disabled, lookahead)

    def pages(self, n: int) -> np.ndarray:
        got = self.pool.alloc(n)
        assert got is not None
        return got[0]

    def add(self, *symbols: int, extra_key: str = "") -> list[int]:
        """Insert a prompt as a request would that matched nothing; returns the tree's pages."""
        pages = self.pages(len(symbols))
        got = self.cache.insert(prompt(*symbols), pages, extra_key=extra_key)
        num_existing = got.num_existing_tokens // PAGE
        self.pool.retire(pages[:num_existing], self.cache.root.after)
        return got.pages.tolist()


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_an_empty_cache_matches_nothing(tree: Tree) -> None:
    got = tree.cache.match_prefix(prompt(1, 2))
    assert (got.num_tokens, got.pages.tolist(), got.node) == (0, [], tree.cache.root)
    assert got.pages.dtype == np.int32
    tree.cache.lock(got.node)
    tree.cache.unlock(got.node)
    tree.cache.check()


PROMPTS = st.lists(st.integers(0, 1), max_size=5 * PAGE)


@given(st.lists(PROMPTS, max_size=8), st.lists(PROMPTS, min_size=1, max_size=8), st.integers(0, 2))
def test_a_page_is_found_where_its_lookahead_follows(
    inserted: list[list[int]], matched: list[list[int]], lookahead: int
) -> None:
    tree = Tree(128, lookahead=lookahead)
    known: dict[tuple[int, ...], int] = {}  # pages by the tokens that their bytes depend on

    def parts(tokens: list[int]) -> list[tuple[int, ...]]:
        num_pages = max(len(tokens) - lookahead, 0) // PAGE
        return [tuple(tokens[: n * PAGE + lookahead]) for n in range(1, num_pages + 1)]

    for tokens in inserted:
        own = parts(tokens)
        pages = tree.pages(len(own))
        got = tree.cache.insert(np.array(own[-1] if own else tokens[:lookahead]), pages)
        for part, page in zip(own, pages.tolist(), strict=True):
            known.setdefault(part, page)
        assert got.pages.tolist() == [known[part] for part in own]
        tree.cache.check()
    for tokens in matched + inserted:
        found = tree.cache.match_prefix(np.array(tokens)).pages.tolist()
        assert found == [known[part] for part in parts(tokens) if part in known]
        tree.cache.check()


def test_match_stops_at_the_last_whole_page(tree: Tree) -> None:
    pages = tree.add(1, 2, 3)
    for num_tokens in range(13):
        got = tree.cache.match_prefix(prompt(1, 2, 3)[:num_tokens])
        assert got.num_tokens == num_tokens // PAGE * PAGE
        assert got.pages.tolist() == pages[: num_tokens // PAGE]
    assert tree.cache.match_prefix(np.append(prompt(1, 2, 3), [9, 9])).num_tokens == 12


def test_a_page_that_differs_in_one_token_is_another_page(tree: Tree) -> None:
    tree.add(1, 2, 3)
    for position in range(12):
        tokens = prompt(1, 2, 3)
        tokens[position] = 50
        assert tree.cache.match_prefix(tokens).num_tokens == position // PAGE * PAGE


def test_insert_takes_only_what_is_missing(tree: Tree) -> None:
    first = tree.add(1, 2)
    mine = tree.pages(3)
    got = tree.cache.insert(prompt(1, 2, 3), mine)
    assert got.num_existing_tokens == 2 * PAGE
    assert got.num_taken_pages == 1
    assert got.pages.tolist() == [*first, int(mine[2])]
    assert tree.cache.all_pages().tolist() == sorted([*first, int(mine[2])])
    again = tree.cache.insert(prompt(1, 2, 3), got.pages)
    assert (again.num_existing_tokens, again.num_taken_pages, again.node) == (3 * PAGE, 0, got.node)


def test_insert_copies_the_callers_arrays(tree: Tree) -> None:
    tokens, pages = prompt(1, 2).astype(np.int32), tree.pages(2)
    tree.cache.insert(tokens, pages)
    expected = pages.tolist()
    tokens[:] = 0
    pages[:] = 0
    assert tree.cache.match_prefix(prompt(1, 2)).pages.tolist() == expected
    matched = tree.cache.match_prefix(prompt(1, 2)).pages
    matched[:] = 0
    assert tree.cache.match_prefix(prompt(1, 2)).pages.tolist() == expected


def test_insert_refuses_part_of_a_page(tree: Tree) -> None:
    with pytest.raises(AssertionError, match="whole pages"):
        tree.cache.insert(prompt(1, 2)[:-1], tree.pages(2))


def test_a_lock_taken_before_a_split_covers_both_halves(tree: Tree) -> None:
    tree.add(1, 2, 3, 4)
    whole = tree.cache.match_prefix(prompt(1, 2, 3, 4)).node
    tree.cache.lock(whole)
    half = tree.cache.match_prefix(prompt(1, 2, 8))
    assert half.num_tokens == 2 * PAGE and half.node is not whole
    assert tree.cache.num_nodes == 2
    assert tree.cache.num_locked_pages == 4
    assert tree.cache.evict(4) == 0
    tree.cache.unlock(whole)
    assert tree.cache.num_evictable_pages == 4
    assert tree.cache.evict(4) == 4


def test_a_lock_pins_ancestors_and_not_siblings(tree: Tree) -> None:
    kept = tree.add(1, 2)
    tree.add(1, 3)
    node = tree.cache.match_prefix(prompt(1, 2)).node
    tree.cache.lock(node)
    tree.cache.lock(node)
    assert tree.cache.evict(10) == 1
    tree.cache.unlock(node)
    assert tree.cache.evict(10) == 0
    assert tree.cache.all_pages().tolist() == sorted(kept)
    tree.cache.unlock(node)
    assert tree.cache.evict(10) == 2


def test_more_unlocks_than_locks_are_caught(tree: Tree) -> None:
    tree.add(1)
    node = tree.cache.match_prefix(prompt(1)).node
    with pytest.raises(AssertionError, match="more often"):
        tree.cache.unlock(node)


def test_an_evicted_handle_cannot_be_locked(tree: Tree) -> None:
    tree.add(1)
    node = tree.cache.match_prefix(prompt(1)).node
    assert tree.cache.evict(1) == 1
    tree.add(1)
    with pytest.raises(AssertionError, match="match again"):
        tree.cache.lock(node)


def test_eviction_is_least_recently_used_first(tree: Tree) -> None:
    prompts = [(s, s) for s in range(6)]
    pages = {symbols: tree.add(*symbols) for symbols in prompts}
    order = [(3, 3), (0, 0), (5, 5), (1, 1), (4, 4), (2, 2)]
    for symbols in order:
        tree.cache.match_prefix(prompt(*symbols))
    for symbols in order:
        before = set(tree.cache.all_pages().tolist())
        assert tree.cache.evict(1) == 2
        assert before - set(tree.cache.all_pages().tolist()) == set(pages[symbols])
    assert tree.cache.evict(1) == 0


def test_a_parent_goes_after_its_last_child(tree: Tree) -> None:
    trunk = tree.add(1, 2)[0]
    tree.add(1, 3)
    tree.cache.evict(2)
    assert tree.cache.all_pages().tolist() == [trunk]
    assert tree.cache.evict(1) == 1
    assert tree.pool.owned().size == 0


def test_namespaces_never_match_each_other(tree: Tree) -> None:
    # Names chosen so that name + page bytes would collide if the split between them were ambiguous.
    spaces = ["", "a", "b", "a\x00", "\ud800"]
    pages = {space: tree.add(1, 2, extra_key=space) for space in spaces}
    tree.cache.check()
    for one, other in combinations(spaces, 2):
        assert not set(pages[one]) & set(pages[other])
    for space in spaces:
        assert tree.cache.match_prefix(prompt(1, 2), extra_key=space).pages.tolist() == pages[space]
    assert tree.cache.match_prefix(prompt(1, 2), extra_key="c").num_tokens == 0


@pytest.mark.parametrize("leave", [lambda tree: tree.cache.evict(1), lambda tree: tree.cache.reset()])
def test_pages_retire_after_all_who_used_them(tree: Tree, leave: Callable[[Tree], int]) -> None:
    writer, first, second = (
        Points.of(LaggingStream(name, frozenset()).record())
        for name in (StreamName.STORE, StreamName.FORWARD, StreamName.LOAD)
    )
    got = tree.cache.insert(prompt(1), tree.pages(1), writer)
    for reader in (first, second, Points.none()):
        tree.cache.lock(got.node)
        tree.cache.unlock(got.node, reader)
    assert leave(tree) == 1
    assert after_of(tree.pool, got.pages) == {writer.join(first).join(second)}


def test_reset_returns_everything_and_refuses_locked_pages(tree: Tree) -> None:
    tree.add(1, 2)
    tree.add(1, 3, 4)
    node = tree.cache.match_prefix(prompt(1, 2)).node
    tree.cache.lock(node)
    with pytest.raises(AssertionError, match="2 pages locked"):
        tree.cache.reset()
    tree.cache.unlock(node)
    assert tree.cache.reset() == 4
    assert (tree.cache.num_pages, tree.cache.num_nodes, tree.pool.owned().size) == (0, 0, 0)
    with pytest.raises(AssertionError, match="match again"):
        tree.cache.lock(node)
    tree.add(1)
    tree.cache.check()


def test_a_disabled_cache_keeps_nothing() -> None:
    tree = Tree(disabled=True)
    mine = tree.pages(2)
    got = tree.cache.insert(prompt(1, 2), mine)
    assert (got.num_existing_tokens, got.num_taken_pages, got.node) == (0, 0, tree.cache.root)
    assert got.pages.tolist() == mine.tolist()
    assert tree.cache.match_prefix(prompt(1, 2)).num_tokens == 0
    assert (tree.cache.num_pages, tree.cache.evict(5), tree.cache.reset()) == (0, 0, 0)
    tree.cache.check()


def test_page_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(LeasePool("pages", 4), 0)


def first(tree: Tree) -> TreeNode:
    return next(iter(tree.cache.root.children.values()))


# Each perturbation with the words by which check() must name it.
PERTURBATIONS: dict[str, tuple[Callable[[Tree], object], str]] = {
    "evictable": (lambda t: setattr(t.cache, "num_evictable_pages", 9), "evictable pages, counted 9"),
    "locked": (lambda t: setattr(t.cache, "num_locked_pages", 9), "locked pages, counted 9"),
    "nodes": (lambda t: setattr(t.cache, "num_nodes", 9), "nodes, counted 9"),
    "clock": (lambda t: setattr(t.cache, "_clock", 0), "accessed in the future"),
    "lock_ref": (lambda t: setattr(first(t), "lock_ref", 0), "fewer locks"),
    "short_tokens": (lambda t: setattr(first(t), "tokens", first(t).tokens[:-1]), "disagree in length"),
    "wrong_tokens": (lambda t: first(t).tokens.__setitem__(0, 1), "edge is not its first page"),
    "lost_edge": (lambda t: setattr(first(t), "edge", b""), "does not know it"),
    "no_parent": (lambda t: setattr(first(t), "parent", None), "without a parent"),
    "two_owners": (lambda t: first(t).pages.__setitem__(0, t.cache.all_pages()[-1]), "held twice"),
    "freed_page": (lambda t: t.pool.retire(first(t).pages, first(t).after), "pool has free"),
    "stale_lru": (lambda t: setattr(first(t), "last_access", 0), "newer than its parent"),
    "unqueued": (lambda t: t.cache._lru.clear(), "evictable but not queued"),
    "unknown_entry": (lambda t: t.cache._lru._heap.clear(), "queue entries"),
    "twice_queued": (lambda t: t.cache._lru._heap.append(t.cache._lru._heap[0]), "queued twice"),
    "future_entry": (
        lambda t: t.cache._lru._heap.append((99, 0, t.cache._lru._heap.pop()[2])),
        "entry is from the future",
    ),
    "root_locked": (lambda t: setattr(t.cache.root, "lock_ref", 1), "root is locked"),
}


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_check_names_what_is_wrong(tree: Tree, name: str) -> None:
    tree.add(1, 2)
    tree.add(1, 3)
    tree.cache.lock(tree.cache.match_prefix(prompt(1, 3)).node)
    tree.cache.check()
    perturb, words = PERTURBATIONS[name]
    perturb(tree)
    with pytest.raises(AssertionError, match=words):
        tree.cache.check()


def test_check_names_a_node_that_does_not_follow_its_parent() -> None:
    """With a lookahead, a node's first tokens are those that its parent looks ahead at."""
    tree = Tree(lookahead=1)
    for symbol in (1, 2):
        tree.cache.insert(np.append(prompt(3, symbol), 9), tree.pages(2))
    tree.cache.check()
    next(iter(first(tree).children.values())).tokens[0] = 8
    with pytest.raises(AssertionError, match="does not begin as its parent ends"):
        tree.cache.check()


def test_long_prefixes_cost_no_python_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 100k-token prompt in one node is looked up with a handful of edge computations."""
    pool = LeasePool("pages", 100_001)
    cache = RadixCache(pool, 1)
    tokens = np.arange(100_000) % 32_000
    got = pool.alloc(100_000)
    assert got is not None
    cache.insert(tokens, got[0])
    calls = 0
    edge = RadixCache._edge

    def counted(self: RadixCache, *args: object) -> bytes:
        nonlocal calls
        calls += 1
        return edge(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RadixCache, "_edge", counted)
    other = tokens.copy()
    other[70_000] = 32_001
    assert cache.match_prefix(tokens).num_tokens == 100_000
    assert cache.match_prefix(other).num_tokens == 70_000
    assert cache.match_prefix(tokens).num_tokens == 100_000
    assert calls < 10
