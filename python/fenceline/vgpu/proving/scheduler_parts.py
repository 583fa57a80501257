"""What the parts of the scheduler promise, asked with random values at the end of a run: the waiting queue, the page
tables' versions, the ratio of new tokens, requests, what the detokenizer is told, and the decisions of ranks.

Runs of the proof have few requests, so they reach few of the states of these parts. What is right is computed here from
the documentation of each, with lists in the place of what is kept in order, and sets in the place of versions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fenceline.constrained.matcher import GrammarStore
from fenceline.ipc.io_struct import BatchTokenOut, FinishReason, TokenizedGenerateReq, id_array
from fenceline.model_executor.step import LogprobValues, PageWrites
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler import req as req_module
from fenceline.scheduler import scheduler as scheduler_module
from fenceline.scheduler import waiting_queue
from fenceline.scheduler.decisions import FIELDS
from fenceline.scheduler.ranks import LeadingRank, RanksDifferError
from fenceline.scheduler.req import LogprobLog, Req
from fenceline.scheduler.request_memory import PageTables
from fenceline.scheduler.running_batch import NewTokenRatio
from fenceline.scheduler.scheduler import OutputSender
from fenceline.scheduler.waiting_queue import WaitingQueue
from fenceline.vgpu.proving.grammars import compiled_grammars

_NUM_CHANGES = 40  # of a queue

I32 = npt.NDArray[np.int32]


def compare_scheduler_parts(random: Random) -> str:
    """The first promise that is not kept, "" if all are."""
    parts = (
        _queue,
        _queue,
        _queue,
        _tables,
        _ratio,
        _ends,
        _outputs,
        _logprobs,
        _decisions,
        _resumed,
        _grammar_store,
    )
    for part in parts:
        for wrong in part(random):
            return f"scheduler: {wrong}"
    return ""


def _request(prompt: I32, rid: str = "r", rank: int = 0, max_new: int = 8, **options: Any) -> Req:
    params = SamplingParams(
        max_new_tokens=max_new, min_new_tokens=options.pop("min_new_tokens", 0), ignore_eos=True
    )
    message = TokenizedGenerateReq(rid=rid, input_ids=id_array(), sampling_params=params, **options)
    return Req(message, prompt, frozenset(params.stop_token_ids), 0, max_new, 1, rank)


# --- the waiting queue


@dataclass(slots=True, eq=False)
class _Line:
    """Requests of one body and rank that wait."""

    body: int
    reqs: list[Req] = field(default_factory=list)


class _Queue:
    """A waiting queue that keeps the lines of each rank in a list, in turn."""

    def __init__(self, page_size: int | None, most: int | None) -> None:
        self.page_size, self.most = page_size, most
        self.lines: dict[int, list[_Line]] = {}
        self.running: list[Req] = []

    def line_of(self, req: Req) -> _Line | None:
        body = req.source.body
        of_rank = self.lines.setdefault(req.rank, [])
        return next(
            (one for one in of_rank if one.reqs[0].rid == req.rid or (body and one.body == body)), None
        )

    def put(self, req: Req, is_new: bool) -> None:
        line = self.line_of(req)
        of_rank = self.lines[req.rank]
        if line is None:
            line = _Line(req.source.body)
            of_rank.insert(len(of_rank) if is_new else 0, line)
        line.reqs.insert(len(line.reqs) if is_new else 0, req)

    def take(self, req: Req) -> None:
        line, of_rank = self.line_of(req), self.lines[req.rank]
        assert line is not None, "it waits"
        line.reqs.remove(req)
        if not line.reqs:
            of_rank.remove(line)

    def admit(self, req: Req) -> None:
        line, of_rank = self.line_of(req), self.lines[req.rank]
        assert line is not None, "it waits"
        self.take(req)
        self.running.append(req)
        if line.reqs:
            of_rank.remove(line)
            of_rank.append(line)

    def num_running(self, body: int) -> int:
        return sum(req.source.body == body for req in self.running) if body else 0

    def order(self, may: Sequence[Req] | None, most: int | None) -> list[str]:
        """One of each line that runs nothing, then the others in turn, those first that run something."""
        found: list[str] = []
        for rank in sorted(self.lines):
            busy, begun = list[list[Req]](), list[list[Req]]()
            for line in self.lines[rank]:
                num = self.num_running(line.body)
                reqs = [req for req in line.reqs if may is None or req in may]
                reqs = reqs if most is None else reqs[: max(most - num, 0)]
                if num:
                    busy.append(reqs)
                elif reqs:
                    found.append(reqs[0].rid)
                    begun.append(reqs[1:])
            rest = busy + begun
            longest = max(map(len, rest), default=0)
            found += [reqs[turn].rid for turn in range(longest) for reqs in rest if turn < len(reqs)]
        return found

    def newcomers(self, may: Sequence[Req]) -> list[str]:
        lines = [one for rank in sorted(self.lines) for one in self.lines[rank]]
        idle = [one.reqs for one in lines if not self.num_running(one.body)]
        return [one.rid for one in (next((r for r in reqs if r in may), None) for reqs in idle) if one]

    def order_if_admitted(self, may: Sequence[Req], num_shared: dict[str, int]) -> list[str]:
        """Like ``order``, without those that would wait for one before them if that ran."""
        rest, number, of_rid = list(may), 0, {req.rid: req for req in may}
        while number < len(found := self.order(rest, self.most)):
            req, *before = (of_rid[rid] for rid in reversed(found[: number + 1]))
            if any(self._computes_for(other, num_shared[other.rid], req) for other in before):
                rest.remove(req)
            else:
                number += 1
        return found

    def waits_for_sample(self, req: Req) -> bool:
        """A sample waits for pages of its prompt that another one computes, if they are enough."""
        return any(
            other.committed_len < len(req.prompt_ids) and self._computes_for(other, other.shared_len, req)
            for other in self.running
        )

    def _computes_for(self, other: Req, num_shared: int, req: Req) -> bool:
        if not req.source.body or self.page_size is None or req.scores_prompt:
            return False
        whole = max(range(0, len(req.prompt_ids), self.page_size))  # the last token is computed in any case
        is_same = (other.source.body, other.rank) == (req.source.body, req.rank)
        is_enough = whole - num_shared >= waiting_queue._MIN_SHARED_TOKENS
        return is_same and other.prompt_ids is req.prompt_ids and is_enough


def _of_rid(numbers: dict[str, int], req: Req) -> int:
    return numbers[req.rid]


def _queue(random: Random) -> Iterator[str]:
    """Bodies take turns in the order that ``WaitingQueue`` describes, whatever arrives, comes back, leaves or runs."""
    page_size, most = random.choice((None, 1, 1, 4, 16)), random.choice((None, 1, 2, 3))
    queue, right = WaitingQueue(page_size, most), _Queue(page_size, most)
    least = waiting_queue._MIN_SHARED_TOKENS
    prompts = [np.zeros(least + num, np.int32) for num in (0, 1, 2, 20)]
    bodies, waiting = [0, 0, 1, 2, 3], list[Req]()
    if random.random() < 0.5:  # samples of two prompts
        bodies, prompts = [1, 1, 2], random.sample(prompts, 2)
    for number in range(_NUM_CHANGES):
        what = random.choice(
            ("add", "add", "add", "put_back", "remove", "admit", "admit", "release", "compute")
        )
        if what in ("add", "put_back") and len(waiting) < 9:
            body = random.choice(bodies)
            options = {"return_logprob": True, "logprob_start_len": 0} if random.random() < 0.1 else {}
            prompt, rank = random.choice(prompts), random.choice((0, 0, 0, 1))
            req = _request(prompt, f"r{number}", rank, body=body, **options)
            waiting.append(req)
            queue.add(req) if what == "add" else queue.put_back(req)
            right.put(req, what == "add")
        elif what == "remove" and waiting:
            req = waiting.pop(random.randrange(len(waiting)))
            queue.remove(req)
            right.take(req)
        elif what == "admit" and waiting:
            req = waiting.pop(random.randrange(len(waiting)))
            req.row, req.shared_len = 1, random.choice((0, 0, page_size or 1))
            queue.admit(req)
            right.admit(req)
        elif what == "release" and right.running:
            req = right.running.pop(random.randrange(len(right.running)))
            req.left = True
            queue.release(req)
        elif what == "compute" and right.running:
            req = random.choice(right.running)
            num = len(req.prompt_ids)
            req.committed_len = max(req.committed_len, random.choice((num - 1, num)))
        if not waiting:
            continue
        may = random.sample(waiting, random.randint(0, len(waiting)))
        several = Counter(req.source.body for req in right.running if req.source.body)
        asked = random.choice(waiting)
        said_waits, waits = (
            [one.rid for one in waiting if is_waiting(one)]
            for is_waiting in (queue.waits_for_sample, right.waits_for_sample)
        )
        shared = {req.rid: random.choice((0, 0, page_size or 1)) for req in waiting}
        in_turn = queue.in_turn_if_admitted(may.__contains__, partial(_of_rid, shared))
        noted = [req for body in queue._computing.values() for reqs in body.values() for req in reqs]
        pairs: tuple[tuple[str, object, object], ...] = (
            ("order", [req.rid for req in queue], right.order(None, None)),
            ("turns", [req.rid for req in queue.in_turn(may.__contains__)], right.order(may, most)),
            ("turns if each is admitted", [req.rid for req in in_turn], right.order_if_admitted(may, shared)),
            ("newcomers", [req.rid for req in queue.newcomers(may.__contains__)], right.newcomers(may)),
            ("number", len(queue), len(waiting)),
            ("sharing", queue.is_shared, max(several.values(), default=0) > 1),
            ("running ones", queue.num_running(asked), max(right.num_running(asked.source.body), 1)),
            ("samples that wait", said_waits, waits),
            ("notes of those that have left", [req.rid for req in noted if req.left], []),
        )
        for name, said, true in pairs:
            if said != true:
                yield f"the queue's {name}: {said}, {true} is right after {number + 1} changes"


# --- requests that have been retracted

# What a retracted request keeps, with a value that a new one does not have.
_KEPT = {
    "num_emitted": 1, "num_verified": 7, "num_drafts": 6, "num_accepted": 4,
    "has_bad_draft": True, "announced": True, "cached_tokens": 3, "output_log": LogprobLog([5], [-0.5]),
    "arrived_at": 3.5, "queue_time_s": 0.25, "is_short": True, "grammar": object(),
}  # fmt: skip

_GIVEN = ("source", "prompt_ids", "stop_ids", "seed", "max_new_tokens", "emit_interval", "rank", "output_ids")


def _resumed(random: Random) -> Iterator[str]:
    """A retracted request goes on as a new one, which has all but the memory. Logprobs of its prompt are gathered anew,
    unless the prompt was completed."""
    for outputs in ([], [5, 6]):
        prompt = np.array([1, 2, 3, 4], np.int32)
        req = _request(prompt, rank=2, return_logprob=True, logprob_start_len=1)
        for name, value in _KEPT.items():
            setattr(req, name, value)
        req.output_ids, req.row, req.committed_len, req.num_retractions = outputs, 3, 4, 1
        req.prompt_log = LogprobLog([2, 3], [None, -0.5])
        again = req.resumed()
        for name in (*_KEPT, *_GIVEN):
            if getattr(again, name) is not getattr(req, name):
                yield f"a retracted request has another {name}"
        found = again.num_retractions, again.was_admitted, again.row, again.committed_len, again.left
        if found != (2, True, 0, 0, False):
            yield f"a retracted request has {found}"
        said = None if again.prompt_log is None else again.prompt_log.token_ids
        if said != ([2, 3] if outputs else [2]):
            yield f"a retracted request has logprobs of {said} of its prompt"


# --- grammars


def _grammar_store(random: Random) -> Iterator[str]:
    """Grammars are kept until the front end forgets them. One that was too slow is tried again by new requests."""
    store = GrammarStore((0,))
    vocabulary, grammars = compiled_grammars()
    for number, data in grammars.items():
        forgotten = [number - 1] if number == 3 else []
        store.load(str(number), number, data, vocabulary if number == 1 else b"", forgotten)
    ended = dict(store.loaded())
    if ended != dict.fromkeys(map(str, grammars)):
        yield f"grammars have been loaded: {ended}"
    if store._grammars.keys() != grammars.keys() - {2}:
        yield f"grammars {sorted(store._grammars)} are kept, and 2 was forgotten"
    first = store.begin(1, None)
    if store.begin(1, None).clock is not first.clock or store.begin(3, None).clock is first.clock:
        yield "the time of a grammar is not counted for all its requests together"
    store.end([1])
    if not first.is_too_slow or store.begin(1, None).is_too_slow:
        yield "requests of a grammar that was too slow are not ended, or new ones are"


# --- page tables


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step has of a batch here."""

    page_writes: PageWrites


def _tables(random: Random) -> Iterator[str]:
    """A step that reads a row whose latest change has not been written writes the whole row, once, and nothing else of
    it; and it is counted."""
    num_rows = 5
    tables, latest, num_rewritten = PageTables(num_rows), dict[int, int](), 0
    reqs = [_request(np.zeros(1, np.int32), f"r{row}") for row in range(num_rows)]
    for row, req in enumerate(reqs):
        req.row = row
        req.pages.extend(random.randrange(1, 99) for _ in range(random.randint(1, 3)))
    behind: set[int] = set()
    for _ in range(_NUM_CHANGES):
        row = random.randrange(1, num_rows)
        match random.choice(("moved", "moved", "given back", "written", "written late", "step", "step")):
            case "moved":
                latest[row] = tables.moved(row)
                behind.add(row)
            case "given back":
                tables.given_back(row)
                behind.discard(row)
            case "written" if row in behind:
                tables.written(row, latest[row])
                behind.discard(row)
            case "written late" if row in behind:
                tables.written(row, latest[row] - 1)
            case "step":
                some = random.sample(reqs[1:], random.randint(1, num_rows - 1))
                rows = [random.randrange(1, num_rows) for _ in range(random.randrange(4))]
                column = np.arange(len(rows), dtype=np.int64)
                writes = PageWrites(np.array(rows, np.int64), column, 100 + column.astype(np.int32))
                batch = tables.up_to_date(cast(Any, _Step(writes)), some)
                stale = {req.row for req in some} & behind
                kept = zip(rows, column.tolist(), (100 + column).tolist(), strict=True)
                true = [one for one in kept if one[0] not in stale]
                true += [(row, at, page) for row in stale for at, page in enumerate(reqs[row].pages)]
                made = batch.page_writes
                said = list(zip(made.rows.tolist(), made.columns.tolist(), made.pages.tolist(), strict=True))
                behind -= stale
                num_rewritten += len(stale)
                if sorted(said) != sorted(true) or tables.num_rewritten != num_rewritten:
                    yield (
                        f"a step writes {said} of the page table, {sorted(true)} are right, and "
                        f"{tables.num_rewritten} rows are said to be written again, {num_rewritten} are"
                    )


# --- the ratio of new tokens


def _ratio(random: Random) -> Iterator[str]:
    """After a retraction each request that is left is expected to need 20 tokens more than it has, on average."""
    ratio = NewTokenRatio(random.random())
    num, each = random.randint(1, 50), random.randint(30, 200)
    decoded = random.randrange(num * (each - 20))
    ratio.after_retraction(decoded, num, num * each)
    if not math.isclose(ratio.value * num * each - decoded, 20 * num, rel_tol=1e-6):
        yield f"{num} requests with {decoded} of {num * each} tokens are expected to ask for {ratio.value} of them"
    ratio.after_retraction(num * each, num, num * each)
    if ratio.value != 1.0:
        yield f"requests with all their tokens are expected to ask for {ratio.value} of them"


# --- requests


def _ends(random: Random) -> Iterator[str]:
    """A stop token ends a request that has the fewest tokens that it may have; its last token ends it in any case. What
    the sampler needs is made once for each row, and the detokenizer gets the end of the prompt."""
    least, most = random.randint(0, 4), random.randint(4, 6)
    req = _request(np.arange(random.randint(1, 20), dtype=np.int32), max_new=most, min_new_tokens=least)
    req.stop_ids = frozenset((1,))
    for num in range(1, most + 1):
        for token in (1, 2):
            req.output_ids = [2] * (num - 1) + [token]
            right = "stop" if token == 1 and num >= least else "length" if num == most else None
            reason = req.finish_reason_after(token)
            if (None if reason is None else reason.type) != right:
                yield f"{num} tokens of {least} to {most}, the last of which is {token}, end with {reason}"
    said, num = req.decode_info().prompt_tail_ids, len(req.prompt_ids)
    true = [token for token in range(num) if token >= num - req_module._DECODE_CONTEXT]
    if said != true:
        yield f"the detokenizer is told that the prompt ends with {said}, {true} is right"
    for row in (1, 2):
        req.row = row
        sampling = req.sampling()
        if sampling.row != row or req.sampling() is not sampling:
            yield f"the parameters for row {row} are made twice, or are those of row {sampling.row}"


# --- what the detokenizer is told


def _outputs(random: Random) -> Iterator[str]:
    """The first token at once, then as many as an interval has, and the rest with the end; each token once."""
    sent: list[BatchTokenOut] = []
    sender, interval = OutputSender(sent.append), random.randint(1, 5)
    req = _request(np.zeros(1, np.int32), max_new=99)
    req.emit_interval = interval
    num_told, right = 0, list[int]()
    for _ in range(random.randint(1, 12)):
        req.output_ids += [len(req.output_ids)] * random.choice((1, 1, 2))
        num = len(req.output_ids)
        if not num_told or num - num_told >= interval:
            right.append(num - num_told)
            num_told = num
        sender.token(req)
        sender.flush()
    sender.finish(req, FinishReason(type="length", length=num))
    sender.flush()
    right.append(num - num_told)
    outs = [out for message in sent for out in message.outs]
    said = [len(out.output_ids) for out in outs]
    if said != right or [token for out in outs for token in out.output_ids] != req.output_ids:
        yield f"{num} tokens are told as {said} with an interval of {interval}, {right} is right"


def _logprobs(random: Random) -> Iterator[str]:
    """A request gets the logprobs of its tokens alone, of as many alternatives as it asks for and of the tokens that it
    names, whatever others of its step ask for."""
    draws = np.random.default_rng(random.randrange(1 << 30))
    num_rows, num_top, num_named = 7, random.randint(1, 3), random.randint(1, 3)
    wide = (num_rows, 4)
    values = LogprobValues(
        draws.random(num_rows, np.float32),
        draws.random(wide, np.float32),
        draws.integers(0, 99, wide, np.int64),
        draws.random(wide, np.float32),
    )
    assert values.named is not None, "made above"
    names = [random.randrange(99) for _ in range(num_named)]
    source = _request(
        np.zeros(1, np.int32), return_logprob=True, top_logprobs_num=num_top, token_ids_logprob=names
    ).source
    start, num = random.randrange(4), random.randint(1, 3)
    log = LogprobLog()
    scheduler_module._append(log, list(range(num)), values, start, source)
    rows = range(start, start + num)
    tops = [list(zip(values.top[row].tolist(), values.top_ids[row].tolist(), strict=True)) for row in rows]
    for name, said, true in (
        ("its tokens", log.logprobs, [float(values.chosen[row]) for row in rows]),
        ("alternatives", list(log.top), [pairs[:num_top] for pairs in tops]),
        (
            "named tokens",
            list(log.named),
            [list(zip(values.named[row].tolist()[:num_named], names, strict=True)) for row in rows],
        ),
    ):
        if said != true:
            yield f"a request gets the logprobs {said} of {name}, {true} is right"


# --- ranks


class _Board:
    """The board of two ranks, of which the other one has decided ``theirs``."""

    rank, num_ranks = 0, 2

    def __init__(self, theirs: dict[int, tuple[int, ...]]) -> None:
        self.theirs = theirs
        self.posted: dict[int, tuple[int, ...]] = {}
        self.asked: set[int] = set()

    def post_decision(self, step: int, fields: tuple[int, ...]) -> None:
        self.posted[step] = fields

    def agrees(self, rank: int, step: int) -> bool:
        self.asked.add(step)
        return self.theirs.get(step) == self.posted[step]

    def decision(self, rank: int, step: int) -> tuple[int, ...] | None:
        return self.theirs.get(step)


class _Decided:
    """In the place of ``Decisions``: decides ``mine`` in each step."""

    def __init__(self, mine: list[tuple[int, ...]]) -> None:
        self._mine = iter(mine)

    def of(self, batch: object, reqs: object) -> tuple[int, ...]:
        return next(self._mine)


def _decisions(random: Random) -> Iterator[str]:
    """Ranks that decide differently are noticed at the launch of the step, or of the next one if the other rank is
    later; older steps are not compared again."""
    num = random.randint(3, 6)
    mine = [tuple(random.randrange(99) for _ in FIELDS) for _ in range(num)]
    for differs in (0, random.randint(1, num)):
        theirs = dict(enumerate(mine, 1))
        if differs:
            theirs[differs] = (mine[differs - 1][0] + 1, *mine[differs - 1][1:])
        board = _Board(theirs)
        link = LeadingRank(cast(Any, board), cast(Any, None), cast(Any, None), ())
        link.decisions = cast(Any, _Decided(mine))
        for step in range(1, num + 1):
            board.asked.clear()
            noticed = False
            try:
                link.decided(step, cast(Any, None), ())
            except RanksDifferError:
                noticed = True
            if noticed != (step == differs):
                yield f"ranks that differ in step {differs} are {'not ' * (not noticed)}noticed in step {step}"
            if noticed:
                break
            if board.asked != {step, max(step - 1, 1)}:
                yield f"in step {step} the decisions of steps {sorted(board.asked)} are compared"
