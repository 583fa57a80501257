"""TokenizerManager over a link in memory: what is sent, what is delivered, what is refused."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from frontend_bench import READY, STOP, Bench, MemoryLink, demo_config
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tiny_tokenizers import CORPUS, byte_level

from fenceline.config.engine_config import PriorityConfig
from fenceline.constrained.spec import GrammarSpec
from fenceline.frontend import request_prepare, tokenizer_manager
from fenceline.frontend.request_types import (
    TURN_REQUESTS,
    GenerateChunk,
    GenerateInput,
    RequestError,
    error_of,
    expand_samples,
    merge_chunks,
)
from fenceline.frontend.tokenize_pool import INLINE_CHARS
from fenceline.frontend.tokenizer import PIECE_CHARS, Tokenizer, check_vocabulary, load_tokenizer
from fenceline.frontend.tokenizer_manager import TokenizerManager
from fenceline.ipc.io_struct import (
    AbortReq,
    BatchTokenOut,
    CancelFlushReq,
    ControlReply,
    DecodeInfo,
    FatalError,
    FinishReason,
    FlushCacheReq,
    ShutdownReq,
    TickReq,
    TokenizedGenerateReq,
    TokenLogprobs,
    TokenOut,
    TokenPairs,
)
from fenceline.sampling.sampling_params import SamplingParams


def ids_input(*ids: int, rid: str = "r", **params: object) -> GenerateInput:
    return GenerateInput(input_ids=ids, rid=rid, sampling_params=SamplingParams(**params))


async def test_a_server_without_grammars_says_so() -> None:
    bench = Bench(grammar_backend="none")
    asked = replace(ids_input(5), grammar=GrammarSpec("regex", "a"))
    with pytest.raises(RequestError, match="--grammar-backend none") as caught:
        await bench.manager.submit(asked)
    assert caught.value.status == 400
    assert bench.link.requests() == []


async def test_chunks_of_a_slow_reader_are_merged() -> None:
    bench = Bench()
    stream = await bench.manager.submit(ids_input(5, 6, 7))
    bench.news("r", [10], 1, text="a")
    assert (await anext(stream)).text == "a"
    bench.news("r", [11], 2, text="b")
    bench.news("r", [12, 13], 4, text="c")
    bench.news("r", [2], 5, STOP, text="d")
    chunk = await anext(stream)
    assert (chunk.text, chunk.output_ids, chunk.completion_tokens) == ("bcd", [11, 12, 13, 2], 5)
    assert chunk.finish_reason == STOP
    assert chunk.output_logprobs is not None
    assert chunk.output_logprobs.token_ids == [11, 12, 13, 2]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert bench.manager.num_active == 0


async def test_only_an_idle_engine_is_woken_for_a_request() -> None:
    bench = Bench()
    bench.manager.expect()
    async with await bench.manager.submit(ids_input(5)):
        bench.manager.expect()
        assert bench.link.num_wakes == 1
    bench.manager.expect()
    assert bench.link.num_wakes == 2


async def test_leaving_a_stream_aborts_once_and_late_news_is_dropped() -> None:
    bench = Bench()
    async with await bench.manager.submit(ids_input(5)) as stream:
        bench.news("r", [1], 1)
        await anext(stream)
    stream.close()
    assert [message for message in bench.link.sent if isinstance(message, AbortReq)] == [AbortReq(rid="r")]
    bench.news("r", [1], 2)
    assert stream.take() is None
    assert bench.manager.num_active == 0


async def test_cancelled_reader_aborts() -> None:
    bench = Bench()

    async def read() -> None:
        async with await bench.manager.submit(ids_input(5)) as stream:
            await stream.collect()

    task = asyncio.ensure_future(read())
    while not bench.link.sent:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.link.sent[-1] == AbortReq(rid="r")


async def test_an_engine_that_dies_beside_a_large_body_leaves_nothing() -> None:
    """Whenever it dies: a stream that begins afterwards would never end."""
    for num_turns in range(12):
        bench = Bench()
        inputs = [ids_input(5, rid=f"r{index}") for index in range(4 * TURN_REQUESTS)]
        submission = asyncio.ensure_future(bench.manager.submit_many(inputs))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        bench.manager.fail("died")
        await asyncio.gather(submission, return_exceptions=True)
        assert bench.manager.num_active == 0


async def test_finished_request_is_not_aborted() -> None:
    bench = Bench()
    async with await bench.manager.submit(ids_input(5)) as stream:
        bench.news("r", [2], 1, STOP)
        assert (await stream.collect()).finish_reason == STOP
    assert len(bench.link.sent) == 1


async def test_reused_id_travels_under_another_name() -> None:
    """News of the first request that is still on its way must not reach the second."""
    bench = Bench()
    (await bench.manager.submit(ids_input(5))).close()
    second = await bench.manager.submit(ids_input(6))
    wire = bench.link.requests()[1].rid
    assert wire != "r"
    bench.news("r", [99], 1, FinishReason(type="abort"))
    bench.news(wire, [6], 1)
    chunk = await anext(second)
    assert (chunk.rid, chunk.output_ids) == ("r", [6])
    bench.manager.abort("r")
    assert bench.link.sent[-1] == AbortReq(rid=wire)


async def test_no_client_can_name_a_request_like_a_reused_one() -> None:
    bench = Bench()
    (await bench.manager.submit(ids_input(5))).close()
    await bench.manager.submit(ids_input(6))
    reused = bench.link.requests()[1].rid
    await bench.manager.submit(ids_input(7, rid=reused))
    assert len({message.rid for message in bench.link.requests()}) == 3


async def test_group_interleaves_and_closes_what_is_open() -> None:
    bench = Bench()
    group = await bench.manager.submit_many([ids_input(5, rid="a"), ids_input(6, rid="b")])
    seen: list[tuple[int, list[int]]] = []
    async with group:
        bench.news("b", [1], 1)
        bench.news("a", [2], 1)
        bench.news("b", [3], 2, STOP)
        async for index, chunk in group:
            seen.append((index, chunk.output_ids))
            if len(seen) == 2:
                break
    assert sorted(seen) == [(0, [2]), (1, [1, 3])]
    assert bench.link.sent[-1] == AbortReq(rid="a")


async def test_the_requests_of_a_body_have_its_number() -> None:
    bench = Bench()
    await bench.manager.submit_many([ids_input(5, rid="a"), ids_input(6, rid="b")])
    await bench.manager.submit(ids_input(5, rid="alone"))
    await bench.manager.submit_many([ids_input(5, rid="c"), ids_input(5, rid="d")])
    first, second, alone, third, fourth = (message.body for message in bench.link.requests())
    assert first == second != third == fourth and alone == 0 and 0 not in (first, third)


async def test_invalid_request_of_a_group_sends_none() -> None:
    bench = Bench()
    with pytest.raises(RequestError):
        await bench.manager.submit_many([ids_input(5, rid="a"), ids_input(1024, rid="b")])
    assert bench.link.sent == []


@pytest.mark.parametrize(("inp", "words"), [
    (ids_input(), "empty"), (GenerateInput(text=""), "empty"), (ids_input(*[5] * 64), "at most 63"),
    (ids_input(1024), "outside"), (ids_input(-1), "outside"), (GenerateInput(), "either"),
    (ids_input(5, temperature=-1.0), "temperature"), (ids_input(5, stop=("x" * 5000,)), "stop"),
    (GenerateInput(input_ids=[5], logprob_start_len=2), "logprob_start_len"),
    (GenerateInput(input_ids=[5], top_logprobs_num=129), "top_logprobs_num"),
    (GenerateInput(text="\ud800"), "text has half a surrogate"), (ids_input(5, rid="\udfff"), "rid has half"),
    (ids_input(5, stop=("a", "\ud800")), "stop has half"),
    (GenerateInput(input_ids=[5], extra_key="\ud800"), "extra_key has half"),
    (GenerateInput(input_ids=[5], extra_key="é" * 257), "at most 512 bytes"),
    (GenerateInput(input_ids=[5], priority=2**63), "priority"),
    (GenerateInput(input_ids=[5], return_logprob=True, token_ids_logprob=[1024]), "token_ids_logprob: 1024"),
    (GenerateInput(input_ids=[5], return_logprob=True, token_ids_logprob=[1] * 129), "at most 128 tokens"),
])  # fmt: skip
async def test_refusals(inp: GenerateInput, words: str) -> None:
    bench = Bench()
    with pytest.raises(RequestError, match=words) as caught:
        await bench.manager.submit(inp)
    assert caught.value.status == 400
    assert bench.link.sent == []
    assert bench.manager.num_active == 0


class CountingTokenizer:
    """Counts the characters that are tokenised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_chars = 0
        encode = Tokenizer.encode

        def counted(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
            self.num_chars += len(text)
            return encode(tokenizer, text, add_special_tokens)

        monkeypatch.setattr(Tokenizer, "encode", counted)


@pytest.mark.parametrize(("fields", "words"), [
    ({"sampling_params": SamplingParams(temperature=-1.0)}, "temperature"),
    ({"sampling_params": SamplingParams(stop=("",))}, "empty string"),
    ({"sampling_params": SamplingParams(stop=("x" * 100,) * 41)}, "at most 4096 characters"),
    ({"sampling_params": SamplingParams(stop_token_ids=(1,) * 1025)}, "at most 1024 ids"),
    ({"sampling_params": SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))}, "at most 1024 entries"),
    ({"rid": "r" * 257}, "at most 256 bytes"), ({"rid": "é" * 129}, "at most 256 bytes"),
    ({"logprob_start_len": -2}, "logprob_start_len"), ({"logprob_start_len": 64}, "logprob_start_len"),
    ({"top_logprobs_num": -1}, "top_logprobs_num"), ({"rid": "0"}, "already in flight"),
    ({"text": None, "input_ids": [1024]}, "outside the vocabulary"),
])  # fmt: skip
async def test_what_needs_no_tokens_is_refused_before_tokenising(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], words: str
) -> None:
    bench, tokenised = Bench(), CountingTokenizer(monkeypatch)
    inputs = [GenerateInput(text="the fox", rid=str(index)) for index in range(20)]
    inputs.append(replace(inputs[-1], **{"rid": "last", **fields}))
    with pytest.raises(RequestError, match=words):
        await bench.manager.submit_many(inputs)
    assert tokenised.num_chars == 0


async def test_a_text_that_cannot_fit_is_refused_untokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, tokenised = Bench(), CountingTokenizer(monkeypatch)
    longest = 63 * len("<|endoftext|>")
    with pytest.raises(RequestError, match="at least 64 tokens") as caught:
        await bench.manager.submit(GenerateInput(text="<" * (longest + 1)))
    assert caught.value.code == "context_length_exceeded"
    assert tokenised.num_chars == 0
    await bench.manager.submit(GenerateInput(text="<|endoftext|>" * 63))


async def test_prompts_of_a_body_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_manager, "MAX_BODY_TOKENS", 100)
    bench = Bench()
    prompt = GenerateInput(input_ids=[5] * 40)
    with pytest.raises(RequestError, match="120 tokens together, each sample counted, at most 100"):
        await bench.manager.submit_many(expand_samples(prompt, 3))
    await bench.manager.submit_many(expand_samples(prompt, 2))


async def test_logprobs_of_a_body_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(request_prepare, "MAX_BODY_LOGPROBS", 200)
    prompt = GenerateInput(
        input_ids=[5] * 20, return_logprob=True, logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=[9]
    )
    await bench.manager.submit_many(expand_samples(prompt, 2))  # 2 samples of 20 positions with 5
    with pytest.raises(RequestError, match="300 logprobs together") as caught:
        await bench.manager.submit_many(expand_samples(replace(prompt, rid="again"), 3))
    assert caught.value.status == 400
    await bench.manager.submit_many(expand_samples(replace(prompt, rid="outputs", logprob_start_len=-1), 3))


async def test_tokenize_and_detokenize_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, tokenised = Bench(), CountingTokenizer(monkeypatch)
    monkeypatch.setattr(tokenizer_manager, "MAX_TOKENIZE_TOKENS", 2000)
    with pytest.raises(RequestError, match="at most 4096"):
        await bench.manager.tokenize(["a"] * 4097)
    with pytest.raises(RequestError, match="at most 4096"):
        await bench.manager.detokenize([[1]] * 4097)
    assert tokenised.num_chars == 0
    most = max(2000, bench.manager.config.model.context_length)
    with pytest.raises(RequestError, match=f"at most {most} ids"):
        await bench.manager.detokenize([[1] * most, [1]])
    with pytest.raises(RequestError, match="the texts together have more than"):
        await bench.manager.tokenize(["the " * 2000] * 20)
    with pytest.raises(RequestError, match="token id -1 is outside"):
        await bench.manager.detokenize([[5], [-1]])
    assert await bench.manager.detokenize([[5], []]) == [byte_level().decode([5]), ""]


@pytest.mark.parametrize("inp", [GenerateInput(text="the fox"), GenerateInput(input_ids=[5, 6])])
async def test_others_have_their_turns_while_a_large_body_is_prepared(
    monkeypatch: pytest.MonkeyPatch, inp: GenerateInput
) -> None:
    """Requests that are checked, or made messages, in one turn of the event loop; prompts' ids are checked once."""
    bench = Bench()
    turns, ids_checked, most = 0, 0, 0
    last: dict[str, tuple[int, int]] = {}

    def counting(name: str) -> None:
        plain = getattr(tokenizer_manager, name)

        def counted(*arguments: object) -> object:
            nonlocal ids_checked, most
            ids_checked += name == "check_ids"
            turn, num = last.get(name, (turns, 0))
            last[name] = (turns, num + 1 if turn == turns else 1)
            most = max(most, last[name][1])
            return plain(*arguments)

        monkeypatch.setattr(tokenizer_manager, name, counted)

    for name in ("check_untokenised", "check_ids", "build_message"):
        counting(name)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.ensure_future(others())
    inputs = [sample for index in range(10) for sample in expand_samples(replace(inp, rid=str(index)), 100)]
    await bench.manager.submit_many(inputs)
    running.cancel()
    assert most <= TURN_REQUESTS
    assert ids_checked <= 10
    assert len(bench.link.requests()) == 1000
    assert len({id(message.input_ids) for message in bench.link.requests()}) == 1, "a prompt is made once"


async def test_an_id_that_was_used_meanwhile_gets_another_name() -> None:
    bench = Bench()
    work = asyncio.ensure_future(bench.manager.submit_many([ids_input(5, rid=str(index)) for index in range(400)]))
    await asyncio.sleep(0)
    (await bench.manager.submit(ids_input(5, rid="7"))).close()
    await work
    wires = [message.rid for message in bench.link.requests()]
    assert len(set(wires)) == 401


async def test_a_full_queue_refuses_before_any_text_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, tokenised = Bench(max_queued_requests=3), CountingTokenizer(monkeypatch)
    with pytest.raises(RequestError, match="queue is full"):
        await bench.manager.submit_many([GenerateInput(text="the fox") for _ in range(6)])
    assert tokenised.num_chars == 0


async def test_samples_are_tokenised_and_their_parameters_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, tokenised = Bench(), CountingTokenizer(monkeypatch)
    checked = 0
    verify = SamplingParams.verify_tokens

    def counted(params: SamplingParams, vocab_size: int) -> None:
        nonlocal checked
        checked += 1
        verify(params, vocab_size)

    monkeypatch.setattr(SamplingParams, "verify_tokens", counted)
    params = SamplingParams(stop=("x",), logit_bias={1: 1.0}, seed=3)
    await bench.manager.submit_many(expand_samples(GenerateInput(text="the fox", sampling_params=params), 40))
    assert (tokenised.num_chars, checked) == (len("the fox"), 1)
    assert len({message.sampling_params.seed for message in bench.link.requests()}) == 40


async def test_max_new_tokens_is_clipped_to_context_and_memory() -> None:
    bench = Bench()
    await bench.manager.submit(ids_input(5, 6, 7, 8, max_new_tokens=1000, min_new_tokens=500))
    params = bench.link.requests()[0].sampling_params
    assert (params.max_new_tokens, params.min_new_tokens) == (60, 60)


async def test_what_a_request_asks_of_the_scheduler_reaches_it() -> None:
    bench = Bench(priority=priorities())
    inp = GenerateInput(input_ids=[5], extra_key="é" * 256, priority=-3, return_logprob=True, token_ids_logprob=(7, 6))
    await bench.manager.submit(inp)
    (sent,) = bench.link.requests()
    assert (sent.extra_key, sent.priority, sent.token_ids_logprob) == ("é" * 256, -3, [7, 6])


async def test_the_last_chunk_says_how_long_it_took() -> None:
    bench = Bench()
    stream = await bench.manager.submit(ids_input(5))
    first = TokenOut(
        rid="r",
        output_ids=[1],
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        decode=DecodeInfo(prompt_tail_ids=[], sampling_params=SamplingParams(), queue_time_s=0.25),
    )
    bench.manager.handle(BatchTokenOut(outs=[first]))
    assert (await anext(stream)).times is None
    bench.news("r", [2, 3], 3, STOP)
    times = (await anext(stream)).times
    assert times is not None and times.queue_time_s == 0.25
    assert times.first_token_latency_s is not None and times.first_token_latency_s > 0
    assert times.decode_throughput is not None and times.decode_throughput > 0


async def test_a_prefix_aborts_all_ids_that_begin_so() -> None:
    bench = Bench()
    inputs = [*expand_samples(ids_input(5), 3), ids_input(5, rid="r-x"), ids_input(5, rid="s")]
    await bench.manager.submit_many(inputs)
    bench.manager.abort("r", prefix=True)
    bench.manager.abort("", prefix=True)
    bench.manager.abort("unknown", prefix=True)
    assert bench.link.sent[-4:] == [AbortReq(rid=rid) for rid in ("r", "r-1", "r-2", "r-x")]
    bench.manager.abort("r-1", prefix=True)
    assert bench.link.sent[-2:] == [AbortReq(rid="r-x"), AbortReq(rid="r-1")]


def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    tokenizer = load_tokenizer(demo_config().tokenizer_path)
    thread = threading.Thread(target=tokenizer.encode, args=("a " * 150_000,))
    begin = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < (time.perf_counter() - begin) / 2


async def test_long_text_is_tokenised_off_the_loop_and_equally() -> None:
    bench = Bench()
    text = "the quick " * INLINE_CHARS
    [ids] = await bench.manager.tokenize([text])
    assert list(ids) == byte_level().encode(text)


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans(), st.booleans()), max_size=14), st.integers(0, 3))
def test_queue_limit_counts_what_fits_neither_places_nor_memory(
    arrivals: Sequence[tuple[int, bool, bool]], max_queued: int
) -> None:
    """Each arrival may be followed by the first token, or the end, of the oldest request that has none."""

    async def run() -> None:
        bench = Bench(max_queued_requests=max_queued)
        started: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for number, (length, starts, ends) in enumerate(arrivals):
            rid = str(number)
            expected = _num_queued(list(started.values()), [*waiting.values(), length])
            try:
                await bench.manager.submit(ids_input(*[5] * length, rid=rid))
            except RequestError as error:
                assert (error.status, error.code) == (503, "queue_full")
                assert expected > max_queued
            else:
                assert expected <= max_queued
                waiting[rid] = length
            if starts and waiting:
                oldest = next(iter(waiting))
                started[oldest] = waiting.pop(oldest) - 1 + 2  # one cached, two generated
                bench.news(oldest, [1, 1], 2)
            if ends and started:
                gone = next(iter(started))
                del started[gone]
                bench.news(gone, [2], 3, STOP)

    asyncio.run(run())


def _num_queued(held: list[int], waiting: list[int]) -> int:
    places, tokens = READY.max_running_requests - len(held), READY.max_total_num_tokens - sum(held)
    for index in range(len(waiting)):
        if index >= places or sum(waiting[: index + 1]) > tokens:
            return len(waiting) - index
    return 0


def priorities(low_first: bool = False, threshold: int | None = 10) -> PriorityConfig:
    return PriorityConfig(low_first, 2**63 - 1 if low_first else -(2**63), threshold)


@pytest.mark.parametrize("low_first", [False, True])
async def test_a_full_queue_lets_go_of_the_lowest_priority(low_first: bool) -> None:
    """Of the lowest the latest; nobody for requests that are no better."""
    sign = -1 if low_first else 1
    bench = Bench(max_queued_requests=2, priority=priorities(low_first))

    async def submit(rid: str, priority: int | None) -> None:
        await bench.manager.submit(GenerateInput(input_ids=[5], rid=rid, priority=priority))

    for rid, priority in (("a", 0), ("b", 0), ("c", sign * 5), ("d", sign)):
        await submit(rid, priority)  # two run
    with pytest.raises(RequestError) as caught:
        await submit("same", 0)
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    sent = len(bench.link.sent)
    await submit("e", sign * 2)
    displaced, message = bench.link.sent[sent:]
    assert isinstance(displaced, AbortReq) and isinstance(message, TokenizedGenerateReq)
    assert (displaced.rid, displaced.status_code, message.priority) == ("b", 503, sign * 2)
    assert "higher priority" in displaced.message
    await submit("f", sign * 3)
    assert isinstance(bench.link.sent[-2], AbortReq) and bench.link.sent[-2].rid == "a", "b goes once"
    with pytest.raises(RequestError):
        await submit("none", None)  # comes after those that name one


async def test_a_body_that_is_refused_displaces_nobody() -> None:
    bench = Bench(max_queued_requests=1, priority=priorities())
    await bench.manager.submit_many([GenerateInput(input_ids=[5], rid=rid, priority=0) for rid in "abc"])
    sent = len(bench.link.sent)
    many = [GenerateInput(input_ids=[5], rid=f"m{i}", priority=9) for i in range(5)]
    with pytest.raises(RequestError):
        await bench.manager.submit_many(many)
    with pytest.raises(RequestError):
        await bench.manager.submit(GenerateInput(input_ids=[5], rid="d", priority=9, logprob_start_len=7))
    assert len(bench.link.sent) == sent


async def test_a_priority_needs_the_flag() -> None:
    bench = Bench()
    for priority in (None, 0):
        await bench.manager.submit(GenerateInput(input_ids=[5], priority=priority))
    with pytest.raises(RequestError, match="--enable-priority-scheduling") as caught:
        await bench.manager.submit(GenerateInput(input_ids=[5], priority=1))
    assert (caught.value.status, caught.value.param) == (400, "priority")


async def test_time_is_told_while_requests_are_in_flight() -> None:
    bench = Bench(req_waiting_timeout=0.05)
    await bench.manager.submit(ids_input(5, rid="a"))
    await bench.manager.submit(ids_input(5, rid="b"))

    def times() -> list[float]:
        return [message.now for message in bench.link.sent if isinstance(message, TickReq)]

    async with asyncio.timeout(30):
        while len(times()) < 3:
            await asyncio.sleep(0)
    assert times() == sorted(times())
    for rid in "ab":
        bench.news(rid, [2], 1, STOP)
    told = len(times())
    ticker = bench.manager._ticker
    assert ticker is not None
    async with asyncio.timeout(30):
        while bench.manager._ticker is not None:
            await asyncio.sleep(0)
    assert len(times()) == told, "nobody waits for anything"


async def test_no_time_is_told_without_a_timeout() -> None:
    bench = Bench()
    await bench.manager.submit(ids_input(5))
    assert not any(isinstance(message, TickReq) for message in bench.link.sent)


@pytest.mark.parametrize("special", [False, True])
async def test_prompts_that_are_too_long_are_cut_if_told_so(special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingTokenizer(monkeypatch)
    bench = Bench(allow_auto_truncate=True)
    text = "the quick brown fox, " * 20_000
    whole = byte_level().encode(text, special)
    counting.num_chars = 0
    await bench.manager.submit_many(
        [
            GenerateInput(text=text, rid="text", add_special_tokens=special),
            GenerateInput(text=text[:2000], rid="short", add_special_tokens=special),
        ]
    )
    await bench.manager.submit(ids_input(*range(5, 205), rid="ids"))
    await bench.manager.submit(ids_input(7, 8, rid="fits"))
    prompts = {message.rid: list(message.input_ids) for message in bench.link.requests()}
    assert prompts["text"] == prompts["short"] == whole[:63]
    assert (prompts["ids"], prompts["fits"]) == (list(range(5, 68)), [7, 8])
    assert counting.num_chars < 3 * PIECE_CHARS < len(text), "no more is tokenised than is kept"
    assert all(message.sampling_params.max_new_tokens >= 1 for message in bench.link.requests())
    with pytest.raises(RequestError, match="empty"):
        await bench.manager.submit(ids_input(rid="none"))


async def test_stop_tokens_outside_the_vocabulary_stay_behind() -> None:
    bench = Bench()
    ids = (-(10**30), -1, 7, 1024, 10**30)
    await bench.manager.submit(ids_input(5, 6, 7, stop_token_ids=ids, max_new_tokens=10**12))
    params = bench.link.requests()[0].sampling_params
    assert (params.stop_token_ids, params.max_new_tokens) == ((7,), 61)


async def test_a_flush_waits_as_long_as_it_was_told() -> None:
    bench = Bench()
    waiting = asyncio.create_task(bench.manager.flush_cache(wait_s=0.01))
    async with asyncio.timeout(30):
        while len(bench.link.sent) < 2:
            await asyncio.sleep(0)
    flush, cancel = bench.link.sent
    assert isinstance(flush, FlushCacheReq) and flush.wait and cancel == CancelFlushReq(id=flush.id)
    bench.manager.handle(ControlReply(id=flush.id, success=False, message="2 requests are pending"))
    assert not (await waiting).success
    gone = asyncio.create_task(bench.manager.flush_cache(wait_s=3000))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    assert isinstance(bench.link.sent[-1], CancelFlushReq), "nothing is flushed when the caller has gone"
    for wait_s in (-1.0, 1e9, float("nan")):
        with pytest.raises(RequestError, match="timeout"):
            await bench.manager.flush_cache(wait_s=wait_s)


async def test_not_ready_draining_and_dead_refuse_with_503() -> None:
    manager = TokenizerManager(demo_config(), byte_level(), MemoryLink())
    for code, change in [
        ("starting", lambda: manager.handle(READY)),
        ("shutting_down", lambda: manager.fail("it broke")),
        ("engine_dead", lambda: None),
    ]:
        if code == "shutting_down":
            assert await manager.drain(1.0)
        with pytest.raises(RequestError) as caught:
            await manager.submit(ids_input(5))
        assert (caught.value.status, caught.value.code) == (503, code)
        change()


async def test_death_while_a_long_text_is_tokenised_sends_nothing() -> None:
    bench = Bench()
    text = "x" * (INLINE_CHARS + 1)
    bench.manager.handle(msgspec.structs.replace(READY, max_req_input_len=2 * INLINE_CHARS))
    submit = asyncio.ensure_future(bench.manager.submit(GenerateInput(text=text)))
    await asyncio.sleep(0)
    assert not submit.done()
    bench.manager.fail("it broke")
    with pytest.raises(RequestError, match="it broke"):
        await submit
    assert bench.link.sent == []


@pytest.mark.parametrize("num_turns", [1, 3])
async def test_a_shutdown_while_a_long_text_is_tokenised_is_a_503(num_turns: int) -> None:
    bench = Bench()
    bench.manager.handle(msgspec.structs.replace(READY, max_req_input_len=10**7, context_length=10**7))
    submits = [asyncio.ensure_future(bench.manager.submit(GenerateInput(text="word " * 300_000))) for _ in range(8)]
    for _ in range(num_turns):
        await asyncio.sleep(0)
    assert not any(submit.done() for submit in submits)
    bench.manager.fail("SIGTERM")
    bench.manager.shutdown()
    for error in await asyncio.gather(*submits, return_exceptions=True):
        assert isinstance(error, RequestError) and error.status == 503, error


async def test_an_id_counts_as_taken_while_its_request_is_prepared() -> None:
    bench = Bench()
    bench.manager.handle(msgspec.structs.replace(READY, max_req_input_len=10**7, context_length=10**7))
    first = asyncio.ensure_future(bench.manager.submit(GenerateInput(text="word " * 1000, rid="one")))
    await asyncio.sleep(0)
    assert not first.done() and bench.manager.is_active("one"), "another request gets an id of its own"
    with pytest.raises(RequestError, match="vocabulary"):
        await bench.manager.submit(ids_input(10**6, rid="one"))
    assert not first.done() and bench.manager.is_active("one"), "the second of that id takes nothing back"
    stream = await first
    assert bench.manager.is_active("one")
    stream.close()
    assert not bench.manager.is_active("one")
    with pytest.raises(RequestError, match="vocabulary"):
        await bench.manager.submit(ids_input(10**6, rid="two"))
    assert not bench.manager.is_active("two")


async def test_an_id_is_reserved_until_its_request_is_sent() -> None:
    """Two requests that come with one X-Request-Id, the second while the first one's conversation is rendered."""
    bench = Bench()
    with bench.manager.reserved_id("trace") as first, bench.manager.reserved_id("trace") as second:
        assert first == "trace" != second
        streams = [await bench.manager.submit(ids_input(5, rid=rid)) for rid in (second, first)]
        assert bench.manager.is_active("trace")
    assert bench.manager.is_active("trace")
    for stream in streams:
        stream.close()
    assert not bench.manager.is_active("trace") and not bench.manager.is_active(second)


async def test_the_id_of_a_body_is_taken_while_a_request_lasts() -> None:
    bench = Bench()
    group = await bench.manager.submit_many(expand_samples(replace(ids_input(5), rid="body"), 3))
    group.streams[0].close()
    group.streams[1].close()
    with bench.manager.reserved_id("body") as other:
        assert other != "body"
    group.streams[2].close()
    with bench.manager.reserved_id("body") as again:
        assert again == "body"


async def test_drain_waits_for_the_last_request() -> None:
    bench = Bench()
    stream = await bench.manager.submit(ids_input(5))
    drain = asyncio.ensure_future(bench.manager.drain(30.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not drain.done()
    bench.news("r", [2], 1, STOP)
    assert await drain is True
    assert (await stream.collect()).finish_reason == STOP
    slow = Bench()
    await slow.manager.submit(ids_input(5))
    assert await slow.manager.drain(0.01) is False


async def test_fatal_error_ends_streams_control_and_waiters() -> None:
    bench = Bench()
    stream = await bench.manager.submit(ids_input(5))
    bench.news("r", [1], 1, text="a")
    flush = asyncio.ensure_future(bench.manager.flush_cache())
    await asyncio.sleep(0)
    bench.manager.handle(FatalError(source="scheduler", message="out of memory"))
    assert (await anext(stream)).text == "a"
    for work in (anext(stream), flush, bench.manager.flush_cache()):
        with pytest.raises(RequestError, match="scheduler: out of memory") as caught:
            await work
        assert caught.value.status == 503
    assert await bench.manager.wait_dead() == "scheduler: out of memory"


async def test_control_replies_find_their_callers() -> None:
    bench = Bench()
    calls = [asyncio.ensure_future(bench.manager.flush_cache()) for _ in range(2)]
    await asyncio.sleep(0)
    first, second = [message for message in bench.link.sent if isinstance(message, FlushCacheReq)]
    bench.manager.handle(ControlReply(id="nobody", success=True))
    bench.manager.handle(ControlReply(id=second.id, success=False, message="busy"))
    bench.manager.handle(ControlReply(id=first.id, success=True))
    assert [(await call).success for call in calls] == [True, False]


async def test_a_storage_that_is_not_there_is_not_flushed() -> None:
    bench = Bench()
    with pytest.raises(RequestError, match="no storage tier: start it with --enable-hierarchical") as caught:
        await bench.manager.flush_cache(storage=True)
    assert (caught.value.status, caught.value.param) == (400, "storage")
    assert bench.link.sent == []


async def test_shutdown_tells_the_scheduler() -> None:
    bench = Bench()
    bench.manager.shutdown()
    assert bench.link.sent == [ShutdownReq(drain=False)]


def test_samples_have_own_ids_and_seeds() -> None:
    samples = expand_samples(ids_input(5, seed=2**63 - 1), 3)
    assert [sample.rid for sample in samples] == ["r", "r-1", "r-2"]
    assert [sample.sampling_params.seed for sample in samples] == [2**63 - 1, -(2**63), -(2**63) + 1]
    for n in (0, 129):
        with pytest.raises(RequestError):
            expand_samples(ids_input(5), n)


def chunk(text: str, ids: list[int], **fields: object) -> GenerateChunk:
    values = {"rid": "r", "prompt_tokens": 1, "completion_tokens": 0, "cached_tokens": 0, "e2e_latency": 0.0, **fields}
    return GenerateChunk(text=text, output_ids=ids, **values)


def test_merging_keeps_parts_and_takes_the_last_totals() -> None:
    prompt = TokenLogprobs(token_ids=[1], logprobs=[None], top_logprobs=TokenPairs.of([[]]))
    merged = merge_chunks([
        chunk("a", [1], input_logprobs=prompt), chunk("", [], e2e_latency=1.0),
        chunk("b", [2], completion_tokens=2, e2e_latency=2.0, finish_reason=STOP),
    ])  # fmt: skip
    assert (merged.text, merged.output_ids, merged.completion_tokens) == ("ab", [1, 2], 2)
    assert (merged.e2e_latency, merged.finish_reason, merged.input_logprobs) == (2.0, STOP, prompt)


def test_only_aborts_with_a_status_are_errors() -> None:
    assert error_of(chunk("", [], finish_reason=STOP)) is None
    assert error_of(chunk("", [], finish_reason=FinishReason(type="abort", message="user"))) is None
    error = error_of(chunk("", [], finish_reason=FinishReason(type="abort", message="no room", status_code=507)))
    assert error is not None
    assert (error.status, error.message) == (507, "no room")


def test_a_sentencepiece_model_without_tokenizer_json(tmp_path: Path) -> None:
    """As Llama 2 and Mistral 7B were first published."""
    made = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=made, model_type="bpe", vocab_size=330, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(made.getvalue())
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    config = tokens | {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, theirs = load_tokenizer(tmp_path), SentencePieceProcessor(model_proto=made.getvalue())
    assert tokenizer.special_tokens == {name: tokens[name] for name in ("bos_token", "eos_token", "unk_token")}
    for text in (*CORPUS[:3], "The fox,  42 ☃ times", "été"):
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text)
        assert tokenizer.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
        assert tokenizer.decode(theirs.encode(text)) == text


def test_front_end_imports_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, fenceline.entrypoints.supervisor, fenceline.frontend.detokenizer_manager;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("template_file", [False, True])
def test_tokenizer_reads_special_tokens_and_template(tmp_path: Path, template_file: bool) -> None:

    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "pad_token": null,'
        ' "chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}'
    )
    if template_file:
        (tmp_path / "chat_template.jinja").write_text("F")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_template == ("F" if template_file else "D")
    with pytest.raises(ValueError, match="--tokenizer-path"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer in"),
        ({"vocab.json": "{}", "merges.txt": ""}, "which is never run"),
        ({"tokenizer.json": "{}"}, "is no tokenizer"),
        ({"tokenizer.json": None}, "is no regular file"),
        ({"chat_template.jinja": None}, "is no regular file"),
        ({"vocab.json": None}, "is no regular file"),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str | None], message: str
) -> None:
    """Its config.json offers code of its own, which is neither run nor asked for. None: a named pipe."""

    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    own_code = '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoTokenizer": ["own.T", null]}}'
    (tmp_path / "config.json").write_text(own_code)
    (tmp_path / "tokenizer_config.json").write_text(own_code)
    for name, text in files.items():
        if text is None:
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ValueError, match=message) as raised:
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists() and "\n" not in str(raised.value)


@pytest.mark.parametrize("vocab_size", [200, 5000])
def test_a_tokenizer_of_another_model_is_refused(vocab_size: int) -> None:

    tokenizer = byte_level()
    check_vocabulary(tokenizer, tokenizer.vocab_size, "folder")
    with pytest.raises(ValueError, match=f"has {tokenizer.vocab_size} tokens, the model {vocab_size}: .*--skip-tok"):
        check_vocabulary(tokenizer, vocab_size, "folder")
