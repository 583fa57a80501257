"""CudaGraphRunner: decode steps captured once for each batch size in a list, and replayed.

A batch runs in the smallest captured size that holds it, its other rows padded. Before each replay the host checks what
it can know in a few microseconds: that the graph may be replayed, that its memory has not moved, and that the arena
holds this batch at this step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import AttentionPlan, GraphDecodeInputs
from fenceline.mem_cache.kv_pool import ReqPool
from fenceline.memory_order import ArenaOutputs, Device, Graph, GraphPool
from fenceline.memory_order.guards import TOTAL_BUCKETS
from fenceline.model_executor.decode_step import DecodeStep
from fenceline.model_executor.graph_runner import GraphMismatch, GraphRunner

I64 = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    size: int
    plan: AttentionPlan
    graph: Graph


class CudaGraphRunner(GraphRunner):
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
        super().__init__(device, "decode", "requests", sizes, padding)
        self._step = step
        self._attention = attention
        self._req_pool = req_pool
        self._debug = debug
        self._captured: dict[int, _Captured] = {}
        self._logits = torch.empty(
            (self._sizes[-1], step.model.config.vocab_size),
            dtype=step.model.context.dtype,
            device=device.torch_device,
        )
        device.name_memory(self._logits, "decode.logits", self._logits[0].nbytes)

    def addresses(self) -> Sequence[int]:
        """See ``GraphRunner.addresses``."""
        return self._step.addresses()

    def capture(self, max_seq_len: int, show_progress: bool) -> None:
        """Capture every size for requests of up to ``max_seq_len`` tokens. Waits for the device."""
        self._capture_sizes(lambda pool, size: self._capture_size(pool, size, max_seq_len), show_progress)

    def _capture_size(self, pool: GraphPool, size: int, max_seq_len: int) -> Sequence[Graph]:
        with self._device.forward.active():  # what a plan allocates and writes, FORWARD then reads
            plan = self._plan(size, max_seq_len)
        if plan is None:
            logger.warning(
                "--cuda-graph-bs %d is left out: too much attention for a graph on this device, %d requests of up"
                " to %d tokens; a smaller --context-length makes it fit",
                *(size, size, max_seq_len),
            )
            return ()
        self._warm_up(size, plan)
        graph = self._device.capture(f"decode[{size}]", pool, lambda: self._run(size, plan))
        self._captured[size] = _Captured(size, plan, graph)
        return (graph,)

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
        self.stats.count_replay(size)
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
