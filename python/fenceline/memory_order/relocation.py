"""RelocationClock, a version for each owner of pages that changes when its pages move, and the guards of F5.

A row of the page table has a version in a :class:`RelocationClock`. It changes when the CPU *decides* that the pages of
the row's request are others (the row is given to a request, the request moves onto the tree's pages, the row is given
back), not when the device carries it out, and not when pages are appended. Nodes of the radix tree have versions of
their own, see ``TreeNode.version``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import MOVED_NODES, STEP_SLOTS, Guard

_Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # of rows: slots, path, counts


class RelocationClock:
    """A version for each of the owners of pages 0 .. ``num_owners - 1``: 0 until the owner is first moved."""

    def __init__(self, num_owners: int) -> None:
        self._versions = [0] * num_owners

    def version(self, owner: int) -> int:
        """How often ``owner`` has been moved."""
        assert owner >= 0, "owners are numbered from 0"
        return self._versions[owner]

    def move(self, owner: int) -> None:
        """Note the decision that ``owner`` has other pages from now on, or has them elsewhere."""
        assert owner >= 0, "owners are numbered from 0"
        self._versions[owner] += 1


def table_of_step(device: Device, table: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Guard ``step_slots``: returns a function that gives a step the page table [rows, columns] from which it derives
    its slots on FORWARD, as the table is when the function is called. Severed, as it was one step before."""
    if device.keeps(STEP_SLOTS):
        return lambda: table
    last = table.clone()

    def table_of_last_step() -> torch.Tensor:
        stale = last.clone()
        last.copy_(table)
        return stale

    return table_of_last_step


def moves_of_nodes(device: Device, move: _Move) -> _Move:
    """Guard ``moved_nodes``: returns the function that moves the KV rows of a draft tree's accepted nodes to their
    tokens' slots in the step that accepts them: ``move(slots, path, counts)``. Severed, the rows are not moved."""
    return move if device.keeps(MOVED_NODES) else _not_yet


def _not_yet(_slots: torch.Tensor, _path: torch.Tensor, _counts: torch.Tensor) -> None:
    """The rows stay where they are."""


def comparison(device: Device, guard: Guard) -> Callable[[int, int], bool]:
    """``guard``: returns a function that tells whether two versions are equal. Severed, it always returns True."""
    return operator.eq if device.keeps(guard) else _always_same


def _always_same(_held: int, _now: int) -> bool:
    return True
