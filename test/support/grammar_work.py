"""A compile server whose compiler does what a grammar's text says, with a limit of one second of CPU time."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import psutil

from fenceline.constrained import compile_server
from fenceline.constrained.compile_server import CompileJob

NUM_CHILDREN = 2


def work(job: CompileJob) -> bytes:
    """Compile: ``loop`` never ends, ``eat`` takes all memory, ``crash`` crashes, ``kill`` is killed, ``refuse`` is
    refused; anything else is compiled."""
    match job.spec.text:
        case "loop":
            while True:
                pass
        case "eat":
            return b"".join([bytes(1 << 28) for _ in range(1000)])
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "refuse":
            raise ValueError("this is why")
    return job.spec.text.encode() * 100_000  # more than a pipe holds


def serve_work(connection: Connection) -> None:
    """The entry of a process."""
    compile_server.MAX_CPU_S = 1
    memory = psutil.Process().memory_info().vms + (1 << 28)
    compile_server._Server(connection, NUM_CHILDREN, memory, work).run()
