"""Leases on long-lived memory that is handed out by number: KV pages, request rows.

There is no ``free``. ``retire(ids, after=points)`` gives ids back at once *with* the Points after which
they may be accessed again; their next owner waits for those Points (a wait on the same stream costs
nothing). So memory that an in-flight step still reads or writes can be re-allocated without a race (F3,
F13) and without the CPU waiting for the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.stream import Points

Ids = npt.NDArray[np.int32]


class LeaseError(RuntimeError):
    """A lease was used against its rules: retired twice, or never handed out."""


class LeasePool:
    """The ids ``reserved`` .. ``size - 1``, each either free or leased to exactly one owner. Ids below ``reserved`` are
    never handed out: id 0 is the sink that padding writes to (F18). Allocation order is deterministic. Ids known to
    have passed their Points are preferred, then the longest retired."""

    def __init__(self, name: str, size: int, reserved: int = 1) -> None:
        assert 0 <= reserved <= size and size, f"{name}: {size} ids, of which {reserved} are reserved"
        self.name = name
        self.size = size
        self.reserved = reserved
        self.observers: tuple[Callable[[Ids, Points], None], ...] = ()  # called for each retirement
        self._leased = np.zeros(size, dtype=np.bool_)
        self._order = np.arange(size, dtype=np.int32)
        self._place = np.zeros(size, dtype=np.int32)  # each id's index in the retirement that named it last
        self._ready = np.arange(size - 1, reserved - 1, -1, dtype=np.int32)  # a stack: lowest id on top
        self._num_ready = size - reserved
        self._pending: deque[tuple[Ids, Points]] = deque()
        self._num_pending = 0

    @property
    def num_free(self) -> int:
        """Ids that :meth:`alloc` can hand out now."""
        return self._num_ready + self._num_pending

    @property
    def num_leased(self) -> int:
        """Ids that have an owner."""
        return self.size - self.reserved - self.num_free

    def alloc(self, n: int) -> tuple[Ids, Points] | None:
        """Lease ``n`` ids, or None when fewer are free. The Points are those that every stream has to wait for before
        it first accesses the ids."""
        if n > self.num_free:
            return None
        if n > self._num_ready:
            self._settle()
        after = Points.none()
        parts: list[Ids] = [self._pop_ready(min(n, self._num_ready))]
        missing = n - len(parts[0])
        while missing:
            ids, points = self._pending.popleft()
            taken, rest = ids[:missing], ids[missing:]
            if len(rest):
                self._pending.appendleft((rest, points))
            self._num_pending -= len(taken)
            missing -= len(taken)
            after = after.join(points)
            parts.append(taken)
        leased = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._leased[leased] = True
        return leased, after

    def retire(self, ids: Ids, after: Points) -> None:
        """Give ``ids`` back; others may access them after ``after``. Raises :class:`LeaseError` if any of them is not
        leased, is named twice, or is reserved."""
        if len(ids) == 0:
            return
        self._check(ids)
        self._leased[ids] = False
        for observer in self.observers:
            observer(ids, after)
        if after.passed:
            self._push_ready(ids)
        else:
            self._pending.append((ids.astype(np.int32, copy=True), after))
            self._num_pending += len(ids)

    def are_leased(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of ``ids`` [N] have an owner."""
        return self._leased[ids]

    def owned(self) -> Ids:
        """All leased ids in ascending order, for audits."""
        return np.flatnonzero(self._leased).astype(np.int32)

    def _check(self, ids: Ids) -> None:
        """Raise :class:`LeaseError` as :meth:`retire` says. It runs in each retirement, so microseconds count, and
        bytes are counted and compared because that is faster than numpy's reductions. Not reentrant, since it writes to
        ``_place``: only one thread, and no signal handler, may retire to a pool."""
        assert ids.dtype == self._order.dtype, f"{self.name}: ids are {ids.dtype}, not int32"
        if len(ids) == 1:  # a row, or a request's last page
            one = int(ids[0])
            if self.reserved <= one < self.size and self._leased[one]:
                return
        index = ids.astype(np.uint32).astype(np.intp)  # a negative id is far beyond the last
        if len(index) > self.size:
            if self._any_out_of_range(ids):
                raise self._out_of_range(ids)
            raise LeaseError(f"{self.name}: an id is named twice in one retirement")
        try:
            leased = self._leased.take(index)
        except IndexError:
            raise self._out_of_range(ids) from None
        if leased.tobytes().count(1) != len(index):
            if self._any_out_of_range(ids):
                raise self._out_of_range(ids)
            raise LeaseError(f"{self.name}: retired twice: {ids[~leased].tolist()[:8]}")
        order = self._order[: len(index)]
        self._place[index] = order
        if self._place.take(index).tobytes() != order.tobytes():
            raise LeaseError(f"{self.name}: an id is named twice in one retirement")

    def _any_out_of_range(self, ids: Ids) -> bool:
        return int(ids.min()) < self.reserved or int(ids.max()) >= self.size

    def _out_of_range(self, ids: Ids) -> LeaseError:
        return LeaseError(f"{self.name}: ids {ids.min()}..{ids.max()} are not all in {self.reserved}..{self.size - 1}")

    def _settle(self) -> None:
        """Move the ids whose Points have passed to the ready stack; the others keep their order."""
        still: deque[tuple[Ids, Points]] = deque()
        for ids, points in self._pending:
            if points.passed:
                self._push_ready(ids)
                self._num_pending -= len(ids)
            else:
                still.append((ids, points))
        self._pending = still

    def _pop_ready(self, n: int) -> Ids:
        top = self._num_ready
        self._num_ready = top - n
        return self._ready[top - n : top][::-1].copy()

    def _push_ready(self, ids: Ids) -> None:
        self._ready[self._num_ready : self._num_ready + len(ids)] = ids[::-1]
        self._num_ready += len(ids)
