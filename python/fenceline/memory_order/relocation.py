"""RelocationClock, a version for each owner of pages that changes when its pages move (F5).

A row of the page table has a version in a :class:`RelocationClock`. It changes when the CPU *decides* that the pages of
the row's request are others (the row is given to a request, the request moves onto the tree's pages, the row is given
back), not when the device carries it out, and not when pages are appended. Nodes of the radix tree have versions of
their own, see ``TreeNode.version``.
"""

from __future__ import annotations


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
