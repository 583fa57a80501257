"""The tree of draft tokens that a target model verifies in one step.

A draft model proposes the ``topk`` likeliest children of each node of a frontier, step after step, and its frontier
goes on with the ``topk`` best of them. Of all candidates the ``num_draft_tokens - 1`` with the best cumulative
scores become nodes (EAGLE-2: Li, Wei, Zhang, Zhang, arXiv:2406.16858). Node 0 is the root: the request's last token,
which has been drawn but not yet computed.

A cumulative score is never above its parent's, and of equal ones the earlier candidate wins. Parents are proposed
before their children, so the best candidates always contain their own parents, and parents come first.

All functions have static shapes and no host synchronisation, and may be captured. B requests, N nodes, K = ``topk``,
M candidates: K of the first step and K * K of every later one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_NODES = 64  # bits of an ancestor mask


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The nodes that a step verifies, parents before children.

    ``parents`` and ``ancestors`` are None for chains, where node n's parent is n - 1: attention is causal then.
    ``is_rejected`` marks requests none of whose draft tokens may be accepted; their root is verified as any other.
    """

    token_ids: torch.Tensor  # [B, N] int64, within the vocabulary
    positions: (
        torch.Tensor
    )  # [B, N] int64, of the tokens in their sequences: the root's plus the node's depth
    parents: torch.Tensor | None  # [B, N] int64, -1 for the root
    ancestors: torch.Tensor | None  # [B, N] int64, bit m: m is the node itself or one of its ancestors
    is_rejected: torch.Tensor | None = None  # [B] bool
    chosen: torch.Tensor | None = None  # [B, N - 1] int64, the candidate that each node but the root has been


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the draft has proposed so far, and the frontier that it goes on from."""

    token_ids: torch.Tensor  # [B, M] int64
    scores: torch.Tensor  # [B, M] float32, log-probabilities from the root on
    parents: torch.Tensor  # [B, M] int64, the candidate whose child it is, -1 for the root's
    frontier: torch.Tensor  # [B, K] int64, candidates

    @property
    def num_steps(self) -> int:
        """Steps of the draft so far: the depth of the deepest candidate."""
        topk = self.frontier.shape[1]
        return 1 + (self.token_ids.shape[1] - topk) // (topk * topk)

    @property
    def frontier_tokens(self) -> torch.Tensor:
        """[B, K] int64: the draft's next inputs."""
        return self.token_ids.gather(1, self.frontier)

    @property
    def frontier_rows(self) -> torch.Tensor:
        """[B, K] int64: which row of the frontier before, 0 to K - 1, each row's parent was. Not for the first step."""
        topk = self.frontier.shape[1]
        return (self.frontier - (self.token_ids.shape[1] - topk * topk)) // topk


def first_candidates(token_ids: torch.Tensor, logprobs: torch.Tensor) -> Candidates:
    """The children of the root: ``token_ids`` [B, K] int64, ``logprobs`` [B, K] float32, finite or -inf."""
    frontier = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    return Candidates(token_ids, logprobs.clamp(max=0), torch.full_like(token_ids, -1), frontier)


def more_candidates(before: Candidates, token_ids: torch.Tensor, logprobs: torch.Tensor) -> Candidates:
    """With the children of the frontier: ``token_ids`` [B, K, K] int64, ``logprobs`` [B, K, K] float32 as for
    :func:`first_candidates`, the K children of each row of the frontier."""
    num_before, topk = before.token_ids.shape[1], before.frontier.shape[1]
    # Rounding may make a probability exceed 1: a child's score must not exceed its parent's.
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
    """The root and the best ``num_draft_tokens - 1`` candidates, in the order in which they were proposed.

    ``root_ids`` [B] int64; ``seq_lens`` [B] int64: committed tokens of each request, which is the root's position. At
    most 64 tokens, and no more than there are.
    """
    assert 1 <= num_draft_tokens <= min(MAX_NODES, 1 + candidates.token_ids.shape[1]), num_draft_tokens
    chosen = _best(candidates.scores, num_draft_tokens - 1).sort(dim=1).values
    # The node that each candidate has become; the last column, which is index -1, is the root.
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


def build_chain(root_ids: torch.Tensor, seq_lens: torch.Tensor, token_ids: torch.Tensor) -> DraftTree:
    """The tree of a draft with topk = 1: ``token_ids`` [B, N - 1] int64, each the child of the one before it, the first
    one of the root; ``root_ids`` and ``seq_lens`` as for :func:`build_tree`."""
    num_nodes = token_ids.shape[1] + 1
    assert num_nodes <= MAX_NODES, num_nodes
    positions = seq_lens[:, None] + torch.arange(num_nodes, device=seq_lens.device)
    return DraftTree(torch.cat([root_ids[:, None], token_ids], 1), positions, None, None)


def _best(scores: torch.Tensor, num: int) -> torch.Tensor:
    """Indices [B, num] of the highest ``scores`` [B, M], best first, of equal ones the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :num]
