"""The campaign: which runs are made, in how many processes, for how long."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice

import torch

from fenceline.memory_order.edges import EDGES, ROWS, edge_of
from fenceline_proof.arms import Arm, judge, unarmed_rows
from fenceline_proof.events import EVENTS, may_show
from fenceline_proof.everything import EVERYTHING
from fenceline_proof.grammars import compiled_grammars
from fenceline_proof.runs import Outcome, Trial, run
from fenceline_proof.table import Proof
from fenceline_proof.tiny_model import tiny_model_path
from fenceline_proof.workloads import WORKLOADS
from fenceline_sim.pairs import missed
from fenceline_sim.policy import Answers

# From this many runs of the workload ``everything`` on, every edge must have had two accesses to order, and every event
# must have been seen. For events that have not been, those of this many seeds are added that may show them, because
# every change to the engine changes which seeds reach a rare event.
_RUNS_FOR_EVENTS, _MORE_SEEDS_FOR_EVENTS = 20, 100
# An edge or guard that should be necessary gets up to so many times the usual number of runs, if none has failed as it
# must.
_MORE_RUNS_PER_ARM = 6


_OBJECTS_PER_COLLECTION = 100_000
_MAX_PREEMPTIONS = 2  # answers that differ from the usual one in a schedule that ``explore`` tries


@dataclass(frozen=True, slots=True)
class Plan:
    """``num_per_arm``: runs of each arm. In a campaign of ``everything`` at most so many, up to the first that fails as
    it must, and an arm that none has shown then gets more."""

    arms: tuple[Arm, ...]
    workloads: tuple[str, ...]
    first_seed: int
    num_intact: int
    num_per_arm: int
    everything: bool
    jobs: int
    progress: Callable[[int], object]


@dataclass(slots=True)
class _Tally:
    by_arm: dict[tuple[str, str], list[Outcome]] = field(default_factory=dict)  # what is severed, workload
    intact: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        severed = outcome.trial.severed
        if severed:
            arm = next(iter(severed)), outcome.trial.workload
            self.by_arm.setdefault(arm, []).append(outcome)
        else:
            self.intact.append(outcome)

    def of(self, arm: Arm) -> Sequence[Outcome]:
        return self.by_arm.get((arm.severs, arm.workload), ())

    @property
    def num_everything(self) -> int:
        return sum(outcome.trial.workload == EVERYTHING.name for outcome in self.intact)

    def events(self) -> Counter[str]:
        mine = (outcome for outcome in self.intact if outcome.trial.workload == EVERYTHING.name)
        return Counter(event for outcome in mine for event in outcome.events)


def carry_out(plan: Plan) -> Proof:
    started = time.monotonic()
    tally, proof = _Tally(), Proof()
    intact = islice(_intact_trials(plan), plan.num_intact)
    # The tally knows of a run a little later than the next ones are chosen.
    between = islice(intact, 4 * plan.jobs)
    trials = chain(_severed_trials(plan, tally), between, _more_severed_trials(plan, tally), intact)
    for outcome in _outcomes(trials, plan):
        tally.add(outcome)
        plan.progress(1)
    if tally.num_everything >= _RUNS_FOR_EVENTS:
        for outcome in _outcomes(_for_events(plan, tally), plan):
            tally.add(outcome)
        proof.events = {event: tally.events()[event] for event in EVENTS}
    _judge(plan, tally, proof)
    proof.seconds = time.monotonic() - started
    return proof


def explore(plan: Plan) -> Proof:
    """Run all schedules of ``plan.workloads``, small ones, in which the host's queries get the latest or the earliest
    possible answers, except for up to two of them."""
    started, proof = time.monotonic(), Proof()
    trials = [
        Trial(name, plan.first_seed, answers=Answers(usual)) for name in plan.workloads for usual in (False, True)
    ]
    for num_others in range(_MAX_PREEMPTIONS + 1):
        outcomes = list(_outcomes(iter(trials), plan))
        proof.count(outcomes, proof.schedules)
        plan.progress(len(outcomes))
        proof.failures += [outcome for outcome in outcomes if not outcome.clean]
        if proof.failures or num_others == _MAX_PREEMPTIONS:
            break  # the first failures have the fewest preemptions
        trials = [trial for outcome in outcomes for trial in _one_more(outcome)]
    proof.telling = list(proof.failures)
    proof.seconds = time.monotonic() - started
    return proof


def _one_more(outcome: Outcome) -> Sequence[Trial]:
    """The schedules that differ from the outcome's in one later answer."""
    answers = outcome.trial.answers
    assert answers is not None, "a schedule of answers"
    last = answers.others[-1] if answers.others else -1
    return [
        replace(outcome.trial, answers=Answers(answers.usual, (*answers.others, question)))
        for question in range(last + 1, outcome.num_questions)
    ]


def _judge(plan: Plan, tally: _Tally, proof: Proof) -> None:
    def by_seed(outcomes: Iterable[Outcome]) -> list[Outcome]:
        return sorted(outcomes, key=lambda outcome: outcome.trial.seed)

    rows = {arm.name: judge(arm, by_seed(tally.of(arm))) for arm in plan.arms}
    if plan.everything:
        rows |= {row.name: row for row in unarmed_rows()}
    proof.rows = [rows[name] for name in ROWS if name in rows]
    proof.undeclared = undeclared_sites(tally.intact)
    proof.pairs = set().union(*(outcome.pairs for outcome in tally.intact))
    if plan.everything and tally.num_everything >= _RUNS_FOR_EVENTS:
        proof.missed_pairs = missed(proof.pairs)
    proof.num_intact = len(tally.intact)
    proof.failures = by_seed(outcome for outcome in tally.intact if not outcome.clean)
    proof.telling = list(proof.failures)
    if not plan.everything:  # one arm was asked for
        severed = by_seed(outcome for outcomes in tally.by_arm.values() for outcome in outcomes)
        proof.telling += [outcome for outcome in severed if not outcome.clean][:1]
    proof.count(tally.intact, proof.runs_by_workload)


def undeclared_sites(outcomes: Iterable[Outcome]) -> list[str]:
    """Functions that applied an edge which names others as its sites, or an edge that names none and has several."""
    met: dict[str, set[str]] = {}
    for outcome in outcomes:
        for part, site in outcome.applied:
            met.setdefault(part, set()).add(site)
    found = []
    for part, sites in sorted(met.items()):
        declared = {site for site, _ in EDGES[edge_of(part)].sites}
        if declared or len(sites) > 1:
            found += [f"{part} at {site}" for site in sorted(sites - declared)]
    return found


def _severed_trials(plan: Plan, tally: _Tally) -> Iterator[Trial]:
    """Seed by seed: a run of each arm, unless ``tally`` has one already that is enough."""
    for i in range(plan.num_per_arm):
        for arm in plan.arms:
            shown = plan.everything and any(arm.names(outcome) for outcome in tally.of(arm))
            if i < arm.num_runs(plan.num_per_arm) and not shown:
                yield arm.trial(i, plan.first_seed)


def _more_severed_trials(plan: Plan, tally: _Tally) -> Iterator[Trial]:
    """More runs of the arms that no run has shown: some need an order of events that few seeds have."""
    if not plan.everything:
        return
    for i in range(_MORE_RUNS_PER_ARM * plan.num_per_arm):
        for arm in plan.arms:
            is_more = i >= arm.num_runs(plan.num_per_arm) and not arm.covered
            if is_more and not any(arm.names(outcome) for outcome in tally.of(arm)):
                yield arm.trial(i, plan.first_seed)


def _intact_trials(plan: Plan) -> Iterator[Trial]:
    """The runs of the intact engine in rounds: first one run of each workload, then as many as its share says."""
    seeds = {name: count(plan.first_seed) for name in plan.workloads}
    for round_no in count():
        for name in plan.workloads:
            for _ in range(WORKLOADS[name].share if round_no else 1):
                yield Trial(name, next(seeds[name]))


def _for_events(plan: Plan, tally: _Tally) -> Iterator[Trial]:
    """More runs of the workload with everything, as long as something has not been seen in any."""
    first = plan.first_seed + tally.num_everything
    for seed in range(first, first + _MORE_SEEDS_FOR_EVENTS):
        unseen = EVENTS.keys() - tally.events().keys()
        if not unseen:
            return
        flags = EVERYTHING.scenario(seed).flags
        if any(may_show(event, flags) for event in unseen):
            yield Trial(EVERYTHING.name, seed)


def _outcomes(trials: Iterator[Trial], plan: Plan) -> Iterator[Outcome]:
    if plan.jobs == 1:
        yield from map(run, trials)
        return
    compiled_grammars()  # once for all processes, and so is what they import
    tiny_model_path()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(plan.jobs, context, prepare) as pool:
        running: set[Future[Outcome]] = {pool.submit(run, trial) for trial in islice(trials, 2 * plan.jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(run, trial) for trial in islice(trials, len(done))}
            for future in done:
                yield future.result()


def prepare() -> None:
    """Set up a process for runs: no log lines, and a garbage collector that does not look at the objects of torch, and
    comes rarely: at Python's own rate it takes a tenth of the time. Torch's small operations use one thread."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
