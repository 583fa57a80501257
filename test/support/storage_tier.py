"""A storage controller over a small host pool. A page's bytes are a function of its key, and waits have a time
limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from page_pools import Shape, fill_host_page, make_pools
from storage_cases import content, key

from fenceline.config.server_args import MemLayout, PrefetchPolicy
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.page_hash import PageFingerprint, PageKey
from fenceline.mem_cache.storage.backend import PageParts, StorageBackend, StorageStats
from fenceline.mem_cache.storage.controller import Ack, Done, StorageController, StorageLimits, apply
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.mem_cache.storage.worker import I32, Prefetch, StoredStates
from fenceline.memory_order import Device, Points, open_device

NUM_PAGES = 32
SHAPE = Shape(num_device_pages=2, num_host_pages=NUM_PAGES, page_size=2, num_layers=2, heads=(1, 4))
PAGE = 2 * 2 * 2 * 4 * 2  # bytes: layers, keys and values, tokens, elements, of two bytes each
KEYS = [key(n) for n in range(200)]
PATIENCE_S = 30.0
TWO_PAGES = StorageLimits(batch_bytes=2 * PAGE)


@dataclass
class Clock:
    """A clock that moves only when a test sets it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Tier:
    """A controller and its pools. ``clock`` moves only when a test sets it."""

    pool: HostPool
    controller: StorageController
    clock: Clock
    acks: list[Ack] = field(default_factory=list)  # all acks so far

    def lease(self, num_pages: int) -> I32:
        """Lease host pages. In these tests they come without Points."""
        leased = self.pool.pages.alloc(num_pages)
        assert leased is not None, "the host pool of the tests is too small"
        return leased[0]

    def retire(self, pages: I32) -> None:
        self.pool.pages.retire(pages, Points.none())

    def fill(self, pages: I32, keys: Sequence[PageKey]) -> None:
        """Give pages the bytes that belong to their keys."""
        for page, name in zip(pages.tolist(), keys, strict=True):
            put_bytes(self.pool, page, content(name, PAGE))

    def assert_right(self, pages: I32, keys: Sequence[PageKey]) -> None:
        for page, name in zip(pages.tolist(), keys, strict=True):
            assert np.array_equal(get_bytes(self.pool, page), content(name, PAGE)), f"page {page} is wrong"

    def drain(self) -> list[Ack]:
        new = self.controller.drain()
        for ack in new:
            apply(ack)
        self.acks += new
        return new

    def until(self, ready: Callable[[], bool]) -> None:
        """Drain until ``ready``, as a scheduler with nothing to do would."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            assert time.monotonic() < deadline, f"nothing came: {self.acks}"
            if not self.drain():
                time.sleep(0.0002)  # lets the workers run; nothing depends on the length

    def write(self, keys: Sequence[PageKey], handle: int = 0) -> I32:
        """Begin to write pages to storage. They stay leased."""
        pages = self.lease(len(keys))
        self.fill(pages, keys)
        self.controller.write(keys, pages, Points.none(), handle)
        return pages

    def settle(self) -> None:
        """Drain until nothing is outstanding."""
        self.until(lambda: self.controller.num_outstanding == 0)

    def store(self, keys: Sequence[PageKey]) -> None:
        """Write pages and wait until they are in storage."""
        pages = self.write(keys)
        self.settle()
        self.retire(pages)

    def query(self, keys: Sequence[PageKey], handle: int = 0) -> Prefetch:
        op = Prefetch(handle, keys)
        self.controller.query(op)
        return op

    def start_fetch(self, keys: Sequence[PageKey], num_pages: int | None = None) -> Prefetch:
        """A prefetch whose pages have been found and are being fetched."""
        op = self.query(keys)
        self.until(lambda: op.num_found > 0 or op.over)
        if not op.over:
            self.controller.fetch(op, self.lease(num_pages or op.num_found), Points.none())
        return op

    def finish(self, op: Prefetch) -> int:
        """Wait for the last ack, check the pages and release them. Returns how many were read."""

        def closing() -> list[Ack]:
            return [ack for ack in self.acks if isinstance(ack, Done) and ack.op is op]

        self.until(lambda: bool(closing()))
        assert op.over and len(closing()) == 1
        self.assert_right(op.host_pages[: op.num_fetched], op.keys[: op.num_fetched])
        self.retire(op.host_pages)
        return op.num_fetched

    def prefetch(self, keys: Sequence[PageKey]) -> int:
        """Prefetch pages and wait. Returns how many were read."""
        return self.finish(self.start_fetch(keys))


class Gate:
    """Blocks its callers until it is opened. A test can wait until a thread has called it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._come = threading.Semaphore(0)

    def __call__(self) -> None:
        self._come.release()
        assert self._open.wait(PATIENCE_S), "the test has never opened the gate"

    def open(self) -> None:
        self._open.set()

    def wait_for_somebody(self) -> None:
        assert self._come.acquire(timeout=PATIENCE_S), "nobody has come"


class DictBackend:
    """The simplest backend: pages in a dictionary, which never fails."""

    def __init__(self, page_nbytes: int) -> None:
        self.page_nbytes = page_nbytes
        self.pages: dict[PageKey, np.ndarray] = {}

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        return [name in self.pages for name in keys]

    def get(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        for name, parts in zip(keys, pages, strict=True):
            start = 0
            for part in parts if name in self.pages else ():
                part[:] = self.pages[name][start : start + part.nbytes]
                start += part.nbytes
        return self.exists(keys)

    def set(self, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
        for name, parts in zip(keys, pages, strict=True):
            self.pages.setdefault(name, np.concatenate([np.asarray(part) for part in parts]))
        return [True] * len(keys)

    def clear(self) -> int:
        num_pages = len(self.pages)
        self.pages.clear()
        return num_pages

    def stats(self) -> StorageStats:
        return StorageStats()


def put_bytes(pool: HostPool, page: int, data: np.ndarray) -> None:
    """Write a page without torch, as a worker does."""
    fill_host_page(pool, page, data)


def get_bytes(pool: HostPool, page: int) -> np.ndarray:
    """The bytes of a page."""
    return np.concatenate(pool.page(page))


def tier_fingerprint() -> PageFingerprint:
    """The fingerprint of the pages of ``SHAPE``."""
    return PageFingerprint("tiny", SHAPE.layout.describe(), PAGE)


def file_backend(root: Path, max_bytes: int = 1 << 20) -> FileBackend:
    """A storage directory for pages of ``SHAPE``."""
    return FileBackend(root, tier_fingerprint(), max_bytes)


def make_tier(
    backend: StorageBackend,
    policy: PrefetchPolicy = "best_effort",
    timeout_s: float | None = None,
    *,
    layout: MemLayout = "page_first",
    num_workers: int = 2,
    limits: StorageLimits | None = None,
    device: Device | None = None,
    states: StoredStates | None = None,
) -> Tier:
    """A tier on the CPU (or ``device``). The caller closes its controller."""
    _, pool = make_pools(open_device("cpu") if device is None else device, layout, SHAPE)
    assert pool.page_nbytes == PAGE
    clock = Clock()
    controller = StorageController(pool.device, pool, backend, policy, timeout_s, num_workers, limits, clock, states)
    return Tier(pool, controller, clock)


Make = Callable[..., Tier]


@pytest.fixture
def tiers_of_one_test() -> Iterator[Make]:
    """``make_tier``, with tiers that are closed when the test ends."""
    tiers: list[Tier] = []

    def make(*args: object, **kwargs: object) -> Tier:
        tiers.append(make_tier(*args, **kwargs))  # type: ignore[arg-type]
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.controller.close()
