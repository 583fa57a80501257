"""benchmark/hostile: requests come back from their seed, and what is a failure is seen as one."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmark" / "hostile"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


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


def test_late_is_what_ends_late() -> None:
    from beside import Sample, usual, worst

    samples = [Sample(0.0, 0.01), Sample(1.0, 0.03), Sample(2.0, 5.0), Sample(8.0, 0.02)]
    assert usual(samples, until=6.0) == 0.02
    assert worst(samples, since=3.0, less=1.0) == 4.0
    assert worst(samples, since=7.5) == 0.02
