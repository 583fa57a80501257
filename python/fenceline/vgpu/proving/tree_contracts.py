"""What the prefix trees promise to any caller: random calls of a tree, compared with a plain record of prefixes.

The record keeps for each prefix, token by token, which page of the device and of the host has its last page, and for
each page the Points of all who use it. It knows no nodes. Workloads reach few trees with a lookahead, with namespaces
whose names look like tokens, with several transfers of one page at once, or that adopt a part of what is offered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from fenceline.mem_cache.transfer import PageMove, Ticket
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import HostHold, Int32Array, MatchResult, RadixCache, TreeNode
from fenceline.memory_order import LeasePool, Points
from fenceline.memory_order.device import CpuStream
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.stream import Point

Prefix = tuple[str, tuple[int, ...]]  # a namespace, and tokens up to the end of a page and its lookahead
Prompt = tuple[str, Int32Array]

_NUM_CALLS = 40
_MOST_PAGES = 5  # of a prompt
_VOCAB = (1, 2)
_NAMESPACES = ("", "", "a", "b")


def compare_trees(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    for wrong in _wrong(random):
        return f"trees: {wrong}"
    return ""


def _wrong(random: Random) -> Iterator[str]:
    calls = _Calls(random, random.random() < 0.8)
    try:
        calls.begin()
        for _ in range(_NUM_CALLS):
            calls.make_one()
        yield from calls.wrong
        yield from calls.finish()
    except AssertionError as error:
        yield f"{error} (pages of {calls.size} tokens, {calls.lookahead} behind them)"
    yield from calls.wrong
    try:
        RadixCache(calls.pool, 0)
        yield "a tree with pages of no token is made"
    except ValueError:
        pass


@dataclass(frozen=True, slots=True)
class _Found:
    """A match, and what it was made of."""

    match: MatchResult
    prefixes: tuple[Prefix, ...]  # one for each of its pages, on the device first
    num_moves: int


class _Calls:
    """Calls of one tree, with two tiers or one, and the record. ``wrong``: what is not as the record says."""

    def __init__(self, random: Random, has_host: bool) -> None:
        self.random, self.has_host = random, has_host
        self.size, self.lookahead = random.choice((1, 1, 2, 3)), random.choice((0, 0, 1, 2))
        self.wrong: list[str] = []
        self.pool = LeasePool("contract pages", 14)
        self.host_pool = LeasePool("contract host pages", random.choice((4, 6, 12)), 0)
        self.policy = random.choice(("write_through", "write_back"))
        self.tree: RadixCache = (
            HiRadixCache(
                self.pool,
                self.size,
                self.host_pool,
                self.policy,
                self._spill if self.policy == "write_back" else None,
                lambda name: hashlib.sha256(name.encode()).digest(),
                self.lookahead,
            )
            if has_host
            else RadixCache(self.pool, self.size, lookahead=self.lookahead)
        )
        self.on_device: dict[Prefix, int] = {}
        self.on_host: dict[Prefix, int] = {}
        self.users: dict[int, list[Point]] = {}  # of device pages: who may still use them
        self.host_users: dict[int, list[Point]] = {}
        self.retired_after: dict[int, Points] = {}  # of host pages that are free
        self.gone: list[int] = []  # device pages that have been retired
        self.host_gone: list[int] = []
        self.locks: list[tuple[TreeNode, tuple[Prefix, ...]]] = []
        self.found: list[_Found] = []
        self.holds: list[HostHold] = []
        self.tickets: list[tuple[Ticket, Point]] = []
        self.loads: dict[int, Ticket] = {}  # of device pages that are being loaded
        self.streams = [
            CpuStream(name, frozenset()) for name in (StreamName.FORWARD, StreamName.LOAD, StreamName.STORE)
        ]
        for stream in self.streams:
            stream.lags = True
        self.pool.observer = lambda ids, after: self._retired(ids, after, self.users, self.gone)
        self.host_pool.observer = self._host_retired
        self.prompts = [
            (random.choice(_NAMESPACES), [random.choice(_VOCAB) for _ in range(_MOST_PAGES * self.size + 2)])
            for _ in range(3)
        ]

    @property
    def tiers(self) -> HiRadixCache:
        assert isinstance(self.tree, HiRadixCache), "there is a host tier"
        return self.tree

    # --- the record

    def _prompt(self) -> Prompt:
        name, tokens = self.random.choice(self.prompts)
        if self.random.random() < 0.2:
            name = self.random.choice(_NAMESPACES)
        tokens = tokens[: self.random.choice((self.random.randint(0, len(tokens)), len(tokens)))]
        if tokens and self.random.random() < 0.2:
            tokens = [*tokens[:-1], self.random.choice(_VOCAB)]
        if self.random.random() < 0.15:  # a name that ends as a page begins, and the rest of that page
            page = tokens[: self.size + self.lookahead]
            num = self.random.randint(0, len(page))
            name, tokens = name + "".join(f"{chr(token)}\0\0\0" for token in page[:num]), page[num:]
        return name, np.array(tokens, np.int32)

    def _prefixes(self, name: str, tokens: Int32Array) -> list[Prefix]:
        """One for each whole page whose lookahead is known."""
        listed, ends = tuple(tokens.tolist()), range(self.size, len(tokens) - self.lookahead + 1, self.size)
        return [(name, listed[: end + self.lookahead]) for end in ends]

    def _before(self, prefix: Prefix) -> Prefix | None:
        """That of the page in front of it."""
        name, tokens = prefix
        return (name, tokens[: -self.size]) if len(tokens) >= 2 * self.size + self.lookahead else None

    def _cached(self, prefixes: Sequence[Prefix]) -> tuple[list[int], list[int]]:
        """The pages on the device, then those that are only on the host, of the longest prefix."""
        device: list[int] = []
        host: list[int] = []
        for prefix in prefixes:
            if prefix in self.on_device:
                device.append(self.on_device[prefix])
            elif prefix in self.on_host:
                host.append(self.on_host[prefix])
            else:
                break
        return device, host

    def _point(self) -> Point:
        return self.random.choice(self.streams).record()

    def _note(self, holds: object, text: str) -> None:
        if not holds:
            self.wrong.append(f"{text} (pages of {self.size} tokens, {self.lookahead} behind them)")

    def _covers(self, after: Points, points: Iterable[Point]) -> bool:
        latest = {point.stream.name: point.serial for point in after}
        return all(point.passed or latest.get(point.stream.name, -1) >= point.serial for point in points)

    def _retired(
        self, ids: Int32Array, after: Points, users: dict[int, list[Point]], gone: list[int]
    ) -> None:
        for page in ids.tolist():
            gone.append(page)
            self._note(
                self._covers(after, users.pop(page, ())), f"page {page} retires with {list(after)} alone"
            )

    def _host_retired(self, ids: Int32Array, after: Points) -> None:
        self._retired(ids, after, self.host_users, self.host_gone)
        self.retired_after |= dict.fromkeys(ids.tolist(), after)

    def _locked(self) -> set[Prefix]:
        return {prefix for _, prefixes in self.locks for prefix in prefixes}

    def _num_evictable_on_host(self) -> int:
        """All but those that are locked, held or in front of one of these on the host."""
        held = {page for hold in self.holds for page in hold.host_pages.tolist()}
        kept = {prefix for prefix, page in self.on_host.items() if page in held} | self._locked()
        for prefix in sorted(self.on_host, key=lambda prefix: -len(prefix[1])):
            before = self._before(prefix)
            if prefix in kept and before is not None:
                kept.add(before)
        return sum(prefix not in kept for prefix in self.on_host)

    def _forget(self) -> None:
        """What has been retired is not there any more, nor what is of no use without it."""
        for pages, gone in ((self.on_device, self.gone), (self.on_host, self.host_gone)):
            for prefix in [prefix for prefix, page in pages.items() if page in gone]:
                del pages[prefix]
        for page in self.gone:
            self.loads.pop(page, None)
        for prefix in sorted(self.on_host, key=lambda prefix: len(prefix[1])):
            before = self._before(prefix)
            if before is not None and before not in self.on_host and before not in self.on_device:
                del self.on_host[prefix]
        self.gone.clear()
        self.host_gone.clear()

    # --- the calls

    def make_one(self) -> None:
        """One call, and the comparison of everything that the tree says afterwards."""
        common: list[Callable[[], object]] = [self._match, self._lock, self._unlock]
        common += [*(self._insert,) * 3, *(self._evict,) * 2]
        host: list[Callable[[], object]] = [*(self._insert_host,) * 3, *(self._load,) * 2]
        host += [*(self._backup,) * 3, self._evict_host]
        host += [self._hold, self._release, self._finish, self._alloc_host]
        self.random.choice(common + host if self.has_host else common)()
        self._forget()
        self._compare()

    def _compare(self) -> None:
        tree, locked = self.tree, self._locked()
        self._note(tree.all_pages().tolist() == sorted(self.on_device.values()), "the tree has other pages")
        num_locked = sum(prefix in locked for prefix in self.on_device)
        counts = tree.num_locked_pages, tree.num_evictable_pages
        self._note(counts == (num_locked, len(self.on_device) - num_locked), "locked pages are miscounted")
        for found in self.found:
            self._compare_found(found)
        if self.has_host:
            tiers, both = self.tiers, self.on_host.keys() & self.on_device.keys()
            is_right = tiers.all_host_pages().tolist() == sorted(self.on_host.values())
            self._note(is_right, "the tree has other host pages")
            self._note(tiers.num_both_pages == len(both), "pages on both tiers are miscounted")
            num_more = self.host_pool.num_leased - len(self.on_host)
            self._note(num_more == tiers.num_orphan_host_pages, "held pages without a node are miscounted")
        if self.random.random() < 0.5:
            tree.check()

    def _compare_found(self, found: _Found) -> None:
        match, num_device = found.match, len(found.match.pages)
        there = [self.on_device.get(prefix) for prefix in found.prefixes[:num_device]]
        behind = found.prefixes[num_device:]
        is_right = there == match.pages.tolist() and all(
            prefix in self.on_host and prefix not in self.on_device for prefix in behind
        )
        said = self.tree.is_current(match)
        self._note(is_right or not said, "a match is said to be current, and its pages have moved")
        self._note(said or found.num_moves != self.tree.num_moves, "a match is stale, and no page has moved")

    def _match(self, prompt: Prompt | None = None) -> _Found:
        name, tokens = prompt or self._prompt()
        prefixes = self._prefixes(name, tokens)
        device, host = self._cached(prefixes)
        given = tokens if self.random.random() < 0.5 else tokens.astype(np.int64)
        match = self.tree.match_prefix(given, name)
        num_found = len(match.pages), match.num_tokens, match.num_host_tokens
        right = len(device), len(device) * self.size, len(host) * self.size
        self._note(num_found == right, f"{num_found} of {name!r} {tokens.tolist()} are found, not {right}")
        self._note(match.pages.tolist() == device, f"pages {match.pages.tolist()} are found, not {device}")
        loading = {self.loads[page] for page in device if page in self.loads}
        self._note(set(match.loading) == loading, f"{match.loading} are loading, not {loading}")
        path = match.host_node.path()
        self._note(not path or self.tree.namespace(path[0]) == name, f"the namespace {name!r} is lost")
        if self.has_host and path:
            keys, num = self._keys(name, tokens, len(device) + len(host)), match.host_node.num_pages
            self._note(self.tiers.keys(match.host_node) == keys[-num:], "pages have other keys")
        found = _Found(match, tuple(prefixes[: len(device) + len(host)]), self.tree.num_moves)
        self.found = [*self.found[-2:], found]
        return found

    def _keys(self, name: str, tokens: Int32Array, num_pages: int) -> list[bytes]:
        key, keys = hashlib.sha256(name.encode()).digest(), []
        for start in range(0, num_pages * self.size, self.size):
            own = tokens[start : start + self.size + self.lookahead]
            key = hashlib.sha256(key + b"".join(int(token).to_bytes(4, "little") for token in own)).digest()
            keys.append(key)
        return keys

    def _insert(self, prompt: Prompt | None = None) -> None:
        name, tokens = prompt or self._prompt()
        prefixes = self._prefixes(name, tokens)
        tokens = tokens[: len(prefixes) * self.size + self.lookahead]
        device, _ = self._cached(prefixes)
        leased = self.pool.alloc(len(prefixes) - len(device))
        if leased is None:
            return
        point, taken = self._point(), leased[0].tolist()
        result = self.tree.insert(tokens, np.array(device + taken, np.int32), Points.of(point), name)
        said = result.num_existing_tokens, result.num_taken_pages
        self._note(
            said == (len(device) * self.size, len(taken)), f"{said} of {len(prefixes)} pages are taken"
        )
        self._note(result.pages.tolist() == device + taken, f"pages are {result.pages}, not {device + taken}")
        self.on_device |= zip(prefixes[len(device) :], taken, strict=True)
        self.users |= {page: [point] for page in taken}

    def _lock(self) -> None:
        if len(self.locks) < 3:
            found = self._match()
            self.tree.lock(found.match.host_node)
            self.locks.append((found.match.host_node, found.prefixes))

    def _unlock(self) -> None:
        if not self.locks:
            return
        node, prefixes = self.locks.pop(self.random.randrange(len(self.locks)))
        point = self._point()
        for prefix in prefixes:
            if prefix in self.on_device:
                self.users[self.on_device[prefix]].append(point)
        self.tree.unlock(node, Points.of(point))

    def _evict(self) -> None:
        num_pages = self.random.randint(0, 6)
        num_evictable = len(self.on_device) - sum(prefix in self._locked() for prefix in self.on_device)
        num = self.tree.evict(num_pages)
        self._note(num == len(self.gone), f"{num} pages are said to be evicted, {len(self.gone)} are")
        self._note(num >= min(num_pages, num_evictable), f"{num} of {num_evictable} pages are evicted")

    # --- the calls of two tiers

    def _spill(self, nodes: Sequence[TreeNode]) -> None:
        self._back_up(nodes)

    def _submit(self, ticket: Ticket) -> Point:
        point = self._point()
        ticket.submit(Points.of(point), (point,))
        self.tickets.append((ticket, point))
        return point

    def _back_up(self, nodes: Sequence[TreeNode]) -> None:
        ticket = Ticket.store(len(self.tickets))
        move: PageMove = self.tiers.begin_backup(nodes, ticket)
        if not move.num_pages:
            return
        of_page = {page: prefix for prefix, page in self.on_device.items()}
        pairs = list(zip(move.device_pages.tolist(), move.host_pages.tolist(), strict=True))
        for page, host_page in pairs:
            before = [*self.users[page], *self.retired_after.get(host_page, ())]
            self._note(
                self._covers(move.after, before), f"a backup of page {page} waits for {list(move.after)}"
            )
        self._forget_host_pages()
        point = self._submit(ticket)
        for page, host_page in pairs:
            self.on_host[of_page[page]] = host_page
            self.users[page].append(point)
            self.host_users[host_page] = [point]
        self._note(ticket.num_pages == len(pairs), "the pages of a backup are miscounted")

    def _forget_host_pages(self) -> None:
        """Those that have left for others, which may have got the same numbers."""
        for prefix in [prefix for prefix, page in self.on_host.items() if page in self.host_gone]:
            del self.on_host[prefix]
        self.host_gone.clear()

    def _backup(self) -> None:
        """Of what is matched now, or has been matched before, so that others have been used since."""
        current = [found for found in self.found if self.tree.is_current(found.match)]
        found = self.random.choice(current) if current and self.random.random() < 0.5 else self._match()
        nodes = self.tiers.backup_candidates(found.match.node, force=True)
        self._back_up(nodes)

    def _load(self, prompt: Prompt | None = None) -> None:
        matches = (self._match(prompt) for _ in range(3))
        found = next((found for found in matches if found.match.num_host_tokens), None)
        if found is None:
            return
        num_pages = found.match.num_host_tokens // self.size
        leased = self.pool.alloc(num_pages)
        if leased is None:
            return
        pages, behind = leased[0].tolist(), found.prefixes[len(found.match.pages) :]
        ticket = Ticket.load(len(self.tickets))
        move = self.tiers.begin_load(found.match.host_node, leased[0], ticket)
        host = [self.on_host[prefix] for prefix in behind]
        self._note(move.host_pages.tolist() == host, f"host pages {move.host_pages} are loaded, not {host}")
        users = [point for page in host for point in self.host_users[page]]
        self._note(
            self._covers(move.after, users), f"a load of host pages {host} waits for {list(move.after)}"
        )
        point = self._submit(ticket)
        self.on_device |= zip(behind, pages, strict=True)
        self.users |= {page: [point] for page in pages}
        self.loads |= dict.fromkeys(pages, ticket)
        for page in host:
            self.host_users[page].append(point)

    def _finish(self) -> None:
        if self.tickets:
            ticket, point = self.tickets.pop(0)
            point.stream.note_passed(point)
            # All that come before it on its stream have passed too.
            done = [ticket, *(other for other, one in self.tickets if one.passed)]
            self.tickets = [(other, one) for other, one in self.tickets if not one.passed]
            for other in done:
                self.tiers.finish(other)
                for page in [page for page, load in self.loads.items() if load is other]:
                    del self.loads[page]

    def _alloc(self, num_pages: int) -> tuple[list[int], Points] | None:
        num_free, most = self.host_pool.num_free, self.host_pool.num_free + self._num_evictable_on_host()
        leased = self.tiers.alloc_host(num_pages)
        self._note(
            (leased is None) == (num_pages > most), f"{num_pages} of {most} host pages are not judged right"
        )
        if leased is None or num_pages <= num_free:
            self._note(not self.host_gone, "host pages leave for nothing")
        if leased is None:
            return None
        before = [point for page in leased[0].tolist() for point in self.retired_after.get(page, ())]
        self._note(self._covers(leased[1], before), "host pages are leased before they are free")
        return leased[0].tolist(), leased[1]

    def _alloc_host(self) -> None:
        leased = self._alloc(self.random.randint(1, self.host_pool.size))
        if leased is not None:
            self._forget_host_pages()
            self.host_pool.retire(np.array(leased[0], np.int32), leased[1])
            self.host_gone.clear()

    def _insert_host(self, prompt: Prompt | None = None) -> None:
        name, tokens = prompt or self._prompt()
        prefixes = self._prefixes(name, tokens)
        if not prefixes:
            return
        tokens = tokens[: len(prefixes) * self.size + self.lookahead]
        num_pages = self.random.randint(1, len(prefixes)) if prompt is None else len(prefixes)
        leased = self._alloc(num_pages)
        if leased is None:
            return
        self._forget()
        point, pages = self._point(), leased[0]
        self.host_users |= {page: [point] for page in pages}
        num_cached = sum(map(len, self._cached(prefixes)))
        num_known = num_cached - (len(prefixes) - num_pages)
        spare = pages if num_known < 0 else pages[:num_known]
        left = self.tiers.insert_host(tokens, np.array(pages, np.int32), Points.of(point), name)
        self._note(
            left.tolist() == spare, f"host pages {left.tolist()} of {pages} are left over, not {spare}"
        )
        if num_known >= 0:
            self.on_host |= zip(prefixes[num_cached:], pages[num_known:], strict=True)
        self.host_pool.retire(np.array(spare, np.int32), Points.of(point))
        self.host_gone.clear()

    def _evict_host(self) -> None:
        num_pages, most = self.random.randint(0, 5), self._num_evictable_on_host()
        num = self.tiers.evict_host(num_pages)
        self._note(num == len(self.host_gone), f"{num} host pages are said to be evicted")
        self._note(num >= min(num_pages, most), f"{num} of {most} host pages are evicted")

    def _hold(self) -> None:
        found = self._match()
        node = found.match.host_node
        if node.num_host_pages and len(self.holds) < 2:
            self.holds.append(self.tiers.hold_host(node))

    def _release(self) -> None:
        if self.holds:
            self.tiers.release_hold(self.holds.pop(0).id)

    # --- what random calls hardly come to

    def begin(self) -> None:
        """Perhaps one of two beginnings, of which each has calls that follow from each other."""
        if self.has_host and self.random.random() < 0.5:
            self.random.choice((self._begin_in_transit, self._begin_beside))()
            self._forget()
            self._compare()
            self.tree.check()

    def _pages(self, name: str, num_pages: int, last: int = 1) -> Prompt:
        """A prompt of so many pages, which ends with the token ``last`` and is otherwise like all others of its
        namespace."""
        num_tokens = num_pages * self.size + self.lookahead
        return name, np.array([1] * (num_tokens - 1) + [last], np.int32)

    def _begin_in_transit(self) -> None:
        """Nodes that are filled from storage one after the other are loaded together, leave the host meanwhile, and are
        copied there again before they have arrived."""
        for num_pages in range(1, 4):
            self._insert_host(self._pages("in transit", num_pages))
        self._load(self._pages("in transit", 3))
        self._evict_host()
        self._forget()
        found = self._match(self._pages("in transit", 3))
        self._back_up(self.tiers.backup_candidates(found.match.node, force=True))

    def _begin_beside(self) -> None:
        """A backup to a full host evicts every page there but those of the ancestors of nodes that are to be backed up
        as well. No room is left for these nodes, so their ancestors end up without descendants on the host."""
        beside, own = self._pages("beside", 2 + self.lookahead, 2), self._pages("beside", 3 + self.lookahead)
        self._insert(beside)
        found = self._match(beside)
        self._back_up(self.tiers.backup_candidates(found.match.node, force=True))
        self._insert(own)
        behind = self._match(own).match.node
        for _ in range(self.host_pool.num_free):
            self._insert_host(self._pages(f"other {self.host_pool.num_free}", 1))
        num_common = len({*self._prefixes(*beside)} & {*self._prefixes(*own)})
        first = self._pages("first", min(self.host_pool.size - num_common, self.pool.num_free))
        self._insert(first)
        nodes = self.tiers.backup_candidates(self._match(first).match.node, behind, force=True)
        self._back_up(nodes)

    # --- the end

    def finish(self) -> Iterator[str]:
        """``check`` notices what is wrong; then everything goes."""
        self.tree.check()
        yield from self._changes_noticed()
        while self.locks:
            self._unlock()
        num_pages = len(self.on_device)
        stale = [found for found in self.found if found.prefixes]
        if self.tree.reset() != num_pages:
            yield "a reset miscounts the pages"
        if any(self.tree.is_current(found.match) and len(found.match.pages) for found in stale):
            yield "a match is current after a reset"
        if any(found.match.node.parent is not None for found in stale):
            yield "a node is in the tree after a reset"
        if len(self.tree._lru) or (self.has_host and len(self.tiers._host.lru)):
            yield "nodes are kept after a reset"
        self.tree.check()
        while self.holds:
            self._release()
        if self.pool.num_leased or self.host_pool.num_leased:
            yield "pages are leased after a reset"

    def _changes_noticed(self) -> Iterator[str]:
        tree = self.tree
        nodes = list(tree._nodes())
        if not nodes:
            return
        node = self.random.choice(nodes)
        changes: list[tuple[str, Any, str, Any]] = [
            ("tokens", node, "tokens", np.append(node.tokens, np.int32(1))),
            ("locks", node, "lock_ref", 0 if node.lock_ref else 1),
            ("nodes", tree, "_num_nodes", tree.num_nodes + 1),
        ]
        queues = [tree._lru]
        if self.has_host:
            queues.append(self.tiers._host.lru)
            changes.append(("host children", node, "num_host_children", node.num_host_children + 1))
        changes += [("a queue", queue, "_members", {*queue._members, object()}) for queue in queues]
        for what, owner, name, value in changes:
            before = getattr(owner, name)
            setattr(owner, name, value)
            if not _refused(tree.check):
                yield f"check does not notice that {what} are wrong"
            setattr(owner, name, before)
        if self.on_device:
            page = next(iter(self.on_device.values()))
            self.pool._leased[page] = False
            if not _refused(tree.check):
                yield "check does not notice that a page is not leased"
            self.pool._leased[page] = True


def _refused(call: Callable[[], None]) -> bool:
    try:
        call()
    except AssertionError:
        return True
    return False
