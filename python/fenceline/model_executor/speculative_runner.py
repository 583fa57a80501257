"""SpeculativeRunner: decode steps that propose tokens with a draft and verify them with the target.

One step is a chain on FORWARD, and nothing in it needs the host:

1. *draft*: the draft proposes ``depth`` tokens for each request, one after the other, from the state that the last step
   has left. A draft model with a layer for each step (NEXTN with several layers) has proposed them already, and without
   a model (NGRAM) they are looked up all at once;
2. *verify*: the target computes the request's last token and the drafted ones in one forward, ``depth + 1`` rows per
   request (of a tree, as many as it has nodes);
3. *draw*: at each of these rows the target draws its own next token, with the noise of that token's position;
4. *accept*: a draft token is accepted if it and all before it are equal to the tokens drawn there. The step yields the
   drawn tokens up to and including the first that differs: 1 to ``depth + 1``. They are the tokens of decoding without
   a draft, whatever the draft proposes;
5. *draft-extend*: the draft follows the accepted tokens; one that reads hidden states computes its rows for them from
   those of the target.

The depth may change from step to step, among a few values (``SpeculativeConfig.shapes``). With depth 0 nothing is
proposed. ``drafts`` has the kinds of drafts, and ``proposals`` chains and trees of drafts.

Lengths advance on the device (``SpeculativeState``). The host learns them one step later; until then it knows only
upper bounds. Rejected tokens leave KV in slots beyond a request's length. Those slots are written again before they are
read, and they are never shared, because only committed tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from msgspec import structs

from fenceline.config.draft_config import StepShape
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import AttentionPlan, AuxHiddenStates, QueryTree, VerifyInputs
from fenceline.layers.kernels.speculative_operands import SINK_LEN, BeginOutputs
from fenceline.layers.recurrent_state import StateRows, StateStep
from fenceline.mem_cache.page_tags import Visited, When
from fenceline.memory_order import (
    Arena,
    ArenaField,
    ArenaOutputs,
    Graph,
    GraphPool,
    Role,
    absorbs_drafts,
    comparison,
    hidden_copy,
    step_table,
)
from fenceline.memory_order.edges import KEPT_HIDDEN, SAME_COMPOSITION, SINK, TOTAL_BUCKETS
from fenceline.model_executor.decode_runner import Arrays, Logits, plan_arrays
from fenceline.model_executor.drafts import I64, DraftParts, SpeculativeState, StepPlans, make_draft
from fenceline.model_executor.graph_runner import GraphRunner
from fenceline.model_executor.parts import Parts
from fenceline.model_executor.proposals import Chain, Tree
from fenceline.model_executor.step import StepBatch
from fenceline.sampling.draw_kernels import sample_tokens
from fenceline.sampling.logprobs import OutputLogprobs
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.speculative.step_kernels import begin_step

Views = Mapping[str, torch.Tensor]

_VERIFY = "verify_"  # prefix of the names of the arrays for the draws at all rows of a step


@dataclass(frozen=True, slots=True)
class _Captured:
    plans: StepPlans
    verify: Graph  # the drafts, the target's logits, and plain draws from them
    accept: Graph  # everything from the drawn tokens on
    whole: Graph | None  # both, where nothing is proposed and nothing computed for a draft: as short as a decode step


class SpeculativeRunner(GraphRunner):
    """Runs speculative decode steps on one device. For some batch sizes and each depth it has two graphs: one up to the
    draws from the target's logits, and one from the drawn tokens on; of steps that propose nothing and have no draft
    model also one of both. Everything is submitted to FORWARD, which must be current in all methods except
    :meth:`arrays`."""

    def __init__(self, parts: Parts) -> None:
        """Of an engine that speculates. Nothing is captured before :meth:`capture`."""
        config, device, model, draft = parts.config.speculative, parts.device, parts.model, parts.draft
        assert config is not None, "the engine speculates"
        sizes, max_batch = parts.config.cuda_graph_bs, parts.config.max_running_requests
        padding = not parts.config.server_args.disable_cuda_graph_padding
        super().__init__(device, "speculative decode", "requests", sizes, padding)
        self.config = config
        self._model = model
        self._rank_sampler = parts.rank_sampler
        self._req_pool = parts.req_pool
        self._page_tags = parts.page_tags
        self._states = parts.states
        self._absorbs_drafts = absorbs_drafts(device)
        self._shapes, largest, topk = config.shapes, parts.largest, config.topk
        self._aux_layers = () if config.draft is None else config.draft.aux_layers
        num_heads = model.context.shard.divide(model.config.num_heads, "attention heads")
        self._attention = parts.attention.decode, num_heads
        self._draft_attention = parts.draft_attention.decode, num_heads if draft is None else draft.num_heads
        self._captured: dict[tuple[int, int], _Captured] = {}  # by size and depth
        self._composition: int | None = None
        self._same = comparison(device, SAME_COMPOSITION)
        self._step_table = step_table(device, self._req_pool.page_table)
        self._num_reqs = 0
        self._sampling: dict[int, SamplingBatch] = {}  # for the present batch, by depth
        self._plans: StepPlans | None = None  # of the latest step
        self._rest: Callable[[], object] | None = None  # what submits the second part of the latest step
        self._outputs: ArenaOutputs | None = None  # of the latest step
        dtype, where, num_rows = model.context.dtype, device.torch_device, max_batch * largest.num_nodes
        num_kept = (1, 0) if draft is None else (draft.max_steps or 1, draft.hidden_size)
        self.state = SpeculativeState(device, self._req_pool.num_rows, *num_kept, dtype)
        self.arena = Arena(device, "speculative", max_batch, _fields(largest, topk))
        counts = torch.arange(max_batch + 1, dtype=torch.int32, device=device.torch_device)
        self._query_starts = {depth: counts * shape.num_nodes for depth, shape in self._shapes.items()}
        draft_lens = self.arena.derived("draft_lens", "lens")
        self._path_lens = self.arena["path_lens"] if topk > 1 else None
        # The target's hidden states of the rows that it verifies: of its last layer, and of ``aux_layers``.
        hidden_size = model.config.hidden_size
        # Nothing if the draft does not read them.
        self._hidden = torch.zeros(num_rows if num_kept[1] else 0, hidden_size, dtype=dtype, device=where)
        self._aux = torch.zeros(num_rows, len(self._aux_layers) * hidden_size, dtype=dtype, device=where)
        path_lens = self.arena["seq_lens"] if self._path_lens is None else self._path_lens
        sees_images = config.draft is not None and config.draft.sees_images
        kept = self.arena, self.state, self._hidden, self._aux, draft_lens, path_lens, sees_images
        self._parts = DraftParts(device, model, draft, parts.kv_pool, parts.req_pool, *kept)
        self.draft = make_draft(self._parts, topk, config.match_window)
        chain = Chain(self.draft, config.simulated_accept_length)
        tree = Tree(self.draft, topk) if topk > 1 else chain
        self._proposals: dict[int, Chain] = {depth: tree if depth else chain for depth in self._shapes}
        num_rows = (sizes[-1] if sizes else 0) * largest.num_nodes
        num_columns = model.lm_head.weight.shape[0]  # this rank's
        self._logits = torch.zeros(num_rows, num_columns, dtype=dtype, device=where)
        for name, tensor in (("hidden", self._hidden), ("aux", self._aux), ("logits", self._logits)):
            if tensor.numel():
                device.name_rows(tensor, f"speculative.target_{name}")

    def addresses(self) -> Sequence[int]:
        pool, state = self._parts.kv_pool, self.state
        tensors = (
            self._req_pool.page_table, self._req_pool.last_tokens, *pool.rows[0].values(), state.lens,
            state.hidden, self._req_pool.position_deltas, self._req_pool.tokens,
            None if self._states is None else self._states.carried,
        )  # fmt: skip
        return [tensor.data_ptr() for tensor in tensors if tensor is not None]

    # --- a batch

    def arrays(self, batch: StepBatch) -> Arrays:
        """The arrays that must be uploaded before :meth:`forward`: nothing if the requests are those of the step before
        and have had a step of this depth already."""
        arrays, is_same = {}, self._holds(batch)
        if not (is_same and batch.depth.depth in self._sampling):
            every_row = sampling_arrays(self._of_every_row(batch))
            arrays = {f"{_VERIFY}{name}": array for name, array in every_row.items()}
        if is_same:
            return arrays
        plan = plan_arrays(batch, sampling_arrays(batch.sampling))
        del plan["plan_seq_lens"]  # lengths are the device's
        assert batch.may_accept is not None, "the engine speculates"
        plan["may_accept"] = batch.may_accept
        return plan | arrays

    def _holds(self, batch: StepBatch) -> bool:
        """Whether the arena is filled with the requests of ``batch``."""
        return self._composition is not None and self._same(self._composition, batch.composition)

    def _of_every_row(self, batch: StepBatch) -> list[ReqSampling]:
        """The sampling parameters for each row that is verified. Only the first row of a request has penalties and
        counts its token, because the drafts of requests with penalties are not accepted."""
        rows, num_further = [], self._shapes[batch.depth.depth].num_nodes - 1
        for req in batch.sampling:
            further = replace(req, params=_without_penalties(req.params))
            rows += [req] + [further] * num_further
        return rows

    def forward(self, batch: StepBatch, views: Views) -> Logits:
        """Submit the first part of the step: draft and verify. ``views`` are the uploaded :meth:`arrays`. The Logits
        that are returned have either the tokens that a graph has drawn already, or the values from which the sampler
        has to draw. The drawn tokens must then be given to :meth:`accept`."""
        if "plan_rows" in views:
            self._fill(batch, views)
        assert self._composition is not None, "the first batch fills the arena"
        depth, num_reqs = batch.depth.depth, self._num_reqs
        sampling = self._sampling.get(depth)
        if sampling is None:
            own = {name.removeprefix(_VERIFY): view for name, view in views.items() if name.startswith(_VERIFY)}
            sampling = self._sampling[depth] = SamplingBatch.from_views(self._of_every_row(batch), own)
        self._device.begin_fill([self._hidden], KEPT_HIDDEN)
        size = self.graph_size(num_reqs)
        captured = None if size is None else self._captured[size, depth]
        if captured is None:
            self._plans = self._make_plans(num_reqs, self._shapes[depth], batch.seq_lens)
            self._rest = partial(self._accept, self._plans)
            values = self._propose_and_verify(self._plans)
        else:
            assert int(batch.seq_lens.max()) <= captured.plans.max_len, "attention was planned for all rows"
            self._device.begin_fill([self._logits], TOTAL_BUCKETS)
            self._plans = captured.plans
            if captured.whole is not None and sampling.is_plain:
                self._rest, self._outputs = None, self.arena.begin_replay()
                captured.whole.replay()
            else:
                self._rest = captured.accept.replay
                captured.verify.replay()
            self.stats.count_replay(captured.plans.size)
            values = self._logits
        num_nodes = self._plans.shape.num_nodes
        if captured is not None and sampling.is_plain:
            drawn = self._parts.rows("drawn", num_reqs, num_nodes).flatten()
            return Logits(tokens=drawn, num_verified=num_nodes)
        # A drawn token is one position after the row that it is drawn from.
        positions = self._parts.rows("positions", num_reqs, num_nodes).flatten() + 1
        return Logits(
            values=values[: num_reqs * num_nodes], positions=positions, sampling=sampling, num_verified=num_nodes
        )

    def accept(self, drawn: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Submit the second part of the step: accept and draft-extend. ``drawn`` [B * num_nodes] int64 are the target's
        own tokens, None if the graph in :meth:`forward` has drawn them. The results are int64 and valid until the next
        step is submitted: ``next_tokens`` [B, depth + 1], ``counts`` [B] (how many of them the step yields), and
        ``num_bad`` [B] (1 if the draft was unusable)."""
        num_reqs, plans = self._num_reqs, self._plans
        assert plans is not None
        if drawn is not None:
            self._parts.rows("drawn", num_reqs, plans.shape.num_nodes).copy_(drawn.view(num_reqs, -1))
        if self._rest is not None:
            self._outputs = self.arena.begin_replay()
            self._rest()
        outputs = self._outputs
        assert outputs is not None
        tokens = self._proposals[plans.shape.depth].tokens(outputs, num_reqs, plans)
        return {"next_tokens": tokens} | {name: outputs.take(name, num_reqs) for name in ("counts", "num_bad")}

    def logprobs_of_tokens(self, logprobs: OutputLogprobs) -> OutputLogprobs:
        """The logprobs of the tokens that :meth:`accept` has returned, taken from ``logprobs`` of all nodes' draws."""
        outputs, plans = self._outputs, self._plans
        assert outputs is not None and plans is not None
        return self._proposals[plans.shape.depth].of_tokens(logprobs, outputs, self._num_reqs, plans)

    def _fill(self, batch: StepBatch, views: Views) -> None:
        plan = ("plan_rows", "may_accept", "temperatures", "noise_scales", "seed_keys")
        self._num_reqs = len(batch.rows)
        self.arena.fill({name: views[name] for name in plan}, self._num_reqs)
        self._sampling.clear()
        self._composition = batch.composition

    # --- graphs

    def capture(self, max_seq_len: int, show_progress: bool) -> None:
        """Capture every size for requests of up to ``max_seq_len`` tokens. Waits for the device."""
        self._capture_sizes(lambda pool, size: self._capture_size(pool, size, max_seq_len), show_progress)

    def _capture_size(self, pool: GraphPool, size: int, max_seq_len: int) -> Sequence[Graph]:
        """Capture the graphs of all depths for one size. The arena holds only padding, so only the sink is accessed."""
        graphs: list[Graph] = []
        for shape in reversed(self._shapes.values()):
            graphs += self._capture_shape(pool, size, shape, max_seq_len)
        return graphs

    def _capture_shape(self, pool: GraphPool, size: int, shape: StepShape, max_seq_len: int) -> Sequence[Graph]:
        device, name = self._device, f"[{size}] of depth {shape.depth}"
        with device.forward.active():  # FORWARD reads what a plan allocates and writes
            plans = self._make_plans(size, shape, np.full(size, max_seq_len + shape.num_slots - 1, np.int64))
            self._verify_and_draw(plans)  # the first call compiles and initialises kernels
            self._accept(plans)
        device.synchronize()
        verify = device.capture(f"verify{name}", pool, lambda: self._verify_and_draw(plans))
        accept = device.capture(f"accept{name}", pool, lambda: self._accept(plans))
        whole = None
        if shape.depth == 0 and self._parts.draft_model is None:

            def step() -> None:
                self._verify_and_draw(plans)
                self._accept(plans)

            whole = device.capture(f"step{name}", pool, step)
        self._captured[size, shape.depth] = _Captured(plans, verify, accept, whole)
        return (verify, accept) if whole is None else (verify, accept, whole)

    def _make_plans(self, size: int, shape: StepShape, max_lens: I64) -> StepPlans:
        """Plan the attention of a step of ``size`` requests. ``max_lens`` [size] int64 are upper bounds of the lengths
        including all rows of the step."""
        proposals = self._proposals[shape.depth]
        of_target = partial(self._plan, size, max_lens, *self._attention)
        of_draft = partial(self._plan, size, max_lens, *self._draft_attention)
        return StepPlans(
            size,
            shape,
            int(max_lens.max()),
            steps=proposals.plan_steps(of_draft, shape.depth),
            verify=of_target(shape.num_nodes, self.arena["seq_lens"], ancestors=proposals.ancestors),
            extend=self.draft.plan_extend(of_draft, shape.depth),
        )

    def _plan(
        self,
        size: int,
        max_lens: I64,
        backend: AttentionBackend,
        num_heads: int,
        num_queries: int,
        seq_lens: torch.Tensor,
        num_nodes: int | None = None,
        ancestors: str | None = None,
    ) -> AttentionPlan:
        above = None if ancestors is None else self._parts.rows(ancestors, size, num_queries)
        plan = backend.plan_verify(
            VerifyInputs(
                page_table=self._req_pool.page_table,
                rows=self.arena["plan_rows"][:size],
                seq_lens=seq_lens[:size],
                max_seq_lens_cpu=max_lens,
                tree=QueryTree(num_queries, num_nodes or num_queries, above),
                num_heads=num_heads,
            )
        )
        assert plan is not None, "a backend without plan_verify is not chosen for speculation"
        return plan

    # --- the step

    def _begin(self, plans: StepPlans) -> None:
        """Compute positions and slots of the rows that will be verified. Of their token ids only the first is known;
        the others are still to be proposed."""
        arena, size, shape = self.arena, plans.size, plans.shape
        outputs = BeginOutputs(
            lens=arena["lens"][:size],
            seq_lens=arena["seq_lens"][:size],
            path_lens=None if self._path_lens is None else self._path_lens[:size],
            positions=self._parts.rows("positions", size, shape.num_nodes),
            out_slots=self._parts.rows("out_slots", size, shape.num_nodes),
            input_ids=self._parts.rows("input_ids", size, shape.num_nodes),
            is_bad=arena["is_bad"][:size],
        )
        begin_step(
            arena["plan_rows"][:size],
            self.state.lens,
            self._step_table(),  # the page table as it is in this step (F5)
            self._req_pool.last_tokens,
            self._parts.kv_pool.page_size,
            shape.depth,
            outputs,
        )
        self._visit_pages(plans, When.BEFORE)

    def _visit_pages(self, plans: StepPlans, when: When) -> None:
        """``--memory-check full``: compare the tags of the pages of the step's requests. The last token has no KV yet
        when a step begins."""
        if self._page_tags is not None:
            rows, lens, seq_lens = (self.arena[name][: plans.size] for name in ("plan_rows", "lens", "seq_lens"))
            slots = self._parts.rows("out_slots", plans.size, plans.shape.num_nodes).flatten()
            self._page_tags.visit(Visited(rows, lens, seq_lens, slots, back=1), when)

    def _verify_and_draw(self, plans: StepPlans) -> None:
        """The first part of a captured step: draft, verify, and draw. The draw applies a temperature only. If a request
        needs more than that, the Sampler draws again from the same logits."""
        logits = self._propose_and_verify(plans, self._logits)
        size, num_nodes = plans.size, plans.shape.num_nodes
        temperatures, scales, keys = self._parts.draw_inputs(size)
        draw = sample_tokens if self._rank_sampler is None else self._rank_sampler.draw
        draw(
            logits,
            temperatures,
            scales,
            keys,
            self._parts.rows("positions", size, num_nodes).flatten(),
            rows=None,
            last_tokens=None,
            next_tokens=self._parts.rows("drawn", size, num_nodes).flatten(),
            rows_each=num_nodes,
            ahead=1,
        )

    def _propose_and_verify(self, plans: StepPlans, logits_out: torch.Tensor | None = None) -> torch.Tensor:
        """Propose the drafts and verify them. Returns the target's logits of all rows [size * num_nodes, this rank's
        columns], which are written to the first rows of ``logits_out`` if that is given."""
        size, num_nodes = plans.size, plans.shape.num_nodes
        self._begin(plans)
        self._proposals[plans.shape.depth].propose(plans)
        num_rows = size * num_nodes
        aux = None
        if self._aux_layers:
            aux = AuxHiddenStates(self._aux_layers, self._aux[:num_rows])
        names = ("input_ids", "positions", "out_slots")
        ids, positions, slots = (self._parts.rows(name, size, num_nodes) for name in names)
        batch = self._parts.batch(ids, positions, slots, plans.verify, aux=aux)
        if self._states is not None:
            batch = replace(batch, states=self._state_step(plans))
        if logits_out is not None:
            batch = replace(batch, logits_out=logits_out[:num_rows])
        x = self._model.hidden_states(batch)
        if len(self._hidden):
            hidden_copy(self._device, self._hidden[:num_rows], x)
        return self._model.own_logits(x, batch)

    def _state_step(self, plans: StepPlans) -> StateStep:
        """The states that the target reads. Its layers absorb full blocks of the steps before alone."""
        pool, size, num_nodes, absorbed = self._states, plans.size, plans.shape.num_nodes, self.state.absorbed
        assert pool is not None, "the model has recurrent layers"
        slots, starts = self.arena["plan_rows"][:size], self.arena["lens"][:size] - 1
        rows = StateRows(
            starts=starts,
            absorbed=absorbed.index_select(0, slots),
            query_starts=self._query_starts[plans.shape.depth][: size + 1],
            query_lens_cpu=np.full(size, num_nodes, np.int64),
            slots=slots,
            grid=pool.grid,
            kept=self._absorbs_drafts,
        )
        absorbed.index_copy_(0, slots, starts // pool.grid * pool.grid)
        return StateStep(rows, pool.layers)

    def _accept(self, plans: StepPlans) -> None:
        """The second part of a step: accept and draft-extend."""
        self._proposals[plans.shape.depth].accept(plans)
        self._visit_pages(plans, When.AFTER)

    def make_aux(self, num_tokens: int) -> AuxHiddenStates | None:
        """Memory for the hidden states of the target's ``aux_layers`` in a prefill step of ``num_tokens`` tokens. None
        if the draft reads only the output of the last layer."""
        if not self._aux_layers:
            return None
        size = len(self._aux_layers) * self._model.config.hidden_size
        return AuxHiddenStates(self._aux_layers, self._aux.new_empty(num_tokens, size))


def _fields(largest: StepShape, topk: int) -> list[ArenaField]:
    i64, f32, width = torch.int64, torch.float32, (largest.num_nodes,)
    fields = [
        ArenaField("plan_rows", i64, Role.PLAN, pad=SINK),
        ArenaField("may_accept", torch.bool, Role.PLAN, pad=False),  # whether drafts may be accepted
        ArenaField("temperatures", f32, Role.PLAN, pad=1.0),
        ArenaField("noise_scales", f32, Role.PLAN, pad=0.0),
        ArenaField("seed_keys", i64, Role.PLAN, pad=0),
        ArenaField("lens", i64, Role.INPUT, pad=SINK_LEN),  # the lengths when the step begins
        # The lengths including all rows of the step, and those for the draft's current forward.
        ArenaField("seq_lens", i64, Role.INPUT, pad=SINK_LEN),
        ArenaField("draft_lens", i64, Role.INPUT, pad=SINK_LEN),
        # For chains: the row that the draft computes next.
        ArenaField("draft_ids", i64, Role.INPUT, pad=0),
        ArenaField("draft_positions", i64, Role.INPUT, pad=0),
        ArenaField("draft_slots", i64, Role.INPUT, pad=SINK),
        # Whether the draft is unusable, see check_draft.
        ArenaField("is_bad", torch.bool, Role.INPUT, pad=False),
        # The rows that the target verifies: the last token and the drafts. In steps that are not the deepest there are
        # fewer per request; then, too, the rows of one request follow directly on those of another, see ``rows_of``.
        ArenaField("input_ids", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("positions", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("out_slots", i64, Role.INPUT, pad=SINK, shape=width),
        # The tokens that the target has drawn there.
        ArenaField("drawn", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("counts", i64, Role.OUTPUT, pad=1),  # the number of tokens that the step yields
        ArenaField("num_bad", i64, Role.OUTPUT, pad=0),  # 1 if the draft was unusable
    ]
    return fields + (Tree.fields(largest.num_nodes, largest.num_tokens, topk) if topk > 1 else [])


def _without_penalties(params: SamplingParams) -> SamplingParams:
    if not params.needs_penalties:
        return params
    return structs.replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
