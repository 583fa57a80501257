"""The process that compiles grammars: whatever a grammar does to its compiler, others are compiled meanwhile."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import pytest
from grammar_work import NUM_CHILDREN, serve_work

from fenceline.constrained import compile, compile_server
from fenceline.constrained.compile_server import CompileJob, VocabularySource
from fenceline.constrained.spec import GrammarSpec
from fenceline.ipc import forked_jobs
from fenceline.ipc.forked_jobs import JobResult


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_work, args=(theirs, *getattr(request, "param", ())))
    process.start()
    theirs.close()
    yield ours
    ours.close()
    process.join(60)
    assert process.exitcode == 0


class _Vocabulary:
    def serialize_json(self) -> str:
        return "{}"


class _Ended:
    """A server whose other end has been closed already."""

    def __init__(self, *_: object) -> None:
        pass

    def run(self) -> None:
        pass


def test_the_vocabulary_is_sent_before_the_priority_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests with a grammar wait for it; with a lower priority on a busy CPU for minutes."""
    done: list[str] = []
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(forked_jobs.os, "nice", lambda _: done.append("lowered"))
    monkeypatch.setattr(forked_jobs.signal, "signal", lambda *_: None)
    monkeypatch.setattr(forked_jobs.signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(compile, "make_vocabulary", lambda *_: done.append("loaded") or _Vocabulary())
    monkeypatch.setattr(forked_jobs, "JobServer", _Ended)
    ours.send_bytes(msgspec.msgpack.encode(VocabularySource("", frozenset(), 1, (0,))))
    compile_server.serve(theirs, 1)
    assert done == ["loaded", "lowered"]
    assert _receive(ours) == JobResult(0, b"{}")


def _send(server: Connection, id: int, text: str, is_short: bool = False) -> None:
    server.send_bytes(msgspec.msgpack.encode(CompileJob(id, is_short, GrammarSpec("regex", text), None)))


def _receive(server: Connection) -> JobResult:
    assert server.poll(120)
    return msgspec.msgpack.decode(server.recv_bytes(), type=JobResult)


def test_a_slow_grammar_is_refused_and_others_do_not_wait(server: Connection) -> None:
    _send(server, 1, "loop")
    for id in range(2, 6):
        _send(server, id, "fine")
    answers = [_receive(server) for _ in range(5)]
    assert [answer.id for answer in answers] == [2, 3, 4, 5, 1]
    assert all(answer.data == b"fine" * 100_000 for answer in answers[:4])
    assert "not compiled in 1 s of CPU time" in answers[4].error and answers[4].is_refused


def test_a_short_attempt_decides_nothing(server: Connection) -> None:
    _send(server, 1, "loop", is_short=True)
    _send(server, 2, "fine", is_short=True)
    answers = {answer.id: answer for answer in (_receive(server), _receive(server))}
    assert answers[1] == JobResult(1, is_given_up=True)
    assert answers[2].data


def test_as_many_as_there_are_children_end_before_the_next_begin(server: Connection) -> None:
    for id in range(NUM_CHILDREN):
        _send(server, id + 1, "loop")
    _send(server, 9, "fine")
    answers = [_receive(server) for _ in range(NUM_CHILDREN + 1)]
    assert answers[0].error
    assert {answer.id for answer in answers if not answer.error} == {9}


@pytest.mark.parametrize(
    ("text", "reason", "is_refused"),
    [
        ("eat", "needs more than", True),
        ("crash", "cannot be compiled", True),
        ("kill", "try again later", False),
        ("no files", "are short: try again later", False),
        ("refuse", "this is why", True),
    ],
)
def test_a_compiler_that_fails_says_why_and_goes_on(
    server: Connection, text: str, reason: str, is_refused: bool
) -> None:
    _send(server, 1, text)
    answer = _receive(server)
    assert reason in answer.error and answer.is_refused == is_refused
    _send(server, 2, "fine")
    assert _receive(server).data


@pytest.mark.parametrize("server", [(0, 0.5)], indirect=True)
def test_a_compiler_that_is_stopped_is_given_up(server: Connection) -> None:
    _send(server, 1, "stop")
    answer = _receive(server)
    assert "not compiled within 0.5 s" in answer.error and not answer.is_refused


@pytest.mark.parametrize("server", [(2,)], indirect=True)
def test_a_fork_that_fails_fails_one_job_and_not_the_process(server: Connection) -> None:
    for id in (1, 2, 3):
        _send(server, id, "fine")
    answers = {answer.id: answer for answer in (_receive(server) for _ in range(3))}
    for id in (1, 2):
        assert "try again later" in answers[id].error and not answers[id].is_refused
    assert answers[3].data


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
def test_no_memory_at_all_is_not_the_grammar_s_fault(server: Connection) -> None:
    """The limit of the whole process, as of a machine whose memory is used up, lies below the compiler's own."""
    _send(server, 1, "limit all")
    assert _receive(server).data
    _send(server, 2, "eat")
    answer = _receive(server)
    assert "memory or processes are short" in answer.error and not answer.is_refused
