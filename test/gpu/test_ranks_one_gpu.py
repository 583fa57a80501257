"""Ranks on one GPU, a process each (FENCELINE_RANKS_SHARE_GPU), which open each other's memory as on several: sums in
graphs, ranks that are lost, and a server of two ranks. Slow, because the processes take turns on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import Ended
from rank_server import answers_of_one_rank, check_server

from fenceline.distributed import SHARED_GPU_VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


@pytest.mark.parametrize("case", ["graphs", "gives_up"])
def test_it_works_and_leaves_no_memory_open(case: str, tmp_path: Path) -> None:
    """How much of the GPU is free tells nothing, since other programs may use it."""
    ended = Ended(case, 2, tmp_path, limit_s=60, shared=True)
    assert ended.well, (ended.statuses, ended.text)
    assert ended.found[0] == ended.found[1]
    assert ended.found[0] is not None and ended.found[0]["open"] == 0


def test_a_server_of_two_ranks_answers_as_one_with_graphs() -> None:
    check_server("demo", answers_of_one_rank("demo"), "--tp-size", "2", env={SHARED_GPU_VARIABLE: "1"})
