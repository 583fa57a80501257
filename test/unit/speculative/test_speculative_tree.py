"""Trees of draft tokens and what is accepted of them, against the same in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fenceline.speculative.accept import accept
from fenceline.speculative.refuse import check_draft
from fenceline.speculative.tree import Candidates, DraftTree, build_tree, first_candidates, more_candidates

VOCAB = 7  # small, so that draws agree with drafts often


@dataclass(frozen=True)
class Node:
    """A candidate in plain Python."""

    token: int
    score: float
    parent: int  # a candidate, -1 for the root


def propose(request: list[list[tuple[int, float]]], topk: int) -> list[list[Node]]:
    """The candidates of a draft, step by step; ``request[step]`` are the children of the frontier, row after row."""
    steps = [[Node(token, min(logprob, 0.0), -1) for token, logprob in request[0]]]
    frontier = list(range(topk))
    everything = list(steps[0])
    for children in request[1:]:
        new = [
            Node(token, everything[frontier[i // topk]].score + min(logprob, 0.0), frontier[i // topk])
            for i, (token, logprob) in enumerate(children)
        ]
        order = sorted(range(len(new)), key=lambda i: (-new[i].score, i))
        frontier = [len(everything) + i for i in order[:topk]]
        everything += new
        steps.append(new)
    return steps


def plain_tree(candidates: list[Node], num_draft_tokens: int) -> list[tuple[int, int]]:
    """(token, parent node) of each node but the root."""
    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i].score, i))
    chosen = sorted(order[: num_draft_tokens - 1])
    place = {candidate: node for node, candidate in enumerate(chosen, 1)} | {-1: 0}
    return [(candidates[c].token, place[candidates[c].parent]) for c in chosen]


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, list[list[list[tuple[int, float]]]]]:
    """topk, and for each request the children step by step; few values, so that scores are often equal."""
    topk = draw(st.integers(1, 4))
    num_steps = draw(st.integers(1, 4))
    logprobs = st.sampled_from([0.0, -0.5, -1.0, -1.5, float("-inf")])
    child = st.tuples(st.integers(0, VOCAB - 1), logprobs)
    sizes = [topk] + [topk * topk] * (num_steps - 1)
    request = st.tuples(*(st.lists(child, min_size=size, max_size=size) for size in sizes)).map(list)
    return topk, draw(st.lists(request, min_size=1, max_size=3))


def on_device(topk: int, requests: list[list[list[tuple[int, float]]]]) -> Candidates:
    candidates = None
    for step in range(len(requests[0])):
        shape = (len(requests), topk) if candidates is None else (len(requests), topk, topk)
        ids = torch.tensor([[token for token, _ in request[step]] for request in requests]).view(shape)
        logprobs = torch.tensor([[logprob for _, logprob in request[step]] for request in requests]).view(shape)
        if candidates is None:
            candidates = first_candidates(ids, logprobs)
        else:
            candidates = more_candidates(candidates, ids, logprobs)
    assert candidates is not None
    return candidates


@given(drafts(), st.integers(1, 64), st.data())
def test_a_tree_has_the_best_candidates_and_their_parents(
    draft: tuple[int, list[list[list[tuple[int, float]]]]], num_draft_tokens: int, data: st.DataObject
) -> None:
    topk, requests = draft
    candidates = on_device(topk, requests)
    num_draft_tokens = min(num_draft_tokens, candidates.token_ids.shape[1] + 1)
    roots = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=len(requests), max_size=len(requests))))
    seq_lens = roots * 11 + 1
    tree = build_tree(roots, seq_lens, candidates, num_draft_tokens)
    assert tree.parents is not None and tree.ancestors is not None
    for b, request in enumerate(requests):
        nodes = [(int(roots[b]), -1), *plain_tree(sum(propose(request, topk), []), num_draft_tokens)]
        assert tree.token_ids[b].tolist() == [token for token, _ in nodes]
        parents = [parent for _, parent in nodes]
        assert tree.parents[b].tolist() == parents
        assert all(parent < node for node, parent in enumerate(parents))
        for node in range(num_draft_tokens):
            path = path_to(parents, node)
            bits = int(tree.ancestors[b, node]) & (1 << 64) - 1
            assert [n for n in range(64) if bits >> n & 1] == sorted(path)
            assert tree.positions[b, node] == seq_lens[b] + len(path) - 1


def path_to(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [node, *path_to(parents, parents[node])]


@given(drafts())
def test_the_frontier_is_the_best_of_the_last_step(draft: tuple[int, list[list[list[tuple[int, float]]]]]) -> None:
    topk, requests = draft
    candidates = on_device(topk, requests)
    for b, request in enumerate(requests):
        steps = propose(request, topk)
        last = steps[-1]
        if len(steps) > 1:
            order = sorted(range(len(last)), key=lambda i: (-last[i].score, i))[:topk]
            assert candidates.frontier_rows[b].tolist() == [i // topk for i in order]
        else:
            order = list(range(topk))
        assert candidates.frontier_tokens[b].tolist() == [last[i].token for i in order]
        first_of_step = sum(len(step) for step in steps[:-1])
        assert candidates.frontier[b].tolist() == [first_of_step + i for i in order]


@given(drafts())
def test_a_row_of_the_frontier_attends_to_its_own_path(draft: tuple[int, list[list[list[tuple[int, float]]]]]) -> None:
    """In each step, whatever the frontiers before were."""
    topk, requests = draft
    masks = torch.zeros(len(requests), topk, dtype=torch.int64)
    computed: list[dict[int, int]] = [{} for _ in requests]  # by candidate, the draft's row of it
    for step in range(1, len(requests[0]) + 1):
        candidates = on_device(topk, [request[:step] for request in requests])
        masks = candidates.frontier_ancestors(masks)
        for b, rows in enumerate(computed):
            rows |= {c: (step - 1) * topk + r for r, c in enumerate(candidates.frontier[b].tolist())}
            parents = candidates.parents[b].tolist()
            for row, candidate in enumerate(candidates.frontier[b].tolist()):
                path = {rows[above] for above in path_to(parents, candidate)}
                assert {n for n in range(64) if int(masks[b, row]) >> n & 1} == path


def test_a_probability_above_1_parts_no_child_from_its_parent() -> None:
    first = first_candidates(torch.tensor([[1, 2]]), torch.tensor([[-1.0, -2.0]]))
    logprobs = torch.tensor([[[1e-6, -9.0], [-9.0, -9.0]]])
    candidates = more_candidates(first, torch.tensor([[[3, 4], [5, 6]]]), logprobs)
    tree = build_tree(torch.tensor([0]), torch.tensor([5]), candidates, 2)
    assert tree.token_ids.tolist() == [[0, 1]] and tree.positions.tolist() == [[5, 6]]
    first = first_candidates(torch.tensor([[1, 2]]), torch.tensor([[-1.0, 1e-6]]))
    assert first.scores.tolist() == [[-1.0, 0.0]]


def test_trees_as_large_as_a_mask() -> None:
    """64 nodes in a chain of one child each: bit 63 is the sign."""
    candidates = first_candidates(torch.tensor([[1]]), torch.tensor([[0.0]]))
    for _ in range(63):
        candidates = more_candidates(candidates, torch.tensor([[[1]]]), torch.tensor([[[0.0]]]))
    tree = build_tree(torch.tensor([1]), torch.tensor([0]), candidates, 64)
    assert tree.positions[0].tolist() == list(range(64))
    assert tree.ancestors is not None and tree.ancestors[0, 62:].tolist() == [(1 << 63) - 1, -1]
    with pytest.raises(AssertionError):
        build_tree(torch.tensor([1]), torch.tensor([0]), candidates, 65)


def plain_accept(
    tokens: list[int], parents: list[int], draws: list[int], num_steps: int
) -> tuple[list[int], list[int]]:
    """The tokens that a request gets, and the nodes of its path."""
    path = [0]
    while len(path) <= num_steps:
        children = [n for n, p in enumerate(parents) if p == path[-1] and tokens[n] == draws[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return [draws[node] for node in path], path


@st.composite
def verified(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, parents, draws of random trees; few tokens, so that siblings may even be equal."""
    batch, size = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    ids = st.lists(st.integers(0, 2), min_size=size, max_size=size)
    parents = st.tuples(st.just(-1), *(st.integers(0, n - 1) for n in range(1, size))).map(list)
    tokens, trees, draws = zip(*(draw(st.tuples(ids, parents, ids)) for _ in range(batch)), strict=True)
    return list(tokens), list(trees), list(draws)


def check_accepted(
    tree: DraftTree, trees: list[list[int]], draws: list[list[int]], num_steps: int, rejected: list[bool]
) -> None:
    accepted = accept(tree, torch.tensor(draws), num_steps)
    assert accepted.token_ids.shape == accepted.path.shape == (len(draws), num_steps + 1)
    for b, (parents, drawn) in enumerate(zip(trees, draws, strict=True)):
        tokens, path = plain_accept(tree.token_ids[b].tolist(), parents, drawn, 0 if rejected[b] else num_steps)
        rest = [0] * (num_steps + 1 - len(tokens))
        assert accepted.token_ids[b].tolist() == tokens + rest
        assert accepted.path[b].tolist() == path + rest
        assert accepted.counts[b] == len(tokens)
        assert accepted.last_tokens[b] == tokens[-1]


@given(verified(), st.integers(0, 11), st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_path_follows_the_targets_draws(
    case: tuple[list[list[int]], list[list[int]], list[list[int]]], num_steps: int, rejected: list[bool]
) -> None:
    tokens, trees, draws = case
    num_steps = min(num_steps, len(tokens[0]) - 1)
    ids = torch.tensor(tokens)
    tree = DraftTree(ids, ids, torch.tensor(trees), ids)
    check_accepted(tree, trees, draws, num_steps, [False] * 4)
    rejected = rejected[: len(tokens)]
    check_accepted(replace(tree, is_rejected=torch.tensor(rejected)), trees, draws, num_steps, rejected)


@given(verified(), st.integers(0, 11), st.lists(st.booleans(), min_size=4, max_size=4))
def test_chains_are_trees_of_one_child_each(
    case: tuple[list[list[int]], list[list[int]], list[list[int]]], num_steps: int, rejected: list[bool]
) -> None:
    tokens, _, draws = case
    num_nodes = len(tokens[0])
    num_steps = min(num_steps, num_nodes - 1)
    ids, seq_lens = torch.tensor(tokens), torch.arange(len(tokens)) * 5 + 1
    tree = DraftTree(ids, seq_lens[:, None] + torch.arange(num_nodes), None, None)
    chains = [list(range(-1, num_nodes - 1))] * len(tokens)
    check_accepted(tree, chains, draws, num_steps, [False] * 4)
    rejected = rejected[: len(tokens)]
    check_accepted(replace(tree, is_rejected=torch.tensor(rejected)), chains, draws, num_steps, rejected)


IDS = st.sampled_from([0, 1, VOCAB - 1, VOCAB, -1, 2**40])
LOGPROBS = st.sampled_from([0.0, -1.0, float("-inf"), float("inf"), float("nan")])


@example([[(1, -1.0)] * 4], True)
@given(st.lists(st.lists(st.tuples(IDS, LOGPROBS), min_size=4, max_size=4), min_size=1, max_size=3), st.booleans())
def test_bad_drafts_become_harmless_and_stay_bad(requests: list[list[tuple[int, float]]], was_bad: bool) -> None:
    ids = torch.tensor([[token for token, _ in request] for request in requests]).view(-1, 2, 2)
    logprobs = torch.tensor([[logprob for _, logprob in request] for request in requests]).view(-1, 2, 2)
    before = torch.zeros(len(requests), dtype=torch.bool)
    before[0] = was_bad
    safe, scores, is_bad = check_draft(ids, logprobs, VOCAB, before)
    for b, request in enumerate(requests):
        fine = all(0 <= token < VOCAB and logprob <= 0 for token, logprob in request)
        assert is_bad[b] == (not fine or (b == 0 and was_bad))
        if is_bad[b]:
            assert not safe[b].any() and not scores[b].any()
        else:
            assert torch.equal(safe[b], ids[b]) and torch.equal(scores[b], logprobs[b])


def test_a_refused_draft_yields_the_targets_own_token() -> None:
    """Even if its harmless tokens are those that the target draws."""
    is_bad = torch.tensor([True, False, True])
    ids = torch.tensor([[3, 0, 0], [3, 0, 0], [0, 0, 0]])
    accepted = accept(DraftTree(ids, ids, None, None, is_bad), torch.zeros_like(ids), 2)
    assert accepted.counts.tolist() == [1, 3, 1]
    assert accepted.token_ids[0].tolist() == [0, 0, 0] and accepted.last_tokens.tolist() == [0, 0, 0]
