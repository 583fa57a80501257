"""Ranks on several GPUs of one host, one process each: sums in every way, eager and in graphs; a server of two ranks;
and what F10, F11 and F19 are about. With the guard taken out each fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from rank_processes import Ended
from rank_server import check_two_ranks_answer_as_one

SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(240)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["sums", "ways", "mixed", "mixed_pdl", "graphs", "two_streams", "gives_up"])
def test_it_works(case: str, size: int, tmp_path: Path) -> None:
    """``sums``: F11, sizes around every boundary; ``mixed``: all kinds and sizes in turn in one graph, while the last
    32 bits of the generation begin at 0 again, ``mixed_pdl`` also with programmatic dependent launches; ``graphs``:
    F10, and NCCL in a capture; ``two_streams``: F19."""
    ended = Ended(case, size, tmp_path)
    assert ended.well, (ended.statuses, ended.text)
    assert all(found == ended.found[0] for found in ended.found)


def test_a_server_of_two_ranks_answers_as_one_does_with_graphs_of_both_kinds() -> None:
    check_two_ranks_answer_as_one()


def test_f10_without_the_exchange_a_replay_writes_where_nobody_is(tmp_path: Path) -> None:
    ended = Ended("unregistered", 2, tmp_path, limit_s=40)
    assert not ended.well and ended.found == [None, None], ended.statuses
    assert "illegal memory access" in ended.text or None in ended.statuses, ended.text


def test_f19_two_streams_give_wrong_sums_or_none(tmp_path: Path) -> None:
    ended = Ended("unordered_streams", 2, tmp_path, limit_s=40)
    assert not ended.well or any(found["wrong"] for found in ended.found), ended.text


def test_ranks_that_wait_for_a_lost_one_can_be_ended_and_leave_no_memory(tmp_path: Path) -> None:
    free_before = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    ended = Ended("lost", 2, tmp_path, limit_s=30)
    assert ended.statuses[1] == 7 and ended.statuses[0] != 0
    assert (tmp_path / "waits0").exists(), ended.text
    deadline = time.monotonic() + 20
    while any(torch.cuda.mem_get_info(i)[0] < free - (64 << 20) for i, free in enumerate(free_before)):
        assert time.monotonic() < deadline, "memory of ranks that have ended is still in use"
        time.sleep(0.2)
