"""How deep the next step's draft goes: the best depth by what is known, and a changed acceptance is noticed."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenceline.model_executor.step import StepCosts
from fenceline.scheduler.draft_depth import AdaptiveDepth

DEPTHS = (0, 1, 3)
# Where reading the weights takes nearly all of the time, and where each row takes as long as another.
LATENCY = StepCosts((8,), ((1.0, 1.1, 1.3),))
COMPUTE = StepCosts((1, 8), ((1.0, 2.0, 4.0), (8.0, 16.0, 32.0)))


def serve(policy: AdaptiveDepth, num_steps: int, num_reqs: int, shares: list[float], random: Random) -> Counter:
    """Steps whose drafts are accepted with the probabilities ``shares``, by place. How often each depth was chosen."""
    chosen: Counter[int] = Counter()
    for _ in range(num_steps):
        depth = policy.choose(num_reqs, num_reqs, DEPTHS[-1]).depth
        chosen[depth] += 1
        counts = []
        for _ in range(num_reqs):
            agrees = [random.random() < share for share in shares[:depth]]
            counts.append(1 + (agrees.index(False) if False in agrees else depth))
        policy.published(depth, np.array(counts))
    return chosen


@st.composite
def costs(draw: st.DrawFn) -> StepCosts:
    sizes = tuple(sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4))))
    time = st.floats(1e-4, 1.0)
    return StepCosts(sizes, tuple([tuple([draw(time) for _ in DEPTHS]) for _ in sizes]))


@given(costs(), st.integers(0, 2**32), st.lists(st.floats(0, 1), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_no_other_depth_promises_more_by_a_fiftieth(table: StepCosts, seed: int, shares: list[float]) -> None:
    """But for probes, which are of the greatest depth."""
    random, policy = Random(seed), AdaptiveDepth(DEPTHS, table)
    for _ in range(60):
        num_reqs = random.randint(1, 70)
        num_drafting = random.randint(0, num_reqs)
        choice = policy.choose(num_reqs, num_drafting, DEPTHS[-1])
        assert len(choice.rates) == len(DEPTHS)
        if choice.why == "probe":
            assert choice.depth == DEPTHS[-1] and num_drafting > 0
        else:
            assert choice.rates[DEPTHS.index(choice.depth)] * 1.021 >= max(choice.rates)
        counts = [1 + int(random.random() < shares[0]) * min(choice.depth, 1) for _ in range(num_drafting)]
        policy.published(choice.depth, np.array(counts, np.int64))


@given(costs(), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_same_history_leads_to_the_same_choices(table: StepCosts, seed: int) -> None:
    first, second = (serve(AdaptiveDepth(DEPTHS, table), 50, 3, [0.6, 0.6, 0.6], Random(seed)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("num_reqs", [1, 8])
def test_a_changed_acceptance_is_noticed(num_reqs: int) -> None:
    random, policy = Random(num_reqs), AdaptiveDepth(DEPTHS, LATENCY)
    assert serve(policy, 200, num_reqs, [0.9] * 3, random).most_common(1)[0][0] == 3
    serve(policy, 100, num_reqs, [0.0] * 3, random)
    assert serve(policy, 300, num_reqs, [0.0] * 3, random)[0] > 270
    serve(policy, 700, num_reqs, [0.9] * 3, random)
    assert serve(policy, 300, num_reqs, [0.9] * 3, random)[3] > 270
    # The first draft is good, what comes after it is not.
    serve(policy, 200, num_reqs, [0.9, 0.0, 0.0], random)
    assert serve(policy, 300, num_reqs, [0.9, 0.0, 0.0], random)[1] > 260


def test_what_is_lost_to_probes_is_a_hundredth() -> None:
    """Also where they are as dear as can be."""
    random, policy = Random(3), AdaptiveDepth(DEPTHS, COMPUTE)
    serve(policy, 100, 8, [0.0] * 3, random)
    chosen = serve(policy, 3000, 8, [0.0] * 3, random)
    seconds = sum(COMPUTE.of(8)[DEPTHS.index(depth)] * times for depth, times in chosen.items())
    tokens_per_second, without = 3000 * 8 / seconds, 8 / COMPUTE.of(8)[0]
    assert chosen[3] > 0 and tokens_per_second > 0.985 * without


def test_who_accepts_no_drafts_gets_none() -> None:
    policy = AdaptiveDepth(DEPTHS, LATENCY)
    assert {policy.choose(4, 0, 3).depth for _ in range(300)} == {0}
    assert policy.choose(4, 4, 3).depth == 3


@given(costs(), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_of_the_depths_with_memory_the_best_is_taken(table: StepCosts, seed: int) -> None:
    """And as soon as there is more, the best of all."""
    random, policy = Random(seed), AdaptiveDepth(DEPTHS, table)
    for _ in range(60):
        most = random.choice(DEPTHS)
        choice = policy.choose(5, 5, most)
        assert choice.depth <= most
        if choice.why == "memory":
            assert choice.rates[DEPTHS.index(choice.depth)] == max(choice.rates[: DEPTHS.index(most) + 1])
    choice = policy.choose(5, 5, DEPTHS[-1])
    assert choice.why == "probe" or choice.rates[DEPTHS.index(choice.depth)] * 1.021 >= max(choice.rates)


def test_a_batch_takes_as_long_as_the_next_measured_one() -> None:
    table = StepCosts((2, 8), ((1.0,), (2.0,)))
    assert [table.of(num) for num in (1, 2, 3, 8, 9)] == [(1.0,), (1.0,), (2.0,), (2.0,), (2.0,)]


@given(
    st.lists(st.tuples(*[st.floats(0.1, 1.0)] * len(DEPTHS)), min_size=1, max_size=6),
    st.lists(st.floats(0, 3), min_size=18, max_size=18),
)
@settings(max_examples=60, deadline=None)
def test_what_disturbs_a_measurement_is_left_out_where_it_shows(
    steps: list[tuple[float, ...]], noise: list[float]
) -> None:
    """Of a table that grows with size and depth, with something added here and there."""
    true = np.cumsum(np.cumsum(np.array(steps), axis=0), axis=1)
    noisy = true + np.array(noise).reshape(6, 3)[: len(true)]
    found = np.array(StepCosts.measured(tuple(range(1, len(true) + 1)), noisy.tolist()).seconds)
    assert (found >= true - 1e-9).all() and (found <= noisy + 1e-9).all()
    assert (np.diff(found, axis=0) >= 0).all() and (np.diff(found, axis=1) >= 0).all()
