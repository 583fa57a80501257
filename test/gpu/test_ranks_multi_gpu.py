"""Ranks on several GPUs of one host, one process each: sums in every way, eager and in graphs; servers of ranks,
replicas and nodes; and what F10, F11 and F19 are about. With the guard taken out each fails."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path

import pytest
import torch
from live_server import LiveServer, unused_port
from rank_processes import Ended
from rank_server import FLAGS, answers_of_one_rank, check_answers, check_server

SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(240)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["sums", "ways", "mixed", "mixed_pdl", "graphs", "buckets", "two_streams", "gives_up"])
def test_it_works(case: str, size: int, tmp_path: Path) -> None:
    """``sums``: sizes around every boundary; ``buckets``: F11, in a model; ``mixed``: all kinds and sizes in turn in
    one graph, while the last 32 bits of the generation begin at 0 again, ``mixed_pdl`` also with programmatic dependent
    launches; ``graphs``: F10, and NCCL in a capture; ``two_streams``: F19."""
    ended = Ended(case, size, tmp_path)
    assert ended.well, (ended.statuses, ended.text)
    assert all(found == ended.found[0] for found in ended.found)


@pytest.fixture(scope="module")
def demo_answers() -> list[object]:
    return answers_of_one_rank("demo")


SERVERS = (
    "--tp-size 2",
    "--tp-size 4",
    "--tp-size 2 --speculative-algorithm EAGLE3",
    "--tp-size 4 --speculative-algorithm STANDALONE --speculative-draft-model-path demo",
    "--tp-size 2 --speculative-algorithm NEXTN",
    "--dp-size 2",
    "--dp-size 2 --tp-size 2",
)


@pytest.mark.parametrize("flags", SERVERS)
def test_servers_answer_as_one_rank_with_both_kinds_of_graphs(flags: str, demo_answers: list[object]) -> None:
    words = flags.split()
    needed = math.prod(int(words[words.index(name) + 1]) for name in ("--tp-size", "--dp-size") if name in words)
    if needed > torch.cuda.device_count():
        pytest.skip(f"needs {needed} GPUs")
    check_server("demo", demo_answers, *words)


@pytest.mark.parametrize("flags", ["", "--ep-size 2"])
def test_a_server_of_two_ranks_with_experts_answers_as_one(flags: str) -> None:
    check_server("demo-moe", answers_of_one_rank("demo-moe"), "--tp-size", "2", *flags.split())


def test_two_nodes_with_a_gpu_each_answer_as_one_rank_does(demo_answers: list[object]) -> None:
    common = ("--model-path", "demo", *FLAGS, "--tp-size", "2", "--nnodes", "2")
    meeting = ("--dist-init-addr", f"127.0.0.1:{unused_port()}")
    with (
        LiveServer.real(*common, *meeting, "--node-rank", "0", env={"CUDA_VISIBLE_DEVICES": "0"}) as first,
        LiveServer.real(*common, *meeting, "--node-rank", "1", env={"CUDA_VISIBLE_DEVICES": "1"}) as second,
    ):
        check_answers(first.wait_ready(), demo_answers)
        first.signal(signal.SIGTERM)
        assert (first.wait_exit(), second.wait_exit()) == (0, 0)


def test_f19_two_streams_give_wrong_sums_or_none(tmp_path: Path) -> None:
    ended = Ended("unordered_streams", 2, tmp_path, limit_s=40)
    assert not ended.well or any(found["wrong"] for found in ended.found), ended.text


def test_ranks_that_wait_for_a_lost_one_can_be_ended(tmp_path: Path) -> None:
    free_before = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    ended = Ended("lost", 2, tmp_path, limit_s=30)
    assert ended.statuses[1] == 7 and ended.statuses[0] != 0
    assert (tmp_path / "waits0").exists(), ended.text
    deadline = time.monotonic() + 20
    while any(torch.cuda.mem_get_info(i)[0] < free - (64 << 20) for i, free in enumerate(free_before)):
        assert time.monotonic() < deadline, "memory of ranks that have ended is still in use"
        time.sleep(0.2)
