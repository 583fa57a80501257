"""Whether the scheduler tells, ends, gives back and checks everything when it is due: outputs, reports, requests whose
time is up, the memory of requests that have left, backups, flushes that wait, the accounts of an idle engine, and the
sampling of a step whose masks are known.

Nothing of this changes a token. What is due is known from the messages that have arrived and from the requests alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from fenceline.ipc.io_struct import (
    InternalState,
    Message,
    StatsReport,
    TickReq,
    TokenizedGenerateReq,
)
from fenceline.model_executor.step import StepBatch
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import InFlight, Scheduler
from fenceline.vgpu.proving.events import around


class InTime:
    """Follows ``scheduler``. ``wrong``: what came too late, or was ended too early."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.wrong: list[str] = []
        self._scheduler = scheduler
        args = scheduler.config.server_args
        self._limits_s = {"waiting": args.req_waiting_timeout, "running": args.req_running_timeout}
        # Of each request: its state, and the first tick that has found it there since the latest pause.
        self._clocks: dict[Req, tuple[str, float]] = {}
        self._now: float | None = None  # the latest of the ticks that are being taken in
        # The state of each request as the tick has found it: new weights beside it retract all that runs.
        self._found: dict[Req, str] | None = None
        self._num_launched = self._num_published = 0
        self._is_report_due = self._waits = False
        self._known: InternalState | None = None  # to the front end
        self._was_paused = False  # at some time while the present messages are taken in
        self._may_think = False  # some request of the step that is being published
        around(scheduler, "ingest", before=self._begins, after=self._taken_in)
        around(scheduler, "end_overdue", before=self._looked_at)
        around(scheduler, "end", before=self._ends)
        around(scheduler, "stop_scheduling", before=self._clocks_stop)
        around(scheduler, "publish", before=self._publishes, after=self._published)
        around(scheduler.stats, "report_is_due", after=self._asked_for_report)
        around(scheduler, "tell_frontend", before=self._told)
        around(scheduler, "pause", after=self._paused)
        around(scheduler, "launch_next", before=lambda: self._check_departed("a step is launched"))
        around(scheduler.memory, "write_backups", before=lambda: self._check_departed("backups begin"))
        around(scheduler, "step", before=self._steps, after=self._stepped)
        around(scheduler, "launch", before=self._launches)
        around(scheduler, "publish", after=self._may_sample)

    # --- requests whose time is up -------------------------------------------------------------------

    def _begins(self, messages: Sequence[Message]) -> None:
        """Of several ticks that arrive together only the last one counts. The messages may have come after hours."""
        self._check_known(self._waits, "the engine has waited for messages")
        self._now = max((message.now for message in messages if isinstance(message, TickReq)), default=None)
        self._found = None
        self._was_paused = self._scheduler.paused

    def _clocks_stop(self) -> None:
        """A pause begins, by new weights too. It does not count."""
        self._clocks.clear()
        self._was_paused = True

    def _looked_at(self, now: float) -> None:
        if now == self._now:
            self._found = {req: _state_of(req) for req in self._scheduler.reqs.values()}

    def _ends(self, req: Req, message: str, status_code: int | None) -> None:
        if status_code != 503:
            return
        state, since = _state_of(req), self._clocks.get(req)
        is_right = since is not None and since[0] == state and self._is_over(state, since[1])
        self._check(is_right and f"--req-{state}-timeout" in message, f"{req.rid} is ended: {message}")

    def _taken_in(self, _: None, messages: Sequence[Message]) -> None:
        self._check_sent("messages have been taken in")
        now, scheduler = self._now, self._scheduler
        # What a tick beside a pause has found depends on their order; the next one is looked at instead.
        if now is None or self._was_paused or scheduler.paused:
            return
        last = max(index for index, one in enumerate(messages) if isinstance(one, TickReq))
        later = {one.rid for one in messages[last:] if isinstance(one, TokenizedGenerateReq)}
        before, self._clocks = self._clocks, {}
        for req in scheduler.reqs.values():
            if req.rid in later or (self._found is not None and req not in self._found):
                continue
            state = _state_of(req) if self._found is None else self._found[req]
            known = before.get(req)
            since = known[1] if known is not None and known[0] == state else now
            self._clocks[req] = state, since
            self._check(
                not self._is_over(state, since), f"{req.rid} is not ended, and has been {state} too long"
            )

    def _is_over(self, state: str, since: float) -> bool:
        limit = self._limits_s[state]
        return limit is not None and self._now is not None and self._now - since > limit

    # --- what a turn of the loop has to do -----------------------------------------------------------

    def _check_departed(self, when: str) -> None:
        """The memory of a request that has left is given back before the next step looks for some, and with it the tree
        gets its pages, which are backed up in the same turn."""
        num = len(self._scheduler.departed)
        self._check(num == 0, f"{num} requests have left and keep their memory, and {when}")

    def _paused(self, result: tuple[bool, str], mode: str) -> None:
        holders = [req.rid for req in self._scheduler.reqs.values() if req.row]
        self._check(
            not result[0] or mode == "in_place" or not holders, f"{holders} keep their memory ({mode})"
        )

    def _launches(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        scheduler = self._scheduler
        num = sum(req.grammar is not None for req in scheduler.reqs.values())
        said = scheduler.num_constrained
        assert said == num, f"{said} requests are said to have a grammar, {num} do"
        self._num_launched += 1
        if scheduler.config.speculative is not None and num:
            # The second half of a step that drafts uses memory, and its masks need all tokens before.
            self._check(
                self._num_launched == self._num_published + 1,
                f"{self._num_launched - self._num_published} steps are in flight, and some request has a grammar",
            )

    def _may_sample(self, _: None, flight: InFlight) -> None:
        """A step whose masks follow from the tokens that have just been published is sampled at once, if all of it has
        grammars, is not in its reasoning, goes on and could not have ended."""
        self._num_published += 1
        pending, batch, reqs = self._scheduler.pending_masks, flight.batch, flight.reqs
        if pending is None or not batch.is_decode or pending.sampled is not None:
            return
        if list(pending.flight.reqs) != list(reqs) or any(req.left or req.grammar is None for req in reqs):
            return
        latest = {req.output_ids[-1] for req in reqs}
        may_end = latest & {*self._scheduler.config.model.eos_token_ids}
        is_slow = any(req.grammar.is_too_slow for req in reqs if req.grammar is not None)
        is_stuck = pending.may_go_on is not None and not all(pending.may_go_on)
        self._check(
            bool(may_end) or is_slow or is_stuck or self._may_think,
            "a step whose masks are known has not been sampled early",
        )

    def _stepped(self, flight: InFlight | None, prev: InFlight | None) -> None:
        scheduler, tiers = self._scheduler, self._scheduler.memory.tiers
        self._check_departed("a turn of the loop has ended")
        num = 0 if tiers is None else len(tiers._inserted)
        self._check(num == 0, f"{num} nodes of the tree wait to be backed up, and the turn has ended")
        if flight is None and not scheduler.reqs:
            num = len(scheduler.flushes)
            self._check(num == 0, f"{num} flushes wait, and no request is left")
            self._check(scheduler.memory_checked, "the engine is idle, and its memory has not been checked")

    # --- outputs and reports -------------------------------------------------------------------------

    def _check_sent(self, when: str) -> None:
        """A step takes long, so nobody waits for one with an output that is there."""
        num = len(self._scheduler.output._outs)
        self._check(num == 0, f"{num} outputs have not been sent, and {when}")

    def _publishes(self, flight: InFlight) -> None:
        self._is_report_due = False
        self._may_think = any(req.grammar is not None and req.grammar.may_think for req in flight.reqs)

    def _asked_for_report(self, is_due: bool) -> None:
        self._is_report_due = is_due

    def _published(self, _: None, flight: InFlight) -> None:
        self._check_sent("a step has been published")
        self._check_known(self._is_report_due, "a step has been published")

    def _steps(self, prev: InFlight | None) -> None:
        scheduler = self._scheduler
        is_busy = prev is not None or not scheduler.idle or scheduler.stopped
        self._waits = not (is_busy or scheduler.memory.num_outstanding or scheduler.grammars.loading)

    def _told(self, message: Message) -> None:
        if isinstance(message, StatsReport):
            self._known = message.state

    def _check_known(self, is_due: bool, when: str) -> None:
        if is_due:
            known, true = (
                None if one is None else _figures(one) for one in (self._known, self._scheduler.state())
            )
            self._check(known == true, f"{when}, and the front end knows {known} instead of {true}")

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 5:
            self.wrong.append(f"in time: {text}")


def _figures(state: InternalState) -> tuple[object, ...]:
    """What no thread changes beside the scheduler's."""
    pages = None if state.hicache is None else state.hicache.pages
    reqs = state.num_running_reqs, state.num_queue_reqs, state.num_aborts
    return *reqs, state.num_used_tokens, state.paused, pages


def _state_of(req: Req) -> str:
    return "running" if req.row else "waiting"
