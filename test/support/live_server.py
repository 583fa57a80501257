"""Servers under test as the operating system sees them: started, asked, signalled, waited for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_ADDRESS = re.compile(r" at (http://\S+)")


class LiveServer:
    """One server process and its output. Ends with the ``with`` block, its children too."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.base_url = ""
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def fake(
        cls,
        *flags: str,
        entry: str = "run_fake_scheduler",
        env: dict[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> LiveServer:
        """The real server over the fake scheduler, on a free port, with the demo model's tokenizer. ``under``: a
        command that starts it."""
        return cls(
            [
                *under,
                sys.executable,
                FAKE_SERVER,
                entry,
                "--model-path",
                "demo",
                "--port",
                "0",
                "--device",
                "cpu",
                *flags,
            ],
            env,
        )

    @classmethod
    def real(cls, *flags: str, env: dict[str, str] | None = None) -> LiveServer:
        """What a user starts, on a free port."""
        return cls([sys.executable, "-m", "fenceline.launch_server", "--port", "0", *flags], env)

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
        """Until the address was printed. Fails with the server's output if it ended instead."""
        assert self._ready.wait(START_TIMEOUT_S), self.output
        assert self.base_url, self.output
        return self

    def wait_exit(self) -> int:
        """Until the process has ended and its output was read; the exit status."""
        status = self._process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the main process alone."""
        self._process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """Scheduler and detokenizer (and multiprocessing's resource tracker)."""
        return psutil.Process(self.pid).children(recursive=True)

    def client(self, **options: object) -> httpx.Client:
        """An HTTP client of this server."""
        return httpx.Client(base_url=self.base_url, timeout=60.0, **options)  # type: ignore[arg-type]

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            children = self.children()
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                for process in [*children, psutil.Process(self.pid)]:
                    process.kill()
        self.wait_exit()
