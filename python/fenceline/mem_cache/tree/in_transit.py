"""InTransit: which nodes of the tree carry the ticket of a transfer that has not been acknowledged."""

from __future__ import annotations

from collections.abc import Sequence

from fenceline.mem_cache.host.transfer import Ticket, TransferKind
from fenceline.mem_cache.tree.radix_node import TreeNode
from fenceline.memory_order.stream import Points


class InTransit:
    """The books of tickets and nodes. Splits and departures keep them, so an acknowledgement looks up its ticket
    and nobody else has to remember a node (F15)."""

    def __init__(self) -> None:
        self._nodes: dict[Ticket, list[TreeNode]] = {}
        self._num_pages = 0

    @property
    def num_pages(self) -> int:
        """Pages of nodes that carry a ticket."""
        return self._num_pages

    def add(self, node: TreeNode, ticket: Ticket) -> None:
        """``node``'s pages are part of ``ticket``'s transfer."""
        if not node.transfers:
            self._num_pages += node.num_pages
        node.transfers += (ticket,)
        self._nodes.setdefault(ticket, []).append(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """``upper`` has been cut from the front of ``lower``: both were in the same transfers."""
        upper.transfers = lower.transfers
        for ticket in lower.transfers:
            self._nodes[ticket].append(upper)

    def remove(self, node: TreeNode) -> None:
        """``node`` has left, or its pages' Points have been taken over by others."""
        if node.transfers:
            self._num_pages -= node.num_pages
            node.transfers = ()

    def finish(self, ticket: Ticket) -> None:
        """``ticket``'s Points are known to have passed: nobody needs to read them any more."""
        assert ticket.points.passed, f"{ticket!r} is finished before it is done"
        for node in self._nodes.pop(ticket, ()):
            if ticket in node.transfers:
                node.transfers = tuple(other for other in node.transfers if other is not ticket)
                if not node.transfers:
                    self._num_pages -= node.num_pages

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """AssertionError if the books disagree with the ``nodes`` of the tree."""
        for node in nodes:
            assert node.on_device or not node.transfers, f"node {node.id}: in transit to no device page"
            for ticket in node.transfers:
                assert any(known is node for known in self._nodes.get(ticket, ())), (
                    f"node {node.id}: {ticket!r} does not know it"
                )
        num_pages = sum(node.num_pages for node in nodes if node.transfers)
        assert num_pages == self._num_pages, f"{num_pages} pages in transit, counted {self._num_pages}"


def transfer_points(node: TreeNode) -> Points:
    """After these, all transfers that ``node``'s pages are part of are done. They must have been submitted."""
    after = Points.none()
    for ticket in node.transfers:
        after = after.join(ticket.points)
    return after


def loads_of(path: Sequence[TreeNode]) -> tuple[Ticket, ...]:
    """Loads of the pages of ``path`` that FORWARD has not waited for, each once."""
    found = dict.fromkeys(
        ticket
        for node in path
        for ticket in node.transfers
        if ticket.kind is TransferKind.LOAD and not ticket.waited
    )
    return tuple(found)
