"""SpeculativeRunner: decode steps that propose tokens with a draft model and verify them with the target.

One step is a chain on FORWARD, and nothing in it needs the host:

1. *draft*: from what the last step has left of each request, ``depth`` tokens, one after the other; a draft with a
   layer for each step has proposed them already;
2. *verify*: the target computes the request's last token and the drafted ones, ``depth + 1`` rows a request, in one
   forward;
3. *draw*: at each of these rows the token that the target itself draws there, with the noise of that position;
4. *accept*: drafts count as long as they are what was drawn. The tokens drawn up to the first that differs are the
   step's: 1 to ``depth + 1``. They are those of plain decoding, whatever the draft proposes;
5. *draft-extend*: the draft computes its rows of the accepted tokens from the target's hidden states. With a layer for
   each step, layer k computes row i from token i + 1 + k. So its last k rows stand for tokens that it has proposed, and
   are computed again when the tokens are known; nobody else gets a page with such rows (``DraftConfig.lookahead``).

The depth may be another in each step, one of a few (``SpeculativeConfig.shapes``), and 0: then nothing is proposed, and
the draft computes its row of the last token, so that nothing that it will propose from is missing.

Drafts are chains, or trees where ``topk`` is above 1 (``speculative/tree.py``). The nodes of a tree lie in slots one
after the other, from that of the last token on, and so do, in the draft's own layers, the rows that it computes while
it proposes. The rows of an accepted path are moved to their tokens' slots in the step that accepts them.

Lengths advance on the device (``SpeculativeState``); the host learns them one step later and only knows bounds.
Rejected tokens leave KV in slots behind a request's length. They are written again before anybody reads them, and they
are never shared, since only committed tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from fenceline.config.draft_config import SpeculativeConfig, StepShape
from fenceline.layers.attention.base import AttentionBackend
from fenceline.layers.forward_batch import (
    AttentionPlan,
    AuxHiddenStates,
    ForwardBatch,
    ForwardMode,
    QueryTree,
    VerifyInputs,
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
    keep_hidden,
    moves_of_nodes,
    table_of_step,
)
from fenceline.memory_order.edges import KEPT_HIDDEN, SAME_COMPOSITION, SINK, TOTAL_BUCKETS
from fenceline.model_executor.decode_runner import Logits, plan_arrays
from fenceline.model_executor.graph_runner import GraphRunner
from fenceline.model_executor.step import DecodeBatch, ExtendBatch
from fenceline.models.decoder import CausalLM
from fenceline.models.draft import DraftModel
from fenceline.sampling.kernels.sample import sample_tokens
from fenceline.sampling.logprobs import OutputLogprobs, select_logprobs
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.speculative.accept import accept
from fenceline.speculative.draws import Pieces, best_drafts, draw_draft, drawn_tokens
from fenceline.speculative.kernels.operands import SINK_LEN, Begun, Kept, NextRow
from fenceline.speculative.kernels.step import accept_chain, begin_step, keep_draft, keep_last_hidden
from fenceline.speculative.kv_rows import KVMover, node_slots, slots_at
from fenceline.speculative.refuse import check_draft
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

_VERIFY = "verify_"  # begins the names of the arrays that the draws of all rows of a step read


class SpeculativeState:
    """What the device keeps of each request between two steps, by row; row 0 is the sink that padding names.

    ``lens`` [num_rows] int64: tokens of the request, the last one of which has no KV yet. For a draft that reads hidden
    states, ``hidden`` [num_rows, 1, hidden_size] is what it proposes from; with n layers for as many steps, ``drafts``
    [num_rows, n] int64 are all its proposals, and ``hidden`` [num_rows, n - 1, hidden_size] at k is what layer k has
    left of row ``lens - 2 - k``, the last one that stands for known tokens: layer k + 1 goes on from there. For one
    that reads none, ``previous`` [num_rows] int64 is the token in front of the last one, and ``is_behind`` [num_rows]
    bool says whether the draft has not computed that one yet. All of it is written on FORWARD alone, in program order
    with the steps that read it.
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
            tensor: torch.Tensor = getattr(self, name)
            device.name_memory(tensor, f"speculative.{name}", max(tensor[0].nbytes, 1))


@dataclass(frozen=True, slots=True)
class _Plans:
    """Attention of a step of ``size`` requests."""

    size: int
    shape: StepShape
    is_tree: bool
    verify: AttentionPlan  # the target's
    extend: Sequence[AttentionPlan]  # the draft's, of as many rows, and for layer k of k more
    # The draft's while it proposes, of a row for each request; of a tree, of topk rows in each step but the first.
    steps: Sequence[AttentionPlan]
    two: AttentionPlan | None  # a draft's that reads no hidden states, of two


@dataclass(frozen=True, slots=True)
class _Captured:
    plans: _Plans
    verify: Graph  # as far as the target's logits
    accept: Graph  # from what has been drawn


class SpeculativeRunner(GraphRunner):
    """One device's speculative decode steps for up to ``max_batch`` requests, and the graphs of some batch sizes and of
    each depth: one as far as the target's logits, one from the draw on. Everything is submitted to FORWARD, which must
    be current in all methods but :meth:`arrays`."""

    def __init__(
        self,
        device: Device,
        model: CausalLM,
        draft: DraftModel,
        kv_pool: KVPool,
        req_pool: ReqPool,
        attention: AttentionBackend,
        draft_attention: AttentionBackend,
        max_batch: int,
        config: SpeculativeConfig,
        sizes: Sequence[int] = (),
        padding: bool = True,
    ) -> None:
        """``config`` says how steps speculate; ``sizes`` as of ``DecodeRunner``."""
        super().__init__(device, "speculative decode", "requests", sizes, padding)
        self.config = config
        self.reads_hidden = draft.hidden_size > 0
        self._model = model
        self._draft = draft
        self._kv_pool = kv_pool
        self._req_pool = req_pool
        self._attention = attention
        self._draft_attention = draft_attention
        self._shapes, largest = config.shapes, config.largest
        self._topk = topk = config.topk
        self._aux_layers = aux_layers = config.draft.aux_layers
        self._simulated_accept_length = config.simulated_accept_length
        self._captured: dict[tuple[int, int], _Captured] = {}  # by size and depth
        self._composition: int | None = None
        self._same = comparison(device, SAME_COMPOSITION)
        self._table_of_step = table_of_step(device, req_pool.page_table)
        self._num_reqs = 0
        self._sampling: dict[int, SamplingBatch] = {}  # of the present batch, by depth
        self._plans: _Plans | None = None  # of the step whose draw is awaited
        self._replayed: _Captured | None = None  # and its graphs, if it runs in them
        self._outputs: ArenaOutputs | None = None  # of the latest step
        dtype = model.context.dtype
        self._num_layers = draft.max_steps or 1  # with a turn of their own
        self.state = SpeculativeState(device, req_pool.num_rows, self._num_layers, draft.hidden_size, dtype)
        width = (largest.num_nodes,)
        i64, f32 = torch.int64, torch.float32
        fields = [
            ArenaField("plan_rows", i64, Role.PLAN, pad=SINK),
            ArenaField("may_accept", torch.bool, Role.PLAN, pad=False),  # whether drafts may count
            ArenaField("temperatures", f32, Role.PLAN, pad=1.0),
            ArenaField("noise_scales", f32, Role.PLAN, pad=0.0),
            ArenaField("seed_keys", i64, Role.PLAN, pad=0),
            ArenaField("lens", i64, Role.INPUT, pad=SINK_LEN),  # as the step begins
            ArenaField("seq_lens", i64, Role.INPUT, pad=SINK_LEN),  # with all rows of the step
            ArenaField("draft_lens", i64, Role.INPUT, pad=SINK_LEN),  # of the draft's current forward
            ArenaField(
                "draft_ids", i64, Role.INPUT, pad=0
            ),  # of a chain: the row that the draft computes next
            ArenaField("draft_positions", i64, Role.INPUT, pad=0),
            ArenaField("draft_slots", i64, Role.INPUT, pad=SINK),
            ArenaField("is_bad", torch.bool, Role.INPUT, pad=False),  # drafts that are not to be used
            # Of the rows that the target verifies: the last token and the drafts. Where there are fewer than in the
            # deepest steps, they lie one request's after the other's all the same, see _rows.
            ArenaField("input_ids", i64, Role.INPUT, pad=0, shape=width),
            ArenaField("positions", i64, Role.INPUT, pad=0, shape=width),
            ArenaField("out_slots", i64, Role.INPUT, pad=SINK, shape=width),
            ArenaField("drawn", i64, Role.INPUT, pad=0, shape=width),  # the target's own tokens there
            ArenaField("counts", i64, Role.OUTPUT, pad=1),  # tokens of the step
            ArenaField("num_bad", i64, Role.OUTPUT, pad=0),  # 1 where the draft could not be used
        ]
        if topk > 1:
            fields += _tree_fields(largest, topk)
        self.arena = Arena(device, "speculative", max_batch, fields)
        # Of the draft's current forward; a plan of its own for each, though they share this field (F9).
        self._draft_lens = self.arena.derived("draft_lens", "lens")
        self._move_target: Move | None = None  # of trees
        self._move_rows: Move | None = None  # of trees whose draft reads no hidden states: the draft's
        if topk > 1:
            parts = [tensor for _, tensor in kv_pool.tensors()]
            num_target_parts = len(kv_pool.layout.parts_of(range(model.num_layers)))
            self._move_target = moves_of_nodes(device, KVMover(parts[:num_target_parts]).move)
            if not self.reads_hidden:
                self._move_rows = moves_of_nodes(device, KVMover(parts[num_target_parts:]).move)
        self._zeros = torch.zeros(max_batch, 1, device=device.torch_device)
        # What the target leaves of the rows that it verifies: hidden states, and those of further layers.
        num_rows, where, hidden_size = (
            max_batch * largest.num_nodes,
            device.torch_device,
            model.config.hidden_size,
        )
        self._hidden = torch.zeros(num_rows, hidden_size, dtype=dtype, device=where)
        self._aux = torch.zeros(num_rows, len(aux_layers) * hidden_size, dtype=dtype, device=where)
        num_rows = (sizes[-1] if sizes else 0) * largest.num_nodes
        self._logits = torch.zeros(num_rows, model.config.vocab_size, dtype=dtype, device=where)
        for name, tensor in (("hidden", self._hidden), ("aux", self._aux), ("logits", self._logits)):
            if tensor.numel():
                device.name_memory(tensor, f"speculative.target_{name}", tensor[0].nbytes)

    def addresses(self) -> Sequence[int]:
        """See ``GraphRunner.addresses``."""
        pool, state = self._kv_pool, self.state
        tensors = (
            self._req_pool.page_table, self._req_pool.last_tokens, pool.k(0), pool.v(0), state.lens, state.hidden
        )  # fmt: skip
        return [tensor.data_ptr() for tensor in tensors]

    # --- a batch

    def arrays(self, batch: DecodeBatch) -> Arrays:
        """What has to be uploaded before :meth:`forward`: nothing if the requests are those of the step before, and
        have had a step of this depth."""
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

    def _holds(self, batch: DecodeBatch) -> bool:
        """Whether the arena holds the batch's requests."""
        return self._composition is not None and self._same(self._composition, batch.composition)

    def _of_every_row(self, batch: DecodeBatch) -> list[ReqSampling]:
        """What the draws of all rows need, row after row. Only a request's first row is penalised and counted."""
        rows, num_further = [], self._shapes[batch.depth.depth].num_nodes - 1
        for req in batch.sampling:
            further = replace(req, params=_without_penalties(req.params))
            rows += [req] + [further] * num_further
        return rows

    def forward(self, batch: DecodeBatch, views: Views) -> Logits:
        """Submit the step as far as verification. ``views``: what ``arrays`` has told. The draw is the sampler's; what
        it has drawn goes to :meth:`accept`."""
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
        # Those of the tokens that are drawn.
        positions = self._rows("positions", num_reqs, num_nodes).flatten() + 1
        return Logits(
            values=values[: num_reqs * num_nodes],
            positions=positions,
            sampling=sampling,
            num_verified=num_nodes,
        )

    def accept(self, drawn: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """End the step: ``drawn`` [B * num_nodes] int64 are the target's own tokens, None where the forward has drawn
        them. The results, good until the next step is submitted: ``next_tokens`` [B, depth + 1], ``counts`` [B], how
        many of them are the step's, and ``num_bad`` [B], 1 where the draft could not be used."""
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
        """Of the tokens that :meth:`accept` has returned, those of all nodes being given."""
        assert self._outputs is not None and self._plans is not None
        if not self._plans.is_tree:
            return logprobs
        num_reqs, shape = self._num_reqs, self._plans.shape
        path = _rows_of(self._outputs.take("path", num_reqs), num_reqs, shape.num_tokens)
        first = torch.arange(num_reqs, device=path.device).unsqueeze(1) * shape.num_nodes
        return select_logprobs(logprobs, (first + path).flatten())

    def _fill(self, batch: DecodeBatch, views: Views) -> None:
        plan = ("plan_rows", "may_accept", "temperatures", "noise_scales", "seed_keys")
        self._num_reqs = len(batch.rows)
        self.arena.fill({name: views[name] for name in plan}, self._num_reqs)
        self._sampling.clear()
        self._composition = batch.composition

    def _rows(self, name: str, size: int, width: int) -> torch.Tensor:
        """``width`` rows of each of the first ``size`` requests, one after the other, [size, width]."""
        return _rows_of(self.arena[name], size, width)

    # --- graphs

    def capture(self, max_seq_len: int, show_progress: bool) -> None:
        """Capture every size for requests of up to ``max_seq_len`` tokens. Waits for the device."""
        self._capture_sizes(lambda pool, size: self._capture_size(pool, size, max_seq_len), show_progress)

    def _capture_size(self, pool: GraphPool, size: int, max_seq_len: int) -> Sequence[Graph]:
        """The arena is all padding meanwhile, so only the sink is touched."""
        graphs: list[Graph] = []
        for shape in reversed(self._shapes.values()):
            graphs += self._capture_shape(pool, size, shape, max_seq_len)
        return graphs

    def _capture_shape(
        self, pool: GraphPool, size: int, shape: StepShape, max_seq_len: int
    ) -> Sequence[Graph]:
        device, name = self._device, f"[{size}] of depth {shape.depth}"
        with device.forward.active():  # what a plan allocates and writes, FORWARD then reads
            plans = self._make_plans(size, shape, np.full(size, max_seq_len + shape.num_slots - 1, np.int64))
            self._verify_and_draw(plans)  # compiles and sets up what the first call does
            self._accept(plans)
        device.synchronize()
        verify = device.capture(f"verify{name}", pool, lambda: self._verify_and_draw(plans))
        accept = device.capture(f"accept{name}", pool, lambda: self._accept(plans))
        self._captured[size, shape.depth] = _Captured(plans, verify, accept)
        return verify, accept

    def _make_plans(self, size: int, shape: StepShape, max_lens: npt.NDArray[np.int64]) -> _Plans:
        """``max_lens`` [size] int64 bound the lengths with all rows of the step."""
        arena = self.arena
        target = self._attention, self._model.config.num_heads
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
            assert made is not None, "the backend was asked when it was chosen"
            return made

        topk, depth = self._topk, shape.depth
        is_tree = topk > 1 and depth > 0
        path_lens = arena["path_lens" if topk > 1 else "seq_lens"]
        if is_tree:
            counts = [topk * step for step in range(1, depth)]  # of nodes
            steps = [plan(topk, self._draft_lens, draft, count, "draft_ancestors") for count in counts]
        else:
            steps = [plan(1, self._draft_lens, draft)] * (depth - 1)
        return _Plans(
            size,
            shape,
            is_tree,
            verify=plan(shape.num_nodes, arena["seq_lens"], target, None, "ancestors" if is_tree else None),
            extend=[plan(depth + 1 + k, path_lens, draft) for k in range(self._num_layers)],
            steps=steps,
            two=None if self.reads_hidden else plan(2, arena["lens"], draft),
        )

    # --- the step

    def _begin(self, plans: _Plans) -> None:
        """Derive the rows that are verified; their ids are still to be proposed."""
        arena, size, shape = self.arena, plans.size, plans.shape
        begun = Begun(
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
            self._table_of_step(),  # by the page table of this moment (F5)
            self._req_pool.last_tokens,
            self._kv_pool.page_size,
            shape.depth,
            begun,
        )

    def _verify_and_draw(self, plans: _Plans) -> None:
        """The step as far as the target's own tokens, drawn as requests need it that want a temperature at most.
        Others' are drawn again by the Sampler, from the same logits."""
        logits = self._propose_and_verify(plans, self._logits)
        size, num_nodes = plans.size, plans.shape.num_nodes
        temperatures, scales, keys = self._draw_inputs(size)
        sample_tokens(
            logits,
            temperatures,
            scales,
            keys,
            self._rows("positions", size, num_nodes).flatten(),
            thresholds=None,
            rows=None,
            last_tokens=None,
            next_tokens=self._rows("drawn", size, num_nodes).flatten(),
            rows_each=num_nodes,
            ahead=1,
        )

    def _propose_and_verify(self, plans: _Plans, logits_out: torch.Tensor | None = None) -> torch.Tensor:
        """The drafts, and the target's logits of all rows, [size * num_nodes, vocab_size], in the first rows of
        ``logits_out`` if given."""
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
        return self._model.compute_logits(x, batch)

    def _propose(self, plans: _Plans) -> None:
        """The drafts, one forward after the other."""
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
        first = int(plans.two is not None)  # the row in which the draft's next forward lies
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
        """The logits of the first drafts: of what the step before has left of a draft that reads hidden states
        ``hidden`` [size, hidden_size], of one that reads none from its rows of the last two tokens."""
        if plans.two is None:
            return self._draft.logits(hidden)
        return self._compute_two(plans, plans.two, torch.arange(plans.size, device=hidden.device) * 2 + 1)

    def _keep(self, plans: _Plans, column: int, drawn: Pieces, following: NextRow | None = None) -> None:
        """The drafts in ``column`` are those ``drawn``, unless there is one that cannot be used."""
        size, vocab_size = plans.size, self._model.config.vocab_size
        input_ids = self._rows("input_ids", size, plans.shape.num_nodes)
        keep_draft(drawn, self.arena["is_bad"][:size], input_ids, column, vocab_size, following)

    def _propose_tree(self, plans: _Plans) -> None:
        """The tree of the best drafts. Of each step's frontier the draft computes ``topk`` rows of each request, which
        attend to their own ancestors among the rows of the steps before."""
        size, shape, arena, topk = plans.size, plans.shape, self.arena, self._topk
        rows, lens, is_bad = (arena[name][:size] for name in ("plan_rows", "lens", "is_bad"))
        hidden = self.state.hidden[rows]
        first = lens - int(self.reads_hidden)  # where the rows of the frontiers begin
        drafts, scores = self._best(self._first_logits(plans, hidden[:, 0]), size, lens)
        hidden = hidden.expand(size, topk, -1)
        candidates = self._more(None, drafts.unsqueeze(1), scores.unsqueeze(1), is_bad)
        number = torch.arange(topk, device=rows.device)
        masks = torch.zeros_like(drafts)
        frontiers = []
        for step in range(1, shape.depth):
            above = number.expand(size, topk) if step == 1 else candidates.frontier_rows
            nodes = number + (step - 1) * topk
            masks = masks.gather(1, above) | torch.ones_like(nodes) << nodes
            hidden = hidden.gather(1, above.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
            arena["draft_ancestors"][:size] = masks
            torch.add(first, topk * step, out=self._draft_lens[:size])
            slots = slots_at(
                self._req_pool.page_table, rows, first.unsqueeze(1) + nodes, self._kv_pool.page_size
            )
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
            # The root's row is the draft's number 0; rows of frontiers follow.
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
        """With the children [B, parents, topk] of the frontier, unless there is one that cannot be used."""
        drafts, scores, bad = check_draft(drafts, scores, self._model.config.vocab_size, is_bad)
        is_bad.copy_(bad)
        if before is None:
            return first_candidates(drafts[:, 0], scores[:, 0])
        return more_candidates(before, drafts, scores)

    def _compute_two(self, plans: _Plans, two: AttentionPlan, logits_index: torch.Tensor) -> torch.Tensor:
        """The rows of the last two tokens of a draft without hidden states; the logits of those of ``logits_index``.
        Where it has computed the first of the two already, that row goes to the sink: its page may be shared by now."""
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
        """Count the drafts that were drawn, advance the rows, and let the draft go on from the tokens drawn."""
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
                Kept(
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
        """Bring the rows that a draft without hidden states has computed for the path to their places. Returns whether
        it has not computed the last one [B] bool: that was in no frontier."""
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
        """The draft's rows of the drawn tokens, layer after layer where each has a turn, from the hidden states of the
        target's. Rows of tokens that do not count are written again by the next step.

        Layer k computes ``depth + 1 + k`` rows of each request from row ``lens - 1 - k`` on: from token ``lens`` on,
        and where the drawn tokens end from those that the layers before it propose.
        """
        size, arena, state, width = plans.size, self.arena, self.state, plans.shape.num_tokens
        by_turns = self._num_layers > 1
        rows, counts, lens = (arena[name][:size] for name in ("plan_rows", "counts", "lens"))
        num_nodes = plans.shape.num_nodes
        x, aux = self._hidden[: size * num_nodes], self._aux[: size * num_nodes]
        requests = torch.arange(size if by_turns or plans.is_tree else 0, device=rows.device)
        if plans.is_tree:
            nodes = (requests.unsqueeze(1) * num_nodes + self._rows("path", size, width)).flatten()
            x, aux = x[nodes], aux[nodes]
        hidden = self._draft.hidden_states_from(x, aux)
        ids, logits_index = tokens, requests[:0]
        if by_turns:
            before, last = state.hidden[rows], counts - 1  # of the step before
            ids = torch.cat((tokens, tokens.new_zeros(size, self._num_layers - 1)), dim=1)
        for layer, plan in enumerate(plans.extend):
            if layer > 0:
                previous = before[:, layer - 1 : layer]
                hidden = torch.cat((previous, hidden.view(size, width - 1, -1)), dim=1).flatten(0, 1)
            positions, slots = self._places(plans, layer, width)
            if by_turns:
                logits_index = requests * width + last + layer
            batch = self._batch(
                ids[:, :width].flatten(), positions.flatten(), slots.flatten(), plan, logits_index
            )
            logits, hidden = self._draft.forward(batch, hidden, layer)
            if by_turns:
                drafts = drawn_tokens(self._draw(logits, size, lens + counts, layer))
                state.drafts[rows, layer] = drafts
            if layer < state.hidden.shape[1]:
                keep_last_hidden(hidden, counts, rows, state.hidden[:, layer])
            if layer + 1 < self._num_layers:
                ids.scatter_(1, (counts + layer).unsqueeze(1), drafts.clamp(min=0).unsqueeze(1))
                width += 1

    def _places(self, plans: _Plans, layer: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and slots [size, width] of the rows that ``layer`` computes again: those of the verification where
        they are the same rows. In front of the first token they are the sink's, for nobody."""
        size = plans.size
        if layer == 0 and not plans.is_tree:
            return self._rows("positions", size, width), self._rows("out_slots", size, width)
        rows, lens = self.arena["plan_rows"][:size], self.arena["lens"][:size]
        positions = (lens - 1 - layer).unsqueeze(1) + torch.arange(width, device=rows.device)
        slots = slots_at(self._req_pool.page_table, rows, positions, self._kv_pool.page_size)
        return positions.clamp(min=0), slots

    def make_aux(self, num_tokens: int) -> AuxHiddenStates | None:
        """Where the target leaves what the draft reads of a prefill step's tokens; None if that is its last layer's
        output alone."""
        if not self._aux_layers:
            return None
        size = len(self._aux_layers) * self._model.config.hidden_size
        return AuxHiddenStates(self._aux_layers, self._aux.new_empty(num_tokens, size))

    def _draw_inputs(self, size: int) -> list[torch.Tensor]:
        """Temperatures, noise scales and seed keys of the first ``size`` requests, [size] each."""
        return [self.arena[name][:size] for name in ("temperatures", "noise_scales", "seed_keys")]

    def _draw(self, logits: torch.Tensor, size: int, positions: torch.Tensor, ahead: int) -> Pieces:
        """The draft's tokens at ``positions`` + ``ahead`` [B] int64, drawn with the noise that the target will draw
        with there."""
        temperatures, scales, keys = self._draw_inputs(size)
        return draw_draft(
            logits,
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
        """As :meth:`_draw`, the best ``topk`` of each row and their scores, for as many rows of each request."""
        num = len(logits) // size
        temperatures, scales, keys, positions = (
            values.unsqueeze(1).expand(size, num).flatten()
            for values in (*self._draw_inputs(size), positions)
        )
        return best_drafts(
            logits,
            self._draft.target_ids,
            self._model.config.vocab_size,
            temperatures,
            scales,
            keys,
            positions,
            self._topk,
        )

    # --- after prefill

    def extend_arrays(self, batch: ExtendBatch) -> Arrays:
        """What :meth:`extend` needs beside the step's own inputs: for each layer the tokens that its rows are computed
        from, as far as the prompts go; [layers * T] int64."""
        if not self.reads_hidden:
            return {}
        padding = np.zeros(self._num_layers, np.int64)
        texts = [np.concatenate((seq.token_ids, seq.following, padding)) for seq in batch.seqs]
        ids = [
            text[1 + layer : 1 + layer + len(seq.token_ids)]
            for layer in range(self._num_layers)
            for text, seq in zip(texts, batch.seqs, strict=True)
        ]
        return {"draft_ids": np.concatenate(ids).astype(np.int64)}

    def extend(
        self,
        forward_batch: ForwardBatch,
        x: torch.Tensor,
        views: Views,
        next_tokens: torch.Tensor,
        sampling: SamplingBatch | None,
    ) -> None:
        """The draft's rows of a prefill step: ``forward_batch`` is the target's, ``x`` [T, hidden_size] what it has
        left, and ``next_tokens`` [S] int64 what was drawn for the requests whose prompts are complete."""
        state, num_sampled, by_turns = self.state, len(next_tokens), self._num_layers > 1
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
        following = [next_tokens]  # what comes after the complete prompts
        for layer in range(self._num_layers):
            ids = ids_by_layer[layer].clone()
            for ahead, tokens in enumerate(following):
                # The row so many tokens in front of the prompt's last one, if the prompt is as long.
                behind = layer - ahead
                ids[torch.where(positions[ends] < behind, ends, ends - behind)] = tokens
            own = replace(
                forward_batch,
                input_ids=ids,
                logits_index=ends if by_turns else ends[:0],
                logits_out=None,
                aux_hidden=None,
                layer_ready=None,
            )
            logits, hidden = self._draft.forward(own, hidden, layer)
            if not num_sampled:
                continue
            if by_turns:
                assert sampling is not None
                pieces = draw_draft(
                    logits, self._draft.target_ids, self._model.config.vocab_size,
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
    """Those that only trees have: see ``DraftTree`` and ``Accepted``."""
    i64, width, path = torch.int64, (largest.num_nodes,), (largest.num_tokens,)
    return [
        ArenaField("parents", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("ancestors", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("draft_nodes", i64, Role.INPUT, pad=0, shape=width),  # the draft's row of each, 0: none
        ArenaField("draft_ancestors", i64, Role.INPUT, pad=0, shape=(topk,)),  # of its current forward
        ArenaField("path_lens", i64, Role.INPUT, pad=SINK_LEN),  # with all rows that a path may have
        ArenaField("path", i64, Role.OUTPUT, pad=0, shape=path),
        ArenaField("path_tokens", i64, Role.OUTPUT, pad=0, shape=path),
    ]


def _without_penalties(params: SamplingParams) -> SamplingParams:
    if not params.needs_penalties:
        return params
    return structs.replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
