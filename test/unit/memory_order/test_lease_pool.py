"""LeasePool against a naive model: who owns which id, and what its next owner must wait for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from page_pools import ids
from recording_device import LaggingStream

from fenceline.memory_order.edges import StreamName
from fenceline.memory_order.lease import LeaseError, LeasePool
from fenceline.memory_order.stream import Points


@pytest.fixture
def pool() -> LeasePool:
    return LeasePool("pages", 8)


@pytest.fixture
def forward() -> LaggingStream:
    return LaggingStream(StreamName.FORWARD, frozenset())


@pytest.fixture
def store() -> LaggingStream:
    return LaggingStream(StreamName.STORE, frozenset())


def alloc(pool: LeasePool, n: int) -> tuple[list[int], Points]:
    got = pool.alloc(n)
    assert got is not None
    assert got[0].dtype == np.int32
    return got[0].tolist(), got[1]


def test_a_fresh_pool_hands_out_all_but_the_reserved_ids(pool: LeasePool) -> None:
    leased, after = alloc(pool, 7)
    assert sorted(leased) == [1, 2, 3, 4, 5, 6, 7]
    assert after == Points.none()
    assert pool.alloc(1) is None
    assert alloc(pool, 0) == ([], Points.none())


def test_too_large_a_request_takes_nothing(pool: LeasePool) -> None:
    assert pool.alloc(8) is None
    assert pool.num_free == 7
    assert pool.owned().size == 0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([5], "retired twice"),
        ([2, 5], "retired twice"),
        ([0], "are not all in"),
        ([2, 0], "are not all in"),
        ([8], "are not all in"),
        ([-1], "are not all in"),
        ([2, 2], "named twice"),
        ([2] * 20, "named twice"),
        ([8] * 20, "are not all in"),
        ([0] * 20, "are not all in"),
        ([2] * 20 + [-1], "are not all in"),
        ([2**31 - 1], "are not all in"),
        ([-(2**31)], "are not all in"),
    ],
)
def test_a_retirement_against_the_rules_changes_nothing(pool: LeasePool, bad: list[int], words: str) -> None:
    leased, _ = alloc(pool, 4)
    assert 2 in leased and 5 not in leased
    with pytest.raises(LeaseError, match=words):
        pool.retire(ids(*bad), Points.none())
    assert pool.owned().tolist() == sorted(leased)
    assert pool.num_free == 3
    pool.retire(ids(*leased), Points.none())
    assert pool.num_free == 7


def test_ids_that_int32_cannot_hold_are_no_ids(pool: LeasePool) -> None:
    leased, _ = alloc(pool, 4)
    with pytest.raises(AssertionError, match="pages: ids are int64, not int32"):
        pool.retire(np.array([2**32 + leased[0]]), Points.none())
    assert pool.num_leased == 4


def test_points_travel_to_the_next_owner(pool: LeasePool, forward: LaggingStream, store: LaggingStream) -> None:
    leased, _ = alloc(pool, 7)
    early, late, backup = forward.record(), forward.record(), store.record()
    pool.retire(ids(*leased[:2]), Points.of(late))
    pool.retire(ids(*leased[2:4]), Points.of(early, backup))
    _, after = alloc(pool, 3)
    assert set(after) == {late, backup}
    _, after = alloc(pool, 1)  # what was left of the second batch still waits for all of that batch
    assert set(after) == {early, backup}


def test_ids_known_to_have_passed_come_first(pool: LeasePool, forward: LaggingStream, store: LaggingStream) -> None:
    leased, _ = alloc(pool, 7)
    pool.retire(ids(*leased[:3]), Points.of(forward.record()))
    pool.retire(ids(*leased[3:5]), Points.of(store.record()))
    store.passed_serial = store.serial
    got, after = alloc(pool, 2)
    assert sorted(got) == sorted(leased[3:5])
    assert after == Points.none()


def test_the_callers_array_may_change_after_retiring(pool: LeasePool, forward: LaggingStream) -> None:
    array = np.array(alloc(pool, 7)[0], dtype=np.int32)
    pool.retire(array, Points.of(forward.record()))
    array[:] = 0
    assert sorted(alloc(pool, 7)[0]) == [1, 2, 3, 4, 5, 6, 7]


class LeaseMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(2, 20), reserved=st.integers(0, 3))
    def start(self, size: int, reserved: int) -> None:
        self.reserved = min(reserved, size - 1)
        # The twin hears the same calls: ranks that decide alike must be given the same ids.
        self.pool, self.twin = (LeasePool("ids", size, self.reserved) for _ in range(2))
        self.all = set(range(self.reserved, size))
        self.owned: set[int] = set()
        self.after: dict[int, Points] = {}  # of the free ids, as retired
        self.retired_at: dict[int, int] = {}
        self.clock = 0
        names = (StreamName.FORWARD, StreamName.LOAD, StreamName.STORE)
        self.streams = [LaggingStream(name, frozenset()) for name in names]

    @rule(n=st.integers(0, 21))
    def alloc(self, n: int) -> None:
        got, twin = self.pool.alloc(n), self.twin.alloc(n)
        free = self.all - self.owned
        assert (got is None) == (n > len(free))
        if got is None or twin is None:
            assert got is twin
            return
        leased, after = got[0].tolist(), got[1]
        assert (leased, after) == (twin[0].tolist(), twin[1])
        assert len(set(leased)) == n and set(leased) <= free
        self.check_waits(leased, after)
        self.check_preference(free, leased)
        self.owned |= set(leased)
        self.after = {i: p for i, p in self.after.items() if i not in self.owned}

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        leaving = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True))
        streams = data.draw(st.lists(st.sampled_from(self.streams), unique_by=id))
        after = Points.of(*(stream.record() for stream in streams))
        self.pool.retire(ids(*leaving), after)
        self.twin.retire(ids(*leaving), after)
        self.owned -= set(leaving)
        self.clock += 1
        self.after |= dict.fromkeys(leaving, after)
        self.retired_at |= dict.fromkeys(leaving, self.clock)

    @rule(data=st.data())
    def retire_what_is_not_leased(self, data: st.DataObject) -> None:
        """One bad id among good ones: nothing happens but the error."""
        good = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True)) if self.owned else []
        foreign = set(range(-2, max(self.all) + 3)) - self.owned
        bad = data.draw(st.sampled_from(sorted(foreign | set(good))))
        named = data.draw(st.permutations([*good, bad]))
        with pytest.raises(LeaseError):
            self.pool.retire(ids(*named), Points.none())

    @rule(index=st.integers(0, 2), num_points=st.integers(1, 3))
    def time_passes(self, index: int, num_points: int) -> None:
        stream = self.streams[index]
        stream.passed_serial = min(stream.serial, stream.passed_serial + num_points)

    @invariant()
    def every_id_is_free_or_leased(self) -> None:
        assert self.pool.owned().tolist() == sorted(self.owned)
        assert self.pool.num_leased == len(self.owned)
        assert self.pool.num_free == len(self.all - self.owned)

    def check_waits(self, leased: list[int], after: Points) -> None:
        """The new owner waits for every Point that has not passed, and for nobody else's."""
        needed = {p for i in leased for p in self.after.get(i, ()) if not p.passed}
        for point in needed:
            assert any(p.stream is point.stream and p.serial >= point.serial for p in after)
        assert {p for p in after if not p.passed} <= needed

    def check_preference(self, free: set[int], leased: list[int]) -> None:
        """Ids that can be touched at once first, then those retired longest ago."""
        late = {i for i in free if i in self.after and not self.after[i].passed}
        ready = free - late
        assert len(late & set(leased)) == max(0, len(leased) - len(ready))
        given, kept = late & set(leased), late - set(leased)
        if given and kept:
            assert max(self.retired_at[i] for i in given) <= min(self.retired_at[i] for i in kept)


@pytest.mark.timeout(900)  # a failure needs minutes to shrink
def test_pool_equals_the_naive_model() -> None:
    run_machine(LeaseMachine, settings=settings(max_examples=60, stateful_step_count=50, deadline=None))
