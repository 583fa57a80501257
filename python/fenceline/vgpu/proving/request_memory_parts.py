"""What ``RequestMemory`` promises to any scheduler, asked with random requests at the end of a run.

A small memory with a prefix tree of its own and a stand-in for the lower tiers gets requests that are computed, cached,
retracted and released here, one after the other. Which pages are then cached follows from the documentation: a page is
if its KV has been computed from published tokens and the tokens that it depends on are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

import numpy as np

from fenceline.ipc.io_struct import TokenizedGenerateReq, id_array
from fenceline.mem_cache.hicache import OffloadedTail
from fenceline.mem_cache.tree.radix_cache import MatchResult, RadixCache, TreeNode
from fenceline.memory_order import LeasePool, Points
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.req import Prefix, Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.vgpu.proving.events import around

_NUM_PAGES = 40


def compare_request_memory(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    parts = (_prefixes, _evictions, _twins, _offloads, _tails, _changes, _accounts)
    for part in 3 * parts:
        for wrong in part(random):
            return f"request memory: {wrong}"
    return ""


@dataclass(slots=True)
class _Storage:
    """In the place of the storage tier: notes what it is told."""

    calls: list[str] = field(default_factory=list)

    def cancel(self, op: Any) -> None:
        self.calls.append("cancel")

    def forget(self) -> None:
        self.calls.append("forget")

    def clear(self) -> None:
        self.calls.append("clear")


@dataclass(slots=True)
class _Tiers:
    """In the place of the lower tiers: notes what it is told. ``num_host_tokens``: of a prefix, behind those of the
    device."""

    storage: _Storage = field(default_factory=_Storage)
    num_host_tokens: int = 0
    inserted_nodes: list[TreeNode] = field(default_factory=list)
    offloaded: list[tuple[list[int], int | None, int]] = field(default_factory=list)
    dropped: list[Any] = field(default_factory=list)
    loaded: list[tuple[Any, int]] = field(default_factory=list)
    num_checks: int = 0

    def usable(self, match: MatchResult) -> MatchResult:
        return replace(match, num_host_tokens=self.num_host_tokens)

    def inserted(self, node: TreeNode) -> None:
        self.inserted_nodes.append(node)

    def offload(self, node: TreeNode, tail_page: int | None, num_tokens: int, after: Points) -> None:
        self.offloaded.append((_pages_of(node), tail_page, num_tokens))

    def drop_tail(self, tail: Any) -> None:
        self.dropped.append(tail)

    def begin_load_tail(self, tail: Any, page: int, after: Points) -> None:
        self.loaded.append((tail, page))

    def check_memory(self) -> None:
        self.num_checks += 1


def _pages_of(node: TreeNode) -> list[int]:
    return [page for one in node.path() for page in one.pages.tolist()]


class _Memory:
    """A memory with ``size`` tokens in a page, whose KV depends on ``ahead`` tokens behind it."""

    def __init__(self, random: Random, num_pages: int = _NUM_PAGES) -> None:
        self.random = random
        self.size, self.ahead = random.choice((1, 2, 3, 4)), random.choice((0, 0, 1, 3))
        self.num_behind = random.randint(0, self.ahead)
        self.pages, self.rows = LeasePool("parts", num_pages, 1), LeasePool("parts", 6, 1)
        self.tree, self.tiers = RadixCache(self.pages, self.size, False, self.ahead), _Tiers()
        self.memory = RequestMemory(
            self.pages,
            self.rows,
            self.tree,
            self.size,
            cast(Any, self.tiers),
            num_rows_behind=self.num_behind,
        )

    def tokens(self, num: int) -> list[int]:
        return [self.random.randrange(1, 999) for _ in range(num)]

    def request(self, prompt: list[int], **options: Any) -> Req:
        params = SamplingParams(max_new_tokens=8)
        message = TokenizedGenerateReq(rid="r", input_ids=id_array(), sampling_params=params, **options)
        return Req(message, np.array(prompt, np.int32), frozenset(), 0, 8, 1)

    def admitted(self, prompt: list[int]) -> Req:
        req = self.request(prompt)
        prefix = self.memory.match(req)
        self.tree.lock(prefix.match.host_node)
        self.memory.admit(req, prefix)
        return req

    def computes(self, req: Req, outputs: list[int]) -> None:
        """Its prompt is computed, and its outputs: the KV of the last one would be by the next step."""
        req.output_ids += outputs
        num_missing = max(0, -(-req.num_tokens // self.size) - len(req.pages))
        self.memory.grow(req, num_missing)
        req.committed_len = req.num_tokens - bool(req.output_ids)

    def released(self, req: Req) -> None:
        req.left = True
        self.memory.release(req)

    def num_known(self, req: Req) -> int:
        """The tokens whose KV others may use."""
        return max(min(req.committed_len - self.num_behind, req.num_tokens - self.ahead), 0)

    def num_cached(self, req: Req) -> int:
        """The whole pages of these."""
        ends = range(self.size, req.num_tokens + 1, self.size)
        return sum(
            end <= req.committed_len - self.num_behind and end + self.ahead <= req.num_tokens for end in ends
        )


def _prefixes(random: Random) -> Iterator[str]:
    """A request finds the whole pages of its prefix, but computes its last token in any case, and the first one that is
    scored."""
    own = _Memory(random)
    first = own.admitted(own.tokens(random.randint(1, 5 * own.size + own.ahead)))
    own.computes(first, own.tokens(random.choice((0, 1, 3, own.size))))
    tokens, num_cached = first.token_ids().tolist(), own.num_cached(first)
    own.released(first)
    if own.tree.num_pages != num_cached:
        yield f"{own.tree.num_pages} pages of {len(tokens)} tokens are cached, {num_cached} are right"
    whole = min(num_cached * own.size + own.ahead, len(tokens))
    for num in {whole, random.randint(1, len(tokens))}:
        for start in (-1, random.randrange(max(num, 1))):
            if not num:
                continue
            options = {"return_logprob": True, "logprob_start_len": start} if start >= 0 else {}
            limit = num - 1 if start < 0 else min(start, num - 1)
            right = sum(
                end <= limit and end + own.ahead <= num
                for end in range(own.size, num_cached * own.size + 1, own.size)
            )
            said = own.memory.match(own.request(tokens[:num], **options)).num_tokens
            if said != right * own.size:
                yield f"{said} of {num} tokens, scored from {start} on, are found, {right * own.size} are right"


def _evictions(random: Random) -> Iterator[str]:
    """As many pages are evicted as are missing."""
    own = _Memory(random, num_pages=13)
    for _ in range(3):
        req = own.admitted(own.tokens(random.randint(1, 4 * own.size)))
        own.computes(req, [])
        own.released(req)
    asked: list[int] = []
    around(own.tree, "evict", before=asked.append)
    num_free = own.pages.num_free
    num = random.randint(max(num_free - 2, 1), own.memory.num_available_pages)
    before = own.tree.num_pages
    own.memory.grow(own.request([1]), num)
    right = [num - num_free] if num > num_free else []
    if asked != right or own.memory.num_evicted_pages != before - own.tree.num_pages:
        yield f"{asked} pages are evicted for {num} of which {num_free} are free, {right} is right"


def _twins(random: Random) -> Iterator[str]:
    """Two requests with the same tokens share the pages of the first that is cached, and give their own back."""
    own = _Memory(random)
    prompt = own.tokens(random.randint(1, 4 * own.size))
    reqs = [own.admitted(prompt) for _ in range(2)]
    outputs = own.tokens(random.choice((0, 1, 2 * own.size)))
    for req in reqs:
        own.computes(req, [])
        if random.random() < 0.5:
            num = own.num_cached(req)
            own.memory.cache_prompt(req)
            cached = _pages_of(own.tiers.inserted_nodes[-1]) if own.tiers.inserted_nodes else None
            if cached != req.pages[:num].tolist():
                yield f"the lower tiers are told of the pages {cached}, {req.pages[:num].tolist()} are cached"
    for req in reqs:
        own.computes(req, outputs)
    num = own.num_cached(reqs[0])
    for req in reqs:
        own.tiers.inserted_nodes.clear()
        own.released(req)
        cached = _pages_of(own.tiers.inserted_nodes[-1]) if own.tiers.inserted_nodes else None
        if cached is None or len(cached) != num:
            yield f"the lower tiers are told of the pages {cached} of a request that leaves {num}"
    if (own.pages.num_leased, own.tree.num_pages, own.rows.num_leased) != (num, num, 0):
        yield f"{own.pages.num_leased} pages are leased when twins have left, {num} are cached"
    if own.tree.num_locked_nodes:
        yield f"{own.tree.num_locked_nodes} nodes are locked, and nobody uses them"


def _offloads(random: Random) -> Iterator[str]:
    """A retracted request leaves its whole pages in the tree, and the one behind them if it has some tokens."""
    own = _Memory(random)
    req = own.admitted(own.tokens(random.randint(1, 3 * own.size)))
    own.computes(req, own.tokens(random.choice((0, 1, own.size))))
    num = own.num_known(req)
    whole, pages = num // own.size, req.pages.tolist()
    own.memory.offload(req)
    right = pages[:whole], pages[whole] if num % own.size else None, num
    if own.tiers.offloaded != [right]:
        yield f"{own.tiers.offloaded} is offloaded of a request with {num} tokens, {right} is right"


def _tails(random: Random) -> Iterator[str]:
    """The page that a retracted request left on the host is used if it continues what is cached, and else dropped."""
    own = _Memory(random)
    first = own.admitted(own.tokens(4 * own.size))
    own.computes(first, [])
    tokens = first.token_ids().tolist()
    own.released(first)
    num_on_host = random.randrange(3) * own.size
    req = own.request([*tokens, *own.tokens(num_on_host + random.randint(1, 2 * own.size))])
    on_device = own.memory.match(req).num_tokens
    req.queued_match = None
    own.tiers.num_host_tokens = num_on_host
    known = on_device + own.tiers.num_host_tokens
    left = max(known + random.randint(-own.size, 2 * own.size), 1)
    req.tail = tail = OffloadedTail(1, left, cast(Any, None))
    prefix = own.memory.match(req)
    limit = req.num_tokens - 1
    if known <= limit:
        right = min(left, limit) if known <= left < known + own.size else known
        if prefix.num_tokens != right:
            yield f"{prefix.num_tokens} tokens of {known} and a tail up to {left} are used, {right} are right"
    for num in (0, 1):
        req.tail = tail
        own.tiers.dropped.clear()
        own.tiers.loaded.clear()
        own.memory._take_tail(req, Prefix(prefix.match, num), np.array([7, 8], np.int32), Points.none())
        said = own.tiers.dropped, own.tiers.loaded, req.tail
        if said != (([], [(tail, 7)], None) if num else ([tail], [], None)):
            yield f"of a tail {num} tokens are used, {said[1]} is loaded and {said[0]} dropped"


def _changes(random: Random) -> Iterator[str]:
    """A flush empties storage if that is asked for. With new weights what waiting requests have of the old ones is
    dropped, and storage is told."""
    own = _Memory(random)
    req = own.admitted(own.tokens(3 * own.size))
    own.computes(req, [])
    own.released(req)
    calls, num_cached = own.tiers.storage.calls, own.tree.num_pages
    storage = random.random() < 0.5
    num = own.memory.flush(storage)
    if (num, own.tree.num_pages, calls) != (num_cached, 0, ["clear"] * storage):
        yield f"a flush frees {num} pages of {num_cached}, and storage is told {calls}"
    calls.clear()
    waiting = own.request(own.tokens(1))
    fetched = random.randint(1, 9)
    waiting.tail = tail = OffloadedTail(1, 1, cast(Any, None))
    waiting.prefetch = cast(Any, _Fetch(fetched))
    own.memory.forget([waiting])
    kept = [waiting.tail, waiting.prefetch, waiting.queued_match]
    if kept != [None] * 3 or own.tiers.dropped != [tail] or calls != ["cancel", "forget"]:
        yield f"a waiting request keeps {kept} of other weights, and storage is told {calls}"
    waiting.prefetch = cast(Any, _Fetch(fetched))
    num = own.memory._end_prefetch(waiting)
    if num != fetched * own.size:
        yield f"{num} tokens are said to come from storage, {fetched} pages of {own.size} have come"


@dataclass(slots=True, eq=False)
class _Fetch:
    """A prefetch that has brought so many pages."""

    num_fetched: int


def _accounts(random: Random) -> Iterator[str]:
    """While no request has memory, a page, a row or a lock that is left over is noticed."""
    own = _Memory(random)
    req = own.admitted(own.tokens(3 * own.size + own.ahead + own.num_behind))
    own.computes(req, [])
    own.released(req)
    node = own.memory.match(own.request([*req.token_ids().tolist(), 1])).match.node

    def left_over(pool: LeasePool) -> Callable[[], object]:
        return lambda: pool.alloc(1)

    faults = {"page": left_over(own.pages), "row": left_over(own.rows), "lock": lambda: own.tree.lock(node)}
    if _is_refused(own.memory) or own.tiers.num_checks != 1:
        yield f"nothing is left over, which is noticed, and the lower tiers are asked {own.tiers.num_checks} times"
    what = random.choice(list(faults))
    faults[what]()
    if not _is_refused(own.memory):
        yield f"a {what} is left over, and nobody notices"


def _is_refused(memory: RequestMemory) -> bool:
    try:
        memory.check_memory()
    except RuntimeError:
        return True
    return False
