"""A state machine that applies the same operations to the two-tier tree and to a naive model.

Requests match, load, compute, insert, decode and leave. Between these there are backups, write-back spills, prefetches,
holds and evictions of both tiers. Each operation checks the bytes that it reads when it runs (hicache_world).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from hicache_world import Contents, Entry, Prefix, SpyPool, TwoTierModel, World, check, parts, reached
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fenceline.mem_cache.page_hash import PageFingerprint, page_keys
from fenceline.mem_cache.transfer import PageMove, Ticket, TransferKind
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache, HostHold
from fenceline.mem_cache.tree.radix_cache import MatchResult, TreeNode
from fenceline.memory_order.stream import Points

NUM_DEVICE_PAGES = 18
NUM_HOST_PAGES = 14
HITS = {"write_through": 1, "write_through_selective": 2}
FINGERPRINT = PageFingerprint("model", "a layout", page_nbytes=4)


@dataclass
class Running:
    """A request: a locked prefix of the tree's pages, then its own pages. Its next step must wait for ``loads`` before
    it reads, and for ``own_after`` before it writes the pages ``unwritten``."""

    space: str
    symbols: tuple[int, ...]
    node: TreeNode
    num_shared: int
    pages: list[int]
    loads: tuple[Ticket, ...] = ()
    last_flight: Points = Points.none()
    unwritten: Contents = field(default_factory=list)
    own_after: Points = Points.none()

    def prefix(self, num_pages: int) -> Prefix:
        return self.space, self.symbols[:num_pages]

    @property
    def contents(self) -> Contents:
        return list(zip(self.pages, parts((self.space, self.symbols)), strict=True))


@dataclass
class Queued:
    """A match that is used later, and the model's pages at the time of the match, each with its number of moves."""

    match: MatchResult
    prefix: Prefix
    device: list[tuple[Entry, int]]
    host: list[Entry]
    num_moves: int


@dataclass
class Held:
    hold: HostHold
    contents: Contents
    after: Points  # a storage worker reads after these
    entries: list[Entry] = field(default_factory=list)


symbols_of_prompt = st.lists(st.integers(0, 1), max_size=7).map(tuple)
picks = st.integers(0, 11)
mostly = st.sampled_from([True, True, True, False])
spaces = st.sampled_from(["", "", "", "lora"])


class TwoTierMachine(RuleBasedStateMachine):
    page_size = 1
    policy = "write_through"
    lookahead = 0

    @initialize()
    def start_empty(self) -> None:
        self.world = World()
        self.pool = SpyPool("KV pages", NUM_DEVICE_PAGES)
        self.host_pool = SpyPool("host KV pages", NUM_HOST_PAGES, reserved=0)
        self.tree = HiRadixCache(
            self.pool, self.page_size, self.host_pool, self.policy, self.spill, FINGERPRINT.root_key, self.lookahead
        )
        self.model = TwoTierModel()
        self.num_tickets = 0
        self.in_flight: list[Ticket] = []
        self.running: list[Running] = []
        self.queued: list[Queued] = []
        self.held: list[Held] = []
        self.prefetches: list[tuple[Prefix, np.ndarray]] = []
        # Nodes that inserts returned; splits and evictions continue below them.
        self.touched: list[TreeNode] = []
        self.leaving: set[Prefix] = set()

    # --- requests ------------------------------------------------------------------------------------

    @rule(space=spaces, symbols=symbols_of_prompt, tail=st.integers(0, 100))
    def queue(self, space: str, symbols: tuple[int, ...], tail: int) -> None:
        self.queued.append(self.match(space, symbols, tail % self.page_size))

    @precondition(lambda self: self.queued)
    @rule(pick=picks, load_back=mostly, launch=mostly)
    def begin(self, pick: int, load_back: bool, launch: bool) -> None:
        """A request begins with a queued match, if that is still valid, and continues after it, at once or later."""
        queued = self.queued.pop(pick % len(self.queued))
        match, (space, symbols) = queued.match, queued.prefix
        if not self.is_current(queued):
            again = self.match(space, symbols, 0)
            match = again.match
        match = match if load_back else match.on_device()
        num_shared = (match.num_tokens + match.num_host_tokens) // self.page_size
        self.tree.lock(match.host_node)
        self.model.lock((space, symbols[:num_shared]), 1)
        pages = match.pages.tolist()
        req = Running(space, symbols, match.host_node, num_shared, pages, match.loading)
        self.running.append(req)
        num_loaded = num_shared - len(pages)
        loaded, own = self.alloc(num_loaded), self.alloc(len(symbols) - num_shared)
        if loaded is None or own is None:
            for got in (loaded, own):
                if got is not None:
                    self.pool.retire(*got)
            req.pages = pages = []
            self.leave(req)
            return
        if num_loaded:
            self.load_back(req, *loaded)
        req.pages = [*req.pages, *own[0].tolist()]
        req.unwritten, req.own_after = req.contents[num_shared:], own[1]
        if launch:
            self.flight(req)

    def load_back(self, req: Running, pages: np.ndarray, after: Points) -> None:
        ticket = self.ticket(TransferKind.LOAD)
        move = self.tree.begin_load(req.node, pages, ticket)
        loaded = parts(req.prefix(req.num_shared))[len(req.pages) :]
        assert move.device_pages.tolist() == pages.tolist()
        assert move.host_pages.tolist() == [self.model.pages[p].host for p in loaded]
        for part, page in zip(loaded, pages.tolist(), strict=True):
            entry = self.model.pages[part]
            entry.device, entry.num_moves = page, entry.num_moves + 1
        self.submit(ticket, move, loaded, move.after.join(after))
        req.pages = [*req.pages, *pages.tolist()]
        req.loads = (*req.loads, ticket)

    @precondition(lambda self: self.running)
    @rule(pick=picks, more=picks)
    def publish_part(self, pick: int, more: int) -> None:
        """A chunk has been computed: its pages go into the tree, and the request moves onto the tree's pages."""
        req = self.running[pick % len(self.running)]
        self.insert(req, req.num_shared + more % (len(req.pages) - req.num_shared + 1))

    @precondition(lambda self: self.running)
    @rule(pick=picks, symbol=st.integers(0, 1))
    def decode(self, pick: int, symbol: int) -> None:
        req = self.running[pick % len(self.running)]
        own = self.alloc(1)
        if own is None:
            self.flight(req)
            return
        req.pages = [*req.pages, *own[0].tolist()]
        req.symbols = (*req.symbols, symbol)
        req.unwritten, req.own_after = [*req.unwritten, req.contents[-1]], req.own_after.join(own[1])
        self.flight(req)

    @precondition(lambda self: self.running)
    @rule(pick=picks, finished=mostly)
    def end(self, pick: int, finished: bool) -> None:
        req = self.running[pick % len(self.running)]
        if finished:
            self.insert(req, len(req.pages), leaving=True)
        else:
            self.leave(req)

    @rule(space=spaces, symbols=symbols_of_prompt, load_back=mostly, finished=mostly, backup=st.booleans())
    def serve(self, space: str, symbols: tuple[int, ...], load_back: bool, finished: bool, backup: bool) -> None:
        """A whole request, one step long."""
        self.queue(space, symbols, 0)
        self.begin(len(self.queued) - 1, load_back, True)
        if self.running and self.running[-1].symbols == symbols:
            self.end(len(self.running) - 1, finished)
        if backup and self.touched:
            self.back_up(1, False)

    # --- the other tier ------------------------------------------------------------------------------

    @precondition(lambda self: self.touched)
    @rule(num_nodes=st.integers(1, 3), force=st.booleans())
    def back_up(self, num_nodes: int, force: bool) -> None:
        nodes = self.touched[-num_nodes:]
        del self.touched[-num_nodes:]
        candidates = self.tree.backup_candidates(*nodes, force=force)
        threshold = 0 if force else HITS.get(self.policy, 1 << 30)
        paths = dict.fromkeys(end for node in nodes for end in self.ends_above(node))
        expected = [
            end
            for end in paths
            if self.model.pages[end].hits >= threshold
            and self.model.pages[end].host is None
            and self.model.pages[end].device is not None
        ]
        assert [self.prefix_of(node) for node in candidates] == expected
        self.store(candidates)

    def spill(self, nodes: list[TreeNode]) -> None:
        self.num_spilled += sum(node.num_pages for node in nodes)
        self.store(nodes)

    def store(self, nodes: list[TreeNode]) -> None:
        """Back up the nodes for which the tree can evict host pages."""
        ticket, ends = self.ticket(TransferKind.STORE), [self.prefix_of(node) for node in nodes]
        protected = self.leaving | {end for node in nodes for end in self.ends_above(node)}
        move = self.tree.begin_backup(nodes, ticket)
        self.see_host_evictions(protected)
        stored: list[Prefix] = []
        refused: set[TreeNode | None] = set()
        for node, end in zip(nodes, ends, strict=True):
            if node.host_pages is None:
                refused.add(node)
                continue
            assert node.parent not in refused, "backed up below a node that was not"
            for part, page in zip(self.model.node(end), node.host_pages.tolist(), strict=True):
                self.model.pages[part].host = page
                stored.append(part)
        if nodes and nodes[-1] in refused and nodes[-1].parent not in refused:
            assert self.host_pool.num_free < nodes[-1].num_pages, "refused although there was room"
        assert move.device_pages.tolist() == [self.model.pages[p].device for p in stored]
        assert move.host_pages.tolist() == [self.model.pages[p].host for p in stored]
        if move.num_pages:
            self.submit(ticket, move, stored, move.after)

    @rule(num_pages=st.integers(0, 6))
    def evict_host(self, num_pages: int) -> None:
        num_evicted = self.tree.host.evict(num_pages)
        assert num_evicted == self.see_host_evictions(set())
        assert num_evicted >= num_pages or not self.model.host_candidates(set())

    @rule(space=spaces, symbols=symbols_of_prompt, num_pages=st.integers(1, 3))
    def prefetch(self, space: str, symbols: tuple[int, ...], num_pages: int) -> None:
        got = self.tree.alloc_host(min(num_pages, max(len(symbols), 1)))
        self.see_host_evictions(set())
        if got is None:
            return
        pages, after = got
        symbols = symbols or (0,)
        self.world.run_until(after)  # a worker fills the pages
        self.world.host.update(zip(pages.tolist(), parts((space, symbols))[-len(pages) :], strict=True))
        self.prefetches.append(((space, symbols), pages))

    @precondition(lambda self: self.prefetches)
    @rule()
    def prefetch_done(self) -> None:
        (space, symbols), pages = self.prefetches.pop(0)
        left = self.tree.insert_host(self.tokens(symbols), pages, extra_key=space)
        assert left.tolist() == self.model.insert_host((space, symbols), pages.tolist())
        self.host_pool.retire(left, Points.none())
        self.host_pool.take_log()

    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        nodes = [node for node in self.tree._nodes() if node.host_pages is not None]
        if not nodes:
            return
        node = nodes[pick % len(nodes)]
        prefix = self.prefix_of(node)
        tokens = self.tokens(prefix[1])
        after = Points.of(*node.host_after, *(p for t in node.transfers for p in t.points))
        hold = self.tree.hold_host(node)
        keys = page_keys(FINGERPRINT.root_key(prefix[0]), tokens, self.page_size, self.lookahead)
        assert hold.keys == keys[-node.num_pages :]
        contents = list(zip(hold.host_pages.tolist(), self.model.node(prefix), strict=True))
        entries = self.model.entries(prefix)
        assert [entry.host for entry in entries] == hold.host_pages.tolist()
        for entry in entries:
            entry.holds.add(hold.id)
        self.held.append(Held(hold, contents, after, entries))

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        held = self.held.pop(pick % len(self.held))
        for entry in held.entries:
            entry.holds.remove(held.hold.id)
        self.tree.release_hold(held.hold.id)
        self.host_pool.take_log()

    # --- pressure and time ---------------------------------------------------------------------------

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        victims: list[Prefix] = []
        while sum(len(self.model.node(end)) for end in victims) < num_pages:
            oldest = self.model.oldest_on_device(victims)
            if oldest is None:
                break
            victims.append(oldest)
        expected = [[e.device for e in self.model.entries(end)] for end in victims]
        to_spill = sum(len(self.model.node(e)) for e in victims if self.model.pages[e].host is None)
        self.num_spilled, self.leaving = 0, set(victims)
        self.pool.take_log()
        num_evicted = self.tree.evict(num_pages)
        self.leaving = set()
        assert self.pool.take_log() == expected
        assert num_evicted == sum(map(len, expected))
        assert self.num_spilled == (to_spill if self.policy == "write_back" else 0)
        self.leave_device(victims)

    def leave_device(self, victims: list[Prefix]) -> None:
        dropped: list[int] = []
        for end in victims:
            if end not in self.model.ends:
                continue
            if self.model.pages[end].host is None:
                dropped += [e.host for e in self.model.drop(end) if e.host is not None and not e.holds]
                continue
            for entry in self.model.entries(end):
                entry.device, entry.num_moves = None, entry.num_moves + 1
        assert sorted(sum(self.host_pool.take_log(), [])) == sorted(dropped)

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        assert self.tree.reset() == sum(e.device is not None for e in self.model.pages.values())
        self.model.pages.clear()
        self.model.ends.clear()
        self.host_pool.take_log()

    @rule(index=st.integers(0, 2), num_ops=st.integers(1, 4))
    def time_passes(self, index: int, num_ops: int) -> None:
        for _ in range(num_ops):
            self.world.streams[index].run_one()

    @rule()
    def drain_acks(self) -> None:
        for stream in self.world.streams:
            stream.passed_serial = stream.ran
        for ticket in [ticket for ticket in self.in_flight if ticket.points.passed]:
            self.in_flight.remove(ticket)
            self.tree.finish(ticket)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for req in list(self.running):
            self.flight(req)
            self.insert(req, len(req.pages), leaving=True)
        while any(stream.run_one() for stream in self.world.streams):
            pass
        assert not any(stream.ops for stream in self.world.streams), "operations wait for each other"
        self.holds_are_intact()
        self.drain_acks()
        self.counts_agree()
        assert (self.tree.num_locked_nodes, self.tree.transit.num_pages, self.in_flight) == (0, 0, [])
        for entry_host, prefix in [(e.host, p) for p, e in self.model.pages.items() if e.host is not None]:
            check(self.world.host, [(entry_host, prefix)], "the end reads")
        self.tree.reset()
        for held in self.held:
            self.tree.release_hold(held.hold.id)
        for _, pages in self.prefetches:
            self.host_pool.retire(pages, Points.none())
        assert (self.pool.num_leased, self.host_pool.num_leased) == (0, 0)
        self.tree.check()

    # --- what must always hold -----------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        self.tree.check()
        entries = self.model.pages.values()
        device = sorted(e.device for e in entries if e.device is not None)
        host = sorted(e.host for e in entries if e.host is not None)
        assert self.tree.all_pages().tolist() == device
        assert self.tree.all_host_pages().tolist() == host
        assert self.tree.num_pages == len(device)
        assert self.tree.host.num_pages == len(host)
        assert self.tree.host.num_both_pages == sum(e.device is not None and e.host is not None for e in entries)
        assert self.tree.num_evictable_pages == sum(e.device is not None and not e.locks for e in entries)
        assert self.tree.num_nodes == len(self.model.ends)
        own = [page for req in self.running for page in req.pages[req.num_shared :]]
        assert sorted(device + own) == self.pool.owned().tolist()
        fetched = [page for _, pages in self.prefetches for page in pages.tolist()]
        orphans = {p for h in self.held for p in h.hold.host_pages.tolist()} - set(host)
        assert sorted([*host, *fetched, *orphans]) == self.host_pool.owned().tolist()
        assert self.tree.host.num_orphan_pages == len(orphans)

    @invariant()
    def nodes_are_the_models(self) -> None:
        nodes = list(self.tree._nodes())
        assert {self.prefix_of(node) for node in nodes} == self.model.ends
        for node in nodes:
            entries = self.model.entries(self.prefix_of(node))
            assert [e.device for e in entries] == (node.pages.tolist() or [None] * node.num_pages)
            host = [None] * node.num_pages if node.host_pages is None else node.host_pages.tolist()
            assert [e.host for e in entries] == host
            assert {(e.locks, e.hits) for e in entries} == {(node.lock_ref, node.hit_count)}
            held = {hold.id for hold in node.host_holds}
            assert all(e.holds == held for e in entries)

    @invariant()
    def matches_know_whether_they_hold(self) -> None:
        for queued in self.queued:
            self.is_current(queued)

    @invariant()
    def holds_are_intact(self) -> None:
        for held in self.held:
            if reached(held.after):
                check(self.world.host, held.contents, "a worker reads")

    # --- steps shared by the rules -------------------------------------------------------------------

    def tokens(self, symbols: tuple[int, ...]) -> np.ndarray:
        """Tokens whose pages differ only in their last token (with lookahead, the last token of it), so that a mismatch
        is found only at the end of a page."""
        pages = np.full((len(symbols), self.page_size), 7)
        pages[:, -1] = symbols
        return np.concatenate([np.full(self.lookahead, 7), pages.reshape(-1)])

    def prefix_of(self, node: TreeNode) -> Prefix:
        path = node.path()
        tokens = np.concatenate([part.tokens[self.lookahead :] for part in path])
        return self.tree.namespace(path[0]), tuple(tokens.reshape(-1, self.page_size)[:, -1].tolist())

    def ends_above(self, node: TreeNode) -> list[Prefix]:
        return [self.prefix_of(part) for part in node.path()]

    def match(self, space: str, symbols: tuple[int, ...], tail: int) -> Queued:
        tokens = np.concatenate([self.tokens(symbols), np.full(tail, 7)])
        match = self.tree.match_prefix(tokens, extra_key=space)
        found = self.model.walk((space, symbols))
        device = [e for e in found if e.device is not None]
        assert match.pages.tolist() == [e.device for e in device]
        assert match.num_tokens == len(device) * self.page_size
        assert match.num_host_tokens == (len(found) - len(device)) * self.page_size
        assert (match.host_node is match.node) == (len(found) == len(device))
        moves = [(e, e.num_moves) for e in device]
        return Queued(match, (space, symbols), moves, found[len(device) :], self.tree.num_moves)

    def is_current(self, queued: Queued) -> bool:
        n = len(queued.device) + len(queued.host)
        now = [self.model.pages.get(part) for part in parts(queued.prefix)[:n]]
        then = [entry for entry, _ in queued.device] + queued.host
        expected = (
            all(a is b for a, b in zip(now, then, strict=True))
            and all(entry.num_moves == moves for entry, moves in queued.device)
            and all(entry.device is None for entry in queued.host)
        )
        assert self.tree.is_current(queued.match) == expected
        assert expected or self.tree.num_moves > queued.num_moves, "nobody would have looked"
        return expected

    def flight(self, req: Running) -> None:
        """A step of ``req``: after its loads, it reads all pages except those that it writes."""
        after = req.own_after
        for ticket in req.loads:
            after = after.join(ticket.points)
            ticket.waited = True
        reads = [item for item in req.contents if item not in req.unwritten]
        req.last_flight = Points.of(self.world.step(reads, req.unwritten, after))
        req.loads, req.unwritten, req.own_after = (), [], Points.none()

    def insert(self, req: Running, upto: int, leaving: bool = False) -> None:
        """Insert the first ``upto`` pages, retire the duplicates, and move the lock and the request, or end it."""
        if req.unwritten:
            self.flight(req)
        tokens, offered = self.tokens(req.symbols[:upto]), np.array(req.pages[:upto])
        got = self.tree.insert(tokens, offered, req.last_flight, extra_key=req.space)
        num_existing = self.model.insert(req.prefix(upto), req.pages[:upto])
        assert got.num_existing_tokens == num_existing * self.page_size
        assert got.num_taken_pages == upto - num_existing
        self.touched.append(got.node)
        self.pool.retire(offered[req.num_shared : num_existing].astype(np.int32), req.last_flight)
        if leaving:
            del req.pages[req.num_shared :]  # these now belong to the tree, or have been retired
            self.leave(req)
            return
        self.tree.lock(got.node)
        self.model.lock(req.prefix(upto), 1)
        self.tree.unlock(req.node, req.last_flight)
        self.model.lock(req.prefix(req.num_shared), -1)
        req.pages[:upto] = got.pages.tolist()
        req.num_shared, req.node = upto, got.node
        req.loads = tuple(dict.fromkeys((*req.loads, *got.loading)))

    def leave(self, req: Running) -> None:
        self.running.remove(req)
        own = np.array(req.pages[req.num_shared :], dtype=np.int32)
        # If it has not written some pages, their next owner must wait for the same Points.
        self.pool.retire(own, req.last_flight.join(req.own_after))
        self.tree.unlock(req.node, req.last_flight)
        self.model.lock(req.prefix(req.num_shared), -1)

    def alloc(self, num_pages: int) -> tuple[np.ndarray, Points] | None:
        if self.pool.num_free < num_pages:
            self.evict(num_pages - self.pool.num_free)
        got = self.pool.alloc(num_pages)
        assert got is not None or self.tree.num_evictable_pages == 0, "pages were promised"
        return got

    def see_host_evictions(self, protected: set[Prefix]) -> int:
        log = self.host_pool.take_log()
        for pages in log:
            self.model.leave_host(pages, protected)
        return sum(map(len, log))

    def ticket(self, kind: TransferKind) -> Ticket:
        self.num_tickets += 1
        return Ticket(self.num_tickets, kind)

    def submit(self, ticket: Ticket, move: PageMove, prefixes: list[Prefix], after: Points) -> None:
        pages = list(zip(move.device_pages.tolist(), move.host_pages.tolist(), prefixes, strict=True))
        assert ticket.num_pages == len(pages)
        point = self.world.copy(ticket.kind is TransferKind.LOAD, pages, after)
        ticket.submit(Points.of(point), (point,) if ticket.kind is TransferKind.LOAD else ())
        self.in_flight.append(ticket)


# How often a long walk takes which step.
WEIGHTS = {
    "serve": 8,
    "queue": 4,
    "begin": 4,
    "publish_part": 2,
    "decode": 3,
    "end": 4,
    "back_up": 3,
    "evict": 4,
    "evict_host": 1,
    "prefetch": 1,
    "prefetch_done": 1,
    "hold": 1,
    "release": 1,
    "flush": 1,
    "time_passes": 8,
    "drain_acks": 2,
}


class Walk:
    """Random steps from a seed: deeper into the state space than hypothesis goes, without its shrinking. ``checks``:
    what must always hold is checked after each."""

    def __init__(self, seed: int, page_size: int, policy: str, lookahead: int = 0, checks: bool = True) -> None:
        self.random = random.Random(seed)
        self.checks = checks
        sizes = {"page_size": page_size, "policy": policy, "lookahead": lookahead}
        self.machine = type("Machine", (TwoTierMachine,), sizes)()
        self.machine.start_empty()

    def step(self) -> None:
        [name] = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        machine = self.machine
        if name in ("publish_part", "decode", "end") and not machine.running:
            return
        if (name == "flush" and machine.running) or (name == "back_up" and not machine.touched):
            return
        if (
            name in ("begin", "release", "prefetch_done")
            and not {"begin": machine.queued, "release": machine.held, "prefetch_done": machine.prefetches}[name]
        ):
            return
        getattr(machine, name)(**self.arguments(name))
        if self.checks:
            machine.counts_agree()
            machine.nodes_are_the_models()
            machine.matches_know_whether_they_hold()
            machine.holds_are_intact()
        del machine.queued[:-6], machine.touched[:-6]

    def arguments(self, name: str) -> dict[str, object]:
        draw = self.random
        pick, flag = draw.randrange(12), draw.random() < 0.7
        prompt = {
            "space": draw.choice(["", "", "", "lora"]),
            "symbols": tuple(draw.randrange(2) for _ in range(draw.randrange(8))),
        }
        return {
            "serve": {**prompt, "load_back": flag, "finished": draw.random() < 0.8, "backup": pick < 7},
            "queue": {**prompt, "tail": pick},
            "begin": {"pick": pick, "load_back": flag, "launch": draw.random() < 0.5},
            "publish_part": {"pick": pick, "more": draw.randrange(12)},
            "decode": {"pick": pick, "symbol": pick % 2},
            "end": {"pick": pick, "finished": flag},
            "back_up": {"num_nodes": 1 + pick % 3, "force": draw.random() < 0.3},
            "evict": {"num_pages": pick % 9},
            "evict_host": {"num_pages": pick % 6},
            "prefetch": {**prompt, "num_pages": 1 + pick % 3},
            "hold": {"pick": pick},
            "release": {"pick": pick},
            "time_passes": {"index": pick % 3, "num_ops": 1 + pick % 4},
        }.get(name, {})
