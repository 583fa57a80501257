"""Small programs about streams, events, copies, memory and graphs, and the outcomes that CUDA allows for each.

They are written once, against ``Machine``. The virtual GPU (``test_conformance.py``) must reach exactly the allowed
outcomes, and a real GPU (``test/gpu/test_conformance_gpu.py``) no other. A program is named by its function; the
docstring says which guarantee, or which missing guarantee, it is about.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Outcome = Any  # hashable: a value, or a tuple of values
Race = Literal["never", "always", "sometimes"]


class Event(Protocol):
    """CUDA's event."""

    def record(self, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Machine(Protocol):
    """The functions of a GPU that the programs use; all tensors are int64."""

    capture_errors: type[Exception]  # what a forbidden operation during a capture raises

    def stream(self) -> Any: ...
    @property
    def default(self) -> Any: ...
    def on(self, stream: Any) -> AbstractContextManager[None]: ...
    def event(self) -> Event: ...
    def synchronize(self, stream: Any = None) -> None:
        """Block until ``stream`` is empty; None: every stream."""

    def cell(self, value: int) -> torch.Tensor:
        """A new tensor [1] on the current stream."""

    def large(self, value: int) -> torch.Tensor:
        """A new tensor that is so large that its memory is only reused as a whole; only its first cell is read."""

    def pinned(self, value: int, large: bool = False) -> torch.Tensor: ...
    def pageable(self, value: int, large: bool = False) -> torch.Tensor: ...
    def peek(self, host: torch.Tensor) -> int:
        """Read the first cell of pinned memory, without waiting for the device."""

    def poke(self, host: torch.Tensor, value: int) -> None:
        """Fill pinned memory, without waiting for the device."""

    def value(self, tensor: torch.Tensor) -> int | str:
        """The first cell, "undefined" if it has not been written; waits for the current stream."""

    def address(self, tensor: torch.Tensor) -> int: ...
    def is_pinned(self, tensor: torch.Tensor) -> bool: ...
    def graph(self, pool: Any = None) -> Any: ...
    def capture(self, graph: Any, stream: Any) -> AbstractContextManager[None]: ...
    def replay(self, graph: Any, stream: Any) -> None: ...
    def in_thread(self, run: Callable[[], None]) -> None:
        """Run it to its end in another host thread."""

    def lag(self, name: str) -> None:
        """A place in the current stream at which the device may be delayed."""

    def host_lag(self, name: str) -> None:
        """A place at which the host may be delayed."""


@dataclass(frozen=True, slots=True)
class Program:
    """``lags``: the letters of its lags, which are tried in all combinations. ``race``: whether the race detector
    reports it.

    ``tainting``: it breaks a capture, after which torch needs a new process.
    """

    name: str
    run: Callable[[Machine], Outcome]
    allowed: frozenset[Outcome]
    lags: str
    race: Race
    tainting: bool = False


PROGRAMS: dict[str, Program] = {}


def program(
    *allowed: Outcome, lags: str = "", race: Race = "never", tainting: bool = False
) -> Callable[[Callable[[Machine], Outcome]], Callable[[Machine], Outcome]]:
    """Make a function a program with these allowed outcomes."""

    def register(run: Callable[[Machine], Outcome]) -> Callable[[Machine], Outcome]:
        name = run.__name__
        assert name not in PROGRAMS, f"two programs are called {name}"
        PROGRAMS[name] = Program(name, run, frozenset(allowed), lags, race, tainting)
        return run

    return register


def settled(m: Machine, *tensors: torch.Tensor) -> Outcome:
    """The values of device tensors when everything has run."""
    m.synchronize()
    values = tuple(m.value(tensor) for tensor in tensors)
    return values[0] if len(values) == 1 else values


def start(m: Machine, *values: int) -> list[torch.Tensor]:
    """Cells with these values, written before all streams continue."""
    cells = [m.cell(value) for value in values]
    m.synchronize()
    return cells
