"""``fenceline chat`` against a small server: what it sends, what it prints, and what it says when nothing answers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from fenceline.cli import main


class Scripted(HTTPServer):
    """Answers chats with ``events``, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.status = 200
        self.events: list[object] = []
        self.models: object = {"data": [{"id": "first"}, {"id": "second"}]}
        self.says("Hello", "!")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def says(self, *pieces: str, thinks: str = "") -> None:
        """Answer with these pieces from now on."""
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": thinks}]
        deltas += [{"content": piece} for piece in pieces]
        self.events = [{"choices": [{"delta": delta}]} for delta in deltas] + [{"choices": [], "usage": {}}]


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self._answer(200, json.dumps(self.server.models))

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        assert self.path == "/v1/chat/completions"
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in self.server.events) + "data: [DONE]\n\n"
        if self.server.status != 200:
            text = json.dumps({"error": {"message": "too\n\x1b[2Jlong"}})
        self._answer(self.server.status, text)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Terminal(io.StringIO):
    """Standard input or output of somebody who sits in front of it."""

    def isatty(self) -> bool:
        return True


def chat(monkeypatch: pytest.MonkeyPatch, *words: str, types: str | None = None, pipes: str = "") -> int:
    """The exit status of the command. It reads what somebody ``types`` line by line, or what is piped in."""
    monkeypatch.setattr("sys.stdin", io.StringIO(pipes) if types is None else Terminal(types))
    try:
        main(["chat", *words])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_one_message(server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server.says("Hello", "!", thinks="Hm.")
    assert chat(monkeypatch, server.url, pipes="Hi\nyou\n") == 0
    assert chat(monkeypatch, "--url", f"{server.url}/v1/", "-q", "Hi", "--model", "x", "--system", "Be brief.") == 0
    assert chat(monkeypatch, server.url.removeprefix("http://"), "--quick", "Hi", "--api-key", "secret") == 0
    assert capsys.readouterr().out == "Hello!\n" * 3, "what it thought is not part of the answer"
    asked = [(body["model"], [tuple(message.values()) for message in body["messages"]]) for body in server.bodies]
    assert asked == [
        ("first", [("user", "Hi\nyou\n")]),
        ("x", [("system", "Be brief."), ("user", "Hi")]),
        ("first", [("user", "Hi")]),
    ]
    assert server.keys == [None, None, "Bearer secret"] and all(body["stream"] for body in server.bodies)


def test_a_conversation(server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = "Hi\n\n/system Be brief.\nHow are you?\n/reset\n/rest\n/etc/hosts is what?\n/system\nBye\n/exit\nmore\n"
    assert chat(monkeypatch, server.url, types=typed) == 0
    assert [[message["content"] for message in body["messages"]] for body in server.bodies] == [
        ["Hi"],
        ["Be brief.", "Hi", "Hello!", "How are you?"],
        ["Be brief.", "/etc/hosts is what?"],
        ["/etc/hosts is what?", "Hello!", "Bye"],
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"first at {server.url}: /reset forgets")
    assert sum("/rest is no command" in line for line in lines) == 1
    assert chat(monkeypatch, server.url, types="Hi\n") == 0, "the end of the input ends it too"


def test_a_message_that_fails_is_forgotten(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 400
    assert chat(monkeypatch, server.url, "-q", "Hi") == 1
    assert capsys.readouterr().err == f"fenceline chat: {server.url}: 400, too [2Jlong\n"
    server.status, server.events = 200, [*server.events[:3], {"error": {"message": "engine dead"}}]
    assert chat(monkeypatch, server.url, "-q", "Hi") == 1
    assert capsys.readouterr() == ("Hello\n", "fenceline chat: engine dead\n")
    assert chat(monkeypatch, server.url, types="One\nTwo\n") == 0
    assert [len(body["messages"]) for body in server.bodies[-2:]] == [1, 1]
    assert capsys.readouterr().out.count("engine dead") == 2


def test_ctrl_c_stops_an_answer_which_is_kept_so_far(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Terminal):
        def write(self, text: str) -> int:
            if text == "!":
                raise KeyboardInterrupt
            return super().write(text)

    server.says("Hello", "!", "?", "?")
    monkeypatch.setattr("sys.stdout", Impatient())
    assert chat(monkeypatch, server.url, types="Hi\nGo on\n") == 0
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["Hi", "Hello!", "Go on"]
    assert chat(monkeypatch, server.url, "-q", "Hi") == 130


@pytest.mark.parametrize("event", [5, [], {"choices": 5}, {"choices": [5]}, {"choices": [{"delta": "x"}]}])
def test_another_form_of_answers_is_a_line(
    event: object, server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = [{"choices": [{"delta": None}], "error": None}, {"choices": None}, event]
    assert chat(monkeypatch, server.url, "-q", "Hi") == 1
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"fenceline chat: {server.url}: streams no answer as OpenAI's API does: ")


@pytest.mark.parametrize("models", [[], {"data": []}, {"data": ["x"]}, "Welcome!"])
def test_a_server_without_models_is_a_line(
    models: object, server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = models
    assert chat(monkeypatch, server.url, "-q", "Hi") == 1
    assert capsys.readouterr().err.endswith("lists no models as OpenAI's API does; name one with --model\n")


def test_a_terminal_shows_thoughts_and_obeys_no_model(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    server.says("\x1b[2J\x9bHe", "llo\n\tyou\r", thinks="Hm.\x07")
    assert chat(monkeypatch, server.url, "-q", "Hi") == 0
    assert screen.getvalue() == "\x1b[2mHm.\x1b[0m\n\n[2JHello\n\tyou\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["ftp://x"], "ftp://x: not an address"),
        (["http://127.0.0.1:9", "-q", "Hi"], "http://127.0.0.1:9: Connection refused; fenceline serve MODEL"),
        (["--model", "m", "-q", " "], "nothing to send"),
        (["--model", "m"], "nothing to send"),
        (["--model", "m", "-q", "Hi", "--api-key", "a\nb"], "--api-key or OPENAI_API_KEY: a key has printable"),
        (["--model", "m", "-q", "Hi", "--api-key", "\u043a"], "--api-key or OPENAI_API_KEY: a key has printable"),
    ],
)
def test_what_cannot_be_asked_is_a_line(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, *words) == 1
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"fenceline chat: {line}")


def test_a_reader_may_stop_reading(server: Scripted) -> None:
    server.says(*["Hello!\n"] * 9)
    words = [sys.executable, "-c", "from fenceline.cli import main; main()", "chat", server.url, "-q", "Hi"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
