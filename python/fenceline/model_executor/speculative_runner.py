"""SpeculativeRunner: decode steps that propose tokens with a draft model and verify them with the target.

One step is a chain on FORWARD, and nothing in it needs the host:

1. *draft*: from what the last step has left of each request, ``num_steps`` tokens, one after the other; a draft with a
   layer for each step has proposed them already;
2. *verify*: the target computes the request's last token and the drafted ones, ``num_steps + 1`` rows a request, in one
   forward;
3. *draw*: at each of these rows the token that the target itself draws there, with the noise of that position;
4. *accept*: drafts count as long as they are what was drawn. The tokens drawn up to the first that differs are the
   step's: 1 to ``num_steps + 1``. They are those of plain decoding, whatever the draft proposes;
5. *draft-extend*: the draft computes its rows of the accepted tokens from the target's hidden states. With a layer for
   each step, layer k computes row i from token i + 1 + k. So its last k rows stand for tokens that it has proposed, and
   are computed again when the tokens are known; nobody else gets a page with such rows (``DraftConfig.lookahead``).

Drafts are chains, or trees where ``topk`` is above 1 (``speculative/tree.py``). The nodes of a tree lie in slots one
after the other, from that of the last token on, and so do, in the draft's own layers, the rows that it computes while
it proposes. The rows of an accepted path are moved to their tokens' slots in the step that accepts them.

Lengths advance on the device (``SpeculativeState``); the host learns them one step later and only knows bounds.
Rejected tokens leave KV in slots behind a request's length. They are written again before anybody reads them, and they
are never shared, since only committed tokens are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from fenceline.config.draft_config import num_step_slots
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
    table_of_step,
)
from fenceline.memory_order.edges import KEPT_HIDDEN, SAME_COMPOSITION, SINK, TOTAL_BUCKETS
from fenceline.model_executor.decode_runner import Logits, plan_arrays
from fenceline.model_executor.graph_runner import GraphRunner
from fenceline.model_executor.step import DecodeBatch, ExtendBatch
from fenceline.models.decoder import CausalLM
from fenceline.models.draft import DraftModel
from fenceline.sampling.logprobs import OutputLogprobs, select_logprobs
from fenceline.sampling.sampling_batch import ReqSampling, SamplingBatch, sampling_arrays
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.speculative.accept import accept, simulate_drafts
from fenceline.speculative.draws import best_drafts, draw_draft
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

_SINK_LEN = 2  # of the sink's row: a last token and one before it
_VERIFY = "verify_"  # begins the names of the arrays that the draws of all rows of a step read


class SpeculativeState:
    """What the device keeps of each request between two steps, by row; row 0 is the sink that padding names.

    ``lens`` [num_rows] int64: tokens of the request, the last one of which has no KV yet. For a draft that reads hidden
    states, ``drafts`` [num_rows, topk] int64 are its first proposals, ``scores`` [num_rows, topk] float32 their
    logarithms of probabilities, and ``hidden`` [num_rows, 1, hidden_size] what it continues from; with n layers for as
    many steps, ``drafts`` [num_rows, n] are all its proposals, and ``hidden`` [num_rows, n - 1, hidden_size] at k is
    what layer k has left of row ``lens - 2 - k``, the last one that stands for known tokens: layer k + 1 goes on from
    there. For one that reads none, ``previous`` [num_rows] int64 is the token in front of the last one, and
    ``is_behind`` [num_rows] bool says whether the draft has not computed that one yet. All of it is written on FORWARD
    alone, in program order with the steps that read it.
    """

    def __init__(
        self, device: Device, num_rows: int, num_layers: int, topk: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        where, num_hidden = device.torch_device, max(num_layers - 1, 1)
        self.lens = torch.full((num_rows,), _SINK_LEN, dtype=torch.int64, device=where)
        self.drafts = torch.zeros(num_rows, max(num_layers, topk), dtype=torch.int64, device=where)
        self.scores = torch.zeros(num_rows, topk, device=where)
        self.previous = torch.zeros(num_rows, dtype=torch.int64, device=where)
        self.is_behind = torch.zeros(num_rows, dtype=torch.bool, device=where)
        self.hidden = torch.zeros(num_rows, num_hidden, hidden_size, dtype=dtype, device=where)
        for name in ("lens", "drafts", "scores", "previous", "is_behind", "hidden"):
            tensor: torch.Tensor = getattr(self, name)
            device.name_memory(tensor, f"speculative.{name}", max(tensor[0].nbytes, 1))


@dataclass(frozen=True, slots=True)
class _Plans:
    """Attention of a step of ``size`` requests."""

    size: int
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
    """One device's speculative decode steps for up to ``max_batch`` requests, and the graphs of some batch sizes: one
    as far as the target's logits, one from the draw on. Everything is submitted to FORWARD, which must be current in
    all methods but :meth:`arrays`."""

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
        num_steps: int,
        aux_layers: tuple[int, ...] = (),
        sizes: Sequence[int] = (),
        padding: bool = True,
        simulated_accept_length: float | None = None,
        topk: int = 1,
        num_nodes: int | None = None,
    ) -> None:
        """``num_steps``: tokens that the draft proposes in a step, one after the other. ``topk``: how many in each
        place; of them and the last token ``num_nodes`` are verified, and for chains, ``topk`` 1, all. ``aux_layers``:
        see ``DraftConfig``. ``sizes`` as of ``DecodeRunner``. ``simulated_accept_length``: tokens of a step on average,
        whatever the draft proposes."""
        super().__init__(device, "speculative decode", "requests", sizes, padding)
        self.num_rows_per_req = num_steps + 1 if num_nodes is None else num_nodes
        self.reads_hidden = draft.hidden_size > 0
        self._model = model
        self._draft = draft
        self._kv_pool = kv_pool
        self._req_pool = req_pool
        self._attention = attention
        self._draft_attention = draft_attention
        self._num_steps = num_steps
        self._topk = topk
        self._num_slots = num_step_slots(num_steps, topk, self.num_rows_per_req, self.reads_hidden)
        self._aux_layers = aux_layers
        self._simulated_accept_length = simulated_accept_length
        self._captured: dict[int, _Captured] = {}
        self._composition: int | None = None
        self._same = comparison(device, SAME_COMPOSITION)
        self._table_of_step = table_of_step(device, req_pool.page_table)
        self._num_reqs = 0
        self._sampling: SamplingBatch | None = None
        self._plans: _Plans | None = None  # of the step whose draw is awaited
        self._replayed: _Captured | None = None  # and its graphs, if it runs in them
        self._outputs: ArenaOutputs | None = None  # of the latest step
        dtype = model.context.dtype
        self._num_layers = draft.max_steps or 1  # with a turn of their own
        self.state = SpeculativeState(
            device, req_pool.num_rows, self._num_layers, topk, draft.hidden_size, dtype
        )
        width = (self.num_rows_per_req,)
        i64, f32 = torch.int64, torch.float32
        fields = [
            ArenaField("plan_rows", i64, Role.PLAN, pad=SINK),
            ArenaField("may_accept", torch.bool, Role.PLAN, pad=False),  # whether drafts may count
            ArenaField("temperatures", f32, Role.PLAN, pad=1.0),
            ArenaField("noise_scales", f32, Role.PLAN, pad=0.0),
            ArenaField("seed_keys", i64, Role.PLAN, pad=0),
            ArenaField("lens", i64, Role.INPUT, pad=_SINK_LEN),  # as the step begins
            ArenaField("seq_lens", i64, Role.INPUT, pad=_SINK_LEN),  # with all rows of the step
            ArenaField("draft_lens", i64, Role.INPUT, pad=_SINK_LEN),  # of the draft's current forward
            ArenaField("is_bad", torch.bool, Role.INPUT, pad=False),  # drafts that are not to be used
            # Of the rows that the target verifies: the last token and the drafts.
            ArenaField("input_ids", i64, Role.INPUT, pad=0, shape=width),
            ArenaField("positions", i64, Role.INPUT, pad=0, shape=width),
            ArenaField("out_slots", i64, Role.INPUT, pad=SINK, shape=width),
            ArenaField("drawn", i64, Role.INPUT, pad=0, shape=width),  # the target's own tokens there
            ArenaField("counts", i64, Role.OUTPUT, pad=1),  # tokens of the step
            ArenaField("num_bad", i64, Role.OUTPUT, pad=0),  # 1 where the draft could not be used
        ]
        if topk > 1:
            fields += _tree_fields(num_steps, topk, self.num_rows_per_req)
        self.arena = Arena(device, "speculative", max_batch, fields)
        # Of the draft's current forward; a plan of its own for each, though they share this field (F9).
        self._draft_lens = self.arena.derived("draft_lens", "lens")
        self._target_rows: KVMover | None = None  # of trees
        self._draft_rows: KVMover | None = None  # of trees whose draft reads no hidden states
        if topk > 1:
            parts = [tensor for _, tensor in kv_pool.tensors()]
            num_target_parts = len(kv_pool.layout.parts_of(range(model.num_layers)))
            self._target_rows = KVMover(parts[:num_target_parts])
            if not self.reads_hidden:
                self._draft_rows = KVMover(parts[num_target_parts:])
        self._zeros = torch.zeros(max_batch, 1, device=device.torch_device)
        # What the target leaves of the rows that it verifies: hidden states, and those of further layers.
        num_rows, config = max_batch * self.num_rows_per_req, model.config
        where = device.torch_device
        self._hidden = torch.zeros(num_rows, config.hidden_size, dtype=dtype, device=where)
        self._aux = torch.zeros(num_rows, len(aux_layers) * config.hidden_size, dtype=dtype, device=where)
        self._logits = torch.zeros(
            (sizes[-1] if sizes else 0) * self.num_rows_per_req, config.vocab_size, dtype=dtype, device=where
        )
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
        """What has to be uploaded before :meth:`forward`: nothing if the requests are those of the step before."""
        if self._composition is not None and self._same(self._composition, batch.composition):
            return {}
        plan = plan_arrays(batch, sampling_arrays(batch.sampling))
        del plan["plan_seq_lens"]  # lengths are the device's
        every_row = sampling_arrays(self._of_every_row(batch.sampling))
        # Penalties and masks follow from all tokens in front, drafts included, which counts and grammars do not hold.
        plan["may_accept"] = np.array(
            [not (req.params.needs_penalties or req.constrained) for req in batch.sampling]
        )
        return plan | {f"{_VERIFY}{name}": array for name, array in every_row.items()}

    def _of_every_row(self, reqs: Sequence[ReqSampling]) -> list[ReqSampling]:
        """What the draws of all rows need, row after row. Only a request's first row is penalised and counted."""
        rows = []
        for req in reqs:
            further = replace(req, params=_without_penalties(req.params))
            rows += [req] + [further] * (self.num_rows_per_req - 1)
        return rows

    def forward(self, batch: DecodeBatch, views: Views) -> Logits:
        """Submit the step as far as verification. ``views``: what ``arrays`` has told. The draw is the sampler's; what
        it has drawn goes to :meth:`accept`."""
        if "plan_rows" in views:
            self._fill(batch, views)
        assert self._composition is not None, "the first batch fills the arena"
        self._device.begin_fill([self._hidden], KEPT_HIDDEN)
        num_reqs = self._num_reqs
        size = self.graph_size(num_reqs)
        captured = None if size is None else self._captured[size]
        if captured is None:
            self._plans = self._make_plans(num_reqs, batch.seq_lens)
            values = self._propose_and_verify(self._plans)
        else:
            self._device.begin_fill([self._logits], TOTAL_BUCKETS)
            self._plans = captured.plans
            captured.verify.replay()
            self.stats.count_replay(captured.plans.size)
            values = self._logits
        self._replayed = captured
        assert self._sampling is not None
        num_rows = num_reqs * self.num_rows_per_req
        positions = self.arena["positions"][:num_reqs].flatten() + 1  # those of the tokens that are drawn
        return Logits(
            values=values[:num_rows], positions=positions, sampling=self._sampling, is_verified=True
        )

    def accept(self, drawn: torch.Tensor) -> dict[str, torch.Tensor]:
        """End the step: ``drawn`` [B * num_rows_per_req] int64 are the target's own tokens. The results, good until the
        next step is submitted: ``next_tokens`` [B, num_steps + 1], ``counts`` [B], how many of them are the step's,
        and ``num_bad`` [B], 1 where the draft could not be used."""
        num_reqs, arena = self._num_reqs, self.arena
        assert self._plans is not None
        tokens = arena["drawn"][:num_reqs].copy_(drawn.view(num_reqs, self.num_rows_per_req))
        outputs = self._outputs = arena.begin_replay()
        if self._replayed is None:
            self._accept(self._plans)
        else:
            self._replayed.accept.replay()
        if self._topk > 1:
            tokens = outputs.take("path_tokens", num_reqs)
        return {"next_tokens": tokens} | {
            name: outputs.take(name, num_reqs) for name in ("counts", "num_bad")
        }

    def logprobs_of_path(self, logprobs: OutputLogprobs) -> OutputLogprobs:
        """Of the tokens that :meth:`accept` has returned, those of all nodes being given."""
        if self._topk == 1:
            return logprobs
        assert self._outputs is not None
        path = self._outputs.take("path", self._num_reqs)
        first = torch.arange(self._num_reqs, device=path.device).unsqueeze(1) * self.num_rows_per_req
        return select_logprobs(logprobs, (first + path).flatten())

    def _fill(self, batch: DecodeBatch, views: Views) -> None:
        plan = ("plan_rows", "may_accept", "temperatures", "noise_scales", "seed_keys")
        self._num_reqs = len(batch.rows)
        self.arena.fill({name: views[name] for name in plan}, self._num_reqs)
        own = {name.removeprefix(_VERIFY): view for name, view in views.items() if name.startswith(_VERIFY)}
        self._sampling = SamplingBatch.from_views(self._of_every_row(batch.sampling), own)
        self._composition = batch.composition

    # --- graphs

    def capture(self, max_seq_len: int, show_progress: bool) -> None:
        """Capture every size for requests of up to ``max_seq_len`` tokens. Waits for the device."""
        self._capture_sizes(lambda pool, size: self._capture_size(pool, size, max_seq_len), show_progress)

    def _capture_size(self, pool: GraphPool, size: int, max_seq_len: int) -> Sequence[Graph]:
        """The arena is all padding meanwhile, so only the sink is touched."""
        device = self._device
        with device.forward.active():  # what a plan allocates and writes, FORWARD then reads
            plans = self._make_plans(size, np.full(size, max_seq_len + self._num_slots - 1, np.int64))
            self._propose_and_verify(plans, self._logits)  # compiles and sets up what the first call does
            self._accept(plans)
        device.synchronize()

        def propose_and_verify() -> None:
            self._propose_and_verify(plans, self._logits)

        verify = device.capture(f"verify[{size}]", pool, propose_and_verify)
        accept = device.capture(f"accept[{size}]", pool, lambda: self._accept(plans))
        self._captured[size] = _Captured(plans, verify, accept)
        return verify, accept

    def _make_plans(self, size: int, max_lens: npt.NDArray[np.int64]) -> _Plans:
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
            above = None if ancestors is None else arena[ancestors][:size]
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

        topk, is_tree = self._topk, self._topk > 1
        path_lens = arena["path_lens" if is_tree else "seq_lens"]
        if is_tree:
            counts = [topk * step for step in range(1, self._num_steps)]  # of nodes
            steps = [plan(topk, self._draft_lens, draft, count, "draft_ancestors") for count in counts]
        else:
            steps = [plan(1, self._draft_lens, draft)] * (self._num_steps - 1)
        return _Plans(
            size,
            verify=plan(
                self.num_rows_per_req, arena["seq_lens"], target, None, "ancestors" if is_tree else None
            ),
            extend=[plan(self._num_steps + 1 + k, path_lens, draft) for k in range(self._num_layers)],
            steps=steps,
            two=None if self.reads_hidden else plan(2, arena["lens"], draft),
        )

    # --- the step

    def _begin(self, size: int) -> None:
        """Derive the rows that are verified; their ids are still to be proposed."""
        arena, state = self.arena, self.state
        rows, lens = arena["plan_rows"][:size], arena["lens"][:size]
        lens.copy_(state.lens[rows])
        arena["seq_lens"][:size] = lens - 1 + self.num_rows_per_req
        if self._topk > 1:
            arena["path_lens"][:size] = lens + self._num_steps
        positions = arena["positions"][:size]
        torch.add(
            (lens - 1).unsqueeze(1), torch.arange(self.num_rows_per_req, device=lens.device), out=positions
        )
        slots = node_slots(
            self._table_of_step(), rows, lens - 1, self.num_rows_per_req, self._kv_pool.page_size
        )
        arena["out_slots"][:size] = slots.view_as(positions)  # by the page table of this moment (F5)
        arena["input_ids"][:size, 0] = self._req_pool.last_tokens[rows]
        arena["is_bad"][:size] = False

    def _propose_and_verify(self, plans: _Plans, logits_out: torch.Tensor | None = None) -> torch.Tensor:
        """The drafts, and the target's logits of all rows, [size * num_rows_per_req, vocab_size], in the first rows of
        ``logits_out`` if given."""
        size, arena = plans.size, self.arena
        self._begin(size)
        self._propose(plans)
        num_rows = size * self.num_rows_per_req
        aux = None
        if self._aux_layers:
            aux = AuxHiddenStates(self._aux_layers, self._aux[:num_rows])
        ids, positions, slots = (arena[n][:size].flatten() for n in ("input_ids", "positions", "out_slots"))
        batch = self._batch(ids, positions, slots, plans.verify, aux=aux)
        if logits_out is not None:
            batch = replace(batch, logits_out=logits_out[:num_rows])
        x = self._model.hidden_states(batch)
        keep_hidden(self._device, self._hidden[:num_rows], x)
        return self._model.compute_logits(x, batch)

    def _propose(self, plans: _Plans) -> None:
        """The drafts, one forward after the other."""
        if self._topk > 1:
            self._propose_tree(plans)
            return
        size, arena, state = plans.size, self.arena, self.state
        rows, lens, draft_lens = arena["plan_rows"][:size], arena["lens"][:size], self._draft_lens[:size]
        ids, positions, slots = (arena[name][:size] for name in ("input_ids", "positions", "out_slots"))
        if self._num_layers > 1:
            for step in range(self._num_steps):
                self._keep(size, step + 1, state.drafts[rows, step])
            return
        hidden = state.hidden[rows, 0]
        if plans.two is None:
            self._keep(size, 1, state.drafts[rows, 0])
            first = 0  # the row in which the draft's next forward lies
        else:
            self._keep(size, 1, self._draw(self._logits_of_two(plans), size, lens))
            first = 1
        for step in range(1, self._num_steps):
            at = step - 1 + first
            torch.add(lens, at, out=draft_lens)
            batch = self._batch(ids[:, step], positions[:, at], slots[:, at], plans.steps[step - 1])
            logits, hidden = self._draft.forward(batch, hidden)
            self._keep(size, step + 1, self._draw(logits, size, lens + step))

    def _keep(self, size: int, column: int, tokens: torch.Tensor) -> None:
        """``tokens`` [B] are the drafts in ``column``, unless there is one that cannot be used."""
        is_bad = self.arena["is_bad"][:size]
        vocab_size = self._model.config.vocab_size
        usable, _, bad = check_draft(tokens.unsqueeze(1), self._zeros[:size], vocab_size, is_bad)
        self.arena["input_ids"][:size, column] = usable.squeeze(1)
        is_bad.copy_(bad)

    def _propose_tree(self, plans: _Plans) -> None:
        """The tree of the best drafts. Of each step's frontier the draft computes ``topk`` rows of each request, which
        attend to their own ancestors among the rows of the steps before."""
        size, arena, state, topk = plans.size, self.arena, self.state, self._topk
        rows, lens, is_bad = (arena[name][:size] for name in ("plan_rows", "lens", "is_bad"))
        hidden = state.hidden[rows].expand(size, topk, -1)
        if plans.two is None:
            first, drafts, scores = lens - 1, state.drafts[rows], state.scores[rows]
        else:
            first = lens  # where the rows of the frontiers begin
            drafts, scores = self._best(self._logits_of_two(plans), size, lens)
        candidates = self._more(None, drafts.unsqueeze(1), scores.unsqueeze(1), is_bad)
        number = torch.arange(topk, device=rows.device)
        masks = torch.zeros_like(drafts)
        frontiers = []
        for step in range(1, self._num_steps):
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
        tree = build_tree(arena["input_ids"][:size, 0].clone(), lens - 1, candidates, self.num_rows_per_req)
        assert tree.parents is not None and tree.ancestors is not None and tree.chosen is not None
        for name, values in (
            ("input_ids", tree.token_ids),
            ("positions", tree.positions),
            ("parents", tree.parents),
            ("ancestors", tree.ancestors),
        ):
            arena[name][:size] = values
        if frontiers and not self.reads_hidden:
            # The root's row is the draft's number 0; rows of frontiers follow.
            computed = torch.cat(frontiers, 1)
            numbers = torch.arange(1, computed.shape[1] + 1, device=rows.device).expand_as(computed)
            by_candidate = torch.zeros_like(candidates.token_ids).scatter_(1, computed, numbers)
            arena["draft_nodes"][:size, 1:] = by_candidate.gather(1, tree.chosen)

    def _more(
        self, before: Candidates | None, drafts: torch.Tensor, scores: torch.Tensor, is_bad: torch.Tensor
    ) -> Candidates:
        """With the children [B, parents, topk] of the frontier, unless there is one that cannot be used."""
        drafts, scores, bad = check_draft(drafts, scores, self._model.config.vocab_size, is_bad)
        is_bad.copy_(bad)
        if before is None:
            return first_candidates(drafts[:, 0], scores[:, 0])
        return more_candidates(before, drafts, scores)

    def _logits_of_two(self, plans: _Plans) -> torch.Tensor:
        """The first logits of a draft without hidden states, from its rows of the last two tokens. Where it has
        computed the first of them already, that row goes to the sink: its page may be shared by now."""
        size, arena, state = plans.size, self.arena, self.state
        rows, lens = arena["plan_rows"][:size], arena["lens"][:size]
        ids = torch.stack((state.previous[rows], arena["input_ids"][:size, 0]), dim=1)
        positions = torch.stack((lens - 2, lens - 1), dim=1)
        slots = node_slots(self._req_pool.page_table, rows, lens - 2, 2, self._kv_pool.page_size).view(-1, 2)
        slots[:, 0] *= state.is_behind[rows]
        last = torch.arange(size, device=ids.device) * 2 + 1
        assert plans.two is not None
        batch = self._batch(ids.flatten(), positions.flatten(), slots.flatten(), plans.two, last)
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
        size, arena, state = plans.size, self.arena, self.state
        rows, lens = arena["plan_rows"][:size], arena["lens"][:size]
        ids, tokens = arena["input_ids"][:size], arena["drawn"][:size]
        is_bad, may_accept = arena["is_bad"][:size], arena["may_accept"][:size]
        parents = arena["parents"][:size] if self._topk > 1 else None
        drafts = DraftTree(ids, arena["positions"][:size], parents, None, is_bad | ~may_accept)
        if self._simulated_accept_length is not None:
            drafts = simulate_drafts(drafts, tokens, rows, self._simulated_accept_length)
        accepted = accept(drafts, tokens, self._num_steps)
        counts = arena["counts"][:size].copy_(accepted.counts)
        arena["num_bad"][:size] = is_bad
        last, new_lens = counts.unsqueeze(1) - 1, lens + counts
        if self._target_rows is not None:
            tokens = arena["path_tokens"][:size].copy_(accepted.token_ids)
            path = arena["path"][:size].copy_(accepted.path)
            self._target_rows.move(arena["out_slots"][:size].flatten(), path, counts)
        self._req_pool.last_tokens[rows] = accepted.last_tokens
        state.lens[rows] = torch.where(rows == 0, _SINK_LEN, new_lens)
        if self.reads_hidden:
            self._extend_draft(plans, tokens, new_lens)
            return
        state.previous[rows] = drafts.token_ids.gather(1, accepted.path.gather(1, last)).squeeze(1)
        if self._draft_rows is not None:
            state.is_behind[rows] = self._move_draft(self._draft_rows, size)
        else:
            state.is_behind[rows] = counts == self.num_rows_per_req

    def _move_draft(self, mover: KVMover, size: int) -> torch.Tensor:
        """Bring the rows that a draft without hidden states has computed for the path to their places. Returns whether
        it has not computed the last one [B] bool: that was in no frontier."""
        arena, num_frontiers = self.arena, self._num_steps - 1
        rows, lens, counts, path = (arena[name][:size] for name in ("plan_rows", "lens", "counts", "path"))
        nodes = arena["draft_nodes"][:size].gather(1, path)
        is_behind = (counts > 1) & (nodes.gather(1, counts.unsqueeze(1) - 1).squeeze(1) == 0)
        if num_frontiers:
            num_rows = 1 + num_frontiers * self._topk
            slots = node_slots(self._req_pool.page_table, rows, lens - 1, num_rows, self._kv_pool.page_size)
            mover.move(slots, nodes, counts - is_behind.long())
        return is_behind

    def _extend_draft(self, plans: _Plans, tokens: torch.Tensor, new_lens: torch.Tensor) -> None:
        """The draft's rows of the drawn tokens, layer after layer where each has a turn, from the hidden states of the
        target's. Rows of tokens that do not count are written again by the next step.

        Layer k computes ``num_steps + 1 + k`` rows of each request from row ``lens - 1 - k`` on: from token ``lens``
        on, and where the drawn tokens end from those that the layers before it propose.
        """
        size, arena, state, width = plans.size, self.arena, self.state, self._num_steps + 1
        rows, counts, lens = (arena[name][:size] for name in ("plan_rows", "counts", "lens"))
        before = state.hidden[rows]  # of the step before
        requests, last = torch.arange(size, device=rows.device), counts - 1
        num_rows = size * self.num_rows_per_req
        x, aux = self._hidden[:num_rows], self._aux[:num_rows]
        if self._topk > 1:
            nodes = (requests.unsqueeze(1) * self.num_rows_per_req + arena["path"][:size]).flatten()
            x, aux = x[nodes], aux[nodes]
        hidden = self._draft.hidden_states_from(x, aux)
        ids = torch.cat((tokens, tokens.new_zeros(size, self._num_layers - 1)), dim=1)
        for layer, plan in enumerate(plans.extend):
            if layer > 0:
                previous = before[:, layer - 1 : layer]
                hidden = torch.cat((previous, hidden.view(size, width - 1, -1)), dim=1).flatten(0, 1)
            positions = (lens - 1 - layer).unsqueeze(1) + torch.arange(width, device=rows.device)
            slots = slots_at(self._req_pool.page_table, rows, positions, self._kv_pool.page_size)
            batch = self._batch(
                ids[:, :width].flatten(),
                positions.clamp(min=0).flatten(),  # in front of the first token: in the sink, for nobody
                slots.flatten(),
                plan,
                requests * width + last + layer,
            )
            logits, hidden = self._draft.forward(batch, hidden, layer)
            if self._topk > 1:
                state.drafts[rows], state.scores[rows] = self._best(logits, size, new_lens)
            else:
                drafts = self._draw(logits, size, new_lens + layer)
                state.drafts[rows, layer] = drafts
            if layer < state.hidden.shape[1]:
                state.hidden[rows, layer] = hidden.view(size, width, -1)[requests, last]
            if layer + 1 < self._num_layers:
                ids.scatter_(1, (counts + layer).unsqueeze(1), drafts.clamp(min=0).unsqueeze(1))
                width += 1

    def make_aux(self, num_tokens: int) -> AuxHiddenStates | None:
        """Where the target leaves what the draft reads of a prefill step's tokens; None if that is its last layer's
        output alone."""
        if not self._aux_layers:
            return None
        size = len(self._aux_layers) * self._model.config.hidden_size
        return AuxHiddenStates(self._aux_layers, self._aux.new_empty(num_tokens, size))

    def _draw(self, logits: torch.Tensor, size: int, positions: torch.Tensor) -> torch.Tensor:
        """The draft's tokens at ``positions`` [B] int64, drawn with the noise that the target will draw with there."""
        arena = self.arena
        temperatures, scales, keys = (
            arena[name][:size] for name in ("temperatures", "noise_scales", "seed_keys")
        )
        return draw_draft(
            logits,
            self._draft.target_ids,
            self._model.config.vocab_size,
            temperatures,
            scales,
            keys,
            positions,
        )

    def _best(
        self, logits: torch.Tensor, size: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`_draw`, the best ``topk`` of each row and their scores, for as many rows of each request."""
        num = len(logits) // size
        temperatures, scales, keys, positions = (
            values.unsqueeze(1).expand(size, num).flatten()
            for values in (
                *(self.arena[name][:size] for name in ("temperatures", "noise_scales", "seed_keys")),
                positions,
            )
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
        state, num_sampled = self.state, len(next_tokens)
        assert forward_batch.logits_index is not None
        ends = forward_batch.logits_index[:num_sampled]  # the last token of each complete prompt
        rows, lens = views["sample_rows"], views["sample_positions"] + 1
        if not self.reads_hidden:
            self._draft.forward(replace(forward_batch, logits_index=ends), state.hidden[:0, 0])
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
                logits_index=ends,
                logits_out=None,
                aux_hidden=None,
                layer_ready=None,
            )
            logits, hidden = self._draft.forward(own, hidden, layer)
            if not num_sampled:
                continue
            assert sampling is not None
            given = (
                logits, self._draft.target_ids, self._model.config.vocab_size,
                sampling.temperatures, sampling.noise_scales, sampling.seed_keys, lens + layer,
            )  # fmt: skip
            if self._topk > 1:
                state.drafts[rows], state.scores[rows] = best_drafts(*given, self._topk)
            else:
                state.drafts[rows, layer] = draw_draft(*given)
            drafts = state.drafts[rows, layer]
            if layer < state.hidden.shape[1]:
                state.hidden[rows, layer] = hidden[torch.where(positions[ends] < layer, ends, ends - layer)]
            following.append(drafts.clamp(min=0))
        if num_sampled:
            state.lens[rows] = lens


def _tree_fields(num_steps: int, topk: int, num_nodes: int) -> list[ArenaField]:
    """Those that only trees have: see ``DraftTree`` and ``Accepted``."""
    i64, width, path = torch.int64, (num_nodes,), (num_steps + 1,)
    return [
        ArenaField("parents", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("ancestors", i64, Role.INPUT, pad=0, shape=width),
        ArenaField("draft_nodes", i64, Role.INPUT, pad=0, shape=width),  # the draft's row of each, 0: none
        ArenaField("draft_ancestors", i64, Role.INPUT, pad=0, shape=(topk,)),  # of its current forward
        ArenaField("path_lens", i64, Role.INPUT, pad=_SINK_LEN),  # with all rows that a path may have
        ArenaField("path", i64, Role.OUTPUT, pad=0, shape=path),
        ArenaField("path_tokens", i64, Role.OUTPUT, pad=0, shape=path),
    ]


def _without_penalties(params: SamplingParams) -> SamplingParams:
    if not params.needs_penalties:
        return params
    return structs.replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
