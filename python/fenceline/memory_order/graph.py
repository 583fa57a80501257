"""Graph: work captured once and submitted again by one call. Its memory, its life cycle, its preconditions.

A graph is CAPTURED, then REGISTERED (what other ranks must know of its addresses has been exchanged), then REPLAYABLE.
Replaying it earlier raises: upstream, graphs with unregistered all-reduce buffers were replayed and read whatever
lay there (F10).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum


class GraphState(IntEnum):
    """How far a graph has come."""

    CAPTURED = 0
    REGISTERED = 1
    REPLAYABLE = 2


class GraphError(RuntimeError):
    """A graph was used before it was ready, or in a way its owner does not allow."""


class GraphPool:
    """The memory that graphs of one owner allocate while they are captured (F17).

    Graphs of one pool overwrite each other's temporaries and outputs, so whoever shares a pool must never need the
    values of two of them at once: one owner sees to that. Nothing that outlives a replay may be allocated in it.
    """

    def __init__(self, owner: str, raw: object) -> None:
        self.owner = owner
        self.raw = raw


class Graph(ABC):
    """Captured work of FORWARD."""

    def __init__(self, name: str, pool: GraphPool) -> None:
        self.name = name
        self.pool = pool
        self.state = GraphState.CAPTURED

    def register(self) -> None:
        """Its addresses are known wherever they have to be."""
        self._step_to(GraphState.REGISTERED)

    def allow_replay(self) -> None:
        """Every graph of its owner is captured and registered."""
        self._step_to(GraphState.REPLAYABLE)

    def replay(self) -> None:
        """Submit the captured work to FORWARD. Raises :class:`GraphError` unless the graph is REPLAYABLE."""
        self._check_replayable()
        self._replay()

    def bind(self) -> Callable[[], None]:
        """:meth:`replay` and nothing around it, for whoever replays many small graphs in a row: to be called with
        FORWARD current. A graph that is REPLAYABLE stays so; raises :class:`GraphError` if it is not."""
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
