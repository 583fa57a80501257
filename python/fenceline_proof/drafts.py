"""How many tokens each speculative step must have yielded, if its draft is a whole model or layers that look ahead.

A wrong draft is rejected and no token changes, so answers do not show one. But what such a draft proposes follows from
the request alone: it is what the oracle of the draft's weights draws, with the request's noise and temperature, behind
the tokens in front. So the step yields the tokens as far as these agree with the answer, and one more. Of a draft that
computes several steps with one such layer only the first proposal is known here.

Of trees of which not all candidates are verified, the nodes are chosen here again, from the scores that the draft's
weights give behind each path. That takes many forwards, so it is done for some steps of a run.

Most proposals of layers that look ahead are wrong, since their weights are random, and then the number of tokens does
not show whether they are the right wrong ones. So for some steps of a run, whose drafts are a chain, each proposal is
compared with the one that the draft's weights draw behind the tokens and proposals in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fenceline.config.draft_config import StepShape
from fenceline_proof.answers import Exchange
from fenceline_proof.oracle import F64, TOLERANCE, Lookahead, Oracle, Query, scores_of
from fenceline_sim.speculative_tags import Proposed

_MOST_TREES = 16  # in a run
_MOST_CHAINS = 24
_CLOSE = 1e-4  # sums of logarithms of shares


@dataclass(frozen=True, slots=True)
class Verified:
    """A step of ``shape`` has yielded ``count`` tokens of ``rid``, from output ``first`` on."""

    rid: str
    first: int
    count: int
    shape: StepShape


def compare_drafts(
    steps: Iterable[Verified], exchanges: Mapping[str, Exchange], oracle: Oracle | Lookahead, topk: int
) -> str:
    """The first step that has not yielded as many tokens as it must, "" if all have. ``oracle``: of the draft's
    weights; ``topk``: tokens that the draft proposes in each place. Steps whose drafts are some nodes of a tree are
    left out if the draft is no whole model. So are requests whose weights were replaced, if the draft reads what these
    compute."""
    scores: dict[str, Callable[[int, int], F64]] = {}
    trees = []
    for step in steps:
        exchange = exchanges[step.rid]
        num_nodes = step.shape.depth + 1 if topk == 1 else _num_nodes(topk, step.shape.depth)
        if _not_known(exchange, oracle):
            continue
        if num_nodes != step.shape.num_nodes and not _may_not_count(exchange):
            trees.append(step)
            continue
        if step.rid not in scores:
            make = _drawn_alone if isinstance(oracle, Oracle) else _looked_ahead
            scores[step.rid] = make(exchange, oracle)  # type: ignore[arg-type]
        most = step.shape.depth if isinstance(oracle, Oracle) else oracle.num_layers
        wrong = _difference(step, exchange, scores[step.rid], topk, most)
        if wrong:
            return f"{step.rid}: {wrong}"
    # What a node deep in the tree proposes shows only where those above it are accepted.
    trees.sort(key=lambda step: -step.count)
    if not isinstance(oracle, Oracle):
        return ""
    for step in trees[:_MOST_TREES]:
        wrong = _compare_tree(step, exchanges[step.rid], oracle, topk)
        if wrong:
            return f"{step.rid}: {wrong}"
    return ""


def compare_proposals(
    steps: Sequence[Proposed], exchanges: Mapping[str, Exchange], oracle: Oracle | Lookahead
) -> str:
    """The first proposal that the draft's weights do not draw, "" if there is none. ``oracle``: of these weights."""
    known = [step for step in steps if not _not_known(exchanges[step.rid], oracle)]
    for step in known[:: -(-len(known) // _MOST_CHAINS) or 1]:
        exchange = exchanges[step.rid]
        query = _query(exchange)
        tokens = (*query.prompt, *exchange.tokens)[: step.num_tokens]
        if len(tokens) < step.num_tokens:
            continue  # it has left meanwhile, and its last tokens are not known
        for ahead, scores in enumerate(_scores_ahead(tokens, step.drafts, query, oracle)):
            draft = step.drafts[ahead]
            if scores[draft] < scores.max() - TOLERANCE:
                return (
                    f"{step.rid}: draft {ahead} behind {len(tokens)} tokens is {draft}, not {scores.argmax()}"
                )
    return ""


def _scores_ahead(
    tokens: tuple[int, ...], drafts: tuple[int, ...], query: Query, oracle: Oracle | Lookahead
) -> list[F64]:
    """The scores of each of the ``drafts`` that is known behind ``tokens`` and the drafts in front of it."""
    if isinstance(oracle, Oracle):
        answer = oracle.answer(replace(query, prompt=tokens), tuple(enumerate(drafts)))
        return [answer.step(ahead).scores for ahead in range(len(drafts))]
    num, logits = len(tokens), oracle.logits((*tokens, *drafts))
    return [
        scores_of(logits[ahead][num - 2], query, num + ahead)
        for ahead in range(min(len(drafts), oracle.num_layers))
    ]


def _not_known(exchange: Exchange, oracle: Oracle | Lookahead) -> bool:
    return isinstance(oracle, Lookahead) and any(folder for _, folder in exchange.weights)


def _drawn_alone(exchange: Exchange, oracle: Oracle) -> Callable[[int, int], F64]:
    """The scores of what a draft that is a whole model draws ``ahead`` tokens behind the first ``num`` outputs."""
    answer = oracle.answer(_query(exchange), tuple(enumerate(exchange.tokens)))
    return lambda num, ahead: answer.step(num + ahead).scores


def _looked_ahead(exchange: Exchange, layers: Lookahead) -> Callable[[int, int], F64]:
    """The same of layers that look ahead, each of which draws one of the tokens, if those before it are right."""
    query = _query(exchange)
    logits = layers.logits((*query.prompt, *exchange.tokens))
    num_prompt = len(query.prompt)

    def scores(num: int, ahead: int) -> F64:
        return scores_of(logits[ahead][num_prompt + num - 2], query, num_prompt + num + ahead)

    return scores


def _num_nodes(topk: int, depth: int) -> int:
    """Nodes of a tree of which all candidates are verified: up to depth 2 every path is among them."""
    return {0: 1, 1: 1 + topk, 2: 1 + topk + topk * topk}.get(depth, 0)


def _query(exchange: Exchange) -> Query:
    """What the draft's proposals depend on: no filter, no bias and no grammar."""
    params = exchange.request.sampling_params
    greedy = params.temperature < 1e-6 or params.top_k == 1
    return Query(
        prompt=tuple(exchange.request.input_ids),
        seed=exchange.seed,
        temperature=0.0 if greedy else params.temperature,
    )


def _difference(
    step: Verified, exchange: Exchange, scores_of_draft: Callable[[int, int], F64], topk: int, num_known: int
) -> str:
    """``num_known``: how many of the proposals ``scores_of_draft`` knows."""
    most = 0 if _may_not_count(exchange) else step.shape.depth
    tokens, num_right = exchange.tokens[step.first :], 0
    while num_right < most:
        if num_right == len(tokens):  # it has ended there, and what was drawn behind is not known
            return "" if step.count >= num_right else _say(step, f"at least {num_right}")
        if num_right == num_known:
            return "" if step.count > num_right else _say(step, f"at least {num_right + 1}")
        scores = scores_of_draft(step.first, num_right)
        num_better = (scores > scores[tokens[num_right]] + TOLERANCE).sum()
        if (abs(scores - scores[tokens[num_right]]) <= TOLERANCE).sum() > 1:
            return ""  # rounding decides whether it was proposed
        if num_better >= topk:
            break
        num_right += 1
    return "" if step.count == num_right + 1 else _say(step, str(num_right + 1))


def _may_not_count(exchange: Exchange) -> bool:
    """Whether drafts of this request may not be accepted."""
    params = exchange.request.sampling_params
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return bool(exchange.request.grammar) or penalties != (1.0, 0.0, 0.0)


def _compare_tree(step: Verified, exchange: Exchange, oracle: Oracle, topk: int) -> str:
    paths = _chosen_paths(step, exchange, oracle, topk)
    if paths is None:
        return ""
    tokens, num_right = exchange.tokens[step.first :], 0
    while num_right < len(tokens) and tuple(tokens[: num_right + 1]) in paths:
        num_right += 1
    if num_right == len(tokens):  # it has ended there, and what was drawn behind is not known
        return "" if step.count >= num_right else _say(step, f"at least {num_right}")
    return "" if step.count == num_right + 1 else _say(step, str(num_right + 1))


def _chosen_paths(
    step: Verified, exchange: Exchange, oracle: Oracle, topk: int
) -> set[tuple[int, ...]] | None:
    """The tokens in front of and in each node of the step's tree, without the root. None if rounding decides."""
    query = _query(exchange)
    root = (*query.prompt, *exchange.tokens[: step.first])
    found: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(step.shape.depth):
        level = []
        for total, path in frontier:
            scores = oracle.answer(replace(query, prompt=root + path)).step(0).scores
            shares = scores - scores.max()
            shares -= np.log(np.exp(shares).sum())
            best = [(total + shares[token], (*path, token)) for token in range(len(shares))]
            children = _best(best, topk)
            if children is None:
                return None
            level += children
        found += level
        ahead = _best(level, topk)
        if ahead is None:
            return None
        frontier = ahead
    nodes = _best(found, step.shape.num_nodes - 1)
    return None if nodes is None else {path for _, path in nodes}


def _best(
    candidates: list[tuple[float, tuple[int, ...]]], num: int
) -> list[tuple[float, tuple[int, ...]]] | None:
    """The ``num`` best, None if the next one is as good but for rounding."""
    ordered = sorted(candidates, reverse=True)
    is_close = len(ordered) > num and ordered[num - 1][0] - ordered[num][0] < _CLOSE
    return None if is_close else ordered[:num]


def _say(step: Verified, right: str) -> str:
    return (
        f"a step of depth {step.shape.depth} at output {step.first} yields {step.count} tokens, not {right}"
    )


__all__ = ["Verified", "compare_drafts", "compare_proposals"]
