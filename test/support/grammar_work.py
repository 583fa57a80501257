"""A compile server whose compiler does what a grammar's text says, with a limit of one second of CPU time."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import msgspec
import psutil

from fenceline.constrained.compile_server import COMPILING, CompileJob, VocabularySource
from fenceline.ipc import forked_jobs
from fenceline.ipc.forked_jobs import JobResult, JobServer

NUM_CHILDREN = 2


def work(job: CompileJob) -> JobResult:
    """Compile: ``loop`` never ends, ``eat`` takes all memory, ``crash`` crashes, ``kill`` is killed, ``stop`` is
    stopped, ``refuse`` is refused, ``no files`` finds no file free; ``limit all``, ``stop all`` and ``kill all`` limit
    the memory of the process that compiles all grammars, stop it and kill it; anything else is compiled."""
    match job.spec.text:
        case "loop":
            while True:
                pass
        case "eat":
            return JobResult(0, b"".join([bytes(1 << 28) for _ in range(1000)]))
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stop all":
            os.kill(os.getppid(), signal.SIGSTOP)
        case "kill all":
            os.kill(os.getppid(), signal.SIGKILL)
        case "limit all":
            used = psutil.Process(os.getppid()).memory_info().vms
            hard = (used + (1 << 26), used + (1 << 26))
            resource.prlimit(os.getppid(), resource.RLIMIT_AS, hard)
        case "no files":
            raise OSError(errno.EMFILE, "too many open files")
        case "refuse":
            raise ValueError("this is why")
    return JobResult(job.id, job.spec.text.encode()[:4] * 100_000)  # more than a pipe holds


def serve_work(connection: Connection, num_failing_forks: int = 0, max_wall_s: float = 30.0) -> None:
    """The entry of a process. Its first ``num_failing_forks`` forks fail, as they do when processes are short."""
    limits = replace(COMPILING, cpu_s=1, wall_s=max_wall_s, memory_bytes=1 << 28)
    forked_jobs.os.fork = _failing_first(num_failing_forks, os.fork)  # type: ignore[misc]
    JobServer(connection, NUM_CHILDREN, limits, CompileJob, work).run()


def serve_from_source(connection: Connection, num_children: int) -> None:
    """:func:`serve_work` as the front end starts it. The text of the tokenizer says what becomes of the start:
    ``stop`` or ``no memory``; with any other it succeeds."""
    source = msgspec.msgpack.decode(connection.recv_bytes(), type=VocabularySource)
    match source.tokenizer_json:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "no memory":
            error = JobResult(0, error="MemoryError: no memory")
            connection.send_bytes(msgspec.msgpack.encode(error))
            return
    connection.send_bytes(msgspec.msgpack.encode(JobResult(0, b"vocabulary")))
    serve_work(connection)


def _failing_first(count: int, fork: Callable[[], int]) -> Callable[[], int]:
    failures = iter(range(count))

    def maybe() -> int:
        if next(failures, None) is not None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    return maybe
