"""The oracle: its own arithmetic, and that a run fails on decisions that are wrong and carried out in good order."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import more_workloads

from fenceline.ipc.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    DecodeInfo,
    FinishReason,
    PauseGenerationReq,
    TokenizedGenerateReq,
    TokenOut,
    id_array,
)
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.mem_cache.tree import radix_cache
from fenceline.mem_cache.tree.hiradix_cache import HiRadixCache
from fenceline.model_executor import extend_runner
from fenceline.models.decoder import CausalLM
from fenceline.sampling import gumbel as engine_gumbel
from fenceline.sampling import sampler as sampler_module
from fenceline.sampling import sampling_batch
from fenceline.sampling.sampler import Sampler
from fenceline.sampling.sampling_params import SamplingParams
from fenceline.scheduler import publishing
from fenceline.scheduler.control import SchedulerControl
from fenceline.scheduler.masked_steps import MaskedSteps
from fenceline.scheduler.prefill import PrefillPlanner
from fenceline.scheduler.publishing import OutputSender
from fenceline.scheduler.req import LogprobLog, Req
from fenceline.scheduler.scheduler import Scheduler
from fenceline_proof.answers import Findings, Setting, Transcript
from fenceline_proof.oracle import TOLERANCE, Model, Oracle, Query, gumbel, kept
from fenceline_proof.runs import ANSWERS, INVARIANTS, Outcome, Trial, run
from fenceline_proof.script import Scenario, Script
from fenceline_proof.table import Proof
from fenceline_proof.tiny_model import tiny_model_path

torch.set_num_threads(1)

# --- the oracle itself ---------------------------------------------------------------------------------


def test_the_noise_is_what_the_engine_documents() -> None:
    engine = engine_gumbel.GumbelSampler(64, torch.device("cpu"))
    for seed in (0, 1, -5, 2**63 - 1, 2**64 - 1, 12345678901):
        for position in (0, 1, 17, 4000):
            scaled = torch.zeros(1, 64)
            keys = torch.from_numpy(engine_gumbel.mix_seeds([seed]))
            drawn = engine.draw(scaled, keys, torch.tensor([position]))
            assert drawn.item() == gumbel(seed, position, 64).argmax()


def test_the_noise_is_gumbels() -> None:
    noise = np.concatenate([gumbel(seed, 3, 1000) for seed in range(200)])
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.02
    for level in (-1.0, 0.0, 1.0, 3.0):
        assert abs((noise <= level).mean() - math.exp(-math.exp(-level))) < 0.005


def test_one_token_at_a_time_is_the_same_as_all_at_once() -> None:
    model, tokens = Model(tiny_model_path()), tuple(range(1, 40))
    oracle = Oracle(tiny_model_path())
    whole = oracle.answer(Query(tokens, seed=0)).prompt_logprobs(0)
    forced = tuple(enumerate(tokens[5:]))
    answer = oracle.answer(Query(tokens[:5], seed=0, temperature=1.0), forced)
    one_by_one = np.stack([answer.step(i).logprobs for i in range(len(tokens) - 5)])
    assert np.abs(one_by_one - whole[4:]).max() < 1e-12
    assert model.embedding.shape == (64, 32)


def test_what_rounding_could_decide_is_known() -> None:
    oracle = Oracle(tiny_model_path())
    ask = Query((3, 1, 4), seed=5, temperature=1.0)
    step = oracle.answer(ask).step(0)
    assert step.close == {step.token}
    # Bias the runner-up until it is level.
    scores = step.logprobs + gumbel(5, 3, 64)
    second, first = np.argsort(scores)[-2:].tolist()
    for gap, close in ((TOLERANCE / 4, {first, second}), (TOLERANCE * 4, {first})):
        level = dataclasses.replace(ask, logit_bias=((second, float(scores[first] - scores[second] - gap)),))
        step = oracle.answer(level).step(0)
        assert step.token == first and step.close == close


SETTING = Setting(random_seed=1, eos_ids=frozenset((0,)), capacity=64)


def _transcript(ask: Query, tokens: list[int]) -> Transcript:
    """Of one request that was answered so."""
    params = SamplingParams(
        max_new_tokens=len(tokens),
        temperature=ask.temperature,
        seed=ask.seed,
        logit_bias=dict(ask.logit_bias),
        ignore_eos=True,
    )
    transcript = Transcript(SETTING)
    transcript.received(TokenizedGenerateReq(rid="r", input_ids=id_array(ask.prompt), sampling_params=params))
    for index, token in enumerate(tokens, 1):
        reason = FinishReason(type="length", length=index) if index == len(tokens) else None
        decode = DecodeInfo(prompt_tail_ids=[], sampling_params=params) if index == 1 else None
        transcript.sent(
            TokenOut(
                rid="r",
                output_ids=[token],
                prompt_tokens=len(ask.prompt),
                completion_tokens=index,
                cached_tokens=0,
                finish_reason=reason,
                decode=decode,
            )
        )
    return transcript


@pytest.mark.parametrize("gap", [TOLERANCE / 4, TOLERANCE * 4])
def test_after_a_close_call_the_answer_is_followed(gap: float) -> None:
    oracle = Oracle(tiny_model_path())
    ask = Query((3, 1, 4), seed=5, temperature=1.0)
    scores = oracle.answer(ask).step(0).logprobs + gumbel(5, 3, 64)
    second, first = np.argsort(scores)[-2:].tolist()
    ask = dataclasses.replace(ask, logit_bias=((second, float(scores[first] - scores[second] - gap)),))
    followed = oracle.answer(ask, ((0, second),))
    tokens = [second, *(followed.step(i).token for i in range(1, 6))]
    assert tokens[1:] != [oracle.answer(ask).step(i).token for i in range(1, 6)]
    found = _transcript(ask, tokens).compare(oracle)
    if gap < TOLERANCE:
        assert found == Findings("", num_tokens=6, num_close=1)
        tokens[4] = (tokens[4] + 1) % 64
        assert f"output 4 is {tokens[4]}, alone it is" in _transcript(ask, tokens).compare(oracle).wrong
    else:
        assert f"r: output 0 is {second}, alone it is {first}" in found.wrong


def test_a_key_halfway_between_two_numbers_of_fp8_may_be_either() -> None:
    """So the values of an answer with such a key are not held against the engine."""
    oracle, random = Oracle(tiny_model_path(), rounds_kv=True), Random(0)
    asked = [Query(tuple(random.choices(range(1, 64), k=40)), seed=0) for _ in range(300)]
    for near in (True, False):
        ask = next(ask for ask in asked if bool(oracle.answer(ask).num_near_ties) == near)
        step = oracle.answer(ask).step(0)
        right, other = step.token, (step.token + 1) % 64
        assert not _transcript(ask, [right]).compare(oracle).wrong
        assert bool(_transcript(ask, [other]).compare(oracle).wrong) != near


@pytest.mark.parametrize("pause_first", [False, True])
def test_a_stop_string_found_after_an_abort_is_too_late(pause_first: bool) -> None:
    """Who is aborted gets one output more; whose text has ended at a stop string gets none."""
    stop, pause = AbortReq(rid="r", silent=True), PauseGenerationReq(id="p", mode="abort")
    transcript = Transcript(SETTING)
    params = SamplingParams(max_new_tokens=3)
    transcript.received(TokenizedGenerateReq(rid="r", input_ids=id_array([1, 2]), sampling_params=params))
    for message in (pause, stop) if pause_first else (stop, pause):
        transcript.received(message)
    assert transcript.exchanges["r"].ended is not pause_first


@pytest.mark.parametrize(("workload", "seed"), [("speculation_tiers", 13), ("overwritten", 9_100_780)])
def test_seeds_that_failed_once(workload: str, seed: int) -> None:
    """Not those of ``everything``: a new feature makes other scenarios of all its seeds."""
    outcome = run(Trial(workload, seed))
    assert outcome.clean, outcome.report


def test_which_tokens_are_kept_may_depend_on_rounding_in_ties() -> None:
    """Two tokens have half of the probability each, of which top_p keeps the first. If the model's own logits tie, so
    do the engine's, and both are kept."""
    query = Query((1,), 0, temperature=0.5, top_p=0.3)
    scaled = np.array([-4.0, 0.0, 0.0])
    both = [False, True, True]
    for model_logits, surely in (([-3.0, -2.0, -2.0], both), ([-3.0, -2.0, -1.0], [False] * 3)):
        found = kept(scaled, query, np.array(model_logits))
        assert [mask.tolist() for mask in found] == [both, surely, both]
    # Half of the probability, but for 6e-8, is one token's: whether top_p keeps one or two is for rounding as well.
    found = kept(np.array([0.0, 0.0, -16.0]), Query((1,), 0, temperature=0.5, top_p=0.5), np.array([-3.0, -2.0, -1.0]))
    assert [mask.tolist() for mask in found] == [[True, True, False], [False] * 3, [True, True, False]]
    # Of three tokens that are kept in any order it does not matter which of them tie.
    found = kept(scaled, Query((1,), 0, temperature=0.5, top_k=3), np.array([-3.0, -2.0, -1.0]))
    assert all(mask.all() for mask in found)


def test_close_calls_are_few_or_the_proof_is_not_clean() -> None:
    ok = Outcome(Trial("mixed", 0), num_tokens=2000, num_close=1)
    assert Proof(num_intact=1, num_tokens=ok.num_tokens, num_close=2).clean
    assert not Proof(num_intact=1, num_tokens=ok.num_tokens, num_close=4).clean


# --- what a wrong decision comes to --------------------------------------------------------------------


def _a_page_of_another_prefix(patch: pytest.MonkeyPatch) -> None:
    """The tree overlooks the last token of each page, so that a match goes on where the prompts differ there."""
    right = radix_cache.as_tokens

    def wrong(token_ids: Any) -> Any:
        tokens = right(token_ids).copy()
        tokens[3::4] = 0
        return tokens

    patch.setattr(radix_cache, "as_tokens", wrong)


def _positions_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """What is computed after a hit is put one position too far."""
    right = extend_runner._extend_arrays

    def wrong(batch: Any) -> Any:
        arrays = right(batch)
        if batch.starts.any():
            arrays["positions"] = arrays["positions"] + 1
        return arrays

    patch.setattr(extend_runner, "_extend_arrays", wrong)


def _wrong_page_order(patch: pytest.MonkeyPatch) -> None:
    """The pages of a load are brought in the opposite order."""
    right = HiRadixCache.begin_load

    def wrong(self: HiRadixCache, *args: Any) -> Any:
        move = right(self, *args)
        return dataclasses.replace(move, host_pages=move.host_pages[::-1].copy())

    patch.setattr(HiRadixCache, "begin_load", wrong)


def _half_a_load(patch: pytest.MonkeyPatch) -> None:
    """Of a load of several pages the last one is left out."""
    right = HiCacheController.load

    def wrong(
        self: HiCacheController, ticket: Any, device_pages: Any, host_pages: Any, after: Any, states: Any
    ) -> None:
        keep = max(len(device_pages) - 1, 1)
        right(self, ticket, device_pages[:keep], host_pages[:keep], after, states)

    patch.setattr(HiCacheController, "load", wrong)


def _retraction_loses_a_token(patch: pytest.MonkeyPatch) -> None:
    right = Req.resumed

    def wrong(self: Req) -> Req:
        req = right(self)
        if len(req.output_ids) > 1:
            del req.output_ids[0]
            req.num_emitted -= 1
        return req

    patch.setattr(Req, "resumed", wrong)


def _sampler_at_the_wrong_position(patch: pytest.MonkeyPatch) -> None:
    right = Sampler.forward

    def wrong(self: Sampler, logits: torch.Tensor, positions: torch.Tensor, *args: Any) -> Any:
        return right(self, logits, positions - 1, *args)

    patch.setattr(Sampler, "forward", wrong)


def _penalties_count_twice(patch: pytest.MonkeyPatch) -> None:
    """The token before a retraction is counted once more when the request comes back."""
    right = PrefillPlanner._chunk

    def wrong(self: PrefillPlanner, req: Req, *args: Any) -> Any:
        chunk = right(self, req, *args)
        if chunk.history is None or not req.output_ids:
            return chunk
        prompt, output = chunk.history
        return dataclasses.replace(chunk, history=(prompt, np.append(output, output[-1])))

    patch.setattr(PrefillPlanner, "_chunk", wrong)


def _top_k_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = sampler_module._lowest_kept
    patch.setattr(
        sampler_module,
        "_lowest_kept",
        lambda scaled, max_top_k, top_ks, top_ps: right(scaled, max_top_k, (top_ks - 1).clamp(1), top_ps),
    )


def _stops_called_lengths(patch: pytest.MonkeyPatch) -> None:
    right = Req.finish_reason_after

    def wrong(self: Req, token: int) -> FinishReason | None:
        reason = right(self, token)
        if reason is None or reason.type != "stop":
            return reason
        return FinishReason(type="length", length=len(self.output_ids))

    patch.setattr(Req, "finish_reason_after", wrong)


def _prompt_logprobs_of_the_wrong_tokens(patch: pytest.MonkeyPatch) -> None:
    right = extend_runner._prompt_targets
    patch.setattr(extend_runner, "_prompt_targets", lambda chunk: right(chunk)[::-1].copy())


def _output_twice(patch: pytest.MonkeyPatch) -> None:
    """What one message says, the next one says again."""
    right = OutputSender._add

    def wrong(self: OutputSender, req: Req, reason: Any) -> None:
        req.num_emitted = max(req.num_emitted - 1, 0)
        right(self, req, reason)

    patch.setattr(OutputSender, "_add", wrong)


def _goes_on_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    """An abort is announced and the request forgotten only by half."""
    right = SchedulerControl.abort

    def wrong(self: SchedulerControl, message: AbortReq) -> None:
        req = self._population.reqs.get(message.rid)
        if req is not None and not message.silent:
            self._publisher.output.token(req)
            self._publisher.output.flush()
        right(self, message)

    patch.setattr(SchedulerControl, "abort", wrong)


def _min_tokens_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampling_batch, "_add_min_tokens", lambda arrays, reqs: None)


def _chunks_that_add_up(patch: pytest.MonkeyPatch) -> None:
    """Each prompt of a step takes as much as the whole step may."""
    right = PrefillPlanner._add_chunk

    def wrong(self: PrefillPlanner, plan: Any, req: Req, budget: Any, *known: Any) -> None:
        before = budget.step_tokens
        right(self, plan, req, budget, *known)
        budget.step_tokens = before

    patch.setattr(PrefillPlanner, "_add_chunk", wrong)


def _a_pause_that_goes_on(patch: pytest.MonkeyPatch) -> None:
    right = SchedulerControl.pause

    def wrong(self: SchedulerControl, mode: str) -> tuple[bool, str]:
        said = right(self, mode)
        self.paused = False
        return said

    patch.setattr(SchedulerControl, "pause", wrong)


def _twins(random: Random) -> Scenario:
    """Requests that share their first pages and differ in the last token of a later one. One at a time, so that each
    finds what the ones before left."""
    script = Script(random)
    family = script.prompt(16, 16)
    for turn in range(5):
        prompt = list(family)
        if turn:
            prompt[random.choice((7, 11, 15))] = random.randrange(1, 64)
        options = {"logprob_start_len": 4, "return_logprob": True} if turn == 4 else {}
        script.add(12 * turn, prompt + script.prompt(2, 2), 3, **options, extra_key="a" if turn in (1, 3) else "")
    return script.scenario(max_total_tokens=160, max_running_requests=2, chunked_prefill_size=16, page_size=4)


def _retracted(random: Random) -> Scenario:
    """Requests that draw from a few tokens, with penalties, and lose their memory in the middle of their answers."""
    script = Script(random)
    for _ in range(3):
        few = dict.fromkeys(random.sample(range(1, 64), 4), 9.0)
        options = {"temperature": 1.0, "top_k": 3, "frequency_penalty": 1.0, "logit_bias": few}
        script.add(0, script.prompt(3, 8), 12, ignore_eos=True, **options)
    for step in (4, 8):
        script.send(step, PauseGenerationReq(id=f"pause-{step}", mode="retract"))
        script.send(step + 1, ContinueGenerationReq(id=f"continue-{step}"))
    return script.scenario(max_total_tokens=160, max_running_requests=3, chunked_prefill_size=16, page_size=4)


def _reloaded(random: Random) -> Scenario:
    """A prefix comes back from the host whole; then somebody shares its beginning alone."""
    script = Script(random)
    family = script.prompt(16, 16)
    for turn, prompt in enumerate((family, script.prompt(18, 18), family, family[: random.choice((4, 8, 12))])):
        script.add(12 * turn, prompt + script.prompt(3, 3), 3)
    return script.scenario(
        max_total_tokens=28,
        max_running_requests=1,
        chunked_prefill_size=32,
        page_size=4,
        enable_hierarchical_cache=True,
        hicache_ratio=4.0,
        hicache_io_backend="direct",
    )


MORE_WORKLOADS = {"twins": _twins, "retracted": _retracted, "reloaded": _reloaded}
_more_workloads = more_workloads(MORE_WORKLOADS)
WRONG = [
    (_a_page_of_another_prefix, "twins", r"r\d+: output \d is \d+, alone it is \d+"),
    (_positions_off_by_one, "twins", r"r\d+: output \d is \d+, alone it is \d+"),
    (_wrong_page_order, "reloaded", r"r\d+: output \d is \d+, alone it is \d+"),
    (_half_a_load, "spill", r"r\d+: output \d is \d+, alone it is \d+"),
    (_retraction_loses_a_token, "retracted", r"r\d+ got a token that was in flight at its retraction"),
    (_sampler_at_the_wrong_position, "mixed", r"r\d+: output \d is \d+, alone it is \d+"),
    (_penalties_count_twice, "retracted", r"r\d+: output \d is \d+, alone it is \d+"),
    (_top_k_off_by_one, "retracted", r"r\d+: output \d is \d+, alone it is \d+"),
    (_stops_called_lengths, "row_reuse", r"r\d+: ends with length after \d tokens, not stop \d+"),
    (_prompt_logprobs_of_the_wrong_tokens, "mixed", r"r\d+: input logprobs at \d+ are .*, alone "),
    (_output_twice, "mixed", r"r\d+: output \d is \d+|r\d+: goes on with \d+ after its end"),
    (_goes_on_after_an_abort, "aborts", r"r\d+ goes on after it was aborted"),
    (_min_tokens_forgotten, "everything", r"r\d+: (output \d is \d+, alone it is|ends with stop \d+ after)"),
    (_chunks_that_add_up, "mixed", "every token counts once"),
    (_a_pause_that_goes_on, "bursts", r"r\d+ goes on while generation is paused"),
]  # fmt: skip


def _first_failure(name: str, num_seeds: int) -> Outcome | None:
    # Without the detector the shadow tags, which know most of these faults earlier, do not stop the run.
    outcomes = (run(Trial(name, seed, detect=False)) for seed in range(num_seeds))
    return next((outcome for outcome in outcomes if not outcome.clean), None)


@pytest.mark.parametrize("name", MORE_WORKLOADS)
def test_the_workloads_of_this_page_are_clean(name: str) -> None:
    assert _first_failure(name, 2) is None


@pytest.mark.parametrize(("plant", "workload", "report"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_decision_is_found_with_its_request_and_token(
    plant: Callable[[pytest.MonkeyPatch], None], workload: str, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's own assertions know some of them first."""
    plant(monkeypatch)
    outcome = _first_failure(workload, 16)
    assert outcome is not None and outcome.checker in (ANSWERS, INVARIANTS), outcome and outcome.report
    assert re.search(report, outcome.report), outcome.report


def _one_token_less_than_fits(self: Scheduler, message: TokenizedGenerateReq) -> None:
    accept(self, message)
    req = self.reqs.get(message.rid)
    if req is not None and req.max_new_tokens < message.sampling_params.max_new_tokens:
        req.max_new_tokens -= 1


def _goes_on_without_a_mask(self: MaskedSteps) -> list[object]:
    for _ in stuck(self):
        assert self.pending is not None and self.pending.fill is not None
        for mask in self.pending.fill.masks:
            mask[:] = -1
    return []


def _the_first_rows(log: LogprobLog, tokens: list[int], values: Any, start: int, source: Any) -> None:
    append(log, tokens, values, 0, source)


def _of_the_first_token(self: CausalLM, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return embeddings(self, x, torch.zeros_like(index))


accept, append, stuck = Scheduler.accept, publishing._append, MaskedSteps.stuck
embeddings = CausalLM.embeddings


@pytest.mark.parametrize(
    ("owner", "name", "fault", "workload", "says"),
    [
        (Scheduler, "accept", _one_token_less_than_fits, "retraction", "ends with length after"),
        (MaskedSteps, "stuck", _goes_on_without_a_mask, "grammars", "after its end (abort no token of the vocab"),
        (publishing, "_append", _the_first_rows, "bursts", "logprobs at"),
        (CausalLM, "embeddings", _of_the_first_token, "queued", "its embedding is"),
    ],
)
def test_ends_and_logprobs_that_are_rare_are_compared(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, workload: str, says: str
) -> None:
    """The end of a request that has all memory, and of one whose grammar no token can complete; logprobs of several
    prompts in one step; embeddings."""
    monkeypatch.setattr(owner, name, fault)
    outcomes = (run(Trial(workload, seed)) for seed in range(16))
    found = next(one for one in outcomes if not one.clean)
    assert found.checker == ANSWERS and says in found.report, found.report
