"""Drafts of another depth in every step change no token, and lose nothing that the next one is proposed from."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_driver import Driver, answers, request
from speculative_driver import (
    CONTEXT,
    DRAFTS,
    EAGLE,
    EAGLE3,
    NEXTN,
    NGRAM,
    STANDALONE,
    continued,
    make_driver,
    models,
    plain_answers,
    requests,
)

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.ipc.io_struct import AbortReq
from fenceline.memory_order.graph import Graph
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import ForwardResult, HeldStep, StepBatch
from fenceline.scheduler.draft_depth import AdaptiveDepth
from fenceline_proof.random_depths import RandomDepths

__all__ = ["models"]  # a fixture


def depths_of(driver: Driver) -> RandomDepths:
    assert isinstance(driver.scheduler.planner.draft_depth, RandomDepths)
    return driver.scheduler.planner.draft_depth


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "draft", "topk"),
    [(*draft, topk) for draft in DRAFTS for topk in (1, 3) if draft[0] is not NGRAM and (draft[1], topk) != ("mtp", 3)],
)
def test_no_token_changes(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None, topk: int
) -> None:
    reqs = requests(topk, temperature=2.0)  # the common noise makes random drafts agree
    driver = make_driver(models, algorithm, draft, 3, topk=topk, depth_seed=1, memory_check="order")
    assert answers(driver, reqs) == plain_answers(models, reqs)
    counts = depths_of(driver).counts
    assert set(counts) == {0, 1, 3} and set(counts[0]) == {1}
    assert max(counts[1]) <= 2 and max(counts[3]) <= 4
    assert 2 in counts[1] and max(counts[3]) > 1


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}])
def test_a_step_that_looks_up_no_draft_is_one_replay(
    models: dict[str, Path], filters: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a decode step without speculation is, unless the sampler draws between its halves."""
    reqs = requests(2, num=3, temperature=0.7, **filters)
    driver = make_driver(models, NGRAM, None, depth_seed=1, cuda_graph_bs=(1, 2, 4), memory_check="order")
    replay, launch, done, steps = Graph.replay, driver.worker.launch, list[str](), list[tuple[int, list[str]]]()

    def replayed(graph: Graph) -> None:
        done.append(graph.name.partition("[")[0])
        replay(graph)

    def launched(batch: StepBatch) -> ForwardResult | HeldStep:
        done.clear()
        result = launch(batch)
        if batch.is_decode:
            steps.append((batch.depth.depth, list(done)))
        return result

    monkeypatch.setattr(Graph, "replay", replayed)
    driver.worker.launch = launched  # type: ignore[method-assign]
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert {depth for depth, _ in steps} == {0, 1, 3}
    for depth, names in steps:
        assert names == (["step"] if depth == 0 and not filters else ["verify", "accept"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_steps", "topk", "num_draft_tokens", "page_size"),
    [(1, 1, None, 4), (2, 1, None, 1), (5, 1, None, 4), (1, 2, 3, 1), (2, 2, 7, 4)],
)
def test_a_draft_that_is_the_target_is_always_right(
    models: dict[str, Path], num_steps: int, topk: int, num_draft_tokens: int | None, page_size: int
) -> None:
    """Whatever the depths before: no row of it is missing. Its trees are whole."""
    shape: dict[str, object] = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": num_draft_tokens}
    driver = make_driver(models, STANDALONE, "target", depth_seed=4, page_size=page_size, **shape)  # type: ignore[arg-type]
    reqs = requests(3, max_new_tokens=30)
    outputs = answers(driver, reqs)
    again = continued(reqs, outputs)
    assert outputs == plain_answers(models, reqs) and answers(driver, again) == plain_answers(models, again)
    for depth, counts in depths_of(driver).counts.items():
        assert set(counts) == {depth + 1}


@pytest.mark.parametrize(("algorithm", "draft", "topk"), [(NEXTN, "mtp", 1), (NGRAM, None, 1), (STANDALONE, "near", 4)])
def test_too_little_memory(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None, topk: int
) -> None:
    """Requests are retracted and resumed, by way of the host, and others aborted; memory is promised by depth."""
    flags: dict[str, object] = {"max_total_tokens": 192, "num_rows": 5, "retract_policy": "offload"}
    flags |= {
        "schedule_conservativeness": 0.01,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "memory_check": "order",
    }
    reqs = requests(11, num=8, max_new_tokens=40)
    driver = make_driver(models, algorithm, draft, topk=topk, depth_seed=7, **flags)  # type: ignore[arg-type]
    driver.send(*reqs)
    for _ in range(6):
        driver.step()
    driver.send(AbortReq(rid="r1"))
    driver.run(max_steps=100_000)
    expected = plain_answers(models, reqs)
    for req, tokens in zip(reqs, expected, strict=True):
        assert req.rid == "r1" or driver.answers[req.rid].output_ids == tokens
    assert driver.scheduler.stats.num_retractions > 0


@pytest.mark.parametrize("num_tokens", range(CONTEXT - 5, CONTEXT, 2))
def test_up_to_the_end_of_the_context(models: dict[str, Path], num_tokens: int) -> None:
    prompt = [5 + i % 90 for i in range(num_tokens)]
    reqs = [request("r", prompt, seed=4, max_new_tokens=50, ignore_eos=True)]
    expected = plain_answers(models, reqs)
    for seed in range(3):
        driver = make_driver(models, EAGLE3, "eagle3", page_size=1, depth_seed=seed)
        assert answers(driver, reqs) == expected


@pytest.mark.parametrize("topk", [1, 3])
def test_everything_that_a_request_may_ask_for(models: dict[str, Path], topk: int) -> None:
    prompts = [req.input_ids for req in requests(8, num=6)]
    options: list[dict[str, object]] = [
        {"top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {7: 4.0, 8: -2.0}},
        {"min_new_tokens": 12, "stop_token_ids": tuple(range(3, 60))},
        {"stop_token_ids": tuple(range(3, 30))},
        {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": (5, 9), "ignore_eos": True},
    ]
    reqs = [
        request(f"r{i}", prompt, seed=i, **{"temperature": 0.8, "max_new_tokens": 30, **wanted})
        for i, (prompt, wanted) in enumerate(zip(prompts, options, strict=True))
    ]
    driver, plain = make_driver(models, STANDALONE, "near", topk=topk, depth_seed=3), make_driver(models)
    assert answers(driver, reqs) == answers(plain, reqs)
    for req in reqs:
        assert driver.answers[req.rid].finish == plain.answers[req.rid].finish
    ours, theirs = driver.output_logprobs["r5"], plain.output_logprobs["r5"]
    assert ours == pytest.approx(theirs, abs=1e-4) and len(ours) == 30
    spec = driver.answers["r5"].last.spec  # type: ignore[union-attr]
    assert spec is not None and spec.num_accepted <= spec.num_drafts < 3 * spec.verify_ct


def test_a_simulated_acceptance_is_cut_to_the_depth(models: dict[str, Path]) -> None:
    driver = make_driver(models, EAGLE, "eagle", simulated_accept_length=2.5, depth_seed=2)
    answers(driver, requests(8, max_new_tokens=60))
    counts = depths_of(driver).counts
    assert set(counts[0]) == {1} and set(counts[1]) == {2} and set(counts[3]) == {2, 3}


def test_steps_are_measured_at_start(models: dict[str, Path]) -> None:
    """Nothing of that is left when the first request comes."""
    driver = make_driver(models, STANDALONE, "near", measures_steps=True, num_rows=6, memory_check="order")
    assert isinstance(driver.worker, ModelRunner)
    keys = driver.worker.kv_pool.row(0, "k")[driver.config.server_args.page_size :].flatten(1)  # without the sink
    computed = keys[keys.any(1)].unique(dim=0)
    assert len(computed) > 6 * 5, "steps of six requests, whose tokens are not the same"
    costs = driver.worker.step_costs
    assert costs is not None and costs.sizes == (1, 2, 4, 6) and len(costs.seconds) == 4
    assert all(len(of_size) == 3 and of_size[0] > 0 for of_size in costs.seconds)
    assert isinstance(driver.scheduler.planner.draft_depth, AdaptiveDepth)
    reqs = requests(5)
    assert answers(driver, reqs) == plain_answers(models, reqs)
    steps = driver.scheduler.control.state().spec_steps_by_depth
    assert steps is not None and set(steps) <= {"0", "1", "3"} and sum(steps.values()) > 10


@pytest.mark.parametrize(
    ("algorithm", "draft", "topk"), [(STANDALONE, "near", 4), pytest.param(EAGLE3, "eagle3", 1, marks=pytest.mark.long)]
)
def test_steps_are_measured_with_requests_that_fit_memory(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str, topk: int
) -> None:
    flags: dict[str, object] = {"max_total_tokens": 128, "num_rows": 6, "memory_check": "order"}
    driver = make_driver(models, algorithm, draft, topk=topk, measures_steps=True, **flags)  # type: ignore[arg-type]
    assert driver.worker.step_costs is not None
    reqs = requests(5, num=4, max_new_tokens=12)
    assert answers(driver, reqs) == plain_answers(models, reqs)
