"""The tree of draft tokens that a target model verifies in one step.

In each step a draft model proposes the ``topk`` likeliest children of each node of its frontier. The ``topk`` best of
these candidates are the frontier of the next step. In the end, the ``num_draft_tokens - 1`` candidates with the best
cumulative scores become the nodes of the tree (EAGLE-2: Li, Wei, Zhang, Zhang, arXiv:2406.16858). Node 0 is the root:
the request's last token, which has been drawn but has no KV yet.

The cumulative score of a candidate is never higher than that of its parent, and of equal scores that of the earlier
candidate counts as better. Since parents are proposed before their children, the best candidates always include their
own parents, and parents come first.

All functions have static shapes and no host synchronisation, and may be captured. B requests, N nodes, K = ``topk``,
M candidates: K from the first step and K * K from every later one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_NODES = 64  # bits of an ancestor mask


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The nodes that a step verifies, parents before children. ``parents`` and ``ancestors`` are None for chains: there
    the parent of node n is n - 1, and attention is causal. ``is_rejected`` marks requests of which no draft token may
    be accepted. Their root is verified as usual."""

    token_ids: torch.Tensor  # [B, N] int64, within the vocabulary
    # [B, N] int64: the position of the node's token in its sequence, which is that of the root plus the node's depth
    positions: torch.Tensor
    parents: torch.Tensor | None  # [B, N] int64, -1 for the root
    ancestors: torch.Tensor | None  # [B, N] int64, bit m: m is the node itself or one of its ancestors
    is_rejected: torch.Tensor | None = None  # [B] bool
    chosen: torch.Tensor | None = None  # [B, N - 1] int64: the candidate that has become each node, without the root


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the draft has proposed so far, and the frontier from which it goes on."""

    token_ids: torch.Tensor  # [B, M] int64
    scores: torch.Tensor  # [B, M] float32, cumulative: sums of the log-probabilities from the root on
    parents: torch.Tensor  # [B, M] int64, the candidate that is the parent, -1 if that is the root
    frontier: torch.Tensor  # [B, K] int64, indices of candidates

    @property
    def num_steps(self) -> int:
        """The number of steps of the draft so far, which is the depth of the deepest candidate."""
        topk = self.frontier.shape[1]
        return 1 + (self.token_ids.shape[1] - topk) // (topk * topk)

    @property
    def frontier_tokens(self) -> torch.Tensor:
        """[B, K] int64: the draft's next inputs."""
        return self.token_ids.gather(1, self.frontier)

    @property
    def frontier_rows(self) -> torch.Tensor:
        """[B, K] int64: for each row of the frontier, the row of its parent in the frontier before (0 to K - 1); its
        own in the first step."""
        topk = self.frontier.shape[1]
        if self.num_steps == 1:
            return self.frontier
        return (self.frontier - (self.token_ids.shape[1] - topk * topk)) // topk

    def frontier_ancestors(self, before: torch.Tensor) -> torch.Tensor:
        """[B, K] int64: to which of the rows that the draft has computed so far each row of the frontier attends: bit K
        * s + r for row r of step s, itself included. ``before``: the frontier's before, 0 in the first step."""
        topk = self.frontier.shape[1]
        own = torch.arange(topk, device=before.device) + (self.num_steps - 1) * topk
        return before.gather(1, self.frontier_rows) | torch.ones_like(own) << own


def first_candidates(token_ids: torch.Tensor, logprobs: torch.Tensor) -> Candidates:
    """The children of the root: ``token_ids`` [B, K] int64, ``logprobs`` [B, K] float32, finite or -inf."""
    frontier = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    return Candidates(token_ids, logprobs.clamp(max=0), torch.full_like(token_ids, -1), frontier)


def more_candidates(before: Candidates, token_ids: torch.Tensor, logprobs: torch.Tensor) -> Candidates:
    """``before`` with the K children of each row of its frontier added: ``token_ids`` [B, K, K] int64 and ``logprobs``
    [B, K, K] float32, finite or -inf."""
    num_before, topk = before.token_ids.shape[1], before.frontier.shape[1]
    # Rounding may make a log-probability positive, but a child's score must not be higher than its parent's.
    scores = (before.scores.gather(1, before.frontier).unsqueeze(2) + logprobs.clamp(max=0)).flatten(1)
    parents = before.frontier.unsqueeze(2).expand(-1, -1, topk).flatten(1)
    return Candidates(
        token_ids=torch.cat([before.token_ids, token_ids.flatten(1)], 1),
        scores=torch.cat([before.scores, scores], 1),
        parents=torch.cat([before.parents, parents], 1),
        frontier=_best(scores, topk) + num_before,
    )


def build_tree(
    root_ids: torch.Tensor, seq_lens: torch.Tensor, candidates: Candidates, num_draft_tokens: int
) -> DraftTree:
    """The root and the best ``num_draft_tokens - 1`` candidates, in the order in which they were proposed. ``root_ids``
    [B] int64; ``seq_lens`` [B] int64: the number of committed tokens of each request, which is the root's position.
    ``num_draft_tokens`` includes the root; it may be at most 64, and at most one more than the candidates."""
    assert 1 <= num_draft_tokens <= min(MAX_NODES, 1 + candidates.token_ids.shape[1]), num_draft_tokens
    chosen = _best(candidates.scores, num_draft_tokens - 1).sort(dim=1).values
    # The node that each candidate has become. The last column stands for the root.
    nodes = chosen.new_zeros(chosen.shape[0], candidates.token_ids.shape[1] + 1)
    numbers = torch.arange(num_draft_tokens, device=chosen.device)
    nodes.scatter_(1, chosen, numbers[1:].expand_as(chosen))
    above = candidates.parents.gather(1, chosen)
    above = nodes.gather(1, torch.where(above < 0, nodes.shape[1] - 1, above))
    parents = torch.cat([torch.full_like(root_ids, -1)[:, None], above], 1)
    own = torch.ones_like(numbers) << numbers
    ancestors = own.expand_as(parents)
    for _ in range(candidates.num_steps):  # after n rounds a mask holds the nodes at most n above its own
        ancestors = torch.cat([ancestors[:, :1], ancestors.gather(1, above) | own[1:]], 1)
    depths = (ancestors.unsqueeze(2) >> numbers & 1).sum(2) - 1
    token_ids = torch.cat([root_ids[:, None], candidates.token_ids.gather(1, chosen)], 1)
    return DraftTree(token_ids, seq_lens[:, None] + depths, parents, ancestors, chosen=chosen)


def _best(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Indices [B, num] of the highest ``scores`` [B, M], best first; of equal scores the first comes first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :num]
