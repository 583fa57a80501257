"""The server under attack: the demo model, from any source tree, with its log in a file. It is always stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil
from wire import HOST, KEY, exchange, post

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
POOL_TOKENS, PROMPT_TOKENS = 20000, 3900
FLAGS = ("--model-path", "demo", "--device", "cpu", "--max-total-tokens", str(POOL_TOKENS))
# With a log line for each probe one could not see how fast an attacker fills the log.
FLAGS += ("--log-level-http", "warning", "--random-seed", "0")


_cores_of_servers: set[int] | None = None  # None: they share those of the clients


def keep_cores_for_servers(num_cores: int) -> None:
    """Let servers that are started from now on run on ``num_cores`` of this process's cores and nowhere else, and this
    process with all that it starts otherwise on the rest, as if it were on another machine. Raises SystemExit if
    nothing is left."""
    global _cores_of_servers
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < num_cores < len(cores):
        raise SystemExit(f"--server-cores {num_cores}: there are {len(cores)} cores, and clients need some")
    _cores_of_servers = set(cores[:num_cores])
    os.sched_setaffinity(0, cores[num_cores:])


class AttackedServer:
    """``python -m fenceline.launch_server`` of the tree with packages in ``python_path``. If that is a file, it is run
    as a program with the port as its argument. The process runs in a new folder, in which it writes all its files.
    ``nofile``: soft and hard limit of its descriptors. The ``with`` block begins when the process has been started;
    :meth:`wait_ready` returns when it serves."""

    def __init__(self, python_path: Path, flags: Sequence[str] = (), nofile: tuple[int, int] | None = None) -> None:
        self.port = _free_port()
        self._nofile = nofile
        self._python_path = python_path
        self._folder = tempfile.TemporaryDirectory(prefix="fenceline-hostile-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self.log = self.folder / "server.log"
        self._command = [sys.executable, "-m", "fenceline.launch_server", *FLAGS, "--port", str(self.port)]
        self._command += ["--api-key", KEY, *flags]
        if python_path.is_file():
            self._command = [sys.executable, str(python_path), str(self.port)]
        paths = [
            str(python_path),
            os.environ.get("PYTHONPATH", ""),
        ]  # the tree under test first, then the previous paths
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(self.folder)}

    @property
    def pid(self) -> int:
        """The main process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the main process runs."""
        return self._process.poll() is None

    def log_text(self) -> str:
        """The server's log."""
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        with self.log.open("wb") as file:
            self._process = subprocess.Popen(
                self._command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=self._env,
                process_group=0,  # Ctrl-C is for the clients; see leave_cores_to_the_server for the session
                preexec_fn=self._limit,
            )
        return self

    def wait_ready(self) -> None:
        """Wait until it answers. Raises SystemExit with the log if it does not start."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while " at http://" not in self.log_text():
            if not self.alive or time.monotonic() > deadline:
                self._stop()
                raise SystemExit(f"the server did not start:\n{self.log_text()[-4000:]}")
            time.sleep(0.1)

    def fill_cache(self) -> None:
        """Make the server write its whole KV cache (82 MB) once, so that later growth of memory is due to the attack.
        Does nothing if another program is attacked."""
        if self._python_path.is_file():
            return
        rng = random.Random(0)
        num_prompts = -(-POOL_TOKENS // PROMPT_TOKENS)
        prompts = [[rng.randrange(300, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]
        data = post("/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}})
        answer = asyncio.run(exchange(self.port, data, START_TIMEOUT_S))
        if isinstance(answer, str) or answer.status != 200:
            raise SystemExit(f"the server did not answer: {answer}")

    def _limit(self) -> None:
        if _cores_of_servers is not None:
            os.sched_setaffinity(0, _cores_of_servers)
        if self._nofile is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self._nofile)

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def _stop(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children(recursive=True)
            self._process.terminate()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            for process in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if self.alive:
                self._process.kill()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port
