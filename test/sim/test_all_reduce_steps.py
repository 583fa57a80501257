"""The all-reduce's algorithm, step by step on virtual GPUs: right on all schedules tried, and every flag, barrier and
generation is needed for that."""

from __future__ import annotations

from random import Random

import pytest
import torch
from collective_ranks import FINE, sums_of

from fenceline.memory_order.edges import FLAG_GENERATION, PEER_HALVES, PEER_WORDS, Guard
from fenceline_sim.all_reduce import Act, Launch, steps_of
from fenceline_sim.errors import VgpuError
from fenceline_sim.peers import Grain
from fenceline_sim.policy import POLICIES

torch.set_num_threads(1)
ONE_SHOT, TWO_SHOTS = FINE, FINE._replace(two_shots_from=1)
IN_WORDS = FINE._replace(two_shots_from=1, in_words=True, capacity=10)
MIXED = FINE._replace(two_shots_from=30)
SIZES = (40, 8, 36, 64, 23)  # whole vectors and parts of one; more and fewer than there are threads


GRAINS = {"one shot": ONE_SHOT, "two shots": TWO_SHOTS, "in words": IN_WORDS, "one and two": MIXED}


@pytest.mark.parametrize("grain", GRAINS.values(), ids=list(GRAINS))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ranks_have_the_same_sum_on_every_schedule(num_ranks: int, grain: Grain) -> None:
    sizes = [8 * num_ranks * slices for slices in (1, 2, 1)] if grain.in_words else SIZES[: 6 - num_ranks]
    for seed in range(4):
        for policy in POLICIES if seed == 0 else ("random", "pct"):
            sums_of(seed, sizes, num_ranks, grain, policy=policy)


@pytest.mark.parametrize("in_words", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_launches_of_all_kinds_in_any_order_while_they_repeat(num_ranks: int, in_words: bool) -> None:
    """Sums in one shot and in two, and gathers. Words can tell 32 generations apart, and are zeros at first, which are
    taken for launch 32 if they have not been rewritten by then."""
    grain = MIXED._replace(num_tags=32, in_words=in_words)
    for seed in range(2):
        random = Random(seed)
        sizes = random.choices((8, 16, 24, 32, 40, 64), k=36)
        gathers = frozenset(random.sample(range(36), 8))
        sums_of(seed, sizes, num_ranks, grain, gathers=gathers)


@pytest.mark.parametrize("grain", [ONE_SHOT, IN_WORDS], ids=["one shot", "in words"])
@pytest.mark.parametrize("guard", [FLAG_GENERATION, PEER_HALVES, PEER_WORDS], ids=lambda guard: guard.name)
def test_a_severed_guard_of_words_is_found_under_every_seed(guard: Guard, grain: Grain) -> None:
    for seed in range(8):
        with pytest.raises(VgpuError, match=f"missing guard: .*{guard.name}"):
            sums_of(seed, (48, 32, 48, 48, 16, 48, 48), 2, grain, severed=frozenset({guard.name}))


# What is left out, the way in which it matters, and how many of six seeds must notice it at least.
STEPS = [
    (Act.ARRIVE, ONE_SHOT, 1),
    (Act.COUNT, ONE_SHOT, 6),
    (Act.COUNT_ABSENT, ONE_SHOT, 6),
    (Act.END, ONE_SHOT, 6),
    (Act.PUSH_WORDS, ONE_SHOT, 6),
    (Act.AWAIT_WORDS, ONE_SHOT, 6),
    (Act.PUSH_WORDS, IN_WORDS, 6),
    (Act.PUSH_SUM_WORDS, IN_WORDS, 6),
    (Act.AWAIT_WORDS, IN_WORDS, 6),
    (Act.KEEP, IN_WORDS, 6),
    (Act.COUNT, IN_WORDS, 6),
    (Act.END, IN_WORDS, 6),
    (Act.BARRIER, TWO_SHOTS, 6),
    (Act.RELEASE, TWO_SHOTS, 6),
    (Act.ACQUIRE, TWO_SHOTS, 6),
    (Act.PUSH_SUM, TWO_SHOTS, 6),
    (Act.TAKE, TWO_SHOTS, 6),
]


@pytest.mark.parametrize("act, grain, least", STEPS)
def test_without_a_step_it_fails(act: Act, grain: Grain, least: int) -> None:
    found, sizes = [], (48, 32, 48, 32, 48, 48) if grain.in_words else (40, 24, 40, 24, 40, 40)
    for seed in range(6):
        try:
            sums_of(seed, sizes, 2, grain, frozenset({act}))
        except (VgpuError, AssertionError, KeyError) as error:
            found.append(error)
    assert len(found) >= least, found


def test_a_word_is_written_again_before_its_generation_repeats() -> None:
    """A word holds 32 bits of the generation, here 3. A message of two vectors in launches 2 and 10 leaves its second
    vector's words alone in between."""
    grain = FINE._replace(capacity=3, num_tags=8)
    sizes = (8, 16, *[8] * 7, 16)
    for seed in range(4):
        sums_of(seed, sizes, grain=grain)
    noticed = 0
    for seed in range(4):
        try:
            sums_of(seed, sizes, grain=grain, left_out=frozenset({Act.REFRESH}))
        except (VgpuError, AssertionError) as error:
            noticed += "are taken for those of launch 10" in str(error)
    assert noticed >= 2


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_vector_is_added_up_once(size: int) -> None:
    for num_vectors in (1, 2, 7, 8, 64, 65):
        for two_shots in (False, True):
            summed: list[int] = []
            for rank in range(size):
                launch = Launch(rank, size, num_vectors, 3, 2, two_shots)
                mine = [
                    s.vector for b in range(3) for t in range(2) for s in steps_of(launch, b, t) if s.act is Act.SUM
                ]
                assert two_shots or sorted(mine) == list(range(num_vectors))
                summed += mine
            assert not two_shots or sorted(summed) == list(range(num_vectors))


@pytest.mark.parametrize("size, part, rows", [(2, 2, 5), (4, 3, 2), (8, 1, 7)])
def test_the_block_that_has_a_row_gets_and_adds_up_all_of_it(size: int, part: int, rows: int) -> None:
    """On every rank, so that it can normalise the row when its own flags have come."""
    for rank in range(size):
        launch = Launch(rank, size, rows * size * part, 2, part, True, False, size * part)
        for block in range(2):
            steps = [step for thread in range(part) for step in steps_of(launch, block, thread)]
            got = [step.vector for step in steps if step.act in (Act.SUM, Act.TAKE)]
            mine = range(block, rows, 2)
            assert sorted(got) == [row * size * part + i for row in mine for i in range(size * part)]
