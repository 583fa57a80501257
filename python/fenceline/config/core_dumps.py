"""Core dumps of the GPU, written by the CUDA driver when a kernel fails: where, and what is in them.

The variables are documented in NVIDIA's CUDA-GDB manual, "GPU core dump support". The driver reads them when CUDA is
initialised, once for each process.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fenceline.config.errors import ConfigError

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


def core_dump_dir(wanted: str | None) -> str | None:
    """The folder of --cuda-coredump-dir as an absolute path, made if need be. Raises ConfigError, one line, if nothing
    can be written there."""
    if wanted is None:
        return None
    path = Path(wanted).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"--cuda-coredump-dir {wanted}: cannot be written ({error.strerror}); name another folder"
        ) from error
    return str(path)


def core_dump_environment(directory: str) -> dict[str, str]:
    """What a process's environment must hold before it initialises CUDA. ``%h`` is the host, ``%p`` the process, ``%t``
    the time in seconds; all that the driver knows of patterns."""
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_FILE": str(Path(directory) / f"cuda-%h-%p-%t{_SUFFIX}"),
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(_FLAGS),
        "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    }


def core_dumps_of_this_process(directory: str) -> list[str]:
    """The files that the driver has written or begun for this process, oldest first."""
    found = Path(directory).glob(f"cuda-*-{os.getpid()}-*{_SUFFIX}")
    return [str(path) for path in sorted(found, key=lambda path: path.stat().st_mtime)]


def is_complete(path: str) -> bool:
    """Whether a dump is whole: an ELF file whose section headers, which come last, are there."""
    with open(path, "rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if len(header) < 64:
        return False
    fields = struct.Struct("<40x Q 10x H H")  # e_shoff, e_shentsize, e_shnum
    offset, entry_size, number = map(int, fields.unpack_from(header))
    return offset > 0 and size >= offset + entry_size * number


def wait_for_core_dumps(
    directory: str,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """:func:`core_dumps_of_this_process`, once they are whole. The driver writes them in a thread of its own while
    calls that fail return at once; a process that ended then would leave a piece that no debugger reads. Gives up when
    nothing has been written for ``patience_s``."""
    sizes: dict[str, int] = {}
    since = clock()
    while True:
        paths = core_dumps_of_this_process(directory)
        if paths and all(map(is_complete, paths)):
            return paths
        now_sizes = {path: os.stat(path).st_size for path in paths}
        if now_sizes != sizes:
            sizes, since = now_sizes, clock()
        elif clock() - since >= patience_s:
            return paths
        sleep(_POLL_S)
