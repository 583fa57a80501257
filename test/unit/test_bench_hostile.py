"""benchmark/hostile: requests come back from their seed, and what is a failure is seen as one."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmark" / "hostile"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "run", raising=False)  # benchmark/h200 has a script of this name too


def test_a_request_is_a_function_of_seed_and_index() -> None:
    from fuzz import fuzzed

    requests = [fuzzed(3, index) for index in range(500)]
    assert requests == [fuzzed(3, index) for index in range(500)]
    assert len({request.data for request in requests}) > 400
    assert {"/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/abort_request"} <= {
        request.path for request in requests
    }
    assert any(request.leaves_after_s is not None for request in requests)
    assert all(request.undo for request in requests if request.path == "/pause_generation")


@pytest.mark.parametrize(
    ("status", "body", "fails"),
    [
        (200, b'{"text": "a"}', False),
        (200, b'{"text": "a', True),
        (200, b"data: {}\n\ndata: [DONE]\n\n", False),
        (200, b"data: {}\n\n", True),
        (400, b'{"error": {"code": 400}}', False),
        (500, b'{"error": {"code": 500}}', True),
        (503, b'{"error": {"code": "queue_full"}}', False),
        (503, b'{"error": {"code": "engine_dead"}}', True),
        (503, b"", True),
    ],
)
def test_what_is_a_failure(status: int, body: bytes, fails: bool) -> None:
    from fuzz import complaint, fuzzed
    from wire import CLOSED, LEFT, Answer

    request = next(fuzzed(0, index) for index in range(100) if fuzzed(0, index).path == "/generate")
    answer = Answer()
    answer.status, answer.complete = status, True
    answer.body += body
    assert (complaint(request, answer) is not None) == fails
    assert complaint(request, CLOSED) is not None
    assert complaint(request, LEFT) is None


def test_hostile_grammars_come_back_from_their_seed_and_many_are_none() -> None:
    from grammars import asked

    requests = [asked(3, index) for index in range(400)]
    assert requests == [asked(3, index) for index in range(400)]
    assert {request.kind for request in requests} == {
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "tools",
    }
    assert len({request.data for request in requests}) > 390
    assert requests[0] != asked(4, 0)


@pytest.mark.parametrize(
    ("kind", "status", "body", "wrong"),
    [
        ("json_schema", 200, {"choices": [{"text": "[1]", "finish_reason": "stop"}]}, None),
        ("json_schema", 200, {"choices": [{"text": "[1", "finish_reason": "stop"}]}, "is no JSON"),
        ("json_schema", 200, {"choices": [{"text": "[1", "finish_reason": "length"}]}, None),
        ("json_schema", 200, {"text": "{", "meta_info": {"finish_reason": {"type": "stop"}}}, "is no JSON"),
        ("tools", 200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}, None),
        ("ebnf", 400, {"error": {"message": "ebnf: root is missing"}}, None),
        ("ebnf", 400, {"error": {"message": "ebnf: "}}, "without a reason"),
        ("ebnf", 400, {"error": {"message": "ebnf: the compiler gives no reason"}}, "without a reason"),
        ("regex", 500, {"error": {"message": "oops"}}, "status 500"),
        ("regex", 503, {"error": {"message": "regex: it was not compiled within 30 s"}}, None),
    ],
)  # fmt: skip
def test_what_is_a_failure_of_a_hostile_grammar(
    kind: str, status: int, body: dict[str, object], wrong: str | None
) -> None:
    from grammars import Asked, complaint
    from wire import SILENT, Answer

    answer = Answer()
    answer.status = status
    answer.body += json.dumps(body).encode()
    found = complaint(Asked(kind, "/generate", {}), answer)
    assert found is None if wrong is None else wrong in str(found)
    assert complaint(Asked(kind, "/generate", {}), SILENT) == SILENT


def test_late_is_what_ends_late() -> None:
    from beside import Sample, usual, worst

    samples = [Sample(0.0, 0.01), Sample(1.0, 0.03), Sample(2.0, 5.0), Sample(8.0, 0.02)]
    assert usual(samples, until=6.0) == 0.02
    assert worst(samples, since=3.0, less=1.0) == 4.0
    assert worst(samples, since=7.5) == 0.02


def test_looking_costs_the_observer_little_and_counts_what_is_pending_until_the_look() -> None:
    """As objects the samples of a minute took it half a second to send, which counted as the age of a token."""
    from beside import Observed, Sample

    seen = Observed(seen_at=7.5, pending={"next_tokens": 7.0})
    for index in range(40_000):
        seen.next_tokens.add(index / 1000, 0.003)
    sent = pickle.dumps(seen)
    assert len(sent) < 20 * 40_000
    arrived: Observed = pickle.loads(sent)
    arrived.count_pending()
    assert list(arrived.next_tokens)[:2] == [Sample(0.0, 0.003), Sample(0.001, 0.003)]
    assert list(arrived.next_tokens)[-1] == Sample(7.0, 0.5)


def test_what_is_watched_and_what_is_known_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import run
    from attacks import ATTACKS, WATCHED

    assert set(ATTACKS) >= WATCHED
    row = run.Row(
        attack="nothing", tree="0", outcomes={}, took_s=5.0, health_ms=1.0, kept_health_ms=1.0, token_late_ms=1.0,
        memory_peak_mb=0.0, memory_kept_mb=0.0, log_kb=0.0, tracebacks=0, failures=[], serves=True,
        usual_health_ms=1.0, usual_token_ms=1.0, observer_lag_ms=0.0,
    )  # fmt: skip
    rows = [row] + [replace(row, attack=name, **late) for name, late in (
        ("within", {}), ("late", {"token_late_ms": 101.0}), ("big", {"memory_kept_mb": 101.0}),
    )]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert run.read_rows(file) == rows
    run.print_table(argparse.Namespace(file=file, outside=True))
    names = [line.split(" | ")[0].strip("| ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == ["nothing", "late", "big"]
    known = argparse.Namespace(
        only="nothing", watched=True, list=False, python_path=["."], label=None, output=file, resume=True, ahead=4,
        flags=[],
    )  # fmt: skip
    file.write_text("".join(json.dumps(asdict(replace(row, attack=name))) + "\n" for name in ATTACKS))
    assert run.run_attacks(known) == 0, "nothing is left to do"


async def test_the_control_server_answers_what_observers_and_attackers_ask() -> None:
    import asyncio

    import control
    from beside import STREAM
    from wire import exchange, post, request

    server = await asyncio.get_running_loop().create_server(control.Control, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for data in (
            request("GET", "/health"),
            post("/generate", b"[" * 3_000_000),
            post("/v1/completions", STREAM),
        ):
            answer = await exchange(port, data, 30.0)
            assert not isinstance(answer, str) and answer.status == 200
        assert answer.body.count(b"data: {") == 200 and answer.body.endswith(b"data: [DONE]\n\n")
