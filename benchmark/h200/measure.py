"""Runs a list of benchmarks and tests on one GPU machine within a given time, and keeps all logs in any case.

    python benchmark/h200/measure.py --out DIR                                  # measurements.toml, in its order
    python benchmark/h200/measure.py --out DIR --seconds 540 --only "hicache_ttft*" decode_fp8
    python benchmark/h200/measure.py --out DIR --before /tmp/before             # also jobs that compare two checkouts
    python benchmark/h200/measure.py --list

A rented GPU is often available for a few minutes at a time. So a job begins only if its limit fits into the time that
is left, and is stopped at its limit. DIR/logs.tar.xz is written again after every job, with the logs and files of all
jobs so far. Jobs that need only the CPU run beside the others, on cores of their own. The jobs that show whether
something works come first and share the GPUs; then each timed job has as many GPUs as it needs to itself, and jobs
begin in the order of the list as GPUs become free. For each job the list says what its result decides.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIST = HERE / "measurements.toml"
# Cores for each GPU if some jobs use no GPU and run beside the others. If none does, the GPUs share all cores.
_GPU_CORES = 8
_AT_ONCE = 4  # jobs that share a GPU
_STOP_S = 5.0  # the time between SIGTERM and SIGKILL
_USES = ("timed", "gpu", "cpu")


@dataclass(frozen=True)
class Job:
    """One entry of the list.

    ``command``: a line for bash. {python} is this interpreter, {out} a folder for the job's files, and {before} the
    root of the checkout to compare with; without such a checkout the job is not begun. ``use``: "timed" has ``gpus``
    GPUs to itself, "gpu" shares them, and "cpu" uses none and has ``cores`` cores. On a machine with fewer GPUs the job
    is not begun. ``seconds``: the job's limit. ``show``: a regular expression; lines of the log that match it are
    printed at the end. ``decides``: what the result is for.
    """

    name: str
    command: str
    use: str
    seconds: float
    decides: str
    show: str = ""
    cores: int = 2
    gpus: int = 1
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.use not in _USES:
            raise ValueError(f"{self.name}: use is one of {', '.join(_USES)}, not {self.use!r}")
        re.compile(self.show)


@dataclass(frozen=True)
class Result:
    """How a job ended: its exit status, "stopped" at its limit, or "not begun"."""

    job: Job
    status: str
    seconds: float
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.job.name:28} {self.status:>9} {self.seconds:6.0f} s  {self.job.decides}"]
        return "\n".join([*lines, *(f"    {line}" for line in self.shown)])


def read_list(path: Path) -> list[Job]:
    """The jobs of a list; ValueError for an entry that is wrong."""
    try:
        jobs = [Job(**entry) for entry in tomllib.loads(path.read_text())["job"]]
    except (TypeError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    names = [job.name for job in jobs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: two jobs are called {doubled[0]}")
    return jobs


class Measurement:
    """All jobs that are run into one folder within one time."""

    def __init__(
        self, out: Path, seconds: float, before: Path | None, cores: Sequence[int], num_gpus: int, beside: bool = True
    ) -> None:
        """``cores``: the numbers of the CPU cores that may be used. ``beside``: whether there are jobs that use no
        GPU."""
        self._out, self._before = out, before
        self._end = time.monotonic() + seconds
        self._num_gpus = num_gpus
        self._num_cores = _GPU_CORES if beside else max(_GPU_CORES, len(cores) // num_gpus)
        num = self._num_cores * num_gpus
        shared = len(cores) <= num
        self._gpu_cores = list(cores if shared else cores[:num])
        self._free = list(cores if shared else cores[num:])
        self._num_beside = len(self._free)
        self._changed = threading.Condition()
        self._packing = threading.Lock()
        self.results: list[Result] = []
        (out / "logs").mkdir(parents=True, exist_ok=True)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs; ``results`` are in the order of their ends."""
        by_use = {use: [job for job in jobs if job.use == use] for use in _USES}
        with ThreadPoolExecutor(max_workers=len(jobs) + 1) as beside:
            alone = [beside.submit(self._on_free_cores, job) for job in by_use["cpu"]]
            self._on_gpus(by_use["gpu"], _AT_ONCE)
            self._on_gpus(by_use["timed"], 1)
            for future in alone:
                future.result()

    def _on_gpus(self, jobs: Sequence[Job], at_once: int) -> None:
        """Begin the jobs in their order, each as soon as enough GPUs have fewer than ``at_once`` jobs, and wait for all
        of them."""
        places = Counter(dict.fromkeys(range(self._num_gpus), at_once))
        changed = threading.Condition()

        def run(job: Job, gpus: list[int]) -> None:
            cores = [core for gpu in gpus for core in self._gpu_cores[gpu * self._num_cores :][: self._num_cores]]
            env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if self._num_gpus > 1 else None
            try:
                self._run(job, cores or self._gpu_cores, env)
            finally:
                with changed:
                    places.update(gpus)
                    changed.notify_all()

        with ThreadPoolExecutor(max_workers=at_once * self._num_gpus) as running:
            for job in jobs:
                if job.gpus > self._num_gpus:
                    self._end_of(Result(job, "not begun", 0.0))
                    continue
                with changed:
                    changed.wait_for(lambda: len(+places) >= job.gpus)  # noqa: B023
                    gpus = sorted(gpu for gpu, _ in (+places).most_common(job.gpus))
                    places.subtract(gpus)
                running.submit(run, job, gpus)

    def _on_free_cores(self, job: Job) -> None:
        """Wait until as many cores as the job needs are free, and run it on them."""
        num = min(job.cores, self._num_beside)
        with self._changed:
            begins = self._changed.wait_for(
                lambda: len(self._free) >= num, timeout=max(self._end - time.monotonic() - job.seconds, 0)
            )
            cores = [self._free.pop() for _ in range(num)] if begins else []
        if not begins:
            self._end_of(Result(job, "not begun", 0.0))
            return
        try:
            self._run(job, cores, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        finally:
            with self._changed:
                self._free += cores
                self._changed.notify_all()

    def _run(self, job: Job, cores: Sequence[int], env: dict[str, str] | None = None) -> None:
        needs_before = "{before}" in job.command
        if time.monotonic() + job.seconds > self._end or (needs_before and self._before is None):
            self._end_of(Result(job, "not begun", 0.0))
            return
        folder, log = self._out / "logs" / job.name, self._out / "logs" / f"{job.name}.log"
        folder.mkdir(exist_ok=True)
        line = job.command.replace("{out}", shlex.quote(str(folder)))
        line = line.replace("{python}", shlex.quote(sys.executable)).replace("{before}", shlex.quote(str(self._before)))
        start = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", line],
                cwd=ROOT,
                env={**os.environ, **(env or {}), **job.env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_on_cores(cores),
            )
            status = _wait(process, job.seconds)
        shown = tuple(
            text for text in log.read_text(errors="replace").splitlines() if job.show and re.search(job.show, text)
        )
        self._end_of(Result(job, status, time.monotonic() - start, shown))
        self._pack()

    def _end_of(self, result: Result) -> None:
        with self._packing:
            self.results.append(result)
            print(result, flush=True)

    def _pack(self) -> None:
        """Replace the archive: all logs so far, and the files of the jobs that have ended."""
        with self._packing:
            logs, new = self._out / "logs", self._out / "logs.tar.xz.new"
            ended = [logs / result.job.name for result in self.results]
            with tarfile.open(new, "w:xz", preset=1) as archive:
                for path in [*sorted(logs.glob("*.log")), *(folder for folder in ended if folder.exists())]:
                    archive.add(path, f"logs/{path.name}")
            new.replace(self._out / "logs.tar.xz")


def _on_cores(cores: Sequence[int]) -> Callable[[], None] | None:
    if not cores or not hasattr(os, "sched_setaffinity"):
        return None
    return lambda: os.sched_setaffinity(0, cores)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """The exit status of ``process``, or "stopped" at its limit. Other processes in its process group are ended too."""
    status = "stopped"
    try:
        status = str(process.wait(seconds))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status


def main() -> int:
    """1 if a job failed, was stopped or was not begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=Path, default=LIST, metavar="FILE", help="the list (default: measurements.toml)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="names of jobs, or patterns")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of them")
    parser.add_argument("--out", type=Path, help="folder for logs/ and logs.tar.xz")
    parser.add_argument("--before", type=Path, help="root of another checkout, for jobs that compare with one")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of this machine to use")
    parser.add_argument("--list", action="store_true", help="print the jobs and what each decides")
    args = parser.parse_args()
    try:
        jobs = read_list(args.jobs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    jobs = [job for job in jobs if any(fnmatch.fnmatch(job.name, pattern) for pattern in args.only)]
    if args.list:
        for job in jobs:
            print(f"{job.name:28} {job.use:6} {job.seconds:4.0f} s  {job.decides}")
        return 0
    if not jobs or args.out is None:
        parser.error("no job has such a name" if not jobs else "--out DIR is needed")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    before = args.before and args.before.resolve()
    beside = any(job.use == "cpu" for job in jobs)
    measurement = Measurement(args.out.resolve(), args.seconds, before, cores, args.gpus, beside)
    measurement.run(jobs)
    return int(any(result.status != "0" for result in measurement.results))


if __name__ == "__main__":
    sys.exit(main())
