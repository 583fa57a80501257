"""Ownership: which request owns each page, and whether every use of a page is by its owner or by a request sharing it.

A LeasePool knows which pages are leased, but not by whom. The leases are recorded here, outside the engine. A page
belongs to a request from the first step in which the request writes there until the page is retired. Pages of the
prefix tree belong to all requests that share them. When work is submitted, its pages are compared with the leases; when
it runs, the pages that it accesses are compared with those of the submission. So a wrong page is found whatever the
order of the streams.

When a page is retired, the Points that it is retired with must come after all work that has been submitted on it, also
by those who had it before and whose work its owner has not waited for. And the stream on which a page is first used
after it has been leased must have waited for what its former owners have left unfinished. So lost Points are found
where they are lost, whether or not that work has run when somebody else uses the page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fenceline.memory_order import LeasePool, Points
from fenceline.memory_order.edges import PAGE_EDGES
from fenceline.memory_order.stream import Clock, joined
from fenceline_sim.accounts import I32, Account
from fenceline_sim.errors import OwnershipError
from fenceline_sim.gpu import VirtualGpu
from fenceline_sim.place import Place, here
from fenceline_sim.streams import RELEASE, Operation, VirtualStream
from fenceline_sim.streams import who as describe


class User(NamedTuple):
    """Work on a page: the latest operation of ``stream`` when it had been submitted, and what it was."""

    stream: VirtualStream
    position: int
    who: str
    place: Place


@dataclass(slots=True, eq=False)
class Lease:
    """One lease of one page. ``owner``: the request that was the first to say that it writes there. ``users``: the
    latest work on the page of each stream, by its number; at the beginning what the last lease left, which is also in
    ``left`` until the page is used."""

    leased: Place
    owner: Account | None = None
    retired: Place | None = None
    users: dict[int, User] = field(default_factory=dict)
    left: dict[int, User] = field(default_factory=dict)


class Leases:
    """The leases of one pool. ``found`` is called with each error. ``keeps_users``: the work on each page is noted, and
    compared with the Points that it is retired with."""

    def __init__(
        self, gpu: VirtualGpu, pool: LeasePool, found: Callable[[OwnershipError], None], keeps_users: bool
    ) -> None:
        self.name, self.reserved = pool.name, pool.reserved
        self._gpu = gpu
        self._of_page: list[Lease | None] = [None] * pool.size  # the latest of each page
        self._found = found
        self._keeps_users = keeps_users
        alloc, retire = pool.alloc, pool.retire

        def noted_alloc(n: int) -> object:
            leased = alloc(n)
            if leased is not None:
                place, known = here(), gpu.thread.now()
                for page in leased[0].tolist():
                    last = self._of_page[page]
                    users = {} if last is None else _not_in(known, last.users)
                    self._of_page[page] = Lease(place, users=users, left=dict(users))
            return leased

        def noted_retire(ids: I32, after: Points) -> None:
            retire(ids, after)
            place, known = here(), gpu.thread.now()
            for point in after:
                assert isinstance(point.event, Operation), "a Point on the virtual GPU"
                known = joined(known, point.event.passed)
            for page in ids.tolist():
                lease = self._of_page[page]
                if lease is not None:
                    lease.retired = place
                    for user in _not_in(known, lease.users).values():
                        self._found(self._too_early(page, user, after))

        pool.alloc, pool.retire = noted_alloc, noted_retire  # type: ignore[method-assign, assignment]

    def besides(self, right: Collection[int]) -> list[str]:
        """Lines of a report: what is leased now, but for what is ``right``."""
        return [
            f"{self.name} {number} is leased at {lease.leased}, and not retired"
            for number, lease in enumerate(self._of_page)
            if lease is not None and lease.retired is None and number not in right
        ]

    def claim(
        self, pages: Iterable[int], who: str, owner: Account | None = None, shared: frozenset[int] = frozenset()
    ) -> None:
        """``who`` submits work on ``pages``, which must be leased. With an ``owner`` they must be its own: no other
        request's, and not among ``shared``, those of the prefix tree."""
        for page in pages:
            lease = self._of_page[page]
            if lease is None or lease.retired is not None:
                self.refuse(page, who)
            elif owner is not None and page in shared:
                self._found(self._error(page, f"{who} writes it, though it belongs to the prefix tree", lease, None))
            elif owner is not None and lease.owner is None:
                lease.owner = owner
            elif owner is not None and lease.owner is not owner:
                self.refuse(page, who)

    def share(self, pages: Iterable[int], who: str, shared: frozenset[int]) -> None:
        for page in pages:
            lease = self._of_page[page]
            if lease is None or lease.retired is not None or page not in shared:
                self.refuse(page, who)

    def used(self, pages: Iterable[int], stream: VirtualStream, who: str) -> None:
        """``who`` has just submitted work on ``pages`` to ``stream``."""
        if not self._keeps_users:
            return
        position = stream.count
        while position > 1 and stream.action(position).label == RELEASE:
            position -= 1  # Python dropped a tensor, perhaps behind the Point of the step: no page is used
        user = User(stream, position, who, here())
        for page in pages:
            lease = self._of_page[page]
            if lease is None:
                continue
            for former in _not_in(stream.clock, lease.left).values():
                if former.stream is not stream:
                    self._found(self._too_soon(page, former, user))
            lease.left = {}
            lease.users[stream.number] = user

    def _too_soon(self, page: int, former: User, user: User) -> OwnershipError:
        waiter = user.stream.name
        text = f"{user.who} uses it on {waiter}, which has not waited for {former.who} on {former.stream.name}"
        lines = f"submitted at {user.place}", f"used before at {former.place}"
        return self._unordered(page, text, {waiter}, former, lines, user.place)

    def _too_early(self, page: int, user: User, after: Points) -> OwnershipError:
        waiters, place = {point.stream.name.value for point in after}, here()
        text = f"is retired with Points {[*after]}, and {user.who} on {user.stream.name} may still use it"
        lines = f"submitted at {user.place}", f"retired at {place}"
        return self._unordered(page, text, waiters, user, lines, place)

    def _unordered(
        self, page: int, text: str, waiters: set[str], user: User, lines: tuple[str, ...], place: Place
    ) -> OwnershipError:
        memory, source = f"{self.name} {page}", user.stream.name
        pairs = [(edge.name, one.value, other.value) for edge in PAGE_EDGES for one, other in edge.pairs]
        edges = [name for name, one, other in pairs if one in waiters and other == source]
        missing = f"missing edge: {' or '.join((*edges, f'a Point on {source}'))}"
        report = "\n  ".join((f"ownership: {memory}: {text}", *lines, missing))
        return OwnershipError(report, edges[0] if edges else "", memory, (str(user.place), str(place)), 0)

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
        lines = [f"ownership: {memory}: {text}", f"  used by {describe(op)}" if op else f"  submitted at {place}"]
        if lease is not None:
            lines.append(f"  leased at {lease.leased}")
            if lease.retired is not None:
                lines.append(f"  retired at {lease.retired}")
        places = [] if lease is None else [str(lease.retired or lease.leased)]
        return OwnershipError("\n".join(lines), "", memory, (*places, str(place)), 0 if op is None else op.seq)


def _not_in(known: Clock, users: dict[int, User]) -> dict[int, User]:
    """Those of ``users`` that are not in ``known``, a clock."""
    return {number: user for number, user in users.items() if number >= len(known) or known[number] < user.position}
