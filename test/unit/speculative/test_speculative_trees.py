"""Trees of drafts change no token: with random small drafts, against the same server without speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler_driver import Driver, answers, request
from speculative_driver import (
    CONTEXT,
    EAGLE,
    EAGLE3,
    LATENT_DRAFTS,
    NEXTN,
    STANDALONE,
    continued,
    count_tokens,
    make_driver,
    models,
    plain_answers,
    requests,
    target_of,
)
from transformers import AutoModelForCausalLM

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.model_executor import proposals
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch
from fenceline.speculative.tree import Candidates

__all__ = ["models"]  # a fixture

DRAFTS = [(EAGLE, "eagle"), (EAGLE3, "eagle3"), (NEXTN, None), (STANDALONE, "near"), (STANDALONE, "target")]


SMALL, LARGE = (3, 2, 8, 1), (4, 4, 16, 16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "draft", "num_steps", "topk", "num_draft_tokens", "page_size"),
    [
        *(pytest.param(*draft, *LARGE) for draft in DRAFTS),
        pytest.param(*LATENT_DRAFTS[1].values, *LARGE),
        # Pages of one token are moved alike for all drafts: one with hidden states, one without, one with latents.
        *((EAGLE, "eagle", *SMALL), (STANDALONE, "target", *SMALL), (NEXTN, "glm-5-shared", *SMALL)),
    ],
)
def test_no_token_changes(
    models: dict[str, Path],
    algorithm: SpeculativeAlgorithm,
    draft: str | None,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    page_size: int,
) -> None:
    reqs = requests(num_steps)
    driver = make_driver(
        models, algorithm, draft, num_steps, topk=topk, num_draft_tokens=num_draft_tokens, page_size=page_size
    )
    counted = count_tokens(driver)
    assert answers(driver, reqs) == plain_answers(models, reqs, target_of(draft))
    if draft == "target":
        # The first child of each node is what the target draws, and the best of its place.
        assert min(counted) > 1 and counted.most_common(1)[0][0] == num_steps + 1
    else:
        assert {1, 2} <= set(counted) <= set(range(1, num_steps + 2))


def test_every_node_of_a_whole_tree(models: dict[str, Path]) -> None:
    """All candidates of two steps are verified, so a draft that is the target loses none of its own path."""
    driver = make_driver(models, STANDALONE, "target", 2, topk=2, num_draft_tokens=7)
    counted = count_tokens(driver)
    reqs = requests(4)
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert set(counted) == {3}


@dataclass(frozen=True)
class Forward:
    """One forward of the draft: rows [requests * topk, ...]."""

    hidden: torch.Tensor
    logits: torch.Tensor
    next_hidden: torch.Tensor


class WatchedDraft:
    """What the draft computes in each step, and the candidates that are made of it, in order."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(driver.worker, ModelRunner) and driver.worker.draft is not None
        self.seen: list[Candidates | Forward] = []  # of the latest step
        self.texts: list[list[int]] = []  # of its requests
        launch, forward = driver.worker.launch, driver.worker.draft.forward

        def launched(batch: StepBatch) -> ForwardResult | HeldStep:
            self.seen = []
            self.texts = [req.token_ids().tolist() for req in driver.scheduler.running.reqs]
            return launch(batch)

        def watched(batch: ForwardBatch, hidden: torch.Tensor, *layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            logits, following = forward(batch, hidden, *layer)
            self.seen.append(Forward(hidden.clone(), logits.clone(), following.clone()))
            return logits, following

        def noted(make: Callable[..., Candidates]) -> Callable[..., Candidates]:
            def call(*args: Any) -> Candidates:
                self.seen.append(made := make(*args))
                return made

            return call

        monkeypatch.setattr(driver.worker, "launch", launched)
        monkeypatch.setattr(driver.worker.draft, "forward", watched)
        for name in ("first_candidates", "more_candidates"):
            monkeypatch.setattr(proposals, name, noted(getattr(proposals, name)))


_BRANCHES: dict[str, object] = {"topk": 3, "num_draft_tokens": 12, "disable_overlap_schedule": True}


def test_each_row_that_the_draft_computes_sees_its_own_path(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong ancestor changes no answer, only what is proposed: the logits of each node of a frontier are those of the
    same model after the request's tokens and the node's path."""
    driver = make_driver(models, STANDALONE, "near", 4, **_BRANCHES)  # type: ignore[arg-type]
    watched = WatchedDraft(driver, monkeypatch)
    reference = AutoModelForCausalLM.from_pretrained(models["near"], dtype=torch.float32).eval()
    driver.send(*requests(6, num=2, max_new_tokens=12, ignore_eos=True))
    num_compared, branched = 0, False
    while driver.pending or driver.scheduler.reqs:
        driver.step()
        for candidates, forward in pairwise(watched.seen):
            if not isinstance(candidates, Candidates) or isinstance(forward, Candidates):
                continue
            branched |= candidates.num_steps > 1 and bool((candidates.frontier_rows != torch.arange(3)).any())
            for b, rows in enumerate(forward.logits.view(len(candidates.frontier), 3, -1)):
                for node, row in zip(candidates.frontier[b].tolist(), rows, strict=True):
                    path: list[int] = []
                    while node >= 0:
                        path.insert(0, int(candidates.token_ids[b, node]))
                        node = int(candidates.parents[b, node])
                    with torch.no_grad():
                        expected = reference(torch.tensor([watched.texts[b] + path])).logits[0, -1]
                    torch.testing.assert_close(row, expected, atol=1e-3, rtol=1e-3)
                    num_compared += 1
    assert num_compared > 50 and branched


def test_each_row_of_a_frontier_follows_its_parents_state(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(models, EAGLE, "eagle", 4, **_BRANCHES)  # type: ignore[arg-type]
    watched, branched = WatchedDraft(driver, monkeypatch), False
    driver.send(*requests(6, num=2, max_new_tokens=12, ignore_eos=True))
    while driver.pending or driver.scheduler.reqs:
        driver.step()
        for before, candidates, after in zip(watched.seen, watched.seen[1:], watched.seen[2:], strict=False):
            if not isinstance(before, Forward) or not isinstance(after, Forward):
                continue
            if isinstance(candidates, Candidates) and len(after.hidden) == len(before.hidden):
                above = candidates.frontier_rows + 3 * torch.arange(len(candidates.frontier))[:, None]
                assert torch.equal(after.hidden, before.next_hidden[above.flatten()])
                branched |= bool((candidates.frontier_rows != torch.arange(3)).any())
    assert branched


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE3, "eagle3"), (STANDALONE, "target")])
def test_prefixes_that_are_cached(models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str) -> None:
    """Prompts that continue earlier answers: pages hold the accepted tokens, each in its own slot."""
    driver = make_driver(models, algorithm, draft, topk=3)
    first = requests(5, num=4, max_new_tokens=30)
    outputs = answers(driver, first)
    assert outputs == plain_answers(models, first)
    again = continued(first, outputs)
    assert answers(driver, again) == plain_answers(models, again)
    for req in again:
        last = driver.answers[req.rid].last
        assert last is not None and last.cached_tokens >= (len(req.input_ids) - 3) // 16 * 16


def test_everything_that_a_request_may_ask_for(models: dict[str, Path]) -> None:
    prompts = [req.input_ids for req in requests(8, num=7)]
    options: list[dict[str, object]] = [
        {"top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {7: 4.0, 8: -2.0}},
        {"min_new_tokens": 12, "stop_token_ids": tuple(range(3, 60))},
        {"stop_token_ids": tuple(range(3, 30))},
        {"return_logprob": True, "top_logprobs_num": 3, "ignore_eos": True},
        {"return_logprob": True, "token_ids_logprob": (5, 9), "ignore_eos": True},
    ]
    reqs = [
        request(f"r{i}", prompt, seed=i, **{"temperature": 0.8, "max_new_tokens": 30, **wanted})
        for i, (prompt, wanted) in enumerate(zip(prompts, options, strict=True))
    ]
    driver = make_driver(models, STANDALONE, "near", topk=3)
    counted, plain = count_tokens(driver), make_driver(models)
    assert answers(driver, reqs) == answers(plain, reqs)
    assert max(counted) > 2
    for req in reqs:
        assert driver.answers[req.rid].finish == plain.answers[req.rid].finish
    for rid in ("r5", "r6"):
        ours, theirs = driver.output_logprobs[rid], plain.output_logprobs[rid]
        assert ours == pytest.approx(theirs, abs=1e-4) and len(ours) == 30


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "draft", "retract_policy"), [(EAGLE, "eagle", "recompute"), (STANDALONE, "near", "offload")]
)
def test_too_little_memory(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str, retract_policy: str
) -> None:
    """Requests are retracted and resumed; rows and pages pass from one to the next."""
    flags: dict[str, object] = {"max_total_tokens": 208, "num_rows": 5, "retract_policy": retract_policy}
    if retract_policy == "offload":
        flags |= {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "memory_check": "order"}
    reqs = requests(11, num=8, max_new_tokens=40)
    driver = make_driver(models, algorithm, draft, topk=2, **flags)  # type: ignore[arg-type]
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert driver.scheduler.stats.num_retractions > 0


@pytest.mark.parametrize("num_tokens", [CONTEXT - 5, CONTEXT - 1])
def test_up_to_the_end_of_the_context(models: dict[str, Path], num_tokens: int) -> None:
    """The last step computes nodes beyond the context, which are nobody's."""
    prompt = [5 + i % 90 for i in range(num_tokens)]
    reqs = [request("r", prompt, seed=4, max_new_tokens=50, ignore_eos=True)]
    expected = plain_answers(models, reqs)
    assert len(expected[0]) == CONTEXT - num_tokens
    for algorithm, draft in ((EAGLE3, "eagle3"), (STANDALONE, "target")):
        driver = make_driver(models, algorithm, draft, topk=4, num_draft_tokens=20, page_size=1)
        assert answers(driver, reqs) == expected


def test_a_request_that_is_admitted_has_room_for_its_last_tree(models: dict[str, Path]) -> None:
    """Two requests fit into memory by their tokens, but not with the nodes behind the last one: the second waits."""
    reqs = [request(f"r{i}", [5 + i] * 20, max_new_tokens=20, ignore_eos=True) for i in range(2)]
    flags: dict[str, object] = {"topk": 4, "num_draft_tokens": 20, "page_size": 1, "max_total_tokens": 92}
    driver = make_driver(models, EAGLE, "eagle", schedule_conservativeness=2.0, **flags)  # type: ignore[arg-type]
    driver.send(*reqs)
    driver.step()
    first = driver.scheduler.reqs["r0"]
    while len(first.output_ids) < 10:
        assert driver.scheduler.reqs["r1"].row == 0
        driver.step()
    driver.run()
    assert [driver.answers[req.rid].output_ids for req in reqs] == plain_answers(models, reqs)
