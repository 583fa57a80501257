"""Measures the memory that the C library keeps after it has been freed, and returns it to the system."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

_LOOK_INTERVAL_S = 1.0
_WORTH_BYTES = 32 << 20


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def trim_memory() -> None:
    """Give free memory of the C library back to the system. It keeps that otherwise, gigabytes of it in each thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def unused_bytes() -> int:
    """This process's resident memory less what is allocated from the C library. Only its growth says something: it
    counts programs, and of allocated memory what has not been touched yet is subtracted. 0 without glibc 2.33."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _MallInfo
    info = library.mallinfo2()
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * getpagesize() - int(info.uordblks) - int(info.hblkhd)


class FreeMemoryWatch:
    """Returns memory to the system once the C library keeps 32 MiB more than ever before without use. For a process
    without an event loop, which calls :meth:`look` between its steps: a look costs 0.2 ms once a second, returning
    memory about 0.1 ms for each MiB."""

    def __init__(
        self,
        unused: Callable[[], int] = unused_bytes,
        trim: Callable[[], None] = trim_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unused = unused
        self._trim = trim
        self._clock = clock
        self._look_at = 0.0
        self._least: int | None = None  # bytes unused, since the last trim

    def look(self) -> None:
        """Called when a pause does no harm: return memory if there is enough of it."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_INTERVAL_S
        unused = self._unused()
        if self._least is not None and unused > self._least + _WORTH_BYTES:
            self._trim()
            self._least = self._unused()
        elif self._least is None or unused < self._least:
            self._least = unused
