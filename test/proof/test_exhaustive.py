"""All schedules of small workloads: that the host's answers make the schedule, and that all of them are tried."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import numpy as np
import pytest

from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import Completions, ForwardResult, StepBatch
from fenceline_proof.campaign import Plan, explore
from fenceline_proof.events import around
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import WORKLOADS
from fenceline_sim.device import VgpuDevice
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.policy import Answering, Answers, Policy, make_policy
from fenceline_sim.streams import Operation, VirtualStream


class _Heard(Policy):
    """Another policy's schedule; ``yes``: the questions that were answered so, counted as ``Answering`` does."""

    def __init__(self, inner: Policy) -> None:
        self.yes: list[int] = []
        self._inner = inner
        self._counter = Answering(Answers(usual=False))
        self._asked: list[tuple[int, Operation]] = []

    def asked(self, mark: Operation, moment: int) -> bool:
        done, counted = mark.done, self._counter.num_questions
        mark.done = False  # whether it had run before, or runs when it is asked for, is this policy's choice
        self._counter.asked(mark, moment)
        mark.done = done
        if done and self._counter.num_questions > counted:
            self.yes.append(counted)
        return False

    def pick(self, runnable: Sequence[VirtualStream], needed: VirtualStream | None) -> VirtualStream | None:
        return self._inner.pick(runnable, needed)


class _Told(Answering):
    """The same answers on the laziest schedule."""

    def asked(self, mark: Operation, moment: int) -> bool:
        done, mark.done = mark.done, False
        answer = super().asked(mark, moment)
        mark.done = done
        return answer


def _decisions(workload: str, seed: int, policy: Policy) -> list[object]:
    """What the scheduler decided, step by step and page by page; and its transfers."""
    gpu = VirtualGpu(seed=seed, policy=policy)
    scenario = WORKLOADS[workload].make(Random(seed))
    loop = Loop(make_config(scenario.flags, "vgpu"), VgpuDevice(gpu=gpu), scenario=scenario)
    found: list[object] = []
    around(loop.runner, "launch", before=lambda batch: found.append(_described(batch)))
    for kind in ("store", "load") if loop.runner.hicache is not None else ():
        around(loop.runner.hicache, kind, before=lambda *args: found.append([pages.tolist() for pages in args[1:3]]))
    loop.run()
    return found


def _described(batch: StepBatch) -> object:
    writes = batch.page_writes
    chunks = [(chunk.token_ids.tolist(), chunk.out_slots.tolist()) for chunk in batch.chunks]
    columns = (batch.rows, batch.starts, batch.seq_lens, writes.rows, writes.columns, writes.pages)
    return chunks, [np.asarray(column).tolist() for column in columns]


@pytest.mark.parametrize(("workload", "policy"), [("mixed", "random"), ("aborts", "pct"), ("spill", "eager")])
def test_what_the_host_is_told_makes_the_run(workload: str, policy: str) -> None:
    """So schedules in which it is told the same need not be tried one by one."""
    heard = _Heard(make_policy(policy, seed=1))
    as_it_came = _decisions(workload, 1, heard)
    assert _decisions(workload, 1, _Told(Answers(False, tuple(heard.yes)))) == as_it_came


@pytest.mark.long
def test_a_fault_that_takes_two_preemptions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that come late, early, late, late, early: no other schedule shows it."""
    tried: list[Answers] = []
    begin, ask = Answering.__init__, ModelRunner.completions
    told: list[bool] = []

    def begun(self: Answering, answers: Answers) -> None:
        tried.append(answers)
        told.clear()
        begin(self, answers)

    def wrong(self: ModelRunner, awaited: ForwardResult | None) -> Completions:
        ended = ask(self, awaited)
        if awaited is not None:
            told.append(ended.results_arrived)
            assert told != [False, True, False, False, True], "only in this order"
        return ended

    monkeypatch.setattr(Answering, "__init__", begun)
    monkeypatch.setattr(ModelRunner, "completions", wrong)
    plan = Plan(
        arms=(), workloads=("row",), first_seed=0, num_intact=0, num_per_arm=0, everything=False, jobs=1,
        progress=lambda num: None,
    )  # fmt: skip
    proof = explore(plan)
    assert not proof.clean and [f.trial.answers for f in proof.failures] == [Answers(False, (1, 4))]
    assert "only in this order" in proof.failures[0].report
    assert proof.failures[0].trial.command.endswith("--exhaustive --workload row")
    assert proof.schedules["row"] == len(tried) == len(set(tried))
    for usual in (False, True):
        mine = {answers.others for answers in tried if answers.usual == usual}
        num_questions = sum(len(others) == 1 for others in mine)
        pairs = set(combinations(range(num_questions), 2))
        assert num_questions > 4 and mine == {()} | {(n,) for n in range(num_questions)} | pairs
