"""RelocationClock: versions of page-table rows."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceline.memory_order.relocation import RelocationClock


@given(st.lists(st.integers(0, 3), max_size=40))
def test_the_version_of_an_owner_counts_its_own_moves(owners: list[int]) -> None:
    clock, moves = RelocationClock(4), Counter[int]()
    for owner in owners:
        clock.move(owner)
        moves[owner] += 1
        assert [clock.version(other) for other in range(4)] == [moves[other] for other in range(4)]


def test_owners_that_do_not_exist_are_refused() -> None:
    clock = RelocationClock(2)
    for use in (clock.move, clock.version):
        with pytest.raises(AssertionError, match="numbered from 0"):
            use(-1)
        with pytest.raises(IndexError):
            use(2)
