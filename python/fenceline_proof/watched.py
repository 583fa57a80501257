"""The real scheduler, which also tells the proof of tags, of what prefixes share, and of what has come of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

from fenceline.config.engine_config import EngineConfig
from fenceline.model_executor.step import StepBatch, StepOutput, Worker
from fenceline.scheduler.masked_steps import StepMasks
from fenceline.scheduler.population import InFlight
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Inbox, Outbox, Scheduler
from fenceline_proof.answers import Sharing
from fenceline_proof.drafts import Verified
from fenceline_proof.events import around
from fenceline_sim.tags import Tags


class WatchedScheduler(Scheduler):
    """Tells ``sharing`` when a prefix is cached, when one may be found, and when some are given up. ``verified``: what
    has come of drafts. ``wrong``: steps that were launched too late."""

    def __init__(
        self, config: EngineConfig, worker: Worker, inbox: Inbox, outbox: Outbox, tags: Tags | None = None
    ) -> None:
        super().__init__(config, worker, inbox, outbox)
        self.wrong: list[str] = []
        self.verified: list[Verified] = []
        self._late: InFlight | None = None
        self._was_early = False  # ``_late`` has been published in this turn of the loop, without need
        self._tags = tags
        if tags is not None:
            tags.watch(self)
        args, tiers = config.server_args, config.hicache
        storage = tiers is not None and tiers.storage is not None
        threshold = 1 if tiers is None else tiers.load_back_threshold
        draft = None if config.speculative is None else config.speculative.draft
        # The draft's rows of a chunk are computed from tokens of the prompt behind it.
        lookahead = 0 if draft is None else draft.lookahead
        self._num_rows_behind = 0 if draft is None else draft.num_rows_behind
        self.sharing = Sharing(args.page_size, args.disable_radix_cache, storage, threshold, lookahead)
        self.masks.sample_held = partial(self._sample_held, self.masks.sample_held)  # type: ignore[method-assign]
        around(self.publisher, "publish_counted", before=self._publishes_counted)
        around(self.population, "release", before=self._releases)
        tree = self.memory.tree
        around(tree, "_detach", after=lambda result, node: self.sharing.lost())
        around(tree, "evict", after=lambda num, num_pages: self.sharing.moved() if num else None)
        around(self.memory, "flush", after=lambda num, storage=False: self.sharing.flushed(storage))

    def step(self, prev: InFlight | None) -> InFlight | None:
        """See Scheduler."""
        self._was_early = False
        self._late = prev  # a step in flight, to be published after the next one has been launched
        return super().step(prev)

    def launch(self, batch: StepBatch, reqs: Sequence[Req]) -> InFlight:
        """See Scheduler. The device must not stand still while the host reads the results of a decode step. Only drafts
        under masks need these before the next step, and on a CPU a launch is the whole step."""
        if self._late is not None and self._was_early and self._late.batch.is_decode:
            self.wrong.append("a decode step is published before the next step has been launched")
        if not batch.is_decode:
            for req in reqs:
                if req.rid not in self.sharing.admitted:
                    self.sharing.admit(req.source, req.prompt_ids.tolist())
        with nullcontext() if self._tags is None else self._tags.step(batch, reqs):
            return super().launch(batch, reqs)

    def _sample_held(self, sample: Callable[[StepMasks], InFlight], pending: StepMasks) -> InFlight:
        with nullcontext() if self._tags is None else self._tags.rest_of_step():
            return sample(pending)

    def publish(self, flight: InFlight) -> None:
        """See Scheduler."""
        if flight is self._late and self.config.device != "cpu":
            under_masks = any(req.grammar is not None for req in self.reqs.values())
            self._was_early = not (under_masks and self.config.speculative is not None)
        batch, reqs = flight.batch, []
        if not batch.is_decode:
            columns = (flight.reqs, batch.seq_lens.tolist(), batch.samples.tolist())
            reqs = [
                (req, length)
                for req, length, samples in zip(*columns, strict=True)
                if samples and not req.left
            ]
        super().publish(flight)
        for req, length in reqs:
            self._cached(req, length, req.num_tokens)

    def _publishes_counted(self, batch: StepBatch, reqs: Sequence[Req], number: int, out: StepOutput) -> None:
        if out.counts is not None:
            shape = self.planner.shapes[batch.depth.depth]
            self.verified += [
                Verified(req.rid, len(req.output_ids), count, shape)
                for req, count in zip(reqs, out.counts.tolist(), strict=True)
                if not req.left
            ]

    def _releases(self) -> None:
        for req in self.population.leaving:
            if req.row != 0:
                self._cached(req, req.committed_len, req.num_tokens)

    def _cached(self, req: Req, num_computed: int, num_known: int) -> None:
        """The KV of ``num_computed`` tokens of ``req`` has been computed, and ``num_known`` of its tokens are known."""
        tokens = req.token_ids()[:num_known].tolist()
        self.sharing.cache(req.source.extra_key, tokens, num_computed - self._num_rows_behind)
