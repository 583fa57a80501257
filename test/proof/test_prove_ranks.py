"""Two ranks with storage, and backups: faults of one line each, and what reports them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from fenceline.mem_cache.storage import agreement
from fenceline.memory_order.staging import ResultLease
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_proof.ranks import NUM_RANKS, make_scenario
from fenceline_proof.runs import Trial, run

torch.set_num_threads(1)


def _learns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes its own results to be there for everything that it decides."""
    arrived = ResultLease.arrived

    def learned(self: ResultLease) -> bool:
        found = arrived(self)
        if found:
            self._copied.stream.learn(self._copied)
        return found

    monkeypatch.setattr(ResultLease, "arrived", learned)


def _one_rank_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write has ended when one rank has ended it."""
    start = agreement.StorageAgreement.__init__

    def alone(self: agreement.StorageAgreement, num_ranks: int) -> None:
        start(self, num_ranks)
        self._num_ranks = 1

    monkeypatch.setattr(agreement.StorageAgreement, "__init__", alone)


@pytest.mark.parametrize(
    ("plant", "said"), [(_learns_alone, "ranks 0 and 1 have decided differently"), (_one_rank_suffices, "")]
)
def test_a_fault_of_ranks_with_storage_is_reported(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    plant(monkeypatch)
    outcomes = (run(Trial("ranks_storage", seed)) for seed in range(30))
    outcome = next((outcome for outcome in outcomes if not outcome.clean), None)
    assert outcome is not None and said in outcome.report, outcome


@pytest.mark.long
def test_weights_that_one_rank_cannot_read_are_replaced_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ranks' exchange each acts on what it has read itself, and they serve two models."""
    seeds = [
        seed
        for seed in range(40)
        if make_scenario(Random(seed)).flags.get("rank_without_weights", NUM_RANKS) in range(NUM_RANKS)
    ]
    with monkeypatch.context() as planted:
        planted.setattr(ModelRunner, "check_weights", lambda self, weights: self._check_weights(weights))
        seed = next((seed for seed in seeds if not run(Trial("ranks", seed)).clean), None)
    assert seed is not None, "some rank cannot read them"
    outcome = run(Trial("ranks", seed))
    assert outcome.clean, outcome.report
