"""DecodeRunner: decode steps over an arena, captured once for each batch size in a list and replayed.

The arena holds the batch. Its PLAN fields are written when the batch changes. Every step derives its INPUT fields from
them and from the number of steps since then, so that in steady decode the host submits nothing but the step itself.
Padded requests have row 0: they read and write the sink only.

A batch runs in the smallest captured size that holds it; the remaining rows are padded. If no size is large enough, the
step runs without a graph. Before each replay the host makes checks that take a few microseconds: that the graph may be
replayed, that its memory has not moved, and that the arena holds this batch at this step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fenceline.layers.forward_batch import AttentionInputs, AttentionPlan, ForwardBatch, ForwardMode, GraphDecodeInputs
from fenceline.layers.recurrent_state import StateRows, StateStep
from fenceline.mem_cache.page_tags import Visited, When
from fenceline.memory_order import Arena, ArenaField, ArenaOutputs, Graph, GraphPool, Role, comparison
from fenceline.memory_order.edges import SAME_COMPOSITION, SINK, TOTAL_BUCKETS
from fenceline.memory_order.kernel import declared
from fenceline.model_executor.drafts import Extended
from fenceline.model_executor.graph_runner import GraphMismatch, GraphRunner
from fenceline.model_executor.parts import Parts
from fenceline.model_executor.step import StepBatch
from fenceline.sampling.draw_kernels import sample_tokens
from fenceline.sampling.logprobs import OutputLogprobs
from fenceline.sampling.sampling_batch import SamplingBatch, sampling_arrays

Arrays = dict[str, npt.NDArray[np.generic]]
Views = Mapping[str, torch.Tensor]
I64 = npt.NDArray[np.int64]
_PLAN = ("plan_rows", "plan_seq_lens", "temperatures", "noise_scales", "seed_keys")

logger = logging.getLogger(__name__)


class RepairError(AssertionError):
    """The arena did not hold the batch to be run. Raised only if the device tolerates no repairs, as in tests;
    otherwise the arena is filled again and the repair counted."""


@dataclass(frozen=True, slots=True)
class MaskedDraw:
    """The captured draw from a replay's logits under the masks in the first ``num_rows`` rows of the ``MaskTable``."""

    graph: Graph
    outputs: ArenaOutputs
    num_reqs: int
    num_rows: int

    def replay(self) -> torch.Tensor:
        """Submit it. Returns the tokens [num_reqs], valid until the next step is submitted."""
        self.graph.replay()
        return self.outputs.take("next_tokens", self.num_reqs)


@dataclass(frozen=True, slots=True)
class Logits:
    """The results of a step's first phase, the forward, from which the second phase samples the next tokens of S
    requests. Valid until the next step is submitted.

    ``tokens`` [S] int64 is given if the forward has drawn them itself, as a replay does if all requests need at most a
    temperature. ``under_masks`` is given if the second phase is a replay too: if they need at most that and masks.
    Otherwise ``values`` [S, vocab_size] in the model's dtype (with several ranks, only this rank's columns),
    ``positions`` and ``rows`` [S] int64, and the requests' ``sampling`` are given. ``prompt_logprobs``: of the prompt
    tokens that are scored; they do not depend on the tokens that are drawn. ``num_verified``: of a speculative decode
    step, its rows for each request; what is drawn then goes to ``SpeculativeRunner.accept``. ``extended``: of a prefill
    step with a draft. ``embeddings``: see ``StepOutput``.
    """

    tokens: torch.Tensor | None = None
    values: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    sampling: SamplingBatch | None = None
    under_masks: MaskedDraw | None = None
    prompt_logprobs: OutputLogprobs | None = None
    num_verified: int = 0
    extended: Extended | None = None
    embeddings: torch.Tensor | None = None


def plan_arrays(batch: StepBatch, sampling: Mapping[str, npt.NDArray[np.generic]]) -> Arrays:
    """The values [B] of the PLAN fields for ``batch``. ``sampling``: its ``sampling_arrays``; if empty, greedy."""
    num = len(batch.rows)
    return {
        "plan_rows": batch.rows,
        "plan_seq_lens": batch.seq_lens,
        "temperatures": sampling.get("temperatures", np.ones(num, np.float32)),
        "noise_scales": sampling.get(
            "noise_scales", np.ones(num, np.float32) if "seed_keys" in sampling else np.zeros(num, np.float32)
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

    def holds(self, batch: StepBatch) -> bool:
        """Whether the lengths on the device, which each step has advanced by one, equal the batch's."""
        lens = self.first_seq_lens + self.num_steps
        return len(lens) == len(batch.seq_lens) and bool((lens == batch.seq_lens).all())


@dataclass(frozen=True, slots=True)
class _Captured:
    size: int
    plan: AttentionPlan
    graph: Graph
    masked_draw: Graph | None  # None if grammars are refused, or ranks draw together


class DecodeRunner(GraphRunner):
    """One device's decode steps for up to ``max_batch`` requests, and the graphs of some batch sizes. It owns the
    memory pool of its graphs and the arena with their static inputs and outputs. All work goes to FORWARD, which must
    be current in every method except :meth:`arrays`."""

    def __init__(self, parts: Parts) -> None:
        """Captures the sizes of ``--cuda-graph-bs``, but nothing before :meth:`capture`. If there are masks and one
        rank, a second graph of each size draws under them. Raises ``ValueError`` for a size above the number of
        requests, since the arena has no rows for it."""
        config, device, model = parts.config, parts.device, parts.model
        sizes, max_batch = config.cuda_graph_bs, config.max_running_requests
        if sizes and sizes[-1] > max_batch:
            raise ValueError(f"a graph of {sizes[-1]} requests needs an arena of as many rows, not {max_batch}")
        padding = not config.server_args.disable_cuda_graph_padding
        super().__init__(device, "decode", "requests", sizes, padding)
        self._model = model
        self._kv_pool = parts.kv_pool
        self._req_pool = parts.req_pool
        self._attention = parts.attention.decode
        self._debug = config.server_args.debug_cuda_graph
        self._rank_sampler = parts.rank_sampler
        self._page_tags = parts.page_tags
        self._states = parts.states
        masks = parts.masks if parts.rank_sampler is None else None
        self._masks = None if masks is None else masks.table
        self._same = comparison(device, SAME_COMPOSITION)
        self._filled: _Filled | None = None
        self._captured: dict[int, _Captured] = {}
        self.is_new = False  # whether the model's kernels are, to this machine
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
        # The arena's fields, [max_batch] each. They are looked up once, since every step uses them and they never move.
        self._rows = self.arena["plan_rows"]
        self._plan_seq_lens = self.arena["plan_seq_lens"]
        self._num_steps = self.arena["num_steps"]
        self._positions = self.arena["positions"]
        self._out_slots = self.arena["out_slots"]
        self._input_ids = self.arena["input_ids"]
        self._seq_lens = self.arena.derived("seq_lens", "plan_seq_lens")
        if self._states is not None:  # each request has one token
            self._query_starts = torch.arange(max_batch + 1, dtype=torch.int32, device=device.torch_device)
        if self.has_graphs:
            self._logits = torch.empty(
                (self._sizes[-1], model.lm_head.weight.shape[0]),  # this rank's columns
                dtype=model.context.dtype,
                device=device.torch_device,
            )
            device.name_rows(self._logits, "decode.logits")

    def addresses(self) -> Sequence[int]:
        pool = self._kv_pool
        tensors = (self._req_pool.page_table, self._req_pool.last_tokens, *pool.rows[0].values(), self._rows)
        states = None if self._states is None else self._states.carried
        others = (self._masks, self._req_pool.position_deltas, states)
        return [tensor.data_ptr() for tensor in (*tensors, *others) if tensor is not None]

    # --- a batch -------------------------------------------------------------------------------------

    def arrays(self, batch: StepBatch) -> Arrays:
        """The arrays to upload before :meth:`forward`; none if the requests are those of the previous step."""
        filled = self._filled
        if filled is not None and self._same(filled.composition, batch.composition):
            if filled.holds(batch):
                return {}
            self._count_repair(batch, filled)
        sampling = sampling_arrays(batch.sampling)
        return sampling | plan_arrays(batch, sampling)

    def forward(self, batch: StepBatch, views: Views) -> Logits:
        """Submit the step. If the draw needs the full sampler, it is left to the second phase. ``views``: the uploaded
        arrays of :meth:`arrays`."""
        if "plan_rows" in views:
            self._fill(batch, views)
        filled = self._filled
        assert filled is not None, "the first batch fills the arena"
        size = self.graph_size(filled.num_reqs)
        logits = self._run_eager(batch, filled) if size is None else self._replay(size, batch, filled)
        filled.num_steps += 1
        return logits

    def _fill(self, batch: StepBatch, views: Views) -> None:
        num_reqs = len(batch.rows)
        self.arena.fill({name: views[name] for name in _PLAN}, num_reqs)
        self._filled = _Filled(
            composition=batch.composition,
            num_reqs=num_reqs,
            first_seq_lens=batch.seq_lens.copy(),
            sampling=SamplingBatch.from_views(batch.sampling, views),
        )

    def _count_repair(self, batch: StepBatch, filled: _Filled) -> None:
        if not self._device.tolerates_repairs:
            raise RepairError(
                f"the arena's lengths are {filled.first_seq_lens + filled.num_steps}, the batch's {batch.seq_lens}"
            )
        if self.has_graphs:
            self.stats.repairs["arena"] = self.stats.repairs.get("arena", 0) + 1

    def _replay(self, size: int, batch: StepBatch, filled: _Filled) -> Logits:
        outputs, num_reqs = self.replay(size, batch.seq_lens), filled.num_reqs
        if filled.sampling.is_plain:
            return Logits(tokens=outputs.take("next_tokens", num_reqs))
        draw = self._captured[size].masked_draw
        if draw is not None and filled.sampling.constrained and filled.sampling.is_plain_under_masks:
            return Logits(under_masks=MaskedDraw(draw, outputs, num_reqs, size))
        positions = outputs.take("seq_lens", num_reqs)
        return Logits(None, self.logits(num_reqs), positions, self._rows[:num_reqs], filled.sampling)

    def _run_eager(self, batch: StepBatch, filled: _Filled) -> Logits:
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
        self._num_steps[:size].add_(1)  # as _draw does
        return Logits(None, logits, seq_lens, rows, filled.sampling)

    # --- the step itself, eager and captured ---------------------------------------------------------

    def _derive_inputs(self, size: int) -> None:
        """Write the INPUT fields of the first ``size`` requests for the step that is to run."""
        pool = self._req_pool
        decode_prologue(
            self._rows[:size],
            self._plan_seq_lens[:size],
            self._num_steps[:size],
            pool.page_table,
            pool.last_tokens,
            self._kv_pool.page_size,
            self._seq_lens[:size],
            self._positions[:size],
            self._out_slots[:size],
            self._input_ids[:size],
        )
        self._visit_pages(size, When.BEFORE)

    def _visit_pages(self, size: int, when: When) -> None:
        """``--memory-check full``: compare the tags of the pages of the first ``size`` requests."""
        if self._page_tags is not None:
            rows, starts = self._rows[:size], self._positions[:size]
            self._page_tags.visit(Visited(rows, starts, self._seq_lens[:size], self._out_slots[:size]), when)

    def _forward(self, size: int, attn: AttentionPlan, logits_out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [size, vocab_size] in the model's dtype, this rank's columns, after ``_derive_inputs(size)``."""
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=self._input_ids[:size],
            positions=(self._req_pool.positions(self._positions[:size], self._rows),),
            out_slots=self._out_slots[:size],
            logits_index=None,
            attn=attn,
            kv_pool=self._kv_pool,
            logits_out=logits_out,
            states=self._state_step(size),
        )
        logits = self._model.own_logits(self._model.hidden_states(batch), batch)
        self._visit_pages(size, When.AFTER)
        return logits

    def _state_step(self, size: int) -> StateStep | None:
        pool = self._states
        if pool is None:
            return None
        starts = self._positions[:size]
        rows = StateRows(
            starts=starts,
            absorbed=starts // pool.grid * pool.grid,
            query_starts=self._query_starts[: size + 1],
            query_lens_cpu=np.ones(size, np.int64),
            slots=self._rows[:size],
            grid=pool.grid,
        )
        return StateStep(rows, pool.layers)

    def _draw(self, size: int, logits: torch.Tensor) -> None:
        """Draw next tokens, considering temperatures only, store them as the rows' last tokens, and count the step.
        If some request needs more than a temperature, the Sampler draws again from the same logits."""
        arena = self.arena
        drawn = (arena["temperatures"][:size], arena["noise_scales"][:size], arena["seed_keys"][:size])
        draw = sample_tokens if self._rank_sampler is None else self._rank_sampler.draw
        draw(
            logits,
            *drawn,
            positions=self._seq_lens[:size],
            rows=self._rows[:size],
            last_tokens=self._req_pool.last_tokens,
            next_tokens=arena["next_tokens"][:size],
            steps=arena["num_steps"][:size],
        )

    def _draw_under_masks(self, size: int) -> None:
        """Draw the latest step's tokens again, those that masks allow."""
        arena, masks = self.arena, self._masks
        assert masks is not None, "steps under masks are replays where there are masks"
        sample_tokens(
            self._logits[:size],
            arena["temperatures"][:size],
            arena["noise_scales"][:size],
            arena["seed_keys"][:size],
            positions=self._seq_lens[:size],
            rows=self._rows[:size],
            last_tokens=self._req_pool.last_tokens,
            next_tokens=arena["next_tokens"][:size],
            masks=masks[:size],
        )

    def _run(self, size: int, plan: AttentionPlan) -> None:
        self._derive_inputs(size)
        plan.prepare()
        logits = self._forward(size, plan, self._logits[:size])
        self._draw(size, logits)

    # --- graphs --------------------------------------------------------------------------------------

    def capture(self, max_seq_len: int, show_progress: bool) -> None:
        """Capture every size for requests of up to ``max_seq_len`` tokens. Waits for the device."""
        with self._device.forward.active():  # what a plan allocates and writes, FORWARD then reads
            plans = {size: self._plan(size, max_seq_len) for size in reversed(self._sizes)}
        self._compile_ahead({size: plan for size, plan in plans.items() if plan is not None})
        self._capture_sizes(lambda pool, size: self._capture_size(pool, size, plans[size], max_seq_len), show_progress)

    def _compile_ahead(self, plans: Mapping[int, AttentionPlan]) -> None:
        """Compile what the largest size launches and then, if that was new to rank 0, all others."""

        def walk(sizes: Sequence[int]) -> None:
            for size in sizes:
                self._warm_up(size, plans[size])

        sizes, shard = list(plans), self._model.context.shard
        is_new = self._device.compile_ahead(lambda: walk(sizes[:1]))
        with self._device.forward.active():
            self.is_new = shard.of_first(b"new" if is_new else b"known") == b"new"
        if self.is_new:
            self._device.compile_ahead(lambda: walk(sizes[1:]))

    def _capture_size(
        self, pool: GraphPool, size: int, plan: AttentionPlan | None, max_seq_len: int
    ) -> Sequence[Graph]:
        if plan is None:
            logger.warning(
                "--cuda-graph-bs %d is left out: too much attention for a graph on this device, %d requests of up"
                " to %d tokens; a smaller --context-length makes it fit",
                *(size, size, max_seq_len),
            )
            return ()
        self._warm_up(size, plan)
        graph = self._device.capture(f"decode[{size}]", pool, lambda: self._run(size, plan))
        if self._masks is None:
            self._captured[size] = _Captured(size, plan, graph, None)
            return (graph,)
        draw = self._device.capture(f"decode[{size}].masked", pool, lambda: self._draw_under_masks(size))
        self._captured[size] = _Captured(size, plan, graph, draw)
        return graph, draw

    def replay(self, size: int, seq_lens_cpu: I64) -> ArenaOutputs:
        """Submit the captured step of ``size`` rows, whose arena is filled; ``seq_lens_cpu`` [n] of its live requests.
        Returns the lease on ``next_tokens``; :meth:`logits` is valid as long as the lease."""
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
        """The latest replay's logits [num_reqs, vocab_size] in the model's dtype; of several ranks, this one's."""
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
        """Run the step once, so that kernels are compiled and libraries set up before the capture. The arena holds only
        padding, for which ``plan`` was made, so only the sink is touched."""
        with self._device.forward.active():
            self._run(size, plan)
            if self._masks is not None:
                self._draw_under_masks(size)
            self.arena["num_steps"].zero_()
        self._device.synchronize()

    # --- --debug-cuda-graph ----------------------------------------------------------------------------

    def _compare(self, captured: _Captured) -> None:
        """Run the step without its graph, undo its effects, replay the graph, and compare every field."""
        arena, size = self.arena, captured.size
        fields = [name for name in arena.fields if not name.startswith("plan_")]
        counted = [] if self._page_tags is None else [self._page_tags.clock]
        states = () if self._states is None else self._states.of_rows
        changed = [self._req_pool.last_tokens, arena["num_steps"], *counted, *states]
        before = [tensor.clone() for tensor in changed]
        self._run(size, captured.plan)
        eager = {name: arena[name][:size].clone() for name in fields}
        eager["logits"] = self._logits[:size].clone()
        for tensor, values in zip(changed, before, strict=True):
            tensor.copy_(values)
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


# --- the kernel that derives a step's inputs


def decode_prologue(
    rows: torch.Tensor,
    plan_seq_lens: torch.Tensor,
    num_steps: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    page_size: int,
    out_seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slots: torch.Tensor,
    out_input_ids: torch.Tensor,
) -> None:
    """Write the inputs of a decode step of B requests. A request in row 0, the sink, is padding.

    ``rows``, ``plan_seq_lens``, ``num_steps`` [B] int64: the request rows, their lengths in the first step of the plan
    including that step's token, and the number of steps since then. ``page_table`` [R, max_pages] int32,
    ``last_tokens`` [R] int64. All outputs are [B] int64: the length (plan + steps; 1 for padding), the position
    (length - 1), the KV slot of that position, and the row's last token. ``out_seq_lens`` may be ``plan_seq_lens``
    itself. It is not checked that positions are inside the page table.

    One launch on the current stream, without host synchronisation. It may be captured.
    """
    outputs = (out_seq_lens, out_positions, out_slots, out_input_ids)
    assert all(t.shape == rows.shape for t in (plan_seq_lens, num_steps, *outputs))
    assert page_table.dtype == torch.int32 and page_table.stride(1) == 1
    if rows.is_cuda:
        from fenceline.layers.kernels.triton.decode_prologue import launch

        launch((rows, plan_seq_lens, num_steps), (page_table, last_tokens), page_size, outputs)
        return
    operands = (rows, plan_seq_lens, num_steps, page_table, last_tokens, page_size, *outputs)
    DECODE_PROLOGUE.run(*operands)


def _derive(
    rows: torch.Tensor,
    plan_seq_lens: torch.Tensor,
    num_steps: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    page_size: int,
    out_seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slots: torch.Tensor,
    out_input_ids: torch.Tensor,
) -> None:
    out_seq_lens.copy_(torch.where(rows == 0, 1, plan_seq_lens + num_steps))
    out_positions.copy_(out_seq_lens - 1)
    pages = page_table[rows, out_positions // page_size].long()
    out_slots.copy_(pages * page_size + out_positions % page_size)
    out_input_ids.copy_(last_tokens[rows])


DECODE_PROLOGUE = declared(
    "decode_prologue",
    _derive,
    "plan_seq_lens num_steps page_table[rows] last_tokens[rows] -> out_seq_lens out_positions out_slots out_input_ids",
)
