"""What the ranks must agree on, by what each of them has said: about their storages, and about their steps.

``mem_cache/storage/agreement.py`` keeps counts and flags for each prefetch. Here everything that was said is kept, and
what holds for all ranks is computed from it again after each word. What follows from it must be agreed on at once, only
once and on every rank, and nothing else may be.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from fenceline.mem_cache.storage.agreement import NewsKind, StorageAckCodec, StorageAgreement, StorageNews
from fenceline.mem_cache.storage.controller import Ack, Done, Fetched, Found, TimedOut, Written
from fenceline.mem_cache.storage.worker import Outcome
from fenceline.model_executor.step import StepBatch, StepOutput
from fenceline.scheduler.decisions import FIELDS
from fenceline.scheduler.ranks import Awaited, RankLink
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import InFlight, Scheduler
from fenceline.vgpu.proving.events import around

Fact = tuple[
    str, int
]  # what is known of a write or a prefetch, and how many pages, or the place in ``Outcome``
_OUTCOMES = list(Outcome)
_COMPLETE = _OUTCOMES.index(Outcome.COMPLETE)


class AgreementRecord:
    """Compares what ``num_ranks`` ranks hear with what they have said. ``wrong``: the differences."""

    def __init__(self, num_ranks: int) -> None:
        self.wrong: list[str] = []
        self._said: list[list[tuple[int, Fact]]] = [[] for _ in range(num_ranks)]  # with the handle
        self._told: list[list[tuple[int, Fact]]] = [
            [] for _ in range(num_ranks)
        ]  # of these, what rank 0 has read
        # Writes and prefetches are numbered apart.
        self._by_op: dict[tuple[bool, int], list[list[Fact]]] = defaultdict(
            lambda: [[] for _ in range(num_ranks)]
        )
        self._agreed: list[tuple[int, Fact]] = []
        self._heard: list[list[tuple[int, Fact]]] = [[] for _ in range(num_ranks)]

    def watch(self, rank: int, codec: StorageAckCodec, agreement: StorageAgreement | None) -> None:
        """Compare what ``rank`` says and hears; rank 0 has the ``agreement``."""
        around(codec, "encode", before=lambda acks: self._says(rank, acks))
        around(codec, "decode", after=lambda acks, news: self._hears(rank, acks))
        if agreement is None:
            return
        add = agreement.add

        def add_one_by_one(rank: int, news: Iterable[tuple[int, int, int]]) -> list[StorageNews]:
            agreed = []
            for one in news:
                found = add(rank, [one])
                self._compare(rank, one, found)
                agreed += found
            return agreed

        agreement.add = add_one_by_one  # type: ignore[method-assign]

    def finish(self) -> str:
        """What is wrong at the end, when all ranks have heard everything; "" if nothing is."""
        for rank, (said, told, heard) in enumerate(zip(self._said, self._told, self._heard, strict=True)):
            self._check(said == told, f"rank {rank} has said {_first_difference(said, told)} to rank 0")
            self._check(
                heard == self._agreed, f"rank {rank} has heard {_first_difference(self._agreed, heard)}"
            )
        return "\n".join(self.wrong)

    def _says(self, rank: int, acks: Sequence[Ack]) -> None:
        self._said[rank] += [_fact(ack) for ack in acks]

    def _hears(self, rank: int, acks: Sequence[Ack]) -> None:
        num_fetched: dict[int, int] = defaultdict(int)
        for handle, (kind, num) in self._heard[rank]:
            num_fetched[handle] += num if kind == "fetched" else 0
        for ack in acks:
            handle, (kind, num) = _fact(ack)
            self._heard[rank].append((handle, (kind, num)))
            if isinstance(ack, Fetched):
                first = num_fetched[handle]
                self._check(
                    ack.first == first, f"rank {rank} hears of pages from {ack.first} on, not {first}"
                )
                num_fetched[handle] += num

    def _compare(self, rank: int, news: tuple[int, int, int], agreed: Sequence[StorageNews]) -> None:
        """Rank 0 has read one piece of ``rank``'s news, and has ``agreed`` on more."""
        kind, handle, num = news
        fact = (NewsKind(kind).name.lower(), num)
        self._told[rank].append((handle, fact))
        ranks = self._by_op[kind == NewsKind.WRITTEN, handle]
        before = _holding(ranks)
        ranks[rank].append(fact)
        after = _holding(ranks)
        new = {name: num for name, num in after.items() if before.get(name) != num}
        if "fetched" in new:
            new["fetched"] -= before.get("fetched", 0)
        if "done" in after:  # what had not been agreed on by then is not needed any more
            new.pop("found", None)
            new.pop("timed_out", None)
        got = {NewsKind(one.kind).name.lower(): one.num for one in agreed}
        right = len(got) == len(agreed) and all(one.handle == handle for one in agreed)
        self._check(
            right and got == new,
            f"rank {rank} says {fact} of {handle}: {list(agreed)} is agreed on, {new} is right",
        )
        self._agreed += [(one.handle, (NewsKind(one.kind).name.lower(), one.num)) for one in agreed]

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 10:
            self.wrong.append(f"storages of the ranks: {text}")


def _fact(ack: Ack) -> tuple[int, Fact]:
    match ack:
        case Written(handle, num):
            return handle, ("written", num)
        case Found(op, num):
            return op.handle, ("found", num)
        case Fetched(op, _, num):
            return op.handle, ("fetched", num)
        case TimedOut(op):
            return op.handle, ("timed_out", 0)
        case Done(op, outcome):
            return op.handle, ("done", _OUTCOMES.index(outcome))


def _holding(ranks: Sequence[Sequence[Fact]]) -> dict[str, int]:
    """What holds for all ranks of a write or a prefetch, each of which has said some facts."""
    if not all(ranks):
        return {}
    numbers = [dict(facts) for facts in ranks]
    if all("written" in facts for facts in numbers):
        return {"written": min(facts["written"] for facts in numbers)}
    holds = {}
    if all("found" in facts or "done" in facts for facts in numbers):
        holds["found"] = min(facts.get("found", 0) for facts in numbers)
    if num := min(sum(num for kind, num in facts if kind == "fetched") for facts in ranks):
        holds["fetched"] = num
    if any("timed_out" in facts for facts in numbers):
        holds["timed_out"] = 0
    if all("done" in facts for facts in numbers):
        outcomes = [facts["done"] for facts in numbers]
        holds["done"] = next((outcome for outcome in outcomes if outcome != _COMPLETE), _COMPLETE)
    return holds


def _first_difference(right: Sequence[tuple[int, Fact]], got: Sequence[tuple[int, Fact]]) -> str:
    index = next(
        (i for i, (a, b) in enumerate(zip(right, got, strict=False)) if a != b), min(len(right), len(got))
    )
    return f"{got[index : index + 1]} in place of {right[index : index + 1]} as number {index}"


class BoardRecord:
    """What ``num_ranks`` ranks post about their steps: the decisions of each step that is launched, in numbers that
    tell different decisions apart, and from when on its results are there. ``wrong``: what is posted wrongly."""

    def __init__(self, num_ranks: int) -> None:
        self.wrong: list[str] = []
        self._arrived = [0] * num_ranks  # the latest step whose results each rank has found to be there
        self._tokens = [b""] * num_ranks  # a digest of all that each rank has published
        # By field and kind of step: the number posted for each decision, and the decision of each number.
        self._numbers: dict[tuple[str, str], dict[object, int]] = defaultdict(dict)
        self._decisions: dict[tuple[str, str], dict[int, object]] = defaultdict(dict)

    def watch(self, rank: int, scheduler: Scheduler, link: RankLink) -> None:
        """Follow ``rank``, whose scheduler has the ``link``."""

        def asks(block: bool, timeout_ms: int | None, awaited: Awaited | None, own: object = ()) -> None:
            if awaited is not None:
                around(awaited[1], "arrived", after=lambda there: self._asked(rank, awaited[0], there))

        def launched(flight: InFlight, batch: StepBatch, reqs: Sequence[Req]) -> None:
            posted = link.board.decision(rank, flight.number)
            if posted is None:
                self._check(False, f"rank {rank} has not posted what it has decided for step {flight.number}")
                return
            for name, number, decision in zip(
                FIELDS, posted, _decided(self._tokens[rank], flight.batch, reqs), strict=True
            ):
                key = name, type(batch).__name__
                known = self._numbers[key].setdefault(decision, number)
                other = self._decisions[key].setdefault(number, decision)
                self._check(
                    known == number and other == decision,
                    f"rank {rank} posts {number} for the {name} {decision} of step {flight.number}, it means {other}",
                )

        around(link, "turn", before=asks)
        around(link.board, "all_arrived", after=self._all_arrived)
        around(scheduler, "launch", after=launched)
        around(scheduler.recorder, "published", before=lambda out: self._published(rank, out))

    def _asked(self, rank: int, step: int, has_arrived: bool) -> None:
        if has_arrived:
            self._arrived[rank] = max(self._arrived[rank], step)

    def _published(self, rank: int, out: StepOutput) -> None:
        if len(out.tokens):
            self._tokens[rank] = hashlib.sha256(self._tokens[rank] + out.tokens.tobytes()).digest()

    def _all_arrived(self, step: int) -> None:
        right = min(self._arrived)
        self._check(
            step == right, f"results are said to be there up to step {step}, they are up to step {right}"
        )

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"steps of the ranks: {text}")


def _decided(tokens: bytes, batch: StepBatch, reqs: Sequence[Req]) -> Sequence[object]:
    """What has been decided for a step, in the order of ``FIELDS``."""
    writes = [
        array.tobytes()
        for array in (batch.page_writes.rows, batch.page_writes.columns, batch.page_writes.pages)
    ]
    rids = tuple(req.rid for req in reqs)
    if batch.is_decode:
        return (
            tokens,
            "decode",
            rids,
            tuple(batch.rows.tolist()),
            tuple(batch.seq_lens.tolist()),
            tuple(writes),
            (),
        )
    return (
        tokens,
        "extend",
        rids,
        tuple(batch.rows.tolist()),
        tuple(column.tobytes() for column in (batch.starts, batch.seq_lens, batch.samples)),
        (*writes, *(chunk.out_slots.tobytes() for chunk in batch.chunks)),
        tuple(ticket.id for ticket in batch.loads),
    )
