"""RankBoard: shared memory by which the ranks of a host exchange their progress without waiting for each other.

Each rank writes its own line and reads all of them: up to which step its results have arrived, how many transfers of
its cache have ended, what its storage has done, and what it has decided in its latest steps. A file in the server's
private folder is the memory, so that it goes when the folder goes. Where ranks are on several hosts, each host has
such a file of all lines, and a rank's writes to its own are sent to the others (``node_link``).
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from fenceline.ipc.io_struct import PortArgs

NUM_FIELDS = 7  # of a decision
# That a rank remembers: the ranks are never so many steps apart, since each step has collectives.
NUM_STEPS = 64
_NUMBER = struct.Struct("q")  # native: one store
_RECORD = struct.Struct(f"=q{NUM_FIELDS}I")  # step and fields
_SEAL = struct.Struct("=Q")
_RECORD_BYTES = _RECORD.size + _SEAL.size
NUM_NEWS = 256  # that may be posted and not yet read; more wait
_NEWS = struct.Struct("=4q")  # number, from 1 on, and three values
_NEWS_BYTES = _NEWS.size + _SEAL.size
_MOST_RANKS = 64
_ARRIVED, _FAILED, _LOADS, _STORES, _READ = (0, 8, 16, 24, 32)  # where in a line; _READ is a number for each rank
_FIRST_RECORD = _READ + 8 * _MOST_RANKS
_FIRST_NEWS = _FIRST_RECORD + NUM_STEPS * _RECORD_BYTES
_LINE = _FIRST_NEWS + NUM_NEWS * _NEWS_BYTES
News = tuple[int, int, int]


def create_rank_board(ports: PortArgs, num_ranks: int) -> None:
    """Make the memory, all zeros, before any rank opens it."""
    assert num_ranks <= _MOST_RANKS, f"{num_ranks} ranks"
    _path(ports).write_bytes(bytes(num_ranks * _LINE))


def rank_meeting(ports: PortArgs) -> Path:
    """The file in which the back end of ranks finds the others; it does not exist yet."""
    return _path(ports).with_name("ranks.meeting")


def rank_endpoint(ports: PortArgs, rank: int) -> str:
    """Where ``rank``, not 0, receives what rank 0 has drained."""
    return f"{ports.scheduler}-{rank}"


def rank_of(at: int) -> int:
    """On whose line the byte ``at`` is."""
    return at // _LINE


def _path(ports: PortArgs) -> Path:
    return Path(ports.scheduler.removeprefix("ipc://")).with_name("ranks.board")


class RankBoard:
    """One rank's view. Of its own line each rank is the only writer. A 64-bit number is always read as it was written.
    A record of several numbers has a seal (its CRC-32) and is not read while it is being written."""

    def __init__(self, ports: PortArgs, rank: int, num_ranks: int, here: Container[int] = ()) -> None:
        """``here``: the ranks of this host, where there are several."""
        self.rank = rank
        self.num_ranks = num_ranks
        self._here = here
        with open(_path(ports), "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), num_ranks * _LINE)
        self._unposted: deque[News] = deque()
        self._num_news = 0  # posted
        self.mirror: Callable[[int, bytes], None] | None = None  # has the boards of other hosts show a write

    def post_arrived(self, step: int) -> None:
        """This rank has the results of ``step``, 1 or more, and of all before it."""
        self._post(_ARRIVED, step)

    def all_arrived(self) -> int:
        """The latest step whose results have arrived on all ranks, as far as they have said."""
        return min(self._number(rank, _ARRIVED) for rank in range(self.num_ranks))

    def post_failed(self) -> None:
        """This rank has failed, and has written its flight record."""
        self._post(_FAILED, 1)

    def any_failed(self) -> bool:
        return any(self._number(rank, _FAILED) for rank in range(self.num_ranks))

    def all_failed(self) -> bool:
        """Whether all ranks have failed, and have written their flight records."""
        return all(self._number(rank, _FAILED) for rank in range(self.num_ranks))

    def post_transfers(self, loads: int, stores: int) -> None:
        """Post how many loads and stores of this rank's cache have ended since the start, in their order."""
        self._post(_LOADS, loads)
        self._post(_STORES, stores)

    def all_transfers(self) -> tuple[int, int]:
        """How many loads and stores have ended on all ranks, as far as they have said."""
        loads, stores = ([self._number(rank, where) for rank in range(self.num_ranks)] for where in (_LOADS, _STORES))
        return min(loads), min(stores)

    def post_news(self, news: Iterable[News]) -> None:
        """Send rank 0 the ``news``, three numbers each, in order. Without room a later call sends them."""
        self._unposted.extend(news)
        if not self._unposted:
            return
        num_read = self._number(0, _READ + 8 * self.rank)
        while self._unposted and self._num_news - num_read < NUM_NEWS:
            self._num_news += 1
            record = _NEWS.pack(self._num_news, *self._unposted.popleft())
            at = _news_place(self.rank, self._num_news)
            self._write(at, record + _SEAL.pack(zlib.crc32(record)))

    def read_news(self, rank: int) -> list[News]:
        """What ``rank`` has sent since the last call. Only rank 0 reads this."""
        assert self.rank == 0, "rank 0 reads"
        where = _READ + 8 * rank
        first = number = self._number(0, where)
        news: list[News] = []
        while (values := self._news(rank, number + 1)) is not None:
            number += 1
            news.append(values)
        if number > first:
            self._post(where, number)
        return news

    def _news(self, rank: int, number: int) -> News | None:
        at = _news_place(rank, number)
        data = self._memory[at : at + _NEWS_BYTES]
        record = data[: _NEWS.size]
        found, *values = _NEWS.unpack(record)
        if found != number or _SEAL.unpack(data[_NEWS.size :]) != (zlib.crc32(record),):
            return None
        return values[0], values[1], values[2]

    def _post(self, where: int, value: int) -> None:
        at = self.rank * _LINE + where
        _NUMBER.pack_into(self._memory, at, value)
        if self.mirror is not None:
            self.mirror(at, _NUMBER.pack(value))

    def _write(self, at: int, data: bytes) -> None:
        self._memory[at : at + len(data)] = data
        if self.mirror is not None:
            self.mirror(at, data)

    def copy_write(self, at: int, data: bytes) -> None:
        """A rank of another host has written ``data`` to its own line. What is not on such a line is dropped."""
        end = at + len(data)
        rank = rank_of(at)
        if not 0 <= at < end <= self.num_ranks * _LINE or rank in self._here or (end - 1) // _LINE != rank:
            return
        if len(data) == _NUMBER.size:
            _NUMBER.pack_into(self._memory, at, *_NUMBER.unpack(data))
        else:
            self._memory[at:end] = data

    def _number(self, rank: int, where: int) -> int:
        (value,) = _NUMBER.unpack_from(self._memory, rank * _LINE + where)
        return int(value)

    def post_decision(self, step: int, fields: Sequence[int]) -> None:
        """This rank has decided ``fields``, 32 bits each, for ``step``, 1 or more."""
        record = _RECORD.pack(step, *fields)
        at = _place(self.rank, step)
        self._write(at, record + _SEAL.pack(zlib.crc32(record)))

    def agrees(self, rank: int, step: int) -> bool:
        """Whether ``rank`` has posted for ``step`` what this rank has. Takes less time than :meth:`decision`."""
        ours, theirs = _place(self.rank, step), _place(rank, step)
        memory = self._memory
        return memory[ours : ours + _RECORD_BYTES] == memory[theirs : theirs + _RECORD_BYTES]

    def decision(self, rank: int, step: int) -> tuple[int, ...] | None:
        """What ``rank`` has decided for ``step``; None if it has not said, or no longer says."""
        at = _place(rank, step)
        data = self._memory[at : at + _RECORD_BYTES]  # copied, so that seal and record are of one moment
        record = data[: _RECORD.size]
        if _SEAL.unpack(data[_RECORD.size :]) != (zlib.crc32(record),):
            return None
        found, *fields = _RECORD.unpack(record)
        return tuple(fields) if found == step else None


def _news_place(rank: int, number: int) -> int:
    return rank * _LINE + _FIRST_NEWS + number % NUM_NEWS * _NEWS_BYTES


def _place(rank: int, step: int) -> int:
    return rank * _LINE + _FIRST_RECORD + step % NUM_STEPS * _RECORD_BYTES
