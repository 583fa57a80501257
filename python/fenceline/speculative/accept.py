"""What the target accepts of a tree of draft tokens.

The target draws its own token at every node, with the noise of the position that the token will have
(``sampling/gumbel.py``). The path goes on to the child whose token is the one drawn. So the tokens of a step are the
target's own draws, those of decoding without a draft (drafter-invariant: Daliri, Musco, Suresh, arXiv:2408.07978), and
a draft decides only how many a step yields.

The draws come from the caller, so whatever changes a draw belongs in front of it: penalties, logit_bias, min_tokens
and filters apply to the [B * N, V] logits of the nodes. Those that depend on earlier tokens take them from the node's
own path: ``DraftTree.token_ids`` at the bits of ``DraftTree.ancestors``, without the root, which has been counted when
it was drawn. A draw at node n has position ``DraftTree.positions[n] + 1``.

Static shapes, no host synchronisation. B requests, N nodes, S = ``num_steps`` < N, the most draft tokens of a path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fenceline.sampling.gumbel import uniform
from fenceline.speculative.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The path of each request through its tree. What lies beyond ``counts`` is 0."""

    token_ids: torch.Tensor  # [B, S + 1] int64: accepted draft tokens, then the target's own next token
    counts: torch.Tensor  # [B] int64, 1 to S + 1: how many tokens there are, and nodes of the path
    path: torch.Tensor  # [B, S + 1] int64: nodes, the root first; their keys and values are the ones to keep
    last_tokens: torch.Tensor  # [B] int64: the last of the tokens, the next step's root


def accept(tree: DraftTree, draws: torch.Tensor, num_steps: int) -> Accepted:
    """Follow ``draws`` [B, N] int64, the target's tokens at the nodes, from the root on.

    Of several children with the drawn token the first is taken; a request that ``is_rejected`` keeps to its root.
    """
    assert draws.shape == tree.token_ids.shape, (draws.shape, tree.token_ids.shape)
    assert 0 <= num_steps < draws.shape[1], (num_steps, draws.shape)
    follow = _follow_chain if tree.parents is None else _follow_tree
    on_path, path = follow(tree, draws, num_steps)
    counts = on_path.sum(1)
    path = path.masked_fill(~on_path, 0)
    token_ids = draws.gather(1, path).masked_fill(~on_path, 0)
    last_tokens = token_ids.gather(1, counts[:, None] - 1)[:, 0]
    return Accepted(token_ids, counts, path, last_tokens)


def simulate_drafts(
    tree: DraftTree, draws: torch.Tensor, rows: torch.Tensor, accept_length: float
) -> DraftTree:
    """The chain ``tree`` with other drafts, of which :func:`accept` takes so many that a step yields ``accept_length``
    tokens on average: the whole numbers next to it, by a hash of request row and position; no more than N, of which a
    shorter chain yields fewer. For measuring speed at a known acceptance.

    ``draws`` [B, N] int64 as for ``accept``, ``rows`` [B] int64.
    """
    assert tree.parents is None and accept_length >= 1, accept_length
    sure = int(accept_length)
    more = uniform(rows, tree.positions[:, 0]) < accept_length - sure
    num_tokens = sure + more.long()
    nodes = torch.arange(1, draws.shape[1], device=draws.device)
    drafts = torch.where(nodes < num_tokens[:, None], draws[:, :-1], -1)  # -1: no token is that
    return replace(tree, token_ids=torch.cat([tree.token_ids[:, :1], drafts], 1))


def _may_go_on(tree: DraftTree) -> torch.Tensor:
    """[B, 1] bool."""
    if tree.is_rejected is None:
        return torch.ones_like(tree.token_ids[:, :1], dtype=torch.bool)
    return ~tree.is_rejected[:, None]


def _follow_chain(tree: DraftTree, draws: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which steps, the root's among them, are on the path [B, num_steps + 1] bool, and their nodes."""
    agrees = tree.token_ids[:, 1 : num_steps + 1] == draws[:, :num_steps]
    on_path = torch.cat([torch.ones_like(_may_go_on(tree)), agrees & _may_go_on(tree)], 1)
    path = torch.arange(num_steps + 1, device=draws.device).expand_as(on_path)
    return on_path.long().cumprod(1).bool(), path


def _follow_tree(tree: DraftTree, draws: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_follow_chain`."""
    assert tree.parents is not None
    # Nodes whose token the target has drawn at their parent. The root, whatever this says of it, is nobody's child.
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
