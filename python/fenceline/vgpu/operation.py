"""Operation: one entry of a stream's queue, and where in the program it came from."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from fenceline.memory_order import access
from fenceline.memory_order.stream import Clock
from fenceline.vgpu.layout import Layout

if TYPE_CHECKING:
    from fenceline.vgpu.graph import Capture
    from fenceline.vgpu.memory import Tag
    from fenceline.vgpu.streams import VirtualStream

RELEASE = "return to the allocator"  # the label of the operation that ends a tensor's memory

# Who declares an access is of interest, not the function that names it.
_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), access.__file__)
_outside: dict[str, bool] = {}  # by file; strings keep their hash, code objects compute it every time


def _is_outside(name: str) -> bool:
    known = _outside[name] = not (name.startswith(_ROOTS) or name.startswith("<") or "contextlib" in name)
    return known


class Place(NamedTuple):
    """A line of the program, kept as code and instruction: cheap to take, resolved when somebody asks."""

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
    path = Path(filename)
    parts = path.parts
    if "fenceline" in parts:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("fenceline") :])
    return path.name


def here() -> Place:
    """The innermost line outside torch and vgpu that led to this call."""
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


class Access(NamedTuple):
    """Memory that an operation touches: the bytes of ``layout``, or of its rows named by ``rows`` when it runs."""

    tag: Tag
    layout: Layout
    rows: torch.Tensor | None = None


class Bound(NamedTuple):
    """``values`` index ``axis`` of ``tag``'s memory, which has ``size`` there. ``source``: the memory they lie in."""

    tag: Tag
    axis: int
    size: int
    values: torch.Tensor
    source: Access | None


Accesses = Sequence[Access]
Bounds = Sequence[Bound]
NO_ACCESS: Accesses = ()
NO_BOUNDS: Bounds = ()


class Purpose(Protocol):
    """What operations are submitted for."""

    def ran(self, op: Operation) -> None:
        """``op``, submitted for this, has just run; its accesses and their indices are still there."""
        ...


class Operation:
    """Work on a stream. ``agent`` and ``index`` name it for vector clocks, ``seq`` is its place in program order.

    ``run`` is None for a mark or a wait. ``after`` is the mark that a wait waits for. ``bounds`` are of its indices,
    ``graph`` the one it was replayed with. Once ``done``, what it needed to run is dropped.
    """

    __slots__ = (
        "after", "agent", "bounds", "capture", "clock", "done", "graph", "index", "label", "place", "purpose", "reads",
        "run", "seq", "stream", "where", "writes",
    )  # fmt: skip

    def __init__(
        self,
        label: str,
        place: Place,
        run: Callable[[], None] | None,
        reads: Accesses = NO_ACCESS,
        writes: Accesses = NO_ACCESS,
        after: Operation | None = None,
        bounds: Bounds = NO_BOUNDS,
    ) -> None:
        self.label = label
        self.place = place
        self.run = run
        self.reads = reads
        self.writes = writes
        self.after = after
        self.bounds = bounds
        self.graph = ""
        self.purpose: Purpose | None = None  # of the thread that submitted it: see ``VirtualGpu.meaning``
        self.done = False
        self.capture: Capture | None = None  # the capture that it is part of; such a one never runs itself
        self.stream: VirtualStream | None = None
        self.agent = self.index = self.seq = 0
        self.where = ""  # the agent's name
        self.clock: Clock = ()

    @property
    def passed(self) -> Clock:
        """The clock of what happens after this operation."""
        clock = list(self.clock) + [0] * (self.agent + 1 - len(self.clock))
        clock[self.agent] = self.index
        return tuple(clock)
