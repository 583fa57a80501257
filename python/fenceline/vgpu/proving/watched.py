"""The scheduler as the proof sees it: the real one, which says what it does to whoever keeps the books beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from fenceline.config.engine_config import EngineConfig
from fenceline.model_executor.step import ExtendBatch, ScheduleBatch, Worker
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Inbox, InFlight, Outbox, Scheduler
from fenceline.vgpu.proving.answers import Sharing
from fenceline.vgpu.proving.events import around
from fenceline.vgpu.tags import Tags


class WatchedScheduler(Scheduler):
    """Tells ``sharing`` when a prefix is cached, when one may be found, and when some are given up."""

    def __init__(
        self, config: EngineConfig, worker: Worker, inbox: Inbox, outbox: Outbox, tags: Tags | None = None
    ) -> None:
        super().__init__(config, worker, inbox, outbox)
        self._tags = tags
        if tags is not None:
            tags.watch(self)
        storage = config.hicache is not None and config.hicache.storage is not None
        self.sharing = Sharing(config.server_args.page_size, config.server_args.disable_radix_cache, storage)
        tree = self.memory.tree
        around(tree, "_detach", after=lambda result, node: self.sharing.lost())
        around(tree, "evict", after=lambda num, num_pages: self.sharing.moved() if num else None)
        around(self.memory, "flush", after=lambda num, storage=False: self.sharing.flushed(storage))

    def launch(self, batch: ScheduleBatch, reqs: Sequence[Req]) -> InFlight:
        """See Scheduler."""
        if isinstance(batch, ExtendBatch):
            for req in reqs:
                if req.rid not in self.sharing.admitted:
                    self.sharing.admit(req.source)
        with nullcontext() if self._tags is None else self._tags.step(batch, reqs):
            return super().launch(batch, reqs)

    def publish(self, flight: InFlight) -> None:
        """See Scheduler."""
        batch, reqs = flight.batch, []
        if isinstance(batch, ExtendBatch):
            reqs = [(seq, req) for seq, req in zip(batch.seqs, flight.reqs, strict=True) if not req.left]
        super().publish(flight)
        for seq, req in reqs:
            if seq.sampling is not None:
                self._cached(req, seq.seq_len)

    def retire_departed(self) -> None:
        """See Scheduler."""
        for req in self.departed:
            if req.row != 0:
                self._cached(req, req.committed_len)
        super().retire_departed()

    def _cached(self, req: Req, num_tokens: int) -> None:
        self.sharing.cache(req.source.extra_key, req.token_ids()[:num_tokens].tolist())
