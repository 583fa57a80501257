"""What every child process does first."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

from fenceline.managers.io_struct import PortArgs
from fenceline.managers.ipc import remove_ports

LOG_FORMAT = "[%(asctime)s] %(message)s"


def prepare_child(name: str, log_level: str, ports: PortArgs) -> None:
    """Set up a child process: logging, signals, and an end together with the parent.

    Ctrl-C reaches the whole foreground group and a service manager's SIGTERM every process of the service,
    but only the parent decides what stops when: children ignore both. They end on :class:`ShutdownReq`, when
    the parent kills them, or when the parent is gone, ``kill -9`` included.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(log_level)
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(
            target=_end_with, args=(parent.sentinel, ports), name=f"{name}-parent-watch", daemon=True
        )
        watch.start()


def setup_logging(log_level: str) -> None:
    """Log lines of this process go to stderr in one format."""
    logging.basicConfig(
        level=log_level.upper(), format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr, force=True
    )


def _end_with(sentinel: int, ports: PortArgs) -> None:
    wait([sentinel])
    remove_ports(ports)  # the parent could not
    os._exit(1)
