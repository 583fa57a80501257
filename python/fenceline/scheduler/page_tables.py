"""PageTables: which rows of the device's page table say where their requests' pages are now (F5).

A row's version moves with the decision that its request's pages are others: when the row is given to a request, when a
prompt moves onto the tree's pages, when the row is given back. The writes that follow carry the version that they bring
the row to. A step that is about to read a row behind its version has it written anew, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fenceline.memory_order.relocation import RelocationClock
from fenceline.model_executor.schedule_batch import PageWrites, ScheduleBatch
from fenceline.scheduler.req import Req

I64 = npt.NDArray[np.int64]


class PageTables:
    """Versions of rows, as decided and as submitted to the device."""

    def __init__(self, num_rows: int) -> None:
        self._clock = RelocationClock(num_rows)
        self._behind: set[int] = set()  # rows whose last move has not been written; mostly empty
        self.num_rewritten = 0

    def moved(self, row: int) -> int:
        """``row``'s pages are others from now on. Returns the version that writes bring it to."""
        self._clock.move(row)
        self._behind.add(row)
        return self._clock.version(row)

    def given_back(self, row: int) -> None:
        """``row`` has no request: nobody reads it before it is written."""
        self._clock.move(row)
        self._behind.discard(row)

    def written(self, row: int, version: int) -> None:
        """The next step writes ``row`` as it was decided with ``version``."""
        if version == self._clock.version(row):
            self._behind.discard(row)

    def up_to_date(self, batch: ScheduleBatch, reqs: Sequence[Req]) -> ScheduleBatch:
        """``batch``, with the tables of those of ``reqs`` whose rows are behind written anew."""
        if not self._behind:
            return batch
        stale = [req for req in reqs if req.row in self._behind]
        if not stale:
            return batch
        self.num_rewritten += len(stale)
        for req in stale:
            self._behind.discard(req.row)
        return replace(batch, page_writes=_whole_tables(batch.page_writes, stale))


def _whole_tables(writes: PageWrites, reqs: Sequence[Req]) -> PageWrites:
    """``writes`` of other rows, and all of ``reqs``' tables."""
    others = ~np.isin(writes.rows, [req.row for req in reqs])
    return PageWrites(
        rows=np.concatenate([writes.rows[others], *(_row(req) for req in reqs)]),
        columns=np.concatenate(
            [writes.columns[others], *(np.arange(len(req.pages), dtype=np.int64) for req in reqs)]
        ),
        pages=np.concatenate([writes.pages[others], *(np.array(req.pages, dtype=np.int32) for req in reqs)]),
    )


def _row(req: Req) -> I64:
    return np.full(len(req.pages), req.row, dtype=np.int64)
