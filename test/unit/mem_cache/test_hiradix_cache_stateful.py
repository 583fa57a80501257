"""The tree of two tiers against a naive model, with transfers that run late, in any order that their Points allow."""

from __future__ import annotations

import pytest
from hicache_machine import TwoTierMachine, Walk
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test as run_machine

CASES = [
    (1, "write_through", 0),
    (4, "write_through_selective", 0),
    (1, "write_back", 0),
    (4, "write_back", 0),
    (4, "write_through", 1),
]


@pytest.mark.timeout(900)  # a failure needs minutes to shrink
@pytest.mark.parametrize(("page_size", "policy", "lookahead"), CASES)
def test_tree_of_two_tiers_equals_the_naive_model(page_size: int, policy: str, lookahead: int) -> None:
    sizes = {"page_size": page_size, "policy": policy, "lookahead": lookahead}
    machine = type("Machine", (TwoTierMachine,), sizes)
    run_machine(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.parametrize(("page_size", "policy", "lookahead"), CASES)
def test_long_walks_equal_the_naive_model(page_size: int, policy: str, lookahead: int) -> None:
    for seed in range(5):
        walk = Walk(seed, page_size, policy, lookahead)
        for _ in range(200):
            walk.step()
        walk.machine.teardown()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_the_same_calls_make_the_same_tree(policy: str) -> None:
    """No decision hangs on where objects lie in memory: ranks that make the same calls own the same trees."""
    seen = []
    for _ in range(2):
        walk = Walk(5, 1, policy)
        clutter = [object() for _ in range(1000 * len(seen))]
        for _ in range(150):
            walk.step()
        seen.append(
            [
                (node.id, node.pages.tolist(), None if node.host_pages is None else node.host_pages.tolist())
                for node in walk.machine.tree._nodes()
            ]
        )
        del clutter
    assert seen[0] and seen[0] == seen[1]
