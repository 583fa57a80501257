"""Decides which tokens of a draft tree the target accepts.

The target draws its own token at every node, with the noise of the position that the token will have
(``sampling/gumbel.py``). The accepted path begins at the root, and goes on from a node to the child whose token is the
one drawn at that node. So the tokens of a step are the target's own draws, which are those of decoding without a draft
(drafter-invariant: Daliri, Musco, Suresh, arXiv:2408.07978). A draft only decides how many tokens a step yields.

The caller makes the draws. Whatever changes a draw (logit_bias, min_new_tokens, filters) must therefore have been
applied to the [B * N, V] logits of the nodes before. The draw at node n has position ``DraftTree.positions[n] + 1``.
Requests whose draws depend on earlier tokens (penalties, grammars) have no drafts accepted, see
``ReqSampling.accepts_drafts``.

Shapes are static, and there is no host synchronisation. B requests, N nodes, S = ``num_steps`` < N: the maximum number
of draft tokens on a path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fenceline.sampling.gumbel import uniform
from fenceline.speculative.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of each request through its tree. Entries beyond ``counts`` are 0."""

    token_ids: torch.Tensor  # [B, S + 1] int64: accepted draft tokens, then the target's own next token
    counts: torch.Tensor  # [B] int64, 1 to S + 1: the number of tokens, which is also that of the path's nodes
    path: torch.Tensor  # [B, S + 1] int64: the path's nodes, the root first; their KV is kept
    last_tokens: torch.Tensor  # [B] int64: the last token of each request, which is the root of the next step


def accept(tree: DraftTree, draws: torch.Tensor, num_steps: int) -> Accepted:
    """Follow ``draws`` [B, N] int64, the target's tokens at the nodes, from the root on. If several children have the
    drawn token, the first one is taken. If a request ``is_rejected``, its path is the root alone."""
    assert draws.shape == tree.token_ids.shape, (draws.shape, tree.token_ids.shape)
    assert 0 <= num_steps < draws.shape[1], (num_steps, draws.shape)
    follow = _follow_chain if tree.parents is None else _follow_tree
    on_path, path = follow(tree, draws, num_steps)
    counts = on_path.sum(1)
    path = path.masked_fill(~on_path, 0)
    token_ids = draws.gather(1, path).masked_fill(~on_path, 0)
    last_tokens = token_ids.gather(1, counts[:, None] - 1)[:, 0]
    return Accepted(token_ids, counts, path, last_tokens)


def simulate_drafts(tree: DraftTree, draws: torch.Tensor, rows: torch.Tensor, accept_length: float) -> DraftTree:
    """The chain ``tree`` with other drafts, such that :func:`accept` yields ``accept_length`` tokens per step on
    average. This is for measuring speed at a known acceptance. Each step yields one of the two whole numbers next to
    ``accept_length``, chosen by a hash of request row and position, but at most N tokens. ``draws`` [B, N] int64 as for
    ``accept``, ``rows`` [B] int64."""
    assert tree.parents is None and accept_length >= 1, accept_length
    min_count = int(accept_length)
    has_extra = uniform(rows, tree.positions[:, 0]) < accept_length - min_count
    num_tokens = min_count + has_extra.long()
    nodes = torch.arange(1, draws.shape[1], device=draws.device)
    drafts = torch.where(nodes < num_tokens[:, None], draws[:, :-1], -1)  # -1 is not equal to any token
    return replace(tree, token_ids=torch.cat([tree.token_ids[:, :1], drafts], 1))


def _may_go_on(tree: DraftTree) -> torch.Tensor:
    """Whether drafts of each request may be accepted [B, 1] bool."""
    if tree.is_rejected is None:
        return torch.ones_like(tree.token_ids[:, :1], dtype=torch.bool)
    return ~tree.is_rejected[:, None]


def _follow_chain(tree: DraftTree, draws: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which steps are on the path, the root being step 0 [B, num_steps + 1] bool, and their nodes (int64)."""
    agrees = tree.token_ids[:, 1 : num_steps + 1] == draws[:, :num_steps]
    on_path = torch.cat([torch.ones_like(_may_go_on(tree)), agrees & _may_go_on(tree)], 1)
    path = torch.arange(num_steps + 1, device=draws.device).expand_as(on_path)
    return on_path.long().cumprod(1).bool(), path


def _follow_tree(tree: DraftTree, draws: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like :func:`_follow_chain`, for trees."""
    assert tree.parents is not None
    # Nodes whose token the target has drawn at their parent. The value for the root does not matter, because it is not
    # the child of any node.
    agrees = tree.token_ids == draws.gather(1, tree.parents.clamp(min=0))
    parents = torch.where(agrees & _may_go_on(tree), tree.parents, -1)
    node = torch.zeros_like(draws[:, :1])
    alive = torch.ones_like(node, dtype=torch.bool)
    nodes, steps = [node], [alive]
    for _ in range(num_steps):
        is_child = parents == node
        alive = alive & is_child.any(1, keepdim=True)
        node = is_child.long().argmax(1, keepdim=True)  # the first
        nodes.append(node)
        steps.append(alive)
    return torch.cat(steps, 1), torch.cat(nodes, 1)
