"""Steps that yield one to four tokens for each request: nobody's tokens change, and all memory comes back.

The worker decides by a request's history how many of its drafts are accepted; rejected ones leave what is no token in
the slots behind, so that whoever takes them for KV answers wrongly. See ``token_worker``.
"""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import (
    Driver,
    assert_right,
    capacity,
    expected_output,
    make_driver,
    make_tiered_driver,
    request,
)  # fmt: skip
from token_worker import VOCAB_SIZE, TokenWorker
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from fenceline.config.draft_config import StepShape
from fenceline.frontend.detokenizer_manager import Detokenizer
from fenceline.frontend.tokenizer import Tokenizer
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchTokenOut,
    ContinueGenerationReq,
    PauseGenerationReq,
    TokenizedGenerateReq,
)
from fenceline.model_executor.step import StepBatch, StepCosts
from fenceline.scheduler.draft_depth import AdaptiveDepth
from fenceline.scheduler.flight_dump import dump_json
from fenceline_proof.random_depths import RandomDepths

MOST = 4
PROMPT = [5, 6, 7, 8, 9]


def driver_of(**flags: object) -> Driver:
    return make_driver(max_step_tokens=MOST, **flags)


def vary_depth(driver: Driver, seed: int) -> None:
    """Each step yields up to another number of tokens, one to as many as the worker can."""
    most = driver.worker.max_step_tokens
    driver.scheduler.planner.shapes = {depth: StepShape(depth, depth + 1, depth + 1) for depth in range(most)}
    driver.scheduler.planner.draft_depth = RandomDepths(range(most), seed)


def counts(driver: Driver) -> set[int]:
    """How many tokens a request got in one step, over all steps."""
    assert isinstance(driver.worker, TokenWorker)
    return set(driver.worker.num_by_count)


def free_output(num_tokens: int, prompt: list[int] = PROMPT, seed: int = 0) -> list[int]:
    """What follows ``prompt`` where nothing ends it."""
    return expected_output(request("x", prompt, seed, max_new_tokens=num_tokens, ignore_eos=True), 10**6)


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (4, False), (16, True)])
def test_tokens_are_those_of_one_at_a_time(page_size: int, overlap: bool) -> None:
    driver = driver_of(page_size=page_size, num_pages=1024 // page_size, disable_overlap_schedule=not overlap)
    reqs = [request(f"r{i}", [i + 1] * (i + 1), seed=i, max_new_tokens=20 + 3 * i, ignore_eos=True) for i in range(6)]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    assert counts(driver) == {1, 2, 3, 4}
    assert driver.worker.num_steps < 35, "and takes fewer steps than the longest has tokens"
    assert driver.scheduler.stats.num_generated_tokens == sum(req.sampling_params.max_new_tokens for req in reqs)


def test_a_stop_token_at_every_place_drops_what_comes_after_it() -> None:
    """Every one of a request's first tokens in turn is the one that ends it, wherever in a step it lies."""
    output = free_output(24)
    for last, stop in enumerate(output):
        if stop in output[:last]:
            continue
        driver = driver_of()
        req = request("r", PROMPT, max_new_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
        driver.send(req)
        driver.run()
        answer = driver.answers["r"]
        assert answer.output_ids == output[: last + 1]
        assert answer.finish.type == "stop" and answer.finish.matched == stop
        follow_up = request("again", PROMPT + answer.output_ids + [3], max_new_tokens=5, ignore_eos=True)
        driver.send(follow_up)  # what the tree has got of the first one is its tokens' KV and nothing else
        driver.run()
        assert_right(driver, follow_up)
        num_cached = driver.answers["again"].last.cached_tokens
        assert num_cached >= (len(PROMPT) + last) // 4 * 4, "all whole pages of it"


@pytest.mark.parametrize("num_tokens", range(14))
def test_the_last_token_may_be_any_of_a_step(num_tokens: int) -> None:
    driver = driver_of()
    req = request("r", PROMPT, max_new_tokens=num_tokens, ignore_eos=True)
    driver.send(req)
    driver.run()
    assert driver.answers["r"].output_ids == free_output(num_tokens)
    assert driver.answers["r"].finish.type == "length" and driver.answers["r"].finish.length == num_tokens


@pytest.mark.parametrize("at_least", range(1, 13))
def test_no_stop_before_min_new_tokens(at_least: int) -> None:
    """Every token would end the request: it ends with the first that may."""
    driver = driver_of()
    stops = tuple(range(VOCAB_SIZE))
    driver.send(request("r", PROMPT, max_new_tokens=30, min_new_tokens=at_least, stop_token_ids=stops))
    driver.run()
    assert driver.answers["r"].output_ids == free_output(at_least)
    assert driver.answers["r"].finish.type == "stop"


def test_each_token_has_its_own_logprob() -> None:
    """A token's "logprob" is the token itself: values must not slip by what other requests of the step got."""
    driver = driver_of()
    reqs = [
        request(f"r{i}", [i + 2] * 5, i, max_new_tokens=18 + i, ignore_eos=True, return_logprob=i % 2 == 0)
        for i in range(5)
    ]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    for req in reqs:
        if req.return_logprob:
            told = driver.output_logprobs[req.rid]
            assert told == [-float(token) for token in driver.answers[req.rid].output_ids]
    assert counts(driver) == {1, 2, 3, 4}


def words() -> Tokenizer:
    """Each token is a word of its own: ``" w7."``."""
    backend = RustTokenizer(models.BPE(vocab={f"\u0120w{id}.": id for id in range(VOCAB_SIZE)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


@pytest.mark.parametrize("last", range(1, 14))
def test_a_stop_string_ends_a_request_in_the_midst_of_a_step(last: int) -> None:
    """The detokenizer finds it and aborts the request; the client is told nothing of what comes after it."""
    output = free_output(20)
    first = output.index(output[last])
    driver = driver_of()
    detokenizer = Detokenizer(words())
    texts: list[str] = []
    send = driver.to_detokenizer

    def told(message: BatchTokenOut) -> None:
        send(message)
        decoded, stopped = detokenizer.process(message)
        texts.extend(out.text for out in decoded.outs)
        driver.pending.extend(stopped)

    driver.scheduler.publisher.output._send = told
    driver.send(request("r", PROMPT, max_new_tokens=20, ignore_eos=True, stop=(f" w{output[last]}.",)))
    driver.run()
    assert "".join(texts) == "".join(f" w{token}." for token in output[:first])
    assert not driver.scheduler.reqs and len(driver.answers["r"].output_ids) <= first + 1 + 2 * MOST


@pytest.mark.parametrize("num_seen", range(1, 12))
@pytest.mark.parametrize("tiers", [False, True])
def test_abort_and_retraction_after_any_number_of_tokens(num_seen: int, tiers: bool) -> None:
    """One request is aborted and the other retracted as soon as they have said so much: the tokens of the step in
    flight are dropped, the retracted one goes on, and all pages beyond what was accepted come back."""
    make = make_tiered_driver if tiers else make_driver
    driver = make(num_pages=24, max_step_tokens=MOST)
    kept, left = (request(rid, PROMPT, seed, max_new_tokens=30, ignore_eos=True) for seed, rid in enumerate("ab"))
    driver.send(kept, left)
    while not (req := driver.scheduler.reqs.get("a")) or len(req.output_ids) < num_seen:
        driver.step()
    assert driver.flight is not None, "another step is in flight"
    assert req.committed_len < len(req.pages) * 4
    driver.send(AbortReq(rid="b"), PauseGenerationReq(id="p", mode="retract"), ContinueGenerationReq(id="c"))
    driver.run()
    assert_right(driver, kept)
    assert driver.answers["a"].last.num_retractions == 1
    aborted = driver.answers["b"]
    assert aborted.finish.type == "abort"
    assert aborted.output_ids == free_output(30, seed=1)[: len(aborted.output_ids)]


def test_steps_are_shallower_before_anybody_is_retracted() -> None:
    """Memory for all that the requests ask for, and no more: the rows of deep steps beyond that are not in it."""
    reqs = [request(f"r{i}", [i + 1] * 6, i, max_new_tokens=30, ignore_eos=True) for i in range(4)]
    depths = {}
    for least in (0, MOST - 1):
        driver = driver_of(page_size=1, num_pages=1 + 4 * 36 + 3, schedule_conservativeness=0.01)
        driver.scheduler.planner.shapes = {
            depth: StepShape(depth, depth + 1, depth + 1) for depth in range(least, MOST)
        }
        # A deep step takes hardly longer.
        table = StepCosts((4,), (tuple(1 + 0.01 * depth for depth in range(least, MOST)),))
        driver.scheduler.planner.draft_depth = AdaptiveDepth(tuple(driver.scheduler.planner.shapes), table)
        driver.send(*reqs)
        driver.run()
        assert_right(driver, *reqs)
        depths[least] = driver.scheduler.stats.num_steps_by_depth
        assert (driver.scheduler.stats.num_retractions > 0) == (least > 0)
    assert depths[0][MOST - 1] > 3, "while there is memory they are deep"


def test_a_long_request_alone_keeps_its_drafts() -> None:
    """Nobody would be retracted for a deep step: the pages of the reserve are free."""
    req = request("long", [1 + i % 50 for i in range(1850)], 1, max_new_tokens=40, ignore_eos=True)
    driver = driver_of(page_size=4, num_pages=1 + 490, context_length=2000)
    driver.scheduler.waiting.holdings.reserve_tokens = 128
    driver.scheduler.planner.shapes = {depth: StepShape(depth, depth + 1, depth + 1) for depth in range(MOST)}
    table = StepCosts((4,), (tuple(1 + 0.01 * depth for depth in range(MOST)),))  # deep ones hardly take longer
    driver.scheduler.planner.draft_depth = AdaptiveDepth(tuple(driver.scheduler.planner.shapes), table)
    driver.send(req)
    driver.run()
    assert_right(driver, req)
    depths = driver.scheduler.stats.num_steps_by_depth
    assert depths[MOST - 1] > sum(depths.values()) / 2, depths


def test_retraction_for_want_of_memory() -> None:
    driver = driver_of(num_pages=16, schedule_conservativeness=0.01)
    reqs = [request(f"r{i}", [i + 1] * 6, i, max_new_tokens=34, ignore_eos=True) for i in range(3)]
    driver.send(*reqs)
    driver.run()
    assert_right(driver, *reqs)
    assert driver.scheduler.stats.num_retractions > 0


def test_one_request_may_fill_all_of_memory() -> None:
    """But for what its last step computes beyond its end."""
    for page_size in (1, 4):
        driver = driver_of(num_pages=64 // page_size, page_size=page_size)
        req = request("r", PROMPT, max_new_tokens=1000, ignore_eos=True)
        driver.send(req)
        driver.run()
        assert len(driver.answers["r"].output_ids) == 64 - (MOST - 1) - len(PROMPT)
        assert_right(driver, req)


def test_recorded_steps_are_the_launched_ones() -> None:
    """Lengths, tokens and counts; a step whose lengths do not follow from the one before is told in full."""
    driver = driver_of()
    vary_depth(driver, 3)
    taken: list[list[int]] = []
    launch = driver.worker.launch

    def spy(batch: StepBatch) -> object:
        taken.append(batch.seq_lens.tolist())
        return launch(batch)

    driver.worker.launch = spy
    driver.send(*(request(f"r{i}", [i + 1] * 6, i, max_new_tokens=20, ignore_eos=True) for i in range(3)))
    driver.run()
    record = json.loads(dump_json(driver.scheduler.recorder, "test"))
    told: dict[str, list[int]] = {}
    for step, lens in zip(record["steps"], taken, strict=True):
        if step["mode"] == "extend":
            rids, nums = [seq["rid"] for seq in step["seqs"]], [1] * len(step["seqs"])
            assert step["counts"] is None
        else:
            rids, nums = record["compositions"][str(step["composition"])]["rids"], step["counts"]
            assert step["seq_lens"] == lens
            assert step["draft_depth"]["why"] in ("best", "kept", "probe", "memory")
            assert max(nums) <= step["draft_depth"]["depth"] + 1
        tokens = iter(step["tokens"])
        for rid, num in zip(rids, nums, strict=True):
            told.setdefault(rid, []).extend(next(tokens) for _ in range(num))
        assert next(tokens, None) is None
    for rid, answer in driver.answers.items():
        assert told[rid][: len(answer.output_ids)] == answer.output_ids


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_any_mixture(seed: int, tiers: bool) -> None:
    """Requests that come, stop, are aborted and retracted, in little memory: every answer is the one computed alone."""
    random = Random(seed)
    page_size = random.choice([1, 2, 4])
    make = make_tiered_driver if tiers else make_driver
    driver = make(
        num_pages=random.randint(30, 60) * 4 // page_size,
        page_size=page_size,
        num_rows=random.randint(1, 5),
        max_step_tokens=random.randint(2, MOST),
        schedule_conservativeness=random.choice([0.01, 1.0]),
        disable_overlap_schedule=random.random() < 0.2,
    )
    if random.random() < 0.5:
        vary_depth(driver, seed)
    reqs: list[TokenizedGenerateReq] = []
    aborted: set[str] = set()
    shared = [random.randrange(1, 211) for _ in range(12)]
    for index in range(random.randint(3, 10)):
        prompt = shared[: random.randint(0, 12)] + [random.randrange(1, 211) for _ in range(random.randint(1, 9))]
        stops = tuple(random.sample(range(VOCAB_SIZE), random.choice([0, 20, 60])))
        reqs.append(
            request(
                f"r{index}", prompt, index, max_new_tokens=random.randint(1, 40), stop_token_ids=stops,
                min_new_tokens=0 if random.random() < 0.7 else 1, return_logprob=random.random() < 0.3,
            )
        )  # fmt: skip
        driver.send(reqs[-1])
        for _ in range(random.randint(0, 6)):
            driver.step()
        if random.random() < 0.2:
            driver.send(PauseGenerationReq(id="p", mode="retract"), ContinueGenerationReq(id="c"))
        if random.random() < 0.2:
            aborted.add(reqs[-1].rid)
            driver.send(AbortReq(rid=reqs[-1].rid))
    driver.run()
    for req in reqs:
        expected, answer = expected_output(req, capacity(driver)), driver.answers[req.rid]
        if req.rid in aborted and answer.finish.type == "abort":
            expected = expected[: len(answer.output_ids)]
        assert answer.output_ids == expected, req.rid
        if req.return_logprob:
            assert driver.output_logprobs.get(req.rid, []) == [-float(token) for token in answer.output_ids]
