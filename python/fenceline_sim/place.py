"""Place: the line of the program that has led to a call into the virtual GPU."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from fenceline.memory_order import access, communicator, guards, kernel

# Reports name the line that declares an access or asks for a guard, not one in the functions that do it for all.
_ASKED = [access.__file__, communicator.__file__, guards.__file__, kernel.__file__]
_TORCH, _HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
_PACKAGES = ("fenceline", "fenceline_sim", "fenceline_proof")
_roots = [_TORCH, _HERE]
_shown: set[str] = set()
_outside: dict[str, bool] = {}  # by file; strings keep their hash, code objects compute it every time


def _is_outside(name: str) -> bool:
    hidden = name.startswith((*_roots, *_ASKED, "<")) or "contextlib" in name
    known = _outside[name] = name in _shown or not hidden
    return known


def leave_out(folder: Path, but: str) -> None:
    """Let reports name no line of ``folder``, whose code stands in for parts of the engine or watches it; only those of
    its file ``but``, which is a program of its own."""
    _roots.append(f"{folder}/")
    _shown.add(str(folder / but))
    _outside.clear()


class Place(NamedTuple):
    """A line of the program, kept as code and instruction, which takes little time; resolved when it is printed."""

    code: CodeType | None
    instruction: int

    @property
    def line(self) -> int:
        """The line number, 0 if unknown."""
        if self.code is None:
            return 0
        for index, (first, *_) in enumerate(self.code.co_positions()):
            if index * 2 >= self.instruction:
                return first or 0
        return 0

    def __str__(self) -> str:
        if self.code is None:
            return "an unknown line"
        text = linecache.getline(self.code.co_filename, self.line).strip()
        return f"{_short(self.code.co_filename)}:{self.line} in {self.code.co_name}: {text}"


def _short(filename: str) -> str:
    """From the package on, or else the file's name."""
    parts = Path(filename).parts
    starts = [index for index, part in enumerate(parts[:-1]) if part in _PACKAGES]
    return "/".join(parts[starts[-1] if starts else -1 :])


def here() -> Place:
    """The innermost line outside torch and this package that led to this call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        outside = _outside.get(code.co_filename)
        if outside is None:
            outside = _is_outside(code.co_filename)
        if outside:
            return Place(code, frame.f_lasti)
        frame = frame.f_back
    return Place(None, 0)


def raised_at(error: BaseException, num_lines: int) -> list[str]:
    """The innermost lines outside torch and this package through which ``error`` has come, the one that raised it
    first. If there are none, the line that raised it."""
    tb = error.__traceback__
    if tb is None:
        return []
    frames = list(reversed(traceback.extract_tb(tb)))
    outside = [frame for frame in frames if not frame.filename.startswith(tuple(_roots))]
    return [
        f"{_short(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in (outside[:num_lines] or frames[:1])
    ]
