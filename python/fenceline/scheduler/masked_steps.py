"""MaskedSteps: the token masks of constrained requests, from the launch of a step's forward to that of its sampling."""

from __future__ import annotations

from collections.abc import Sequence

from fenceline.constrained.matcher import GrammarStore, MaskFill, RequestGrammar, accept_tokens
from fenceline.memory_order import Points
from fenceline.model_executor.step import HeldStep, StepBatch
from fenceline.scheduler.flight_recorder import FlightRecorder
from fenceline.scheduler.population import ConstrainedReqs, InFlight, Population
from fenceline.scheduler.req import Req

TOO_SLOW = "its grammar takes too long for each token: make it less ambiguous"


class StepMasks:
    """The token masks of a step whose forward has been launched. ``constrained``: its M constrained requests.
    ``num_unpublished``: how many of their tokens the grammars have accepted that have not been published yet."""

    def __init__(self, flight: InFlight, held: HeldStep, constrained: ConstrainedReqs) -> None:
        self.flight = flight
        self.held = held
        self.constrained = constrained
        self.num_unpublished = 0
        self.fill: MaskFill | None = None  # once the masks have been begun
        self.may_go_on: list[bool] | None = None  # [M], once they have been filled
        self.sampled: InFlight | None = None  # once the sampling has been submitted


class MaskedSteps:
    """Fills the masks of steps and submits their sampling, as early as the grammars know the tokens before."""

    def __init__(self, grammars: GrammarStore, population: Population, recorder: FlightRecorder) -> None:
        self.grammars = grammars
        self.pending: StepMasks | None = None  # of the step that has been launched and not sampled yet
        self._population = population
        self._recorder = recorder

    def begin(self, flight: InFlight) -> None:
        """Note that ``flight`` has been launched; its sampling waits for masks if its result is a HeldStep."""
        if isinstance(flight.result, HeldStep):
            constrained = self._population.constrained_of(flight.batch, flight.reqs)
            self.pending = StepMasks(flight, flight.result, constrained)

    def stuck(self) -> list[tuple[Req, str]]:
        """Fill the pending masks, now that the previous step has been published, so that the grammars know which tokens
        may follow. Returns the requests that have to end and why: their grammar allows no token or is too slow."""
        pending = self.pending
        if pending is None or pending.sampled is not None or self.fill_masks(pending):
            return []
        assert pending.fill is not None and pending.may_go_on is not None, "the masks have been filled"
        found: list[tuple[Req, str]] = []
        for index, (req, goes_on) in enumerate(zip(pending.constrained.reqs, pending.may_go_on, strict=True)):
            if req.left:
                continue
            assert req.grammar is not None, "a constrained request has a grammar"
            if req.grammar.is_too_slow:
                found.append((req, TOO_SLOW))
            elif not goes_on:
                pending.fill.masks[index] = -1
                found.append((req, "no token of the vocabulary can follow in its grammar"))
        return found

    def sampled(self) -> InFlight:
        """The pending step with its sampling submitted."""
        pending, self.pending = self.pending, None
        assert pending is not None, "a step waits for its masks"
        return pending.sampled or self.sample_held(pending)

    def sample_held(self, pending: StepMasks) -> InFlight:
        """Submit the sampling of a step whose forward has been launched and whose masks have been filled. Requests that
        left since the launch keep their rows until this step's sampling is done as well."""
        flight = pending.flight
        result = pending.held.sample()
        done = Points.of(result.done)
        for req in flight.reqs:
            if req.last_step == flight.number:
                req.last_flight = done
        self._recorder.sampled(result.done)
        return InFlight(flight.batch, flight.reqs, result, flight.number)

    def accept_tokens(self, batch: StepBatch, reqs: Sequence[Req], tokens: Sequence[int]) -> list[bool | None]:
        """Advance the grammars of a step with one token for each of ``reqs``, those that sample. See
        :func:`accept_tokens` and :meth:`sample_early`."""
        if not len(batch.constrained):
            return [None] * len(reqs)
        latest = self._population.constrained
        if latest is not None and batch.is_decode and latest.composition == batch.composition and latest.is_whole:
            grammars: Sequence[RequestGrammar | None] = latest.grammars  # of ``reqs``, none of whom has left
        else:
            grammars = [None if req.left else req.grammar for req in reqs]
        accepted = accept_tokens(grammars, tokens)
        self.sample_early(grammars, tokens, accepted)
        return accepted

    def sample_early(
        self, grammars: Sequence[RequestGrammar | None], tokens: Sequence[int], accepted: Sequence[bool | None]
    ) -> None:
        """The tokens of the previous step's requests, whose grammars are given, have arrived and are about to be
        published. If the grammars have ``accepted`` all of them and no answer may have ended, submit the sampling of
        the step that has just been launched first: the next step can only be launched after it. Otherwise, let helper
        threads begin with the masks of requests of which this is true; the others follow in :meth:`stuck`."""
        pending = self.pending
        if pending is None:
            return
        mine = pending.constrained.grammars
        if grammars is mine and accepted.count(True) == len(mine) and not self.grammars.may_end(tokens):
            ready: Sequence[RequestGrammar | None] = mine
        else:
            going_on = {
                grammar
                for grammar, token, goes_on in zip(grammars, tokens, accepted, strict=True)
                if goes_on and grammar is not None and not grammar.may_end_with(token)
            }
            ready = [grammar if grammar in going_on else None for grammar in mine]
            if None not in ready:
                ready = mine
        all_ready = ready is mine
        pending.fill = self.grammars.begin_fill(ready, pending.held.begin_masks(), finishes_now=all_ready)
        if all_ready:
            pending.num_unpublished = 1
            if self.fill_masks(pending):
                pending.sampled = self.sample_held(pending)

    def fill_masks(self, pending: StepMasks) -> bool:
        """Write which tokens a step's constrained requests may draw, if that has not been done. Returns False if some
        request has to end, because its grammar allows no token or has become too slow."""
        asked, fill = pending.constrained, pending.fill
        grammars: Sequence[RequestGrammar | None] = asked.grammars
        if not pending.num_unpublished and any(req.left for req in asked.reqs):
            # These need no mask: their draws are not read.
            grammars = [None if req.left else req.grammar for req in asked.reqs]
        if pending.may_go_on is None:
            if fill is None:
                none = [None] * len(grammars)
                fill = pending.fill = self.grammars.begin_fill(none, pending.held.begin_masks(), finishes_now=True)
            least_more = None
            if asked.least is not None:
                published = [len(req.output_ids) + pending.num_unpublished for req in asked.reqs]
                least_more = [least - num for least, num in zip(asked.least, published, strict=True)]
            pending.may_go_on = self.grammars.finish_fill(fill, grammars, least_more)
        clocks = {grammar.clock for grammar in grammars if grammar is not None}
        return all(pending.may_go_on) and not any(clock.is_over for clock in clocks)
