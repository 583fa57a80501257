"""One run: a workload's scenario on a virtual GPU, and the results of all checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from tempfile import TemporaryDirectory

from fenceline.memory_order import CommunicatorError, GraphError, LeaseError, OrderError
from fenceline.memory_order.edges import ONE_STREAM
from fenceline.model_executor.graph_runner import GraphMismatch
from fenceline.scheduler.ranks import RanksDifferError
from fenceline_proof.collectives import Ranks, make_program
from fenceline_proof.ranks import NUM_RANKS, RankRun, make_scenario, make_storage_scenario
from fenceline_proof.script import Flags, Workload
from fenceline_proof.small_workloads import SMALL_WORKLOADS
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import COLLECTIVES, RANKS, RANKS_STORAGE, WORKLOADS
from fenceline_sim.device import VgpuDevice
from fenceline_sim.errors import CheckError, DeadlockError, KernelError, RaceError
from fenceline_sim.factories import use
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.pairs import Pair, PairsMet
from fenceline_sim.place import raised_at
from fenceline_sim.policy import Answering, Answers, Policy, make_policy

# Policies by seed. Random schedules find most faults; the extreme policies find those that random ones hardly reach.
_POLICIES = ("random", "pct", "random", "laziest", "random", "pct", "eager", "fifo")

HAPPENS_BEFORE = "happens-before"
_CHECKERS: tuple[tuple[type[Exception], str], ...] = (
    (RaceError, HAPPENS_BEFORE), (LeaseError, "leases"), (KernelError, "kernels"), (DeadlockError, "deadlock"),
    (RanksDifferError, "decisions"), (OrderError, "memory-check"), (GraphMismatch, "graphs"), (GraphError, "graphs"),
    (CommunicatorError, "communicator"),
)  # fmt: skip
INVARIANTS = "invariants"  # assertions, and the scheduler's accounts
_NUM_LINES = 3  # of an exception's traceback that a report has
ANSWERS = "answers"  # differ from those of each request alone


def policy_of(seed: int, policies: tuple[str, ...] = _POLICIES) -> str:
    return policies[seed % len(policies)]


@dataclass(frozen=True, slots=True)
class Trial:
    workload: str
    seed: int
    severed: frozenset[str] = frozenset()
    detect: bool = True  # without the detector a race is found only if it makes tokens wrong
    answers: Answers | None = None  # the schedule that gives them, in place of the seed's

    @property
    def scenarios(self) -> Workload:
        return WORKLOADS.get(self.workload) or SMALL_WORKLOADS[self.workload]

    @property
    def policy(self) -> str:
        return policy_of(self.seed, self.scenarios.policies or _POLICIES)

    def make_policy(self) -> Policy:
        return make_policy(self.policy, self.seed) if self.answers is None else Answering(self.answers)

    @property
    def command(self) -> str:
        edges = "".join(f" --edge {name}" for name in sorted(self.severed))
        if self.answers is not None:
            return f"python -m fenceline_proof.prove --exhaustive --workload {self.workload}"
        which = f"--workload {self.workload} --seed {self.seed} --seeds 1"
        return f"python -m fenceline_proof.prove {which}{edges}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's result. ``checker``: the check that failed, "" if none did. ``edges``: edges and guards in its report."""

    trial: Trial
    checker: str = ""
    edges: tuple[str, ...] = ()
    report: str = ""
    num_tokens: int = 0  # compared with the oracle's
    num_close: int = 0  # of them, those that differ because of rounding
    events: frozenset[str] = frozenset()  # that were seen (``events.EVENTS``)
    # (part of an edge, function that applies it) of each edge that was reached.
    applied: frozenset[tuple[str, str]] = frozenset()
    pairs: frozenset[Pair] = frozenset()  # of conflicting accesses that were met, of the intact engine
    num_questions: int = 0  # of the host whether work has run, where ``answers`` were given

    @property
    def clean(self) -> bool:
        return not self.checker


def run(trial: Trial) -> Outcome:
    policy = trial.make_policy()
    if trial.workload in (COLLECTIVES, RANKS, RANKS_STORAGE):
        return _run_devices(trial, policy)
    gpus: list[VirtualGpu] = []

    def open_gpu() -> VgpuDevice:
        gpu = VirtualGpu(seed=trial.seed, policy=policy, detect=trial.detect)
        if gpu.detector is not None and not trial.severed:
            gpu.detector.pairs = PairsMet()
        gpus.append(gpu)
        return VgpuDevice(trial.severed, gpu)

    try:
        outcome = _judge(trial, _run_steps(trial, open_gpu()), gpus[0])
    except Exception as error:
        if not gpus:  # the run has not begun, so this is not a finding
            raise
        outcome = _failure(trial, error)
        gpus[0].rotation.abandon()  # otherwise storage's threads would wait for their turn forever
    num_questions = policy.num_questions if isinstance(policy, Answering) else 0
    applied, detector = frozenset(gpus[0].edges_met), gpus[0].detector
    if detector is not None and detector.pairs is not None:
        outcome = replace(outcome, pairs=frozenset(detector.pairs.found))
    return replace(outcome, applied=applied, num_questions=num_questions)


def _run_devices(trial: Trial, policy: Policy) -> Outcome:
    random = Random(trial.seed)
    program = make_program(random) if trial.workload == COLLECTIVES else None
    num_ranks = NUM_RANKS if program is None else program.num_ranks
    gpu = VirtualGpu(trial.seed, policy, trial.detect, num_devices=num_ranks)
    use(gpu)
    try:
        if program is None:
            scenario = (make_storage_scenario if trial.workload == RANKS_STORAGE else make_scenario)(random)
            engine = RankRun(gpu, scenario, trial.severed)
            report = engine.run()
            found = Outcome(trial, num_tokens=engine.num_tokens)
        else:
            report, found = Ranks(gpu, program, trial.severed).run(trial.seed), Outcome(trial)
        outcome = replace(found, checker=ANSWERS, report=report) if report else found
    except Exception as error:
        outcome = _failure(trial, error)
        gpu.rotation.abandon()  # otherwise the threads of the other ranks would wait forever
    return replace(outcome, applied=frozenset(gpu.edges_met))


def _judge(trial: Trial, loop: Loop, gpu: VirtualGpu) -> Outcome:
    """Compare the answers. Without the detector wrong tags have not stopped the run; then the first of them is reported
    with a wrong answer."""
    found = loop.compare_answers()
    report = found.wrong
    if report and gpu.findings.errors:
        report += f"\nthe first wrong slot: {gpu.findings.errors[0]}"
    return Outcome(
        trial, ANSWERS if report else "", () if trial.severed else missing_edges(report), report=report,
        num_tokens=found.num_tokens, num_close=found.num_close, events=frozenset(loop.watch.seen),
    )  # fmt: skip


def _checks_order(trial: Trial, flags: Flags) -> bool:
    """Whether the run has ``--memory-check order``. Something that is severed is to be reported by the virtual GPU,
    when the access happens. A step of drafts declares all pages that it may write, the host not knowing how far the one
    before has come; some of them are backed up meanwhile, and it then writes none of these."""
    seed, is_whole = trial.seed, trial.detect and not trial.severed
    return is_whole and (seed // 2 + seed // 8 + seed // 32) % 2 == 1 and "draft" not in flags


def _run_steps(trial: Trial, device: VgpuDevice) -> Loop:
    scenario = trial.scenarios.scenario(trial.seed)
    with storage_directory(scenario.flags) as flags:
        flags = {**flags, "memory_check": "order" if _checks_order(trial, flags) else "off"}
        config = make_config(flags, device.kind)
        loop = Loop(config, device, scenario=scenario)
        loop.run()
        device.synchronize()
    return loop


@contextmanager
def storage_directory(flags: Flags) -> Iterator[Flags]:
    """``flags`` with a new directory for this run if they ask for storage."""
    if flags.get("hicache_storage_backend", "none") == "none":
        yield flags
        return
    with TemporaryDirectory(prefix="fenceline-prove-") as directory:
        yield {**flags, "hicache_storage_dir": directory}


@dataclass(frozen=True, slots=True)
class Verdict:
    checker: str
    edges: tuple[str, ...]
    report: str


def verdict_of(error: Exception) -> Verdict:
    """The check that has failed if the engine on the virtual GPU raises ``error``."""
    text = str(error) or type(error).__name__
    if isinstance(error, CheckError):
        return Verdict(error.checker, (error.guard,) if error.guard else (), text)
    checker = next((name for kind, name in _CHECKERS if isinstance(error, kind)), INVARIANTS)
    if checker == INVARIANTS:
        text = "\n  ".join([f"{type(error).__name__}: {text}", *raised_at(error, _NUM_LINES)])
    edges = error.edges if isinstance(error, RaceError | OrderError) else ()
    if isinstance(error, CommunicatorError):  # raised by the guard itself
        edges, text = (ONE_STREAM.name,), f"{text}\n  missing guard: {ONE_STREAM.name}"
    return Verdict(checker, edges, text)


def _failure(trial: Trial, error: Exception) -> Outcome:
    verdict = verdict_of(error)
    edges = verdict.edges or (() if trial.severed else missing_edges(verdict.report))
    return Outcome(trial, verdict.checker, edges, verdict.report)


def missing_edges(report: str) -> tuple[str, ...]:
    """The edges and guards that a report says are missing."""
    named = (name for line in re.findall(r"missing (?:edge|guard): (.*)", report) for name in line.split(" or "))
    return tuple(dict.fromkeys(named))
