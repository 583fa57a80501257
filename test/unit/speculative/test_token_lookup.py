"""Drafts without a draft model: what is proposed, that rows have their requests' tokens whatever comes of these, and
that copied text doubles the tokens of a step. That no token changes is tested with the other kinds of drafts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from draft_checkpoints import VOCAB
from scheduler_driver import Driver, answers, make_model_driver, request
from speculative_driver import NGRAM, check_token_rows, continued, make_driver, models, plain_answers, requests
from tokenizers import Tokenizer

from fenceline.config.model_files import demo_model_path
from fenceline.ipc.io_struct import AbortReq, ContinueGenerationReq, PauseGenerationReq, TokenizedGenerateReq
from fenceline.model_executor.step import DepthChoice, StepCosts
from fenceline.scheduler.draft_depth import AdaptiveDepth
from fenceline.speculative.token_lookup import look_up_drafts
from fenceline_demo.generators import make_long_copy

__all__ = ["models"]  # a fixture


def expected_drafts(tokens: list[int], least: int, most: int, depth: int) -> list[int]:
    """The definition, token by token."""
    for size in range(min(most, len(tokens) - 1), least - 1, -1):
        wanted = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == wanted and min(wanted) >= 0:
                text = list(tokens)
                while len(text) < len(tokens) + depth:
                    text.append(text[end + len(text) - len(tokens)])
                return [max(token, 0) for token in text[len(tokens) :]]
    return [max(tokens[-1], 0)] * depth


@pytest.mark.parametrize("window", [(1, 1), (1, 4), (3, 12)])
def test_the_longest_match_and_of_several_the_latest(window: tuple[int, int]) -> None:
    random = Random(window[1])
    texts = [[random.choice((-1, 1, 2, 3, 4)) for _ in range(random.randrange(2, 60))] for _ in range(50)]
    held = torch.full((60, 80), 9, dtype=torch.int32)  # what is behind a request's end counts for nothing
    rows = torch.tensor(random.sample(range(1, 60), 50))
    for row, text in zip(rows.tolist(), texts, strict=True):
        held[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    input_ids = torch.full((50, 6), 7)
    look_up_drafts(rows, torch.tensor([len(text) for text in texts]), held, *window, input_ids)
    assert input_ids.tolist() == [[7, *expected_drafts(text, *window, 5)] for text in texts]


def test_a_repetition_goes_on_beyond_its_end() -> None:
    held, input_ids = (
        torch.tensor([[5, 8, 1, 2, 3, 1, 2, 3, 1]], dtype=torch.int32),
        torch.zeros(1, 8, dtype=torch.int64),
    )
    look_up_drafts(torch.tensor([0]), torch.tensor([9]), held, 1, 12, input_ids)
    assert input_ids[0, 1:].tolist() == [2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("retract_policy", ["offload", "recompute"])
def test_rows_have_the_tokens_of_their_requests(models: dict[str, Path], overlap: bool, retract_policy: str) -> None:
    """Of prompts in chunks and cached ones, when rows pass on, after aborts, retractions and pauses, in steps of any
    depth."""
    driver = make_driver(
        models, NGRAM, None, num_rows=4, max_total_tokens=192, schedule_conservativeness=0.01, depth_seed=3,
        disable_overlap_schedule=not overlap, retract_policy=retract_policy, memory_check="order",
        enable_hierarchical_cache=True, hicache_ratio=4.0,
    )  # fmt: skip
    first, num_checked = requests(11, num=8, max_new_tokens=30), 0
    plain = plain_answers(models, first)
    reqs = first + continued(first, plain)
    for index, req in enumerate(reqs):
        driver.send(req)
        for _ in range(3):
            driver.step()
            num_checked += check_token_rows(driver)
        if index == 4:
            driver.send(AbortReq(rid="r3"))
        if index in (6, 9):
            driver.send(PauseGenerationReq(id="p", mode="retract"), ContinueGenerationReq(id="c"))
        if index == 8:
            driver.send(PauseGenerationReq(id="p", mode="in_place"), ContinueGenerationReq(id="c"))
    while driver.scheduler.reqs or driver.flight is not None:
        driver.step()
        num_checked += check_token_rows(driver)
    ends = [driver.answers[req.rid].last for req in reqs]
    assert num_checked > 60 and any(end.cached_tokens for end in ends if end is not None)
    assert (
        driver.scheduler.stats.num_retractions > 0 and sum(end.num_retractions for end in ends if end is not None) > 4
    )
    for req, tokens in zip(reqs, plain_answers(models, reqs), strict=True):
        assert req.rid == "r3" or driver.answers[req.rid].output_ids == tokens
    driver.scheduler.close()


def test_as_many_drafts_count_after_a_hit(models: dict[str, Path]) -> None:
    """The prefix is not computed, and drafts are looked up in it all the same."""
    driver, random = make_driver(models, NGRAM, None), Random(2)
    text = [random.randrange(3, VOCAB) for _ in range(40)]
    found = []
    for turn in range(2):
        driver.send(request(f"{turn}", [*text, *text[:20]], max_new_tokens=30, temperature=0.4, ignore_eos=True))
        driver.run()
        found.append(driver.answers[f"{turn}"].last)
    cold, warm = found
    assert cold is not None and warm is not None and warm.cached_tokens >= 48 and cold.cached_tokens == 0
    assert cold.spec == warm.spec and driver.answers["0"].output_ids == driver.answers["1"].output_ids


def copies(num: int) -> list[TokenizedGenerateReq]:
    """Requests to the demo model for the words of a prompt again, which it can do."""
    tokenizer = Tokenizer.from_file(str(Path(demo_model_path()) / "tokenizer.json"))
    params = {"temperature": 0.0, "max_new_tokens": 200, "stop_token_ids": tuple(tokenizer.encode("\n").ids)}
    asked = [make_long_copy(Random(seed)).question for seed in range(num)]
    return [request(f"{i}", tokenizer.encode(f"Q: {text}\nA:").ids, **params) for i, text in enumerate(asked)]


def test_a_copy_takes_less_than_half_of_the_steps() -> None:
    """More than two tokens a step, and they are those without drafts."""
    driver = make_model_driver(speculative_algorithm="NGRAM", speculative_adaptive=False)
    found = answers(driver, copies(4))
    assert found == answers(make_model_driver(), copies(4))
    specs = [driver.answers[req.rid].last.spec for req in copies(4)]  # type: ignore[union-attr]
    num_steps = sum(spec.verify_ct for spec in specs if spec is not None)
    assert sum(len(tokens) - 1 for tokens in found) / num_steps > 2


def share_of_plain(driver: Driver, reqs: list[TokenizedGenerateReq]) -> tuple[float, Counter[int]]:
    """The time of answering ``reqs`` one by one, as a share of that of plain decoding, if a step takes longer with more
    rows as on a GPU; and how many steps had which depth."""
    seconds, depths, num_tokens = {0: 1.0, 1: 1.03, 7: 1.2}, Counter[int](), 0
    chooser = AdaptiveDepth(tuple(seconds), StepCosts((1,), (tuple(seconds.values()),)))
    choose = chooser.choose

    def choose_and_count(num_reqs: int, num_drafting: int, most: int) -> DepthChoice:
        choice = choose(num_reqs, num_drafting, most)
        depths[choice.depth] += 1
        return choice

    chooser.choose = choose_and_count  # type: ignore[method-assign]
    driver.scheduler.planner.draft_depth = chooser
    for req in reqs:
        num_tokens += len(answers(driver, [req])[0]) - 1  # the first one comes with the prompt
    return sum(seconds[depth] * num for depth, num in depths.items()) / num_tokens, depths


def test_where_nothing_repeats_little_is_lost(models: dict[str, Path]) -> None:
    """At most 3 % against plain decoding, of what the steps' depths take."""
    share, depths = share_of_plain(
        make_driver(models, NGRAM, None, 7, depth_seed=0), requests(4, 10, temperature=2.0, max_new_tokens=90)
    )
    assert share < 1.03 and depths[0] > 5 * depths[7] > 0


def test_where_all_repeats_steps_stay_deep() -> None:
    share, depths = share_of_plain(make_model_driver(1, speculative_algorithm="NGRAM"), copies(4))
    assert share < 0.5 and depths[7] > 0.9 * depths.total()
