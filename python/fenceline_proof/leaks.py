"""Which line of the engine has locked, held or leased what is left over, or has given back what it had not.

The engine's own accounts notice that something is left, or is given back twice, and can say only how much. So each
lock of a node of the tree, each hold of host pages and each lease is recorded with its line, and the report of such an
error names them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from fenceline.mem_cache.hicache import HiCache
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline_proof.events import around
from fenceline_sim.errors import OwnershipError
from fenceline_sim.ownership import Leases
from fenceline_sim.place import Place, here
from fenceline_sim.tags import Tags

_MAX_NAMED = 4


class Leaks:
    """Records the locks and holds of ``memory``'s tree. Leases are recorded by ``tags``."""

    def __init__(self, memory: RequestMemory, tags: Tags) -> None:
        self._memory = memory
        self._tags = tags
        self._locks: dict[int, list[Place]] = defaultdict(list)  # of each node, by its id
        self._unlocked: dict[int, Place] = {}  # where each was unlocked last
        self._holds: dict[int, Place] = {}
        around(memory.tree, "lock", before=self._lock)
        around(memory.tree, "unlock", before=self._unlock)
        if memory.tiers is not None:
            around(memory.tiers.tree, "hold_host", after=self._hold)
            around(memory.tiers.tree, "release_hold", before=self._release)

    def _lock(self, node: Any) -> None:
        if node.parent is not None:  # the root has no pages, and counts no locks
            self._locks[node.id].append(here())

    def _unlock(self, node: Any, *after: Any) -> None:
        if node.parent is None:
            return
        if not self._locks[node.id]:
            before = self._unlocked.get(node.id)
            raise OwnershipError(
                f"ownership: node {node.id} of the tree is not locked, and is unlocked at {here()}\n"
                f"  it was unlocked last at {before or 'no line'}"
            )
        self._locks[node.id].pop()
        self._unlocked[node.id] = here()

    def _hold(self, hold: Any, node: Any) -> None:
        self._holds[hold.id] = here()

    def _release(self, hold_id: int) -> None:
        self._holds.pop(hold_id, None)

    def explain(self, error: Exception, reqs: Collection[Req] = ()) -> Exception:
        """``error`` with the lines that hold what is left over, if the engine's accounts or assertions have raised it;
        else ``error`` itself. ``reqs``: those that have not given their memory back. While there are any, only pages
        and rows are looked at, which belong to one of them or to the tree."""
        if type(error) not in (AssertionError, RuntimeError):
            return error
        lines = self._beside(reqs) if reqs else self._left()
        if not lines:
            return error
        more = [f"and {len(lines) - _MAX_NAMED} more"] if len(lines) > _MAX_NAMED else []
        text = "\n  ".join([f"ownership: {error}", *lines[:_MAX_NAMED], *more])
        return OwnershipError(text)

    def _beside(self, reqs: Collection[Req]) -> list[str]:
        pages = {*self._memory.tree.all_pages().tolist(), *(int(page) for req in reqs for page in req.pages)}
        return _leased(self._tags.pages, pages) + _leased(self._tags.rows, {req.row for req in reqs})

    def _left(self) -> list[str]:
        memory, lines = self._memory, []
        for number, places in self._locks.items():
            lines += [f"node {number} of the tree is locked at {place}, and not unlocked" for place in places]
        lines += [f"host pages are held at {place}, and not released" for place in self._holds.values()]
        lines += _leased(self._tags.pages, memory.tree.all_pages().tolist())
        lines += _leased(self._tags.rows, ())
        if memory.tiers is not None:
            lines += _leased(self._tags.host_pages, _on_host(memory.tiers))
        return lines


def _leased(leases: Leases, right: Collection[int]) -> list[str]:
    """The leases of all but the ids that are ``right``."""
    left = leases.current()
    return [
        f"{leases.name} {number} is leased at {place}, and not retired"
        for number, place in left.items()
        if number not in right
    ]


def _on_host(tiers: HiCache) -> list[int]:
    pages: list[int] = tiers.tree.all_host_pages().tolist()
    return pages
