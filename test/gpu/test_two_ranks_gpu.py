"""Two ranks, a process each, which open each other's memory: on one GPU (FENCELINE_RANKS_SHARE_GPU), where they take
turns and are slow, and on two GPUs. Models in pieces of graphs, F10 and F11, also with images, and states."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import Ended
from rank_server import answers_of_one_rank, check_server

from fenceline.distributed import SHARED_GPU_VARIABLE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


@pytest.fixture(params=[pytest.param(True, id="one_gpu"), pytest.param(False, marks=pytest.mark.multi_gpu, id="two")])
def shared(request: pytest.FixtureRequest) -> bool:
    """Whether both ranks are on one GPU."""
    asked: bool = request.param
    return asked


@pytest.mark.parametrize("case", ["graphs", "gives_up"])
def test_it_works_and_leaves_no_memory_open(case: str, tmp_path: Path) -> None:
    """How much of the GPU is free tells nothing, since other programs may use it."""
    ended = Ended(case, 2, tmp_path, limit_s=60, shared=True)
    assert ended.well, (ended.statuses, ended.text)
    assert ended.found[0] == ended.found[1]
    assert ended.found[0] is not None and ended.found[0]["open"] == 0


def test_a_server_of_two_ranks_answers_as_one_with_graphs() -> None:
    check_server("demo", answers_of_one_rank("demo"), "--tp-size", "2", env={SHARED_GPU_VARIABLE: "1"})


def test_a_model_that_reads_images_around_a_size_of_graphs(shared: bool, tmp_path: Path) -> None:
    """sglang#14193: 1,025 tokens, twice, and images that end at the edge of a captured size."""
    ended = Ended("pictures", 2, tmp_path, shared=shared)
    assert ended.well and all(found is not None and found["differ"] == [] for found in ended.found), ended.text


def test_ranks_divide_the_states_of_recurrent_layers(shared: bool, tmp_path: Path) -> None:
    ended = Ended("states", 2, tmp_path, shared=shared)
    assert ended.well, ended.text
    told = [found["tokens"] for found in ended.found if found is not None]
    assert told == told[:1] * 2
    assert all(found is not None and found["worst"] < 2e-2 for found in ended.found), ended.found


def test_f10_without_the_exchange_a_replay_writes_nowhere(shared: bool, tmp_path: Path) -> None:
    ended = Ended("unregistered", 2, tmp_path, limit_s=40, shared=shared)
    assert not ended.well and ended.found == [None, None], ended.statuses
    assert "illegal memory access" in ended.text or None in ended.statuses, ended.text


def test_f10_with_images_a_replay_needs_the_exchange(shared: bool, tmp_path: Path) -> None:
    ended = Ended("pictures_unregistered", 2, tmp_path, shared=shared)
    assert not ended.well or all(found is not None and found["differ"] for found in ended.found), ended.text


def test_f11_without_the_guard_what_is_too_large_is_cut(shared: bool, tmp_path: Path) -> None:
    ended = Ended("cut_to_fit", 2, tmp_path, shared=shared)
    differ = all(found is not None and found["difference"] for found in ended.found)
    assert differ or "illegal memory access" in ended.text or "AcceleratorError" in ended.text, ended.text


def test_f11_with_images_what_is_too_large_is_cut(shared: bool, tmp_path: Path) -> None:
    ended = Ended("pictures_cut_to_fit", 2, tmp_path, shared=shared)
    differ = all(found is not None and found["differ"] for found in ended.found)
    assert differ or "illegal memory access" in ended.text or "AcceleratorError" in ended.text, ended.text
