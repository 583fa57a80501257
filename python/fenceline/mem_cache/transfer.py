"""Transfers of KV pages between device and host: what the tree hands to the controller, and how both refer to it.

A :class:`Ticket` stands for one batched transfer. Nodes of the tree carry the tickets of the transfers that touch
their pages, and splits copy them to both halves. Code that gives such a page back reads the Points *through* the
ticket, so nothing has to find a node again when a transfer is done (F15).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.stream import Point, Points

I32 = npt.NDArray[np.int32]


class TransferKind(Enum):
    """Which way the pages go."""

    LOAD = "load"  # host -> device, on stream LOAD
    STORE = "store"  # device -> host, on stream STORE


class Ticket:
    """The identity of one transfer. Its Points are set exactly once, when the transfer is submitted. ``num_pages``,
    pages of the tree, grows until then (several ``begin_load`` may share one ticket). ``waited`` (loads): FORWARD has
    waited for all of its Points, so that work submitted to FORWARD from then on needs no further wait. Tickets compare
    by identity; ``id`` is for order, logs and errors."""

    __slots__ = ("_layer_points", "_points", "id", "kind", "num_pages", "state_points", "waited")

    def __init__(self, id: int, kind: TransferKind) -> None:
        self.id = id
        self.kind = kind
        self.num_pages = 0
        self.waited = False
        self._points: Points | None = None
        self._layer_points: tuple[Point, ...] = ()
        self.state_points = Points.none()  # loads: after which the states of recurrent layers are filled

    @staticmethod
    def load(id: int) -> Ticket:
        """A ticket for a transfer from the host to the device."""
        return Ticket(id, TransferKind.LOAD)

    @staticmethod
    def store(id: int) -> Ticket:
        """A ticket for a transfer from the device to the host."""
        return Ticket(id, TransferKind.STORE)

    @property
    def points(self) -> Points:
        """The Points after which others may access the pages of the submitted transfer, on both sides."""
        assert self._points is not None, f"{self!r} has not been submitted, so it has no Points yet"
        return self._points

    @property
    def layer_points(self) -> tuple[Point, ...]:
        """Loads: one Point for each layer, after which that layer's pages are filled. Empty for stores."""
        assert self._points is not None, f"{self!r} has not been submitted, so its layers have no Points yet"
        return self._layer_points

    def add_pages(self, num_pages: int) -> None:
        """Count ``num_pages`` more pages as part of this transfer, before it is submitted."""
        assert self._points is None, f"{self!r} has been submitted: no page can be added"
        self.num_pages += num_pages

    def submit(self, points: Points, layer_points: tuple[Point, ...] = ()) -> None:
        """The transfer has been submitted: it ends with ``points``, layers of loads with ``layer_points``."""
        assert self._points is None, f"{self!r} is submitted twice"
        self._points = points
        self._layer_points = layer_points

    def __repr__(self) -> str:
        return f"{self.kind.value} ticket {self.id}"


@dataclass(frozen=True, slots=True, eq=False)
class PageMove:
    """What has to be copied: page ``i`` of one side to or from page ``i`` of the other. ``device_pages``,
    ``host_pages`` int32 [n], owned by the tree. ``after``: what the copying stream waits for first, as far as the tree
    knows it: earlier users of these pages. The Points of pages that the caller brought (the device pages of a load) are
    the caller's to join. ``states``: (slot on the device, slot on the host) of states that are copied with them."""

    device_pages: I32
    host_pages: I32
    after: Points
    states: tuple[tuple[int, int], ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages to copy."""
        return len(self.device_pages)
