"""Runs servers under test as processes, with methods to start, query, signal and wait for them.

Nothing here depends on the speed of the machine: tests wait for signs of the server, and the time limits are much
longer than any step takes on a machine with other load (which ``pytest --busy-loops 4`` creates).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import psutil
from forking import ForkedProgram

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
WAIT_S = 200.0  # the time limit for anything; only a failing test waits this long
WATCHDOG_S = 8  # for tests in which a process hangs; other processes must get CPU time within this time
_ADDRESS = re.compile(r" at (http://\S+)")


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` is true, for something that a server does by itself."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # so that the server gets the CPU


def tokens_of(client: httpx.Client, text: str) -> list[int]:
    """The ids of ``text``."""
    tokens: list[int] = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def scheduler_state(client: httpx.Client) -> dict[str, Any]:
    """The scheduler's own state."""
    answer = client.get("/get_server_info")
    assert answer.status_code == 200, answer.text
    state: dict[str, Any] = answer.json()["internal_states"][0]
    return state


class LiveServer:
    """One server process and its output. It ends with the ``with`` block, and so do its children."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None, cold: bool = True) -> None:
        """``cold``: it is a new interpreter, for tests of starting and ending; else it may be a ForkedProgram."""
        self.lines: list[str] = []
        self.base_url = ""
        self._ready = threading.Event()
        env, pipe = {**os.environ, **(env or {})}, subprocess.PIPE
        self._process: subprocess.Popen[str] | ForkedProgram
        if cold or "cpu" not in command or sys.platform != "linux":
            self._process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env)
        else:
            self._process = ForkedProgram(command[1:], env)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def fake(
        cls,
        *flags: str,
        entry: str = "run_fake_scheduler",
        env: dict[str, str] | None = None,
        under: Sequence[str] = (),
        cold: bool = False,
    ) -> LiveServer:
        """The real server over the fake scheduler, on a free port, with the demo model's tokenizer. ``under``: a
        command that is put before the server's."""
        model = ("--model-path", "demo", "--port", "0", "--device", "cpu")
        return cls([*under, sys.executable, FAKE_SERVER, entry, *model, *flags], env, cold or bool(under))

    @classmethod
    def real(cls, *flags: str, env: dict[str, str] | None = None, cold: bool = False) -> LiveServer:
        """The server that a user starts, on a free port."""
        return cls([sys.executable, "-m", "fenceline.launch_server", "--port", "0", *flags], env, cold)

    @property
    def pid(self) -> int:
        """The main process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """Everything written so far, stdout and stderr."""
        return "".join(self.lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            found = _ADDRESS.search(line)
            if found:
                self.base_url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> LiveServer:
        """Wait until the address was printed. Fails with the server's output if it ended instead."""
        assert self._ready.wait(WAIT_S), self.output
        assert self.base_url, self.output
        return self

    def wait_exit(self) -> int:
        """Wait until the process has ended and its output was read. Returns the exit status."""
        status = self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the main process only."""
        self._process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """The child processes: scheduler and detokenizer (and multiprocessing's resource tracker)."""
        return psutil.Process(self.pid).children(recursive=True)

    def engine_processes(self, num_ranks: int = 1) -> list[psutil.Process]:
        """A scheduler for each rank, and the detokenizer, in the order of their start."""
        children = [child for child in self.children() if "resource_tracker" not in " ".join(child.cmdline())]
        assert len(children) == num_ranks + 1
        return sorted(children, key=lambda child: child.create_time())

    def last_lines(self, num: int = 4) -> str:
        """The end of the output, without messages of Python's resource tracker about processes that died."""
        lines = [line for line in self.lines if "resource_tracker" not in line and "warnings.warn" not in line]
        return "".join(lines[-num:])

    def post_in_thread(self, body: dict[str, object], path: str = "/generate") -> Future[httpx.Response]:
        """Post ``body`` to ``path`` in a thread. Get the answer with ``.result(WAIT_S)``."""
        answer: Future[httpx.Response] = Future()

        def ask() -> None:
            try:
                with self.client() as client:
                    answer.set_result(client.post(path, json=body))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()
        return answer

    def client(self, **options: object) -> httpx.Client:
        """An HTTP client of this server."""
        return httpx.Client(base_url=self.base_url, timeout=WAIT_S, **options)  # type: ignore[arg-type]

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            children = self.children()
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                for process in [*children, psutil.Process(self.pid)]:
                    process.kill()
        self.wait_exit()


def unused_port() -> int:
    """A port of 127.0.0.1 for a process that must be told its port. It is below the range from which Linux assigns
    ports, so nothing else takes it before that process does. Each pytest-xdist worker has a hundred ports of its
    own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20000 + 100 * worker
    for port in range(first, first + 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port from {first} to {first + 99} is free")
