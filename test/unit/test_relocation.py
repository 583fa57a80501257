"""RelocationClock against a plain model: what is stamped is current until one of its owners moves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.memory_order import RelocationClock
from fenceline.memory_order.relocation import Stamp

OWNERS = st.lists(st.integers(0, 9), max_size=4, unique=True)
ACTIONS = st.lists(st.tuples(st.sampled_from(("move", "move_all", "stamp", "check")), OWNERS), max_size=40)


@given(ACTIONS, st.integers(0, 4))
def test_a_stamp_is_current_until_one_of_its_owners_moves(
    actions: list[tuple[str, list[int]]], num_owners: int
) -> None:
    clock, moves = RelocationClock(num_owners), Counter[int]()
    stamps: list[tuple[Stamp, dict[int, int]]] = []
    for kind, owners in actions:
        before = clock.epoch
        if kind == "move":
            for owner in owners:
                clock.move(owner)
            moves.update(owners)
        elif kind == "move_all":
            clock.move_all(np.array(owners, dtype=np.int32))
            moves.update(owners)
        elif kind == "stamp":
            stamps.append((clock.stamp(owners), {owner: moves[owner] for owner in owners}))
        moved = bool(owners) and kind.startswith("move")
        assert (clock.epoch > before) is moved, "the epoch moves with every decision and nothing else"
        assert clock.num_moves == moves.total()
        assert [clock.version(owner) for owner in range(12)] == [moves[owner] for owner in range(12)]
        for stamp, then in stamps:
            stale = [owner for owner, version in then.items() if moves[owner] != version]
            assert clock.moved_since(stamp).tolist() == stale
            assert clock.is_current(stamp) is (not stale)


def test_a_stamp_keeps_the_owners_of_the_moment() -> None:
    clock = RelocationClock()
    rows = np.array([3, 5], dtype=np.int32)
    stamp = clock.stamp(rows)
    rows[:] = 7
    clock.move(7)
    assert clock.is_current(stamp) and stamp.owners.tolist() == [3, 5]
    clock.move(5)
    assert not clock.is_current(stamp) and clock.moved_since(stamp).tolist() == [5]


def test_while_nothing_moves_no_version_is_looked_at() -> None:
    clock = RelocationClock(4)
    stamp = clock.stamp([0, 1])
    clock._versions = np.empty(0, dtype=np.int64)  # looking would raise
    assert clock.is_current(stamp)
    clock.epoch += 1
    with pytest.raises(IndexError):
        clock.is_current(stamp)


def test_moving_there_and_back_is_seen() -> None:
    """A row given to somebody else and back is not the row that it was."""
    clock = RelocationClock(2)
    stamp = clock.stamp([1])
    clock.move(1)
    clock.move(1)
    assert not clock.is_current(stamp)


def test_bad_owners_are_refused() -> None:
    clock = RelocationClock(2)
    for use in (clock.move, clock.version):
        with pytest.raises(AssertionError, match="numbered from 0"):
            use(-1)
    with pytest.raises(AssertionError, match="numbered from 0"):
        clock.stamp([1, -1])
    with pytest.raises(AssertionError, match="named twice"):
        clock.move_all([1, 1])
