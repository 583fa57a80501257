"""``python -m fenceline_proof.mutate``: tests the proof with faults made by rules, one at a time, until a run fails.

First some runs of the intact engine are traced, to know which of them execute which line. Each mutant
(``proving/mutants.py``) runs in a separate process, in which the changed file is imported: those runs that execute its
line, and more seeds of their workloads, until a check fails or the mutant has used its CPU time. In the second case it
is a survivor, and so is one whose line no traced run executes. A person reviews survivors
(``docs/mutation_review.json``) as equivalent (no run can tell it from the original), benign (it costs work, but changes
no answer) or a hole in the proof. Results are added to a file as they come, so a campaign can be stopped, continued and
divided over machines.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from types import CodeType, ModuleType
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
_UNSPECIFIC = ("tokens", "answers", "invariants", "deadlock", "kernels")
_EXCEPTIONS = ("invariants", "kernels")  # reports of these have the lines that an exception has come through
# Reports that name a call, or memory, and what is right. Those of trees do if they are about one operation.
_RECORDS = (
    "storage: ", "memory: ", "captures: ", "contracts: ", "pages: ", "tiers: ", "storage's files: ", "prefill plans: ",
    "in time: ", "trees: a load ", "trees: page ",
)  # fmt: skip
_REVIEW = PACKAGE.parent.parent / "docs" / "mutation_review.json"
_PAGE = PACKAGE.parent.parent / "docs" / "mutation.md"
_TABLE = "<!-- written by python -m fenceline_proof.mutate --report --write-docs -->"
_GRACE_S = 30.0  # of CPU time beyond a mutant's limit; a run that takes longer hangs, and has failed
_SLOWNESS = (
    1.2  # seconds that a second of CPU time takes, for the last mutants of a campaign with a time limit
)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a mutant. ``killed_by``: the check that failed; ``named``: the edges and guards in its report."""

    id: str
    path: str
    line: int
    rule: str
    ordering: bool
    old: str
    text: str
    state: str
    killed_by: str = ""
    named: tuple[str, ...] = ()
    by_name: bool = False
    workload: str = ""
    seed: int = 0
    num_runs: int = 0
    cpu_s: float = 0.0
    report: str = ""
    function: str = ""

    @property
    def killed(self) -> bool:
        """Whether a check failed."""
        return self.state in (KILLED, CRASHED)

    @property
    def place(self) -> str:
        """Where, and what was changed."""
        old, new = (" ".join(text.split()) for text in (self.old, self.text))
        name = f" {self.function}" if self.function else ""
        return f"{self.path}:{self.line}{name} [{self.rule}] {old}  ->  {new}"


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from changed source, never from a compiled file."""

    def __init__(self, mutant: Mutant) -> None:
        path = PACKAGE / mutant.path
        super().__init__(mutant.module, str(path))
        self._source = mutant.apply(path.read_text(encoding="utf-8"))

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the mutant's module, and leaves all others to Python."""

    def __init__(self, mutant: Mutant) -> None:
        self._loader = _Loader(mutant)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._loader.name:
            return None
        file = Path(self._loader.path)
        below = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, loader=self._loader, submodule_search_locations=below
        )


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
    """Each workload's share of the proof's runs."""
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
        Path(file).relative_to(PACKAGE).as_posix(): frozenset(data.lines(file) or ())
        for file in data.measured_files()
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
    sys.meta_path.insert(0, _Finder(mutant))

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
    meant = {
        name for name in (*EDGES, *GUARDS) if name.upper() in words
    }  # constants: a variable may have such a name
    if meant:
        return bool(meant & {edge_of(name) for name in named})
    return bool(named) or checker not in _UNSPECIFIC or report.startswith(_RECORDS)


def _campaign(
    mutants: Sequence[Mutant],
    runs: Callable[[Mutant], Iterator[tuple[str, int]]],
    jobs: int,
    cpu_limit_s: float,
    results: Path,
    deadline: float,
) -> None:
    """Fork a process for each mutant for which there are ``runs``, each a workload and a seed, ``jobs`` at a time,
    until ``deadline`` of ``time.monotonic``.

    A mutant begins only if there is time for it to use up its CPU time. If slow ones were cut off at the end, most of
    these would be survivors, and the results would look better than they are.
    """
    torch.set_num_threads(1)
    waiting = list(reversed(mutants))
    running: dict[int, tuple[int, Mutant]] = {}  # by the pipe's end
    last_start = deadline - _SLOWNESS * cpu_limit_s
    with (
        results.open("a", encoding="utf-8") as file,
        tqdm(total=len(mutants), unit="mutant", disable=None) as bar,
    ):
        while running or (waiting and time.monotonic() < last_start):
            while waiting and len(running) < jobs and time.monotonic() < last_start:
                mutant = waiting.pop()
                mine = runs(mutant)
                first = next(mine, None)
                if first is None:
                    file.write(_line(mutant, UNREACHED))
                    bar.update()
                    continue
                read_end, write_end = os.pipe()
                sys.stdout.flush()
                file.flush()
                child = os.fork()
                if child == 0:
                    os.close(read_end)
                    _run_mutant(mutant, chain((first,), mine), cpu_limit_s, write_end)
                os.close(write_end)
                running[read_end] = (child, mutant)
            left_s = None if deadline == math.inf else max(deadline - time.monotonic(), 0)
            ended = select.select(list(running), [], [], left_s)[0] if running else []
            for read_end in ended:
                child, mutant = running.pop(read_end)
                with open(read_end, encoding="utf-8") as pipe:
                    line = pipe.read()
                os.waitpid(child, 0)
                hung = "a run did not end, or ended the process"
                file.write(line or _line(mutant, KILLED, killed_by="hang", report=hung))
                file.flush()
                bar.update()
            if (
                running and not ended
            ):  # the time is over: these have no result, and are tried again the next time
                for read_end, (child, _) in running.items():
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    os.close(read_end)
                running.clear()


def _run_mutant(mutant: Mutant, runs: Iterable[tuple[str, int]], cpu_limit_s: float, write_end: int) -> None:
    """Run a mutant in a forked process. Never returns: a mutant may break anything, so nothing is cleaned up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limit = int(cpu_limit_s + _GRACE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    signal.setitimer(signal.ITIMER_REAL, 10 * limit)  # one that waits forever uses no CPU time
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with open(write_end, "w", encoding="utf-8") as out:
        _try_mutant(mutant, runs, cpu_limit_s, out)
        out.flush()
        os._exit(0)


def _line(mutant: Mutant, state: str, **more: object) -> str:
    """A result as a line of the results' file."""
    fields = {
        name: getattr(mutant, name)
        for name in ("id", "path", "line", "rule", "ordering", "old", "text", "function")
    }
    return json.dumps(asdict(Result(**fields, state=state, **more))) + "\n"  # type: ignore[arg-type]


def read_results(*paths: Path) -> dict[str, Result]:
    """The latest result of each mutant in the files; one that does not exist has none."""
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    lines = (json.loads(line) for text in texts for line in text.splitlines())
    return {line["id"]: Result(**{**line, "named": tuple(line["named"])}) for line in lines}


def report(results: dict[str, Result], reviews: dict[str, dict[str, str]], num_mutants: int) -> str:
    """What the results say, as Markdown: tables by folder, file and rule, what has killed the mutants, the functions
    that no traced run has come to, and each survivor with its review. ``num_mutants``: all that the rules make."""
    tried = list(results.values())
    lines = _table("folder", tried, lambda one: one.path.partition("/")[0], reviews)
    counted = [one for one in tried if reviews.get(one.id, {}).get("verdict") != "equivalent"]
    low, high = _interval(sum(one.killed for one in counted), len(counted))
    lines += [
        "",
        f"{len(results)} of {num_mutants:,} mutants were tried, in random order. So of all that are not equivalent"
        f" {low:.1%} to {high:.1%} are killed (95% confidence).",
    ]
    killed, survivors = [one for one in tried if one.killed], [one for one in tried if not one.killed]
    checkers = Counter(one.killed_by for one in killed)
    lines += ["", "Killed by: " + ", ".join(f"{name} {num}" for name, num in checkers.most_common()) + "."]
    workloads = Counter(one.workload for one in killed if one.workload)
    lines += ["", "In: " + ", ".join(f"{name} {num}" for name, num in workloads.most_common()) + "."]
    verdicts = Counter(_verdict(one, reviews) for one in survivors)
    lines += ["", "Survivors: " + ", ".join(f"{name} {num}" for name, num in verdicts.most_common()) + "."]
    lines += ["", *_table("rule", tried, lambda one: one.rule, reviews)]
    lines += ["", *_table("file", tried, lambda one: one.path, reviews)]
    unreached = Counter((one.path, one.function) for one in survivors if one.state == UNREACHED)
    lines += ["", "## Not reached", ""]
    lines += [f"* `{path}` `{name}`: {num}" for (path, name), num in sorted(unreached.items())]
    lines += ["", "## Survivors", ""]
    for one in sorted(survivors, key=lambda one: (one.path, one.line)):
        why = reviews.get(one.id, {}).get("why", "")
        lines.append(f"* `{one.id}` `{one.place}`: {_verdict(one, reviews)}. {why}".rstrip())
    return "\n".join(lines) + "\n"


def _verdict(survivor: Result, reviews: dict[str, dict[str, str]]) -> str:
    return reviews.get(survivor.id, {}).get("verdict", f"not reviewed ({survivor.state})")


def _table(
    name: str, results: Sequence[Result], group: Callable[[Result], str], reviews: dict[str, dict[str, str]]
) -> list[str]:
    heads = (
        name, "mutants", "killed", "equivalent", "killed of the others", "killed in ordering", "of these by name",
    )  # fmt: skip
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[group(result)].append(result)
    rows = [*sorted(groups.items()), ("**all**", results)]
    lines = ["".join(f"| {head} " for head in heads) + "|", "|---" * len(heads) + "|"]
    return lines + [_row(name, mine, reviews) for name, mine in rows]


def _interval(num_killed: int, num: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share of which ``num_killed`` of ``num`` is a sample."""
    if num == 0:
        return 0.0, 1.0
    share, z = num_killed / num, 1.96
    middle = share + z * z / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return (middle - spread) / (1 + z * z / num), (middle + spread) / (1 + z * z / num)


def _row(name: str, results: Sequence[Result], reviews: dict[str, dict[str, str]]) -> str:
    survivors = [result for result in results if not result.killed]
    equivalent = sum(reviews.get(one.id, {}).get("verdict") == "equivalent" for one in survivors)
    num_killed = len(results) - len(survivors)
    ordering = [result for result in results if result.ordering and result.killed]
    named = sum(result.by_name for result in ordering)
    shares = (num_killed / max(len(results) - equivalent, 1), named / max(len(ordering), 1))
    cells = (
        name,
        len(results),
        num_killed,
        equivalent,
        f"{shares[0]:.1%}",
        len(ordering),
        f"{shares[1]:.0%}",
    )
    return "".join(f"| {cell} " for cell in cells) + "|"


def _chosen(args: argparse.Namespace) -> list[Mutant]:
    def wanted(mutant: Mutant) -> bool:
        return (
            (args.only is None or fnmatchcase(mutant.path, args.only))
            and (args.rule is None or mutant.rule == args.rule)
            and (args.id is None or mutant.id in args.id)
            and (mutant.ordering or not args.ordering)
        )

    mutants = [mutant for mutant in all_mutants() if wanted(mutant)]
    # In random order, so that the results of a campaign that is stopped are those of a random sample.
    mutants = Random(args.seed).sample(mutants, len(mutants))[: args.sample]
    number, _, shards = args.shard.partition("/")
    return mutants[int(number) - 1 :: int(shards)]


def _runs(args: argparse.Namespace) -> Callable[[Mutant], Iterator[tuple[str, int]]]:
    """The runs to make for a mutant."""
    if args.workload:
        return lambda mutant: ((name, seed) for seed in count() for name in args.workload)
    if args.traced is not None and args.traced.exists():
        lines = [json.loads(line) for line in args.traced.read_text(encoding="utf-8").splitlines()]
        traced = [
            Traced(**{**one, "lines": {path: frozenset(some) for path, some in one["lines"].items()}})
            for one in lines
        ]
    else:
        traced = trace_runs(args.trace_seeds, args.jobs)
    if args.traced is not None and not args.traced.exists():
        texts = (json.dumps(asdict(one), default=sorted) + "\n" for one in traced)
        args.traced.write_text("".join(texts), encoding="utf-8")
    return lambda mutant: runs_for((mutant.path, mutant.statement), traced)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fenceline_proof.mutate",
        description="Makes faults in the engine's source by rule, one at a time: do the proof's runs fail?"
        " Exits with 1 if a mutant that nothing noticed has no review in docs/mutation_review.json.",
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the mutants and do nothing")
    add("--only", metavar="PATTERN", help="files below the package, say 'mem_cache/*'")
    add("--rule", metavar="NAME", help="mutants of this rule alone")
    add("--id", nargs="+", metavar="ID", help="these mutants")
    add("--ordering", action="store_true", help="only those at waits, records, leases and the like")
    add("--sample", type=int, metavar="N", help="the first N of them")
    add("--seed", type=int, default=0, help="their order, which is random")
    add("--shard", default="1/1", metavar="I/N", help="every N-th of them, from the I-th on")
    add("--cpu-limit", type=float, default=60.0, metavar="SECONDS", help="CPU time for a mutant")
    add(
        "--trace-seeds", type=int, default=3, metavar="N",
        help="runs of each workload that are traced, to know which lines they execute",
    )  # fmt: skip
    add(
        "--traced", type=Path, metavar="FILE",
        help="take the traced runs from this file, or write them there if there is none; to be removed when the source"
        " changes",
    )  # fmt: skip
    add("--workload", nargs="+", metavar="NAME", help="these workloads, whether they come to the line or not")
    add("--jobs", type=int, default=1, metavar="N", help="mutants at a time")
    add("--minutes", type=float, metavar="M", help="stop after this time, and keep what there is")
    add(
        "--results", type=Path, default=Path("mutation.jsonl"), metavar="FILE",
        help="results are added to it; mutants that it has are not tried again",
    )  # fmt: skip
    add(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="first add these results, of other shards, to --results",
    )
    add("--report", action="store_true", help="make no runs: print what --results says")
    add("--write-docs", action="store_true", help="put the table and the survivors into docs/mutation.md")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 1 if a survivor has no review."""
    began = time.monotonic()
    parser = _parser()
    args = parser.parse_args(argv)
    deadline = math.inf if args.minutes is None else began + 60 * args.minutes
    if 60 * (args.minutes or math.inf) < 2 * _SLOWNESS * args.cpu_limit:
        parser.error("--minutes: too few for a mutant that uses up --cpu-limit")
    if args.list:
        print(*_chosen(args), sep="\n")
        return 0
    if args.merge:
        merged = read_results(args.results, *args.merge)
        lines = (json.dumps(asdict(result)) + "\n" for result in merged.values())
        args.results.write_text("".join(lines), encoding="utf-8")
    if not args.report:
        known = read_results(args.results)
        mutants = [mutant for mutant in _chosen(args) if mutant.id not in known]
        runs = _runs(args) if mutants else lambda mutant: iter(())
        for name in _LOADED_BEFORE:
            importlib.import_module(name)
        _campaign(mutants, runs, args.jobs, args.cpu_limit, args.results, deadline)
    reviews = json.loads(_REVIEW.read_text(encoding="utf-8"))
    results = read_results(args.results)
    table = report(results, reviews, len(all_mutants()))
    print(table)
    if args.write_docs:
        head = _PAGE.read_text(encoding="utf-8").partition(_TABLE)[0]
        _PAGE.write_text(f"{head}{_TABLE}\n\n{table}", encoding="utf-8")
    return int(any(not result.killed and result.id not in reviews for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
