"""The front end's view of compiled grammars: what is remembered, what is dropped, and what the scheduler is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from frontend_bench import demo_config
from grammar_work import serve_from_source

from fenceline.constrained.compile_server import COMPILING, VocabularySource
from fenceline.constrained.spec import ANY_OBJECT, GrammarSpec
from fenceline.entrypoints.generate_body import grammar_of
from fenceline.entrypoints.openai.parsing import answer_grammar
from fenceline.entrypoints.openai.protocol import ChatBody
from fenceline.frontend import grammar_client, job_process
from fenceline.frontend.control import ControlClient
from fenceline.frontend.grammar_client import CompileProcess, GrammarClient
from fenceline.frontend.job_process import JobQueue
from fenceline.frontend.request_types import RequestError
from fenceline.frontend.tokenizer import load_tokenizer
from fenceline.ipc.forked_jobs import JobResult
from fenceline.ipc.io_struct import ControlReply, LoadGrammarReq


class FakeProcess:
    """Compiles as its ``answers`` say, each text when it is told to; ``slow`` ones not at the first attempt."""

    def __init__(self) -> None:
        self.ended, self.ended_s = False, 0.0
        self.start_error: RequestError | None = None
        self.go = asyncio.Event()
        self.compiled: list[str] = []
        self.answers: dict[str, JobResult] = {}
        self.slow: set[str] = set()

    async def started(self) -> bytes:
        if self.start_error is not None:
            raise self.start_error
        return b"vocabulary"

    async def compile(self, spec: GrammarSpec, max_whitespace: int | None, is_short: bool) -> JobResult:
        self.compiled.append(spec.text)
        await self.go.wait()
        if is_short and spec.text in self.slow:
            return JobResult(1, is_given_up=True)
        return self.answers.get(spec.text, JobResult(1, b"grammar"))

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = demo_config()
        self.sent: list[LoadGrammarReq] = []
        self.num_processes = 0
        self.starts: list[str] = []  # what becomes of the next processes, see grammar_work
        self.process = FakeProcess()
        self.replies = True
        self.is_cut_off = False
        self.control = ControlClient(self._answer)
        monkeypatch.setattr(grammar_client, "num_usable_cores", lambda: 4)
        self.client = GrammarClient(config, load_tokenizer(config.tokenizer_path), self.control)
        monkeypatch.setattr(grammar_client, "CompileProcess", self._start)

    def _start(self, source: Any, num_children: int) -> FakeProcess:
        self.num_processes += 1
        return self.process

    def _answer(self, message: Any) -> None:
        if self.is_cut_off:
            raise RequestError(503, "gone")
        self.sent.append(message)
        asyncio.get_running_loop().call_soon(
            self.control.resolve, ControlReply(id=message.id, success=self.replies, message="no room")
        )

    async def number(self, text: str, rank: int = 0) -> int:
        with self.client.using() as used:
            return await self.client.number_of(GrammarSpec("regex", text), rank, used)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_what_is_refused_is_remembered_what_failed_tried_again(bench: Bench) -> None:
    bench.process.go.set()
    bench.process.answers = {
        "wrong": JobResult(1, error="it is wrong", is_refused=True),
        "killed": JobResult(1, error="memory is short"),
    }
    for text, status in (("wrong", 400), ("killed", 503)):
        for _ in range(2):
            with pytest.raises(RequestError) as caught:
                await bench.number(text)
            assert caught.value.status == status
    assert bench.process.compiled == ["wrong", "killed", "killed"]
    bench.process.answers.clear()
    assert await bench.number("killed") > 0


async def test_nobody_compiles_what_nobody_waits_for_any_more(bench: Bench) -> None:
    asked = [asyncio.create_task(bench.number(text)) for text in "abcd"]
    await _until_compiling(bench, 2)
    asked[2].cancel()
    await asyncio.wait([asked[2]])
    # Somebody else may come for it right away.
    again = asyncio.create_task(bench.number("c"))
    again.cancel()
    await asyncio.wait([again])
    bench.process.go.set()
    assert await asyncio.gather(asked[0], asked[1], asked[3]) == [1, 2, 4]
    assert bench.process.compiled == ["a", "b", "d"]
    assert await bench.number("c") > 4


async def _until_compiling(bench: Bench, count: int) -> None:
    async with asyncio.timeout(10):
        while len(bench.process.compiled) < count:
            await asyncio.sleep(0)


async def test_whoever_leaves_the_line_as_another_ends_takes_no_turn() -> None:
    turns, first, others = JobQueue(2), asyncio.Event(), asyncio.Event()
    began: list[str] = []

    async def take(name: str) -> None:
        async with turns.turn(0, is_long=False):
            began.append(name)
            await (first if name == "a" else others).wait()

    tasks = [asyncio.create_task(take(name)) for name in "abcd"]
    while len(began) < 2:
        await asyncio.sleep(0)
    first.set()
    tasks[2].cancel()  # its task is told after that of the one that ends
    await asyncio.wait([tasks[0], tasks[2]])
    others.set()
    assert await asyncio.gather(tasks[0], tasks[1], tasks[3]) == [None] * 3
    assert tasks[2].cancelled() and began == ["a", "b", "d"]
    others.clear()
    again = [asyncio.create_task(take(name)) for name in "ef"]
    await asyncio.sleep(0)
    assert began[3:] == ["e", "f"], "both turns are there"
    others.set()
    await asyncio.gather(*again)


async def test_what_is_slow_has_no_second_attempt_for_nobody(bench: Bench) -> None:
    bench.process.slow = {"a"}
    asked = asyncio.create_task(bench.number("a"))
    await _until_compiling(bench, 1)
    asked.cancel()
    await asyncio.wait([asked])
    bench.process.go.set()
    assert await bench.number("b") == 2
    assert bench.process.compiled == ["a", "b"]


async def test_the_best_rank_goes_first_and_what_is_slow_waits(bench: Bench) -> None:
    bench.process.slow = {"a0", "a1", "a2"}
    asked = [asyncio.create_task(bench.number(f"a{i}")) for i in range(6)]
    await _until_compiling(bench, 2)
    asked.append(asyncio.create_task(bench.number("first", -1)))
    await asyncio.sleep(0)
    bench.process.go.set()
    await asyncio.gather(*asked)
    turns = bench.process.compiled
    assert turns[:3] == ["a0", "a1", "first"]
    # One of the slow ones at a time has a second attempt while others wait for their first.
    seconds = [turns.index(text, turns.index(text) + 1) for text in ("a0", "a1", "a2")]
    assert seconds == sorted(seconds)
    assert [text for text in turns[3:] if text not in ("a0", "a1", "a2")] == ["a3", "a4", "a5"]


async def test_one_more_than_may_wait_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_client, "MAX_WAITING", 2)
    compiling = [asyncio.create_task(bench.number(text)) for text in "ab"]
    await _until_compiling(bench, 2)
    asked = [asyncio.create_task(bench.number(text)) for text in "cd"]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="grammars wait to be compiled") as caught:
        await bench.number("e")
    assert caught.value.status == 503
    bench.process.go.set()
    await asyncio.gather(*compiling, *asked)
    assert sorted(bench.process.compiled) == ["a", "b", "c", "d"]


async def test_the_grammar_unused_for_longest_makes_room(bench: Bench) -> None:
    """The demo model's 1,024 tokens leave room for four grammars of 8 MiB, and not for five."""
    bench.process.go.set()
    bench.process.answers = {text: JobResult(1, bytes(8 << 20)) for text in "abc"}
    bench.process.answers["large"] = JobResult(1, bytes(16 << 20))
    numbers = {text: await bench.number(text) for text in "abc"}
    assert await bench.number("a") == numbers["a"]
    await bench.number("large")
    assert bench.sent[-1].forgotten == [numbers["b"]]
    await bench.number("small")
    assert bench.sent[-1].forgotten == []
    assert await bench.number("a") == numbers["a"]


async def test_what_the_scheduler_did_not_take_is_forgotten_later(bench: Bench) -> None:
    bench.process.go.set()
    bench.replies = False
    with pytest.raises(RequestError, match="no room"):
        await bench.number("a")
    bench.replies, bench.is_cut_off = True, True
    with pytest.raises(RequestError, match="gone"):
        await bench.number("b")
    bench.is_cut_off = False
    assert await bench.number("c") == 3
    assert [(one.grammar, one.forgotten, one.vocabulary) for one in bench.sent] == [
        (1, [], b"vocabulary"),
        (3, [1, 2], b"vocabulary"),
    ]


async def test_a_process_that_cannot_start_is_started_after_a_pause(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may have been short for a moment. Without the pause each request would start a process in vain."""
    now = 0.0
    monkeypatch.setattr(job_process.time, "monotonic", lambda: now)
    bench.process.go.set()
    bench.process.start_error = RequestError(503, "no memory")
    bench.process.ended = True
    starts = []
    for second in range(32):
        now, before = float(second), bench.num_processes
        with pytest.raises(RequestError, match="no memory"):
            await bench.number("a")
        if bench.num_processes > before:
            starts.append(second)
            bench.process.ended_s = now
    assert starts == [0, 2, 6, 14, 30]
    bench.process.ended, bench.process.start_error = False, None
    assert await bench.number("a") > 0


async def test_a_body_has_a_limited_number_of_grammars(bench: Bench) -> None:
    specs = [GrammarSpec("regex", str(number)) for number in range(17)]
    bench.client.check_all(specs[:16])
    with pytest.raises(RequestError, match="16 different grammars, got 17"):
        bench.client.check_all(specs)


_NO_SOURCE = VocabularySource("{}", frozenset(), 8, (0,))


async def test_waiting_for_a_process_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(job_process, "starting_children", failing)
    process = CompileProcess(_NO_SOURCE, 2)
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(process.started(), 60)
    assert caught.value.status == 503
    with pytest.raises(RequestError):
        await process.compile(GrammarSpec("regex", "a"), None, is_short=True)


async def test_a_process_that_is_closed_while_it_starts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    @contextmanager
    def slowly() -> Iterator[None]:
        assert closed.wait(60)
        yield

    monkeypatch.setattr(job_process, "starting_children", slowly)
    process = CompileProcess(_NO_SOURCE, 2)
    process.close()
    closed.set()
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(process.started(), 60)
    assert caught.value.status == 503  # before it could say that there is no tokenizer


@pytest.fixture
def worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """The front end with processes whose compiler does what a grammar's text says."""
    monkeypatch.setattr(grammar_client, "serve", serve_from_source)
    started: list[CompileProcess] = []

    def start(source: VocabularySource, num_children: int) -> CompileProcess:
        texts = bench.starts.pop(0) if bench.starts else "fine"
        started.append(CompileProcess(VocabularySource(texts, frozenset(), 8, (0,)), num_children))
        bench.num_processes = len(started)
        return started[-1]

    monkeypatch.setattr(grammar_client, "CompileProcess", start)
    yield bench
    for process in started:
        process.close()


@pytest.mark.parametrize("text", ["stop all", "kill all"])
async def test_a_compiler_that_hangs_or_is_killed_is_replaced(
    worker: Bench, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    await worker.number("first")  # the process has started
    monkeypatch.setattr(job_process, "ANSWER_S", 1.0 - COMPILING.wall_s)
    asked = asyncio.create_task(worker.number(text))
    # As many as are sent at a time, and others that wait for their turn. What is sent is more than a pipe holds.
    texts = [f"{number}" + "x" * 100_000 for number in range(6)]
    others = [asyncio.create_task(worker.number(one)) for one in texts]
    with pytest.raises(RequestError, match="ended; try again") as caught:
        await asyncio.wait_for(asked, 60)
    assert caught.value.status == 503
    monkeypatch.setattr(job_process, "ANSWER_S", 60.0)
    ends = await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 60)
    failed = [end for end in ends if isinstance(end, BaseException)]
    assert len(failed) <= 1 and all(isinstance(end, RequestError) for end in failed)
    assert worker.num_processes == 2
    assert await worker.number(texts[0]) > 0


@pytest.mark.parametrize("start", ["stop", "no memory"])
async def test_a_compiler_that_cannot_start_fails_one_request(
    worker: Bench, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setattr(job_process, "START_S", 2.0 if start == "stop" else 60.0)
    monkeypatch.setattr(job_process, "FIRST_PAUSE_S", 0.0)
    worker.starts = [start]
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(worker.number("a"), 60)
    assert caught.value.status == 503
    monkeypatch.setattr(job_process, "START_S", 60.0)
    assert await worker.number("a") > 0
    assert worker.num_processes == 2


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
def test_a_schema_beside_json_object_is_the_schema_of_the_answer(form: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    beside = {"schema": schema} if form == "json_object" else {"json_schema": {"name": "n", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": form, **beside}}
    grammar = answer_grammar(ChatBody.model_validate(body))
    assert grammar is not None and json.loads(grammar.text) == schema
    body["response_format"] = {"type": "json_object", "schema": {}}
    assert answer_grammar(ChatBody.model_validate(body)) == ANY_OBJECT


def test_a_schema_counts_as_many_characters_as_it_has() -> None:
    spec = grammar_of(json_schema={"const": "汉字"})
    assert spec is not None and spec.text == '{"const":"汉字"}'


@pytest.mark.parametrize("depth", [300, 5000])
def test_a_schema_that_is_nested_too_deep_is_refused(depth: int) -> None:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    for wrong in (schema, {"const": 2**64}, {"const": "\ud800"}):
        with pytest.raises(RequestError) as caught:
            grammar_of(json_schema=wrong)
        assert caught.value.status == 400
