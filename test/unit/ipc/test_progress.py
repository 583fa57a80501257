"""A word about what takes long."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from fenceline.ipc.progress import announced, progress_bar


def test_what_takes_long_says_that_it_goes_on() -> None:
    said: queue.Queue[str] = queue.Queue()
    with announced("counting", said.put, interval_s=0.01):
        lines = [said.get(timeout=30) for _ in range(3)]
    assert all(line.startswith("Still counting (") for line in lines)
    with announced("counting", said.put):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "announcer" and not thread.daemon]


def test_who_logs_no_news_pays_for_none(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.enumerate()
    with caplog.at_level(logging.WARNING), announced("counting"):
        assert set(threading.enumerate()) <= set(before)


def test_progress_in_a_file_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(3, "item") as bar:
        for _ in range(3):
            bar.update()
    text = capsys.readouterr().err
    assert "\r" not in text
    assert text.splitlines()[-1].startswith("3 of 3 items in ")
    with progress_bar(3, "item", shown=False) as bar:
        bar.update()
    assert capsys.readouterr().err == ""
