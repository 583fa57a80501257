"""Processes that cost a test no imports: they are forked from one that has imported what servers and scripts need, of
which each process of tests has one. Imports are 3.5 of the 3.8 seconds that the start of a server takes a CPU."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from typing import IO, NoReturn

from fenceline.ipc import child_process
from fenceline.ipc.child_process import starting_children

# None of these imports Triton, which asks for TRITON_INTERPRET when it is imported.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "attention_cases",
        "fenceline.entrypoints.supervisor",
        "fenceline.frontend.detokenizer_manager",
        "fenceline.scheduler.process",
        "triton_interpreter",
        "forking",
    ]
)


class ForkedProgram:
    """A Python program as a process, with what tests use of subprocess.Popen. ``argv``: a file, or ``-m`` and a module,
    and what follows. It and the processes that it starts by multiprocessing have the environment, files and signals
    that a new interpreter would have."""

    def __init__(self, argv: Sequence[str], env: dict[str, str]) -> None:
        reader, writer = FORKING.Pipe(duplex=False)
        self._process = FORKING.Process(target=_serve, args=(list(argv), writer, os.getcwd(), env))
        forkserver.ensure_running()
        with starting_children():
            self._process.start()
        writer.close()
        self.pid: int = self._process.pid or 0
        self.stdout: IO[str] = os.fdopen(os.dup(reader.fileno()))

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        if not wait([self._process.sentinel], timeout) or (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send it unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _serve(argv: list[str], output: Connection, folder: str, env: dict[str, str]) -> None:
    """What the process does that runs the program."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # so that it starts its own
    _as_a_new_program()
    spawn = util.spawnv_passfds  # type: ignore[attr-defined]

    def start(path: bytes, args: Sequence[str], files: Sequence[int]) -> int:
        started: int = _fork(args, files) if "--multiprocessing-fork" in args else spawn(path, args, files)
        return started

    util.spawnv_passfds = start  # type: ignore
    is_module = argv[0] == "-m"
    sys.argv = argv[is_module:]
    if is_module:
        _run(lambda: runpy.run_module(argv[1], run_name="__main__", alter_sys=True))
    else:
        _run(lambda: runpy.run_path(argv[0], run_name="__main__"))


def _fork(args: Sequence[str], files: Sequence[int]) -> int:
    """The id of a process that runs ``args``, a Python program in a string (``-c``), and has these files alone."""
    pid = os.fork()
    if pid == 0:
        kept = sorted({0, 1, 2, *files})
        for first, last in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(first + 1, last)
        _as_a_new_program()
        sys.argv = list(args[-2:])
        _run(lambda: exec(args[-2], {}))
    return pid


def _as_a_new_program() -> None:
    """Keep nothing of the process that forked this one: signals' handlers, locks, what it does at its end."""
    gc.freeze()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    child_process._main_hidden = threading.Lock()


def _run(program: Callable[[], object]) -> NoReturn:
    """Run it and end this process as the interpreter would."""
    status = 1
    try:
        program()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
