"""What every child process does first."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

import psutil
from tqdm import tqdm

from fenceline.managers.io_struct import PortArgs
from fenceline.managers.ipc import remove_ports

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Blocked in every thread of every child for good; the scheduler's flight recorder waits for it in a thread of its own.
DUMP_SIGNAL = signal.SIGUSR1
LOG_FORMAT = "[%(asctime)s] %(message)s"

logger = logging.getLogger(__name__)


def prepare_child(name: str, log_level: str, ports: PortArgs) -> None:
    """Set up a child process: logging, signals, and an end together with the parent.

    Ctrl-C reaches the whole foreground group and a service manager's SIGTERM every process of the service,
    but only the parent decides what stops when: children ignore both. They end on :class:`ShutdownReq`, when
    the parent kills them, or when the parent is gone, ``kill -9`` included.
    """
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    signal.pthread_sigmask(signal.SIG_BLOCK, (DUMP_SIGNAL,))
    setup_logging(log_level)
    # Interpreter and imports; for the scheduler that is torch, and most of a small model's start.
    started_s = time.time() - psutil.Process().create_time()
    logger.info("Started the %s process in %.1f s", name, started_s)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which outlives a killed process
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(
            target=_end_with, args=(parent.sentinel, ports), name=f"{name}-parent-watch", daemon=True
        )
        watch.start()


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started within are deaf to the parent's signals from their first moment, long before
    :func:`prepare_child` runs in them. Signals to this thread are delivered at the end."""
    resource_tracker.ensure_running()  # multiprocessing starts it with the first child, and unblocks signals then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*PARENTS_SIGNALS, DUMP_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def setup_logging(log_level: str) -> None:
    """Log lines of this process go to stderr in one format."""
    logging.basicConfig(
        level=log_level.upper(), format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr, force=True
    )


def freeze_garbage_collector() -> None:
    """Before serving: what exists now (modules, tables, the model) lives as long as the process, and no collection,
    which everybody waits for, needs to look at it again."""
    gc.collect()
    gc.freeze()


def _end_with(sentinel: int, ports: PortArgs) -> None:
    wait([sentinel])
    remove_ports(ports)  # the parent could not
    os._exit(1)
