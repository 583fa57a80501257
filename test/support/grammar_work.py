"""A compile server whose compiler does what a grammar's text says, with a limit of one second of CPU time."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import psutil

from fenceline.constrained import compile_server
from fenceline.constrained.compile_server import Compiled, CompileJob

NUM_CHILDREN = 2


def work(job: CompileJob) -> Compiled:
    """Compile: ``loop`` never ends, ``eat`` takes all memory, ``crash`` crashes, ``kill`` is killed, ``stop`` is
    stopped, ``refuse`` is refused, ``no files`` finds no file free; ``limit all``, ``stop all`` and ``kill all`` limit
    the memory of the process that compiles all grammars, stop it and kill it; anything else is compiled."""
    match job.spec.text:
        case "loop":
            while True:
                pass
        case "eat":
            return Compiled(0, b"".join([bytes(1 << 28) for _ in range(1000)]))
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
    return Compiled(job.id, job.spec.text.encode()[:4] * 100_000)  # more than a pipe holds


def serve_work(connection: Connection, num_failing_forks: int = 0, max_wall_s: float = 30.0) -> None:
    """The entry of a process. Its first ``num_failing_forks`` forks fail, as they do when processes are short."""
    compile_server.MAX_CPU_S = 1
    compile_server.MAX_WALL_S = max_wall_s
    compile_server.os.fork = _failing_first(num_failing_forks, os.fork)  # type: ignore[misc]
    memory = psutil.Process().memory_info().vms + (1 << 28)
    compile_server.CompileServer(connection, NUM_CHILDREN, memory, work).run()


def serve_from_source(connection: Connection, num_children: int) -> None:
    """:func:`serve_work` as the front end starts it. The text of the tokenizer says what becomes of the start:
    ``stop`` or ``no memory``; with any other it succeeds."""
    source = msgspec.msgpack.decode(connection.recv_bytes(), type=compile_server.VocabularySource)
    match source.tokenizer_json:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "no memory":
            error = Compiled(0, error="MemoryError: no memory")
            connection.send_bytes(msgspec.msgpack.encode(error))
            return
    connection.send_bytes(msgspec.msgpack.encode(Compiled(0, b"vocabulary")))
    serve_work(connection)


def _failing_first(count: int, fork: Callable[[], int]) -> Callable[[], int]:
    failures = iter(range(count))

    def maybe() -> int:
        if next(failures, None) is not None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    return maybe
