"""Hashes of a step's decisions and of the tokens before it. Ranks that decide the same have the same hashes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fenceline.ipc.rank_board import NUM_FIELDS
from fenceline.model_executor.step import StepBatch, StepOutput
from fenceline.scheduler.req import Req

# The first field that differs is reported. A cause comes before its effects: other tokens may lead to another kind of
# step, that to other requests, and so on.
FIELDS = ("sampled tokens", "kind of step", "requests", "rows", "lengths", "pages", "loads")
assert len(FIELDS) == NUM_FIELDS

_Array = npt.NDArray[np.generic]


class Decisions:
    """Computes the hashes. The requests of a decode step are not hashed again if they are those of the step before."""

    def __init__(self) -> None:
        self._composition = -1
        self._requests = self._rows = 0
        self._tokens = 0

    def published(self, out: StepOutput) -> None:
        """Include the tokens of a published step. Each rank has computed them itself, so they may differ too."""
        self._tokens = zlib.crc32(out.tokens.tobytes(), self._tokens)

    def of(self, batch: StepBatch, reqs: Sequence[Req]) -> tuple[int, ...]:
        """One number for each of ``FIELDS``, for ``batch`` and its requests ``reqs`` (in batch order)."""
        writes = batch.page_writes
        pages: list[_Array] = [writes.rows, writes.columns, writes.pages]
        if not batch.is_decode:
            self._composition = -1
            lengths = [batch.starts, batch.seq_lens, batch.samples]
            pages += [chunk.out_slots for chunk in batch.chunks]
            loads = _hash(np.array([ticket.id for ticket in batch.loads]))
            return self._tokens, 1, _names(reqs), _hash(batch.rows), _hash(*lengths), _hash(*pages), loads
        if batch.composition != self._composition:
            self._composition, self._requests, self._rows = batch.composition, _names(reqs), _hash(batch.rows)
        return self._tokens, 2, self._requests, self._rows, _hash(batch.seq_lens), _hash(*pages), 0


def _names(reqs: Sequence[Req]) -> int:
    return zlib.crc32("\n".join([req.rid for req in reqs]).encode())


def _hash(*arrays: _Array) -> int:
    value = 0
    for array in arrays:
        if len(array):
            value = zlib.crc32(array.tobytes(), value)
    return value
