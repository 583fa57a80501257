"""What the host tier and storage promise to the scheduler, and their workers to them: calls in random order, without an
engine, of which the record of jobs (``storage_jobs``) and a few plain rules say what must come.

The workers are played here: what they say comes in any order that they could have, with failures and delays, and the
transfers are only noted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from fenceline.mem_cache.hicache import HiCache, OffloadedTail, StorageTier
from fenceline.mem_cache.storage import controller as controller_module
from fenceline.mem_cache.storage.agreement import StorageAckCodec, StorageAgreement
from fenceline.mem_cache.storage.backend import StorageStats
from fenceline.mem_cache.storage.controller import (
    Done,
    Fetched,
    Found,
    StorageController,
    StorageLimits,
    TimedOut,
)
from fenceline.mem_cache.storage.worker import (
    Asked,
    Began,
    Cleared,
    Cost,
    FetchJob,
    Gone,
    Outcome,
    Prefetch,
    Read,
    StopFlag,
    StorageWorker,
    WriteJob,
    Wrote,
)
from fenceline.mem_cache.transfer import Ticket
from fenceline.mem_cache.tree.radix_cache import MatchResult
from fenceline.memory_order import LeasePool, Points
from fenceline.memory_order.device import CpuStream
from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.stream import Point
from fenceline.vgpu.proving.storage_jobs import StorageJobs

_NUM_TURNS = 50
_NUM_HOST_PAGES = 16
_KINDS = ("write", *("query",) * 3, *("fetch",) * 2, "cancel", *("work",) * 6, "time")


def compare_tiers(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    for part in (_jobs, _clears, _ends, _workers, _agreements, _transfers, _fetches):
        for wrong in part(random):
            return f"tiers: {wrong}"
    return ""


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _ids(*pages: int) -> np.ndarray[Any, Any]:
    return np.array(pages, np.int32)


class _Channel:
    """A queue of one thread. ``nothing``: how often it says next that there is nothing."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.nothing = 0

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self) -> Any:
        return self.items.popleft()

    def poll(self) -> Any:
        if self.nothing:
            self.nothing -= 1
            return None
        return self.items.popleft() if self.items else None


class _Threads:
    """A device whose threads are not started. ``num_joined``: how many have been waited for."""

    def __init__(self) -> None:
        self.num_joined = 0

    def make_channel(self) -> _Channel:
        return _Channel()

    def start_worker(self, name: str, run: Callable[[], None]) -> Any:
        return SimpleNamespace(join=self._join)

    def _join(self) -> None:
        self.num_joined += 1


class _Played:
    """A controller, the time, and the words of its workers."""

    def __init__(self, random: Random, limits: StorageLimits, policy: str = "wait_complete") -> None:
        self.now, self.threads = 1.0, _Threads()
        pool: Any = SimpleNamespace(page_nbytes=8, num_pages=_NUM_HOST_PAGES)
        backend: Any = SimpleNamespace(page_nbytes=8, stats=StorageStats)
        timeout = random.choice((0.5, 5.0)) if policy == "timeout" else None
        self.controller = StorageController(
            cast(Any, self.threads), pool, backend, cast(Any, policy), timeout, 2, limits, lambda: self.now
        )
        self.events = cast(Any, self.controller._events)

    def jobs(self, name: str) -> deque[Any]:
        return cast(Any, getattr(self.controller, f"_{name}").jobs).items


# --- storage's controller


def _jobs(random: Random) -> Iterator[str]:
    """Writes, queries and fetches in any order, by workers that are slow, fail, or find a part: what is held and
    fetched at once, and which acks come, is what the record of jobs says. What acks have said of a prefetch adds up."""
    limits = StorageLimits(max_write_pages=5, max_fetch_pages=5, max_prefetches=6, stall_s=1.0)
    played = _Played(random, limits, random.choice(("wait_complete", "timeout", "best_effort")))
    controller = played.controller
    record = StorageJobs(controller, _NUM_HOST_PAGES, None)
    ops: list[Prefetch] = []
    found: list[Found] = []
    fetching: dict[Prefetch, int] = {}
    came: dict[Prefetch, int] = {}
    writes = 0
    with patch.object(controller_module.logger, "warning", lambda *args: None):
        for _ in range(_NUM_TURNS):
            match random.choice(_KINDS):
                case "write":
                    writes, num = writes + 1, random.randint(1, 4)
                    pages = _ids(*random.sample(range(_NUM_HOST_PAGES), num))
                    held = len(played.jobs("writes"))
                    controller.write([_key(page) for page in pages.tolist()], pages, Points.none(), writes)
                    for job in list(played.jobs("writes"))[held:]:
                        if [_key(page) for page in job.host_pages.tolist()] != list(job.keys):
                            yield f"pages {job.host_pages} are written under {len(job.keys)} keys"
                case "query":
                    ops.append(
                        Prefetch(len(ops) + 1, [_key(n) for n in range(random.choice((0, 1, 3, 4, 5)))])
                    )
                    controller.query(ops[-1])
                case "fetch" if found:
                    answer = found.pop(0)
                    op = answer.op
                    if not op.cancelled:
                        num = random.randint(1, answer.num_pages)
                        controller.fetch(op, np.arange(num, dtype=np.int32), Points.none())
                        fetching[op] = num
                case "cancel" if ops:
                    controller.cancel(random.choice(ops))
                case "work":
                    _work(random, played)
                case "time":
                    played.now += random.choice((0.02, 0.02, 0.6))
            for ack in controller.drain():
                controller_module.apply(ack)
                if isinstance(ack, Found):
                    found.append(ack)
                if isinstance(ack, Fetched):
                    came[ack.op] = came.get(ack.op, 0) + ack.num_pages
            for op in ops:
                if op.num_fetched != came.get(op, 0):
                    yield f"{op!r} has {came.get(op, 0)} pages"
    yield from record.wrong


def _work(random: Random, played: _Played) -> None:
    """What one of the workers says next."""
    writes, queries, fetches = (played.jobs(name) for name in ("writes", "queries", "fetches"))
    put = played.events.put
    match random.choice(("write", "query", "query", "fetch")):
        case "write" if writes:
            job = writes.popleft()
            num = random.randint(0, len(job.keys))
            put(Wrote(job.handle, len(job.keys), num, num, True, Cost()))
        case "query" if queries:
            op = queries.popleft().op
            num = random.choice((len(op.keys), random.randint(0, len(op.keys))))
            put(Asked(op, num, Cost(0.0, random.random() < 0.1)))
        case "fetch" if fetches:
            job = fetches.popleft()
            op, rest = job.op, len(job.keys)
            put(Began(op))
            if op.cancelled:
                put(Read(op, 0, False, True, Cost()))
                return
            num = random.randint(0, rest)
            if num and num < rest:
                put(Read(op, num, False, False, Cost()))
                rest -= num
            num = random.choice((rest, random.randint(0, rest)))
            put(Read(op, num, num < rest, True, Cost()))


def _clears(random: Random) -> Iterator[str]:
    """A clearance says how many pages it has removed, and the thread that waits for it sleeps. A fetch that a worker
    has begun is one of which something was heard."""
    played = _Played(random, StorageLimits(stall_s=1.0, clear_s=1.0, close_s=0.0))
    controller, nums = played.controller, [random.randint(1, 5) for _ in range(2)]
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=naps.append)
    with patch.object(controller_module, "time", clock):
        for num in nums:
            played.events.nothing = 1
            played.events.put(Cleared(num, Cost()))
            got = controller.clear()
            if got != num:
                yield f"{got} pages are said to be removed, {num} have been"
    if len(naps) != len(nums):
        yield f"{len(naps)} naps are taken in {len(nums)} waits"
    op = Prefetch(1, [_key(1)])
    controller.query(op)
    played.events.put(Asked(op, 1, Cost()))
    controller.drain()
    controller.fetch(op, _ids(0), Points.none())
    for wait, event in ((0.9, Began(op)), (0.9, None)):
        played.now += wait
        if event is not None:
            played.events.put(event)
        acks = controller.drain()
    if controller.stats().stalls or acks:
        yield "a worker that has just begun a fetch is said not to answer"


def _ends(random: Random) -> Iterator[str]:
    """At the end each thread that has ended is joined, and those that are left behind are counted."""
    said: list[tuple[object, ...]] = []
    num_gone = random.randint(0, 3)
    played = _Played(random, StorageLimits(close_s=0.0))
    for number in range(num_gone):
        played.events.put(Gone(number))
    with patch.object(controller_module.logger, "warning", lambda text, *args: said.append(args)):
        played.controller.close()
    if played.threads.num_joined != num_gone:
        yield f"{played.threads.num_joined} of {num_gone} threads that have ended are joined"
    if said != ([(3 - num_gone,)] if num_gone < 3 else []):
        yield f"{said} threads are left behind of 3, of which {num_gone} have ended"
    if any(list(played.jobs(name)) != [None] for name in ("writes", "queries", "fetches")):
        yield "the threads are not told to end"


# --- storage's workers


def _workers(random: Random) -> Iterator[str]:
    """A worker says when it begins a fetch, which pages of the host it is about to read or write, and how long a call
    has taken."""
    accessed: list[tuple[int, bool]] = []
    pool: Any = SimpleNamespace(
        host_access=lambda page, write, what: accessed.append((page, write)), page=lambda page: []
    )
    backend: Any = SimpleNamespace(
        get=lambda keys, parts: [True] * len(keys), set=lambda keys, parts: [True] * len(keys)
    )
    jobs, events, pages = _Channel(), _Channel(), random.sample(range(9), random.randint(1, 5))
    most = random.randint(1, 3)
    worker = StorageWorker(0, backend, pool, cast(Any, jobs), cast(Any, events), StopFlag(), most)
    keys, op = tuple(map(_key, pages)), Prefetch(1, [])
    for job in (
        FetchJob(op, keys, _ids(*pages), Points.none()),
        WriteJob(2, keys, _ids(*pages), Points.none()),
    ):
        jobs.put(job)
    jobs.put(None)
    worker.run()
    if accessed != [(page, write) for write in (True, False) for page in pages]:
        yield f"pages {pages} are read and written, and {accessed} are declared"
    num_calls = -(-len(pages) // most)
    kinds = [type(event) for event in events.items]
    if kinds != [Began, *[Read] * num_calls, *[Wrote] * num_calls, Gone]:
        yield f"a fetch and a write of {len(pages)} pages say {kinds}"
    if any(not 0 <= event.cost.seconds < 60 for event in events.items if isinstance(event, Read | Wrote)):
        yield "a call is said to take another time"


# --- acks of several ranks


def _agreements(random: Random) -> Iterator[str]:
    """As soon as one rank need not wait, none has to, which is said once and on each rank, of its own prefetch."""
    num_ranks, late = random.randint(2, 3), random.randint(0, 2)
    agreement, codecs = StorageAgreement(num_ranks), [StorageAckCodec() for _ in range(num_ranks)]
    ops = [Prefetch(7, [_key(1)]) for _ in range(num_ranks)]
    said: list[list[Any]] = [[Found(op, 1)] for op in ops]
    who = {late % num_ranks, random.randrange(num_ranks)}
    for rank in who:
        said[rank].append(TimedOut(ops[rank]))
    for rank, op in enumerate(ops):
        said[rank].append(Done(op, Outcome.CANCELLED))
    heard: list[list[Any]] = [[] for _ in ops]
    for turn in range(3):
        for rank, acks in enumerate(said):
            news = agreement.add(rank, codecs[rank].encode(acks[turn : turn + 1]))
            for other, codec in enumerate(codecs):
                heard[other] += codec.decode(news)
    for op, acks in zip(ops, heard, strict=True):
        kinds = [type(ack) for ack in acks]
        if kinds.count(TimedOut) != 1 or any(ack.op is not op for ack in acks):
            yield f"ranks {who} need not wait, and a rank hears {kinds}"


# --- the host tier


class _Transfers:
    """Notes transfers and what they wait for."""

    def __init__(self, host_pages: LeasePool, stream: CpuStream) -> None:
        self.host_pages, self.stream = host_pages, stream
        self.waits: list[Points] = []

    def _submit(self, ticket: Ticket, device_pages: Any, host_pages: Any, after: Points) -> None:
        self.waits.append(after)
        ticket.submit(Points.of(self.stream.record()))

    store = load = _submit


def _covers(after: Points, points: Sequence[Point]) -> bool:
    latest = {point.stream.name: point.serial for point in after}
    return all(latest.get(point.stream.name, 0) >= point.serial for point in points)


def _tiers(random: Random, **more: Any) -> tuple[HiCache, _Transfers, LeasePool, list[CpuStream]]:
    streams = [
        CpuStream(name, frozenset()) for name in (StreamName.FORWARD, StreamName.LOAD, StreamName.STORE)
    ]
    for stream in streams:
        stream.lags = True
    pages = LeasePool("contract pages", 20)
    transfers = _Transfers(LeasePool("contract host pages", _NUM_HOST_PAGES, 0), streams[2])
    config: Any = SimpleNamespace(
        hicache=SimpleNamespace(storage=more.get("storage"), load_back_threshold=random.randint(2, 5)),
        server_args=SimpleNamespace(page_size=1, hicache_write_policy="write_through"),
        speculative=None,
    )
    tiers = HiCache(pages, cast(Any, transfers), config)
    return tiers, transfers, pages, streams


def _leased(pool: LeasePool, num: int) -> np.ndarray[Any, Any]:
    leased = pool.alloc(num)
    assert leased is not None, "the pool is large enough"
    return leased[0]


def _transfers(random: Random) -> Iterator[str]:
    """A transfer waits for the users of all its pages, of a retracted request's last one too; parts on the host that
    are too short for one are left there; what has been backed up is not looked at again."""
    tiers, transfers, pages, streams = _tiers(random)
    tree, least = tiers.tree, tiers._load_back_threshold
    users: list[Point] = []
    matches: list[MatchResult] = []
    for number in range(2):
        tokens = np.array([number + 1] * random.randint(1, 5), np.int32)
        point = random.choice(streams).record()
        users.append(point)
        tree.insert_host(tokens, _leased(transfers.host_pages, len(tokens)), Points.of(point))
        matches.append(tree.match_prefix(tokens))
        num_kept = tiers.usable(matches[-1]).num_host_tokens
        if num_kept != (len(tokens) if len(tokens) >= least else 0):
            yield f"{num_kept} of {len(tokens)} tokens on the host are worth a transfer, from {least} on"
    for match in matches:
        own = random.choice(streams).record()
        users.append(own)
        tiers.begin_load(match, _leased(pages, match.num_host_tokens), Points.of(own))
    tail_ticket = Ticket.store(9)
    users += [stream.record() for stream in random.sample(streams, 2)]
    tail_ticket.submit(Points.of(users[-2]))
    tail = OffloadedTail(int(_leased(transfers.host_pages, 1)[0]), 1, tail_ticket)
    tiers._num_tail_pages += 1
    tiers.begin_load_tail(tail, int(_leased(pages, 1)[0]), Points.of(users[-1]))
    tiers.start_loads()
    if len(transfers.waits) != 1 or not _covers(transfers.waits[0], users):
        yield f"a load waits for {[list(after) for after in transfers.waits]}, its pages are used until {users}"
    # A backup, after which nothing is left to do.
    tokens, point = np.array([9, 9], np.int32), streams[0].record()
    node = tree.insert(tokens, _leased(pages, 2), Points.of(point)).node
    tiers.inserted(node)
    with patch.object(tree, "backup_candidates", wraps=tree.backup_candidates) as asked:
        for _ in range(3):
            tiers.write_backups()
    if len(transfers.waits) != 2 or not _covers(transfers.waits[-1], [point]) or asked.call_count != 1:
        yield f"what is inserted is looked at {asked.call_count} times, and {len(transfers.waits) - 1} backups made"
    # The last page of a retracted request goes to a page of the host that another one has just left.
    free = _leased(transfers.host_pages, transfers.host_pages.num_free)
    before, own = streams[1].record(), streams[0].record()
    transfers.host_pages.retire(free[:1], Points.of(before))
    offloaded = tiers.offload(node, int(_leased(pages, 1)[0]), 3, Points.of(own))
    if offloaded is None or not _covers(transfers.waits[-1], [before, own]):
        yield f"a last page is copied after {list(transfers.waits[-1])}, and used until {[before, own]}"


class _Controller:
    """Notes what is asked of storage."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def query(self, op: Prefetch) -> None:
        self.asked.append("query")

    def fetch(self, op: Prefetch, host_pages: Any, after: Points) -> None:
        self.asked.append("fetch")
        op.host_pages, op.after = host_pages.copy(), after

    def cancel(self, op: Prefetch) -> None:
        self.asked.append("cancel")

    def close(self) -> None:
        self.asked.append("close")


def _fetches(random: Random) -> Iterator[str]:
    """Pages are fetched if there are enough; those that come after the weights have been replaced do not get into the
    tree. Pages that have been leased and have not come are counted. The end of the tier ends storage."""
    tiers, transfers, _, _ = _tiers(random)
    controller, least = _Controller(), random.randint(1, 6)
    storage: Any = SimpleNamespace(controller=controller, root_key=lambda name: _key(0))
    tier = tiers.storage = StorageTier(tiers.tree, transfers.host_pages, storage, 1, least)
    tokens = np.arange(1, 9, dtype=np.int32)
    op = tier.prefetch(tokens, tiers.tree.match_prefix(tokens))
    if op is None:
        yield f"7 tokens are not looked for, from {least} on they are"
        return
    num = random.choice((1, max(least - 1, 1), least, 7))
    tier.complete([Found(op, num)])
    if controller.asked != ["query", "fetch" if num >= least else "cancel"]:
        yield f"{num} pages are found, from {least} on they are worth it, and storage is asked for {controller.asked}"
        return
    if num >= least:
        is_replaced = random.random() < 0.5
        if is_replaced:
            tier.forget()
        first = random.randint(1, num)
        tier.complete([Fetched(op, 0, first)])
        if tier.num_fetch_pages != num - first:
            yield f"{tier.num_fetch_pages} pages are said to be fetched, {num - first} are"
        if tiers.tree.num_host_pages != (0 if is_replaced else first):
            yield f"{tiers.tree.num_host_pages} pages come, {'of other weights' if is_replaced else first}"
        tier.complete([Done(op, Outcome.SHORT)])
    if transfers.host_pages.num_leased != tiers.tree.num_host_pages:
        yield "pages that have not come stay leased"
    tiers.close()
    if controller.asked[-1] != "close":
        yield "storage does not end with its tier"
