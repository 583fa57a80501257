"""The all-reduce's algorithm, step by step on virtual GPUs: right on all schedules tried, and every flag, barrier and
generation is needed for that."""

from __future__ import annotations

import pytest
import torch
from collective_ranks import FINE, sums_of

from fenceline.memory_order.all_reduce import Act, Launch, one_shot_steps, two_shot_steps
from fenceline.vgpu.errors import VgpuError
from fenceline.vgpu.policy import POLICIES

torch.set_num_threads(1)
ONE_SHOT, TWO_SHOTS = FINE, FINE._replace(two_shots_from=1)
MIXED = FINE._replace(two_shots_from=30)
SIZES = (40, 8, 36, 64, 23)  # whole vectors and parts of one; more and fewer than there are threads


@pytest.mark.parametrize("grain", [ONE_SHOT, TWO_SHOTS, MIXED], ids=["one shot", "two shots", "both"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_have_the_same_sum_on_every_schedule(num_ranks: int, grain: object) -> None:
    for seed in range(6):
        for policy in POLICIES if seed == 0 else ("random", "pct"):
            sums_of(seed, SIZES[: 6 - num_ranks], num_ranks, grain, policy=policy)  # type: ignore[arg-type]


# What is left out, the way in which it matters, and how many of twelve seeds must notice it at least.
STEPS = [
    (Act.RELEASE_START, ONE_SHOT, 12),
    (Act.ACQUIRE_START, ONE_SHOT, 6),
    (Act.RELEASE_START, TWO_SHOTS, 12),
    (Act.ARRIVE, ONE_SHOT, 3),
    (Act.TICKET, ONE_SHOT, 12),
    (Act.PUSH_WORDS, ONE_SHOT, 12),
    (Act.AWAIT_WORDS, ONE_SHOT, 12),
    (Act.BARRIER, TWO_SHOTS, 12),
    (Act.RELEASE, TWO_SHOTS, 12),
    (Act.ACQUIRE, TWO_SHOTS, 12),
    (Act.PUSH_SUM, TWO_SHOTS, 12),
    (Act.TAKE, TWO_SHOTS, 12),
]


@pytest.mark.parametrize("act, grain, least", STEPS)
def test_without_a_step_it_fails(act: Act, grain: object, least: int) -> None:
    found = []
    for seed in range(12):
        try:
            sums_of(seed, (40, 40, 40, 40, 40), 2, grain, frozenset({act}))  # type: ignore[arg-type]
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
                steps = two_shot_steps if two_shots else one_shot_steps
                mine = [
                    s.vector
                    for b in range(3)
                    for t in range(2)
                    for s in steps(launch, b, t)
                    if s.act is Act.SUM
                ]
                assert two_shots or sorted(mine) == list(range(num_vectors))
                summed += mine
            assert not two_shots or sorted(summed) == list(range(num_vectors))
