"""Population: the requests of an engine, and the ladder by which they go.

A request *finishes* when its last output is sent (``Publisher.finish``). It *leaves* when the engine no longer
schedules it (:meth:`Population.leave`), which a retracted or silently aborted request does without having finished.
Then its memory is *released* (:meth:`Population.release`); others may use it after the request's last step in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fenceline.config.server_args import ServerArgs
from fenceline.constrained.matcher import Grammars
from fenceline.mem_cache.tree.radix_cache import TreeNode
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.req import Req
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.scheduler.running_batch import RunningBatch
from fenceline.scheduler.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: its batch, its requests in batch order, and its future result. ``result`` is a HeldStep while
    only the forward has been launched; :meth:`MaskedSteps.sample_held` replaces it."""

    batch: StepBatch
    reqs: Sequence[Req]
    result: ForwardResult | HeldStep
    number: int  # the number of steps launched so far, including this one

    @property
    def forward_result(self) -> ForwardResult:
        """``result`` of a step whose sampling has been launched too."""
        assert not isinstance(self.result, HeldStep), "its sampling has been submitted"
        return self.result


class ConstrainedReqs:
    """The constrained requests of a step, in its order, and those of the next steps as long as the batch is the same.
    ``least``: how many tokens an answer must have; None if none of them must have any."""

    def __init__(self, batch: StepBatch, reqs: Sequence[Req]) -> None:
        reqs = [req for req, samples in zip(reqs, batch.samples.tolist(), strict=True) if samples]
        self.composition = batch.composition
        self.reqs = [reqs[row] for row in batch.constrained.tolist()]
        self.grammars = Grammars([req.grammar for req in self.reqs])
        # Whether all requests of the step that sample are constrained.
        self.is_whole = len(self.reqs) == len(reqs)
        least = [req.source.sampling_params.min_new_tokens for req in self.reqs]
        self.least = least if any(least) else None


class Population:
    """The requests from :meth:`enter` to :meth:`leave`: those that wait, that run, and the one that is ``chunked``."""

    def __init__(
        self,
        reqs: dict[str, Req],
        memory: RequestMemory,
        running: RunningBatch,
        waiting: WaitingQueue,
        recorder: FlightRecorder,
        *,
        offloads: bool,
    ) -> None:
        """``offloads``: whether a retracted request leaves its KV on the host."""
        self.reqs = reqs  # all that have not left, by rid, in order of arrival
        self.memory = memory
        self.running = running
        self.waiting = waiting
        self.chunked: Req | None = None  # whose prompt the latest prefill step left half-way
        # Requests that decode from the next step on: the last part of their prompt has just been submitted.
        self.joining: list[Req] = []
        self.leaving: list[Req] = []  # those that have left and whose memory has not been released
        self.num_constrained = 0  # requests with a grammar
        self.constrained: ConstrainedReqs | None = None  # of the latest decode step, until one of them leaves
        self._recorder = recorder
        self._offloads = offloads

    def enter(self, req: Req) -> None:
        """Add the request to ``reqs``, where it stays until :meth:`leave`. A resumed one takes the place of itself."""
        earlier = self.reqs.get(req.rid)
        assert (earlier is None or earlier.left) and not req.row, f"{req.rid} enters once, without memory"
        self.reqs[req.rid] = req
        self.num_constrained += req.grammar is not None

    def leave(self, req: Req, why: str, cause: str = "") -> None:
        """Remove the request. :meth:`release` follows, after this turn's messages. ``cause``: that of a retraction."""
        assert self.reqs.get(req.rid) is req and not req.left, f"{req.rid} leaves once"
        logger.debug(
            "Request %s leaves (%s): %d tokens, %d of them cached, and %d new ones, after %d retractions",
            req.rid, cause or why, len(req.prompt_ids), req.cached_tokens, len(req.output_ids), req.num_retractions,
        )  # fmt: skip
        req.left = True
        self.running.note_left()
        self._recorder.left(req, why, cause)
        if why != "retract":  # otherwise the resumed request takes its place
            del self.reqs[req.rid]
        if req.grammar is not None:
            self.num_constrained -= 1
            self.constrained = None
        if req.row == 0:
            self.waiting.remove(req)
        else:
            self.waiting.holdings.release(req)
        if self.chunked is req:
            self.chunked = None
        self.leaving.append(req)

    def constrained_of(self, batch: StepBatch, reqs: Sequence[Req]) -> ConstrainedReqs:
        """The constrained requests of a step with ``reqs``."""
        latest = self.constrained
        if latest is None or not batch.is_decode or latest.composition != batch.composition:
            latest = self.constrained = ConstrainedReqs(batch, reqs)
        return latest

    def release(self) -> None:
        """Release the memory of requests that have left; each one's may be used again after its last step (F13)."""
        for req in self.leaving:
            self.memory.release(req)
        self.leaving.clear()

    def join(self) -> None:
        """Let those decode whose prompts have been submitted, and no more those that have left or are about to end."""
        self.running.drop_left()
        if self.joining:
            self.running.add([req for req in self.joining if not req.left])
            self.joining = []

    def holders(self) -> list[Req]:
        """The requests that may be retracted: all that hold memory and are not about to end."""
        return self.running.reqs if self.chunked is None else [*self.running.reqs, self.chunked]

    @property
    def some_end(self) -> bool:
        """Whether some request that holds memory is about to end."""
        return len(self.reqs) > self.waiting.num_reqs + len(self.holders())

    def retract(self, req: Req, cause: str) -> None:
        """Take all memory from ``req`` and put it back at the head of the queue. When it is admitted again it computes
        its tokens again, or with ``--retract-policy offload`` loads their KV. ``cause`` is for the flight recorder."""
        if req in self.running.reqs:
            self.running.remove(req)
        tail = self.memory.offload(req) if self._offloads else None
        self.leave(req, "retract", cause)
        self.release()
        resumed = req.resumed()
        resumed.tail = tail
        self.enter(resumed)
        self.waiting.put_back(resumed)

    def retract_beside(self, victims: Sequence[Req], prefixes: Sequence[TreeNode]) -> None:
        """Retract ``victims``. What they leave on the host does not take the place of ``prefixes``, the ends of the
        cached prefixes of the requests for which they go."""
        tree = self.memory.tree
        for node in prefixes:
            tree.lock(node)
        for victim in victims:
            self.retract(victim, "priority: it is lower than a waiting request's")
        for node in prefixes:
            tree.unlock(node)

    def retract_all(self, cause: str) -> int:
        """Retract every request that holds memory. Returns how many there were."""
        # Newest first: each one goes to the head of the queue, so they resume in their old order.
        holders = [req for req in reversed(list(self.reqs.values())) if req.row]
        for req in holders:
            self.retract(req, cause)
        return len(holders)

    def stop_clocks(self) -> None:
        """The time until the next tick does not count for the requests' time-outs."""
        for req in self.reqs.values():
            req.clocked_running = None

    def overdue(self, now: float, args: ServerArgs) -> Iterator[tuple[Req, str]]:
        """The requests that have waited or run for too long, each with the reason. A request's time starts at the first
        tick that finds it waiting or running, so none is ended early; it restarts after a pause and a retraction."""
        for req in list(self.reqs.values()):
            running = req.row != 0
            limit = args.req_running_timeout if running else args.req_waiting_timeout
            if req.clocked_running is not running:
                req.clocked_running, req.clocked_since = running, now
            elif limit is not None and now - req.clocked_since > limit:
                what, flag = ("running", "running") if running else ("waiting in the queue", "waiting")
                yield req, f"still {what} after {limit:g} s (--req-{flag}-timeout)"
