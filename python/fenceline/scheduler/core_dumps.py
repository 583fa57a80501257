"""Core dumps of the GPU, which the CUDA driver writes when a kernel fails: their files and their contents.

The environment variables are documented in NVIDIA's CUDA-GDB manual, "GPU core dump support". The driver reads them
once in each process, when CUDA is initialised.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# What remains are the registers, program counters and stacks of every thread and the kernels' arguments, which take
# seconds and megabytes. Global memory would include the whole KV pool. With constant banks, driver 580 hangs while it
# dumps a server (not a small program). Without skip_abort the driver would abort the process before the flight
# recorder has written its file.
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
PATIENCE_S = 10.0  # how long to wait for the driver to begin a dump, or to write more of it
LIMIT_S = 60.0  # how long to wait in all: clients wait until the process ends
_HEADER = struct.Struct("<40x Q 10x H H 2x")  # e_shoff, e_shentsize and e_shnum in an ELF file's header
_SECTION_SIZE_AT = 32  # the offset of sh_size in a section header


def core_dump_environment(directory: str) -> dict[str, str]:
    """The environment variables that must be set before a process initialises CUDA. In the file's name the driver
    replaces ``%h`` by the host's name, ``%p`` by the process id and ``%t`` by the time in seconds, no others."""
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_FILE": str(Path(directory) / f"cuda-%h-%p-%t{_SUFFIX}"),
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(_FLAGS),
        "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    }


def is_complete(path: str) -> bool:
    """Whether a dump is complete: it is an ELF file and contains its section headers, which are written last. False
    if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or not header.startswith(b"\x7fELF"):
                return False
            offset, entry_size, number = map(int, _HEADER.unpack(header))
            if offset and not number:
                # The header has no room for 65,280 or more sections; their number is then the size of section 0.
                file.seek(offset + _SECTION_SIZE_AT)
                number = int.from_bytes(file.read(8), "little")
    except OSError:
        return False
    return offset > 0 and number > 0 and size >= offset + entry_size * number


class CoreDumps:
    """The dumps that the driver writes for this process. Dumps that existed when this object was made are ignored: they
    are of earlier processes with the same id, which in a container is nearly always the same. No method raises OSError;
    files that cannot be read are left out."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._name = re.compile(rf"cuda-.*-{os.getpid()}-\d+{re.escape(_SUFFIX)}")
        self._earlier: frozenset[str] = frozenset()
        self._earlier = frozenset(self.found())

    def found(self) -> dict[str, int]:
        """The paths of the dumps, oldest first (a name ends with the time), with their sizes in bytes so far."""
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
        """Wait until the dumps are complete, and return their paths, oldest first. The failing call returns at once,
        while the driver still writes the dump in a thread of its own. If the process ended then, it would leave an
        incomplete file that no debugger can read. This method gives up when there is no dump and ``may_come`` says that
        none will come, when nothing has been written for ``patience_s`` seconds, and after ``limit_s`` seconds. Then
        the dumps may be incomplete (see :func:`is_complete`)."""
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
