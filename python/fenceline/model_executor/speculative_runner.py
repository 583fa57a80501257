"""SpeculativeRunner: decode steps that propose tokens with a draft model and verify them with the target.

One step is a chain on FORWARD, and nothing in it needs the host:

1. *draft*: the draft proposes ``depth`` tokens for each request, one after the other, from the state that the last step
   has left. A draft model with a layer for each step (NEXTN with several layers) has proposed them already;
2. *verify*: the target computes the request's last token and the drafted ones in one forward, ``depth + 1`` rows per
   request (of a tree, as many as it has nodes);
3. *draw*: at each of these rows the target draws its own next token, with the noise of that token's position;
4. *accept*: a draft token is accepted if it and all before it are equal to the tokens drawn there. The step yields the
   drawn tokens up to and including the first that differs: 1 to ``depth + 1``. They are the tokens of decoding without
   a draft, whatever the draft proposes;
5. *draft-extend*: the draft computes its rows for the accepted tokens from the target's hidden states. In a draft with
   a layer for each step, layer k computes row i from token i + 1 + k. So its last k rows are computed from tokens that
   are only proposed. They are computed again when the tokens are known, and no page with such rows is shared
   (``DraftConfig.lookahead``).

The depth may change from step to step, among a few values (``SpeculativeConfig.shapes``). With depth 0 nothing is
proposed. The draft then still computes its row of the last token, so that it can go on from there later.

Drafts are chains, or trees if ``topk`` is above 1 (``speculative/tree.py``). The nodes of a tree have consecutive
slots, beginning with that of the last token, and so do, in the draft's own layers, the rows that it computes while it
proposes. The rows of an accepted path are moved to their tokens' slots in the step that accepts them.

Lengths advance on the device (``SpeculativeState``). The host learns them one step later; until then it knows only
upper bounds. Rejected tokens leave KV in slots beyond a request's length. Those slots are written again before they are
read, and they are never shared, because only committed tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from fenceline.config.draft_config import StepShape
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import (
    AttentionPlan,
    AuxHiddenStates,
    ForwardBatch,
    ForwardMode,
    QueryTree,
    VerifyInputs,
)
from fenceline.layers.kernels.speculative_operands import (
    SINK_LEN,
    AcceptOutputs,
    BeginOutputs,
    NextRow,
    Pieces,
)
from fenceline.memory_order import (
    Arena,
    ArenaField,
    ArenaOutputs,
    Device,
    Graph,
    GraphPool,
    Role,
    comparison,
    keep_hidden,
    moves_of_nodes,
    table_of_step,
)
from fenceline.memory_order.edges import KEPT_HIDDEN, SAME_COMPOSITION, SINK, TOTAL_BUCKETS
from fenceline.model_executor.decode_runner import Extended, Logits, plan_arrays
from fenceline.model_executor.graph_runner import GraphRunner
from fenceline.model_executor.parts import Parts
from fenceline.model_executor.step import StepBatch
from fenceline.sampling.draw_kernels import sample_tokens
from fenceline.sampling.logprobs import OutputLogprobs, select_logprobs
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.speculative.accept import accept
from fenceline.speculative.draws import best_drafts, draw_draft, drawn_tokens
from fenceline.speculative.kv_rows import KVMover, node_slots
from fenceline.speculative.refuse import check_draft
from fenceline.speculative.step_kernels import (
    accept_chain,
    begin_step,
    keep_draft,
    keep_last_hidden,
    keep_proposal,
    place_rows,
)
from fenceline.speculative.tree import (
    Candidates,
    DraftTree,
    build_tree,
    first_candidates,
    more_candidates,
)

Arrays = dict[str, npt.NDArray[np.generic]]
Views = Mapping[str, torch.Tensor]
Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # see KVMover.move

_VERIFY = "verify_"  # prefix of the names of the arrays for the draws at all rows of a step


class SpeculativeState:
    """The state of each request that the device keeps between two steps, by row. Row 0 is the sink, the row of padding.

    ``lens`` [num_rows] int64: the number of tokens of the request, the last of which has no KV yet. The other tensors
    depend on the kind of draft:

    * A draft that reads hidden states: ``hidden`` [num_rows, 1, hidden_size] is the hidden state that it goes on from.
    * One with n layers for as many steps: ``drafts`` [num_rows, n] int64 are all its proposals, and ``hidden``
      [num_rows, n - 1, hidden_size] at k is the hidden state of layer k at row ``lens - 2 - k``, the last row that is
      computed from known tokens. Layer k + 1 goes on from there.
    * One that reads no hidden states: ``previous`` [num_rows] int64 is the token before the last one, and ``is_behind``
      [num_rows] bool says whether the draft has not computed that token yet.

    Everything is written on FORWARD only, in program order with the steps that read it.
    """

    def __init__(
        self, device: Device, num_rows: int, num_layers: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        where, num_hidden = device.torch_device, max(num_layers - 1, 1)
        self.lens = torch.full((num_rows,), SINK_LEN, dtype=torch.int64, device=where)
        self.drafts = torch.zeros(num_rows, num_layers, dtype=torch.int64, device=where)
        self.previous = torch.zeros(num_rows, dtype=torch.int64, device=where)
        self.is_behind = torch.zeros(num_rows, dtype=torch.bool, device=where)
        self.hidden = torch.zeros(num_rows, num_hidden, hidden_size, dtype=dtype, device=where)
        for name in ("lens", "drafts", "previous", "is_behind", "hidden"):
            device.name_rows(getattr(self, name), f"draft_state.{name}")


@dataclass(frozen=True, slots=True)
class _Plans:
    """The attention plans of a step of ``size`` requests."""

    size: int
    shape: StepShape
    max_len: int  # no request may be longer, all rows of the step included
    is_tree: bool
    verify: AttentionPlan  # of the target, for all rows that are verified
    extend: Sequence[AttentionPlan]  # of the draft's layer k in draft-extend: depth + 1 + k rows per request
    # Of the draft while it proposes: one row per request. For trees: topk rows per request, from the second step on.
    steps: Sequence[AttentionPlan]
    two: (
        AttentionPlan | None
    )  # of a draft that reads no hidden states, for the last two tokens of each request


@dataclass(frozen=True, slots=True)
class _Captured:
    plans: _Plans
    verify: Graph  # the drafts, the target's logits, and plain draws from them
    accept: Graph  # everything from the drawn tokens on


class SpeculativeRunner(GraphRunner):
    """Runs speculative decode steps on one device. For some batch sizes and each depth
    it has two graphs: one up to the draws from the target's logits, and one from the drawn tokens on. Everything is
    submitted to FORWARD, which must be current in all methods except :meth:`arrays` and :meth:`extend_arrays`."""

    def __init__(self, parts: Parts) -> None:
        """Of an engine that speculates. Nothing is captured before :meth:`capture`."""
        config, device, model, draft = parts.config.speculative, parts.device, parts.model, parts.draft
        assert config is not None and draft is not None, "the engine speculates"
        sizes, max_batch = parts.config.cuda_graph_bs, parts.config.max_running_requests
        padding = not parts.config.server_args.disable_cuda_graph_padding
        super().__init__(device, "speculative decode", "requests", sizes, padding)
        self.config = config
        self.reads_hidden = draft.hidden_size > 0
        self._model = model
        self._num_heads = model.context.shard.divide(model.config.num_heads, "attention heads")
        self._rank_sampler = parts.rank_sampler
        self._draft = draft
        self._kv_pool = kv_pool = parts.kv_pool
        self._req_pool = req_pool = parts.req_pool
        self._attention = parts.attention.decode
        self._draft_attention = parts.draft_attention.decode
        self._shapes, largest = config.shapes, config.largest
        self._topk = topk = config.topk
        self._aux_layers = aux_layers = config.draft.aux_layers
        self._simulated_accept_length = config.simulated_accept_length
        self._captured: dict[tuple[int, int], _Captured] = {}  # by size and depth
        self._composition: int | None = None
        self._same = comparison(device, SAME_COMPOSITION)
        self._table_of_step = table_of_step(device, req_pool.page_table)
        self._num_reqs = 0
        self._sampling: dict[int, SamplingBatch] = {}  # for the present batch, by depth
        self._plans: _Plans | None = None  # of the latest step
        self._replayed: _Captured | None = None  # the graphs of the latest step, if it runs with graphs
        self._outputs: ArenaOutputs | None = None  # of the latest step
        dtype = model.context.dtype
        self._num_layers = draft.max_steps or 1  # layers that each run one step of the draft, or 1
        self.state = SpeculativeState(device, req_pool.num_rows, self._num_layers, draft.hidden_size, dtype)
        width = (largest.num_nodes,)
        i64, f32 = torch.int64, torch.float32
        fields = [
            ArenaField("plan_rows", i64, Role.PLAN, pad=SINK),
            ArenaField("may_accept", torch.bool, Role.PLAN, pad=False),  # whether drafts may be accepted
            ArenaField("temperatures", f32, Role.PLAN, pad=1.0),
            ArenaField("noise_scales", f32, Role.PLAN, pad=0.0),
            ArenaField("seed_keys", i64, Role.PLAN, pad=0),
            ArenaField("lens", i64, Role.INPUT, pad=SINK_LEN),  # the lengths when the step begins
            ArenaField(
                "seq_lens", i64, Role.INPUT, pad=SINK_LEN
            ),  # the lengths including all rows of the step
            ArenaField(
                "draft_lens", i64, Role.INPUT, pad=SINK_LEN
            ),  # the lengths for the draft's current forward
            # For chains: the row that the draft computes next.
            ArenaField("draft_ids", i64, Role.INPUT, pad=0),
            ArenaField("draft_positions", i64, Role.INPUT, pad=0),
            ArenaField("draft_slots", i64, Role.INPUT, pad=SINK),
            ArenaField(
                "is_bad", torch.bool, Role.INPUT, pad=False
            ),  # whether the draft is unusable, see check_draft
            # The rows that the target verifies: the last token and the drafts. In steps that are not the deepest there
            # are fewer per request; then, too, the rows of one request follow directly on those of another, see _rows.
            ArenaField("input_ids", i64, Role.INPUT, pad=0, shape=width),
            ArenaField("positions", i64, Role.INPUT, pad=0, shape=width),
            ArenaField("out_slots", i64, Role.INPUT, pad=SINK, shape=width),
            ArenaField(
                "drawn", i64, Role.INPUT, pad=0, shape=width
            ),  # the tokens that the target has drawn there
            ArenaField("counts", i64, Role.OUTPUT, pad=1),  # the number of tokens that the step yields
            ArenaField("num_bad", i64, Role.OUTPUT, pad=0),  # 1 if the draft was unusable
        ]
        if topk > 1:
            fields += _tree_fields(largest, topk)
        self.arena = Arena(device, "speculative", max_batch, fields)
        # The lengths for the draft's current forward, which all its attention plans read. They have memory of their
        # own, so that ``lens``, from which they are derived, is not overwritten (F9).
        self._draft_lens = self.arena.derived("draft_lens", "lens")
        self._move_target: Move | None = None  # for trees: moves the target's KV rows
        self._move_rows: Move | None = (
            None  # for trees of a draft that reads no hidden states: moves the draft's
        )
        if topk > 1:
            tensors = [tensor for _, tensor in kv_pool.tensors()]
            num_target_parts = len(kv_pool.layout.parts_of(range(model.num_layers)))
            self._move_target = moves_of_nodes(device, KVMover(tensors[:num_target_parts]).move)
            if not self.reads_hidden:
                self._move_rows = moves_of_nodes(device, KVMover(tensors[num_target_parts:]).move)
        self._zeros = torch.zeros(max_batch, 1, device=device.torch_device)
        # The target's hidden states of the rows that it verifies: of its last layer, and of ``aux_layers``.
        num_rows, where, hidden_size = (
            max_batch * largest.num_nodes,
            device.torch_device,
            model.config.hidden_size,
        )
        self._hidden = torch.zeros(num_rows, hidden_size, dtype=dtype, device=where)
        self._aux = torch.zeros(num_rows, len(aux_layers) * hidden_size, dtype=dtype, device=where)
        num_rows = (sizes[-1] if sizes else 0) * largest.num_nodes
        num_columns = model.lm_head.weight.shape[0]  # this rank's
        self._logits = torch.zeros(num_rows, num_columns, dtype=dtype, device=where)
        for name, tensor in (("hidden", self._hidden), ("aux", self._aux), ("logits", self._logits)):
            if tensor.numel():
                device.name_rows(tensor, f"speculative.target_{name}")

    def addresses(self) -> Sequence[int]:
        """See ``GraphRunner.addresses``."""
        pool, state = self._kv_pool, self.state
        tensors = (
            self._req_pool.page_table, self._req_pool.last_tokens, *pool.rows[0].values(), state.lens,
            state.hidden,
        )  # fmt: skip
        return [tensor.data_ptr() for tensor in tensors]

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
        """Submit the first part of the step: draft and verify. ``views`` are the uploaded :meth:`arrays`.

        The Logits that are returned have either the tokens that a graph has drawn already, or the values from which
        the sampler has to draw. The drawn tokens must then be given to :meth:`accept`."""
        if "plan_rows" in views:
            self._fill(batch, views)
        assert self._composition is not None, "the first batch fills the arena"
        depth, num_reqs = batch.depth.depth, self._num_reqs
        sampling = self._sampling.get(depth)
        if sampling is None:
            own = {
                name.removeprefix(_VERIFY): view for name, view in views.items() if name.startswith(_VERIFY)
            }
            sampling = self._sampling[depth] = SamplingBatch.from_views(self._of_every_row(batch), own)
        self._device.begin_fill([self._hidden], KEPT_HIDDEN)
        size = self.graph_size(num_reqs)
        captured = None if size is None else self._captured[size, depth]
        if captured is None:
            self._plans = self._make_plans(num_reqs, self._shapes[depth], batch.seq_lens)
            values = self._propose_and_verify(self._plans)
        else:
            assert int(batch.seq_lens.max()) <= captured.plans.max_len, "attention was planned for all rows"
            self._device.begin_fill([self._logits], TOTAL_BUCKETS)
            self._plans = captured.plans
            captured.verify.replay()
            self.stats.count_replay(captured.plans.size)
            values = self._logits
        self._replayed = captured
        num_nodes = self._plans.shape.num_nodes
        if captured is not None and sampling.is_plain:
            drawn = self._rows("drawn", num_reqs, num_nodes).flatten()
            return Logits(tokens=drawn, num_verified=num_nodes)
        # A drawn token is one position after the row that it is drawn from.
        positions = self._rows("positions", num_reqs, num_nodes).flatten() + 1
        return Logits(
            values=values[: num_reqs * num_nodes],
            positions=positions,
            sampling=sampling,
            num_verified=num_nodes,
        )

    def accept(self, drawn: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Submit the second part of the step: accept and draft-extend.

        ``drawn`` [B * num_nodes] int64 are the target's own tokens, None if the graph in :meth:`forward` has drawn
        them. The results are int64 and valid until the next step is submitted: ``next_tokens`` [B, depth + 1],
        ``counts`` [B] (how many of them the step yields), and ``num_bad`` [B] (1 if the draft was unusable)."""
        num_reqs, plans = self._num_reqs, self._plans
        assert plans is not None
        tokens = self._rows("drawn", num_reqs, plans.shape.num_nodes)
        if drawn is not None:
            tokens.copy_(drawn.view(num_reqs, -1))
        outputs = self._outputs = self.arena.begin_replay()
        if self._replayed is None:
            self._accept(plans)
        else:
            self._replayed.accept.replay()
        if plans.is_tree:
            tokens = _rows_of(outputs.take("path_tokens", num_reqs), num_reqs, plans.shape.num_tokens)
        return {"next_tokens": tokens} | {
            name: outputs.take(name, num_reqs) for name in ("counts", "num_bad")
        }

    def logprobs_of_path(self, logprobs: OutputLogprobs) -> OutputLogprobs:
        """The logprobs of the tokens that :meth:`accept` has returned, taken from ``logprobs`` of all nodes' draws."""
        assert self._outputs is not None and self._plans is not None
        if not self._plans.is_tree:
            return logprobs
        num_reqs, shape = self._num_reqs, self._plans.shape
        path = _rows_of(self._outputs.take("path", num_reqs), num_reqs, shape.num_tokens)
        first = torch.arange(num_reqs, device=path.device).unsqueeze(1) * shape.num_nodes
        return select_logprobs(logprobs, (first + path).flatten())

    def _fill(self, batch: StepBatch, views: Views) -> None:
        plan = ("plan_rows", "may_accept", "temperatures", "noise_scales", "seed_keys")
        self._num_reqs = len(batch.rows)
        self.arena.fill({name: views[name] for name in plan}, self._num_reqs)
        self._sampling.clear()
        self._composition = batch.composition

    def _rows(self, name: str, size: int, width: int) -> torch.Tensor:
        """The values of arena field ``name`` for the first ``size`` requests with ``width`` rows each, [size, width].
        It is a view; see :func:`_rows_of`."""
        return _rows_of(self.arena[name], size, width)

    # --- graphs

    def capture(self, max_seq_len: int, show_progress: bool) -> None:
        """Capture every size for requests of up to ``max_seq_len`` tokens. Waits for the device."""
        self._capture_sizes(lambda pool, size: self._capture_size(pool, size, max_seq_len), show_progress)

    def _capture_size(self, pool: GraphPool, size: int, max_seq_len: int) -> Sequence[Graph]:
        """Capture the graphs of all depths for one size. The arena holds only padding meanwhile, so only the sink is
        accessed."""
        graphs: list[Graph] = []
        for shape in reversed(self._shapes.values()):
            graphs += self._capture_shape(pool, size, shape, max_seq_len)
        return graphs

    def _capture_shape(
        self, pool: GraphPool, size: int, shape: StepShape, max_seq_len: int
    ) -> Sequence[Graph]:
        device, name = self._device, f"[{size}] of depth {shape.depth}"
        with device.forward.active():  # FORWARD reads what a plan allocates and writes
            plans = self._make_plans(size, shape, np.full(size, max_seq_len + shape.num_slots - 1, np.int64))
            self._verify_and_draw(plans)  # the first call compiles and initialises kernels
            self._accept(plans)
        device.synchronize()
        verify = device.capture(f"verify{name}", pool, lambda: self._verify_and_draw(plans))
        accept = device.capture(f"accept{name}", pool, lambda: self._accept(plans))
        self._captured[size, shape.depth] = _Captured(plans, verify, accept)
        return verify, accept

    def _make_plans(self, size: int, shape: StepShape, max_lens: npt.NDArray[np.int64]) -> _Plans:
        """Plan the attention of a step of ``size`` requests. ``max_lens`` [size] int64 are upper bounds of the lengths
        including all rows of the step."""
        arena = self.arena
        target = self._attention, self._num_heads
        draft = self._draft_attention, self._draft.num_heads

        def plan(
            num_queries: int,
            seq_lens: torch.Tensor,
            whose: tuple[AttentionBackend, int],
            num_nodes: int | None = None,
            ancestors: str | None = None,
        ) -> AttentionPlan:
            backend, num_heads = whose
            above = None if ancestors is None else self._rows(ancestors, size, num_queries)
            made = backend.plan_verify(
                VerifyInputs(
                    page_table=self._req_pool.page_table,
                    rows=arena["plan_rows"][:size],
                    seq_lens=seq_lens[:size],
                    max_seq_lens_cpu=max_lens,
                    tree=QueryTree(num_queries, num_nodes or num_queries, above),
                    num_heads=num_heads,
                )
            )
            assert made is not None, "a backend without plan_verify is not chosen for speculation"
            return made

        topk, depth = self._topk, shape.depth
        is_tree = topk > 1 and depth > 0
        path_lens = arena["path_lens" if topk > 1 else "seq_lens"]
        if is_tree:
            counts = [topk * step for step in range(1, depth)]  # nodes so far
            steps = [plan(topk, self._draft_lens, draft, count, "draft_ancestors") for count in counts]
        else:
            steps = [plan(1, self._draft_lens, draft)] * (depth - 1)
        return _Plans(
            size,
            shape,
            int(max_lens.max()),
            is_tree,
            verify=plan(shape.num_nodes, arena["seq_lens"], target, None, "ancestors" if is_tree else None),
            extend=[plan(depth + 1 + k, path_lens, draft) for k in range(self._num_layers)],
            steps=steps,
            two=None if self.reads_hidden else plan(2, arena["lens"], draft),
        )

    # --- the step

    def _begin(self, plans: _Plans) -> None:
        """Compute positions and slots of the rows that will be verified. Of their token ids only the first is known;
        the others are still to be proposed."""
        arena, size, shape = self.arena, plans.size, plans.shape
        outputs = BeginOutputs(
            lens=arena["lens"][:size],
            seq_lens=arena["seq_lens"][:size],
            path_lens=arena["path_lens"][:size] if self._topk > 1 else None,
            positions=self._rows("positions", size, shape.num_nodes),
            out_slots=self._rows("out_slots", size, shape.num_nodes),
            input_ids=self._rows("input_ids", size, shape.num_nodes),
            is_bad=arena["is_bad"][:size],
        )
        begin_step(
            arena["plan_rows"][:size],
            self.state.lens,
            self._table_of_step(),  # the page table as it is in this step (F5)
            self._req_pool.last_tokens,
            self._kv_pool.page_size,
            shape.depth,
            outputs,
        )

    def _verify_and_draw(self, plans: _Plans) -> None:
        """The first part of a captured step: draft, verify, and draw. The draw applies a temperature only. If a request
        needs more than that, the Sampler draws again from the same logits."""
        logits = self._propose_and_verify(plans, self._logits)
        size, num_nodes = plans.size, plans.shape.num_nodes
        temperatures, scales, keys = self._draw_inputs(size)
        draw = sample_tokens if self._rank_sampler is None else self._rank_sampler.draw
        draw(
            logits,
            temperatures,
            scales,
            keys,
            self._rows("positions", size, num_nodes).flatten(),
            rows=None,
            last_tokens=None,
            next_tokens=self._rows("drawn", size, num_nodes).flatten(),
            rows_each=num_nodes,
            ahead=1,
        )

    def _propose_and_verify(self, plans: _Plans, logits_out: torch.Tensor | None = None) -> torch.Tensor:
        """Propose the drafts and verify them. Returns the target's logits of all rows [size * num_nodes, this rank's
        columns], which are written to the first rows of ``logits_out`` if that is given."""
        size, num_nodes = plans.size, plans.shape.num_nodes
        self._begin(plans)
        self._propose(plans)
        num_rows = size * num_nodes
        aux = None
        if self._aux_layers:
            aux = AuxHiddenStates(self._aux_layers, self._aux[:num_rows])
        names = ("input_ids", "positions", "out_slots")
        ids, positions, slots = (self._rows(name, size, num_nodes).flatten() for name in names)
        batch = self._batch(ids, positions, slots, plans.verify, aux=aux)
        if logits_out is not None:
            batch = replace(batch, logits_out=logits_out[:num_rows])
        x = self._model.hidden_states(batch)
        keep_hidden(self._device, self._hidden[:num_rows], x)
        return self._model.own_logits(x, batch)

    def _propose(self, plans: _Plans) -> None:
        """Write the drafts to ``input_ids``, from one forward of the draft after the other."""
        if plans.is_tree:
            self._propose_tree(plans)
            return
        size, depth, arena, state = plans.size, plans.shape.depth, self.arena, self.state
        rows, lens = arena["plan_rows"][:size], arena["lens"][:size]
        if self._num_layers > 1:
            none = self._zeros[:size]
            for step, drafts in enumerate(state.drafts[rows, :depth].int().t().contiguous()):
                self._keep(plans, step + 1, Pieces(none, drafts.unsqueeze(1), none))
            return
        if depth == 0:
            if plans.two is not None:
                self._compute_two(plans, plans.two, lens[:0])
            return
        hidden = state.hidden[:, 0].index_select(0, rows)
        logits = self._first_logits(plans, hidden)
        # A draft that reads hidden states begins with the row of the last token, which column 0 has; one that reads
        # none has computed that row already (_compute_two).
        first = int(plans.two is not None)
        names = ("draft_ids", "draft_positions", "draft_slots")
        ids, positions, slots = (arena[name][:size] for name in names)
        for step in range(1, depth):
            following = NextRow(
                at=step - 1 + first,
                lens=lens,
                positions=self._rows("positions", size, depth + 1),
                out_slots=self._rows("out_slots", size, depth + 1),
                draft_lens=self._draft_lens[:size],
                draft_ids=ids,
                draft_positions=positions,
                draft_slots=slots,
            )
            self._keep(plans, step, self._draw(logits, size, lens, step - 1), following)
            batch = self._batch(ids, positions, slots, plans.steps[step - 1])
            logits, hidden = self._draft.forward(batch, hidden)
        self._keep(plans, depth, self._draw(logits, size, lens, depth - 1))

    def _first_logits(self, plans: _Plans, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of the first draft token of each request. A draft that reads hidden states computes them from
        ``hidden`` [size, hidden_size], which the step before has left; one that reads none computes its rows of the
        last two tokens for them."""
        if plans.two is None:
            return self._draft.logits(hidden)
        return self._compute_two(plans, plans.two, torch.arange(plans.size, device=hidden.device) * 2 + 1)

    def _keep(self, plans: _Plans, column: int, drawn: Pieces, following: NextRow | None = None) -> None:
        """Write the drafts ``drawn`` to ``column`` of ``input_ids``; an unusable draft is marked, see
        ``keep_draft``."""
        size, vocab_size = plans.size, self._model.config.vocab_size
        input_ids = self._rows("input_ids", size, plans.shape.num_nodes)
        keep_draft(drawn, self.arena["is_bad"][:size], input_ids, column, vocab_size, following)

    def _propose_tree(self, plans: _Plans) -> None:
        """Build the tree of the best drafts. In each step the draft computes the ``topk`` rows of each request's
        frontier, which attend to their own ancestors among the rows of the steps before."""
        size, shape, arena, topk = plans.size, plans.shape, self.arena, self._topk
        rows, lens, is_bad = (arena[name][:size] for name in ("plan_rows", "lens", "is_bad"))
        hidden = self.state.hidden[rows]
        first = lens - int(self.reads_hidden)  # the position of the first row of the frontiers
        drafts, scores = self._best(self._first_logits(plans, hidden[:, 0]), size, lens)
        hidden = hidden.expand(size, topk, -1)
        candidates = self._more(None, drafts.unsqueeze(1), scores.unsqueeze(1), is_bad)
        masks = torch.zeros_like(drafts)
        frontiers = []
        for step in range(1, shape.depth):
            masks = candidates.frontier_ancestors(masks)
            above = candidates.frontier_rows.unsqueeze(2)
            hidden = hidden.gather(1, above.expand(-1, -1, hidden.shape[2]))
            arena["draft_ancestors"][:size] = masks
            torch.add(first, topk * step, out=self._draft_lens[:size])
            slots = torch.empty(size, topk, dtype=torch.int64, device=rows.device)
            self._place(rows, first, topk * (step - 1), None, slots)
            positions = (first + step - 1).unsqueeze(1).expand(size, topk)
            ids = candidates.frontier_tokens
            frontiers.append(candidates.frontier)
            batch = self._batch(ids.flatten(), positions.flatten(), slots.flatten(), plans.steps[step - 1])
            logits, following = self._draft.forward(batch, hidden.flatten(0, 1))
            hidden = following.view(size, topk, -1)
            drafts, scores = self._best(logits, size, lens + step)
            candidates = self._more(
                candidates, drafts.view(size, topk, topk), scores.view(size, topk, topk), is_bad
            )
        roots = self._rows("input_ids", size, shape.num_nodes)[:, 0].clone()
        tree = build_tree(roots, lens - 1, candidates, shape.num_nodes)
        assert tree.parents is not None and tree.ancestors is not None and tree.chosen is not None
        for name, values in (
            ("input_ids", tree.token_ids),
            ("positions", tree.positions),
            ("parents", tree.parents),
            ("ancestors", tree.ancestors),
        ):
            self._rows(name, size, shape.num_nodes).copy_(values)
        if not self.reads_hidden:
            # The draft's row 0 is that of the root, and the rows of the frontiers follow.
            by_candidate = torch.zeros_like(candidates.token_ids)
            if frontiers:
                computed = torch.cat(frontiers, 1)
                numbers = torch.arange(1, computed.shape[1] + 1, device=rows.device).expand_as(computed)
                by_candidate.scatter_(1, computed, numbers)
            draft_nodes = self._rows("draft_nodes", size, shape.num_nodes)
            draft_nodes[:, 0] = 0
            draft_nodes[:, 1:] = by_candidate.gather(1, tree.chosen)

    def _more(
        self, before: Candidates | None, drafts: torch.Tensor, scores: torch.Tensor, is_bad: torch.Tensor
    ) -> Candidates:
        """``before`` (None: the root alone) with the children of the frontier: ``drafts`` and ``scores``
        [B, parents, topk]. Requests with an unusable draft are marked in ``is_bad``."""
        drafts, scores, bad = check_draft(drafts, scores, self._model.config.vocab_size, is_bad)
        is_bad.copy_(bad)
        if before is None:
            return first_candidates(drafts[:, 0], scores[:, 0])
        return more_candidates(before, drafts, scores)

    def _compute_two(self, plans: _Plans, two: AttentionPlan, logits_index: torch.Tensor) -> torch.Tensor:
        """Compute the rows of the last two tokens in a draft that reads no hidden states. Returns the logits of the
        rows ``logits_index``. If the draft has computed the first of the two tokens before, its KV is written to the
        sink instead, because its page may be shared by now."""
        size, arena, state = plans.size, self.arena, self.state
        rows, lens = arena["plan_rows"][:size], arena["lens"][:size]
        last_tokens = self._rows("input_ids", size, plans.shape.num_nodes)[:, 0]
        ids = torch.stack((state.previous[rows], last_tokens), dim=1)
        positions = torch.stack((lens - 2, lens - 1), dim=1)
        slots = node_slots(self._req_pool.page_table, rows, lens - 2, 2, self._kv_pool.page_size).view(-1, 2)
        slots[:, 0] *= state.is_behind[rows]
        batch = self._batch(ids.flatten(), positions.flatten(), slots.flatten(), two, logits_index)
        logits, _ = self._draft.forward(batch, state.hidden[:0, 0])
        return logits

    def _batch(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plan: AttentionPlan,
        logits_index: torch.Tensor | None = None,
        aux: AuxHiddenStates | None = None,
    ) -> ForwardBatch:
        plan.prepare()
        return ForwardBatch(
            mode=ForwardMode.VERIFY,
            input_ids=ids.contiguous(),
            positions=positions.contiguous(),
            out_slots=slots.contiguous(),
            logits_index=logits_index,
            attn=plan,
            kv_pool=self._kv_pool,
            aux_hidden=aux,
        )

    def _accept(self, plans: _Plans) -> None:
        """Determine the accepted drafts, advance the requests' rows, and run draft-extend on the drawn tokens."""
        size, shape, arena, state = plans.size, plans.shape, self.arena, self.state
        rows, lens = arena["plan_rows"][:size], arena["lens"][:size]
        ids, positions, tokens = (
            self._rows(name, size, shape.num_nodes) for name in ("input_ids", "positions", "drawn")
        )
        is_bad, may_accept = arena["is_bad"][:size], arena["may_accept"][:size]
        counts, num_bad, last_tokens = (
            arena["counts"][:size],
            arena["num_bad"][:size],
            self._req_pool.last_tokens,
        )
        if not plans.is_tree:
            is_needed = not self.reads_hidden
            accept_chain(
                ids,
                tokens,
                is_bad,
                may_accept,
                rows,
                lens,
                self._simulated_accept_length,
                AcceptOutputs(
                    counts,
                    num_bad,
                    last_tokens,
                    state.lens,
                    previous=state.previous if is_needed else None,
                    is_behind=state.is_behind if is_needed else None,
                ),
            )
            if self.reads_hidden:
                self._extend_draft(plans, tokens)
            return
        parents = self._rows("parents", size, shape.num_nodes)
        drafts = DraftTree(ids, positions, parents, None, is_bad | ~may_accept)
        accepted = accept(drafts, tokens, shape.depth)
        counts.copy_(accepted.counts)
        num_bad.copy_(is_bad)
        new_lens = lens + counts
        tokens = self._rows("path_tokens", size, shape.num_tokens).copy_(accepted.token_ids)
        path = self._rows("path", size, shape.num_tokens).copy_(accepted.path)
        assert self._move_target is not None, "there are trees"
        self._move_target(self._rows("out_slots", size, shape.num_nodes).flatten(), path, counts)
        last_tokens[rows] = accepted.last_tokens
        state.lens[rows] = torch.where(rows == 0, SINK_LEN, new_lens)
        if self.reads_hidden:
            self._extend_draft(plans, tokens)
            return
        last = accepted.path.gather(1, counts.unsqueeze(1) - 1)
        state.previous[rows] = ids.gather(1, last).squeeze(1)
        state.is_behind[rows] = self._move_draft(plans)

    def _move_draft(self, plans: _Plans) -> torch.Tensor:
        """Move the KV rows that a draft without hidden states has computed for the accepted path to their tokens'
        slots. Returns whether it has not computed the last node of the path [B] bool, since that was in no frontier."""
        size, shape, arena = plans.size, plans.shape, self.arena
        rows, lens, counts = (arena[name][:size] for name in ("plan_rows", "lens", "counts"))
        path = self._rows("path", size, shape.num_tokens)
        nodes = self._rows("draft_nodes", size, shape.num_nodes).gather(1, path)
        is_behind = (counts > 1) & (nodes.gather(1, counts.unsqueeze(1) - 1).squeeze(1) == 0)
        num_frontiers = shape.depth - 1
        if num_frontiers:
            num_rows = 1 + num_frontiers * self._topk
            slots = node_slots(self._req_pool.page_table, rows, lens - 1, num_rows, self._kv_pool.page_size)
            assert self._move_rows is not None, "there are trees of a draft that reads no hidden states"
            self._move_rows(slots, nodes, counts - is_behind.long())
        return is_behind

    def _extend_draft(self, plans: _Plans, tokens: torch.Tensor) -> None:
        """Compute the draft's rows of the drawn ``tokens`` from the target's hidden states; if the draft has a layer
        for each step, layer after layer. Rows of tokens that were not accepted are written again by the next step.

        Layer k computes ``depth + 1 + k`` rows of each request, beginning with row ``lens - 1 - k``. Their tokens begin
        with token ``lens``; after the drawn tokens come those that the layers before it have proposed.
        """
        size, arena, state, width = plans.size, self.arena, self.state, plans.shape.num_tokens
        layer_per_step = self._num_layers > 1
        rows, counts, lens = (arena[name][:size] for name in ("plan_rows", "counts", "lens"))
        num_nodes = plans.shape.num_nodes
        x, aux = self._hidden[: size * num_nodes], self._aux[: size * num_nodes]
        requests = torch.arange(size if layer_per_step or plans.is_tree else 0, device=rows.device)
        if plans.is_tree:
            nodes = (requests.unsqueeze(1) * num_nodes + self._rows("path", size, width)).flatten()
            x, aux = x[nodes], aux[nodes]
        hidden = self._draft.hidden_states_from(x, aux)
        ids, logits_index = tokens, requests[:0]
        if layer_per_step:
            before, last = state.hidden[rows], counts - 1  # ``before``: what the step before has left
            next_positions = lens + counts
            ids = torch.cat((tokens, tokens.new_zeros(size, self._num_layers - 1)), dim=1)
        for layer, plan in enumerate(plans.extend):
            if layer > 0:
                previous = before[:, layer - 1 : layer]
                hidden = torch.cat((previous, hidden.view(size, width - 1, -1)), dim=1).flatten(0, 1)
            positions, slots = self._places(plans, layer, width)
            if layer_per_step:
                logits_index = requests * width + last + layer
            batch = self._batch(
                ids[:, :width].flatten(), positions.flatten(), slots.flatten(), plan, logits_index
            )
            logits, hidden = self._draft.forward(batch, hidden, layer)
            if layer_per_step:
                following = ids if layer + 1 < self._num_layers else None
                drawn = self._draw(logits, size, next_positions, layer)
                keep_proposal(drawn, rows, counts, state.drafts[:, layer], following, layer)
            if layer < state.hidden.shape[1]:
                keep_last_hidden(hidden, counts, rows, state.hidden[:, layer])
            width += 1

    def _places(self, plans: _Plans, layer: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and slots [size, width] of the rows that ``layer`` computes in draft-extend. Layer 0 of a chain
        uses the rows of the verification. Rows before a request's first token have position 0 and the sink's slot."""
        size = plans.size
        if layer == 0 and not plans.is_tree:
            return self._rows("positions", size, width), self._rows("out_slots", size, width)
        rows, lens = self.arena["plan_rows"][:size], self.arena["lens"][:size]
        positions, slots = (torch.empty(size, width, dtype=torch.int64, device=rows.device) for _ in range(2))
        self._place(rows, lens, -1 - layer, positions, slots)
        return positions, slots

    def _place(
        self,
        rows: torch.Tensor,
        lens: torch.Tensor,
        first: int,
        positions: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> None:
        """See ``place_rows``."""
        table, page_size = self._req_pool.page_table, self._kv_pool.page_size
        place_rows(rows, lens, first, table, page_size, positions, slots)

    def make_aux(self, num_tokens: int) -> AuxHiddenStates | None:
        """Memory for the hidden states of the target's ``aux_layers`` in a prefill step of ``num_tokens`` tokens. None
        if the draft reads only the output of the last layer."""
        if not self._aux_layers:
            return None
        size = len(self._aux_layers) * self._model.config.hidden_size
        return AuxHiddenStates(self._aux_layers, self._aux.new_empty(num_tokens, size))

    def _draw_inputs(self, size: int) -> list[torch.Tensor]:
        """Temperatures, noise scales and seed keys of the first ``size`` requests, [size] each."""
        return [self.arena[name][:size] for name in ("temperatures", "noise_scales", "seed_keys")]

    def _draw(self, logits: torch.Tensor, size: int, positions: torch.Tensor, ahead: int) -> Pieces:
        """Draw the draft's tokens at ``positions`` + ``ahead`` [B] int64 from ``logits``, with the same noise with
        which the target will draw there."""
        temperatures, scales, keys = self._draw_inputs(size)
        return draw_draft(
            logits,
            self._draft.lm_head,
            self._draft.target_ids,
            self._model.config.vocab_size,
            temperatures,
            scales,
            keys,
            positions,
            ahead,
        )

    def _best(
        self, logits: torch.Tensor, size: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best ``topk`` tokens of each row of ``logits`` and their scores, with the noise of ``positions`` [B]. All
        requests have the same number of rows."""
        num = len(logits) // size
        temperatures, scales, keys, positions = (
            values.unsqueeze(1).expand(size, num).flatten()
            for values in (*self._draw_inputs(size), positions)
        )
        return best_drafts(
            logits,
            self._draft.lm_head,
            self._draft.target_ids,
            self._model.config.vocab_size,
            temperatures,
            scales,
            keys,
            positions,
            self._topk,
        )

    # --- after prefill

    def extend_arrays(self, batch: StepBatch) -> Arrays:
        """What :meth:`extend` needs in addition to the step's own inputs: for each layer the tokens that its rows are
        computed from, ``draft_ids`` [layers * T] int64; 0 after the end of a prompt. Nothing for a draft that reads no
        hidden states."""
        if not self.reads_hidden:
            return {}
        padding = np.zeros(self._num_layers, np.int64)
        texts = [np.concatenate((chunk.token_ids, chunk.following, padding)) for chunk in batch.chunks]
        ids = [
            text[1 + layer : 1 + layer + len(chunk.token_ids)]
            for layer in range(self._num_layers)
            for text, chunk in zip(texts, batch.chunks, strict=True)
        ]
        return {"draft_ids": np.concatenate(ids).astype(np.int64)}

    def extend(
        self,
        extended: Extended,
        next_tokens: torch.Tensor,
        sampling: SamplingBatch | None,
    ) -> None:
        """Compute the draft's rows of a prefill step, whose uploaded arrays include those of :meth:`extend_arrays`.
        ``next_tokens`` [S] int64 are the tokens drawn for the requests whose prompts are complete. ``sampling`` is
        needed if the draft has a layer for each step."""
        forward_batch, x, views = extended.batch, extended.hidden, extended.views
        state, num_sampled, layer_per_step = self.state, len(next_tokens), self._num_layers > 1
        assert forward_batch.logits_index is not None
        ends = forward_batch.logits_index[:num_sampled]  # the last token of each complete prompt
        rows, lens = views["sample_rows"], views["sample_positions"] + 1
        if not self.reads_hidden:
            self._draft.forward(replace(forward_batch, logits_index=ends[:0]), state.hidden[:0, 0])
            if num_sampled:
                state.lens[rows] = lens
                state.previous[rows] = forward_batch.input_ids[ends]
                state.is_behind[rows] = False
            return
        aux, positions = forward_batch.aux_hidden, forward_batch.positions
        hidden = self._draft.hidden_states_from(x, None if aux is None else aux.out)
        ids_by_layer = views["draft_ids"].view(self._num_layers, -1)
        following = [next_tokens]  # the tokens after the complete prompts: the drawn one, then proposed ones
        for layer in range(self._num_layers):
            ids = ids_by_layer[layer].clone()
            for ahead, tokens in enumerate(following):
                # The row this many tokens before the prompt's last one, if the prompt is that long.
                behind = layer - ahead
                ids[torch.where(positions[ends] < behind, ends, ends - behind)] = tokens
            own = replace(
                forward_batch,
                input_ids=ids,
                logits_index=ends if layer_per_step else ends[:0],
                logits_out=None,
                aux_hidden=None,
                layer_ready=None,
            )
            logits, hidden = self._draft.forward(own, hidden, layer)
            if not num_sampled:
                continue
            if layer_per_step:
                assert sampling is not None
                pieces = draw_draft(
                    logits, self._draft.lm_head, self._draft.target_ids, self._model.config.vocab_size,
                    sampling.temperatures, sampling.noise_scales, sampling.seed_keys, lens, layer,
                )  # fmt: skip
                drafts = state.drafts[rows, layer] = drawn_tokens(pieces)
                following.append(drafts.clamp(min=0))
            if layer < state.hidden.shape[1]:
                state.hidden[rows, layer] = hidden[torch.where(positions[ends] < layer, ends, ends - layer)]
        if num_sampled:
            state.lens[rows] = lens


def _rows_of(field: torch.Tensor, size: int, width: int) -> torch.Tensor:
    """The first ``size * width`` values of ``field`` [B, at least width], as [size, width]."""
    return field.view(-1)[: size * width].view(size, width)


def _tree_fields(largest: StepShape, topk: int) -> list[ArenaField]:
    """The arena's fields that only trees need: see ``DraftTree`` and ``Accepted``."""
    i64, width, path = torch.int64, (largest.num_nodes,), (largest.num_tokens,)
    return [
        ArenaField("parents", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("ancestors", i64, Role.INPUT, pad=0, shape=width),
        ArenaField(
            "draft_nodes", i64, Role.INPUT, pad=0, shape=width
        ),  # the draft's row of each node; 0: none
        ArenaField(
            "draft_ancestors", i64, Role.INPUT, pad=0, shape=(topk,)
        ),  # for the draft's current forward
        ArenaField(
            "path_lens", i64, Role.INPUT, pad=SINK_LEN
        ),  # the lengths including the longest possible path
        ArenaField("path", i64, Role.OUTPUT, pad=0, shape=path),
        ArenaField("path_tokens", i64, Role.OUTPUT, pad=0, shape=path),
    ]


def _without_penalties(params: SamplingParams) -> SamplingParams:
    if not params.needs_penalties:
        return params
    return structs.replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
