"""The first steps of every child process: logging, signals, a heartbeat, and an end together with its parent."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

import psutil
from tqdm import tqdm

from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import PortArgs
from fenceline.ipc.mailbox import remove_ports

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Blocked in every thread of every child for good; the scheduler's flight recorder waits for it in a thread of its own.
DUMP_SIGNAL = signal.SIGUSR1
HEARTBEAT_INTERVAL_S = 0.5
_UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Libraries whose debug lines say nothing about this server, and would be most of the log.
_CHATTERING = ("asyncio", "filelock", "h11", "httpcore", "httpx", "urllib3", "huggingface_hub")

logger = logging.getLogger(__name__)

_main_hidden = threading.Lock()  # two threads may start children at the same time


def prepare_child(name: str, args: ServerArgs, ports: PortArgs, replica: int = 0) -> None:
    """Set up a child process: logging, signals, a heartbeat, and an end together with the parent. Ctrl-C reaches the
    whole foreground group and a service manager's SIGTERM every process of the service, but only the parent decides
    what stops when: children ignore both. They end on :class:`ShutdownReq`, when the parent kills them, or when the
    parent is gone, ``kill -9`` included."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, (DUMP_SIGNAL,))
    setup_logging(args, name if args.dp_size == 1 else f"replica {replica} {name}")
    # Interpreter and imports; for the scheduler that is torch, and most of a small model's start.
    started_s = time.time() - psutil.Process().create_time()
    logger.info("Started the %s process in %.1f s", name, started_s)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which outlives a killed process
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(
            target=_watch_parent,
            args=(parent.sentinel, heartbeat_path(ports, name), ports),
            name=f"{name}-parent-watch",
            daemon=True,
        )
        watch.start()


@contextmanager
def starting_children() -> Iterator[None]:
    """Processes that are started inside this context ignore the parent's signals from the beginning, long before
    :func:`prepare_child` runs in them. Signals to this thread are delivered at the end. Nor do they import the
    program's main module, as children of multiprocessing do otherwise: it may start another engine where it has no ``if
    __name__ == "__main__"``, and be no file."""
    resource_tracker.ensure_running()  # multiprocessing starts it with the first child, and unblocks signals then
    with _main_hidden:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*PARENTS_SIGNALS, DUMP_SIGNAL))
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def one_line(text: str) -> str:
    """``text``, perhaps a client's, with everything escaped that ends a line, steers a terminal or is no character."""
    return _UNSHOWN.sub(lambda found: ascii(found[0])[1:-1], text)


class OneLineFormatter(logging.Formatter):
    """A message is one line, whatever a client has put into it: request ids, names and prompts forge no lines of the
    log and steer no terminal. (A traceback follows its message on lines of its own.)"""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, control characters and lone surrogates escaped."""
        return one_line(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII, with the traceback if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup_logging(args: ServerArgs, process: str = "main") -> None:
    """Log lines of this process, which ``process`` names, go to stderr in one format."""
    handler = logging.StreamHandler(sys.stderr)
    if args.log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        line = f"[%(asctime)s %(levelname)s {process}] %(message)s"
        handler.setFormatter(OneLineFormatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler], force=True)
    for name in _CHATTERING:  # with --log-level debug
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))


def freeze_garbage_collector() -> None:
    """Call this before serving: everything that exists now (modules, tables, the model) lives as long as the process,
    so garbage collections, which stop everything else, need not look at it again."""
    gc.collect()
    gc.freeze()


class Silence:
    """Measures for how long something has not changed while its watcher was running. A watcher that was itself stopped,
    or asleep with the whole machine, has not looked: between two looks at most ``interval_s``, the time that was
    planned, counts."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._mark: object = None
        self._looked_at = 0.0
        self._seconds = 0.0

    def look(self, mark: object, now: float) -> float:
        """Seconds for which ``mark`` has been the same."""
        elapsed = min(now - self._looked_at, self._interval_s)
        self._seconds = self._seconds + elapsed if mark == self._mark else 0.0
        self._mark, self._looked_at = mark, now
        return self._seconds


class Watchdog:
    """Ends the process when a step does not end. Waiting for messages is not a step."""

    def __init__(self, timeout_s: float, on_hang: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._busy_since: float | None = None
        if timeout_s > 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def busy(self) -> None:
        self._busy_since = time.monotonic()

    def waiting(self) -> None:
        """Nothing to do until a message comes."""
        self._busy_since = None

    def _watch(self) -> None:
        interval_s = min(self._timeout_s / 4, 1.0)
        silence = Silence(interval_s)
        while True:
            time.sleep(interval_s)
            since = self._busy_since
            if silence.look(since, time.monotonic()) > self._timeout_s and since is not None:
                self._on_hang(f"a step has not ended for {self._timeout_s:g} s (--watchdog-timeout)")
                return


def heartbeat_path(ports: PortArgs, name: str) -> Path:
    """The file whose time of change the child process ``name`` moves on, for as long as it runs at all."""
    return Path(ports.scheduler.removeprefix("ipc://")).with_name(f"{name}.alive")


def _watch_parent(sentinel: int, heartbeat: Path, ports: PortArgs) -> None:
    """Show that this process runs, and end it when its parent has ended. A thread of its own: it beats while a model is
    loaded, a kernel is compiled and a step is computed, but not while the process is stopped or starved."""
    file = os.open(heartbeat, os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        os.utime(file, ns=(now := time.monotonic_ns(), now))
        if wait([sentinel], HEARTBEAT_INTERVAL_S):
            break
    remove_ports(ports)  # the parent could not
    os._exit(1)
