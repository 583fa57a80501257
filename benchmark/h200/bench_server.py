"""A server under measurement: started with its log in a file, waited for, stopped with all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

_POLL_S = 0.25
_STOP_TIMEOUT_S = 20.0
_TAIL_LINES = 40
# In the log of a machine's first start, whose prefill steps use other kernels than those of every later one.
_COMPILING = re.compile(r"Compiling FlashInfer's module")
_COMPILED = re.compile(r"FlashInfer's module \S+ (is compiled|does not compile)")


class ServerDied(Exception):
    """The server ended, or was never ready; the message ends with the tail of its log."""


class BenchServer:
    """``python -m fenceline.launch_server`` on a free port. Use it in a ``with`` block.

    --load-format is dummy unless ``flags`` say otherwise. ``launcher``: the arguments for Python, launch_server or a
    replacement that takes its flags. ``source``: the root of another checkout, whose server is started. A server that
    compiles FlashInfer's kernels in the background is started again when they are compiled, since it computes prompts
    by others until then, beside the compilers. Raises ServerDied on entering the block if the server is not healthy
    after ``start_timeout_s``, or has not compiled them after as long.
    """

    def __init__(
        self,
        model_dir: Path,
        flags: Sequence[str],
        log: Path,
        start_timeout_s: float = 600.0,
        launcher: Sequence[str] = ("-m", "fenceline.launch_server"),
        source: Path | None = None,
    ) -> None:
        self.port = _free_port()
        self.command = [
            *(sys.executable, *launcher, "--model-path", str(model_dir)),
            *("--load-format", "dummy", "--port", str(self.port), *flags),
        ]
        self.start_s = 0.0
        self._env = dict(os.environ)
        if source is not None:
            paths = [str(source.resolve() / folder) for folder in ("python", "sgl-kernel/python")]
            self._env["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        self._log, self._log_start = log, 0
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's root address."""
        return f"http://127.0.0.1:{self.port}"

    def raise_if_dead(self, patience_s: float = 0.0) -> None:
        """Raise ServerDied if the server has ended, or ends within ``patience_s`` seconds."""
        if self._process is not None and patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        if not self.alive:
            raise ServerDied(f"the server died under load\n{self.log_tail()}")

    @property
    def alive(self) -> bool:
        """Whether its main process runs."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> BenchServer:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set signal handlers
            signal.signal(signal.SIGTERM, _leave)
        try:
            self._start()
            if self._has_compiled():
                self.stop()
                self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        begin = time.perf_counter()
        with self._log.open("ab") as file:  # in a session of its own, so that stop() reaches every child
            self._log_start = file.tell()
            self._process = subprocess.Popen(
                self.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=self._env
            )
        while not self._healthy():
            self._await(begin, "not ready")
        self.start_s = time.perf_counter() - begin

    def _has_compiled(self) -> bool:
        """Whether the server compiles FlashInfer's kernels; waits until it has."""
        begin = time.perf_counter()
        while len(_COMPILING.findall(self._own_log())) > len(_COMPILED.findall(self._own_log())):
            self._await(begin, "FlashInfer's kernels are not compiled")
        return bool(_COMPILING.search(self._own_log()))

    def _own_log(self) -> str:
        """The log since the server was started."""
        return self._log.read_bytes()[self._log_start :].decode(errors="replace")

    def _await(self, begin: float, what: str) -> None:
        """Wait for a moment. Raises ServerDied if the server has ended, or too much time has passed since ``begin``."""
        if not self.alive:
            raise ServerDied(f"the server ended while starting\n{self.log_tail()}")
        if time.perf_counter() - begin > self._start_timeout_s:
            raise ServerDied(f"{what} after {self._start_timeout_s:g} s\n{self.log_tail()}")
        time.sleep(_POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def info(self) -> dict[str, object]:
        """/get_server_info."""
        with urllib.request.urlopen(f"{self.url}/get_server_info", timeout=30) as response:
            return dict(json.load(response))

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"  | {line}" for line in lines)

    def stop(self) -> None:
        """Send SIGTERM, then kill the remaining processes of the session."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _leave(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM, which timeout(1) sends, like Ctrl-C: the ``with`` blocks are left, so that their servers do not
    keep the GPU's memory."""
    sys.exit(128 + number)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
