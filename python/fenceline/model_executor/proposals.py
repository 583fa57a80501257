"""Proposals: what a step verifies, a chain of drafts or a tree of them.

The nodes of a tree (``speculative/tree.py``) have consecutive slots, beginning with that of the last token, and so do,
in the draft's own layers, the rows that it computes while it proposes. The rows of an accepted path are moved to their
tokens' slots in the step that accepts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fenceline.layers.forward_batch import AttentionPlan
from fenceline.layers.kernels.speculative_operands import SINK_LEN, AcceptOutputs
from fenceline.memory_order import ArenaField, ArenaOutputs, Role
from fenceline.model_executor.drafts import HiddenDraft, Plan, StepPlans, rows_of
from fenceline.sampling.logprobs import OutputLogprobs, select_logprobs
from fenceline.speculative.accept import accept
from fenceline.speculative.refuse import check_draft
from fenceline.speculative.step_kernels import accept_chain
from fenceline.speculative.tree import Candidates, DraftTree, build_tree, first_candidates, more_candidates

_OF_ACCEPT = ("plan_rows", "lens", "is_bad", "may_accept", "counts", "num_bad")


class Chain:
    """Steps that propose and verify a chain of tokens. ``simulated_accept_length``: see ``SpeculativeConfig``. All
    methods that compute submit to FORWARD, which must be current. They may be captured."""

    ancestors: str | None = None  # the arena's field with the ancestors of the nodes that are verified; None: a chain

    def __init__(self, draft: HiddenDraft, simulated_accept_length: float | None = None) -> None:
        self._draft = draft
        self._parts = draft.parts
        self._simulated_accept_length = simulated_accept_length

    def plan_steps(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        """``StepPlans.steps`` of a step of ``depth``."""
        return self._draft.plan_steps(plan, depth)

    def propose(self, plans: StepPlans) -> None:
        """Write the drafts to ``input_ids``."""
        if plans.shape.depth:
            self._draft.propose(plans)
        else:
            self._draft.propose_nothing(plans)

    def accept(self, plans: StepPlans) -> None:
        """Determine the accepted drafts, advance the requests' rows, and let the draft follow."""
        parts, draft, size, width = self._parts, self._draft, plans.size, plans.shape.num_nodes
        rows, lens, is_bad, may_accept, counts, num_bad = parts.columns(size, *_OF_ACCEPT)
        ids, tokens = parts.rows("input_ids", size, width), parts.rows("drawn", size, width)
        last_tokens, new_lens = parts.req_pool.last_tokens, parts.state.lens
        kept = AcceptOutputs(counts, num_bad, last_tokens, new_lens, draft.previous, draft.is_behind)
        accept_chain(ids, tokens, is_bad, may_accept, rows, lens, self._simulated_accept_length, kept)
        draft.extend(plans, tokens)

    def tokens(self, outputs: ArenaOutputs, num_reqs: int, plans: StepPlans) -> torch.Tensor:
        """The tokens [num_reqs, depth + 1] of a step, of which ``counts`` are accepted."""
        return self._parts.rows("drawn", num_reqs, plans.shape.num_nodes)

    def of_tokens(
        self, logprobs: OutputLogprobs, outputs: ArenaOutputs, num_reqs: int, plans: StepPlans
    ) -> OutputLogprobs:
        """The logprobs of :meth:`tokens`, from those of all nodes' draws."""
        return logprobs


class Tree(Chain):
    """Steps that propose and verify a tree of the best tokens: each node of its frontier has ``topk`` children."""

    ancestors = "ancestors"

    def __init__(self, draft: HiddenDraft, topk: int) -> None:
        super().__init__(draft)
        self._topk = topk
        self._move = draft.parts.mover(range(draft.parts.model.num_layers))

    @staticmethod
    def fields(num_nodes: int, num_tokens: int, topk: int) -> list[ArenaField]:
        """The arena's fields that only trees need: see ``DraftTree`` and ``Accepted``."""
        i64, width, path = torch.int64, (num_nodes,), (num_tokens,)
        return [
            ArenaField("parents", i64, Role.INPUT, pad=0, shape=width),
            ArenaField("ancestors", i64, Role.INPUT, pad=0, shape=width),
            # The draft's row of each node; 0: none.
            ArenaField("draft_nodes", i64, Role.INPUT, pad=0, shape=width),
            # For the draft's current forward.
            ArenaField("draft_ancestors", i64, Role.INPUT, pad=0, shape=(topk,)),
            # The lengths including the longest possible path.
            ArenaField("path_lens", i64, Role.INPUT, pad=SINK_LEN),
            ArenaField("path", i64, Role.OUTPUT, pad=0, shape=path),
            ArenaField("path_tokens", i64, Role.OUTPUT, pad=0, shape=path),
        ]

    def plan_steps(self, plan: Plan, depth: int) -> Sequence[AttentionPlan]:
        """See ``Chain``; ``topk`` rows per request, from the second step on."""
        counts = [self._topk * step for step in range(1, depth)]  # nodes so far
        return [plan(self._topk, self._parts.draft_lens, count, "draft_ancestors") for count in counts]

    def propose(self, plans: StepPlans) -> None:
        """Write the nodes to ``input_ids``. In each step the draft computes the ``topk`` rows of each request's
        frontier, which attend to their own ancestors among the rows of the steps before."""
        parts, size, shape, topk = self._parts, plans.size, plans.shape, self._topk
        rows, lens, is_bad = parts.columns(size, "plan_rows", "lens", "is_bad")
        first = lens + self._draft.first_row  # the position of the first row of the frontiers
        logits, hidden = self._draft.first_logits(plans)
        drafts, scores = parts.best(logits, size, lens, topk)
        hidden = hidden.unsqueeze(1).expand(size, topk, -1)
        candidates = self._more(None, drafts.unsqueeze(1), scores.unsqueeze(1), is_bad)
        masks = torch.zeros_like(drafts)
        frontiers = []
        for step in range(1, shape.depth):
            masks = candidates.frontier_ancestors(masks)
            above = candidates.frontier_rows.unsqueeze(2)
            hidden = hidden.gather(1, above.expand(-1, -1, hidden.shape[2]))
            parts.arena["draft_ancestors"][:size] = masks
            torch.add(first, topk * step, out=parts.draft_lens[:size])
            slots = torch.empty(size, topk, dtype=torch.int64, device=rows.device)
            parts.place(rows, first, topk * (step - 1), None, slots)
            positions = (first + step - 1).unsqueeze(1).expand(size, topk)
            frontiers.append(candidates.frontier)
            batch = parts.batch(candidates.frontier_tokens, positions, slots, plans.steps[step - 1])
            logits, following = parts.draft.forward(batch, hidden.flatten(0, 1))
            hidden = following.view(size, topk, -1)
            drafts, scores = parts.best(logits, size, lens + step, topk)
            drafts, scores = drafts.view(size, topk, topk), scores.view(size, topk, topk)
            candidates = self._more(candidates, drafts, scores, is_bad)
        roots = parts.rows("input_ids", size, shape.num_nodes)[:, 0].clone()
        tree = build_tree(roots, lens - 1, candidates, shape.num_nodes)
        assert tree.parents is not None and tree.ancestors is not None and tree.chosen is not None
        for name, values in (
            ("input_ids", tree.token_ids),
            ("positions", tree.positions),
            ("parents", tree.parents),
            ("ancestors", tree.ancestors),
        ):
            parts.rows(name, size, shape.num_nodes).copy_(values)
        self._draft.keep_nodes(plans, candidates, frontiers, tree.chosen)

    def _more(
        self, before: Candidates | None, drafts: torch.Tensor, scores: torch.Tensor, is_bad: torch.Tensor
    ) -> Candidates:
        """``before`` (None: the root alone) with the children of the frontier: ``drafts`` and ``scores``
        [B, parents, topk]. Requests with an unusable draft are marked in ``is_bad``."""
        drafts, scores, bad = check_draft(drafts, scores, self._parts.vocab_size, is_bad)
        is_bad.copy_(bad)
        if before is None:
            return first_candidates(drafts[:, 0], scores[:, 0])
        return more_candidates(before, drafts, scores)

    def accept(self, plans: StepPlans) -> None:
        parts, state, size, shape = self._parts, self._parts.state, plans.size, plans.shape
        rows, lens, is_bad, may_accept, counts, num_bad = parts.columns(size, *_OF_ACCEPT)
        ids, positions, drawn, parents, slots = (
            parts.rows(name, size, shape.num_nodes)
            for name in ("input_ids", "positions", "drawn", "parents", "out_slots")
        )
        drafts = DraftTree(ids, positions, parents, None, is_bad | ~may_accept)
        accepted = accept(drafts, drawn, shape.depth)
        counts.copy_(accepted.counts)
        num_bad.copy_(is_bad)
        new_lens = lens + counts
        tokens = parts.rows("path_tokens", size, shape.num_tokens).copy_(accepted.token_ids)
        path = parts.rows("path", size, shape.num_tokens).copy_(accepted.path)
        self._move(slots.flatten(), path, counts)
        parts.req_pool.last_tokens[rows] = accepted.last_tokens
        state.lens[rows] = torch.where(rows == 0, SINK_LEN, new_lens)
        self._draft.extend_path(plans, tokens, path)

    def tokens(self, outputs: ArenaOutputs, num_reqs: int, plans: StepPlans) -> torch.Tensor:
        return rows_of(outputs.take("path_tokens", num_reqs), num_reqs, plans.shape.num_tokens)

    def of_tokens(
        self, logprobs: OutputLogprobs, outputs: ArenaOutputs, num_reqs: int, plans: StepPlans
    ) -> OutputLogprobs:
        path = rows_of(outputs.take("path", num_reqs), num_reqs, plans.shape.num_tokens)
        first = torch.arange(num_reqs, device=path.device).unsqueeze(1) * plans.shape.num_nodes
        return select_logprobs(logprobs, (first + path).flatten())
