"""Core dumps of a GPU, which no virtual GPU writes: files are written here as the driver writes them, a part at a time,
and the engine is asked which of them are whole, and how long it waits for them.

The layout of the files is that of ELF-64 (elf.h), and the waiting is described in ``scheduler.core_dumps``.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from fenceline.scheduler import core_dumps
from fenceline.scheduler.core_dumps import CoreDumps, is_complete

_SECTION = struct.Struct("<IIQQQQIIQQ")  # a section header; the sixth number is the section's size
_HEADER_BYTES = 64
_MOST_READINGS = 10_000  # of a clock that only a pause advances


def compare_core_dumps(random: Random) -> str:
    """What is wrong with what the engine says of core dumps, "" if nothing is."""
    with TemporaryDirectory(prefix="fenceline-prove-") as folder:
        return _compare_files(Path(folder, "dump"), random) or _compare_waiting(Path(folder), random)


def _dump(num_sections: int, num_bytes: int, counted_in_header: bool = True) -> bytes:
    """A whole file with so many sections of ``num_bytes`` bytes together. Where the header cannot count the sections,
    their number is the size of the first one."""
    offset = _HEADER_BYTES + num_bytes
    num = num_sections if counted_in_header else 0
    first = _SECTION.pack(0, 0, 0, 0, 0, 0 if counted_in_header else num_sections, 0, 0, 0, 0)
    sections = first + bytes((num_sections - 1) * _SECTION.size)
    return _header(offset, num) + bytes(num_bytes) + sections


def _header(offset: int, num_sections: int) -> bytes:
    """A file's header. ``offset``: where the section headers are, 0 as long as they have not been written."""
    identity = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    rest = struct.pack("<HHIQQQIHHHHHH", 4, 190, 1, 0, 0, offset, 0, 64, 0, 0, _SECTION.size, num_sections, 0)
    return identity + rest


def _compare_files(path: Path, random: Random) -> str:
    for num_sections, in_header in ((1, True), (random.randint(2, 9), True), (random.randint(2, 9), False)):
        data = _dump(num_sections, random.randint(1, 200), in_header)
        beginnings = (len(data) - 1, _HEADER_BYTES, random.randrange(_HEADER_BYTES), 0)
        cases = [(data, True), *((data[:num], False) for num in beginnings)]
        cases += [(_header(0, num_sections) + data[_HEADER_BYTES:], False), (b"\x7fELG" + data[4:], False)]
        # The first section, whose size is their number, is there and has not been written yet.
        empty = _dump(num_sections, len(data), counted_in_header=False)[: _HEADER_BYTES + len(data)]
        cases.append((empty + bytes(num_sections * _SECTION.size), False))
        for case, right in cases:
            path.write_bytes(case)
            if is_complete(str(path)) != right:
                return (
                    f"core dumps: {len(case)} bytes of a dump of {len(data)} with {num_sections} sections are "
                    f"{'not ' * right}said to be whole"
                )
    path.unlink()
    return ""


class _Driver:
    """Writes ``data`` in ``num_parts``, one in each pause of the engine. ``now``: a clock that the pauses advance."""

    def __init__(self, path: Path, data: bytes, num_parts: int) -> None:
        self.now = 0.0
        self._path, self._data, self._num_parts = path, data, num_parts
        self._num_pauses = self._num_readings = 0

    def clock(self) -> float:
        self._num_readings += 1
        assert self._num_readings < _MOST_READINGS, "the engine waits for a core dump without a pause"
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._num_pauses += 1
        if self._num_pauses <= self._num_parts:
            self._path.write_bytes(self._data[: len(self._data) * self._num_pauses // self._num_parts])


def _compare_waiting(folder: Path, random: Random) -> str:
    """The engine waits for a whole dump, but only so long for one that does not grow, and only so long in all."""
    earlier, path = (folder / f"cuda-host-{os.getpid()}-{time}.nvcudmp" for time in (1, 2))
    earlier.write_bytes(b"of a process before")
    pause, data, num_parts = core_dumps._POLL_S, _dump(3, 100), random.randint(1, 8)
    patience, limit = 6 * pause, 16 * pause
    half = data[: len(data) // 2]
    for what, written, parts, may_come, right in (
        ("a dump", data, num_parts, True, num_parts * pause),
        ("half a dump", half, num_parts, True, num_parts * pause + patience),
        ("a dump that grows too slowly", data, 100, True, limit),
        ("a dump that does not come", b"", 0, True, patience),
        ("no dump", b"", 0, False, 0.0),
    ):
        path.unlink(missing_ok=True)
        driver, dumps = _Driver(path, written, parts), CoreDumps(str(folder))
        found = dumps.wait(
            lambda may_come=may_come: may_come,  # type: ignore[misc]
            patience_s=patience,
            limit_s=limit,
            clock=driver.clock,
            sleep=driver.sleep,
        )
        if found != [str(path)] * (parts > 0) or not right - pause / 2 < driver.now < right + 1.5 * pause:
            return f"core dumps: {what} is waited for {driver.now:.1f} s, {right:.1f} is right ({found})"
    return ""
