"""RequestMemory: allocates and retires the KV pages and rows of requests, and moves whole pages into the prefix tree.

A request's memory is not freed but retired after the last step that the request was in, because a step in flight may
still read the pages and write the row. The tree gets only whole pages of published steps.
"""

from __future__ import annotations

import operator
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import CachedTokensDetails, Stage
from fenceline.mem_cache.hicache import HiCache, OffloadedTail, StorageTier
from fenceline.mem_cache.image_keys import ImageKeys
from fenceline.mem_cache.kv_events import KVEventLog
from fenceline.mem_cache.page_hash import PageRoots, page_fingerprint
from fenceline.mem_cache.transfer import Ticket
from fenceline.mem_cache.tree.radix_cache import InsertResult, MatchResult, RadixCache
from fenceline.memory_order import LeasePool, Points, comparison, ends_at_state, step_embeddings, told_by
from fenceline.memory_order.edges import COMMITTED_STATE, IMAGE_KEYS, IMAGE_NAMES, QUEUED_MATCH
from fenceline.memory_order.relocation import RelocationClock
from fenceline.model_executor.step import Completions, PageWrites, StepBatch, Worker
from fenceline.scheduler.image_cache import ImageCache
from fenceline.scheduler.req import Prefix, QueuedMatch, Req, Samples, no_pages
from fenceline.scheduler.state_snapshots import StateSnapshots

# While one sample computes at least this many tokens of a prompt, the other samples of the prompt wait for it.
_MIN_SHARED_TOKENS = 32

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Remap:
    """Columns of a request's page-table row, from ``first_column`` on, that must be rewritten to name the tree's
    ``pages`` [n] int32 instead of the request's own copies. The writes bring the row to ``version``."""

    req: Req
    first_column: int
    pages: I32
    version: int


class PageTables:
    """Tracks which rows of the device's page table are up to date (F5). Each row has a version. It changes when the
    pages of the row change: when the row is given to a request, when a prompt moves onto the tree's pages, and when the
    row is given back. Page-table writes carry the version to which they bring the row. If a step is about to read a row
    that is behind its version, the row is written again as a whole, and this is counted in ``num_rewritten``."""

    def __init__(self, num_rows: int) -> None:
        self._clock = RelocationClock(num_rows)
        self._behind: set[int] = set()  # rows whose latest change has not been written; mostly empty
        self.num_rewritten = 0

    def moved(self, row: int) -> int:
        """Note that the pages of ``row`` have changed. Returns the version that its page-table writes must carry."""
        self._clock.move(row)
        self._behind.add(row)
        return self._clock.version(row)

    def released(self, row: int) -> None:
        """Note that ``row`` has no request any more. It is written before a step reads it again."""
        self._clock.move(row)
        self._behind.discard(row)

    def written(self, row: int, version: int) -> None:
        """Note that the next step writes ``row`` as it is in ``version``."""
        if version == self._clock.version(row):
            self._behind.discard(row)

    def up_to_date(self, batch: StepBatch, reqs: Sequence[Req]) -> StepBatch:
        """``batch`` with page-table writes for the whole rows of those of its ``reqs`` that are behind."""
        if not self._behind:
            return batch
        stale = [req for req in reqs if req.row in self._behind]
        if not stale:
            return batch
        self.num_rewritten += len(stale)
        for req in stale:
            self._behind.discard(req.row)
        return replace(batch, page_writes=_whole_tables(batch.page_writes, stale))


def _whole_tables(writes: PageWrites, reqs: Sequence[Req]) -> PageWrites:
    """``writes`` with those for the rows of ``reqs`` replaced by the whole rows."""
    others = ~np.isin(writes.rows, [req.row for req in reqs])
    return PageWrites(
        rows=np.concatenate([writes.rows[others], *(_row(req) for req in reqs)]),
        columns=np.concatenate([writes.columns[others], *(np.arange(len(req.pages), dtype=np.int64) for req in reqs)]),
        pages=np.concatenate([writes.pages[others], *(np.array(req.pages, dtype=np.int32) for req in reqs)]),
    )


def _row(req: Req) -> I64:
    return np.full(len(req.pages), req.row, dtype=np.int64)


class RequestMemory:
    """Allocates KV pages and rows for requests and takes them back; whole pages of prompts and outputs go to the prefix
    tree. ``tiers`` are the tree's lower tiers, None if the device is the only tier."""

    def __init__(
        self,
        pages: LeasePool,
        rows: LeasePool,
        tree: RadixCache,
        page_size: int,
        tiers: HiCache | None = None,
        same_version: Callable[[int, int], bool] = operator.eq,
        num_rows_behind: int = 0,
        images: ImageCache | None = None,
        states: StateSnapshots | None = None,
    ) -> None:
        """``same_version`` compares the tree's ``num_moves`` with an earlier value (see ``memory_order.comparison``).
        ``num_rows_behind``: see ``DraftConfig``. ``images``: None for a model that reads texts alone.
        ``states``: None for a model without recurrent layers."""
        self.pages = pages
        self.rows = rows
        self.tree = tree
        self.page_size = page_size
        self.tiers = tiers
        self.images = images or ImageCache(0, False)
        self.states = states or StateSnapshots(tree)
        self.cached_tokens: Counter[str] = Counter()  # prompt tokens by the tier where they were found
        self.num_evicted_pages = 0  # evicted from the device since the start
        self.tables = PageTables(rows.size)
        self.remaps: list[Remap] = []  # that no step has written yet
        self._num_stale_matches = 0
        self._same_version = same_version
        self._num_rows_behind = num_rows_behind

    @property
    def num_pages(self) -> int:
        """Device pages for requests and the tree together."""
        return self.pages.size - self.pages.reserved

    @property
    def num_available_pages(self) -> int:
        """Device pages that could be allocated now: the free ones, and those that the tree could evict."""
        return self.pages.num_free + self.tree.num_evictable_pages

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def prefetch(self, req: Req) -> None:
        """Start a prefetch of the prefix of a request that has arrived, if there is a storage tier."""
        if self._storage is not None:
            usable = req.prompt_keys[: _most_cached(req) + max(self.tree.lookahead, 1)]
            req.prefetch = self._storage.prefetch(usable, self.match(req).match, req.source.extra_key)

    def may_schedule(self, req: Req) -> bool:
        """Whether ``req`` need not wait for its prefetch from storage, nor for a sample that computes its prompt. A
        request whose prompt is scored does not wait for a sample: it computes the prompt itself."""
        if req.samples is not None and not req.scores_prompt and self._is_computed(req.samples):
            return False
        return req.prefetch is None or self._storage is None or self._storage.may_schedule(req.prefetch)

    def would_compute_for_others(self, req: Req) -> bool:
        """Whether the other samples of its prompt wait once ``req``, which waits too, is admitted."""
        return req.samples is not None and self._is_worth_waiting(req, self.match(req).num_page_tokens)

    def _is_computed(self, samples: Samples) -> bool:
        """Whether one of ``samples`` computes their prompt now."""
        one = samples.computing
        if one is None or one.committed_len >= len(one.prompt_ids):
            return False
        return self._is_worth_waiting(one, one.shared_len)

    def _is_worth_waiting(self, req: Req, num_cached: int) -> bool:
        """Whether others can find enough whole pages of the prompt of ``req`` in the cache that are not there yet."""
        unit = self.states.grid or self.page_size
        num_whole = (len(req.prompt_ids) - 1) // unit * unit
        return not self.tree.disabled and num_whole - num_cached >= _MIN_SHARED_TOKENS

    def _end_prefetch(self, req: Req) -> int:
        """End the prefetch of ``req``. Returns how many tokens have been fetched."""
        op, req.prefetch = req.prefetch, None
        if op is None or self._storage is None:
            return 0
        self._storage.cancel(op)
        num_tokens = op.num_fetched * self.page_size
        if req.stages is not None and num_tokens:
            req.stages.append(Stage("load_storage", req.arrived_at, op.ended_at or time.perf_counter(), num_tokens))
        return num_tokens

    @property
    def _storage(self) -> StorageTier | None:
        return None if self.tiers is None else self.tiers.storage

    @property
    def recomputes(self) -> dict[str, int]:
        """How often a value derived from page locations was stale, and was computed again (F5), by kind."""
        return {"queued_match": self._num_stale_matches, "page_table": self.tables.num_rewritten}

    def match(self, req: Req) -> Prefix:
        """The cached prefix that ``req`` can use. At least one token is left to compute. The result is kept in
        ``req.queued_match`` and used again as long as no nodes have been added and the pages have not moved."""
        tree, queued = self.tree, req.queued_match
        if queued is not None and queued.num_created == tree.num_created:
            if self._same_version(queued.num_moves, tree.num_moves) or tree.is_current(queued.prefix.match):
                return queued.prefix
            self._num_stale_matches += 1
        prefix = self._match(req)
        req.queued_match = QueuedMatch(prefix, tree.num_created, tree.num_moves)
        return prefix

    def _match(self, req: Req) -> Prefix:
        tokens = req.key_ids()
        limit = _most_cached(req)
        match = self.tree.match_prefix(tokens[: limit + self.tree.lookahead], req.source.extra_key)
        if self.tiers is None:
            return Prefix(match)
        match = self.tiers.usable(match)
        tail, num_whole = req.tail, match.num_tokens + match.num_host_tokens
        if tail is None or num_whole != tail.num_tokens // self.page_size * self.page_size:
            return Prefix(match)
        return Prefix(match, min(tail.num_tokens, limit) - num_whole)

    def admit(self, req: Req, prefix: Prefix) -> Points:
        """Give ``req`` a row, its cached ``prefix`` and pages for all its other tokens. There must be enough memory.
        The caller has locked the prefix's ``host_node`` for the request. Returns the Points after which the memory may
        be accessed. Pages of the prefix that are only on the host are loaded by :meth:`start_loads`."""
        assert not (req.row or req.pages or req.node or req.left), f"{req.rid} is admitted once"
        match = prefix.match
        req.fork_len = self.states.fork(req, match)
        loaded = self._begin_load(match)
        if req.stages is not None and len(loaded):
            req.stages.append(Stage("load_host", 0.0, 0.0, len(loaded) * self.page_size))  # the launch adds the time
        num_new = self.num_pages_for(req.num_tokens) - len(match.pages) - len(loaded)
        pages, after = self._alloc(num_new)
        if req.tail is not None:
            self._take_tail(req, prefix, pages, after)
        num_fetched = self._end_prefetch(req)
        if not req.was_admitted:
            req.was_admitted = True
            req.cached_tokens = prefix.num_tokens
            if self.tiers is not None:
                num_stored = min(num_fetched, match.num_host_tokens)
                by_tier = {
                    "device": match.num_tokens,
                    "host": match.num_host_tokens - num_stored,
                    "storage": num_stored,
                }
                req.cached_details = CachedTokensDetails(**by_tier)
                self.cached_tokens.update(by_tier)
        leased = self.rows.alloc(1)
        assert leased is not None, "the caller has checked for a free row"
        row, row_after = leased
        req.row = int(row[0])
        # The step that admits the request writes the whole row.
        self.tables.written(req.row, self.tables.moved(req.row))
        req.pages = no_pages()
        req.pages.frombytes(match.pages.tobytes() + loaded.tobytes() + pages.tobytes())
        req.node, req.queued_match = match.host_node, None
        if req.samples is not None and not self._is_computed(req.samples):
            req.samples.computing = req
        req.shared_len = prefix.num_page_tokens
        req.allocated_len = req.committed_len = req.snapshot_len = prefix.num_tokens
        self.states.begin(req, match, row_after)
        assert len(req.pages) == self.num_pages_for(req.num_tokens), f"{req.rid} has the pages of its tokens"
        return after.join(row_after)

    def start_loads(self) -> tuple[Ticket, ...]:
        """Submit the loads that requests admitted since the last call need; their batch must wait for the tickets."""
        tickets = () if self.tiers is None else self.tiers.start_loads()
        self.states.loads_started(tickets)
        return tickets

    def grow(self, reqs: Sequence[Req], nums: Sequence[int]) -> tuple[I32, Points]:
        """Give running requests more pages, ``nums[i]`` to ``reqs[i]``, which must be available. Returns all the pages
        int32, one request's after the other's, and the Points after which they may be accessed."""
        pages, after = self._alloc(sum(nums))
        ids = array("i", pages.tobytes())
        first = 0
        for req, num in zip(reqs, nums, strict=True):
            req.pages += ids[first : first + num]
            first += num
        return pages, after

    def cache_prompt(self, req: Req) -> None:
        """Insert the published whole pages of a request into the tree. The request goes on. If another request has
        inserted the same tokens first, this request moves onto the tree's pages, and its own copies are retired after
        its last step. :meth:`with_remaps` writes this to the page table."""
        result = self._insert(req)
        old_shared, shared = (req.shared_len, result.num_existing_tokens + result.num_taken_pages * self.page_size)
        if self.tiers is not None:
            self.tiers.inserted(result.node)
        if shared <= old_shared:
            return
        assert req.node is not None
        self.tree.lock(result.node)
        self.tree.unlock(req.node, Points.none())
        req.node, req.shared_len = result.node, shared
        first, last = old_shared // self.page_size, result.num_existing_tokens // self.page_size
        if last <= first:
            return
        duplicates = np.array(req.pages[first:last], dtype=np.int32)
        self.pages.retire(duplicates, after=req.last_flight)
        pages = result.pages[first:last]
        req.pages[first:last] = array("i", pages.tobytes())
        self.remaps.append(Remap(req, first, pages, self.tables.moved(req.row)))

    def fork(self, req: Req) -> int:
        """See ``StateSnapshots.fork``: where a chunk of ``req``, which may wait or have been admitted, ends."""
        return req.fork_len if req.row or not self.states.grid else self.states.fork(req, self.match(req).match)

    def with_remaps(self, batch: StepBatch) -> StepBatch:
        """``batch`` with the page-table writes of pending remaps, which are made before any step reads those rows."""
        live = [remap for remap in self.remaps if not remap.req.left]
        self.remaps.clear()
        if not live:
            return batch
        for remap in live:
            self.tables.written(remap.req.row, remap.version)
        writes, firsts = batch.page_writes, [remap.first_column for remap in live]
        sizes = [len(remap.pages) for remap in live]
        rows = [np.full(num, remap.req.row, np.int64) for num, remap in zip(sizes, live, strict=True)]
        columns = [np.arange(first, first + num) for num, first in zip(sizes, firsts, strict=True)]
        moved = PageWrites(
            rows=np.concatenate([writes.rows, *rows]),
            columns=np.concatenate([writes.columns, *columns]),
            pages=np.concatenate([writes.pages, *(remap.pages for remap in live)]),
        )
        return replace(batch, page_writes=moved)

    def release(self, req: Req) -> None:
        """Give back all memory of a finished, aborted or retracted request. No other method does this."""
        assert req.left, "only requests that have left are released"
        if req.samples is not None and req.samples.computing is req:
            req.samples.computing = None
        self._end_prefetch(req)
        if req.row == 0:  # not admitted, or not again
            assert not req.pages and req.node is None, f"{req.rid} holds pages without a row"
            if req.tail is not None and self.tiers is not None:
                self.tiers.drop_tail(req.tail)
            return
        self.states.take_last(req, self._num_complete(req))
        result = self._insert(req)
        self.states.drop(req)
        if self.tiers is not None:
            self.tiers.inserted(result.node)
        shared = req.shared_len // self.page_size
        existing = result.num_existing_tokens // self.page_size
        taken_end = existing + result.num_taken_pages
        own = req.pages[shared : max(existing, shared)] + req.pages[max(taken_end, shared) :]
        self.pages.retire(np.array(own, dtype=np.int32), after=req.last_flight.join(req.tail_after))
        assert req.node is not None
        self.tree.unlock(req.node, req.last_flight)
        self.rows.retire(np.array([req.row], dtype=np.int32), after=req.last_flight)
        self.tables.released(req.row)
        req.row, req.pages, req.node = 0, no_pages(), None

    def flush(self, storage: bool = False) -> int:
        """Empty the tree and, with ``storage``, the storage tier too. No request may hold memory. Returns the number of
        device pages that have become free. Raises ValueError if ``storage`` is set and there is no storage tier."""
        below = self._storage
        if storage and below is None:
            raise ValueError("there is no storage tier")
        num_pages = self.tree.reset()
        if below is None and self.tree.events is not None:
            self.tree.events.cleared()
        if storage and below is not None:
            below.clear()
        return num_pages

    def forget(self, waiting: Iterable[Req]) -> int:
        """Drop all KV that was computed with the weights until now, because the weights change: the tree, and what the
        ``waiting`` requests have on the host or are fetching from storage. No request may hold pages. Returns the
        number of device pages that have become free. Storage keeps its pages, under keys that nobody looks up."""
        for req in waiting:
            self._end_prefetch(req)
            req.queued_match = None
            if req.tail is not None and self.tiers is not None:
                self.tiers.drop_tail(req.tail)
                req.tail = None
        if self._storage is not None:
            self._storage.forget()
        self.images.clear()
        num_pages = self.flush()
        if self.tree.events is not None:
            self.tree.events.cleared()
        return num_pages

    def offload(self, req: Req) -> OffloadedTail | None:
        """Copy the KV of ``req``, which is about to be retracted, to the host: whole pages through the tree, and the
        last, incomplete page as a page of its own, which is returned for the resumed request (None if there is no such
        page, or no room on the host). Afterwards the request is released like any other."""
        assert self.tiers is not None, "offloading needs a host tier"
        assert req.row != 0, f"{req.rid} has nothing to offload"
        self.cache_prompt(req)  # no step reads its row any more
        assert req.node is not None
        num_tokens = self._num_complete(req)
        # From a state a request goes on at a point of the grid, where a page ends.
        has_tail = num_tokens % self.page_size and not self.states.grid
        tail_page = req.pages[num_tokens // self.page_size] if has_tail else None
        tail = self.tiers.offload(req.node, tail_page, num_tokens, req.last_flight)
        if tail is not None:
            req.tail_after = tail.ticket.points
        return tail

    def complete(self, completions: Completions) -> None:
        """Process the transfers between the tiers and the storage jobs that have ended (F6)."""
        if self.tiers is not None:
            self.tiers.complete(completions.transfers, completions.storage)

    def write_backups(self) -> None:
        """Start the backups to the host that the write policy asks for, of pages added to the tree in this step."""
        if self.tiers is not None:
            self.tiers.write_backups()

    @property
    def num_outstanding(self) -> int:
        """Transfers and storage jobs that have not been completed yet, see :meth:`complete`."""
        return 0 if self.tiers is None else self.tiers.num_outstanding

    def check_memory(self, every_page: bool = False) -> None:
        """Check, while no request holds memory, that every page is free or in the tree and that every row is free.
        Compares the numbers of pages. Single pages are compared only if these differ, or with ``every_page``: with half
        a million cached pages that takes 50 ms, for which the next request would wait. Raises ``RuntimeError`` that
        names what is leaked."""
        if every_page or self.pages.num_leased != self.tree.num_pages:
            self._check_pages()
        if self.rows.num_leased:
            raise RuntimeError(f"request rows leased to nobody while idle: {self.rows.owned().tolist()[:8]}")
        if self.tree.num_locked_nodes:
            raise RuntimeError(f"{self.tree.num_locked_nodes} nodes of the tree are locked while idle")
        self.images.check_memory()
        self.states.check_memory()
        if self.tiers is not None:
            self.tiers.check_memory()

    def _check_pages(self) -> None:
        held, cached = self.pages.owned(), self.tree.all_pages()
        if not np.array_equal(held, cached):
            lost = np.setdiff1d(held, cached).tolist()
            foreign = np.setdiff1d(cached, held).tolist()
            raise RuntimeError(
                f"KV pages do not add up while idle: {len(lost)} leased to nobody {lost[:8]}, "
                f"{len(foreign)} in the tree but not leased {foreign[:8]}"
            )

    def _begin_load(self, match: MatchResult) -> I32:
        """Allocate device pages for the part of ``match`` that is only on the host, and begin to load it. The pages
        belong to the tree."""
        if match.num_host_tokens == 0:
            return np.empty(0, dtype=np.int32)
        assert self.tiers is not None, "only a host tier has host tokens"
        pages, after = self._alloc(match.num_host_tokens // self.page_size)
        self.tiers.begin_load(match, pages, after)
        return pages

    def _take_tail(self, req: Req, prefix: Prefix, pages: I32, after: Points) -> None:
        """Load the incomplete last page that ``req`` left on the host when it was retracted into the first of its new
        ``pages``, or drop it if ``prefix`` does not use it."""
        assert req.tail is not None and self.tiers is not None
        if prefix.num_tail_tokens > 0:
            self.tiers.begin_load_tail(req.tail, int(pages[0]), after)
        else:
            self.tiers.drop_tail(req.tail)
        req.tail = None

    def _alloc(self, num_pages: int) -> tuple[I32, Points]:
        missing = num_pages - self.pages.num_free
        if missing > 0:
            self.num_evicted_pages += self.tree.evict(missing)
        leased = self.pages.alloc(num_pages)
        assert leased is not None, f"{num_pages} pages were promised, {self.pages.num_free} are free"
        return leased

    def _num_complete(self, req: Req) -> int:
        """The number of leading tokens of ``req`` that other requests may share: their KV of target and draft model has
        been computed, and from published tokens only."""
        num_computed = req.committed_len - self._num_rows_behind
        return max(min(num_computed, req.num_tokens - self.tree.lookahead), req.shared_len)

    def _insert(self, req: Req) -> InsertResult:
        num_pages = self._num_complete(req) // self.page_size
        tokens = req.key_ids()[: num_pages * self.page_size + self.tree.lookahead]
        pages = np.array(req.pages[:num_pages], dtype=np.int32)
        result = self.tree.insert(tokens, pages, req.last_flight, req.source.extra_key)
        self.states.give(req, num_pages * self.page_size)
        return result


def _most_cached(req: Req) -> int:
    """The number of leading tokens of ``req`` that need not be computed if they are cached. At least one must be."""
    limit = req.num_tokens - 1
    if req.scores_prompt:
        # The first scored token has no logprob itself, but it must be computed for the logprob of the next one.
        return min(limit, req.source.logprob_start_len)
    return limit


def make_request_memory(config: EngineConfig, worker: Worker) -> RequestMemory:
    """Make the RequestMemory for ``worker``'s pages and rows, with its lower tiers if it has any."""
    pages, rows, page_size = worker.pages, worker.req_pool.rows, config.server_args.page_size
    same_version = comparison(worker.device, QUEUED_MATCH)
    draft = config.draft
    tree: RadixCache
    tiers = None
    snapshots = None if worker.states is None else worker.states.snapshots
    if config.hicache is None or worker.hicache is None:
        lookahead = 0 if draft is None else draft.lookahead
        # Without snapshots no prefix is ever found, so none need be kept, nor waited for.
        is_useless = snapshots is not None and not snapshots.num_free
        disabled = config.server_args.disable_radix_cache or is_useless
        tree = RadixCache(pages, page_size, disabled, lookahead, snapshots)
    else:
        grid = 0 if worker.states is None else worker.states.grid
        tiers = HiCache(pages, worker.hicache, config, worker.storage, snapshots, grid)
        tree = tiers.tree
    num_rows_behind = 0 if draft is None else draft.num_rows_behind
    tree.images = ImageKeys(told_by(worker.device, IMAGE_KEYS), told_by(worker.device, IMAGE_NAMES))
    vision = config.model.vision
    sees_whole = vision is not None and vision.sees_whole
    images = ImageCache(
        config.num_embedding_rows,
        config.model.moves_positions,
        sees_whole,
        config.chunked_prefill_size or config.max_prefill_tokens,
        lookahead=draft.lookahead if draft is not None and draft.sees_images else 0,
    )
    images.most_in_step = step_embeddings(worker.device, images.most_in_step)
    states = None
    if worker.states is not None:
        tree.ends_at_states = ends_at_state(worker.device)
        same_state = comparison(worker.device, COMMITTED_STATE)
        states = StateSnapshots(tree, worker.states.grid, worker, same_state, tiers)
    return RequestMemory(pages, rows, tree, page_size, tiers, same_version, num_rows_behind, images, states)


def note_kv_events(log: KVEventLog, config: EngineConfig, memory: RequestMemory) -> None:
    """Have the tiers of ``memory`` note in ``log`` what they gain and lose from now on."""
    memory.tree.note_events(log, PageRoots(page_fingerprint(config, config.kv_layout)))
    if memory.tiers is not None and memory.tiers.storage is not None:
        memory.tiers.storage.note_events()
