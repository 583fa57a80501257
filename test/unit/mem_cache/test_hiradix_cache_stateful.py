"""The tree of two tiers against a naive model, with transfers that run late, in any order that their Points allow."""

from __future__ import annotations

import random

import pytest
from hicache_machine import TwoTierMachine
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


# How often a long walk takes which step.
WEIGHTS = {
    "serve": 8,
    "queue": 4,
    "begin": 4,
    "publish_part": 2,
    "decode": 3,
    "end": 4,
    "back_up": 3,
    "evict": 4,
    "evict_host": 1,
    "prefetch": 1,
    "prefetch_done": 1,
    "hold": 1,
    "release": 1,
    "flush": 1,
    "time_passes": 8,
    "drain_acks": 2,
}


class Walk:
    """Random steps from a seed: deeper into the state space than hypothesis goes, without its shrinking."""

    def __init__(self, seed: int, page_size: int, policy: str, lookahead: int = 0) -> None:
        self.random = random.Random(seed)
        sizes = {"page_size": page_size, "policy": policy, "lookahead": lookahead}
        self.machine = type("Machine", (TwoTierMachine,), sizes)()
        self.machine.start_empty()

    def step(self) -> None:
        [name] = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        machine = self.machine
        if name in ("publish_part", "decode", "end") and not machine.running:
            return
        if (name == "flush" and machine.running) or (name == "back_up" and not machine.touched):
            return
        if (
            name in ("begin", "release", "prefetch_done")
            and not {"begin": machine.queued, "release": machine.held, "prefetch_done": machine.prefetches}[name]
        ):
            return
        getattr(machine, name)(**self.arguments(name))
        machine.counts_agree()
        machine.nodes_are_the_models()
        machine.matches_know_whether_they_hold()
        machine.holds_are_intact()
        del machine.queued[:-6], machine.touched[:-6]

    def arguments(self, name: str) -> dict[str, object]:
        draw = self.random
        pick, flag = draw.randrange(12), draw.random() < 0.7
        prompt = {
            "space": draw.choice(["", "", "", "lora"]),
            "symbols": tuple(draw.randrange(2) for _ in range(draw.randrange(8))),
        }
        return {
            "serve": {**prompt, "load_back": flag, "finished": draw.random() < 0.8, "backup": pick < 7},
            "queue": {**prompt, "tail": pick},
            "begin": {"pick": pick, "load_back": flag, "launch": draw.random() < 0.5},
            "publish_part": {"pick": pick, "more": draw.randrange(12)},
            "decode": {"pick": pick, "symbol": pick % 2},
            "end": {"pick": pick, "finished": flag},
            "back_up": {"num_nodes": 1 + pick % 3, "force": draw.random() < 0.3},
            "evict": {"num_pages": pick % 9},
            "evict_host": {"num_pages": pick % 6},
            "prefetch": {**prompt, "num_pages": 1 + pick % 3},
            "hold": {"pick": pick},
            "release": {"pick": pick},
            "time_passes": {"index": pick % 3, "num_ops": 1 + pick % 4},
        }.get(name, {})


@pytest.mark.parametrize(("page_size", "policy", "lookahead"), CASES)
def test_long_walks_equal_the_naive_model(page_size: int, policy: str, lookahead: int) -> None:
    for seed in range(10):
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
