"""The host's eviction: room is made whole or not at all."""

from __future__ import annotations

import numpy as np

from fenceline.mem_cache.transfer import Ticket
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.memory_order.lease import LeasePool
from fenceline.memory_order.stream import Points

NUM_HOST_PAGES = 8


def tree_of_two_tiers() -> HiRadixCache:
    return HiRadixCache(
        LeasePool("KV pages", 64), 1, LeasePool("host KV pages", NUM_HOST_PAGES, reserved=0), "write_through"
    )


def backed_up(tree: HiRadixCache, tokens: range) -> TreeNode:
    """A prefix on both tiers, its transfer done."""
    leased = tree._pool.alloc(len(tokens))
    assert leased is not None
    node = tree.insert(np.array(tokens), leased[0]).node
    ticket = Ticket.store(0)
    move = tree.begin_backup(tree.backup_candidates(node), ticket)
    ticket.submit(Points.none())
    assert move.num_pages > 0
    tree.finish(ticket)
    return node


def test_what_cannot_fit_pushes_nobody_out() -> None:
    """Five of eight host pages are in use: a prefix of four would not fit even without the other three."""
    tree = tree_of_two_tiers()
    used = backed_up(tree, range(100, 105))
    tree.lock(used)
    warm = backed_up(tree, range(200, 203))
    assert tree.alloc_host(4) is None
    assert warm.host_pages is not None and tree.host.num_evicted_pages == 0
    tree.check()
    assert tree.alloc_host(3) is not None, "what fits does push out"
    assert warm.host_pages is None and used.host_pages is not None
    tree.check()


def test_a_chain_leaves_from_its_end_or_stays() -> None:
    """A prefix in three nodes, on the host alone: room for all of it is made from the last to the first."""
    tree = tree_of_two_tiers()
    for length in (2, 4, 6):
        backed_up(tree, range(length))
    tree.evict(64)
    assert tree.host.num_pages == 6 and tree.num_nodes == 3
    assert tree.alloc_host(9) is None and tree.num_nodes == 3
    tree.check()
    assert tree.alloc_host(5) is not None and tree.num_nodes == 1
    assert tree.match_prefix(np.arange(6)).num_host_tokens == 2
    tree.check()
    assert tree.alloc_host(3) is not None and tree.num_nodes == 0
    tree.check()
