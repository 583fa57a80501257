"""CudaGraphRunner: decode steps captured once for each batch size in a list, and replayed.

A batch runs in the smallest captured size that holds it, its other rows padded. Before each replay the host checks what
it can know in a few microseconds: that the graph may be replayed, that its memory has not moved, and that the arena
holds this batch at this step.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from fenceline.layers.attention.base import AttentionBackend, AttentionPlan
from fenceline.layers.forward_batch import GraphDecodeInputs
from fenceline.mem_cache.req_pool import ReqPool
from fenceline.memory_order import ArenaOutputs, Device, Graph
from fenceline.memory_order.guards import TOTAL_BUCKETS
from fenceline.model_executor.decode_step import DecodeStep

I64 = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GraphStats:
    """Decode steps while graphs are on. ``fallbacks`` ran without a graph and ``repairs`` only after something that was
    wrong had been put right, by reason; the aims are ``replays == eligible_steps`` and no repairs."""

    eligible_steps: int = 0
    replays: int = 0
    replays_by_size: dict[str, int] = field(default_factory=dict)  # captured sizes, as text
    fallbacks: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    capture_s: float = 0.0
    capture_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Captured:
    size: int
    plan: AttentionPlan
    graph: Graph


class GraphMismatch(RuntimeError):
    """``--debug-cuda-graph``: a replay and the same step without its graph disagree."""


class CudaGraphRunner:
    """The captured sizes of one DecodeStep. Owns their pool; their memory beside that is the arena's."""

    def __init__(
        self,
        device: Device,
        step: DecodeStep,
        attention: AttentionBackend,
        req_pool: ReqPool,
        sizes: Sequence[int],
        padding: bool = True,
        debug: bool = False,
    ) -> None:
        """``sizes``: ascending batch sizes. Nothing is captured before :meth:`capture`."""
        assert list(sizes) == sorted(set(sizes)), "sizes ascend"
        self.stats = GraphStats()
        self._device = device
        self._step = step
        self._attention = attention
        self._req_pool = req_pool
        self._sizes = list(sizes)
        self._padding = padding
        self._debug = debug
        self._captured: dict[int, _Captured] = {}
        self._addresses = step.addresses()
        self._logits = torch.empty(
            (self._sizes[-1], step.model.config.vocab_size),
            dtype=step.model.lm_head.weight.dtype,
            device=device.torch_device,
        )
        device.name_memory(self._logits, "decode.logits", self._logits[0].nbytes)

    def capture(self, max_seq_len: int, show_progress: bool) -> None:
        """Capture every size, the largest first so that smaller ones fit into its memory. Waits for the device."""
        begin, (free_before, _) = time.perf_counter(), self._device.memory_info()
        pool = self._device.make_graph_pool("decode")
        bar = tqdm(
            sorted(self._sizes, reverse=True), desc="Capturing decode graphs", disable=not show_progress
        )
        for size in bar:
            with self._device.forward.active():  # what a plan allocates and writes, FORWARD then reads
                plan = self._plan(size, max_seq_len)
            if plan is None:
                self._sizes.remove(size)
                logger.warning(
                    "--cuda-graph-bs %d is left out: too much attention for a graph on this device, %d requests of up"
                    " to %d tokens; a smaller --context-length makes it fit",
                    *(size, size, max_seq_len),
                )
                continue
            self._warm_up(size, plan)
            graph = self._device.capture(f"decode[{size}]", pool, lambda s=size, p=plan: self._run(s, p))  # type: ignore[misc]
            graph.register()  # one rank: nobody else has to know an address
            self._captured[size] = _Captured(size, plan, graph)
            free, _ = self._device.memory_info()
            bar.set_postfix_str(f"{size} requests, {max(free_before - free, 0) / 2**30:.2f} GiB")
        for captured in self._captured.values():
            captured.graph.allow_replay()
        self.stats.replays_by_size = {str(size): 0 for size in self._sizes}
        self._device.synchronize()
        self.stats.capture_bytes = max(free_before - self._device.memory_info()[0], 0)
        self.stats.capture_s = time.perf_counter() - begin
        logger.info(
            "Captured decode graphs of %d sizes up to %d requests in %.1f s, %.2f GiB",
            len(self._sizes),
            max(self._sizes, default=0),
            self.stats.capture_s,
            self.stats.capture_bytes / 2**30,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, ascending."""
        return tuple(self._sizes)

    def size_for(self, num_reqs: int) -> int | None:
        """The size that a batch of ``num_reqs`` is replayed in, None if it runs without a graph; total (F11)."""
        index = bisect.bisect_left(self._sizes, num_reqs)
        if index < len(self._sizes) and (self._padding or self._sizes[index] == num_reqs):
            return self._sizes[index]
        if not self._device.keeps(TOTAL_BUCKETS):
            return self._sizes[-1]
        reason = "size" if index == len(self._sizes) else "padding"
        self.stats.fallbacks[reason] = self.stats.fallbacks.get(reason, 0) + 1
        return None

    def fits(self) -> bool:
        """Whether captured graphs still name the memory that is in use; counted as a fallback if not."""
        if self._addresses == self._step.addresses():
            return True
        self.stats.fallbacks["address"] = self.stats.fallbacks.get("address", 0) + 1
        return False

    def replay(self, size: int, seq_lens_cpu: I64) -> ArenaOutputs:
        """Submit the step of ``size`` rows, whose arena is filled; ``seq_lens_cpu`` [n] of its live requests.

        Returns the lease on ``next_tokens``; :meth:`logits` are good as long.
        """
        captured = self._captured[size]
        self._attention.before_replay(size, seq_lens_cpu)
        outputs = self._step.arena.begin_replay()
        self._device.begin_fill([self._logits], TOTAL_BUCKETS)
        if self._debug:
            self._compare(captured)
        else:
            captured.graph.replay()
        self.stats.replays += 1
        self.stats.replays_by_size[str(size)] += 1
        return outputs

    def logits(self, num_reqs: int) -> torch.Tensor:
        """Of the latest replay, [num_reqs, vocab_size] in the model's dtype."""
        return self._logits[:num_reqs]

    def _plan(self, size: int, max_seq_len: int) -> AttentionPlan | None:
        step = self._step
        return self._attention.plan_graph(
            GraphDecodeInputs(
                page_table=self._req_pool.page_table,
                rows=step.rows[:size],
                seq_lens=step.seq_lens[:size],
                max_seq_len=max_seq_len,
            )
        )

    def _warm_up(self, size: int, plan: AttentionPlan) -> None:
        """Compile and set up what the first call does: the arena is all padding, so only the sink is touched."""
        with self._device.forward.active():
            self._attention.before_replay(size, np.ones(0, dtype=np.int64))
            self._run(size, plan)
            self._step.arena["num_steps"].zero_()
        self._device.synchronize()

    def _run(self, size: int, plan: AttentionPlan) -> None:
        step = self._step
        step.derive_inputs(size)
        plan.prepare()
        logits = step.forward(size, plan, self._logits[:size])
        step.sample(size, logits)

    # --- --debug-cuda-graph ----------------------------------------------------------------------------

    def _compare(self, captured: _Captured) -> None:
        """Run the step without its graph, take its traces back, replay, and compare every field."""
        arena, size = self._step.arena, captured.size
        fields = [name for name in arena.fields if not name.startswith("plan_")]
        last_tokens = self._req_pool.last_tokens
        before = last_tokens.clone(), arena["num_steps"].clone()
        self._run(size, captured.plan)
        eager = {name: arena[name][:size].clone() for name in fields}
        eager["logits"] = self._logits[:size].clone()
        last_tokens.copy_(before[0])
        arena["num_steps"].copy_(before[1])
        captured.graph.replay()
        self._device.synchronize()
        for name, expected in eager.items():
            replayed = self._logits[:size] if name == "logits" else arena[name][:size]
            wrong = (replayed != expected).flatten(1).any(1) if name == "logits" else replayed != expected
            rows = torch.nonzero(wrong).flatten().tolist()
            if rows:
                raise GraphMismatch(
                    f"decode[{size}]: {name} of rows {rows[:8]} differs: "
                    f"{replayed[rows[0]].flatten()[:4].tolist()} by replay, "
                    f"{expected[rows[0]].flatten()[:4].tolist()} without the graph"
                )
