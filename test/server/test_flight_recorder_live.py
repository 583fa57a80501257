"""Dumps of a live server: on request, on SIGUSR1, and as its last act."""

from __future__ import annotations

import json
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import WATCHDOG_S, LiveServer, wait_for

BODY = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
LAST_WORDS = re.compile(r"flight recorder: (.*); the last steps are in (\S+)")


def flags(folder: Path, *more: str) -> list[str]:
    return ["--max-total-tokens", "2048", "--flight-recorder-dir", str(folder), *more]


def dumps(server: LiveServer) -> list[tuple[str, dict[str, Any]]]:
    """Reason and content of every dump that the log names."""
    return [(why, json.loads(Path(path).read_text())) for why, path in LAST_WORDS.findall(server.output)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps") / "made"


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Iterator[LiveServer]:
    command = ["--model-path", "demo", "--device", "cpu", "--api-key", "key"]
    with LiveServer.real(*command, *flags(folder)) as server:
        server.wait_ready()
        with server.client(headers={"Authorization": "Bearer key"}) as client:
            assert client.post("/generate", json=BODY).status_code == 200
        yield server


@pytest.fixture
def client(recorded: LiveServer) -> Iterator[httpx.Client]:
    with recorded.client(headers={"Authorization": "Bearer key"}) as client:
        yield client


def test_get_is_the_json_and_post_writes_a_file(client: httpx.Client, folder: Path) -> None:
    seen = client.get("/flight_recorder").json()
    assert seen["format"] == "fenceline-flight-recorder" and len(seen["steps"]) == 12
    assert seen["steps"][0]["seqs"][0]["token_ids"] is None, "prompts are told only when asked for"
    assert seen["config"]["api_key"] is True and "Bearer" not in json.dumps(seen)
    answer = client.post("/flight_recorder").json()
    path = Path(answer["path"])
    assert answer["success"] is True and path.parent == folder
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["steps"] == seen["steps"]


def test_the_key_is_asked_for(recorded: LiveServer) -> None:
    with recorded.client() as stranger:
        assert stranger.get("/flight_recorder").status_code == 401
        assert stranger.post("/flight_recorder").status_code == 401


@pytest.mark.parametrize("to_main", [True, False])
def test_sigusr1_makes_a_dump_and_the_server_goes_on(recorded: LiveServer, client: httpx.Client, to_main: bool) -> None:
    before = len(dumps(recorded))
    if to_main:
        recorded.signal(signal.SIGUSR1)
    else:
        recorded.engine_processes()[0].send_signal(signal.SIGUSR1)
    wait_for(lambda: len(LAST_WORDS.findall(recorded.output)) > before)
    why, dump = dumps(recorded)[-1]
    assert why == "SIGUSR1" and len(dump["steps"]) >= 12
    assert client.post("/generate", json=BODY).status_code == 200


@pytest.mark.long
def test_off_is_answered_and_the_signal_hurts_nobody() -> None:
    with LiveServer.real("--model-path", "demo", "--device", "cpu", "--flight-recorder-steps", "0") as server:
        with server.wait_ready().client() as client:
            for method in ("GET", "POST"):
                answer = client.request(method, "/flight_recorder")
                assert answer.status_code == 400
                assert "--flight-recorder-steps" in answer.json()["error"]["message"]
            server.signal(signal.SIGUSR1)
            wait_for(lambda: "the flight recorder is off" in server.output)
            assert client.post("/generate", json=BODY).status_code == 200


@pytest.mark.long
def test_books_that_do_not_add_up_are_dumped(tmp_path: Path) -> None:
    with LiveServer.fake(*flags(tmp_path), entry="run_wrong_books") as server:
        with server.wait_ready().client() as client:
            client.post("/generate", json=BODY)
        assert server.wait_exit() == 1
        ((why, dump),) = dumps(server)
        assert "KV pages do not add up while idle: 1 leased to nobody" in why
        assert dump["reason"] == why and len(dump["steps"]) == 12
        assert [event["why"] for event in dump["events"] if event["event"] == "leave"] == ["length"]
        assert LAST_WORDS.search(server.last_lines()), "named at the end"


def test_a_wrong_page_is_reported_and_dumped(tmp_path: Path) -> None:
    """--memory-check full: the answer is an error, and log and dump have the report."""
    check = ("--memory-check", "full", "--page-size", "1")
    with LiveServer.fake(*flags(tmp_path, *check), entry="run_wrong_page") as server:
        with server.wait_ready().client() as client:
            answer = client.post("/generate", json=BODY | {"rid": "storyteller"})
            assert answer.status_code >= 500, answer.text
        assert server.wait_exit() == 1
        path = re.findall(r"the last steps are in (\S+)", server.output)[-1]
        reason = json.loads(Path(path).read_text())["reason"]
        assert reason in server.output and reason.startswith(
            "OrderError: memory order: RAW on kv_pool page 1 (slots 1-1)"
        )
        assert "step 5 reads it on forward for request storyteller (row 1, tokens 1-1, lease 2" in reason
        assert "should name page 2; missing: step_slots or queued_match" in reason


@pytest.mark.long
def test_a_step_that_never_ends_is_dumped_by_the_watchdog(tmp_path: Path) -> None:
    with LiveServer.fake(*flags(tmp_path, "--watchdog-timeout", str(WATCHDOG_S)), entry="run_hanging_step") as server:
        streaming = {**BODY, "stream": True}
        with server.wait_ready().client() as client, client.stream("POST", "/generate", json=streaming) as response:
            # Kept: an iterator that is dropped closes the connection, and that is an abort.
            lines = response.iter_lines()
            next(lines)
            wait_for(lambda: "the step hangs" in server.output)
            server.signal(signal.SIGUSR1)
            wait_for(lambda: "SIGUSR1; the last steps" in server.output)
            assert server.wait_exit() == 1
        (asked, while_hanging), (why, dump) = dumps(server)
        assert asked == "SIGUSR1" and len(while_hanging["steps"]) >= 2
        assert why.startswith(f"a step has not ended for {WATCHDOG_S} s")
        # Publishing it hangs. On a CPU that comes before the next launch, so the last step has its results.
        assert dump["steps"][-1]["tokens"] and dump["steps"][-1]["mode"] == "decode"
        assert LAST_WORDS.search(server.last_lines()), "named at the end"
