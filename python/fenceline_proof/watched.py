"""The real scheduler, whose steps also tell the proof's tags what they are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from fenceline.config.engine_config import EngineConfig
from fenceline.model_executor.step import StepBatch, Worker
from fenceline.scheduler.masked_steps import StepMasks
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Inbox, Outbox, Scheduler
from fenceline_sim.tags import Tags


class WatchedScheduler(Scheduler):
    """``wrong``: steps that were launched too late."""

    def __init__(
        self, config: EngineConfig, worker: Worker, inbox: Inbox, outbox: Outbox, tags: Tags | None = None
    ) -> None:
        super().__init__(config, worker, inbox, outbox)
        self.wrong: list[str] = []
        self._late: InFlight | None = None
        self._was_early = False  # ``_late`` has been published in this turn of the loop, without need
        self._tags = tags
        if tags is not None:
            tags.watch(self)
        self.masks.sample_held = partial(self._sample_held, self.masks.sample_held)  # type: ignore[method-assign]

    def step(self, prev: InFlight | None) -> InFlight | None:
        self._was_early = False
        self._late = prev  # a step in flight, to be published after the next one has been launched
        return super().step(prev)

    def launch(self, batch: StepBatch, reqs: Sequence[Req]) -> InFlight:
        """See Scheduler. The device must not stand still while the host reads the results of a decode step. Only drafts
        under masks need these before the next step, and on a CPU a launch is the whole step."""
        if self._late is not None and self._was_early and self._late.batch.is_decode:
            self.wrong.append("a decode step is published before the next step has been launched")
        with nullcontext() if self._tags is None else self._tags.step(batch, reqs):
            return super().launch(batch, reqs)

    def _sample_held(self, sample: Callable[[StepMasks], InFlight], pending: StepMasks) -> InFlight:
        with nullcontext() if self._tags is None else self._tags.rest_of_step():
            return sample(pending)

    def publish(self, flight: InFlight) -> None:
        if flight is self._late and self.config.device != "cpu":
            under_masks = any(req.grammar is not None for req in self.reqs.values())
            self._was_early = not (under_masks and self.config.speculative is not None)
        super().publish(flight)
