"""DecodeRunner: decode steps over an arena, captured once for each batch size in a list and replayed.

The arena holds the batch. Its PLAN fields are written when the batch changes; every step derives its INPUT fields from
them and from how many steps have run since, so that in steady decode the host submits nothing but the step. Padded
requests have row 0: they read and write the sink alone.

A batch runs in the smallest captured size that holds it, its other rows padded; where there is none, the same step runs
without a graph. Before each replay the host checks what it can know in a few microseconds: that the graph may be
replayed, that its memory has not moved, and that the arena holds this batch at this step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import (
    AttentionInputs,
    AttentionPlan,
    ForwardBatch,
    ForwardMode,
    GraphDecodeInputs,
)
from fenceline.mem_cache.kv_pool import KVPool, ReqPool
from fenceline.memory_order import (
    Arena,
    ArenaField,
    ArenaOutputs,
    Device,
    Graph,
    GraphPool,
    Role,
    comparison,
)
from fenceline.memory_order.edges import SAME_COMPOSITION, SINK, TOTAL_BUCKETS
from fenceline.model_executor.graph_runner import GraphMismatch, GraphRunner
from fenceline.model_executor.kernels.decode_prologue import decode_prologue
from fenceline.model_executor.step import DecodeBatch
from fenceline.models.decoder import CausalLM
from fenceline.sampling.kernels.sample import sample_tokens
from fenceline.sampling.logprobs import OutputLogprobs
from fenceline.sampling.sampling_batch import SamplingBatch, sampling_arrays

Arrays = dict[str, npt.NDArray[np.generic]]
Views = Mapping[str, torch.Tensor]
I64 = npt.NDArray[np.int64]
_PLAN = ("plan_rows", "plan_seq_lens", "temperatures", "noise_scales", "seed_keys")

logger = logging.getLogger(__name__)


class RepairError(AssertionError):
    """The arena did not hold the batch that was to run. Raised where repairs are not tolerated: in tests."""


@dataclass(frozen=True, slots=True)
class Logits:
    """What the first phase of a step, its forward, leaves for the second, which samples: S requests whose next tokens
    are to be drawn. Good until the next step is submitted.

    ``tokens`` [S] int64: the forward has drawn them itself, which a replay can where requests need a temperature at
    most. Else ``values`` [S, vocab_size] in the model's dtype (of several ranks each has its own columns),
    ``positions`` and ``rows`` [S] int64, and the requests' ``sampling``. ``prompt_logprobs`` are of the prompts' tokens
    that are scored, which no choice of tokens changes.
    """

    tokens: torch.Tensor | None = None
    values: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    sampling: SamplingBatch | None = None
    prompt_logprobs: OutputLogprobs | None = None
    num_verified: int = (
        0  # rows for each request of a speculative step: what is drawn goes to SpeculativeRunner.accept
    )


def plan_arrays(batch: DecodeBatch, sampling: Mapping[str, npt.NDArray[np.generic]]) -> Arrays:
    """What the PLAN fields hold for ``batch``, [B] each. ``sampling``: its ``sampling_arrays``; greedy where absent."""
    num = len(batch.rows)
    return {
        "plan_rows": batch.rows,
        "plan_seq_lens": batch.seq_lens,
        "temperatures": sampling.get("temperatures", np.ones(num, np.float32)),
        "noise_scales": sampling.get(
            "noise_scales",
            np.ones(num, np.float32) if "seed_keys" in sampling else np.zeros(num, np.float32),
        ),
        "seed_keys": sampling.get("seed_keys", np.zeros(num, np.int64)),
    }


@dataclass(slots=True)
class _Filled:
    """The batch that the arena holds."""

    composition: int
    num_reqs: int
    first_seq_lens: npt.NDArray[np.int64]  # at the first step after the fill
    sampling: SamplingBatch
    num_steps: int = 0

    def holds(self, batch: DecodeBatch) -> bool:
        """Whether the device's lengths, advanced step by step, are the batch's."""
        return np.array_equal(self.first_seq_lens + self.num_steps, batch.seq_lens)


@dataclass(frozen=True, slots=True)
class _Captured:
    size: int
    plan: AttentionPlan
    graph: Graph


class DecodeRunner(GraphRunner):
    """One device's decode steps for up to ``max_batch`` requests, and the graphs of some batch sizes.

    It owns the pool of its graphs; their memory beside that is the arena's. All is submitted to FORWARD, which must be
    current in all methods but :meth:`arrays`.
    """

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        kv_pool: KVPool,
        req_pool: ReqPool,
        attention: AttentionBackend,
        max_batch: int,
        sizes: Sequence[int] = (),
        padding: bool = True,
        debug: bool = False,
    ) -> None:
        """``sizes``: ascending batch sizes of at most ``max_batch``, none to do without graphs. Nothing is captured
        before :meth:`capture`.

        Raises ``ValueError`` for a larger size: the arena has no rows for it.
        """
        if sizes and sizes[-1] > max_batch:
            raise ValueError(
                f"a graph of {sizes[-1]} requests needs an arena of as many rows, not {max_batch}"
            )
        super().__init__(device, "decode", "requests", sizes, padding)
        self._model = model
        self._kv_pool = kv_pool
        self._req_pool = req_pool
        self._attention = attention
        self._debug = debug
        self._same = comparison(device, SAME_COMPOSITION)
        self._filled: _Filled | None = None
        self._captured: dict[int, _Captured] = {}
        i64, f32 = torch.int64, torch.float32
        self.arena = Arena(
            device,
            "decode",
            max_batch,
            (
                ArenaField("plan_rows", i64, Role.PLAN, pad=SINK),
                ArenaField("plan_seq_lens", i64, Role.PLAN, pad=1),  # as of the first step after the fill
                ArenaField("temperatures", f32, Role.PLAN, pad=1.0),
                ArenaField("noise_scales", f32, Role.PLAN, pad=0.0),
                ArenaField("seed_keys", i64, Role.PLAN, pad=0),
                ArenaField("num_steps", i64, Role.INPUT, pad=0),  # since the fill
                ArenaField("seq_lens", i64, Role.INPUT, pad=1),  # with the token that the step computes
                ArenaField("positions", i64, Role.INPUT, pad=0),
                ArenaField("out_slots", i64, Role.INPUT, pad=SINK),
                ArenaField("input_ids", i64, Role.INPUT, pad=0),
                ArenaField("next_tokens", i64, Role.OUTPUT, pad=0),
            ),
        )
        self._rows = self.arena["plan_rows"]  # [max_batch] int64, each request's row
        self._seq_lens = self.arena.derived("seq_lens", "plan_seq_lens")
        if self.has_graphs:
            self._logits = torch.empty(
                (self._sizes[-1], model.config.vocab_size),
                dtype=model.context.dtype,
                device=device.torch_device,
            )
            device.name_memory(self._logits, "decode.logits", self._logits[0].nbytes)

    def addresses(self) -> Sequence[int]:
        """See ``GraphRunner.addresses``."""
        pool = self._kv_pool
        tensors = (self._req_pool.page_table, self._req_pool.last_tokens, pool.k(0), pool.v(0), self._rows)
        return [tensor.data_ptr() for tensor in tensors]

    # --- a batch -------------------------------------------------------------------------------------

    def arrays(self, batch: DecodeBatch) -> Arrays:
        """What has to be uploaded before :meth:`forward`: nothing if the requests are those of the step before."""
        filled = self._filled
        if filled is not None and self._same(filled.composition, batch.composition):
            if filled.holds(batch):
                return {}
            self._count_repair(batch, filled)
        sampling = sampling_arrays(batch.sampling)
        return sampling | plan_arrays(batch, sampling)

    def forward(self, batch: DecodeBatch, views: Views) -> Logits:
        """Submit the step, as far as a draw that needs the whole sampler. ``views``: what ``arrays`` has told."""
        if "plan_rows" in views:
            self._fill(batch, views)
        filled = self._filled
        assert filled is not None, "the first batch fills the arena"
        size = self.graph_size(filled.num_reqs)
        logits = self._run_eager(batch, filled) if size is None else self._replay(size, batch, filled)
        filled.num_steps += 1
        return logits

    def _fill(self, batch: DecodeBatch, views: Views) -> None:
        num_reqs = len(batch.rows)
        self.arena.fill({name: views[name] for name in _PLAN}, num_reqs)
        self._filled = _Filled(
            composition=batch.composition,
            num_reqs=num_reqs,
            first_seq_lens=batch.seq_lens.copy(),
            sampling=SamplingBatch.from_views(batch.sampling, views),
        )

    def _count_repair(self, batch: DecodeBatch, filled: _Filled) -> None:
        if not self._device.tolerates_repairs:
            raise RepairError(
                f"the arena's lengths are {filled.first_seq_lens + filled.num_steps}, the batch's {batch.seq_lens}"
            )
        if self.has_graphs:
            self.stats.repairs["arena"] = self.stats.repairs.get("arena", 0) + 1

    def _replay(self, size: int, batch: DecodeBatch, filled: _Filled) -> Logits:
        outputs, num_reqs = self.replay(size, batch.seq_lens), filled.num_reqs
        if filled.sampling.is_plain:
            return Logits(tokens=outputs.take("next_tokens", num_reqs))
        positions = outputs.take("seq_lens", num_reqs)
        return Logits(None, self.logits(num_reqs), positions, self._rows[:num_reqs], filled.sampling)

    def _run_eager(self, batch: DecodeBatch, filled: _Filled) -> Logits:
        size = filled.num_reqs
        self._derive_inputs(size)
        rows, seq_lens = self._rows[:size], self._seq_lens[:size]
        inputs = AttentionInputs(
            mode=ForwardMode.DECODE,
            page_table=self._req_pool.page_table,
            rows=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=batch.seq_lens,
            query_lens_cpu=np.ones(size, dtype=np.int64),
        )
        logits = self._forward(size, self._attention.plan(inputs))
        self.arena["num_steps"][:size].add_(1)  # as _draw does
        return Logits(None, logits, seq_lens, rows, filled.sampling)

    # --- the step itself, eager and captured ---------------------------------------------------------

    def _derive_inputs(self, size: int) -> None:
        """Write the INPUT fields of the first ``size`` requests for the step that is to run."""
        arena, pool = self.arena, self._req_pool
        decode_prologue(
            self._rows[:size],
            arena["plan_seq_lens"][:size],
            arena["num_steps"][:size],
            pool.page_table,
            pool.last_tokens,
            self._kv_pool.page_size,
            self._seq_lens[:size],
            arena["positions"][:size],
            arena["out_slots"][:size],
            arena["input_ids"][:size],
        )

    def _forward(
        self, size: int, attn: AttentionPlan, logits_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [size, vocab_size] in the model's dtype, this rank's columns, after ``_derive_inputs(size)``."""
        arena = self.arena
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=arena["input_ids"][:size],
            positions=arena["positions"][:size],
            out_slots=arena["out_slots"][:size],
            logits_index=None,
            attn=attn,
            kv_pool=self._kv_pool,
            logits_out=logits_out,
        )
        return self._model.own_logits(self._model.hidden_states(batch), batch)

    def _draw(self, size: int, logits: torch.Tensor) -> None:
        """Draw the next tokens of requests that need nothing but a temperature, keep them as the rows' last tokens,
        and count the step. Others' tokens are drawn again by the Sampler, from the same logits."""
        arena = self.arena
        sample_tokens(
            logits,
            arena["temperatures"][:size],
            arena["noise_scales"][:size],
            arena["seed_keys"][:size],
            positions=self._seq_lens[:size],
            thresholds=None,
            rows=self._rows[:size],
            last_tokens=self._req_pool.last_tokens,
            next_tokens=arena["next_tokens"][:size],
            steps=arena["num_steps"][:size],
        )

    def _run(self, size: int, plan: AttentionPlan) -> None:
        self._derive_inputs(size)
        plan.prepare()
        logits = self._forward(size, plan, self._logits[:size])
        self._draw(size, logits)

    # --- graphs --------------------------------------------------------------------------------------

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
        """Submit the captured step of ``size`` rows, whose arena is filled; ``seq_lens_cpu`` [n] of its live requests.

        Returns the lease on ``next_tokens``; :meth:`logits` are good as long.
        """
        captured = self._captured[size]
        self._attention.before_replay(size, seq_lens_cpu)
        outputs = self.arena.begin_replay()
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
        return self._attention.plan_graph(
            GraphDecodeInputs(
                page_table=self._req_pool.page_table,
                rows=self._rows[:size],
                seq_lens=self._seq_lens[:size],
                max_seq_len=max_seq_len,
            )
        )

    def _warm_up(self, size: int, plan: AttentionPlan) -> None:
        """Compile and set up what the first call does: the arena is all padding, so only the sink is touched."""
        with self._device.forward.active():
            self._attention.before_replay(size, np.ones(0, dtype=np.int64))
            self._run(size, plan)
            self.arena["num_steps"].zero_()
        self._device.synchronize()

    # --- --debug-cuda-graph ----------------------------------------------------------------------------

    def _compare(self, captured: _Captured) -> None:
        """Run the step without its graph, take its traces back, replay, and compare every field."""
        arena, size = self.arena, captured.size
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
