"""Core dumps of the GPU, written by the CUDA driver when a kernel fails: where, and what is in them.

The variables are documented in NVIDIA's CUDA-GDB manual, "GPU core dump support". The driver reads them when CUDA is
initialised, once for each process.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Registers, program counters and stacks of every thread, and the kernels' arguments, take seconds and megabytes; global
# memory is the whole KV pool. Driver 580 stops for ever in the middle of the constant banks of a server (not of a small
# program). Without skip_abort the driver aborts the process, and the flight recorder with it.
_FLAGS = (
    "skip_nonrelocated_elf_images",
    "skip_global_memory",
    "skip_shared_memory",
    "skip_local_memory",
    "skip_constbank_memory",
    "skip_abort",
)
_SUFFIX = ".nvcudmp"
_POLL_S = 0.1
PATIENCE_S = 10.0  # for the driver to begin a dump, and to go on with it
LIMIT_S = 60.0  # for all of it: clients wait for the end
_HEADER = struct.Struct("<40x Q 10x H H 2x")  # of an ELF file: e_shoff, e_shentsize, e_shnum
_SECTION_SIZE_AT = 32  # sh_size in a section header


def core_dump_environment(directory: str) -> dict[str, str]:
    """What a process's environment must hold before it initialises CUDA. ``%h`` is the host, ``%p`` the process, ``%t``
    the time in seconds; all that the driver knows of patterns."""
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_FILE": str(Path(directory) / f"cuda-%h-%p-%t{_SUFFIX}"),
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(_FLAGS),
        "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    }


def is_complete(path: str) -> bool:
    """Whether a dump is whole: an ELF file whose section headers, which come last, are there. False, too, if it cannot
    be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(b"\x7fELF"):
                return False
            offset, entry_size, number = map(int, _HEADER.unpack(header))
            if offset and not number:
                # 65,280 and more do not fit there: section 0 has their number for its size.
                file.seek(offset + _SECTION_SIZE_AT)
                number = int.from_bytes(file.read(8), "little")
    except OSError:
        return False
    return offset > 0 and number > 0 and size >= offset + entry_size * number


class CoreDumps:
    """The dumps that the driver writes for this process, begun since this object was made: another process may have
    had the same number, in a container nearly always. No method raises OSError; what cannot be read is left out."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._name = re.compile(rf"cuda-.*-{os.getpid()}-\d+{re.escape(_SUFFIX)}")
        self._earlier: frozenset[str] = frozenset()
        self._earlier = frozenset(self.found())

    def found(self) -> dict[str, int]:
        """Paths, oldest first (a name ends with the time), and the bytes written so far."""
        sizes: dict[str, int] = {}
        with suppress(OSError):
            for name in sorted(filter(self._name.fullmatch, os.listdir(self._directory))):
                path = str(self._directory / name)
                if path not in self._earlier:
                    with suppress(OSError):
                        sizes[path] = os.stat(path).st_size
        return sizes

    def wait(
        self,
        may_come: Callable[[], bool],
        patience_s: float = PATIENCE_S,
        limit_s: float = LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> list[str]:
        """The dumps, once they are whole. The driver writes them in a thread of its own while calls that fail return at
        once; a process that ended then would leave a piece that no debugger reads. Gives up when none is begun and
        none ``may_come``, when nothing has been written for ``patience_s``, and after ``limit_s``."""
        begin = since = clock()
        sizes: dict[str, int] = {}
        while True:
            found = self.found()
            if (found and all(map(is_complete, found))) or not (found or may_come()):
                return list(found)
            now = clock()
            if found != sizes:
                sizes, since = found, now
            if now - since >= patience_s or now - begin >= limit_s:
                return list(found)
            sleep(_POLL_S)
