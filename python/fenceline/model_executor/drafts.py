"""Kinds of drafts: how each computes its next token, and how its KV and its state follow the accepted tokens.

* One that reads hidden states (:class:`HiddenDraft`) goes on from the target's. After a step it computes its rows for
  the accepted tokens from the hidden states of the verification (*draft-extend*).
* One with a layer for each step (:class:`LayerDraft`) has proposed all its tokens at the end of the step before. Layer
  k computes row i from token i + 1 + k. So its last k rows are computed from tokens that are only proposed. They are
  computed again when the tokens are known, and no page with such rows is shared (``DraftConfig.lookahead``).
* A whole model (:class:`WholeDraft`) reads no hidden states. It computes its rows of the tokens while it proposes, and
  the last of them, if all were accepted, in the next step.
* No model (:class:`LookedUpDraft`): proposed is what followed a request's last tokens where they occurred before.

All methods that compute submit to FORWARD, which must be current. They may be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fenceline.config.draft_config import StepShape
from fenceline.layers.forward_batch import SINK_ROW, AttentionPlan, AuxHiddenStates, ForwardBatch, ForwardMode
from fenceline.layers.kernels.speculative_operands import SINK_LEN, NextRow, Pieces
from fenceline.layers.linear import VocabParallelEmbedding
from fenceline.mem_cache.kv_pool import KVPool, ReqPool
from fenceline.memory_order import Arena, Device, node_moves, tokens_to_keep
from fenceline.model_executor.step import StepBatch, concatenated
from fenceline.models.decoder import CausalLM
from fenceline.models.draft import DraftModel
from fenceline.sampling.sampling_batch import SamplingBatch
from fenceline.speculative.draws import best_drafts, draw_draft, drawn_tokens
from fenceline.speculative.kv_rows import KVMover, node_slots
from fenceline.speculative.step_kernels import keep_draft, keep_last_hidden, keep_proposal, place_rows
from fenceline.speculative.token_lookup import keep_tokens, look_up_drafts
from fenceline.speculative.tree import Candidates

Arrays = dict[str, npt.NDArray[np.generic]]
I64 = npt.NDArray[np.int64]
Tensor = torch.Tensor
Move = Callable[[Tensor, Tensor, Tensor], None]  # see KVMover.move

_PLACES = ("positions", "out_slots")  # of the rows that are verified


class SpeculativeState:
    """The state of each request that the device keeps between two steps, by row. Row 0 is the sink, the row of padding.

    ``lens`` [num_rows] int64: the number of tokens of the request, the last of which has no KV yet. The other tensors
    depend on the kind of draft:

    * A draft that reads hidden states: ``hidden`` [num_rows, 1, hidden_size] is the hidden state that it goes on from.
    * One with n layers for as many steps: ``drafts`` [num_rows, n] int64 are all its proposals, and ``hidden``
      [num_rows, n - 1, hidden_size] at k is the hidden state of layer k at row ``lens - 2 - k``, the last row that is
      computed from known tokens. Layer k + 1 goes on from there.
    * ``absorbed`` [num_rows] int64, of a target with recurrent layers: after how many tokens the row's slot carries
      their state. It stays behind: a step absorbs no token that it verifies.
    * A whole model: ``previous`` [num_rows] int64 is the token before the last one, and ``is_behind`` [num_rows] bool
      says whether the draft has not computed that token yet.

    Everything is written on FORWARD only, in program order with the steps that read it.
    """

    def __init__(self, device: Device, num_rows: int, num_layers: int, hidden_size: int, dtype: torch.dtype) -> None:
        where, num_hidden = device.torch_device, max(num_layers - 1, 1)
        self.lens = torch.full((num_rows,), SINK_LEN, dtype=torch.int64, device=where)
        self.absorbed = torch.zeros(num_rows, dtype=torch.int64, device=where)
        self.drafts = torch.zeros(num_rows, num_layers, dtype=torch.int64, device=where)
        self.previous = torch.zeros(num_rows, dtype=torch.int64, device=where)
        self.is_behind = torch.zeros(num_rows, dtype=torch.bool, device=where)
        self.hidden = torch.zeros(num_rows, num_hidden, hidden_size, dtype=dtype, device=where)
        for name in ("lens", "absorbed", "drafts", "previous", "is_behind", "hidden"):
            device.name_rows(getattr(self, name), f"draft_state.{name}")


@dataclass(frozen=True, slots=True)
class Extended:
    """What a draft computes its rows of a prefill step from: the target's batch and hidden states [T, hidden_size], and
    the step's uploaded arrays."""

    batch: ForwardBatch
    hidden: Tensor
    views: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepPlans:
    """The attention plans of a step of ``size`` requests, none of which may be longer than ``max_len``, all rows of the
    step included. ``verify``: of the target, for all rows that are verified. ``steps``: of the draft while it proposes.
    ``extend``: of the draft's rows by which it follows the target, for each of its layers that runs a step."""

    size: int
    shape: StepShape
    max_len: int
    verify: AttentionPlan
    steps: Sequence[AttentionPlan]
    extend: Sequence[AttentionPlan]


class Plan(Protocol):
    """Plans attention of ``num_queries`` rows of each request of a step, whose lengths [B] are ``seq_lens``.
    ``num_nodes`` and ``ancestors``, which names a field of the arena: see ``QueryTree``; chains have none."""

    def __call__(
        self, num_queries: int, seq_lens: Tensor, num_nodes: int | None = None, ancestors: str | None = None
    ) -> AttentionPlan: ...


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What a step of a draft works with: the target ``model`` and ``draft_model`` (None: drafts are looked up), their
    pools, the step's ``arena`` and the requests' ``state``. ``hidden`` and ``aux``: the target's hidden states of the
    rows that it verifies, of its last layer and of the layers that the draft also reads. ``draft_lens``: the lengths
    for the draft's current forward, which all its plans read. They have memory of their own, so that ``lens``, from
    which they are derived, is not overwritten (F9). ``path_lens``: the lengths including the longest possible path.
    ``sees_images``: see ``DraftConfig``."""

    device: Device
    model: CausalLM
    draft_model: DraftModel | None
    kv_pool: KVPool
    req_pool: ReqPool
    arena: Arena
    state: SpeculativeState
    hidden: Tensor
    aux: Tensor
    draft_lens: Tensor
    path_lens: Tensor
    sees_images: bool

    @property
    def draft(self) -> DraftModel:
        """That of a kind of draft that has a model."""
        assert self.draft_model is not None, "drafts are looked up, not computed"
        return self.draft_model

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.model.config.vocab_size

    @property
    def head(self) -> tuple[VocabParallelEmbedding, Tensor | None, int]:
        """The draft's head, the target's ids of its tokens, and the size of the target's vocabulary."""
        return self.draft.lm_head, self.draft.target_ids, self.vocab_size

    def rows(self, name: str, size: int, width: int) -> Tensor:
        """The values of arena field ``name`` for the first ``size`` requests with ``width`` rows each, [size, width].
        It is a view; see :func:`rows_of`."""
        return rows_of(self.arena[name], size, width)

    def columns(self, size: int, *names: str) -> list[Tensor]:
        """The values [size] of arena fields for the first ``size`` requests."""
        return [self.arena[name][:size] for name in names]

    def batch(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan,
        logits_index: Tensor | None = None,
        aux: AuxHiddenStates | None = None,
    ) -> ForwardBatch:
        """A batch of these rows, whose attention is planned by ``plan``. The first axis of all is that of the step's
        requests; ``positions`` are the rows' places among their request's tokens."""
        plan.prepare()
        positions = self.req_pool.positions(positions, self.arena["plan_rows"])
        return ForwardBatch(
            mode=ForwardMode.VERIFY,
            input_ids=ids.flatten().contiguous(),
            positions=(positions.flatten().contiguous(),),
            out_slots=slots.flatten().contiguous(),
            logits_index=logits_index,
            attn=plan,
            kv_pool=self.kv_pool,
            aux_hidden=aux,
        )

    def mover(self, layers: range) -> Move:
        """What moves the KV rows of ``layers``, for trees."""
        tensors = [tensor for _, tensor in self.kv_pool.tensors()]
        parts = self.kv_pool.layout.parts_of(layers)
        return node_moves(self.device, KVMover(tensors[parts.start : parts.stop]).move)

    def place(self, rows: Tensor, lens: Tensor, first: int, positions: Tensor | None, slots: Tensor) -> None:
        place_rows(rows, lens, first, self.req_pool.page_table, self.kv_pool.page_size, positions, slots)

    def places(self, size: int, first: int, width: int) -> tuple[Tensor, Tensor]:
        """Positions and slots [size, width] of rows that begin ``first`` after the requests' lengths. Rows before a
        request's first token have position 0 and the sink's slot."""
        rows, lens = self.columns(size, "plan_rows", "lens")
        positions, slots = (torch.empty(size, width, dtype=torch.int64, device=rows.device) for _ in range(2))
        self.place(rows, lens, first, positions, slots)
        return positions, slots

    def draw_inputs(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Temperatures, noise scales and seed keys of the first ``size`` requests, [size] each."""
        temperatures, scales, keys = self.columns(size, "temperatures", "noise_scales", "seed_keys")
        return temperatures, scales, keys

    def draw(self, logits: Tensor, size: int, positions: Tensor, ahead: int) -> Pieces:
        """Draw the draft's tokens at ``positions`` + ``ahead`` [B] int64 from ``logits``, with the same noise with
        which the target will draw there."""
        return draw_draft(logits, *self.head, *self.draw_inputs(size), positions, ahead)

    def best(self, logits: Tensor, size: int, positions: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """The best ``topk`` tokens of each row of ``logits`` and their scores, with the noise of ``positions`` [B]. All
        requests have the same number of rows."""
        num, inputs = len(logits) // size, (*self.draw_inputs(size), positions)
        temperatures, scales, keys, at = (values.unsqueeze(1).expand(size, num).flatten() for values in inputs)
        return best_drafts(logits, *self.head, temperatures, scales, keys, at, topk)


def rows_of(field: Tensor, size: int, width: int) -> Tensor:
    """The first ``size * width`` values of ``field`` [B, at least width], as [size, width]."""
    return field.view(-1)[: size * width].view(size, width)


class HiddenDraft:
    """A draft that goes on from hidden states, with one layer that runs all its steps; other kinds override what they
    do otherwise. ``first_row``: the position of its first row of a step, relative to the number of a request's tokens.
    ``num_layers``: its layers that run a step each. ``previous`` and ``is_behind``: see ``AcceptOutputs``."""

    first_row = -1  # that of the last token
    num_layers = 1
    previous: Tensor | None = None
    is_behind: Tensor | None = None

    def __init__(self, parts: DraftParts) -> None:
        self.parts = parts

    def plan_steps(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        """The plans with which chains of ``depth`` tokens are proposed: one row per request."""
        return [plan(1, self.parts.draft_lens)] * (depth - 1)

    def plan_extend(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        """``StepPlans.extend`` of a step of ``depth``: for layer k, ``depth + 1 + k`` rows per request."""
        return [plan(depth + 1 + layer, self.parts.path_lens) for layer in range(self.num_layers)]

    def first_logits(self, plans: StepPlans) -> tuple[Tensor, Tensor]:
        """The logits of the first draft token of each request, and the hidden states [size, hidden_size] from which the
        rows of the second one are computed. The step before has left these."""
        parts = self.parts
        hidden = parts.state.hidden[:, 0].index_select(0, parts.arena["plan_rows"][: plans.size])
        return parts.draft.logits(hidden), hidden

    def propose(self, plans: StepPlans) -> None:
        """Write a chain of drafts to ``input_ids``, from one forward of the draft after the other."""
        parts, size, depth = self.parts, plans.size, plans.shape.depth
        (lens,) = parts.columns(size, "lens")
        logits, hidden = self.first_logits(plans)
        ids, positions, slots = parts.columns(size, "draft_ids", "draft_positions", "draft_slots")
        for step in range(1, depth):
            following = NextRow(
                at=step + self.first_row,
                lens=lens,
                positions=parts.rows("positions", size, depth + 1),
                out_slots=parts.rows("out_slots", size, depth + 1),
                draft_lens=parts.draft_lens[:size],
                draft_ids=ids,
                draft_positions=positions,
                draft_slots=slots,
            )
            self.keep(plans, step, parts.draw(logits, size, lens, step - 1), following)
            batch = parts.batch(ids, positions, slots, plans.steps[step - 1])
            logits, hidden = parts.draft.forward(batch, hidden)
        self.keep(plans, depth, parts.draw(logits, size, lens, depth - 1))

    def propose_nothing(self, plans: StepPlans) -> None:
        """What a step of depth 0 does instead, so that the draft can go on from there later."""

    def keep(self, plans: StepPlans, column: int, drawn: Pieces, following: NextRow | None = None) -> None:
        """Write the drafts ``drawn`` to ``column`` of ``input_ids``, see ``keep_draft``."""
        parts, size = self.parts, plans.size
        input_ids = parts.rows("input_ids", size, plans.shape.num_nodes)
        keep_draft(drawn, parts.arena["is_bad"][:size], input_ids, column, parts.vocab_size, following)

    def keep_nodes(self, plans: StepPlans, candidates: Candidates, frontiers: Sequence[Tensor], chosen: Tensor) -> None:
        """A tree has been built of the ``candidates`` that are ``chosen``: keep what :meth:`extend_path` needs of them.
        ``frontiers``: the candidates whose rows the draft has computed, step by step."""

    def extend(self, plans: StepPlans, tokens: Tensor) -> None:
        """After a chain: compute the rows of the target's ``tokens`` [size, depth + 1], of which ``counts`` are
        accepted, from its hidden states. Rows of tokens that were not accepted are written again by the next step."""
        size, width = plans.size, plans.shape.num_tokens
        places = (self.parts.rows(name, size, width) for name in _PLACES)
        self._extend(plans, tokens, slice(size * width), *places)

    def extend_path(self, plans: StepPlans, tokens: Tensor, path: Tensor) -> None:
        """:meth:`extend` after a tree. ``path`` [size, depth + 1]: the nodes whose tokens were accepted."""
        size, width = plans.size, plans.shape.num_tokens
        requests = torch.arange(size, device=path.device).unsqueeze(1)
        nodes = (requests * plans.shape.num_nodes + path).flatten()
        self._extend(plans, tokens, nodes, *self.parts.places(size, -1, width))

    def _extend(
        self, plans: StepPlans, tokens: Tensor, nodes: Tensor | slice, positions: Tensor, slots: Tensor
    ) -> None:
        parts = self.parts
        rows, counts = parts.columns(plans.size, "plan_rows", "counts")
        hidden = parts.draft.hidden_states_from(parts.hidden[nodes], parts.aux[nodes])
        batch = parts.batch(tokens, positions, slots, plans.extend[0], rows[:0])
        _, hidden = parts.draft.forward(batch, hidden, 0)
        keep_last_hidden(hidden, counts, rows, parts.state.hidden[:, 0])

    def prefill_arrays(self, batch: StepBatch) -> Arrays:
        """What :meth:`after_prefill` needs in addition to the step's own inputs: for each layer the tokens that its
        rows are computed from, ``draft_ids`` [layers * T] int64; 0 after the end of a prompt. If the draft sees images,
        ``draft_image_rows`` are the rows of the embeddings that these tokens take, as ``image_rows``."""
        padding = np.zeros(self.num_layers, np.int64)
        texts = [np.concatenate((chunk.token_ids, chunk.following, padding)) for chunk in batch.chunks]
        arrays: Arrays = {"draft_ids": self._shifted(batch, texts)}
        if self.parts.sees_images and any(chunk.image_rows is not None for chunk in batch.chunks):
            sizes = [len(chunk.token_ids) + self.num_layers for chunk in batch.chunks]
            rows = [
                np.full(size, SINK_ROW) if chunk.image_rows is None else chunk.image_rows
                for chunk, size in zip(batch.chunks, sizes, strict=True)
            ]
            arrays["draft_image_rows"] = self._shifted(batch, rows)
        return arrays

    def _shifted(self, batch: StepBatch, values: Sequence[I64]) -> I64:
        """For each layer the ``values`` of the tokens that its rows are computed from. Those of a chunk begin with its
        first token's."""
        shifted = [
            of_chunk[1 + layer : 1 + layer + len(chunk.token_ids)]
            for layer in range(self.num_layers)
            for of_chunk, chunk in zip(values, batch.chunks, strict=True)
        ]
        return np.concatenate(shifted).astype(np.int64)

    def after_prefill(self, extended: Extended, next_tokens: Tensor, sampling: SamplingBatch | None) -> None:
        """Compute the draft's rows of a prefill step. ``next_tokens`` [S] int64 are the tokens drawn for the requests
        whose prompts are complete, with ``sampling``; None if there are none."""
        parts, views, ends = self.parts, extended.views, _ends(extended, next_tokens)
        ids = views["draft_ids"].clone()
        ids[ends] = next_tokens
        _, hidden = parts.draft.forward(self._own(extended, 0, ids, ends[:0]), self._target_hidden(extended), 0)
        if len(next_tokens):
            rows = views["sample_rows"]
            parts.state.hidden[rows, 0] = hidden[ends]
            parts.state.lens[rows] = views["sample_positions"] + 1

    def _own(self, extended: Extended, layer: int, ids: Tensor, logits_index: Tensor) -> ForwardBatch:
        """The target's batch with the ``ids`` from which a layer of the draft is computed."""
        images = extended.batch.images
        if images is not None:
            shifted = extended.views.get("draft_image_rows")
            images = None if shifted is None else replace(images, rows=shifted.view(self.num_layers, -1)[layer])
        return replace(
            extended.batch,
            input_ids=ids,
            logits_index=logits_index,
            logits_out=None,
            aux_hidden=None,
            layer_ready=None,
            images=images,
        )

    def _target_hidden(self, extended: Extended) -> Tensor:
        aux = extended.batch.aux_hidden
        return self.parts.draft.hidden_states_from(extended.hidden, None if aux is None else aux.out)


class LayerDraft(HiddenDraft):
    """A draft with a layer for each step. It proposes chains only. Rows of a prompt's last tokens that it computes
    again are at the positions of text, whatever these tokens are: behind an image every chat template has some."""

    def __init__(self, parts: DraftParts, num_layers: int) -> None:
        super().__init__(parts)
        self.num_layers = num_layers
        self._zeros = torch.zeros(parts.arena.num_rows, 1, device=parts.hidden.device)

    def plan_steps(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        return ()  # the tokens have been proposed already

    def propose(self, plans: StepPlans) -> None:
        """Write the drafts that the step before has proposed."""
        rows, none = self.parts.arena["plan_rows"][: plans.size], self._zeros[: plans.size]
        proposed = self.parts.state.drafts[rows, : plans.shape.depth].int().t().contiguous()
        for step, drafts in enumerate(proposed):
            self.keep(plans, step + 1, Pieces(none, drafts.unsqueeze(1), none))

    def extend(self, plans: StepPlans, tokens: Tensor) -> None:
        """Compute layer after layer. Layer k computes ``depth + 1 + k`` rows of each request, beginning with row ``lens
        - 1 - k``. Their tokens begin with token ``lens``; then come those that layers before it propose."""
        parts, state, size, width = self.parts, self.parts.state, plans.size, plans.shape.num_tokens
        rows, counts, lens = parts.columns(size, "plan_rows", "counts", "lens")
        requests = torch.arange(size, device=rows.device)
        num_rows = size * plans.shape.num_nodes
        hidden = parts.draft.hidden_states_from(parts.hidden[:num_rows], parts.aux[:num_rows])
        before, last = state.hidden[rows], counts - 1  # ``before``: what the step before has left
        next_positions = lens + counts
        ids = torch.cat((tokens, tokens.new_zeros(size, self.num_layers - 1)), dim=1)
        positions, slots = (parts.rows(name, size, width) for name in _PLACES)
        for layer, plan in enumerate(plans.extend):
            if layer > 0:
                previous = before[:, layer - 1 : layer]
                hidden = torch.cat((previous, hidden.view(size, width - 1, -1)), dim=1).flatten(0, 1)
                positions, slots = parts.places(size, -1 - layer, width)
            batch = parts.batch(ids[:, :width], positions, slots, plan, requests * width + last + layer)
            logits, hidden = parts.draft.forward(batch, hidden, layer)
            following = ids if layer + 1 < self.num_layers else None
            drawn = parts.draw(logits, size, next_positions, layer)
            keep_proposal(drawn, rows, counts, state.drafts[:, layer], following, layer)
            if layer < state.hidden.shape[1]:
                keep_last_hidden(hidden, counts, rows, state.hidden[:, layer])
            width += 1

    def after_prefill(self, extended: Extended, next_tokens: Tensor, sampling: SamplingBatch | None) -> None:
        parts, state, views, ends = self.parts, self.parts.state, extended.views, _ends(extended, next_tokens)
        rows, lens = views["sample_rows"], views["sample_positions"] + 1
        positions, hidden = views["positions"], self._target_hidden(extended)
        ids_by_layer = views["draft_ids"].view(self.num_layers, -1)
        following = [next_tokens]  # the tokens after the complete prompts: the drawn one, then proposed ones
        for layer in range(self.num_layers):
            ids = ids_by_layer[layer].clone()
            for ahead, tokens in enumerate(following):
                # The row this many tokens before the prompt's last one, if the prompt is that long.
                behind = layer - ahead
                ids[torch.where(positions[ends] < behind, ends, ends - behind)] = tokens
            logits, hidden = parts.draft.forward(self._own(extended, layer, ids, ends), hidden, layer)
            if not len(next_tokens):
                continue
            assert sampling is not None, "tokens have been drawn"
            inputs = (sampling.temperatures, sampling.noise_scales, sampling.seed_keys)
            pieces = draw_draft(logits, *parts.head, *inputs, lens, layer)
            drafts = state.drafts[rows, layer] = drawn_tokens(pieces)
            following.append(drafts.clamp(min=0))
            if layer < state.hidden.shape[1]:
                state.hidden[rows, layer] = hidden[torch.where(positions[ends] < layer, ends, ends - layer)]
        if len(next_tokens):
            state.lens[rows] = lens


class WholeDraft(HiddenDraft):
    """A draft that is a whole model."""

    first_row = 0  # that of the last token has been computed before (_compute_two)

    def __init__(self, parts: DraftParts, topk: int) -> None:
        super().__init__(parts)
        self.previous, self.is_behind = parts.state.previous, parts.state.is_behind
        self._topk = topk
        layers = range(parts.model.config.num_attention_layers, parts.kv_pool.num_layers)
        self._move = parts.mover(layers) if topk > 1 else None

    def plan_extend(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        return [plan(2, self.parts.arena["lens"])]  # for the last two tokens of each request

    def propose_nothing(self, plans: StepPlans) -> None:
        self._compute_two(plans, self.parts.arena["lens"][:0])

    def first_logits(self, plans: StepPlans) -> tuple[Tensor, Tensor]:
        device = self.parts.state.lens.device
        logits = self._compute_two(plans, torch.arange(plans.size, device=device) * 2 + 1)
        return logits, self.parts.state.hidden[: plans.size, 0]

    def _compute_two(self, plans: StepPlans, logits_index: Tensor) -> Tensor:
        """Compute the rows of the last two tokens. Returns the logits of the rows ``logits_index``. If the draft has
        computed the first of the two tokens before, its KV is written to the sink instead, because its page may be
        shared by now."""
        parts, state = self.parts, self.parts.state
        rows, lens = parts.columns(plans.size, "plan_rows", "lens")
        last_tokens = parts.rows("input_ids", plans.size, plans.shape.num_nodes)[:, 0]
        ids = torch.stack((state.previous[rows], last_tokens), dim=1)
        positions = torch.stack((lens - 2, lens - 1), dim=1)
        slots = node_slots(parts.req_pool.page_table, rows, lens - 2, 2, parts.kv_pool.page_size).view(-1, 2)
        slots[:, 0] *= state.is_behind[rows]
        batch = parts.batch(ids, positions, slots, plans.extend[0], logits_index)
        logits, _ = parts.draft.forward(batch, state.hidden[:0, 0])
        return logits

    def extend(self, plans: StepPlans, tokens: Tensor) -> None:
        """Nothing: it has computed its rows while it proposed."""

    def extend_path(self, plans: StepPlans, tokens: Tensor, path: Tensor) -> None:
        """Move the rows that were computed for the accepted path to their tokens' slots. The draft is behind if it has
        not computed the last node of the path, since that was in no frontier."""
        parts, state, shape, size = self.parts, self.parts.state, plans.shape, plans.size
        rows, lens, counts = parts.columns(size, "plan_rows", "lens", "counts")
        ends = counts.unsqueeze(1) - 1
        ids, nodes = (parts.rows(name, size, shape.num_nodes) for name in ("input_ids", "draft_nodes"))
        state.previous[rows] = ids.gather(1, path.gather(1, ends)).squeeze(1)
        nodes = nodes.gather(1, path)
        is_behind = (counts > 1) & (nodes.gather(1, ends).squeeze(1) == 0)
        if shape.depth > 1:
            num_rows = 1 + (shape.depth - 1) * self._topk
            slots = node_slots(parts.req_pool.page_table, rows, lens - 1, num_rows, parts.kv_pool.page_size)
            assert self._move is not None, "there are trees"
            self._move(slots, nodes, counts - is_behind.long())
        state.is_behind[rows] = is_behind

    def keep_nodes(self, plans: StepPlans, candidates: Candidates, frontiers: Sequence[Tensor], chosen: Tensor) -> None:
        """Keep the draft's row of each node. Row 0 is that of the root, and the rows of the frontiers follow."""
        by_candidate = torch.zeros_like(candidates.token_ids)
        if frontiers:
            computed = torch.cat([*frontiers], 1)
            numbers = torch.arange(1, computed.shape[1] + 1, device=computed.device).expand_as(computed)
            by_candidate.scatter_(1, computed, numbers)
        draft_nodes = self.parts.rows("draft_nodes", plans.size, plans.shape.num_nodes)
        draft_nodes[:, 0] = 0
        draft_nodes[:, 1:] = by_candidate.gather(1, chosen)

    def prefill_arrays(self, batch: StepBatch) -> Arrays:
        return {}

    def after_prefill(self, extended: Extended, next_tokens: Tensor, sampling: SamplingBatch | None) -> None:
        parts, state, views, ends = self.parts, self.parts.state, extended.views, _ends(extended, next_tokens)
        batch = replace(extended.batch, logits_index=ends[:0])
        if not parts.sees_images:
            batch = replace(batch, images=None)
        parts.draft.forward(batch, state.hidden[:0, 0])
        if len(next_tokens):
            rows = views["sample_rows"]
            state.lens[rows] = views["sample_positions"] + 1
            state.previous[rows] = extended.batch.input_ids[ends]
            state.is_behind[rows] = False


class LookedUpDraft(HiddenDraft):
    """No model and no rows: drafts are looked up in the tokens that the device has of each request. ``window``: see
    ``SpeculativeConfig.match_window``."""

    def __init__(self, parts: DraftParts, window: tuple[int, int]) -> None:
        super().__init__(parts)
        assert parts.req_pool.tokens is not None, "request rows have their tokens"
        self._window, self._tokens = window, parts.req_pool.tokens

    def plan_steps(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        return ()

    def plan_extend(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        return ()

    def propose(self, plans: StepPlans) -> None:
        rows, lens = self.parts.columns(plans.size, "plan_rows", "lens")
        input_ids = self.parts.rows("input_ids", plans.size, plans.shape.num_nodes)
        look_up_drafts(rows, lens, self._tokens, *self._window, input_ids)

    def extend(self, plans: StepPlans, tokens: Tensor) -> None:
        """Add the tokens to those of their requests."""
        rows, lens = self.parts.columns(plans.size, "plan_rows", "lens")
        keep_tokens(rows, lens, tokens, self._tokens)

    def prefill_arrays(self, batch: StepBatch) -> Arrays:
        """What rows do not have yet of the tokens of their requests: ``looked_up`` [N] int32, and where each of them
        belongs."""
        device = self.parts.device
        texts = [tokens_to_keep(device, chunk.looked_up, len(chunk.token_ids)) for chunk in batch.chunks]
        sizes, ends = [len(text) for text in texts], batch.seq_lens.tolist()
        columns = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        rows = np.repeat(batch.rows, sizes)
        return {"looked_up": concatenated(texts), "looked_up_rows": rows, "looked_up_columns": concatenated(columns)}

    def after_prefill(self, extended: Extended, next_tokens: Tensor, sampling: SamplingBatch | None) -> None:
        views, lens = extended.views, self.parts.state.lens
        places = views["looked_up_rows"], views["looked_up_columns"]
        self._tokens.index_put_(places, views["looked_up"])
        if len(next_tokens):
            rows, ends = views["sample_rows"], views["sample_positions"]
            keep_tokens(rows, ends, next_tokens.unsqueeze(1), self._tokens)
            lens[rows] = ends + 1


def _ends(extended: Extended, next_tokens: Tensor) -> Tensor:
    """The last token of each complete prompt."""
    assert extended.batch.logits_index is not None, "a prefill step has logits of some rows"
    return extended.batch.logits_index[: len(next_tokens)]


def make_draft(parts: DraftParts, topk: int, match_window: tuple[int, int] | None) -> HiddenDraft:
    """The kind that ``parts.draft`` is, or one without a model if there is a ``match_window``. ``topk``: children of
    each node of a tree; 1 for chains."""
    if match_window is not None:
        return LookedUpDraft(parts, match_window)
    if not parts.draft.hidden_size:
        return WholeDraft(parts, topk)
    num_layers = parts.draft.max_steps or 1
    return LayerDraft(parts, num_layers) if num_layers > 1 else HiddenDraft(parts)
