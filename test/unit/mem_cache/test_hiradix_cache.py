"""The tree of two tiers by example: what is where, what waits for what, who goes first, who may not go."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hicache_tiers import PAGE, Tiers, after_of, prompt

from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache.hicache import HiCache, Transfers
from fenceline.mem_cache.host.host_states import Pairs
from fenceline.mem_cache.page_hash import PageFingerprint
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order.stream import Points

FINGERPRINT = PageFingerprint("model", "a layout", page_nbytes=4)


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


# --- places --------------------------------------------------------------------------------------------


def test_a_backed_up_node_leaves_the_device_without_loss(tiers: Tiers) -> None:
    added = tiers.add(1, 2, 3)
    ticket, stored = tiers.back_up(added.node)
    assert stored.device_pages.tolist() == added.pages.tolist() and ticket.num_pages == 3
    assert (tiers.tree.host.num_both_pages, tiers.tree.transit.num_pages) == (3, 3)
    assert tiers.tree.evict(1) == 3
    assert (tiers.tree.num_pages, tiers.tree.host.num_pages, tiers.tree.host.num_both_pages) == (0, 3, 0)
    match = tiers.match(1, 2, 8)
    assert (match.num_tokens, match.pages.tolist(), match.node) == (0, [], tiers.tree.root)
    assert match.num_host_tokens == 2 * PAGE
    _, loaded = tiers.load_back(match.host_node)
    assert loaded.host_pages.tolist() == stored.host_pages.tolist()[:2]
    again = tiers.match(1, 2, 3)
    assert again.pages.tolist() == loaded.device_pages.tolist()
    assert (again.num_host_tokens, again.node) == (PAGE, match.host_node)
    assert again.on_device().num_host_tokens == 0 and again.on_device().host_node is again.node
    tiers.tree.check()


def test_the_device_holds_whole_prefixes(tiers: Tiers) -> None:
    tiers.add(1)
    tiers.back_up(*tiers.add(1, 2).node.path())
    tiers.match(1)  # the parent is now newer, as it would be anyway
    assert tiers.tree.evict(1) == 1
    match = tiers.match(1, 2)
    assert (match.num_tokens, match.num_host_tokens) == (PAGE, PAGE)
    assert tiers.tree.evict(1) == 1
    assert tiers.match(1, 2).num_host_tokens == 2 * PAGE
    tiers.tree.check()


def test_a_device_only_node_takes_what_is_below_it_on_the_host(tiers: Tiers) -> None:
    tiers.add(1)
    child = tiers.add(1, 2, 3).node
    tiers.back_up(child, done=True)
    other = tiers.add(4).node
    tiers.back_up(other, done=True)
    tiers.tree.evict(2)
    assert not child.on_device and child.parent is not None
    held = tiers.tree.hold_host(child)
    assert tiers.tree.evict(1) == 1
    assert child.parent is None and tiers.match(1, 2, 3).host_node is tiers.tree.root
    assert tiers.tree.host.num_pages == 1 and tiers.host_pool.num_leased == 3
    tiers.tree.release_hold(held.id)
    assert tiers.host_pool.num_leased == 1
    tiers.tree.check()


def test_computed_pages_serve_as_well_as_a_load(tiers: Tiers) -> None:
    kept = tiers.add(1).pages.tolist()
    lower = tiers.add(1, 2, 3).node
    tiers.back_up(lower, done=True)
    tiers.tree.evict(2)
    version, mine = lower.version, tiers.pages(5)
    reads = Points.of(tiers.forward.record())
    got = tiers.tree.insert(prompt(1, 2, 3, 4, 5), mine, reads)
    assert (got.num_existing_tokens, got.num_taken_pages) == (PAGE, 4)
    assert got.pages.tolist() == kept + mine.tolist()[1:]
    assert lower.pages.tolist() == mine.tolist()[1:3] and lower.after == reads
    assert lower.version > version and lower.host_pages is not None
    tiers.pool.retire(mine[:1], Points.none())
    tiers.tree.check()


def test_num_evictable_pages_is_what_evict_can_retire(tiers: Tiers) -> None:
    tiers.on_host(1, 2)
    tiers.load_back(tiers.match(1, 2).host_node)  # on both, in transit
    tiers.add(1, 2, 3)  # on the device alone
    tiers.on_host(5, 6)
    tiers.back_up(tiers.add(7, 8).node)  # on both, in transit
    locked = tiers.add(7, 9).node
    tiers.tree.lock(locked)
    promised = tiers.tree.num_evictable_pages
    assert tiers.tree.evict(1000) == promised > 0
    assert tiers.tree.num_pages == tiers.tree.num_locked_pages == 2
    tiers.tree.check()


# --- transfers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["load", "store"])
def test_both_halves_of_a_split_retire_after_the_transfer(tiers: Tiers, kind: str) -> None:
    if kind == "store":
        node = tiers.add(1, 2, 3).node
        ticket, move = tiers.back_up(node)
    else:
        node = tiers.on_host(1, 2, 3)
        ticket, move = tiers.load_back(node)
    upper = tiers.match(1, 8).node
    assert upper is not node and upper.transfers == node.transfers == (ticket,)
    assert tiers.tree.host.evict(3) == 3
    assert after_of(tiers.host_pool, move.host_pages) == {ticket.points}
    assert tiers.tree.evict(3) == 3
    assert after_of(tiers.pool, move.device_pages) == {ticket.points}
    tiers.finish(ticket)
    assert tiers.tree.transit.num_pages == 0
    tiers.tree.check()


def test_a_node_off_the_device_knows_its_host_pages_in_use(tiers: Tiers) -> None:
    node = tiers.add(1, 2).node
    ticket, stored = tiers.back_up(node)
    tiers.tree.evict(2)
    assert tiers.tree.transit.num_pages == 0 and node.transfers == ()
    _, loaded = tiers.load_back(node)
    assert set(ticket.points) <= set(loaded.after), "the load reads what the store still writes"
    tiers.tree.evict(2)
    tiers.tree.host.evict(2)
    [after] = after_of(tiers.host_pool, stored.host_pages)
    assert {p.stream for p in after} == {tiers.load, tiers.store}


def test_a_backup_waits_for_writers_readers_and_loads(tiers: Tiers) -> None:
    node = tiers.on_host(1, 2)
    load, _ = tiers.load_back(node)
    hold = tiers.tree.hold_host(node)
    store = Points.of(tiers.store.record())  # some other transfer, by which the new host pages were used
    reads = Points.of(tiers.forward.record())
    tiers.tree.lock(node)
    tiers.tree.unlock(node, reads)
    tiers.tree.release_hold(hold.id)
    assert tiers.tree.host.evict(2) == 2  # the load is still running
    free, _ = tiers.host_pool.alloc(tiers.host_pool.num_free) or (None, None)
    assert free is not None
    tiers.host_pool.retire(free, store)
    _, move = tiers.back_up(node)
    assert move.after == Points.of(*load.points, *store, *reads)


def test_a_load_waits_for_the_stores_of_all_its_pages(tiers: Tiers) -> None:
    upper, lower = tiers.add(1).node, tiers.add(1, 2).node
    tiers.back_up(lower)
    last, _ = tiers.back_up(upper)
    assert tiers.tree.evict(2) == 2
    _, loaded = tiers.load_back(lower)
    assert loaded.after == last.points


def test_pages_of_two_transfers_retire_after_both(tiers: Tiers) -> None:
    """A node that is still being loaded has lost its copy on the host, and is backed up again."""
    node = tiers.on_host(1, 2)
    load, loaded = tiers.load_back(node)
    assert tiers.tree.host.evict(2) == 2
    store, _ = tiers.back_up(node)
    assert node.transfers == (load, store)
    tiers.tree.evict(2)
    [after] = after_of(tiers.pool, loaded.device_pages)
    assert set(after) == {*load.points, *store.points}


def test_what_only_a_hold_kept_retires_after_its_transfers(tiers: Tiers) -> None:
    node = tiers.add(1, 2).node
    store, stored = tiers.back_up(node)
    hold = tiers.tree.hold_host(node)
    tiers.tree.reset()
    assert tiers.tree.host.num_orphan_pages == 2
    tiers.tree.release_hold(hold.id)
    [after] = after_of(tiers.host_pool, stored.host_pages)
    assert after == store.points


class RecordedTransfers:
    """Submits each transfer to its stream, and records what the stream waits for."""

    def __init__(self, tiers: Tiers) -> None:
        self.host_pages, self.host_states = tiers.host_pool, None
        self.tiers = tiers
        self.after: list[Points] = []

    def store(
        self, ticket: Ticket, device_pages: np.ndarray, host_pages: np.ndarray, after: Points, states: Pairs
    ) -> None:
        self.after.append(after)
        ticket.submit(Points.of(self.tiers.store.record()))

    def load(
        self, ticket: Ticket, device_pages: np.ndarray, host_pages: np.ndarray, after: Points, states: Pairs
    ) -> None:
        self.after.append(after)
        point = self.tiers.load.record()
        ticket.submit(Points.of(point), (point,))


def test_a_tail_and_what_moves_with_it_wait_for_all_users() -> None:
    """The device page and the host page of a retracted request's last tokens had other users before."""
    tiers = Tiers(num_host_pages=1)
    transfers = RecordedTransfers(tiers)
    hicache = SimpleNamespace(storage=None, load_back_threshold=1)
    args = SimpleNamespace(page_size=PAGE, hicache_write_policy="write_through")
    config = cast("EngineConfig", SimpleNamespace(hicache=hicache, server_args=args, draft=None))
    cache = HiCache(tiers.pool, cast("Transfers", transfers), config)
    steps, loads, stores = (stream.record() for stream in (tiers.forward, tiers.load, tiers.store))
    [host_page], _ = tiers.host_pool.alloc(1) or ([0], None)
    tiers.host_pool.retire(np.array([host_page], dtype=np.int32), Points.of(stores))
    tail = cache.offload(cache.tree.root, int(tiers.pages(1)[0]), 3, Points.of(steps))
    assert tail is not None and set(transfers.after[0]) == {steps, stores}
    later = tiers.forward.record()
    cache.begin_load(cache.tree.match_prefix(prompt()), tiers.pages(0), Points.of(later))
    cache.begin_load_tail(tail, int(tiers.pages(1)[0]), Points.of(loads))
    [ticket] = cache.start_loads()
    assert set(transfers.after[1]) == {later, loads, *tail.ticket.points}
    [after] = after_of(tiers.host_pool, [host_page])
    assert set(ticket.points) <= set(after)


def test_a_page_of_an_unsubmitted_transfer_cannot_retire(tiers: Tiers) -> None:
    node = tiers.add(1, 2).node
    tiers.tree.begin_backup([node], Ticket.store(1))
    with pytest.raises(AssertionError, match="not been submitted"):
        tiers.tree.evict(1)


def test_tickets_are_submitted_once_and_finished_when_done(tiers: Tiers) -> None:
    ticket, _ = tiers.back_up(tiers.add(1).node)
    with pytest.raises(AssertionError, match="submitted twice"):
        ticket.submit(Points.none())
    with pytest.raises(AssertionError, match="no page can be added"):
        ticket.add_pages(1)
    with pytest.raises(AssertionError, match="finished before it is done"):
        tiers.tree.finish(ticket)
    with pytest.raises(AssertionError, match="not been submitted"):
        assert Ticket.load(7).layer_points
    with pytest.raises(AssertionError, match="does not load"):
        tiers.tree.begin_load(tiers.tree.root, np.empty(0, np.int32), ticket)
    tiers.tree.evict(1)
    tiers.tree.reset()
    tiers.finish(ticket)  # found by ticket: its node has left long ago
    tiers.tree.check()


def test_several_loads_share_a_ticket(tiers: Tiers) -> None:
    one, other = tiers.on_host(1, 2), tiers.on_host(3)
    ticket = Ticket.load(99)
    for node, num_pages in ((one, 2), (other, 1)):
        tiers.tree.lock(node)
        tiers.tree.begin_load(node, tiers.pages(num_pages), ticket)
    assert ticket.num_pages == tiers.tree.transit.num_pages == 3
    assert tiers.match(1, 2).loading == tiers.match(3).loading == (ticket,)
    with pytest.raises(AssertionError, match="one device page for each"):
        tiers.tree.begin_load(one, tiers.pages(1), ticket)


def test_who_reads_loading_pages_is_told_until_forward_waited(tiers: Tiers) -> None:
    tiers.on_host(1, 2, 3)
    first, _ = tiers.load_back(tiers.match(1).host_node)
    second, _ = tiers.load_back(tiers.match(1, 2, 3).host_node)
    assert tiers.match(1, 2).loading == (first, second)
    assert tiers.add(1, 2, 3).loading == (first, second), "it moves onto pages that are loading for others"
    first.waited = True
    assert tiers.match(1, 2).loading == (second,)
    tiers.finish(second)
    assert tiers.match(1, 2).loading == ()


# --- write policies ------------------------------------------------------------------------------------


def test_write_through_wants_every_new_node_at_once(tiers: Tiers) -> None:
    one, two = tiers.add(1).node, tiers.add(1, 2).node
    three = tiers.add(1, 3).node
    assert tiers.tree.backup_candidates(two, three, two) == [one, two, three]
    tiers.back_up(one)
    assert tiers.tree.backup_candidates(three) == [three]


def test_selective_wants_what_has_been_hit_twice() -> None:
    tiers = Tiers("write_through_selective")
    node = tiers.add(1, 2).node
    assert tiers.tree.backup_candidates(node) == []
    upper = tiers.match(1).node
    assert tiers.tree.backup_candidates(node) == [upper]
    tiers.add(1, 2)
    assert tiers.tree.backup_candidates(node) == [upper, node]
    assert tiers.tree.backup_candidates(tiers.add(7).node, force=True) != []


def test_write_back_spills_once_for_all_victims() -> None:
    tiers = Tiers("write_back")
    node = tiers.add(1, 2, 3).node
    assert tiers.tree.backup_candidates(node) == []
    upper = tiers.match(1).node
    reads = Points.of(tiers.forward.record())
    tiers.tree.lock(node)
    tiers.tree.unlock(node, reads)
    pages = tiers.tree.all_pages()
    assert tiers.tree.evict(3) == 3
    assert tiers.spilled == [[upper, node]]
    [after] = after_of(tiers.pool, pages)
    assert {p.stream for p in after} == {tiers.forward, tiers.store}
    assert tiers.match(1, 2, 3).num_host_tokens == 3 * PAGE
    tiers.load_back(node)
    tiers.tree.evict(3)
    assert len(tiers.spilled) == 1, "what has a host copy is not spilled again"
    tiers.tree.check()


def test_what_is_not_spilled_is_lost() -> None:
    tiers = Tiers("write_back")
    tiers.spill_to_host = False
    node = tiers.add(1, 2).node
    assert tiers.tree.evict(1) == 2 and tiers.spilled == [[node]]
    assert (tiers.tree.num_nodes, tiers.host_pool.num_leased) == (0, 0)


def test_a_full_host_keeps_the_prefix_of_what_is_spilled() -> None:
    tiers = Tiers("write_back", num_host_pages=3)
    tiers.add(1, 2)
    tiers.add(1, 2, 3, 4)
    tiers.tree.evict(4)
    assert tiers.match(1, 2, 3, 4).num_host_tokens == 2 * PAGE
    tiers.tree.check()


def test_departed_and_backed_up_nodes_are_skipped(tiers: Tiers) -> None:
    gone, there = tiers.add(1).node, tiers.add(2).node
    tiers.tree.evict(1)
    assert gone.parent is None and tiers.tree.backup_candidates(gone) == []
    tiers.back_up(there)
    _, move = tiers.back_up(gone, there)
    assert move.num_pages == 0


# --- stale matches (F5) --------------------------------------------------------------------------------

STALE: dict[str, Callable[[Tiers], object]] = {
    "evicted to the host": lambda t: t.tree.evict(99),
    "evicted and back elsewhere": lambda t: (t.tree.evict(99), t.load_back(t.match(1, 2, 3).host_node)),
    "loaded for another": lambda t: t.load_back(t.match(1, 2, 3, 4).host_node),
    "loaded in part": lambda t: t.load_back(t.match(1, 2, 3).host_node),
    "gone from the host": lambda t: t.tree.host.evict(1),
    "flushed": lambda t: t.tree.reset(),
}
CURRENT: dict[str, Callable[[Tiers], object]] = {
    "nothing": lambda t: None,
    "split": lambda t: (t.match(1), t.match(1, 2, 3)),
    "longer now": lambda t: t.tree.insert_host(prompt(1, 2, 3, 4, 5), t.tree.alloc_host(1)[0]),  # type: ignore[index]
    "another moved": lambda t: (t.add(7), t.tree.lock(t.match(1, 2).node), t.tree.evict(1)),
}


@pytest.mark.parametrize("name", [*STALE, *CURRENT])
def test_a_queued_match_knows_whether_it_still_holds(tiers: Tiers, name: str) -> None:
    node = tiers.on_host(1, 2, 3, 4)
    upper = tiers.match(1, 2).host_node
    tiers.load_back(upper, done=True)
    match = tiers.match(1, 2, 3, 4)
    assert (match.node, match.host_node, match.num_host_tokens) == (upper, node, 2 * PAGE)
    num_moves = tiers.tree.num_moves
    (STALE | CURRENT)[name](tiers)
    assert tiers.tree.is_current(match) is (name in CURRENT)
    assert name in CURRENT or tiers.tree.num_moves > num_moves
