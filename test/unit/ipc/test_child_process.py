"""What every child process does first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fenceline.frontend.detokenizer_manager import DetokenizerManager
from fenceline.ipc.child_process import Silence, Watchdog, _watch_parent, heartbeat_path
from fenceline.ipc.io_struct import (
    TOKENIZER_DECODER,
    AbortReq,
    BatchStrOut,
    BatchTokenOut,
    PortArgs,
    SchedulerReady,
    ShutdownReq,
    encode,
)
from fenceline.ipc.mailbox import Inbox, Outbox, make_ports, remove_ports
from fenceline.scheduler.process import follower_log_level

_PROGRAM = """
import multiprocessing
from multiprocessing import resource_tracker
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import PortArgs
from fenceline.ipc.child_process import prepare_child
from tqdm import tqdm

multiprocessing.set_start_method("spawn")  # as in a server's children
ports = PortArgs(tokenizer="ipc://a", scheduler="ipc://b", detokenizer="ipc://c")
prepare_child("test", ServerArgs(model_path="m", log_level="error"), ports)
for _ in tqdm(range(2)):
    pass
print(resource_tracker._resource_tracker._fd)
"""


def test_a_progress_bar_leaves_nothing_in_the_system() -> None:
    """tqdm's own lock is a named semaphore, which stays behind, with a warning, where a process is killed."""
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout == "None\n"  # nobody had to be told what to clean up


_LOG = r"""
import logging
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.child_process import setup_logging

setup_logging(ServerArgs(model_path="m"), "scheduler-1")
forged = "rid\n[2026-01-01 00:00:00] The server stops\r\x1b[2J\x85\u2028\ud800 é"
logging.getLogger("x").info("Receive: rid=%s", forged)
try:
    raise KeyError(forged)
except KeyError:
    logging.getLogger("x").exception("request %s failed", forged)
"""


def test_what_a_client_sends_forges_no_lines_of_the_log() -> None:
    result = subprocess.run([sys.executable, "-c", _LOG], capture_output=True, check=True)
    first, second, *traceback = result.stderr.decode().split("\n")
    shown = r"rid\n[2026-01-01 00:00:00] The server stops\r\x1b[2J\x85\u2028\ud800 é"
    assert first.endswith(f"] Receive: rid={shown}")
    assert second.endswith(f"] request {shown} failed")
    assert not any(line.startswith("[2026-01-01") for line in traceback)


def test_a_line_has_its_level_process_and_traceback() -> None:
    def written(program: str) -> str:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stderr.decode()

    first, second, *_ = written(_LOG).split("\n")
    assert first.split(" ", 2)[2].startswith("INFO scheduler-1] Receive: rid=")
    assert second.split(" ", 2)[2].startswith("ERROR scheduler-1] request ")
    program = _LOG.replace('model_path="m"', 'model_path="m", log_format="json"')
    info, error = map(json.loads, written(program).splitlines())
    assert info["message"].startswith("Receive: rid=rid\n[2026-01-01")
    assert (info["level"], info["process"], info["logger"]) == ("INFO", "scheduler-1", "x")
    assert datetime.fromisoformat(info["time"]).utcoffset() == timedelta(0)
    assert error["level"] == "ERROR" and error["exception"].startswith("Traceback")
    assert "exception" not in info


def test_other_ranks_than_the_first_log_warnings_alone() -> None:
    assert [follower_log_level(level) for level in ("debug", "info", "warning", "error", "critical")] == [
        "warning", "warning", "warning", "error", "critical"
    ]  # fmt: skip


def test_silence_is_counted_while_its_watcher_looks() -> None:
    silence = Silence(1.0)
    assert [silence.look(mark, now) for mark, now in [("a", 0.0), ("a", 1.0), ("a", 2.5)]] == [0.0, 1.0, 2.0]
    assert silence.look("b", 3.0) == 0.0
    assert silence.look("b", 3.5) == 0.5


def test_a_watcher_that_was_away_blames_nobody() -> None:
    silence = Silence(1.0)
    silence.look("a", 0.0)
    assert silence.look("a", 1e6) == 1.0
    assert silence.look("b", 1e6 + 0.5) == 0.0


def test_a_step_is_not_blamed_for_a_stop_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes in jumps of an hour between the watchdog's looks, as it does while the process is stopped."""
    now, looks, seen = [0.0], [0], threading.Event()

    def sleep(seconds: float) -> None:
        now[0] += 3600.0
        looks[0] += 1
        if looks[0] == 4:
            seen.set()
            threading.Event().wait()

    monkeypatch.setattr("fenceline.ipc.child_process.time", _Clock(now, sleep))
    hangs: list[str] = []
    watchdog = Watchdog(1000.0, hangs.append)
    watchdog.busy()
    assert seen.wait(30)
    assert hangs == []


def test_a_detokenizer_that_hangs_is_seen_by_its_watchdog() -> None:
    """It is busy from the moment in which messages have come until it waits for the next ones."""
    calls: list[str] = []

    class Noted:
        def busy(self) -> None:
            calls.append("busy")

        def waiting(self) -> None:
            calls.append("waiting")

    class Noting:
        def process(self, batch: BatchTokenOut) -> tuple[BatchStrOut, list[AbortReq]]:
            calls.append("process")
            return BatchStrOut(outs=[]), []

    ports = make_ports()
    manager = DetokenizerManager(Noting(), ports)  # type: ignore[arg-type]
    sender = Outbox(ports.detokenizer)
    try:
        sender.send(ports.detokenizer, encode(BatchTokenOut(outs=[])), encode(ShutdownReq()))
        manager.run(Noted())  # type: ignore[arg-type]
    finally:
        sender.close()
        remove_ports(ports)
    assert calls == ["waiting", "busy", "process"]


def test_the_server_is_ready_when_the_detokenizer_runs_too() -> None:
    """The scheduler's word passes through it: nobody is told of a server that could not answer in text."""
    ready = SchedulerReady(
        max_total_num_tokens=1, max_running_requests=1, max_req_input_len=1, context_length=1, memory_bytes={}
    )
    ports = make_ports()
    inbox = Inbox(ports.tokenizer, TOKENIZER_DECODER)
    try:
        manager = DetokenizerManager(None, ports)  # type: ignore[arg-type]
        sender, woken = Outbox(ports.detokenizer), list[bool]()
        inbox.on_wake = lambda: woken.append(True)
        sender.wake(ports.detokenizer)  # before first tokens: this passes through it as well
        for message in (ready, ShutdownReq()):
            sender.send(ports.detokenizer, encode(message))
        manager.run(Watchdog(0, lambda reason: None))
        inbox.wait()
        assert woken and inbox.drain(8) == [ready]
    finally:
        inbox.close()
        remove_ports(ports)


class _Clock:
    def __init__(self, now: list[float], sleep: object) -> None:
        self._now = now
        self.sleep = sleep

    def monotonic(self) -> float:
        return self._now[0]


def test_the_heart_beats_while_the_parent_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = PortArgs(
        scheduler=f"ipc://{tmp_path}/scheduler", detokenizer="ipc:///d", tokenizer=f"ipc://{tmp_path}/tokenizer"
    )
    path = heartbeat_path(ports, "detokenizer")
    assert path == tmp_path / "detokenizer.alive"
    beats: list[int] = []

    class Ended(BaseException):
        pass

    def wait(sentinels: list[int], timeout: float) -> list[int]:
        beats.append(path.stat().st_mtime_ns)
        return sentinels if len(beats) == 3 else []

    def leave(status: int) -> None:
        raise Ended

    monkeypatch.setattr("fenceline.ipc.child_process.wait", wait)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Ended):
        _watch_parent(0, path, ports)
    assert len(set(beats)) == 3
    assert not tmp_path.exists()
