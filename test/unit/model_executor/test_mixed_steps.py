"""--enable-mixed-chunk: requests decode in the steps that compute prompts, and their answers are those of before."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import xgrammar
from scheduler_driver import Driver, assert_right, make_driver, make_model_driver, make_tiered_driver, request

from fenceline import demo_model_path
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs, parse_args
from fenceline.constrained.compile import compile_grammar
from fenceline.constrained.spec import GrammarSpec
from fenceline.entrypoints.launch import explain_flags
from fenceline.ipc.io_struct import AbortReq, LoadGrammarReq, TokenizedGenerateReq
from fenceline.model_executor.step import ForwardResult, HeldStep, MixedCosts, StepBatch
from fenceline.scheduler.masked_steps import StepMasks
from fenceline.scheduler.population import InFlight


def watched(driver: Driver) -> list[tuple[int, int, int]]:
    """A list that is filled from now on: of each step its prompts, the tokens of these, and the rows that decode."""
    steps: list[tuple[int, int, int]] = []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult | HeldStep:
        steps.append((len(batch.chunks), batch.num_prompt_tokens, batch.num_decodes))
        running = len(driver.scheduler.running)
        assert not driver.config.mixes_steps or batch.num_decodes == running, "nobody waits for a prompt"
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    return steps


def num_mixed(steps: list[tuple[int, int, int]]) -> int:
    return sum(prompts > 0 < decodes for prompts, _, decodes in steps)


def in_turns(driver: Driver, reqs: list[TokenizedGenerateReq], pause: int = 2) -> None:
    """Send the requests one after the other, a few steps apart."""
    for req in reqs:
        driver.send(req)
        for _ in range(pause):
            driver.step()
    driver.run()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tiered", [False, True])
def test_a_crowd_is_answered_right(seed: int, tiered: bool) -> None:
    """With prefixes that are shared, evicted and loaded, aborts, and retractions: whatever comes, no step computes
    prompts without the tokens of those that decode."""
    random = Random(seed)
    flags: dict[str, Any] = {"chunked_prefill_size": 16, "schedule_conservativeness": 0.1, "enable_mixed_chunk": True}
    if tiered:
        flags["retract_policy"] = random.choice(("recompute", "offload"))
        driver = make_tiered_driver(num_pages=28, page_size=4, num_rows=6, seed=seed, **flags)
    else:
        driver = make_driver(num_pages=28, page_size=4, num_rows=6, **flags)
    steps = watched(driver)
    stems = [[random.randrange(1, 60) for _ in range(20)] for _ in range(2)]
    reqs, aborted = [], set()
    for number in range(24):
        prompt = random.choice(stems)[: random.randrange(20)] + [number + 1] * random.randint(1, 30)
        reqs.append(request(f"r{number}", prompt, max_new_tokens=random.randint(1, 12), logprob_start_len=0))
    for number, req in enumerate(reqs):
        driver.send(req)
        for _ in range(random.randrange(3)):
            driver.step()
        if random.random() < 0.15:
            aborted.add(f"r{random.randrange(number + 1)}")
            driver.send(AbortReq(rid=f"r{number}"))
            aborted.add(req.rid)
    driver.run()
    assert_right(driver, *[req for req in reqs if req.rid not in aborted])
    assert num_mixed(steps) > 10


def test_no_prompt_goes_on_while_running_requests_lack_memory() -> None:
    """Until the step in flight leaves them some: a step of prompts alone would take that, and as long as it likes."""
    driver = make_driver(num_pages=64, chunked_prefill_size=8, enable_mixed_chunk=True)
    planner = driver.scheduler.planner
    reqs = [request("runs", [1] * 4, max_new_tokens=20, ignore_eos=True), request("long", [2] * 60, max_new_tokens=1)]
    driver.send(*reqs)
    for _ in range(3):
        driver.step()
    assert planner.population.chunked is not None and len(planner.running) == 1
    make_room, planner.make_room = planner.make_room, lambda shape: None  # type: ignore[method-assign]
    assert planner.plan() is None
    planner.make_room = make_room  # type: ignore[method-assign]
    driver.run()
    assert_right(driver, *reqs)


def test_a_step_has_the_tokens_of_the_flag_in_all() -> None:
    """So that it fits the graphs which prompts alone have; but prompts go on, however many decode."""
    driver = make_driver(num_pages=1200, num_rows=24, chunked_prefill_size=20, enable_mixed_chunk=True)
    steps = watched(driver)
    reqs = [request(f"r{i}", [i % 50 + 1] * 40, max_new_tokens=90, ignore_eos=True) for i in range(24)]
    in_turns(driver, reqs)
    assert_right(driver, *reqs)
    assert max(decodes for prompts, _, decodes in steps if prompts) > 18
    for prompts, tokens, decodes in steps:
        assert not prompts or tokens <= max(20 - decodes, 5)
    assert any(tokens + decodes == 20 for _, tokens, decodes in steps)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"speculative_algorithm": "NGRAM"}, "steps verify drafts"),
        ({"is_embedding": True}, "a server of embeddings decodes nothing"),
    ],
)
def test_a_start_says_why_steps_are_not_mixed(
    flags: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = ServerArgs(
        model_path=demo_model_path(), device="cpu", enable_mixed_chunk=True, max_inter_token_ms=40, **flags
    )
    config = resolve(args)
    assert not config.mixes_steps
    explain_flags(config)
    assert [message.partition("here, because ")[2] for message in caplog.messages] == [why]


@pytest.mark.parametrize(
    "device, flags, mixes",
    [
        ("cuda", "", True),
        ("cuda", "--no-enable-mixed-chunk", False),
        ("cuda", "--chunked-prefill-size -1", False),
        ("cuda", "--speculative-algorithm NGRAM", False),
        ("cpu", "", False),
        ("cpu", "--enable-mixed-chunk", True),
        ("cpu", "--max-inter-token-ms 40", True),
    ],
)
def test_steps_are_mixed_by_default_on_a_gpu(
    device: str, flags: str, mixes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolve(parse_args(["--model-path", "demo", "--device", device, *flags.split()]), cuda_probe=lambda: True)
    explain_flags(config)
    assert (config.mixes_steps, caplog.messages) == (mixes, [])
    assert config.public_dict()["enable_mixed_chunk"] is mixes, "/server_info says what is done"


COSTS = MixedCosts((32, 128, 256), (0.010, 0.014, 0.022), per_pair=1e-6, per_context=1e-6)


def test_chunks_end_before_a_token_is_late() -> None:
    """With --max-inter-token-ms: as many tokens as fit, by measured costs; of prompts beside which nobody decodes, and
    at least 32, whatever they take."""
    driver = make_driver(
        num_pages=2400, num_rows=12, context_length=1024, chunked_prefill_size=256, enable_mixed_chunk=True,
        max_inter_token_ms=16,
    )  # fmt: skip
    driver.worker.step_costs = COSTS
    driver = Driver(driver.config, driver.worker)
    seconds, alone = [], []
    launch = driver.worker.launch

    def recording(batch: StepBatch) -> ForwardResult | HeldStep:
        num, decodes = batch.num_prompt_tokens, batch.num_decodes
        if num and decodes:
            prefix, context = int(batch.starts[0]), int(batch.seq_lens[-decodes:].sum())
            fitting = COSTS.tokens_within(0.016, decodes, prefix, context, 256 - decodes)
            assert num <= max(fitting, 32) or len(batch.chunks) > 1
            lens = batch.seq_lens - batch.starts
            pairs = int((lens * batch.starts)[:-decodes].sum())
            seconds.append(COSTS.of(num, decodes, 0, context) + COSTS.per_pair * pairs)
            assert num <= 32 or seconds[-1] <= 0.016, "each prompt counts with its own prefix"
        elif num:
            alone.append(num)
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    reqs = [request(f"r{i}", [i + 1] * (700 if i % 3 == 0 else 90), max_new_tokens=40) for i in range(12)]
    in_turns(driver, reqs, 5)
    assert_right(driver, *reqs)
    # After the turns before, which are cached.
    again = [request(f"{i}, again", [i + 1] * 700 + [20 + i] * 200, max_new_tokens=60) for i in range(0, 12, 3)]
    in_turns(driver, again, 5)
    assert_right(driver, *again)
    # One that has no prefix before one that has.
    driver.send(request("first", [40] * 20, max_new_tokens=60))
    driver.step()
    driver.step()
    both = [request("short", [41] * 20, max_new_tokens=4), request("long", [1] * 700 + [50] * 200, max_new_tokens=4)]
    driver.send(*both)
    driver.run()
    assert_right(driver, *both)
    assert max(alone) == 256
    assert sum(0.015 < one <= 0.016 for one in seconds) > 5 and max(seconds) > 0.016


def test_steps_beside_prompts_are_short_without_a_limit_too() -> None:
    """30 ms, or three times what those who decode take alone, so that many of them leave prompts some time."""
    driver = make_driver(num_pages=2400, num_rows=12, chunked_prefill_size=4096, enable_mixed_chunk=True)
    for decodes, alone in ((1, 0.005), (8, 0.005 + 8 * 20 * 1e-4)):
        driver.worker.step_costs = MixedCosts((1, 4096), (0.005, 1.0), per_context=1e-4)
        running = Driver(driver.config, driver.worker)
        running.send(*[request(f"r{i}", [i + 1] * 19, max_new_tokens=40, ignore_eos=True) for i in range(decodes)])
        for _ in range(2):
            running.step()
        planner = running.scheduler.planner
        time, context = planner.step_time(decodes), planner.running.num_tokens
        assert time is not None
        num = time.max_tokens(0, 4096)
        assert context == decodes * 20
        assert driver.worker.step_costs.of(num, decodes, 0, context) == pytest.approx(max(0.030, 3 * alone), rel=0.1)


def test_prompts_that_do_not_fit_a_step_are_not_timed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait beside one that is half-way: each would take the planner as long as a small step's launch."""
    driver = make_driver(num_pages=9000, num_rows=24, chunked_prefill_size=256, enable_mixed_chunk=True)
    driver.worker.step_costs = COSTS
    driver = Driver(driver.config, driver.worker)
    driver.send(request("runs", [1] * 4, max_new_tokens=40, ignore_eos=True))
    for _ in range(2):
        driver.step()
    driver.send(*[request(f"r{i}", [i % 50 + 2] * 200, max_new_tokens=1) for i in range(101)])
    driver.step()
    planner, num_asked, of = driver.scheduler.planner, 0, MixedCosts.of

    def counted(costs: MixedCosts, *args: Any, **kwargs: Any) -> float:
        nonlocal num_asked
        num_asked += 1
        return of(costs, *args, **kwargs)

    assert planner.population.chunked is not None and planner.waiting.num_reqs > 90
    monkeypatch.setattr(MixedCosts, "of", counted)
    plan = planner.plan_prefill(len(planner.running))
    assert plan is not None and 0 < num_asked < 100


@pytest.mark.parametrize("limit", [0.001, 0.0105, 0.0139, 0.02, 0.05, 1.0])
def test_the_most_tokens_within_a_limit_are_found(limit: float) -> None:
    fitting = [n for n in range(501) if COSTS.of(n, 4, 300, 1000) <= limit]
    assert COSTS.tokens_within(limit, 4, 300, 1000, 500) == max(fitting, default=0)
    assert COSTS.of(508, 4, 0, 0) == pytest.approx(2 * 0.022)  # beyond the table in proportion
    assert MixedCosts.decode(COSTS.encode()) == COSTS


def test_costs_are_measured_at_start() -> None:
    """In the sink and in memory that is then given back."""
    flags: dict[str, Any] = {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "max_inter_token_ms": 30}
    driver = make_model_driver(**flags)
    costs = driver.worker.step_costs
    assert isinstance(costs, MixedCosts)
    assert costs.sizes == (32, 64) and 0 < costs.seconds[0] <= costs.seconds[1]
    assert driver.scheduler.memory.pages.num_leased == driver.scheduler.memory.rows.num_leased == 0
    reqs = [request(f"r{i}", [i + 3] * 90, temperature=0.0, max_new_tokens=8) for i in range(3)]
    in_turns(driver, reqs)
    assert make_model_driver().worker.step_costs is None


def test_contexts_are_measured_however_little_memory_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """In the sink alone the time would be noise, divided by next to no tokens."""
    caplog.set_level("INFO", "fenceline.model_executor.warm_up")
    flags: dict[str, Any] = {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "max_inter_token_ms": 30}
    make_model_driver(context_length=1024, max_total_tokens=256, **flags)
    assert any(", of 256 tokens: " in message for message in caplog.messages)


def _grammar(driver: Driver) -> LoadGrammarReq:
    """The grammar 1: letters a to j, which are the tokens 10 to 19."""
    vocab_size, eos = driver.config.model.vocab_size, driver.config.model.eos_token_ids
    pieces = [b"%c" % (97 + token - 10) if 10 <= token < 20 else b"" for token in range(vocab_size)]
    vocabulary = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos))
    data = compile_grammar(vocabulary, GrammarSpec("regex", "[a-j]{3}([a-j]{2})*"), None)
    return LoadGrammarReq(id="g", grammar=1, data=data, vocabulary=vocabulary.serialize_json().encode())


_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.9, "frequency_penalty": 0.7, "logit_bias": {5: 3.0, 9: -4.0}},
    {"temperature": 0.0, "min_new_tokens": 8, "stop_token_ids": tuple(range(3, 500))},
    {"temperature": 0.9, "return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 3},
    {"temperature": 0.9, "return_logprob": True, "logprob_start_len": -1, "token_ids_logprob": [9, 2]},
)


def _of_all_kinds() -> list[TokenizedGenerateReq]:
    random, reqs = Random(3), []
    stem = [random.randrange(3, 900) for _ in range(50)]
    for number in range(24):
        prompt = stem[: random.choice((0, 20, 50))] + [random.randrange(3, 900) for _ in range(random.randint(1, 70))]
        params = {"max_new_tokens": random.randint(1, 18), **_KINDS[number % len(_KINDS)]}
        req = request(f"r{number}", prompt, number, **params)
        reqs.append(msgspec.structs.replace(req, grammar=int(number % 5 == 1)))
    return reqs


def _asked(**flags: Any) -> tuple[list[Any], list[Any], list[tuple[int, int, int]]]:
    """The answers to all kinds of requests, their logprobs, and the steps. They are asked twice: the second time they
    find prefixes."""
    driver = make_model_driver(num_rows=12, chunked_prefill_size=32, **{"memory_check": "order", **flags})
    steps, reqs = watched(driver), _of_all_kinds()
    driver.send(_grammar(driver))
    in_turns(driver, reqs)
    again = [msgspec.structs.replace(req, rid=f"{req.rid}, again") for req in reqs]
    in_turns(driver, again, 1)
    rids = [req.rid for req in (*reqs, *again)]
    answers = [(driver.answers[rid].output_ids, driver.answers[rid].finish) for rid in rids]
    prompts = [driver.first_logprobs[rid] for rid in rids if rid in driver.first_logprobs]
    logprobs = [driver.output_logprobs.get(rid) for rid in rids]
    told = [(one.token_ids, one.logprobs, one.top_logprobs) for one in prompts]
    return answers, [logprobs, told], steps


_TIERS: dict[str, Any] = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 1280, "memory_check": "full",
}  # fmt: skip


_PIECES: dict[str, Any] = {
    "piecewise_cuda_graph_tokens": (8, 32), "cuda_graph_bs": (1, 4, 8), "debug_cuda_graph": True,
    "context_length": 256, "disable_overlap_schedule": True,
}  # fmt: skip


@pytest.mark.parametrize("flags", [_TIERS, _PIECES], ids=["tiers", "pieces"])
def test_answers_are_those_of_steps_apart(flags: dict[str, Any]) -> None:
    """In float32: requests of every kind, in company, and again with prefixes, on the device or from the host."""
    apart, told, steps = _asked(**flags)
    assert num_mixed(steps) == 0
    mixed, told_mixed, steps = _asked(enable_mixed_chunk=True, **flags)
    assert num_mixed(steps) > 20
    assert mixed == apart
    for one, other in zip(told[0], told_mixed[0], strict=True):
        assert (one is None) == (other is None)
        np.testing.assert_allclose(one or [], other or [], rtol=1e-3, atol=1e-4)


def test_masks_are_filled_before_tokens_beside_prompts_are_published() -> None:
    """A step under masks does not wait until the tokens of a mixed one have been published, as after a decode step."""
    driver = make_model_driver(chunked_prefill_size=32, enable_mixed_chunk=True)
    scheduler = driver.scheduler
    scheduler.may_publish_early = lambda flight: False  # type: ignore[method-assign]
    sampled, early = scheduler.masks.sample_held, []

    def watched_sample(pending: StepMasks) -> InFlight:
        early.append((pending.num_unpublished > 0, scheduler.num_launched))
        return sampled(pending)

    scheduler.masks.sample_held = watched_sample  # type: ignore[method-assign]
    steps = watched(driver)
    driver.send(_grammar(driver))
    reqs = [request(f"r{i}", [i + 3] * (8 + 150 * (i > 2)), temperature=0.0, max_new_tokens=14) for i in range(4)]
    in_turns(driver, [msgspec.structs.replace(req, grammar=int(i < 3)) for i, req in enumerate(reqs)], 1)
    behind_mixed = [number for number in range(1, len(steps)) if steps[number - 1][0] and steps[number - 1][2]]
    assert sum(is_early for is_early, number in early if number - 1 in behind_mixed) > 2


def test_bits_are_those_of_steps_apart() -> None:
    """With --enable-deterministic-inference, those of logprobs too."""
    flags = {"enable_deterministic_inference": True, "dtype": "bfloat16"}
    apart, mixed = _asked(**flags), _asked(enable_mixed_chunk=True, **flags)
    assert num_mixed(mixed[2]) > 20
    assert mixed[:2] == apart[:2]
