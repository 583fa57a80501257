"""How many tokens each speculative step must have yielded, if its draft is a whole model.

A wrong draft is rejected and no token changes, so answers do not show one. But what such a draft proposes follows from
the request alone: it is what the oracle of the draft's weights draws, with the request's noise and temperature, behind
the tokens in front. So the step yields the tokens as far as these agree with the answer, and one more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fenceline.config.draft_config import StepShape
from fenceline.vgpu.proving.answers import Exchange
from fenceline.vgpu.proving.oracle import TOLERANCE, Answer, Oracle, Query


@dataclass(frozen=True, slots=True)
class Verified:
    """A step of ``shape`` has yielded ``count`` tokens of ``rid``, from output ``first`` on."""

    rid: str
    first: int
    count: int
    shape: StepShape


def compare_drafts(
    steps: Iterable[Verified], exchanges: Mapping[str, Exchange], oracle: Oracle, topk: int
) -> str:
    """The first step that has not yielded as many tokens as it must, "" if all have. ``oracle``: of the draft's
    weights; ``topk``: tokens that the draft proposes in each place. Steps whose drafts are some nodes of a tree are
    left out: which nodes those are depends on the scores of them all."""
    answers: dict[str, Answer] = {}
    for step in steps:
        exchange = exchanges[step.rid]
        num_nodes = step.shape.depth + 1 if topk == 1 else _num_nodes(topk, step.shape.depth)
        if num_nodes != step.shape.num_nodes:
            continue
        if step.rid not in answers:
            query = _query(exchange)
            answers[step.rid] = oracle.answer(query, tuple(enumerate(exchange.tokens)))
        wrong = _difference(step, exchange, answers[step.rid], topk)
        if wrong:
            return f"{step.rid}: {wrong}"
    return ""


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


def _difference(step: Verified, exchange: Exchange, answer: Answer, topk: int) -> str:
    params, most = exchange.request.sampling_params, step.shape.depth
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    if exchange.request.grammar or penalties != (1.0, 0.0, 0.0):
        most = 0  # its drafts may not count
    tokens, num_right = exchange.tokens[step.first :], 0
    while num_right < most:
        if num_right == len(tokens):  # it has ended there, and what was drawn behind is not known
            return "" if step.count >= num_right else _say(step, f"at least {num_right}")
        scores = answer.step(step.first + num_right).scores
        num_better = (scores > scores[tokens[num_right]] + TOLERANCE).sum()
        if (abs(scores - scores[tokens[num_right]]) <= TOLERANCE).sum() > 1:
            return ""  # rounding decides whether it was proposed
        if num_better >= topk:
            break
        num_right += 1
    return "" if step.count == num_right + 1 else _say(step, str(num_right + 1))


def _say(step: Verified, right: str) -> str:
    return (
        f"a step of depth {step.shape.depth} at output {step.first} yields {step.count} tokens, not {right}"
    )


__all__ = ["Verified", "compare_drafts"]
