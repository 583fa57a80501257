"""Ownership: which request owns each page, and whether every use of a page is by its owner or by a request sharing it.

A LeasePool knows which pages are leased, but not by whom. The leases are recorded here, outside the engine. A page
belongs to a request from the first step in which the request writes there until the page is retired. Pages of the
prefix tree belong to all requests that share them. When work is submitted, its pages are compared with the leases; when
it runs, the pages that it accesses are compared with those of the submission. So a wrong page is found whatever the
order of the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fenceline.memory_order import LeasePool
from fenceline.vgpu.errors import OwnershipError
from fenceline.vgpu.place import Place, here
from fenceline.vgpu.streams import Operation
from fenceline.vgpu.streams import who as describe

I32 = npt.NDArray[np.int32]


class Owner(Protocol):
    """A request."""

    name: str


@dataclass(slots=True, eq=False)
class Lease:
    """One lease of one page. ``owner``: the request that was the first to say that it writes there."""

    leased: Place
    owner: Owner | None = None
    retired: Place | None = None


class Leases:
    """The leases of one pool. ``found`` is called with each error."""

    def __init__(self, pool: LeasePool, found: Callable[[OwnershipError], None]) -> None:
        self.name = pool.name
        self._of_page: list[Lease | None] = [None] * pool.size  # the latest of each page
        self._found = found
        alloc, retire = pool.alloc, pool.retire

        def noted_alloc(n: int) -> object:
            leased = alloc(n)
            if leased is not None:
                place = here()
                for page in leased[0].tolist():
                    self._of_page[page] = Lease(place)
            return leased

        def noted_retire(ids: I32, after: object) -> None:
            retire(ids, after)  # type: ignore[arg-type]
            place = here()
            for page in ids.tolist():
                lease = self._of_page[page]
                if lease is not None:
                    lease.retired = place

        pool.alloc, pool.retire = noted_alloc, noted_retire  # type: ignore[method-assign, assignment]

    def claim(
        self, pages: Iterable[int], who: str, owner: Owner | None = None, shared: frozenset[int] = frozenset()
    ) -> None:
        """``who`` submits work on ``pages``, which must be leased. With an ``owner`` they must be its own: no other
        request's, and not among ``shared``, those of the prefix tree."""
        for page in pages:
            lease = self._of_page[page]
            if lease is None or lease.retired is not None:
                self.refuse(page, who)
            elif owner is not None and page in shared:
                self._found(
                    self._error(page, f"{who} writes it, though it belongs to the prefix tree", lease, None)
                )
            elif owner is not None and lease.owner is None:
                lease.owner = owner
            elif owner is not None and lease.owner is not owner:
                self.refuse(page, who)

    def share(self, pages: Iterable[int], who: str, shared: frozenset[int]) -> None:
        """``who`` submits work that reads ``pages``, which must be among ``shared``."""
        for page in pages:
            lease = self._of_page[page]
            if lease is None or lease.retired is not None or page not in shared:
                self.refuse(page, who)

    def refuse(self, page: int, who: str, op: Operation | None = None) -> None:
        """Report that ``who`` may not use ``page``, which ``op`` accesses, or without ``op`` a claim names."""
        lease = self._of_page[page]
        if lease is None:
            text = f"{who} uses it, and nobody has leased it"
        elif lease.retired is not None:
            text = f"{who} uses it after it was retired"
        elif lease.owner is not None:
            text = f"{who} uses it, and it is {lease.owner.name}'s"
        else:
            text = f"{who} uses it, and has neither leased nor shares it"
        self._found(self._error(page, text, lease, op))

    def _error(self, page: int, text: str, lease: Lease | None, op: Operation | None) -> OwnershipError:
        memory = f"{self.name} {page}"
        place = here() if op is None else op.place
        lines = [
            f"ownership: {memory}: {text}",
            f"  used by {describe(op)}" if op else f"  submitted at {place}",
        ]
        if lease is not None:
            lines.append(f"  leased at {lease.leased}")
            if lease.retired is not None:
                lines.append(f"  retired at {lease.retired}")
        places = [] if lease is None else [str(lease.retired or lease.leased)]
        return OwnershipError(
            "\n".join(lines), "", memory, (*places, str(place)), 0 if op is None else op.seq
        )
