"""Bad days of the storage tier, at the controller: whatever the disk does, pages are right or missing, and counted."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest
import storage_tier_process as process
import torch
from storage_cases import flip, path_of
from storage_faults import FaultyBackend
from storage_tier import (
    KEYS,
    PAGE,
    PATIENCE_S,
    TWO_PAGES,
    DictBackend,
    Gate,
    Make,
    Tier,
    file_backend,
    make_tier,
    tier_fingerprint,
    tiers_of_one_test,
)

from fenceline.config.server_args import PrefetchPolicy
from fenceline.config.state_layout import convolution
from fenceline.mem_cache.host.host_pool import HostPool
from fenceline.mem_cache.host.host_states import HostStates
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.state_pool import StatePool
from fenceline.mem_cache.storage.backend import Reason
from fenceline.mem_cache.storage.controller import Ack, Done, Fetched, Found, StorageLimits, TimedOut, Written
from fenceline.mem_cache.storage.worker import I32, Outcome, Prefetch, StoredStates
from fenceline.memory_order import Points, open_device

# --- pages that do not come --------------------------------------------------------------------------

make = tiers_of_one_test


def test_a_damaged_page_ends_the_prefix(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path), limits=TWO_PAGES)
    tier.store(KEYS[:6])
    flip(path_of(tmp_path, tier_fingerprint(), KEYS[3]), 80, 1)
    op = tier.start_fetch(KEYS[:6])
    assert tier.finish(op) == 3 and op.outcome is Outcome.SHORT
    assert tier.acks[-3:] == [Fetched(op, 0, 2), Fetched(op, 2, 1), Done(op, Outcome.SHORT)]
    assert tier.controller.stats().backend.errors == {Reason.CHECKSUM: 1}
    assert tier.prefetch(KEYS[:6]) == 3, "next time it is known to be missing"
    assert tier.controller.stats().prefetches == {Outcome.SHORT: 1, Outcome.COMPLETE: 1}
    assert tier.controller.stats().missed == 6, "three pages each time"
    tier.store(KEYS[3:4])
    assert tier.prefetch(KEYS[:6]) == 6, "and computed and kept again"


def test_a_page_that_is_evicted_after_the_query(make: Make, tmp_path: Path) -> None:
    tier = make(file_backend(tmp_path))
    tier.store(KEYS[:4])
    op = tier.query(KEYS[:4])
    tier.until(lambda: op.num_found == 4)
    path_of(tmp_path, tier_fingerprint(), KEYS[1]).unlink()
    tier.controller.fetch(op, tier.lease(4), Points.none())
    assert tier.finish(op) == 1 and op.outcome is Outcome.SHORT


def test_a_disk_that_fails_now_and_then(make: Make, tmp_path: Path) -> None:
    inner = file_backend(tmp_path)
    make(inner).store(KEYS[:8])
    tier = make(FaultyBackend(inner, fail=0.2, seed=3), limits=TWO_PAGES)
    came = [tier.prefetch(KEYS[:8]) for _ in range(30)]
    assert len(set(came)) > 3
    outcomes = tier.controller.stats().prefetches
    assert sum(outcomes.values()) == 30 and outcomes[Outcome.SHORT] > 5
    assert tier.controller.stats().fetched == sum(came)


class Crashing(FaultyBackend):
    """Raises in one of its calls."""

    call = ""

    def exists(self, keys: object) -> list[bool]:
        self.crash = float(self.call == "exists")
        return super().exists(keys)  # type: ignore[arg-type]

    def get(self, keys: object, pages: object) -> list[bool]:
        self.crash = float(self.call == "get")
        return super().get(keys, pages)  # type: ignore[arg-type]

    def set(self, keys: object, pages: object) -> list[bool]:
        self.crash = float(self.call == "set")
        return super().set(keys, pages)  # type: ignore[arg-type]


def test_a_backend_that_raises_costs_a_miss(make: Make, tmp_path: Path) -> None:
    backend = Crashing(file_backend(tmp_path))
    tier = make(backend, limits=TWO_PAGES)
    tier.store(KEYS[:4])
    for call in ("exists", "get"):
        backend.call = call
        op = tier.start_fetch(KEYS[:4])
        assert tier.finish(op) == 0 and op.outcome is Outcome.SHORT
        assert tier.acks[-1] == Done(op, Outcome.SHORT)
    backend.call = "set"
    tier.write(KEYS[4:8], handle=5)
    tier.settle()
    assert tier.acks[-1] == Written(5, 0)
    backend.call = ""
    assert tier.prefetch(KEYS[:8]) == 4
    stats = tier.controller.stats()
    assert (stats.crashes, stats.written, stats.unwritten) == (3, 4, 4)
    assert stats.errors == {"crash": 3}


def test_a_backend_that_raises_at_states_costs_a_miss(make: Make, tmp_path: Path) -> None:
    pool = StatePool(1, 1, [convolution(4, 3, "float32")], torch.device("cpu"))
    states = HostStates(open_device("cpu"), pool, 2)
    backend = Crashing(DictBackend(states.nbytes))
    tier = make(file_backend(tmp_path), states=StoredStates(states, backend))
    states.buffer[0] = 7
    for num_crashes, call in enumerate(("set", "exists", "get", ""), 1):
        backend.call, pages = call, tier.lease(4)
        tier.fill(pages, KEYS[:4])
        tier.controller.write(KEYS[:4], pages, Points.none(), 0, state=0)
        tier.settle()
        op = Prefetch(num_crashes, KEYS[:4], ends=[2, 4])
        tier.controller.query(op)
        tier.until(lambda op=op: op.num_found > 0 or op.over)  # type: ignore[misc]
        if not op.over:
            tier.controller.fetch(op, tier.lease(4), Points.none(), 1)
        assert tier.finish(op) == (0 if call else 4)
        assert tier.controller.stats().crashes == min(num_crashes, 3)
        tier.retire(pages)
    assert torch.equal(states.buffer[1], states.buffer[0])


def test_the_error_of_a_worker_is_raised_here(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would ever be heard of its jobs."""

    def fail(*_: object) -> None:
        raise RuntimeError("a page that cannot be read")

    tier = make(file_backend(tmp_path))
    monkeypatch.setattr(HostPool, "page", fail)
    tier.controller.write(KEYS[:1], tier.lease(1), Points.none(), 0)
    with pytest.raises(RuntimeError, match="a page that cannot be read"):
        tier.settle()


# --- pages that are not kept -------------------------------------------------------------------------


def test_a_full_storage(make: Make, tmp_path: Path) -> None:
    backend = FaultyBackend(file_backend(tmp_path), full=True)
    tier = make(backend, limits=TWO_PAGES)
    tier.write(KEYS[:6], handle=1)
    tier.settle()
    assert tier.acks == [Written(1, 0)]
    stats = tier.controller.stats()
    assert (stats.written, stats.unwritten, stats.num_queued) == (0, 6, 0)
    assert stats.backend.errors == {Reason.FULL: 2}, "what lies behind a page that is not kept is not tried"
    backend.full = False
    tier.store(KEYS[:6])
    assert tier.prefetch(KEYS[:6]) == 6


def test_a_disk_that_fills_up(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = file_backend(tmp_path)
    tier = make(backend)
    tier.store(KEYS[:2])
    directory = "fenceline.mem_cache.storage.directory.StorageDirectory.num_free_bytes"
    with monkeypatch.context() as patch:
        patch.setattr(directory, lambda self: 0)
        tier.write(KEYS[:4], handle=3)
        tier.settle()
        assert tier.acks[-1] == Written(3, 2), "those that are there are there"
        assert tier.prefetch(KEYS[:4]) == 2, "and are read"
    assert tier.controller.stats().backend.errors == {Reason.NO_SPACE: 2}
    assert tier.controller.stats().unwritten == 2
    tier.store(KEYS[:4])
    assert tier.prefetch(KEYS[:4]) == 4


# --- a storage that hangs ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_a_storage_that_hangs_holds_nobody_up(policy: PrefetchPolicy, make: Make, tmp_path: Path) -> None:
    gate = Gate()
    inner = file_backend(tmp_path)
    make(inner).store(KEYS[:4])
    tier = make(FaultyBackend(inner, pause=gate), policy, 99.0 if policy == "timeout" else None)
    may, clock = tier.controller.may_schedule, tier.clock
    asked = tier.query(KEYS[:4], handle=1)
    pages = tier.write(KEYS[8:10], handle=1)
    gate.wait_for_somebody()
    clock.now += 9.0
    tier.drain()
    assert may(asked) is (policy == "best_effort")
    late = tier.query(KEYS[:4], handle=2)
    clock.now += 2.0  # eleven seconds without a sign
    tier.drain()
    assert may(asked) and may(late)
    assert (TimedOut(asked) in tier.acks) is (policy != "best_effort")

    dropped = tier.query(KEYS[:4], handle=3)
    tier.controller.write(KEYS[8:10], pages, Points.none(), 2)
    assert tier.drain() == [Done(dropped, Outcome.DROPPED), Written(2, 0)]
    assert dropped.outcome is Outcome.DROPPED and may(dropped)
    stats = tier.controller.stats()
    assert (stats.dropped, stats.num_queued, stats.stalls) == (2, 2, 2)

    for op in (asked, late):
        tier.controller.cancel(op)
    gate.open()
    tier.settle()
    assert Written(1, 2) in tier.acks, "it came back"
    assert asked.outcome is late.outcome is Outcome.CANCELLED
    assert tier.prefetch(KEYS[:4]) == 4


def test_one_reader_that_hangs_does_not_hold_up_the_others(make: Make, tmp_path: Path) -> None:
    gate = Gate()
    inner = file_backend(tmp_path)
    make(inner).store(KEYS[:8])

    class HangsOnOne(FaultyBackend):
        def get(self, keys: object, pages: object) -> list[bool]:
            if KEYS[0] in keys:  # type: ignore[operator]
                gate()
            return super().get(keys, pages)  # type: ignore[arg-type]

    tier = make(HangsOnOne(inner), "wait_complete", num_workers=3)
    stuck = tier.start_fetch(KEYS[:4])
    gate.wait_for_somebody()
    for _ in range(4):
        tier.clock.now += 4.0
        tier.drain()
        assert tier.prefetch(KEYS[4:8]) == 4
    assert tier.controller.may_schedule(stuck) and TimedOut(stuck) in tier.acks
    assert tier.controller.stats().stalls == 0 and tier.controller.stats().timeouts == 1
    gate.open()
    assert tier.finish(stuck) == 4


def test_clear_and_close_do_not_wait_for_ever(tmp_path: Path) -> None:
    gate = Gate()
    backend = FaultyBackend(file_backend(tmp_path))
    tier = make_tier(backend, limits=StorageLimits(clear_s=0.05, close_s=0.05))
    tier.store(KEYS[:4])
    backend.pause = gate
    tier.write(KEYS[4:5])
    gate.wait_for_somebody()
    with pytest.raises(ValueError, match="does not answer: it will be emptied"):
        tier.controller.clear()
    asked = tier.query(KEYS[:4])
    tier.drain()
    assert asked.outcome is Outcome.DROPPED, "what is about to be cleared is not found any more"
    gate.open()
    tier.settle()
    tier.until(lambda: tier.controller.stats().written == 5)
    assert tier.prefetch(KEYS[:5]) == 0, "it was cleared when it came back"

    hangs = Gate()
    backend.pause = hangs
    tier.query(KEYS[:4])
    hangs.wait_for_somebody()
    tier.controller.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("storage-query")]
    hangs.open()


@pytest.mark.slow
def test_a_process_whose_storage_hangs_ends(tmp_path: Path) -> None:
    command = [sys.executable, process.__file__, "hang", str(tmp_path), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hangs\nclosed\n"
    assert "does not answer" in done.stderr


# --- several servers, and their deaths ---------------------------------------------------------------


@pytest.mark.slow
def test_servers_killed_while_they_write_leave_nothing_wrong(make: Make, tmp_path: Path) -> None:
    """Two of one directory, killed one after the other."""
    random = Random(0)
    command = [sys.executable, process.__file__, "write", str(tmp_path)]
    servers = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(2)]
    try:
        for server in servers:
            assert server.stdout is not None
            for _ in range(random.randrange(20, 60)):  # some moment amid its writes
                assert server.stdout.readline().startswith("written")
            server.kill()
            server.wait()
    finally:
        for server in servers:
            server.kill()
            server.wait()
    tier = make(file_backend(tmp_path), num_workers=3)
    came = [tier.prefetch(KEYS[first : first + 8]) for first in range(0, process.NUM_KEYS, 8)]
    assert sum(came) > 0
    assert tier.controller.stats().backend.errors == {}, "a torn page under a page's name"


def test_two_servers_share_a_directory(make: Make, tmp_path: Path) -> None:
    """Both write and read the same prefixes at once, in a directory too small for all of them."""
    room = 30 * (PAGE + 64)
    tiers = [make(file_backend(tmp_path, room), num_workers=3, limits=TWO_PAGES) for _ in range(2)]
    random = Random(1)
    came = 0
    for round_ in range(60):
        first = random.randrange(5) * 8
        for number, tier in enumerate(tiers):
            if (round_ + number) % 2:
                pages = tier.write(KEYS[first : first + 4], handle=round_)
            else:
                op = tier.query(KEYS[first : first + 6], handle=round_)
        for number, tier in enumerate(tiers):
            if (round_ + number) % 2:
                tier.settle()
                tier.retire(pages)
            else:
                tier.until(lambda op=op: op.num_found > 0 or op.over)  # type: ignore[misc]
                if not op.over:
                    tier.controller.fetch(op, tier.lease(op.num_found), Points.none())
                came += tier.finish(op)
    assert came > 20
    for tier in tiers:
        assert set(tier.controller.stats().backend.errors) <= {Reason.FULL, Reason.BUSY}
        assert tier.pool.pages.num_leased == 0


# --- everything at once ------------------------------------------------------------------------------


class Server:
    """What a scheduler does with a storage tier, at random."""

    def __init__(self, tier: Tier, random: Random) -> None:
        self.tier = tier
        self.random = random
        self.writing: dict[int, I32] = {}
        self.ops: list[Prefetch] = []
        self.impatient: list[Prefetch] = []  # those of ops that may be cancelled at any moment
        self.num_queries = self.offered = self.came = 0

    def arrive(self, handle: int) -> None:
        """A prefix to keep, or one to look for."""
        first, num = self.random.randrange(6) * 8, self.random.randint(1, 6)
        names = KEYS[first : first + num]
        if self.random.random() < 0.5 and self.tier.pool.pages.num_free >= num:
            self.writing[handle] = self.tier.write(names, handle)
            self.offered += num
        else:
            op = self.tier.query(names, handle)
            self.ops.append(op)
            if self.random.random() < 0.25:
                self.impatient.append(op)
            self.num_queries += 1

    def step(self) -> None:
        for ack in self.tier.drain():
            self.take(ack)
        for op in self.impatient:
            if self.random.random() < 0.004:
                self.tier.controller.cancel(op)

    def serve_until_at_most(self, num_outstanding: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.tier.controller.num_outstanding > num_outstanding:
            assert time.monotonic() < deadline, f"nothing ends: {self.ops}, {self.writing}"
            self.step()

    def take(self, ack: Ack) -> None:
        match ack:
            case Written():
                self.tier.retire(self.writing.pop(ack.handle))
            case Found(op, num):
                leased = self.tier.pool.pages.alloc(self.random.randint(1, num))
                if leased is None:
                    self.tier.controller.cancel(op)
                else:
                    self.tier.controller.fetch(op, *leased)
            case Fetched(op, first, num):
                end = first + num
                self.tier.assert_right(op.host_pages[first:end], op.keys[first:end])
                self.came += num
            case Done(op):
                self.tier.retire(op.host_pages)
                self.ops.remove(op)
                if op in self.impatient:
                    self.impatient.remove(op)

    def has_seen_it_all(self) -> bool:
        """Pages have come, fetches ended early, and the backend has crashed."""
        stats = self.tier.controller.stats()
        return self.came > 0 and stats.prefetches.get(Outcome.SHORT, 0) > 0 and stats.crashes > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_day_of_everything(seed: int, make: Make, tmp_path: Path) -> None:
    """Random calls on a failing, corrupting, crashing backend: bytes are right, and the bytes in use are counted."""

    def damage(name: PageKey) -> None:
        flip(path_of(tmp_path, tier_fingerprint(), name), 70, 8)

    room = 40 * (PAGE + 64)
    backend = FaultyBackend(file_backend(tmp_path, room), seed=seed, fail=0.05, corrupt=0.05, damage=damage, crash=0.08)
    tier = make(backend, num_workers=3, limits=StorageLimits(batch_bytes=2 * PAGE, max_write_pages=10))
    server = Server(tier, Random(seed))
    for handle in range(3000):
        # Which request meets which fault depends on the threads: it goes on until all has happened.
        if handle >= 300 and server.has_seen_it_all():
            break
        server.arrive(handle)
        server.serve_until_at_most(6)
    server.serve_until_at_most(0)
    stats = tier.controller.stats()
    assert server.writing == {} and server.ops == [] and tier.pool.pages.num_leased == 0
    assert stats.written + stats.unwritten + stats.dropped == server.offered
    assert sum(stats.prefetches.values()) == server.num_queries
    assert stats.num_prefetching == stats.num_queued == 0
    assert stats.fetched == server.came and server.has_seen_it_all()
