"""The processes of ranks that tests on GPUs start: how they end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import rank_processes
from rank_processes import Ended

RANK = """
import pathlib, sys, time
case, rank, size, folder = sys.argv[1:]
if case == "fails" and rank == "1":
    sys.exit("this rank fails")
if case == "fails" or case == "hangs":
    time.sleep(600)
pathlib.Path(folder, f"{rank}.json").write_text("{}")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    monkeypatch.setattr(rank_processes, "CASES", program)
    return tmp_path


def test_ranks_that_end_by_themselves_bring_their_results(folder: Path) -> None:
    ended = Ended("works", 2, folder)
    assert ended.well and ended.statuses == [0, 0] and ended.found == [{}, {}]


def test_ranks_that_wait_for_one_that_has_failed_are_ended_soon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "OTHERS_S", 0.2)
    begin = time.monotonic()
    ended = Ended("fails", 2, folder, limit_s=300)
    assert time.monotonic() - begin < 150
    assert not ended.well and ended.statuses == [None, 1]
    assert "this rank fails" in ended.text


def test_ranks_that_do_not_end_are_ended_at_the_limit(folder: Path) -> None:
    ended = Ended("hangs", 2, folder, limit_s=0.5)
    assert ended.statuses == [None, None] and ended.found == [None, None]
