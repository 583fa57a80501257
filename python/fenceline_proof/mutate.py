"""``python -m fenceline_proof.mutate``: tests the proof with faults of memory order, one at a time, until a run fails.

Some runs of the intact engine are traced. Each mutant (``mutants``) has its own process, in which runs that come to its
line are made until a check fails or its CPU time is used: then it survives, and is a loss unless ``survivors.txt`` has
it. Results are added to a file as they come, so that a campaign can be stopped and continued.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from types import CodeType
from typing import IO, TYPE_CHECKING

import torch
from tqdm import tqdm

from fenceline_proof.mutants import FOLDERS, PACKAGE, Mutant, all_mutants

if TYPE_CHECKING:
    import coverage

# Modules that take seconds to load and have no mutants: every mutant's process is forked with them loaded. A model's
# first parameter loads the second one.
_LOADED_BEFORE = (
    "numpy", "torch.distributed.tensor", "xgrammar", "msgspec", "orjson", "tokenizers", "safetensors.torch",
    "yaml", "prometheus_client", "psutil",
)  # fmt: skip
KILLED, SURVIVED, UNREACHED, CRASHED = "killed", "survived", "unreached", "crashed"
# Checks that tell that something is wrong, but not which rule was broken.
_UNSPECIFIC = ("answers", "invariants", "deadlock", "kernels")
_EXCEPTIONS = ("invariants", "kernels")  # reports of these have the lines that an exception has come through
_KNOWN = Path(__file__).with_name("survivors.txt")
_GRACE_S = 30.0  # of CPU time beyond a mutant's limit; a run that takes longer hangs, and has failed


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a mutant. ``killed_by``: the check that failed; ``named``: the edges and guards in its report."""

    id: str
    path: str
    line: int
    rule: str
    function: str
    edit: str  # where, and what was changed
    state: str
    killed_by: str = ""
    named: tuple[str, ...] = ()
    by_name: bool = False
    workload: str = ""
    seed: int = 0
    num_runs: int = 0
    cpu_s: float = 0.0
    report: str = ""

    @property
    def killed(self) -> bool:
        return self.state in (KILLED, CRASHED)


def _load_changed(mutant: Mutant) -> None:
    """From now on this process loads the mutant's module from changed source, never from a compiled file."""
    path, get_code = PACKAGE / mutant.path, SourceFileLoader.get_code
    source = mutant.apply(path.read_text(encoding="utf-8"))

    def changed(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        if loader.path != str(path):
            return get_code(loader, fullname)
        return compile(source, loader.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = changed  # type: ignore[method-assign, assignment]


@dataclass(frozen=True, slots=True)
class Traced:
    """A run of the intact engine: its workload's share of the proof's runs, the seconds of CPU time that it takes when
    it is traced, and the lines that it executes, by the path below the package."""

    workload: str
    seed: int
    share: int
    seconds: float
    lines: Mapping[str, frozenset[int]]


def trace_runs(seeds: int, jobs: int) -> list[Traced]:
    """Which lines of the folders are executed by which of ``seeds`` runs of each workload (five times as many of
    ``everything``), made by ``jobs`` processes. Needs ``coverage``; two seconds of CPU time for a run."""
    # In processes of their own, because this one must not load the engine.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_tracing) as pool:
        trials = [
            (name, seed, share)
            for name, share in pool.submit(_shares).result().items()
            for seed in range(5 * seeds if name == "everything" else seeds)
        ]
        return list(tqdm(pool.map(_traced, trials), total=len(trials), unit="traced run", disable=None))


_tracer: coverage.Coverage  # of a process that ``_begin_tracing`` has set up


def _begin_tracing() -> None:
    """In a process that is to run workloads: before the engine is loaded, whose lines are traced."""
    global _tracer
    import coverage

    include = [f"{PACKAGE}/{folder}/*" for folder in FOLDERS]
    _tracer = coverage.Coverage(data_file=None, config_file=False, include=include)
    _tracer.start()
    from fenceline_proof.campaign import prepare

    prepare()


def _shares() -> dict[str, int]:
    from fenceline_proof.workloads import WORKLOADS

    return {name: workload.share for name, workload in WORKLOADS.items()}


def _traced(trial: tuple[str, int, int]) -> Traced:
    """The first run in a process is longer and executes more: it also loads the engine."""
    from fenceline_proof.runs import Trial, run

    _tracer.erase()  # also what the run before has left
    _tracer.start()
    began = time.process_time()
    run(Trial(*trial[:2]))
    took_s = time.process_time() - began
    _tracer.stop()
    data = _tracer.get_data()
    lines = {
        Path(file).relative_to(PACKAGE).as_posix(): frozenset(data.lines(file) or ()) for file in data.measured_files()
    }
    return Traced(*trial, round(took_s, 2), lines)


def runs_for(place: tuple[str, int], traced: Sequence[Traced]) -> Iterator[tuple[str, int]]:
    """The runs to make for a mutant at ``place`` (path and line), each a workload and a seed, without end; none if no
    traced run executes the line.

    They are made in rounds of all workloads that come to the line, the fastest first, because most faults are noticed
    by few workloads, and by these soon. ``everything``, which has the largest share of the proof's runs, gets three
    in a round. Of each workload first the traced runs that execute the line, the fastest first, then other seeds.
    """
    path, line = place
    by_workload: dict[str, list[Traced]] = defaultdict(list)
    for one in traced:
        by_workload[one.workload].append(one)
    orders: list[tuple[float, str, int, Iterator[int]]] = []
    for name, mine in by_workload.items():
        reaching = [one for one in mine if line in one.lines.get(path, ())]
        if reaching:
            first = sorted(reaching, key=lambda one: (one.seconds, one.seed))
            seeds = chain((one.seed for one in first), count(len(mine)))
            orders.append((first[0].seconds, name, math.isqrt(mine[0].share), seeds))
    orders.sort(key=lambda order: order[:2])
    while orders:
        for _, name, num_runs, later in orders:
            for seed in islice(later, num_runs):
                yield name, seed


def _try_mutant(mutant: Mutant, runs: Iterable[tuple[str, int]], cpu_limit_s: float, out: IO[str]) -> None:
    """In the mutant's own process: make runs until one fails or the time is over, and write the result."""
    began = time.process_time()
    for name in [name for name in sys.modules if name.startswith("fenceline")]:
        del sys.modules[name]
    _load_changed(mutant)

    def tell(state: str, **more: object) -> None:
        out.write(_line(mutant, state, cpu_s=round(time.process_time() - began, 2), **more))
        out.flush()

    num_runs = 0
    try:
        from fenceline_proof.campaign import prepare
        from fenceline_proof.runs import Trial, run

        prepare()
        for trial in (Trial(name, seed) for name, seed in runs):
            outcome = run(trial)
            num_runs += 1
            if not outcome.clean:
                by_name = is_by_name(mutant, outcome.checker, outcome.edges, outcome.report)
                tell(
                    KILLED, killed_by=outcome.checker, named=outcome.edges, by_name=by_name,
                    workload=trial.workload, seed=trial.seed, num_runs=num_runs, report=outcome.report[:2000],
                )  # fmt: skip
                return
            if time.process_time() - began > cpu_limit_s:
                break
        tell(SURVIVED, num_runs=num_runs)
    except Exception as error:  # it could not even be imported, or a run could not begin
        tell(CRASHED, killed_by="start", num_runs=num_runs, report=f"{type(error).__name__}: {error}"[:2000])


def is_by_name(mutant: Mutant, checker: str, named: tuple[str, ...], report: str) -> bool:
    """Whether the report identifies the fault. If the changed line names edges or guards, the report must name one of
    them; otherwise any edge or guard, or a check that says which memory was used how, is enough. A line of the changed
    statement in an exception's traceback is enough too."""
    from fenceline.memory_order.edges import EDGES, GUARDS, edge_of

    lines = re.findall(rf"{re.escape(mutant.path)}:(\d+) in ", report) if checker in _EXCEPTIONS else []
    if any(mutant.statement <= int(line) <= mutant.last_line for line in lines):
        return True
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in mutant.old).split())
    meant = {name for name in (*EDGES, *GUARDS) if name.upper() in words}  # constants: a variable may have such a name
    if meant:
        return bool(meant & {edge_of(name) for name in named})
    return bool(named) or checker not in _UNSPECIFIC


def _campaign(
    mutants: Sequence[Mutant], runs: Callable[[Mutant], Iterator[tuple[str, int]]], jobs: int, cpu_limit_s: float,
    results: Path,
) -> None:  # fmt: skip
    """Fork a process for each mutant for which there are ``runs``, each a workload and a seed, ``jobs`` at a time."""
    torch.set_num_threads(1)
    waiting = list(reversed(mutants))
    running: dict[int, Mutant] = {}  # by the process
    with results.open("a", encoding="utf-8") as file, tqdm(total=len(mutants), unit="mutant", disable=None) as bar:
        while running or waiting:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                mine = runs(mutant)
                first = next(mine, None)
                if first is None:
                    file.write(_line(mutant, UNREACHED))
                    bar.update()
                    continue
                sys.stdout.flush()
                file.flush()
                child = os.fork()
                if child == 0:
                    _run_mutant(mutant, chain((first,), mine), cpu_limit_s, file)
                running[child] = mutant
            if running:
                child, status = os.wait()
                if (ended := running.pop(child, None)) is not None:
                    hung = {"killed_by": "hang", "report": "a run did not end, or ended the process"}
                    file.write(_line(ended, KILLED, **hung) if status else "")  # else it has written its own
                    bar.update()


def _run_mutant(mutant: Mutant, runs: Iterable[tuple[str, int]], cpu_limit_s: float, out: IO[str]) -> None:
    """Run a mutant in a forked process. Never returns: a mutant may break anything, so nothing is cleaned up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limit = int(cpu_limit_s + _GRACE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    signal.setitimer(signal.ITIMER_REAL, 10 * limit)  # one that waits forever uses no CPU time
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        _try_mutant(mutant, runs, cpu_limit_s, out)
    finally:
        os._exit(int(sys.exc_info()[0] is not None))


def _line(mutant: Mutant, state: str, **more: object) -> str:
    fields = {name: getattr(mutant, name) for name in ("id", "path", "line", "rule", "function")}
    return json.dumps(asdict(Result(**fields, edit=str(mutant), state=state, **more))) + "\n"  # type: ignore[arg-type]


def read_results(path: Path) -> dict[str, Result]:
    """The latest result of each mutant in the file; none if there is no file."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())
    return {line["id"]: Result(**{**line, "named": tuple(line["named"])}) for line in lines}


def known_survivors() -> dict[str, str]:
    """Why each of those that ``survivors.txt`` lists survives, by its id."""
    lines = _KNOWN.read_text(encoding="utf-8").splitlines()
    return {line.split()[0]: line.partition("]: ")[2] for line in lines}


def report(results: Sequence[Result], known: Collection[str]) -> str:
    """How many were killed, how many of them by name, and each survivor; those that are not ``known`` are losses."""
    killed = [one for one in results if one.killed]
    survivors = sorted((one for one in results if not one.killed), key=lambda one: (one.path, one.line))
    counts = f"{len(killed)} of {len(results)} killed, {sum(one.by_name for one in killed)} of these by name."
    lines = [f"{one.id} {one.edit}: {one.state}{'' if one.id in known else ', LOST'}" for one in survivors]
    return "\n".join([counts, "", *lines]) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fenceline_proof.mutate",
        description="Makes faults of memory order in the engine's source by rule, one at a time: do the proof's runs"
        " fail? Exits with 1 if a mutant survives that survivors.txt does not list.",
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the mutants and do nothing")
    add("--id", nargs="+", metavar="ID", help="these mutants")
    add("--cpu-limit", type=float, default=60.0, metavar="SECONDS", help="CPU time for a mutant")
    add(
        "--trace-seeds", type=int, default=3, metavar="N",
        help="runs of each workload that are traced, to know which lines they execute",
    )  # fmt: skip
    add("--workload", nargs="+", metavar="NAME", help="these workloads, whether they come to the line or not")
    add("--jobs", type=int, default=1, metavar="N", help="mutants at a time")
    add(
        "--results", type=Path, default=Path("mutation.jsonl"), metavar="FILE",
        help="results are added to it; mutants that it has are not tried again",
    )  # fmt: skip
    add("--write", action="store_true", help="list the survivors in survivors.txt; give each new one a reason")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a mutant survives that is not known to."""
    args = _parser().parse_args(argv)
    chosen = [mutant for mutant in all_mutants() if args.id is None or mutant.id in args.id]
    chosen = Random(0).sample(chosen, len(chosen))
    if args.list:
        print(*chosen, sep="\n")
        return 0
    done = read_results(args.results)
    mutants = [mutant for mutant in chosen if mutant.id not in done]
    if mutants:
        runs = _runs(args)
        for name in _LOADED_BEFORE:
            importlib.import_module(name)
        _campaign(mutants, runs, args.jobs, args.cpu_limit, args.results)
    ids = {mutant.id for mutant in chosen}
    results = [result for result in read_results(args.results).values() if result.id in ids]
    known = known_survivors()
    if args.write:
        left = sorted((one.path, one.line, one) for one in results if not one.killed)
        lines = (f"{one.id} {one.path} {one.function} [{one.rule}]: {known.get(one.id, '')}\n" for _, _, one in left)
        _KNOWN.write_text("".join(lines), encoding="utf-8")
        known = known_survivors()
    print(report(results, known))
    return int(any(not result.killed and result.id not in known for result in results))


def _runs(args: argparse.Namespace) -> Callable[[Mutant], Iterator[tuple[str, int]]]:
    if args.workload:
        return lambda mutant: ((name, seed) for seed in count() for name in args.workload)
    traced = trace_runs(args.trace_seeds, args.jobs)
    return lambda mutant: runs_for((mutant.path, mutant.statement), traced)


if __name__ == "__main__":
    sys.exit(main())
