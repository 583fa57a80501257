"""The schedulers of several ranks, one in each process, decide the same because they see the same.

What a turn of the loop drains is one value, a :class:`Turn`. Rank 0 makes it, from its inbox and from what all ranks
say on the RankBoard: whether results have reached them, which transfers have ended, what their storages have done. It
sends it to the others before anybody decides anything. It waits for nobody: what has not reached a rank yet is in a
later turn. The others wait for it, and ask no clock, device or disk of their
own on the way to a decision.

Each rank posts a hash of a step's decisions before it launches the step, and compares those of this step and the last
with whatever the others have posted by then. Of two that differ the later one sees it, and does not launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from fenceline.ipc.io_struct import (
    FlightRecorderReq,
    GetInternalStateReq,
    Message,
    ProfileReq,
    SchedulerInput,
)
from fenceline.ipc.rank_board import News, RankBoard
from fenceline.mem_cache.storage.agreement import StorageAgreement, StorageVoice
from fenceline.memory_order import of_all_ranks
from fenceline.memory_order.edges import ENDED_ON_ALL, RANK_RESULTS
from fenceline.model_executor.step import Completions, ForwardResult, ScheduleBatch, Worker
from fenceline.scheduler.decisions import FIELDS, Decisions
from fenceline.scheduler.req import Req

Drain = Callable[[bool, int | None], Sequence[Message]]
Awaited = tuple[int, ForwardResult]  # a step's number and its results


class RanksDifferError(RuntimeError):
    """Ranks have decided differently; what they compute together is wrong from here on."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """All that the schedulers learn in one turn of the loop, from 1 on, the same on all ranks."""

    number: int
    messages: list[SchedulerInput]  # that decide something
    results_arrived: bool  # on all ranks: those of the step in flight, if they were asked for
    transfers: tuple[int, int] = (0, 0)  # that have ended on all ranks since the start: loads and stores
    storage: list[News] = []  # what the ranks' storages have done since the last turn, see StorageAgreement


_OBSERVING = (ProfileReq, FlightRecorderReq, GetInternalStateReq)
TURN_DECODER = msgspec.msgpack.Decoder(Turn)
_ENCODER = msgspec.msgpack.Encoder()


class RankLink(ABC):
    """One rank's connection to the others."""

    def __init__(self, board: RankBoard, worker: Worker) -> None:
        self.board = board
        self._worker = worker
        self.decisions = Decisions()
        self._num_turns = 0
        # The last two steps and their numbers. Replaced as a whole: the watchdog's thread compares too.
        self._latest: tuple[tuple[int, tuple[int, ...]], ...] = ()
        self._voice = StorageVoice()

    @abstractmethod
    def turn(
        self, block: bool, timeout_ms: int | None, awaited: Awaited | None
    ) -> tuple[Sequence[Message], Completions]:
        """What this turn drains. ``block``: wait until there is a message, ``timeout_ms`` at most; ``awaited``: the
        results to ask for. The messages that only observe go to rank 0 alone."""

    def decided(self, step: int, batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
        """``step``, from 1 on, is about to be launched. Raises ``RanksDifferError``."""
        fields = self.decisions.of(batch, reqs)
        self._latest = (*self._latest[-1:], (step, fields))
        self.board.post_decision(step, fields)
        self.compare()

    def compare(self) -> None:
        """Compare this rank's last two steps with the other ranks'. Any thread may. Raises ``RanksDifferError``."""
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
        """Tell the others whether the results of ``awaited`` have reached this rank, which of its transfers have ended
        and what its storage has done."""
        if awaited is not None and awaited[1].arrived():
            self.board.post_arrived(awaited[0])
        worker = self._worker
        if worker.hicache is not None:
            self.board.post_transfers(*worker.hicache.ended())
        if worker.storage is not None:
            self.board.post_news(self._voice.told(worker.storage.controller.drain()))

    def _completions(self, turn: Turn, awaited: Awaited | None) -> Completions:
        """What ``turn`` says of all ranks, of this rank's transfers and prefetches."""
        device, transfers = self._worker.device, self._worker.hicache
        arrived = of_all_ranks(
            device, RANK_RESULTS, turn.results_arrived, lambda: awaited is not None and awaited[1].arrived()
        )
        return Completions(
            transfers=()
            if transfers is None
            else transfers.drain_acks(of_all_ranks(device, ENDED_ON_ALL, turn.transfers, transfers.ended)),
            storage=self._voice.heard(turn.storage),
            results_arrived=arrived,
        )


class LeadingRank(RankLink):
    """Rank 0."""

    def __init__(
        self, board: RankBoard, worker: Worker, drain: Drain, send: Sequence[Callable[[bytes], None]]
    ) -> None:
        """``drain``: of the inbox. ``send``: to each of the other ranks; never blocks."""
        super().__init__(board, worker)
        self._drain = drain
        self._send = send
        self._agreement = StorageAgreement(board.num_ranks)

    def turn(
        self, block: bool, timeout_ms: int | None, awaited: Awaited | None
    ) -> tuple[Sequence[Message], Completions]:
        """See :class:`RankLink`."""
        messages = self._drain(block, timeout_ms)
        self.post_progress(awaited)
        board = self.board
        arrived = awaited is not None and board.all_arrived() >= awaited[0]
        transfers = (0, 0) if self._worker.hicache is None else board.all_transfers()
        storage: list[News] = []
        if self._worker.storage is not None:
            for rank in range(board.num_ranks):
                storage += self._agreement.hear(rank, board.read_news(rank))
        self._num_turns += 1
        deciding = [message for message in messages if not isinstance(message, _OBSERVING)]
        turn = Turn(self._num_turns, cast("list[SchedulerInput]", deciding), arrived, transfers, storage)
        data = _ENCODER.encode(turn)
        for send in self._send:
            send(data)
        return messages, self._completions(turn, awaited)


class FollowingRank(RankLink):
    """Any other rank."""

    def __init__(self, board: RankBoard, worker: Worker, receive: Callable[[], Turn]) -> None:
        """``receive`` waits for the next turn."""
        super().__init__(board, worker)
        self._receive = receive

    def turn(
        self, block: bool, timeout_ms: int | None, awaited: Awaited | None
    ) -> tuple[Sequence[Message], Completions]:
        """See :class:`RankLink`."""
        self.post_progress(awaited)
        turn = self._receive()
        self._num_turns += 1
        assert turn.number == self._num_turns, f"turn {turn.number} came in place of {self._num_turns}"
        return turn.messages, self._completions(turn, awaited)
