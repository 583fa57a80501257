"""RunningBatch: the decoding requests, kept as columns so that a step costs numpy operations, not loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fenceline.memory_order import Points
from fenceline.model_executor.step import DecodeBatch, PageWrites
from fenceline.sampling.sampling_batch import ReqSampling
from fenceline.scheduler.req import Req

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# A request gets pages for this many tokens at once while memory is plentiful, so that most steps change
# no page table; the least it gets is one page.
_AHEAD_TOKENS = 16


class RunningBatch:
    """Requests whose prompts are computed (or in flight), in order of arrival here.

    Columns [B]: ``seq_lens`` (tokens submitted so far), ``capacity`` (tokens its pages hold), ``final_lens``
    (``seq_lens`` after its last step). ``composition`` changes with membership and with nothing else.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.reqs: list[Req] = []
        self.composition = 0
        self._rows = _column()
        self._seq_lens = _column()
        self._capacity = _column()
        self._final_lens = _column()
        self._sampling: tuple[ReqSampling, ...] = ()

    def __len__(self) -> int:
        return len(self.reqs)

    @property
    def num_tokens(self) -> int:
        """Tokens submitted, over all requests."""
        return int(self._seq_lens.sum())

    def expected_tokens(self, ratio: float, clip: int) -> F64:
        """Tokens each of these requests is expected to ask for yet: ``ratio`` of what it may, ``clip`` at most."""
        expected: F64 = np.minimum(self._final_lens - self._seq_lens, clip) * ratio
        return expected

    def reserved_tokens(self, ratio: float, clip: int) -> int:
        """:meth:`expected_tokens` of all."""
        return int(self.expected_tokens(ratio, clip).sum())

    def add(self, reqs: Sequence[Req]) -> None:
        """Requests whose whole prompt has been submitted and that may sample more than one token."""
        if not reqs:
            return
        self.reqs.extend(reqs)
        self._rows = _extended(self._rows, [req.row for req in reqs])
        self._seq_lens = _extended(self._seq_lens, [req.computed_len for req in reqs])
        self._capacity = _extended(self._capacity, [len(req.pages) * self.page_size for req in reqs])
        self._final_lens = _extended(self._final_lens, [req.final_len for req in reqs])
        self._changed()

    def drop_departed(self) -> None:
        """Remove requests that have left, and those whose last token is already in flight."""
        keep = self._seq_lens < self._final_lens
        keep &= np.fromiter((not req.left for req in self.reqs), dtype=np.bool_, count=len(self.reqs))
        if not keep.all():
            self._keep(keep)

    def remove(self, req: Req) -> None:
        """Remove one request."""
        keep = np.ones(len(self.reqs), dtype=np.bool_)
        keep[self.reqs.index(req)] = False
        self._keep(keep)

    def num_pages_needed(self) -> int:
        """Pages without which the next step cannot run."""
        return int((self._seq_lens >= self._capacity).sum())

    def schedule_step(
        self, num_available_pages: int, grow: Callable[[Req, int], tuple[npt.NDArray[np.int32], Points]]
    ) -> DecodeBatch:
        """Advance every request by one token; pages come from ``grow``, one at least where one is needed."""
        writes, after = self._grow(num_available_pages, grow)
        self._seq_lens = self._seq_lens + 1
        return DecodeBatch(
            composition=self.composition,
            rows=self._rows,
            seq_lens=self._seq_lens,
            sampling=self._sampling,
            page_writes=writes,
            after=after,
        )

    def _grow(
        self, num_available_pages: int, grow: Callable[[Req, int], tuple[npt.NDArray[np.int32], Points]]
    ) -> tuple[PageWrites, Points]:
        short = np.flatnonzero(self._seq_lens >= self._capacity)
        if len(short) == 0:
            return PageWrites(), Points.none()
        ahead = max(_AHEAD_TOKENS // self.page_size, 1)
        plentiful = num_available_pages >= 2 * ahead * len(self.reqs)
        rows, columns, ids, after = [], [], [], Points.none()
        for i in short.tolist():
            req = self.reqs[i]
            missing = int(self._final_lens[i] - self._capacity[i])
            num_pages = min(ahead, -(-missing // self.page_size)) if plentiful else 1
            first = len(req.pages)
            pages, points = grow(req, num_pages)
            after = after.join(points)
            rows.append(np.full(num_pages, req.row, dtype=np.int64))
            columns.append(np.arange(first, first + num_pages, dtype=np.int64))
            ids.append(pages)
            self._capacity[i] += num_pages * self.page_size
        return PageWrites(np.concatenate(rows), np.concatenate(columns), np.concatenate(ids)), after

    def _keep(self, keep: Bools) -> None:
        for req, stays, length in zip(self.reqs, keep.tolist(), self._seq_lens.tolist(), strict=True):
            if not stays:
                req.computed_len = length
        self.reqs = [req for req, stays in zip(self.reqs, keep.tolist(), strict=True) if stays]
        self._rows = self._rows[keep]
        self._seq_lens = self._seq_lens[keep]
        self._capacity = self._capacity[keep]
        self._final_lens = self._final_lens[keep]
        self._changed()

    def _changed(self) -> None:
        self.composition += 1
        self._sampling = tuple(req.sampling() for req in self.reqs)


def _column() -> I64:
    return np.zeros(0, dtype=np.int64)


def _extended(column: I64, values: list[int]) -> I64:
    return np.concatenate([column, np.array(values, dtype=np.int64)])
