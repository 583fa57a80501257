"""The scheduler of a run that has ended, asked for what runs rarely reach: requests of any size and with an id that is
in use, time limits, flushes that are cancelled, a shutdown, grammars that are too slow, and memory for decode steps.

Requests are accepted and leave again, and none of them is computed. What is right follows from the flags, from the
lengths and from docs/server_arguments.md.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import PropertyMock, patch

import numpy as np

from fenceline.config.draft_config import StepShape
from fenceline.constrained.matcher import GrammarClock
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchTokenOut,
    CancelFlushReq,
    ControlReply,
    FlushCacheReq,
    Message,
    ShutdownReq,
    SlowGrammarsReq,
    TickReq,
    TokenizedGenerateReq,
    TokenOut,
    id_array,
)
from fenceline.model_executor.step import LogprobValues, StepOutput
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler.req import LogprobLog, Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.running_batch import RunningBatch
from fenceline.scheduler.schedule_policy import ShortShare
from fenceline.scheduler.scheduler import Scheduler


def compare_at_rest(scheduler: Scheduler, random: Random) -> str:
    """What is wrong, "" if nothing is. Afterwards the scheduler is as before."""
    with _Questions(scheduler).asked() as own:
        for part in (_sizes, _ids, _limits, _flushes, _shutdowns, _slow_grammars, _short_ones, _accounts):
            for wrong in part(own, random):
                return f"at rest: {wrong}"
        for part in (_shares, _decode_steps, _phases, _admissions, _masks, _drafts, _late_stops, _scores):
            for wrong in part(own, random):
                return f"at rest: {wrong}"
    return ""


class _Questions:
    """Sends requests to ``scheduler`` and takes what it says of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.outs: list[TokenOut] = []
        self.replies: list[Message] = []
        self._num_reqs = 0

    @contextmanager
    def asked(self) -> Iterator[_Questions]:
        """Inside, nothing reaches the transcript of the run, and nothing is fetched from storage."""
        scheduler, nothing = self.scheduler, lambda *args: None
        with ExitStack() as stack:
            stack.enter_context(patch.object(scheduler.output, "_send", self._send))
            stack.enter_context(patch.object(scheduler.control, "_send", self.replies.append))
            stack.enter_context(patch.object(scheduler.memory, "prefetch", nothing))
            stack.enter_context(patch.object(scheduler, "tell_frontend", nothing))
            try:
                yield self
            finally:
                self.clear()

    def _send(self, message: BatchTokenOut) -> None:
        self.outs += message.outs

    def clear(self) -> None:
        """All requests leave, none of which has memory."""
        scheduler = self.scheduler
        for req in (*scheduler.reqs.values(), *scheduler.departed):
            req.row = 0
        scheduler.abort(AbortReq(abort_all=True))
        scheduler.retire_departed()
        scheduler.flushes.clear()
        scheduler.draining = scheduler.paused = False
        self.outs.clear()
        self.replies.clear()

    def message(self, num_prompt: int, num_new: int, rid: str = "") -> TokenizedGenerateReq:
        """A request with a prompt of so many tokens."""
        self._num_reqs += 1
        params = SamplingParams(max_new_tokens=num_new, seed=1, temperature=0.0)
        rid = rid or f"asked {self._num_reqs}"
        return TokenizedGenerateReq(rid=rid, input_ids=id_array([1] * num_prompt), sampling_params=params)

    def accepts(self, num_prompt: int, num_new: int) -> Req:
        """A request that waits now."""
        message = self.message(num_prompt, num_new)
        self.scheduler.accept(message)
        return self.scheduler.reqs[message.rid]

    @property
    def reasons(self) -> list[tuple[str, int | None, str]]:
        """How requests have ended: rid, status and text."""
        reasons = ((out.rid, out.finish_reason) for out in self.outs)
        return [(rid, one.status_code, one.message or "") for rid, one in reasons if one is not None]


def _sizes(own: _Questions, random: Random) -> Iterator[str]:
    """A request gets as many tokens as fit behind its prompt into the model's context and into all memory, which its
    last step needs for all slots that a step writes. One that would get none though it wants some is refused."""
    scheduler = own.scheduler
    config = scheduler.config
    num_slots = max(shape.num_slots for shape in scheduler.shapes.values())
    longest = scheduler.memory.num_pages * config.server_args.page_size - (num_slots - 1)
    longest = min(longest, config.model.context_length)
    if longest > 5000:  # which would only take time
        return
    for num_prompt, wanted in (
        (longest - 1, 1),
        (longest - 1, 9),
        (longest, 0),
        (longest, 1),
        (longest + 1, 0),
        (random.randint(1, longest - 1), 2 * longest),
        (0, 1),
    ):
        message = own.message(num_prompt, wanted)
        scheduler.accept(message)
        req, most = scheduler.reqs.get(message.rid), longest - num_prompt
        right = None if num_prompt == 0 or most < min(wanted, 1) else min(wanted, most)
        said = None if req is None else req.max_new_tokens
        if said != right or (right is None) != bool(own.reasons):
            yield f"a prompt of {num_prompt} tokens that wants {wanted} gets {said}, {right} is right of {longest}"
        own.clear()


def _ids(own: _Questions, random: Random) -> Iterator[str]:
    """A request with an id that is in use is refused, and the one that has it goes on."""
    req = own.accepts(3, 2)
    own.scheduler.accept(own.message(4, 3, req.rid))
    reasons = own.reasons
    if own.scheduler.reqs.get(req.rid) is not req or len(reasons) != 1 or reasons[0][:2] != (req.rid, 400):
        yield f"a second request {req.rid!r} is answered with {reasons}"
    own.clear()


def _limits(own: _Questions, random: Random) -> Iterator[str]:
    """A request has its time from the first tick that finds it there, of several that come together the last; its end
    is sent at once."""
    scheduler, config = own.scheduler, own.scheduler.config
    args = replace(config.server_args, req_waiting_timeout=2.0, req_running_timeout=5.0)
    rows = random.choice((0, 1, 2))
    state, limit = ("running", 5.0) if rows else ("waiting", 2.0)
    with patch.object(scheduler, "config", replace(config, server_args=args)):
        message = own.message(2, 2)
        scheduler.ingest([TickReq(now=10.0), message, TickReq(now=20.0)])
        scheduler.reqs[message.rid].row = rows
        scheduler.reqs[message.rid].clocked_running = None
        scheduler.ingest([TickReq(now=20.0)])
        for now, is_over in ((20.0 + limit, False), (20.5 + limit, True)):
            scheduler.reqs[message.rid].row = rows
            with patch.object(scheduler.waiting, "release", scheduler.waiting.remove):
                scheduler.ingest([TickReq(now=now - 9.0), TickReq(now=now)])
            reasons = [reason[:2] for reason in own.reasons]
            if reasons != [(message.rid, 503)] * is_over:
                yield f"a request that is {state} for {now - 20.0} s of {limit} is answered with {reasons}"
            if is_over and f"--req-{state}-timeout" not in own.reasons[0][2]:
                yield f"a request that is {state} for too long is told {own.reasons[0][2]}"
    own.clear()


def _flushes(own: _Questions, random: Random) -> Iterator[str]:
    """A flush that waits for the last request is answered once: when it is cancelled, or when that one has left."""
    scheduler = own.scheduler
    req = own.accepts(2, 2)
    for id in ("waits", "is cancelled"):
        scheduler.carry_out(FlushCacheReq(id=id, wait=True))
    early = list(own.replies)
    for _ in range(2):
        scheduler.carry_out(CancelFlushReq(id="is cancelled"))
    cancelled = list(own.replies)
    scheduler.abort(AbortReq(rid=req.rid, silent=True))
    with patch.object(scheduler.memory, "flush", lambda storage: 0):
        scheduler.flush_when_idle()
        scheduler.flush_when_idle()
    said = [(one.id, one.success) for one in own.replies if isinstance(one, ControlReply)]
    right = [("is cancelled", False), ("waits", True)]
    if early or len(cancelled) != 1 or said != right:
        yield f"flushes that wait are answered {said}, {right} is right"
    own.clear()


def _shutdowns(own: _Questions, random: Random) -> Iterator[str]:
    """With ``drain`` the requests that are there go on, and without they are ended."""
    for drain in (True, False):
        own.accepts(2, 2)
        own.scheduler.carry_out(ShutdownReq(drain=drain))
        num, stopped = len(own.scheduler.reqs), own.scheduler.stopped
        if (num, stopped, len(own.reasons)) != ((1, False, 0) if drain else (0, True, 1)):
            yield f"{num} requests are left after a shutdown with drain={drain}, {len(own.reasons)} have ended"
        own.clear()


@dataclass(slots=True)
class _Grammar:
    """In the place of a request's grammar."""

    is_too_slow: bool
    accepts: bool = True
    ended: bool = False

    def accept(self, token: int) -> bool:
        return self.accepts


def _slow_grammars(own: _Questions, random: Random) -> Iterator[str]:
    """The requests of a grammar that takes too much time end, and one that got a token that its grammar does not allow;
    but not those whose answer is complete."""
    scheduler = own.scheduler
    told: list[list[int]] = []
    with patch.object(scheduler, "grammars", SimpleNamespace(end=told.append)):
        scheduler.carry_out(SlowGrammarsReq(grammars=[3, 5]))
    if told != [[3, 5]]:
        yield f"other ranks say that grammars 3 and 5 are too slow, and {told} are ended"
    for num_new, grammar, right in (
        (5, _Grammar(is_too_slow=True), [400]),
        (1, _Grammar(is_too_slow=True), []),
        (5, _Grammar(is_too_slow=False), []),
        (5, _Grammar(is_too_slow=False, accepts=False), [500]),
    ):
        for known in (None, grammar.accepts) if not grammar.is_too_slow else (None,):
            req = own.accepts(2, num_new)
            stands_in: Any = grammar
            req.grammar = stands_in
            scheduler.num_constrained += 1
            req.output_ids.append(1)
            goes_on = scheduler.goes_on(req, stands_in, 1, known)
            scheduler.output.flush()
            said = [reason[1] for reason in own.reasons]
            if said != right or goes_on == bool(right) or req.left != bool(right):
                yield f"a request with {grammar} ends with {said}, {right} is right"
            own.clear()
    for slow, may_go_on in ((True, True), (False, False), (False, True)):
        req = own.accepts(2, 5)
        stands_in = _Grammar(is_too_slow=slow)
        req.grammar = stands_in
        scheduler.num_constrained += 1
        masks = np.zeros((1, 2), np.int32)
        pending: Any = SimpleNamespace(
            fill=SimpleNamespace(masks=masks),
            may_go_on=[may_go_on],
            constrained=SimpleNamespace(reqs=[req]),
        )
        scheduler.end_stuck(pending)
        if [reason[1] for reason in own.reasons] != [400] * (slow or not may_go_on):
            yield f"a request that {'may' if may_go_on else 'cannot'} go on ({slow=}) ends with {own.reasons}"
        own.clear()
    if scheduler.num_constrained:
        yield f"{scheduler.num_constrained} requests with a grammar are counted, none is left"


def _short_ones(own: _Questions, random: Random) -> Iterator[str]:
    """``short_newcomer(n)`` finds a waiting request of which at most n tokens are not cached. It may be computed before
    a decode step that is due."""
    num_tokens, num_cached = random.randint(2, 20), random.randrange(5)
    if num_tokens + num_cached + 1 >= own.scheduler.config.model.context_length // 2:
        return
    prefix = SimpleNamespace(num_tokens=num_cached)
    for num in (num_tokens, num_tokens + 1):
        message = own.message(num + num_cached, 1)
        own.scheduler.accept(message)
        req = own.scheduler.reqs.get(message.rid)
        with patch.object(own.scheduler.memory, "match", lambda req: prefix):
            found = own.scheduler.short_newcomer(num_tokens)
        if req is not None and found is not (req if num == num_tokens else None):
            yield f"a request with {num} tokens to compute is {'not ' * (found is None)}short, {num_tokens} are"
        own.clear()


def _accounts(own: _Questions, random: Random) -> Iterator[str]:
    """The memory's accounts are checked exactly once after the last step before the engine is idle."""
    scheduler, asked = own.scheduler, list[int]()
    with patch.object(scheduler.memory, "check_memory", lambda: asked.append(1)):
        scheduler.memory_checked = False
        for _ in range(2):
            scheduler.check_memory()
    if len(asked) != 1:
        yield f"memory is checked {len(asked)} times after a step"


# --- the memory of decode steps


def _held(row: int, num_pages: int, is_short: bool) -> Req:
    params = SamplingParams(max_new_tokens=60)
    message = TokenizedGenerateReq(rid=f"held {row}", input_ids=id_array(), sampling_params=params)
    req = Req(message, np.zeros(1, np.int32), frozenset(), 0, 60, 1)
    req.row, req.is_short = row, is_short
    req.pages = array("i", [0] * num_pages)
    return req


def _shares(own: _Questions, random: Random) -> Iterator[str]:
    """A decode step leaves what is kept for short requests, less what these hold of it, in whole pages."""
    scheduler, size = own.scheduler, own.scheduler.memory.page_size
    share = ShortShare(random.randint(1, 9 * size), 1)
    chunked = random.choice((None, _held(1, random.randint(1, 4), True), _held(1, 3, False)))
    held = len(chunked.pages) * size if chunked is not None and chunked.is_short else 0
    kept = max(share.tokens - held, 0) // size
    running = RunningBatch(size, StepShape(), lambda num: num, lambda num: num)
    with (
        patch.object(scheduler, "running", running),
        patch.object(scheduler, "share", share),
        patch.object(scheduler, "chunked", chunked),
    ):
        num_available = random.randint(0, 30)
        said = [num for num in range(40) if scheduler.has_room(num, num_available)]
    right = list(range(max(num_available - kept + 1, 0)))
    if said != right:
        yield f"{said[-1:]} of {num_available} pages may be taken, {kept} are kept for short requests"


def _decode_steps(own: _Questions, random: Random) -> Iterator[str]:
    """The last request, even if it is long, gets the pages that there are; with drafts the deepest that fit."""
    scheduler, size = own.scheduler, own.scheduler.memory.page_size
    shapes = {depth: StepShape(depth, depth + 1, depth + 1) for depth in (0, 3 * size, 6 * size)}
    running = RunningBatch(size, shapes[6 * size], lambda num: num, lambda num: num)
    req = _held(1, 1, is_short=False)
    req.allocated_len = size
    running.add([req])
    needed = {depth: math.ceil((size + depth + 1) / size) - 1 for depth in shapes}
    is_available = patch.object(RequestMemory, "num_available_pages", new_callable=PropertyMock)
    with (
        patch.object(scheduler, "running", running),
        patch.object(scheduler, "shapes", shapes),
        patch.object(scheduler, "share", ShortShare(3 * size, 1)),
        is_available as available,
    ):
        for num in range(needed[0], needed[6 * size] + 2):
            available.return_value = num
            deepest = max(depth for depth in shapes if needed[depth] <= num)
            said = Scheduler.deepest_with_room(scheduler)  # which nobody follows here
            if said != deepest:
                yield f"drafts of depth {said} are said to fit into {num} pages, {needed} are needed"
            try:
                room = Scheduler.make_room(scheduler, shapes[deepest])
            except AssertionError:
                room = None
            if room is None or room[1] != num - 3:
                yield f"a step that needs {needed[deepest]} of {num} pages gets {room}"


# --- steps, with stand-ins for what the device computes


def _phases(own: _Questions, random: Random) -> Iterator[str]:
    """Between the two phases of a step that drafts nothing may happen, which matters from the first grammar on."""
    shape = StepShape(*random.choice(((0, 1, 1), (2, 3, 3))))
    running = RunningBatch(4, shape, lambda num: num, lambda num: num)
    for num in range(3):
        with (
            patch.object(own.scheduler, "running", running),
            patch.object(own.scheduler, "num_constrained", num),
        ):
            said = own.scheduler.speculates_under_masks
        if said != (num > 0 and shape.depth > 0):
            yield f"{said=}: drafts of depth {shape.depth} meet {num} grammars"


def _admissions(own: _Questions, random: Random) -> Iterator[str]:
    """The queue learns of each admitted request, and of no other, before the next one is offered."""
    reqs = [_held(0, 1, False) for _ in range(5)]
    admitted = [req for req in reqs if random.random() < 0.6]
    told: list[Req] = []
    with patch.object(own.scheduler.waiting, "computes", told.append):
        for number, req in enumerate(own.scheduler.track_admissions(reqs)):
            right = [other for other in reqs[:number] if other in admitted]
            if told != right:
                yield f"the queue has been told of {len(told)} admitted requests, there are {len(right)}"
            req.row = int(req in admitted) * random.randint(1, 2)


def _masks(own: _Questions, random: Random) -> Iterator[str]:
    """A request may not end before it has the fewest tokens that it may have, those of the step before included."""
    scheduler = own.scheduler
    num_unpublished, reqs = random.choice((0, 1)), [_held(row, 1, False) for row in (1, 2)]
    asked: list[Any] = []

    def finish_fill(fill: object, grammars: object, more: Any) -> list[bool]:
        asked.append(more)
        return [True] * len(reqs)

    for req in reqs:
        req.output_ids = [1] * random.randrange(4)
    least = [random.randrange(9) for _ in reqs]
    grammars = SimpleNamespace(finish_fill=finish_fill)
    clock = GrammarClock()
    pending: Any = SimpleNamespace(
        constrained=SimpleNamespace(reqs=reqs, grammars=[SimpleNamespace(clock=clock)] * 2, least=least),
        fill=SimpleNamespace(),
        num_unpublished=num_unpublished,
        may_go_on=None,
    )
    with patch.object(scheduler, "grammars", grammars):
        goes_on = Scheduler.fill_masks(scheduler, pending)
    right = [num - len(req.output_ids) - num_unpublished for num, req in zip(least, reqs, strict=True)]
    if asked != [right] or not goes_on:
        yield f"requests are said to need {asked} more tokens before their end, {right} are right"


def _drafts(own: _Questions, random: Random) -> Iterator[str]:
    """Whoever chooses the depth learns how many tokens those have got whose drafts may be accepted; and requests whose
    drafts are unusable are counted."""
    scheduler = own.scheduler
    reqs = [own.accepts(2, 30) for _ in range(3)]
    may_accept = np.array([random.random() < 0.5 for _ in reqs])
    bad = np.array([random.choice((0, 0, 1)) for _ in reqs], np.int64)
    counts = np.array([random.randint(1, 3) for _ in reqs], np.int64)
    told: list[tuple[int, list[int]]] = []
    counted: list[list[str]] = []
    chooser = SimpleNamespace(published=lambda depth, counts: told.append((depth, counts.tolist())))
    out: Any = StepOutput(np.arange(1, 1 + counts.sum()), None, None, counts, bad)
    batch: Any = SimpleNamespace(
        depth=SimpleNamespace(depth=2), seq_lens=np.full(3, 99), constrained=(), may_accept=may_accept
    )
    shape = StepShape(2, 3, 3)
    stats = scheduler.stats
    with (
        patch.object(scheduler, "running", RunningBatch(4, shape, lambda num: num, lambda num: num)),
        patch.object(scheduler, "shapes", {2: shape}),
        patch.object(scheduler, "draft_depth", chooser),
        patch.object(stats, "bad_drafts", lambda reqs: counted.append([req.rid for req in reqs])),
        patch.object(scheduler, "joining", []),
    ):
        Scheduler.publish_counted(scheduler, batch, reqs, 1, out)  # which nobody follows here
    right = [(2, [num for num, may in zip(counts.tolist(), may_accept, strict=True) if may])]
    if told != right:
        yield f"{told} is told of the drafts of a step, {right} is right"
    names = [req.rid for req, is_bad in zip(reqs, bad, strict=True) if is_bad]
    if [name for some in counted for name in some] != names:
        yield f"the drafts of {counted} are said to be unusable, those of {names} are"
    own.clear()


def _late_stops(own: _Questions, random: Random) -> Iterator[str]:
    """A stop token does not end a request that may not end yet; its client is told of it like of any other token."""
    scheduler = own.scheduler
    if not scheduler.running.is_exact:
        return
    params = SamplingParams(max_new_tokens=9, min_new_tokens=3, stop_token_ids=(1,), seed=1)
    message = TokenizedGenerateReq(
        rid="stops late", input_ids=id_array([2]), sampling_params=params, stream=True
    )
    scheduler.accept(message)
    reqs = [scheduler.reqs[message.rid]]
    reqs[0].emit_interval = 1
    out: Any = StepOutput(np.array([1]), None, None)
    batch: Any = SimpleNamespace(constrained=(), seq_lens=np.array([2]))
    for num in (1, 2, 3):
        Scheduler.publish_decode(scheduler, batch, reqs, num, out)
        scheduler.output.flush()
        last = own.outs[-1].finish_reason if own.outs else None
        if len(own.outs) != num or (last is not None) != (num == 3):
            yield f"after {num} stop tokens of a request that may end with 3 its client has {len(own.outs)} messages"
    own.clear()


def _scores(own: _Questions, random: Random) -> Iterator[str]:
    """Of each prompt the tokens are scored that its part of the step can score, with the values that are its own."""
    scheduler = own.scheduler
    reqs, seqs, right = list[Req](), list[Any](), list[list[tuple[int, float]]]()
    values, num_values = np.random.default_rng(random.randrange(1 << 30)).random(99, np.float32), 0
    for row in (1, 2, 3, 4):
        prompt = np.array([random.randrange(1, 99) for _ in range(random.randint(4, 20))], np.int32)
        start = random.randrange(len(prompt) - 2)  # of the part that the step computes
        end = random.randint(start + 1, len(prompt))
        first = random.randrange(end - start + 1)
        last = random.randint(max(first - 1, 0), max(min(end, len(prompt) - 1) - start, first))
        params = SamplingParams(max_new_tokens=5)
        message = TokenizedGenerateReq(
            rid=f"scored {row}",
            input_ids=id_array(),
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=0,
        )
        req = Req(message, prompt, frozenset(), 0, 5, 1)
        req.row, req.prompt_log = row, LogprobLog()
        reqs.append(req)
        seqs.append((SimpleNamespace(scored=range(first, last)), start, end))
        # The logits at a token score the next one.
        targets = [int(prompt[start + offset + 1]) for offset in range(first, last)]
        right.append([(token, float(values[num_values + index])) for index, token in enumerate(targets)])
        num_values += len(targets)
    nobody = np.zeros((num_values, 0))
    scores = LogprobValues(values[:num_values], nobody.astype(np.float32), nobody.astype(np.int64))
    out: Any = StepOutput(np.zeros(0, np.int64), None, scores)
    chunks, starts, ends = zip(*seqs, strict=True)
    batch = SimpleNamespace(
        chunks=chunks,
        starts=np.array(starts),
        seq_lens=np.array(ends),
        samples=np.zeros(len(seqs), np.bool_),
        sampling=(),
    )
    Scheduler.publish_extend(scheduler, cast(Any, batch), reqs, out)
    for req, pairs in zip(reqs, right, strict=True):
        log = req.prompt_log
        said = [] if log is None else list(zip(log.token_ids, log.logprobs, strict=False))
        if said != pairs or log is None or len(log.token_ids) != len(log.logprobs):
            yield f"the tokens and logprobs {said} of a prompt are scored, {pairs} is right"
