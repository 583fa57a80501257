"""RelocationClock: which owners of pages have been given other pages since a given moment (F5).

An owner is a number, for example a request row, which stands for its page table. Its version changes with the CPU's
*decision* to move its pages (bound to a load, offloaded, remapped onto the tree's, the row given to another request),
not when the device carries it out, and not when pages are appended. What is derived from where pages are (indices, a
plan, a page table in an arena) is stamped when it is made, and compared before it is used: after a mismatch it has to
be made again. Nodes of the radix tree have versions of their own, see ``TreeNode.version``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.memory_order.device import Device
from fenceline.memory_order.edges import MOVED_NODES, STEP_SLOTS, Guard

Owners = Sequence[int] | npt.NDArray[np.integer]
_Ints = npt.NDArray[np.int64]
_Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # of rows: slots, path, counts

_MIN_OWNERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """The versions [n] that ``owners`` [n], in the order they were given, had when the clock stood at ``epoch``."""

    epoch: int
    owners: _Ints
    versions: _Ints


class RelocationClock:
    """Versions of owners 0, 1, ..., each 0 until it is first moved. ``num_owners``: as many as are expected.

    ``epoch`` changes with every decision, for any owner, so that while nothing moves two integers are
    compared. ``num_moves`` counts moves of owners.
    """

    def __init__(self, num_owners: int = _MIN_OWNERS) -> None:
        self.epoch = 0
        self.num_moves = 0
        self._versions: _Ints = np.zeros(max(num_owners, 1), dtype=np.int64)

    def version(self, owner: int) -> int:
        """How often ``owner`` has been moved."""
        assert owner >= 0, "owners are numbered from 0"
        return int(self._versions[owner]) if owner < len(self._versions) else 0

    def move(self, owner: int) -> None:
        """It has been decided that ``owner``'s pages are others, or elsewhere, from now on."""
        assert owner >= 0, "owners are numbered from 0"
        if owner >= len(self._versions):
            self._grow(owner)
        self._versions[owner] += 1
        self.epoch += 1
        self.num_moves += 1

    def move_all(self, owners: Owners) -> None:
        """:meth:`move` each of ``owners``, which are distinct, by one decision."""
        moved = _as_owners(owners)
        if not len(moved):
            return
        assert len(np.unique(moved)) == len(moved), "an owner is named twice in one decision"
        if (last := int(moved.max())) >= len(self._versions):
            self._grow(last)
        self._versions[moved] += 1
        self.epoch += 1
        self.num_moves += len(moved)

    def stamp(self, owners: Owners) -> Stamp:
        """The stamp for what is derived now from the places of ``owners``' pages. The sequence may be changed later."""
        mine = _as_owners(owners)
        if len(mine) and (last := int(mine.max())) >= len(self._versions):
            self._grow(last)
        return Stamp(self.epoch, mine, self._versions[mine])

    def is_current(self, stamp: Stamp) -> bool:
        """Whether none of the stamp's owners has moved since. Takes constant time while no owner at all has."""
        if stamp.epoch == self.epoch:
            return True
        return bool((self._versions[stamp.owners] == stamp.versions).all())

    def moved_since(self, stamp: Stamp) -> _Ints:
        """Those of the stamp's owners that have moved since, in its order."""
        moved: _Ints = stamp.owners[self._versions[stamp.owners] != stamp.versions]
        return moved

    def _grow(self, owner: int) -> None:
        size = max(2 * len(self._versions), owner + 1)
        self._versions = np.concatenate(
            [self._versions, np.zeros(size - len(self._versions), dtype=np.int64)]
        )


def _as_owners(owners: Owners) -> _Ints:
    array = np.array(owners, dtype=np.int64).reshape(-1)
    assert not len(array) or int(array.min()) >= 0, "owners are numbered from 0"
    return array


def table_of_step(device: Device, table: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The page table [rows, columns] from which a step derives its slots, on FORWARD: as it is at the moment of the
    call, which is what ``step_slots`` is. Severed, as it was one step before."""
    if device.keeps(STEP_SLOTS):
        return lambda: table
    last = table.clone()

    def table_of_last_step() -> torch.Tensor:
        stale = last.clone()
        last.copy_(table)
        return stale

    return table_of_last_step


def moves_of_nodes(device: Device, move: _Move) -> _Move:
    """How the rows of a tree's accepted nodes come to their tokens' slots, which is what ``moved_nodes`` is: by
    ``move``, in the step that accepts them. Severed, not before the next step reads these slots."""
    return move if device.keeps(MOVED_NODES) else _not_yet


def _not_yet(_slots: torch.Tensor, _path: torch.Tensor, _counts: torch.Tensor) -> None:
    """The rows stay where they are."""


def comparison(device: Device, guard: Guard) -> Callable[[int, int], bool]:
    """How two versions are compared, which is what ``guard`` is. Severed, any two are the same."""
    return operator.eq if device.keeps(guard) else _always_same


def _always_same(_held: int, _now: int) -> bool:
    return True
