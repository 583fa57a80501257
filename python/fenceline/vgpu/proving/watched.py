"""The real scheduler, which also reports what it does to the proof's records.

Its choices are checked too, where the documentation defines them: how many prompt tokens a step takes, the order of
admission, and which requests are retracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

from fenceline.config.engine_config import EngineConfig
from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.model_executor.step import ExtendBatch, ScheduleBatch, Worker
from fenceline.scheduler.req import Req
from fenceline.scheduler.scheduler import Inbox, InFlight, Outbox, Scheduler
from fenceline.vgpu.proving.answers import Sharing
from fenceline.vgpu.proving.events import around
from fenceline.vgpu.tags import Tags


class WatchedScheduler(Scheduler):
    """Tells ``sharing`` when a prefix is cached, when one may be found, and when some are given up. ``wrong``: choices
    that are not those that were promised."""

    def __init__(
        self, config: EngineConfig, worker: Worker, inbox: Inbox, outbox: Outbox, tags: Tags | None = None
    ) -> None:
        super().__init__(config, worker, inbox, outbox)
        self.wrong: list[str] = []
        self._arrivals: dict[str, int] = {}
        self._half_way: Sequence[Req] = ()  # whose prompts the latest prefill step left so
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
            self._check_prefill(batch, reqs)
            for req in reqs:
                if req.rid not in self.sharing.admitted:
                    self.sharing.admit(req.source, req.prompt_ids.tolist())
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

    # --- choices

    def accept(self, message: TokenizedGenerateReq) -> None:
        """See Scheduler."""
        self._arrivals[message.rid] = len(self._arrivals)
        super().accept(message)

    def retract(self, req: Req) -> None:
        """See Scheduler. Of those that run the lowest priority goes first; a pause takes all."""
        running = self.running.reqs
        if not self.paused and any(self._rank(other) > self._rank(req) for other in running):
            self.wrong.append(f"{req.rid} is retracted, and a request of a worse priority runs on")
        super().retract(req)

    def preempt(self, threshold: int) -> None:
        """See Scheduler. Who gives way does so for a waiting request that is better by more than ``threshold``."""
        running, best = list(self.running.reqs), min(map(self._rank, self.waiting), default=math.inf)
        super().preempt(threshold)
        for req in running:
            if req.left and not self._rank(req) - best > threshold:
                self.wrong.append(
                    f"{req.rid} gives way, and nobody waits who is better by more than {threshold}"
                )

    def _check_prefill(self, batch: ExtendBatch, reqs: Sequence[Req]) -> None:
        chunk, most = self.config.chunked_prefill_size, self.config.max_prefill_tokens
        num_tokens = sum(len(seq.token_ids) for seq in batch.seqs)
        most = most if chunk is None else min(chunk, most)
        if num_tokens > most and (chunk is not None or len(reqs) > 1):
            self.wrong.append(f"a prefill step computes {num_tokens} tokens, {most} are allowed")
        admitted = [req for req in reqs if req not in self._half_way]
        self._half_way = [req for seq, req in zip(batch.seqs, reqs, strict=True) if seq.sampling is None]
        for left in self.waiting:
            if left.prefetch is not None:
                continue  # it may be waiting for storage
            passed = next((req for req in admitted if self._order(left) < self._order(req)), None)
            if passed is not None:
                self.wrong.append(f"{passed.rid} is admitted before {left.rid}, whose turn it is")

    def _order(self, req: Req) -> tuple[float, ...]:
        """The smallest goes first, where that is settled: by priority, then who has been retracted, then by arrival.
        The other policies look at what is cached."""
        if req.num_retractions or self.config.server_args.schedule_policy != "fcfs":
            return self._rank(req), not req.num_retractions
        return self._rank(req), True, self._arrivals[req.rid]

    def _rank(self, req: Req) -> float:
        args = self.config.server_args
        if not args.enable_priority_scheduling:
            return 0.0
        value = req.source.priority if req.source.priority is not None else args.default_priority_value
        if value is None:
            return math.inf
        return value if args.schedule_low_priority_values_first else -value

    # --- prefixes

    def _cached(self, req: Req, num_tokens: int) -> None:
        self.sharing.cache(req.source.extra_key, req.token_ids()[:num_tokens].tolist())
