"""Jobs that clients can make arbitrarily expensive, each in a separate child process with limits on time and memory.

Work inside a library cannot be stopped: a schema of a few hundred bytes can keep a compiler busy for minutes, and an
image a decoder. A job server loads the library once, and forks a child for every job. If the child does not return a
result within its limits, the job is refused. Several children can run at the same time.

Only what a job itself causes is a refusal. A shortage, of memory or processes, passes: it fails the one job, or the
start of the process, and the front end may try again.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

import msgspec
import psutil

logger = logging.getLogger(__name__)

_NICENESS = 10  # the HTTP server and an engine on a CPU come first
_EXIT_FAILED, _EXIT_SHORTAGE = 1, 2  # of a child: the job needs too much, or the machine has too little
_PROBE_BYTES = 64 << 20  # if these cannot be had, it is the machine that is short of memory
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What one job may take. ``short_cpu_s``: that of a first attempt. ``wall_s``: more than ``cpu_s``, because the
    machine may be busy. ``memory_bytes``: more than the process has from which the child is forked. ``done``: what
    becomes of a job within its limits, as in "it is decoded"; ``smaller``: what a client can do if it does not."""

    cpu_s: int
    short_cpu_s: float
    wall_s: float
    memory_bytes: int
    done: str
    smaller: str


class Job(msgspec.Struct, frozen=True):
    """A job of a number of its own above 0. ``is_short``: given up, for now, after ``short_cpu_s``."""

    id: int
    is_short: bool


class JobResult(msgspec.Struct, frozen=True):
    """The result of a job: its data, or why there are none. The first result of a process has ``id`` 0 and what the
    process found out at its start, or why it could not start. ``is_refused``: the job itself causes the error, so that
    another attempt would fail too. ``is_given_up``: a short job has taken too long; whether it can be done is not
    known. ``notes``: lines for the log, of a small number of kinds."""

    id: int
    data: bytes = b""
    error: str = ""
    is_refused: bool = False
    is_given_up: bool = False
    notes: tuple[str, ...] = ()


J = TypeVar("J", bound=Job)
Work = Callable[[J], JobResult]


@dataclass(slots=True)
class _Child:
    id: int
    pid: int
    file: int  # the pipe's end that is read
    deadline: float
    parts: list[bytes] = field(default_factory=list)


def serve_jobs(
    connection: Connection,
    num_children: int,
    limits: JobLimits,
    job_type: type[J],
    begin: Callable[[bytes], tuple[bytes, Work[J]]],
) -> None:
    """The process's main function: receive one message, send the data that ``begin`` makes of it, and do jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        data, work = begin(connection.recv_bytes())
        connection.send_bytes(msgspec.msgpack.encode(JobResult(0, data)))
    except EOFError:
        return
    except Exception as error:
        logger.exception("a process for jobs cannot start")
        connection.send_bytes(msgspec.msgpack.encode(JobResult(0, error=f"{type(error).__name__}: {error}")))
        return
    # Only now: for its start all requests with a job wait, and with a lower priority they would on a busy CPU for
    # minutes.
    os.nice(_NICENESS)
    JobServer(connection, num_children, limits, job_type, work).run()


class JobServer(Generic[J]):
    """Does the jobs that come on ``connection`` with ``work``, ``num_children`` at a time, each in a process of its
    own."""

    def __init__(
        self, connection: Connection, num_children: int, limits: JobLimits, job_type: type[J], work: Work[J]
    ) -> None:
        self._connection = connection
        self._num_children = num_children
        self._limits = limits
        self._memory = psutil.Process().memory_info().vms + limits.memory_bytes
        self._decoder = msgspec.msgpack.Decoder(job_type)
        self._work = work
        self._jobs: deque[J] = deque()
        self._children: dict[int, _Child] = {}  # by file

    def run(self) -> None:
        """Do the jobs that come until the other end is closed, then kill all children."""
        try:
            while True:
                self._turn()
        except (EOFError, ConnectionError):
            pass
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _turn(self) -> None:
        for ready in wait([self._connection, *self._children], self._timeout_s()):
            if ready is self._connection:
                self._jobs.append(self._decoder.decode(self._connection.recv_bytes()))
            elif isinstance(ready, int):
                self._read(self._children[ready])
        now = time.monotonic()
        for child in self._children.values():
            if child.deadline <= now:
                os.kill(child.pid, signal.SIGKILL)  # its pipe then ends
        while self._jobs and len(self._children) < self._num_children:
            self._start(self._jobs.popleft())

    def _timeout_s(self) -> float | None:
        if not self._children:
            return None
        return max(min(child.deadline for child in self._children.values()) - time.monotonic(), 0.05)

    def _start(self, job: J) -> None:
        ends: tuple[int, ...] = ()
        try:
            ends = read, write = os.pipe()
            pid = os.fork()
        except OSError as error:  # no more processes, memory or files: the next job may have better luck
            for end in ends:
                os.close(end)
            self._send(JobResult(job.id, error=f"{_SHORT} ({error.strerror})"))
            return
        if pid == 0:
            try:
                # Without the connection: as long as any process has it open, the front end sees no end of it.
                for inherited in (self._connection.fileno(), read, *self._children):
                    os.close(inherited)
                _work_and_write(self._work, job, write, self._memory, self._limits)
            finally:
                os._exit(_EXIT_FAILED)
        os.close(write)
        self._children[read] = _Child(job.id, pid, read, time.monotonic() + self._limits.wall_s)

    def _read(self, child: _Child) -> None:
        data = os.read(child.file, _READ_BYTES)
        if data:
            child.parts.append(data)
            return
        os.close(child.file)
        del self._children[child.file]
        _, status = os.waitpid(child.pid, 0)
        self._send(_result(child, os.waitstatus_to_exitcode(status), self._limits))

    def _send(self, made: JobResult) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(made))


_SHORT = "memory or processes are short: try again later"


def _result(child: _Child, status: int, limits: JobLimits) -> JobResult:
    if status == 0:
        made = msgspec.msgpack.decode(b"".join(child.parts), type=JobResult)
        return msgspec.structs.replace(made, id=child.id)
    if status == -signal.SIGPROF:
        return JobResult(child.id, is_given_up=True)
    done, smaller = limits.done, limits.smaller
    if status == -signal.SIGXCPU:
        reason = f"it is not {done} in {limits.cpu_s} s of CPU time: {smaller}"
        return JobResult(child.id, error=reason, is_refused=True)
    if status == -signal.SIGKILL:  # by us, or by the system because memory is short
        reason = f"it was not {done} within {limits.wall_s:g} s, or memory is short: try again later"
        return JobResult(child.id, error=reason)
    if status == _EXIT_SHORTAGE:
        return JobResult(child.id, error=_SHORT)
    # The limit on memory is for this child alone, so the job itself needs too much, and would the next time too.
    reason = f"it cannot be {done}, or needs more than {limits.memory_bytes >> 20} MiB: {smaller}"
    return JobResult(child.id, error=reason, is_refused=True)


def _work_and_write(work: Work[J], job: J, file: int, memory: int, limits: JobLimits) -> None:
    """What a child does: ``job`` within its limits, write the result to ``file`` and exit."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_smaller(memory, hard), hard))
        if job.is_short:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, limits.short_cpu_s)
        quiet = os.open(os.devnull, os.O_WRONLY)  # libraries print warnings about what they refuse
        os.dup2(quiet, sys.stderr.fileno())
        try:
            made = work(job)
        except ValueError as error:
            made = JobResult(job.id, error=str(error) or "no reason is given", is_refused=True)
        except RecursionError:
            made = JobResult(job.id, error="it is nested too deeply", is_refused=True)
        left = memoryview(msgspec.msgpack.encode(made))
        while left:
            left = left[os.write(file, left) :]
        os._exit(0)
    except MemoryError:
        os._exit(_EXIT_SHORTAGE if _memory_is_short() else _EXIT_FAILED)
    except OSError as error:
        os._exit(_EXIT_SHORTAGE if error.errno in _SHORTAGES else _EXIT_FAILED)


_SHORTAGES = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


def _smaller(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _memory_is_short() -> bool:
    """Whether there is no memory even without the limit on this process: then the job is not to blame."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        mmap.mmap(-1, _PROBE_BYTES).close()
    except OSError:
        return True
    return False
