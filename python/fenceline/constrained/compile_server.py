"""The process that compiles grammars, each in a separate child process with limits on time and memory.

A compiler cannot be stopped from inside, and a schema of a few hundred bytes can keep it busy for minutes. This
process loads the library and the vocabulary once, and forks a child for every grammar. If the child does not return the
grammar within its limits, the grammar is refused. Several children can run at the same time.

Only what a grammar itself causes is a refusal. A shortage, of memory or processes, passes: it fails the one job, or the
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

import msgspec
import psutil

from fenceline.constrained.spec import GrammarSpec

logger = logging.getLogger(__name__)

MAX_CPU_S = 5
SHORT_CPU_S = 0.25  # of a first attempt
MAX_WALL_S = 30.0  # more than MAX_CPU_S, because the machine may be busy
MAX_MEMORY_BYTES = 1 << 30  # more than the process has from which the child is forked
_NICENESS = 10  # the HTTP server and an engine on a CPU come first
_EXIT_FAILED, _EXIT_SHORTAGE = 1, 2  # of a child: the grammar needs too much, or the machine has too little
_PROBE_BYTES = 64 << 20  # if these cannot be had, it is the machine that is short of memory
_READ_BYTES = 1 << 20


class CompileJob(msgspec.Struct, frozen=True):
    """A grammar to be compiled. ``is_short``: given up, for now, after ``SHORT_CPU_S``."""

    id: int
    spec: GrammarSpec
    max_whitespace: int | None
    is_short: bool = False


class Compiled(msgspec.Struct, frozen=True):
    """The result of a job: the grammar, or why there is none. The first result of a process has ``id`` 0 and the
    vocabulary, or why the process could not start. ``is_refused``: the grammar itself causes the error, so that another
    attempt would fail too. ``is_given_up``: a short job has taken too long; whether the grammar compiles is not
    known. ``notes``: lines for the log, of a small number of kinds."""

    id: int
    data: bytes = b""
    error: str = ""
    is_refused: bool = False
    is_given_up: bool = False
    notes: tuple[str, ...] = ()


class VocabularySource(msgspec.Struct, frozen=True):
    """See :func:`fenceline.constrained.compile.make_vocabulary`."""

    tokenizer_json: str
    special_ids: frozenset[int]
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Child:
    id: int
    pid: int
    file: int  # the pipe's end that is read
    deadline: float
    parts: list[bytes] = field(default_factory=list)


def serve(connection: Connection, num_children: int) -> None:
    """The process's main function: receive a VocabularySource, load the library, send the vocabulary, and compile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        source = msgspec.msgpack.decode(connection.recv_bytes(), type=VocabularySource)
        from fenceline.constrained.compile import compile_grammar, make_vocabulary

        vocabulary = make_vocabulary(source.tokenizer_json, source.special_ids, source.vocab_size, source.eos_token_ids)
        connection.send_bytes(msgspec.msgpack.encode(Compiled(0, vocabulary.serialize_json().encode())))
    except EOFError:
        return
    except Exception as error:
        logger.exception("the process that compiles grammars cannot start")
        connection.send_bytes(msgspec.msgpack.encode(Compiled(0, error=f"{type(error).__name__}: {error}")))
        return
    # Only now: for the vocabulary all requests with a grammar wait, and with a lower priority they would on a busy CPU
    # for minutes.
    os.nice(_NICENESS)
    memory = psutil.Process().memory_info().vms + MAX_MEMORY_BYTES

    def compiled(job: CompileJob) -> Compiled:
        notes: list[str] = []
        data = compile_grammar(vocabulary, job.spec, job.max_whitespace, notes.append)
        return Compiled(job.id, data, notes=tuple(dict.fromkeys(notes)))

    CompileServer(connection, num_children, memory, compiled).run()


class CompileServer:
    """Compiles the jobs that come on ``connection`` with ``work``, ``num_children`` at a time, each in a process that
    may have an address space of ``memory`` bytes."""

    def __init__(
        self, connection: Connection, num_children: int, memory: int, work: Callable[[CompileJob], Compiled]
    ) -> None:
        self._connection = connection
        self._num_children = num_children
        self._memory = memory
        self._work = work
        self._jobs: deque[CompileJob] = deque()
        self._children: dict[int, _Child] = {}  # by file

    def run(self) -> None:
        """Compile the jobs that come until the other end is closed, then kill all children."""
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
                self._jobs.append(msgspec.msgpack.decode(self._connection.recv_bytes(), type=CompileJob))
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

    def _start(self, job: CompileJob) -> None:
        ends: tuple[int, ...] = ()
        try:
            ends = read, write = os.pipe()
            pid = os.fork()
        except OSError as error:  # no more processes, memory or files: the next job may have better luck
            for end in ends:
                os.close(end)
            self._send(Compiled(job.id, error=f"{_SHORT} ({error.strerror})"))
            return
        if pid == 0:
            try:
                # Without the connection: as long as any process has it open, the front end sees no end of it.
                for inherited in (self._connection.fileno(), read, *self._children):
                    os.close(inherited)
                _compile_and_write(self._work, job, write, self._memory)
            finally:
                os._exit(_EXIT_FAILED)
        os.close(write)
        self._children[read] = _Child(job.id, pid, read, time.monotonic() + MAX_WALL_S)

    def _read(self, child: _Child) -> None:
        data = os.read(child.file, _READ_BYTES)
        if data:
            child.parts.append(data)
            return
        os.close(child.file)
        del self._children[child.file]
        _, status = os.waitpid(child.pid, 0)
        self._send(_result(child, os.waitstatus_to_exitcode(status)))

    def _send(self, made: Compiled) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(made))


_SHORT = "memory or processes are short: try again later"


def _result(child: _Child, status: int) -> Compiled:
    if status == 0:
        made = msgspec.msgpack.decode(b"".join(child.parts), type=Compiled)
        return msgspec.structs.replace(made, id=child.id)
    if status == -signal.SIGPROF:
        return Compiled(child.id, is_given_up=True)
    smaller = "make it or its lengths smaller, or nest it less deeply"
    if status == -signal.SIGXCPU:
        return Compiled(child.id, error=f"it takes more than {MAX_CPU_S} s to compile: {smaller}", is_refused=True)
    if status == -signal.SIGKILL:  # by us, or by the system because memory is short
        reason = f"it was not compiled within {MAX_WALL_S:g} s, or memory is short: try again later"
        return Compiled(child.id, error=reason)
    if status == _EXIT_SHORTAGE:
        return Compiled(child.id, error=_SHORT)
    # The limit on memory is for this child alone, so the grammar itself needs too much, and would the next time too.
    reason = f"the compiler failed, or needs more than {MAX_MEMORY_BYTES >> 20} MiB: {smaller}"
    return Compiled(child.id, error=reason, is_refused=True)


def _compile_and_write(work: Callable[[CompileJob], Compiled], job: CompileJob, file: int, memory: int) -> None:
    """What a child does: compile ``job`` within its limits, write the result to ``file`` and exit."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_smaller(memory, hard), hard))
        if job.is_short:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, SHORT_CPU_S)
        quiet = os.open(os.devnull, os.O_WRONLY)  # the library prints warnings about what is refused
        os.dup2(quiet, sys.stderr.fileno())
        try:
            made = work(job)
        except ValueError as error:
            reason = str(error) or "the compiler gives no reason"
            made = Compiled(job.id, error=reason, is_refused=True)
        except RecursionError:
            made = Compiled(job.id, error="it is nested too deeply", is_refused=True)
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
    """Whether there is no memory even without the limit on this process: then the grammar is not to blame."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        mmap.mmap(-1, _PROBE_BYTES).close()
    except OSError:
        return True
    return False
