"""RankBoard: what the ranks of a host tell each other without waiting for each other, in shared memory.

Each rank writes its own line and reads all of them: up to which step its results have arrived, and what it has decided
in its latest steps. A file in the server's private folder is the memory, so that it goes when the folder goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fenceline.ipc.io_struct import PortArgs

NUM_FIELDS = 6  # of a decision
NUM_STEPS = (
    64  # that a rank remembers: the ranks are never so many steps apart, since each step has collectives
)
_ARRIVED, _FAILED, _FIRST_RECORD = 0, 1, 2
_RECORD = 2 + NUM_FIELDS  # step, fields, seal
_MASK = (1 << 62) - 1


def create_rank_board(ports: PortArgs, num_ranks: int) -> None:
    """Make the memory, all zeros, before any rank opens it."""
    _path(ports).write_bytes(bytes(8 * num_ranks * (_FIRST_RECORD + NUM_STEPS * _RECORD)))


def rank_meeting(ports: PortArgs) -> Path:
    """The file in which the back end of ranks finds the others; it does not exist yet."""
    return _path(ports).with_name("ranks.meeting")


def rank_endpoint(ports: PortArgs, rank: int) -> str:
    """Where ``rank``, not 0, receives what rank 0 has drained."""
    return f"{ports.scheduler}-{rank}"


def _path(ports: PortArgs) -> Path:
    return Path(ports.scheduler.removeprefix("ipc://")).with_name("ranks.board")


class RankBoard:
    """One rank's view. Of its own line each rank is the only writer. A number of 64 bits is read as it was written; a
    record of several has a seal, and is not read while it is being written."""

    def __init__(self, ports: PortArgs, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        words = _FIRST_RECORD + NUM_STEPS * _RECORD
        lines = np.memmap(_path(ports), dtype=np.int64, mode="r+", shape=(num_ranks, words))
        self._arrived = lines[:, _ARRIVED]
        self._failed = lines[:, _FAILED]
        self._records = lines[:, _FIRST_RECORD:].reshape(num_ranks, NUM_STEPS, _RECORD)

    def post_arrived(self, step: int) -> None:
        """This rank has the results of ``step``, 1 or more, and of all before it."""
        self._arrived[self.rank] = step

    def all_arrived(self) -> int:
        """The latest step whose results have arrived on all ranks, as far as they have said."""
        return int(self._arrived.min())

    def post_failed(self) -> None:
        """This rank has failed, and has written its flight record."""
        self._failed[self.rank] = 1

    def all_failed(self) -> bool:
        """Whether all ranks have failed, and have written their flight records."""
        return bool(self._failed.all())

    def post_decision(self, step: int, fields: Sequence[int]) -> None:
        """This rank has decided ``fields``, each of less than 32 bits, for ``step``, 1 or more."""
        self._records[self.rank, step % NUM_STEPS] = (step, *fields, _seal(step, fields))

    def decision(self, rank: int, step: int) -> tuple[int, ...] | None:
        """What ``rank`` has decided for ``step``; None if it has not said, or no longer says."""
        found, *fields, seal = self._records[rank, step % NUM_STEPS].tolist()
        return tuple(fields) if found == step and seal == _seal(step, fields) else None


def _seal(step: int, fields: Sequence[int]) -> int:
    seal = step
    for value in fields:
        seal = (seal * 1000003 + value) & _MASK
    return seal
