"""Graph: work captured once and submitted again by one call; its memory and the stages of its life.

A graph is CAPTURED, then REGISTERED (the ranks have exchanged the addresses that it uses), then REPLAYABLE.
Replaying it earlier raises: upstream, graphs with unregistered all-reduce buffers were replayed and read whatever
was in that memory (F10).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol


class GraphState(IntEnum):
    """The stages of a graph's life."""

    CAPTURED = 0
    REGISTERED = 1
    REPLAYABLE = 2


class Registers(Protocol):
    """What a graph needs of a Communicator whose operations it may have captured."""

    def register(self) -> None:
        """See ``Communicator.register``."""


class GraphError(RuntimeError):
    """A graph was used before it was ready."""


class GraphPool:
    """The memory that one owner's graphs allocate while they are captured (F17). Graphs of one pool overwrite each
    other's temporaries and outputs, so the values of two of them must never be needed at the same time; that is why a
    pool has one owner. Nothing that outlives a replay may be allocated in it."""

    def __init__(self, owner: str, raw: object) -> None:
        self.owner = owner
        self.raw = raw


class Graph(ABC):
    """Captured work of FORWARD."""

    def __init__(self, name: str, pool: GraphPool) -> None:
        self.name = name
        self.pool = pool
        self.state = GraphState.CAPTURED

    def register(self, *communicators: Registers) -> None:
        """Exchange with the other ranks the addresses that the graph uses, and make it REGISTERED. ``communicators``:
        those of its device, whose operations it may have captured; all ranks call this for the same graph. Raises
        :class:`GraphError` if it is registered already."""
        for communicator in communicators:
            communicator.register()
        self._step_to(GraphState.REGISTERED)

    def allow_replay(self) -> None:
        """Make the graph REPLAYABLE: call it when all graphs of its owner are captured and registered. Raises
        :class:`GraphError` if this one is not REGISTERED."""
        self._step_to(GraphState.REPLAYABLE)

    def replay(self) -> None:
        """Submit the captured work to FORWARD. Raises :class:`GraphError` unless the graph is REPLAYABLE."""
        self._check_replayable()
        self._replay()

    def bind(self) -> Callable[[], None]:
        """A function that does what :meth:`replay` does without its checks, for callers that replay many small graphs
        in a row; it must be called with FORWARD current. Raises :class:`GraphError` if the graph is not REPLAYABLE;
        a REPLAYABLE graph stays so, which is why the function need not check it."""
        self._check_replayable()
        return self._bound()

    def _check_replayable(self) -> None:
        if self.state is not GraphState.REPLAYABLE:
            raise GraphError(f"graph {self.name} is {self.state.name}, not yet REPLAYABLE")

    def _bound(self) -> Callable[[], None]:
        return self._replay

    def _step_to(self, state: GraphState) -> None:
        if self.state != state - 1:
            raise GraphError(f"graph {self.name} is {self.state.name} and cannot become {state.name}")
        self.state = state

    @abstractmethod
    def _replay(self) -> None: ...
