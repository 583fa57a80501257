"""Speculation changes no token: with random small drafts, against the same server without speculation. In float32 on
the CPU."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from draft_checkpoints import VOCAB
from scheduler_driver import answers, request
from speculative_driver import (
    CONTEXT,
    DRAFTS,
    EAGLE,
    EAGLE3,
    LATENT_DRAFTS,
    NEXTN,
    NGRAM,
    STANDALONE,
    continued,
    count_tokens,
    make_driver,
    models,
    plain_answers,
    requests,
    target_of,
)

from fenceline.config.draft_config import SpeculativeAlgorithm
from fenceline.ipc.io_struct import AbortReq
from fenceline.layers.forward_batch import ForwardBatch
from fenceline.model_executor.model_runner import ModelRunner
from fenceline_proof.flashinfer_library import FLASHINFER

__all__ = ["models"]  # a fixture


@pytest.mark.parametrize(
    ("algorithm", "draft", "num_steps", "overlap"),
    [
        *(pytest.param(*draft, 4, False) for draft in DRAFTS),
        *(pytest.param(*draft.values, 4, False, marks=draft.marks) for draft in LATENT_DRAFTS),
        (EAGLE, "eagle", 1, True),
        (NGRAM, None, 1, True),
    ],
)
def test_no_token_changes(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None, num_steps: int, overlap: bool
) -> None:
    reqs = requests(num_steps)
    driver = make_driver(models, algorithm, draft, num_steps, disable_overlap_schedule=not overlap)
    counted = count_tokens(driver)
    assert answers(driver, reqs) == plain_answers(models, reqs, target_of(draft))
    check_counts(counted, draft, num_steps)


def check_counts(counted: Counter[int], draft: str | None, num_steps: int) -> None:
    if draft == "target":
        assert set(counted) == {num_steps + 1}, "a draft that is the target draws what the target draws"
    else:
        assert {1, 2} <= set(counted) <= set(range(1, num_steps + 2)), "drafts were accepted, and drafts were not"


@pytest.mark.parametrize("topk", [1, 3])
def test_a_draft_that_may_propose_some_tokens_alone(models: dict[str, Path], tmp_path: Path, topk: int) -> None:
    """--speculative-token-map: the draft's head has the map's rows of the target's, and no token changes."""
    ids = Random(2).sample(range(VOCAB), VOCAB // 2)
    torch.save(ids, tmp_path / "frequent.pt")
    reqs = requests(4)
    driver = make_driver(models, EAGLE, "eagle", topk=topk, token_map=tmp_path / "frequent.pt")
    counted = count_tokens(driver)
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert {1, 2} <= set(counted), "drafts were accepted, and drafts were not"
    assert isinstance(driver.worker, ModelRunner) and driver.worker.draft is not None
    draft, head = driver.worker.draft, driver.worker.model.lm_head.weight.data
    assert draft.target_ids is not None and draft.target_ids.tolist() == sorted(ids)
    whole = make_driver(models, EAGLE, "eagle").worker
    assert isinstance(whole, ModelRunner) and whole.draft is not None
    assert torch.equal(draft.lm_head.weight.data, whole.draft.lm_head.weight.data[draft.target_ids])
    assert len(draft.lm_head.weight.data) < len(head)


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE, "eagle"), (STANDALONE, "target")])
def test_a_prefill_backend_made_for_the_layers_it_attends_in(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str
) -> None:
    """FlashInfer's keeps views of its layers; a draft's whose heads are the target's are among them."""
    reqs = requests(1)
    driver = make_driver(models, algorithm, draft, prefill_backend=FLASHINFER)
    assert answers(driver, reqs) == plain_answers(models, reqs)


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE3, "eagle3"), (NEXTN, "mtp"), (NGRAM, None)])
def test_prefixes_that_are_cached(models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None) -> None:
    """Prompts that continue earlier answers: pages hold accepted tokens alone, of target and draft."""
    driver = make_driver(models, algorithm, draft)
    counted = count_tokens(driver)
    first = requests(5, num=4, max_new_tokens=30)
    outputs = answers(driver, first)
    assert outputs == plain_answers(models, first)
    check_counts(counted, draft, 3)
    again = continued(first, outputs)
    assert answers(driver, again) == plain_answers(models, again)
    for req in again:
        last = driver.answers[req.rid].last
        assert last is not None and last.cached_tokens >= (len(req.input_ids) - 2) // 16 * 16


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE3, "eagle3"), (STANDALONE, "target"), (NGRAM, None)])
def test_everything_that_a_request_may_ask_for(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str | None
) -> None:
    rng = Random(3)
    reqs = [
        request(
            f"r{i}",
            [rng.randrange(3, VOCAB) for _ in range(20)],
            seed=i,
            temperature=0.8,
            **{"max_new_tokens": 30, **options},
        )
        for i, options in enumerate(
            [
                {"top_p": 0.9},
                {"top_k": 5, "min_p": 0.05},
                {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
                {"logit_bias": {7: 4.0, 8: -2.0}},
                {"min_new_tokens": 12, "stop_token_ids": tuple(range(3, 60))},
                {"stop_token_ids": tuple(range(3, 30))},
                {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0, "ignore_eos": True},
                {"max_new_tokens": 1},
            ]
        )
    ]
    driver, plain = make_driver(models, algorithm, draft), make_driver(models)
    assert answers(driver, reqs) == answers(plain, reqs)
    for req in reqs:
        ours, theirs = driver.answers[req.rid], plain.answers[req.rid]
        assert ours.finish == theirs.finish
    ours, theirs = driver.output_logprobs["r6"], plain.output_logprobs["r6"]
    assert ours == pytest.approx(theirs, abs=1e-4) and len(ours) == 30


@pytest.mark.parametrize(
    ("algorithm", "draft", "accept_length"), [(EAGLE, "eagle", 1.0), (EAGLE, "eagle", 2.7), (STANDALONE, "near", 4.0)]
)
def test_simulated_acceptance(
    models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str, accept_length: float
) -> None:
    """As many tokens a step as were asked for, on average, whatever the draft proposes; requests with penalties get one
    all the same."""
    driver = make_driver(models, algorithm, draft, simulated_accept_length=accept_length, memory_check="order")
    counted = count_tokens(driver)
    reqs = requests(8, max_new_tokens=60)
    assert [len(tokens) for tokens in answers(driver, reqs)] == [60] * 8
    assert set(counted) == {int(accept_length), math.ceil(accept_length)}
    mean = sum(count * times for count, times in counted.items()) / counted.total()
    assert mean == pytest.approx(accept_length, abs=0.1)
    counted.clear()
    answers(driver, [request("penalised", [5, 6], frequency_penalty=0.5, max_new_tokens=8, ignore_eos=True)])
    assert set(counted) == {1}


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE, "eagle"), (STANDALONE, "near"), (STANDALONE, "target")])
def test_too_little_memory(models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str) -> None:
    """Requests are retracted and resumed; rows and pages pass from one to the next."""
    reqs = requests(11, num=8, max_new_tokens=40)
    small: dict[str, object] = {"max_total_tokens": 192, "num_rows": 5}
    driver = make_driver(models, algorithm, draft, **small)  # type: ignore[arg-type]
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert driver.scheduler.stats.num_retractions > 0


@pytest.mark.parametrize("num_tokens", range(CONTEXT - 5, CONTEXT, 2))
def test_up_to_the_end_of_the_context(models: dict[str, Path], num_tokens: int) -> None:
    """The last step computes rows beyond the context, which are nobody's."""
    prompt = [5 + i % 90 for i in range(num_tokens)]
    reqs = [request("r", prompt, seed=4, max_new_tokens=50, ignore_eos=True)]
    expected = plain_answers(models, reqs)
    assert len(expected[0]) == CONTEXT - num_tokens
    for algorithm, draft in ((EAGLE3, "eagle3"), (STANDALONE, "target"), (NGRAM, None)):
        assert answers(make_driver(models, algorithm, draft, page_size=1), reqs) == expected


@pytest.mark.parametrize(
    ("draft", "shape"), [("eagle3", {}), ("target", {"topk": 4, "num_draft_tokens": 20})], ids=["chain", "tree"]
)
def test_graphs_up_to_the_end_of_the_context(models: dict[str, Path], draft: str, shape: dict[str, object]) -> None:
    """Batches as large as a graph, one larger and one smaller; the attention that a graph has captured reaches the
    rows beyond the context too."""
    algorithm = EAGLE3 if draft == "eagle3" else STANDALONE
    prompts = [[5 + j * (i + 3) % 90 for j in range(CONTEXT - 6 - 9 * i)] for i in range(4)]
    reqs = [request(f"r{i}", prompt, max_new_tokens=50, ignore_eos=True) for i, prompt in enumerate(prompts)]
    flags: dict[str, object] = {"page_size": 1, "chunked_prefill_size": 1024, "cuda_graph_bs": (1, 3)}
    driver = make_driver(models, algorithm, draft, **(flags | shape))  # type: ignore[arg-type]
    assert answers(driver, reqs) == plain_answers(models, reqs)
    stats = driver.worker.graph_stats
    assert stats is not None and all(stats.replays_by_size.values()) and stats.fallbacks["size"]


def test_a_simulated_acceptance_keeps_the_last_token(models: dict[str, Path]) -> None:
    """From which a draft without hidden states goes on, though nobody has proposed it."""
    driver = make_driver(models, STANDALONE, "near", simulated_accept_length=3.5, disable_overlap_schedule=True)
    assert isinstance(driver.worker, ModelRunner) and driver.worker.speculative is not None
    driver.send(*requests(3, num=4, max_new_tokens=20))
    previous = driver.worker.speculative.state.previous
    num_compared = 0
    for _ in range(12):
        driver.step()
        for req in (req for req in driver.scheduler.running.reqs if not req.left):
            assert previous[req.row] == req.token_ids()[-2]
            num_compared += 1
    assert num_compared > 8


def test_aborts_free_everything(models: dict[str, Path]) -> None:
    driver = make_driver(models, EAGLE, "eagle")
    reqs = requests(2, max_new_tokens=39)
    driver.send(*reqs)
    for req in reqs[::2]:
        driver.step()
        driver.step()
        driver.send(AbortReq(rid=req.rid))
    driver.run()
    plain = plain_answers(models, reqs)
    for req, expected in list(zip(reqs, plain, strict=True))[1::2]:
        assert driver.answers[req.rid].output_ids == expected


@pytest.mark.parametrize(
    ("algorithm", "draft", "broken"),
    [(EAGLE, "eagle", float("nan")), (EAGLE3, "eagle3", float("inf")), (STANDALONE, "near", float("nan"))],
)
def test_a_broken_draft_changes_no_token(
    models: dict[str, Path],
    algorithm: SpeculativeAlgorithm,
    draft: str | None,
    broken: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every third draft's logits one is not a number. Its request is named in the log, once."""
    driver = make_driver(models, algorithm, draft)
    assert isinstance(driver.worker, ModelRunner) and driver.worker.draft is not None
    forward, num_calls = driver.worker.draft.forward, 0

    def break_one(batch: ForwardBatch, hidden: torch.Tensor, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal num_calls
        num_calls += 1
        logits, following = forward(batch, hidden, step)
        if num_calls % 3 == 0 and len(logits):
            logits[num_calls % len(logits), 5] = broken
        return logits, following

    monkeypatch.setattr(driver.worker.draft, "forward", break_one)
    reqs = requests(6)
    assert answers(driver, reqs) == plain_answers(models, reqs)
    assert driver.scheduler.stats.num_bad_drafts > 0


@pytest.mark.parametrize(("algorithm", "draft"), [(EAGLE3, "eagle3"), (STANDALONE, "near"), (STANDALONE, "target")])
def test_prefixes_from_the_host_tier(models: dict[str, Path], algorithm: SpeculativeAlgorithm, draft: str) -> None:
    """Pages hold the draft's layers on the host too, and the checker of orders knows what a step writes."""
    flags: dict[str, object] = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "hicache_write_policy": "write_through",
        "max_total_tokens": 240,
        "num_rows": 3,
        "memory_check": "order",
    }
    driver = make_driver(models, algorithm, draft, **flags)  # type: ignore[arg-type]
    first = requests(21, num=9, max_new_tokens=20)
    outputs = answers(driver, first)
    assert outputs == plain_answers(models, first)
    again = [
        request(f"again{i}", [*req.input_ids, *output, 9], seed=i, max_new_tokens=12, ignore_eos=True)
        for i, (req, output) in enumerate(zip(first, outputs, strict=True))
    ]
    assert answers(driver, again) == plain_answers(models, again)
    details = [driver.answers[req.rid].last.cached_tokens_details for req in again]  # type: ignore[union-attr]
    assert sum(detail.host for detail in details if detail is not None) > 0
