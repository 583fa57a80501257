"""The host side of the tree of two tiers: its own eviction, holds, pages from storage, and the books of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hicache_tiers import PAGE, Tiers, after_of, prompt

from fenceline.mem_cache.page_hash import PageFingerprint, page_keys
from fenceline.mem_cache.tree import radix_cache
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points

FINGERPRINT = PageFingerprint("model", "a layout", page_nbytes=4)


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


# --- the host's own eviction ---------------------------------------------------------------------------


def test_host_eviction_is_lru_from_the_leaves_up(tiers: Tiers) -> None:
    nodes = {symbol: tiers.on_host(symbol, 0) for symbol in (1, 2, 3)}
    upper = tiers.match(2).host_node
    tiers.match(1, 0)
    for gone in (2, 3):  # of 2 the lower half, which was not matched again
        tiers.tree.host.evict(1)
        assert nodes[gone].parent is None
    assert upper.parent is not None and tiers.match(2, 0).num_host_tokens == PAGE
    assert tiers.tree.host.evict(99) == 3 and tiers.tree.num_nodes == 0
    tiers.tree.check()


def test_a_node_on_the_device_loses_only_its_copy(tiers: Tiers) -> None:
    node = tiers.add(1, 2).node
    tiers.back_up(node, done=True)
    match = tiers.match(1, 2)
    assert tiers.tree.host.evict(1) == 2
    assert node.on_device and node.host_pages is None and tiers.tree.is_current(match)
    assert tiers.tree.backup_candidates(node) == [node]


def test_a_backup_evicts_neither_its_path_nor_what_is_locked() -> None:
    tiers = Tiers(num_host_pages=4)
    top = tiers.add(1).node
    tiers.back_up(top, done=True)
    locked, held, other = tiers.on_host(2), tiers.on_host(3), tiers.on_host(4)
    tiers.tree.lock(locked)
    hold = tiers.tree.hold_host(held)
    tiers.load_back(top, done=True)
    first, second = tiers.add(1, 5).node, tiers.add(6).node
    _, move = tiers.back_up(first, second)
    assert move.num_pages == 1 and first.host_pages is not None and second.host_pages is None
    assert other.parent is None and top.host_pages is not None
    assert locked.host_pages is not None and held.host_pages is not None
    tiers.tree.release_hold(hold.id)
    assert tiers.back_up(second)[1].num_pages == 1 and held.parent is None
    tiers.tree.check()


def test_alloc_host_makes_room_or_says_no() -> None:
    tiers = Tiers(num_host_pages=4)
    locked = tiers.on_host(1)
    tiers.tree.lock(locked)
    tiers.on_host(2, 3)
    got = tiers.tree.alloc_host(3)
    assert got is not None and len(got[0]) == 3 and tiers.tree.host.num_pages == 1
    assert tiers.tree.alloc_host(1) is None


def test_a_lock_pins_both_tiers_and_counts_without_a_device_page(tiers: Tiers) -> None:
    node = tiers.on_host(1, 2)
    tiers.tree.lock(node)
    assert (tiers.tree.num_locked_nodes, tiers.tree.num_locked_pages) == (1, 0)
    assert tiers.tree.host.evict(9) == 0
    tiers.load_back(node)
    assert tiers.tree.num_locked_pages == 2 and tiers.tree.evict(9) == 0
    with pytest.raises(AssertionError, match="1 nodes locked"):
        tiers.tree.reset()
    tiers.tree.unlock(node)
    assert (tiers.tree.num_locked_nodes, tiers.tree.num_evictable_pages) == (0, 2)
    assert (tiers.tree.evict(9), tiers.tree.host.evict(9)) == (2, 2)


# --- holds ---------------------------------------------------------------------------------------------


def test_held_pages_stay_until_the_last_release(tiers: Tiers) -> None:
    node = tiers.on_host(1, 2, 3)
    one = tiers.tree.hold_host(node)
    upper = tiers.match(1).host_node
    two = tiers.tree.hold_host(upper)
    assert tiers.tree.host.evict(9) == 0
    tiers.tree.reset()
    assert (tiers.tree.host.num_pages, tiers.tree.host.num_orphan_pages) == (0, 3)
    assert tiers.host_pool.num_leased == 3
    tiers.tree.release_hold(one.id)
    assert tiers.host_pool.num_leased == tiers.tree.host.num_orphan_pages == 1
    tiers.tree.release_hold(two.id)
    assert (tiers.tree.host.num_holds, tiers.host_pool.num_leased) == (0, 0)
    with pytest.raises(AssertionError, match="released twice"):
        tiers.tree.release_hold(two.id)
    tiers.tree.check()


def test_a_released_node_can_go_again_after_its_users(tiers: Tiers) -> None:
    node = tiers.on_host(1, 2)
    hold = tiers.tree.hold_host(node)
    ticket, _ = tiers.load_back(node)
    tiers.tree.evict(2)  # from the device, while it is being loaded
    tiers.tree.release_hold(hold.id)
    assert tiers.tree.host.evict(2) == 2
    assert after_of(tiers.host_pool, hold.host_pages) == {ticket.points}


# --- storage -------------------------------------------------------------------------------------------


def test_pages_from_storage_become_nodes_on_the_host(tiers: Tiers) -> None:
    tiers.add(1)
    fetched, _ = tiers.tree.alloc_host(3) or (np.empty(0), None)
    writes = Points.of(tiers.load.record())
    left = tiers.tree.insert_host(prompt(1, 2, 3), fetched, writes)
    assert left.tolist() == fetched.tolist()[:1], "the device has the first page already"
    match = tiers.match(1, 2, 3)
    assert (match.num_tokens, match.num_host_tokens) == (PAGE, 2 * PAGE)
    _, move = tiers.load_back(match.host_node)
    assert move.host_pages.tolist() == fetched.tolist()[1:] and move.after == writes
    assert tiers.tree.insert_host(prompt(1, 2), left).tolist() == left.tolist()
    assert tiers.tree.insert_host(prompt(5, 6), left).tolist() == left.tolist(), "the prefix has left"
    tiers.host_pool.retire(left, Points.none())
    tiers.tree.check()


def test_keys_name_whole_prefixes_and_a_split_divides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = Tiers(root_key=FINGERPRINT.root_key)
    for space in ("", "lora", "\ud800"):
        expected = page_keys(FINGERPRINT.root_key(space), prompt(1, 2, 3, 4), PAGE)
        node = tiers.add(1, 2, 3, extra_key=space).node
        assert tiers.tree.keys(node) == expected[:3]
        assert tiers.tree.keys(tiers.add(1, 2, 3, 4, extra_key=space).node) == expected[3:]
        with monkeypatch.context() as patch:
            patch.delattr(radix_cache, "page_keys")  # nothing is hashed twice
            upper = tiers.match(1, extra_key=space).node
            assert (tiers.tree.keys(upper), tiers.tree.keys(node)) == (expected[:1], expected[1:3])
    tiers.back_up(node)
    assert tiers.tree.hold_host(node).keys == expected[1:3]
    assert tiers.tree.keys(tiers.tree.root) == []
    with pytest.raises(AssertionError, match="without storage"):
        Tiers().tree.keys(tiers.tree.root)


# --- books ---------------------------------------------------------------------------------------------


def test_reset_empties_both_tiers_while_transfers_run(tiers: Tiers) -> None:
    node = tiers.on_host(3)
    store, stored = tiers.back_up(tiers.add(1, 2).node)
    load, loaded = tiers.load_back(node)
    tiers.add(4)
    num_pages = tiers.tree.num_pages
    assert tiers.tree.reset() == num_pages
    assert (tiers.pool.num_leased, tiers.host_pool.num_leased, tiers.tree.transit.num_pages) == (0, 0, 0)
    assert after_of(tiers.host_pool, stored.host_pages) == {store.points}
    assert after_of(tiers.pool, loaded.device_pages) == {load.points}
    tiers.tree.check()
    tiers.add(1)
    tiers.tree.check()


def test_bad_construction() -> None:
    pools = LeasePool("KV pages", 4), LeasePool("host KV pages", 4, reserved=0)
    with pytest.raises(ValueError, match="write_through, write_through_selective, write_back"):
        HiRadixCache(pools[0], PAGE, pools[1], "write_around")
    with pytest.raises(AssertionError, match="needs a spill function"):
        HiRadixCache(pools[0], PAGE, pools[1], "write_back")


# Each perturbation with the words by which check() must name it.
PERTURBATIONS: dict[str, tuple[Callable[[Tiers], object], str]] = {
    "host_pages": (lambda t: setattr(t.tree.host, "num_pages", 9), "host pages, counted 9"),
    "both": (lambda t: setattr(t.tree.host, "num_both_pages", 9), "on both, counted 9"),
    "transit": (lambda t: setattr(t.tree.transit, "num_pages", 9), "in transit, counted 9"),
    "locked": (lambda t: setattr(t.tree, "num_locked_nodes", 9), "locked nodes, counted 9"),
    "on_no_tier": (lambda t: top(t, 3).__setattr__("host_pages", None), "holds no page"),
    "half_there": (lambda t: top(t, 1).__setattr__("on_device", False), "partly on the device"),
    "children": (lambda t: top(t, 1).__setattr__("num_device_children", 7), "miscounts its children on the d"),
    "host_children": (lambda t: top(t, 1).__setattr__("num_host_children", 7), "miscounts its children on the h"),
    "unqueued": (lambda t: t.tree.host.lru.clear(), "not in the host queue"),
    "freed": (lambda t: t.host_pool.retire(top(t, 3).host_pages, Points.none()), "that the pool has free"),
    "twice": (lambda t: top(t, 3).host_pages.__setitem__(0, top(t, 1).host_pages[0]), "held twice"),
    "ticket": (lambda t: t.tree.transit._nodes.clear(), "does not know it"),
    "hold": (lambda t: t.tree.host._holds.clear(), "unknown hold"),
    "keys": (lambda t: top(t, 1).__setattr__("keys", []), "not one key for each page"),
    "leaving": (lambda t: setattr(t.tree, "_leaving", frozenset([top(t, 1)])), "left over"),
}


def top(tiers: Tiers, symbol: int) -> Any:
    return next(n for n in tiers.tree.root.children.values() if n.tokens[PAGE - 1] == symbol)


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_check_names_what_is_wrong(tiers: Tiers, name: str) -> None:
    tiers.on_host(3, 4)
    node = tiers.add(1, 2).node
    tiers.back_up(node)
    tiers.tree.hold_host(node)
    tiers.tree.check()
    perturb, words = PERTURBATIONS[name]
    perturb(tiers)
    with pytest.raises(AssertionError, match=words):
        tiers.tree.check()
