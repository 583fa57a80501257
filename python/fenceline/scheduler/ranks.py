"""Several ranks, each with a scheduler in its own process, make the same decisions because they get the same input.

All input of one turn of the loop is one value, a :class:`Turn`. Rank 0 makes it from its inbox and from what all ranks
have posted on the RankBoard: whether results have reached them, how many transfers have ended, and what their storages
have done. It sends the Turn to the other ranks before it decides anything itself. Rank 0 does not wait for other ranks:
what one of them has not posted yet becomes part of a later turn. The other ranks wait for the Turn, and do not consult
a clock, device or disk of their own for a decision.

Before a rank launches a step, it posts hashes of the step's decisions and compares those of this step and the one
before with what the other ranks have posted so far. If two ranks differ, the one that posts later notices it, and does
not launch the step.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from fenceline.ipc.io_struct import (
    ENCODER,
    FlightRecorderReq,
    GetInternalStateReq,
    Message,
    ProfileReq,
    SchedulerInput,
    decoder,
)
from fenceline.ipc.rank_board import NUM_FIELDS, News, RankBoard
from fenceline.mem_cache.storage.agreement import StorageAckCodec, StorageAgreement
from fenceline.memory_order import rank_consensus
from fenceline.memory_order.edges import ENDED_ON_ALL, RANK_RESULTS
from fenceline.model_executor.step import Completions, ForwardResult, StepBatch, StepOutput, Worker
from fenceline.scheduler.req import Req

Drain = Callable[[bool, int | None], Sequence[Message]]
Awaited = tuple[int, ForwardResult]  # a step's number and its results


class RanksDifferError(RuntimeError):
    """Ranks have made different decisions, so what they compute together is wrong from that step on."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """All input of the schedulers in one turn of the loop. It is the same on all ranks."""

    number: int  # counts from 1
    messages: list[SchedulerInput]  # those that decisions depend on
    results_arrived: bool  # whether the awaited results of the step in flight have arrived on all ranks
    transfers: tuple[int, int] = (0, 0)  # loads and stores that have ended on all ranks, since the start
    storage: list[News] = []  # what the ranks' storages have done since the last turn, see StorageAgreement


_OBSERVING = (ProfileReq, FlightRecorderReq, GetInternalStateReq)
TURN_DECODER: msgspec.msgpack.Decoder[Turn] = decoder(Turn)


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


class RankLink(ABC):
    """One rank's connection to the others."""

    def __init__(self, board: RankBoard, worker: Worker) -> None:
        self.board = board
        self._worker = worker
        self.decisions = Decisions()
        self._num_turns = 0
        # The numbers and decisions of the last two steps. The tuple is replaced as a whole, because the watchdog's
        # thread reads it too.
        self._latest: tuple[tuple[int, tuple[int, ...]], ...] = ()
        self._codec = StorageAckCodec()

    @abstractmethod
    def turn(
        self, block: bool, timeout_ms: int | None, awaited: Awaited | None, own: Sequence[SchedulerInput] = ()
    ) -> tuple[Sequence[Message], Completions]:
        """The messages and completions of the next turn. ``block``: rank 0 waits until there is a message, for at most
        ``timeout_ms`` milliseconds (None: without limit). ``awaited``: the step whose results to check for, if any.
        ``own``: messages from this rank's scheduler to itself; those of rank 0 come first on all ranks, and those of
        other ranks are dropped. Messages that only observe are returned on rank 0 only."""

    def decided(self, step: int, batch: StepBatch, reqs: Sequence[Req]) -> None:
        """Post the decisions of step number ``step`` (from 1), which is about to be launched, and compare them. Raises
        ``RanksDifferError`` if another rank has decided differently."""
        fields = self.decisions.of(batch, reqs)
        self._latest = (*self._latest[-1:], (step, fields))
        self.board.post_decision(step, fields)
        self.compare()

    def compare(self) -> None:
        """Compare this rank's last two steps with those of the other ranks. May be called from any thread. Raises
        ``RanksDifferError`` if they differ."""
        board = self.board
        for step, ours in self._latest:
            for rank in range(board.num_ranks):
                if rank == board.rank or board.agrees(rank, step):
                    continue
                theirs = board.decision(rank, step)
                if theirs is None or theirs == ours:
                    continue
                name = next(name for name, a, b in zip(FIELDS, ours, theirs, strict=True) if a != b)
                raise RanksDifferError(
                    f"ranks {min(rank, board.rank)} and {max(rank, board.rank)} have decided differently: step {step},"
                    f" {name}"
                )

    def post_progress(self, awaited: Awaited | None) -> None:
        """Post whether the results of ``awaited`` are here, how many transfers have ended, and storage's acks."""
        if awaited is not None and awaited[1].arrived():
            self.board.post_arrived(awaited[0])
        worker = self._worker
        if worker.hicache is not None:
            self.board.post_transfers(*worker.hicache.ended())
        if worker.storage is not None:
            self.board.post_news(self._codec.encode(worker.storage.controller.drain()))

    def _completions(self, turn: Turn, awaited: Awaited | None) -> Completions:
        """The completions that ``turn`` reports for all ranks, as this rank's own tickets and prefetches."""
        device, transfers = self._worker.device, self._worker.hicache
        arrived = rank_consensus(
            device, RANK_RESULTS, turn.results_arrived, lambda: awaited is not None and awaited[1].arrived()
        )
        return Completions(
            transfers=()
            if transfers is None
            else transfers.drain_acks(rank_consensus(device, ENDED_ON_ALL, turn.transfers, transfers.ended)),
            storage=self._codec.decode(turn.storage),
            results_arrived=arrived,
        )


class LeadingRank(RankLink):
    """The link of rank 0, which makes the turns."""

    def __init__(self, board: RankBoard, worker: Worker, drain: Drain, send: Sequence[Callable[[bytes], None]]) -> None:
        """``drain`` is the inbox's method. ``send``: for each other rank what sends it bytes, never blocking."""
        super().__init__(board, worker)
        self._drain = drain
        self._send = send
        self._agreement = StorageAgreement(board.num_ranks)

    def turn(
        self, block: bool, timeout_ms: int | None, awaited: Awaited | None, own: Sequence[SchedulerInput] = ()
    ) -> tuple[Sequence[Message], Completions]:
        messages = [*own, *self._drain(block and not own, timeout_ms)]
        self.post_progress(awaited)
        board = self.board
        arrived = awaited is not None and board.all_arrived() >= awaited[0]
        transfers = (0, 0) if self._worker.hicache is None else board.all_transfers()
        storage: list[News] = []
        if self._worker.storage is not None:
            for rank in range(board.num_ranks):
                storage += self._agreement.add(rank, board.read_news(rank))
        self._num_turns += 1
        deciding = [message for message in messages if not isinstance(message, _OBSERVING)]
        turn = Turn(self._num_turns, cast("list[SchedulerInput]", deciding), arrived, transfers, storage)
        data = ENCODER.encode(turn)
        for send in self._send:
            send(data)
        return messages, self._completions(turn, awaited)


class FollowingRank(RankLink):
    """The link of any other rank, which receives the turns."""

    def __init__(self, board: RankBoard, worker: Worker, receive: Callable[[], Turn]) -> None:
        """``receive`` waits for the next turn and returns it."""
        super().__init__(board, worker)
        self._receive = receive

    def turn(
        self, block: bool, timeout_ms: int | None, awaited: Awaited | None, own: Sequence[SchedulerInput] = ()
    ) -> tuple[Sequence[Message], Completions]:
        self.post_progress(awaited)
        turn = self._receive()
        self._num_turns += 1
        assert turn.number == self._num_turns, f"turn {turn.number} came in place of {self._num_turns}"
        return turn.messages, self._completions(turn, awaited)
