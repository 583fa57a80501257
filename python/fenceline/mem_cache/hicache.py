"""HiCache: the KV cache's tiers as the scheduler sees them: device and host under one tree, storage below.

The tree decides, the controller moves bytes, storage's workers keep pages for later. This is where a decision becomes
a transfer: all loads of the requests that one step admits are one transfer, and so are all backups of a step. Nothing
here waits for the device: the stream that accesses a page next waits for the transfer's Points, by the declared edges.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache.host.cache_controller import TransferCounts
from fenceline.mem_cache.host.host_states import HostStates, Pairs
from fenceline.mem_cache.kv_events import KVEventLog, Medium, PageRun
from fenceline.mem_cache.page_hash import page_keys
from fenceline.mem_cache.storage.controller import (
    Ack,
    Done,
    Fetched,
    Found,
    Storage,
    StorageTierStats,
    TimedOut,
    Written,
    apply,
)
from fenceline.mem_cache.storage.worker import Lost, Prefetch, Wrote
from fenceline.mem_cache.transfer import PageMove, Ticket, TransferKind
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.mem_cache.tree.radix_cache import IntArray, MatchResult, TreeNode
from fenceline.memory_order import LeasePool, Points

I32 = npt.NDArray[np.int32]


class Transfers(Protocol):
    """What moves pages between device and host: a HiCacheController, or a test's stand-in."""

    @property
    def host_pages(self) -> LeasePool:
        """Who owns which host page."""
        ...

    @property
    def host_states(self) -> HostStates | None:
        """The states of recurrent layers on the host, None for a model without."""
        ...

    @property
    def counts(self) -> Mapping[TransferKind, TransferCounts]:
        """Transfers, pages, bytes and seconds, for each direction."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Transfers that no :meth:`drain_acks` has returned yet."""
        ...

    def store(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points, states: Pairs = ()) -> None:
        """Copy device pages to host pages, and states, on STORE after ``after``."""
        ...

    def load(self, ticket: Ticket, device_pages: I32, host_pages: I32, after: Points, states: Pairs = ()) -> None:
        """Copy states, then host pages to device pages, on LOAD after ``after``, layer by layer."""
        ...

    def ended(self) -> tuple[int, int]:
        """How many loads and how many stores have ended on the device since the start."""
        ...

    def drain_acks(self, until: tuple[int, int] | None = None) -> Sequence[Ticket]:
        """Transfers that have ended since the last call. ``until`` (loads, stores): only so many first ones."""
        ...


@dataclass(frozen=True, slots=True)
class OffloadedTail:
    """The last page of a retracted request, on a host page of its own, because the tree holds only full pages.
    ``num_tokens``: how many of the request's tokens have their KV in this page and in the full pages before it."""

    host_page: int
    num_tokens: int
    ticket: Ticket


@dataclass(slots=True)
class _Moves:
    """Collects the pages of one transfer before it is submitted."""

    ticket: Ticket
    moves: list[PageMove] = field(default_factory=list)

    def whole(self) -> PageMove:
        after = Points.none()
        for move in self.moves:
            after = after.join(move.after)
        return PageMove(
            np.concatenate([move.device_pages for move in self.moves]),
            np.concatenate([move.host_pages for move in self.moves]),
            after,
            sum((move.states for move in self.moves), ()),
        )


class HiCache:
    """The tree with its host tier. One thread, the scheduler's, calls it."""

    def __init__(
        self,
        pages: LeasePool,
        transfers: Transfers,
        config: EngineConfig,
        storage: Storage | None = None,
        snapshots: LeasePool | None = None,
        grid: int = 0,
    ) -> None:
        """``snapshots``: those of states on the device, None for a model without recurrent layers; ``grid``: tokens
        between two states."""
        hicache, page_size = config.hicache, config.server_args.page_size
        assert hicache is not None
        self.host_pages = transfers.host_pages
        host_states = transfers.host_states
        assert (snapshots is None) == (host_states is None), "states are on both tiers, or on none"
        self.tree = HiRadixCache(
            pages,
            page_size,
            transfers.host_pages,
            config.server_args.hicache_write_policy,
            self._spill,
            None if storage is None else storage.root_key,
            0 if config.draft is None else config.draft.lookahead,
            None if snapshots is None or host_states is None else (snapshots, host_states.slots),
        )
        self.storage: StorageTier | None = None
        if storage is not None and hicache.storage is not None:
            threshold = hicache.storage.prefetch_threshold
            self.storage = StorageTier(self.tree, self.host_pages, storage, page_size, threshold, grid)
        self._transfers = transfers
        self._page_size = page_size
        self._load_back_threshold = hicache.load_back_threshold
        self._num_tickets = 0
        self._load: _Moves | None = None
        self._inserted: list[TreeNode] = []
        self._num_tail_pages = 0
        self._tails_loading: list[OffloadedTail] = []

    # --- host to device ------------------------------------------------------------------------------

    def usable(self, match: MatchResult) -> MatchResult:
        """``match``, without its part on the host if that is too short to be worth a transfer. With its state it spares
        a whole block of tokens at least."""
        is_short = 0 < match.num_host_tokens < self._load_back_threshold
        if not is_short or self.tree.ends_at_states:
            return match
        return match.on_device()

    def begin_load(self, match: MatchResult, device_pages: I32, after: Points) -> None:
        """Bind ``device_pages``, leased with ``after``, to the host's part of ``match``: they are the tree's from now
        on and hold their KV once :meth:`start_loads` has submitted the transfer and it has run."""
        batch = self._load_batch()
        move = self.tree.begin_load(match.host_node, device_pages, batch.ticket)
        batch.moves.append(replace(move, after=move.after.join(after)))

    def begin_load_state(self, node: TreeNode, row: int, after: Points) -> None:
        """Load the state that ``node`` has on the host into the slot of a request's ``row``, leased with ``after``. The
        step that reads it waits for the ticket's ``state_points``."""
        batch = self._load_batch()
        move = self.tree.begin_load_state(node, row, batch.ticket)
        batch.moves.append(replace(move, after=move.after.join(after)))

    def begin_load_tail(self, tail: OffloadedTail, device_page: int, after: Points) -> None:
        """Load a retracted request's last page into ``device_page``, and give its host page back."""
        batch = self._load_batch()
        host = np.array([tail.host_page], dtype=np.int32)
        device = np.array([device_page], dtype=np.int32)
        batch.ticket.add_pages(1)
        batch.moves.append(PageMove(device, host, after.join(tail.ticket.points)))
        self._tails_loading.append(tail)

    def start_loads(self) -> tuple[Ticket, ...]:
        """Submit everything that was begun since the last call as one transfer. A step that reads the pages
        waits for the returned tickets; there are none if nothing was begun."""
        batch, self._load = self._load, None
        if batch is None:
            return ()
        move = batch.whole()
        self._transfers.load(batch.ticket, move.device_pages, move.host_pages, move.after, move.states)
        batch.ticket.waited = batch.ticket.num_pages == 0  # else once FORWARD has waited layer by layer
        for tail in self._tails_loading:
            self._retire_tail(tail, batch.ticket.points)
        self._tails_loading.clear()
        return (batch.ticket,)

    # --- device to host ------------------------------------------------------------------------------

    def inserted(self, node: TreeNode) -> None:
        """Note that the tree got pages on the path of ``node``, or was offered them again: :meth:`write_backups` backs
        them up if the write policy says so."""
        self._inserted.append(node)

    def write_backups(self) -> None:
        """Submit everything that the write policy wants on the host as one transfer. Once a step, after publishing."""
        if not self._inserted:
            return
        nodes = self.tree.backup_candidates(*self._inserted)
        self._inserted.clear()
        self._store(nodes)

    def offload(self, node: TreeNode, tail_page: int | None, num_tokens: int, after: Points) -> OffloadedTail | None:
        """Back up what a retracted request leaves behind: the path of ``node`` whatever the policy, and ``tail_page``,
        the partial page after it, which the request still owns and the steps up to ``after`` still write. None if the
        request has no such page or the host is full. The next user of ``tail_page`` waits for the ticket."""
        ticket = self._ticket(TransferKind.STORE)
        nodes = self.tree.backup_candidates(node, force=True)
        moves = [self.tree.begin_backup(nodes, ticket)]
        tail = None
        leased = None if tail_page is None else self.tree.alloc_host(1)
        if leased is not None:
            host, host_after = leased
            device = np.array([tail_page], dtype=np.int32)
            ticket.add_pages(1)
            moves.append(PageMove(device, host, after.join(host_after)))
            tail = OffloadedTail(int(host[0]), num_tokens, ticket)
            self._num_tail_pages += 1
        self._submit_store(_Moves(ticket, moves), nodes)
        return tail

    def drop_tail(self, tail: OffloadedTail) -> None:
        """Give back the page of a retracted request that has left, or that continues without it."""
        self._retire_tail(tail, tail.ticket.points)

    def _spill(self, nodes: Sequence[TreeNode]) -> None:
        """Back up ``nodes``: under write_back the tree is about to give up their device pages."""
        self._store(nodes)

    def _store(self, nodes: Sequence[TreeNode]) -> None:
        if nodes:
            ticket = self._ticket(TransferKind.STORE)
            self._submit_store(_Moves(ticket, [self.tree.begin_backup(nodes, ticket)]), nodes)

    def _submit_store(self, batch: _Moves, nodes: Sequence[TreeNode]) -> None:
        """``nodes``: those that should be copied to the host, which may have had no room for some of them."""
        move = batch.whole()
        if len(move.host_pages) == 0 and not move.states:
            return
        self._transfers.store(batch.ticket, move.device_pages, move.host_pages, move.after, move.states)
        if self.storage is not None:
            backed_up = [node for node in nodes if batch.ticket in node.transfers and node.host_pages is not None]
            self.storage.write(backed_up, batch.ticket.points)

    # --- both ----------------------------------------------------------------------------------------

    @property
    def counts(self) -> Mapping[TransferKind, TransferCounts]:
        """Transfers, pages, bytes and seconds between device and host, for each direction."""
        return self._transfers.counts

    @property
    def num_outstanding(self) -> int:
        """Transfers and storage jobs whose end has not been processed yet."""
        num_jobs = 0 if self.storage is None else self.storage.num_outstanding
        return self._transfers.num_in_flight + num_jobs

    def complete(self, transfers: Sequence[Ticket], storage: Sequence[Ack]) -> None:
        """Process the ``transfers`` that have ended and the acks of storage's workers. Called in every step (F6)."""
        for ticket in transfers:
            self.tree.finish(ticket)
        if self.storage is not None:
            self.storage.complete(storage)

    def close(self) -> None:
        if self.storage is not None:
            self.storage.close()

    def check_memory(self) -> None:
        """Check, while the engine is idle, that every host page is free, in the tree, held, part of a retracted
        request, or being read from storage. Raises ``RuntimeError`` if not."""
        num_fetch_pages = 0 if self.storage is None else self.storage.num_fetch_pages
        num_held = self.tree.host.num_pages + self.tree.host.num_orphan_pages
        num_held += self._num_tail_pages + num_fetch_pages
        if self.host_pages.num_leased != num_held:
            raise RuntimeError(
                f"host KV pages do not add up while idle: {self.host_pages.num_leased} leased, {num_held} accounted for"
            )
        tier, num_fetched = self.tree.host, 0 if self.storage is None else self.storage.num_fetch_states
        num_held = tier.num_states + tier.num_orphan_states + num_fetched
        if tier.states is not None and tier.states.num_leased != num_held:
            raise RuntimeError(
                f"host states do not add up while idle: {tier.states.num_leased} leased, {num_held} accounted for"
            )

    def _load_batch(self) -> _Moves:
        if self._load is None:
            self._load = _Moves(self._ticket(TransferKind.LOAD))
        return self._load

    def _ticket(self, kind: TransferKind) -> Ticket:
        self._num_tickets += 1
        return Ticket(self._num_tickets, kind)

    def _retire_tail(self, tail: OffloadedTail, after: Points) -> None:
        self.host_pages.retire(np.array([tail.host_page], dtype=np.int32), after=after.join(tail.ticket.points))
        self._num_tail_pages -= 1


# --- storage ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Wanted:
    """A prefetch and the prefix it is for."""

    op: Prefetch
    token_ids: IntArray  # the prefix, up to the last page that the keys name, and its lookahead
    first_page: int  # index in the prefix of the first page that the keys name
    extra_key: str  # its namespace
    num_forgotten: int  # how often :meth:`StorageTier.forget` had been called before
    num_settled: int = 0  # leading host pages that the tree has taken or that are free again
    has_state: bool = True  # whether ``op.state``, if there is one, is still the prefetch's


class StorageTier:
    """The storage below a tree. One thread, the scheduler's, calls it."""

    def __init__(
        self,
        tree: HiRadixCache,
        host_pages: LeasePool,
        storage: Storage,
        page_size: int,
        prefetch_threshold: int,
        grid: int = 0,
    ) -> None:
        """``prefetch_threshold``: prefixes with fewer tokens beyond device and host are not looked for. ``grid``:
        tokens between two states of recurrent layers, 0 if there are none."""
        self._grid = grid
        self._tree = tree
        self._host_pages = host_pages
        self._controller = storage.controller
        self._root_key = storage.root_key
        self._page_size = page_size
        self._threshold = prefetch_threshold
        self._num_prefetches = 0
        self._num_forgotten = 0
        self._wanted: dict[int, _Wanted] = {}  # by the prefetch's handle
        self._writing: dict[int, PageRun] = {}  # what is written, by its hold, if the tree notes events

    # --- host to storage ----------------------------------------------------------------------------------------

    def write(self, nodes: Sequence[TreeNode], after: Points) -> None:
        """Store the host pages of ``nodes``, which hold their KV after ``after``."""
        for node in nodes:
            hold = self._tree.hold_host(node)
            state = node.host_state if len(hold.keys) == len(hold.host_pages) else None
            if self._tree.events is not None and (run := self._tree.run(node)) is not None:
                self._writing[hold.id] = run
            self._controller.write(hold.keys, hold.host_pages[: len(hold.keys)], after, hold.id, state)

    # --- storage to host ------------------------------------------------------------------------------------------

    def prefetch(self, token_ids: IntArray, match: MatchResult, extra_key: str = "") -> Prefetch | None:
        """Ask storage for the pages that follow ``match`` in the prompt ``token_ids`` [n], in the namespace
        ``extra_key``. None if there are fewer tokens than the threshold. A prompt's last token is always computed."""
        num_known, lookahead = match.num_tokens + match.num_host_tokens, self._tree.lookahead
        num_whole = (len(token_ids) - max(lookahead, 1)) // self._page_size * self._page_size
        if num_whole - num_known < max(self._threshold, 1):
            return None
        tokens = token_ids[: num_whole + lookahead]
        first = num_known // self._page_size
        root = self._root_key(extra_key)
        keys = page_keys(root, tokens, self._page_size, lookahead, self._tree.images)[first:]
        self._num_prefetches += 1
        ends = None
        if self._grid:
            ends = [end for end in range(1, len(keys) + 1) if (first + end) * self._page_size % self._grid == 0]
        op = Prefetch(self._num_prefetches, keys, ends)
        self._wanted[op.handle] = _Wanted(op, tokens, first, extra_key, self._num_forgotten)
        self._controller.query(op)
        return op

    def may_schedule(self, op: Prefetch) -> bool:
        """Whether the policy lets the request run with the pages that have come so far."""
        return self._controller.may_schedule(op)

    def forget(self) -> None:
        """Drop all pages that are being fetched when they arrive, because the weights have been replaced."""
        self._num_forgotten += 1
        self._writing.clear()

    def cancel(self, op: Prefetch) -> None:
        """The request runs without waiting, or has left: it needs no pages beyond those that have arrived."""
        self._controller.cancel(op)

    # --- both ----------------------------------------------------------------------------------------

    @property
    def num_outstanding(self) -> int:
        """Jobs that have not ended, or whose end has not been processed, as it has not come on every rank."""
        return max(self._controller.num_outstanding, len(self._wanted) + self._tree.host.num_holds)

    @property
    def num_fetch_pages(self) -> int:
        """Host pages leased for prefetches, which are not the tree's."""
        return sum(len(w.op.host_pages) - w.num_settled for w in self._wanted.values())

    @property
    def num_fetch_states(self) -> int:
        """Host slots of states leased for prefetches."""
        return sum(w.op.state is not None and w.has_state for w in self._wanted.values())

    def complete(self, acks: Sequence[Ack]) -> None:
        """Process what the workers have done. Called in every step."""
        if self._tree.events is not None:
            self._note_changes(self._tree.events)
        for ack in acks:
            apply(ack)
            match ack:
                case Written():
                    self._tree.release_hold(ack.handle)
                    self._writing.pop(ack.handle, None)
                case Found():
                    self._fetch(ack.op)
                case Fetched():
                    self._settle(ack.op, ack.num_pages)
                case Done():
                    self._end(ack.op)
                case TimedOut():  # ``may_schedule`` knows
                    pass

    def clear(self) -> int:
        """Remove every page of this model. Returns how many. Raises ``ValueError`` if that takes too long."""
        return self._controller.clear()

    def note_events(self) -> None:
        """Note what this process writes to storage and removes from it in the tree's log from now on."""
        self._controller.note_changes()

    def _note_changes(self, log: KVEventLog) -> None:
        changes, self._controller.changes = self._controller.changes, []
        for change in changes or ():
            match change:
                case Lost():
                    log.removed(Medium.DISK, change.keys)
                case Wrote():
                    first = change.total - change.num_written
                    run = self._writing.get(change.handle)  # None after the weights have been replaced
                    if run is not None and change.num_leading:
                        log.stored(Medium.DISK, run.part(first, first + change.num_leading, self._page_size))

    def stats(self) -> StorageTierStats:
        return self._controller.stats()

    def close(self) -> None:
        self._controller.close()

    def _fetch(self, op: Prefetch) -> None:
        leased = None
        # With several ranks, one may have found no page, or the request may have left before the ranks agreed.
        wanted = op.num_found > 0 and not op.cancelled
        if wanted and op.num_found * self._page_size >= self._threshold:
            leased = self._tree.alloc_host(op.num_found)
        if leased is None:  # too few pages, or the host tier is full of pages in use
            self._controller.cancel(op)
            return
        state = self._tree.host.alloc_state() if self._grid else None
        if self._grid and state is None:
            self._host_pages.retire(*leased)
            self._controller.cancel(op)
            return
        slot, after = (None, Points.none()) if state is None else state
        self._controller.fetch(op, leased[0], leased[1].join(after), slot)

    def _settle(self, op: Prefetch, num_pages: int) -> None:
        """The next ``num_pages`` pages of a fetch hold their KV: give the tree those it lacks, retire others."""
        wanted = self._wanted[op.handle]
        first = wanted.num_settled
        wanted.num_settled = end = first + num_pages
        pages = op.host_pages[first:end]
        num_tokens = (wanted.first_page + end) * self._page_size
        tokens = wanted.token_ids[: num_tokens + self._tree.lookahead]
        # The worker has waited for these Points, but the streams that access the pages next have not.
        spare = pages
        if wanted.num_forgotten == self._num_forgotten:
            spare = self._tree.insert_host(tokens, pages, op.after, wanted.extra_key)
            if op.state is not None and end == len(op.host_pages):
                self._tree.insert_host_state(tokens, op.state, op.after, wanted.extra_key)
                wanted.has_state = False
        self._host_pages.retire(spare, op.after)

    def _end(self, op: Prefetch) -> None:
        op.ended_at = time.perf_counter()
        wanted = self._wanted.pop(op.handle)
        unused = op.host_pages[wanted.num_settled :]
        self._host_pages.retire(unused, op.after)
        if op.state is not None and wanted.has_state:
            self._tree.host.retire_state(op.state, op.after)
