"""Several ranks over three tiers with a real model: each has its own pages, and answers are those of one rank."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from ranks import Ranks
from scheduler_driver import Driver, make_model_driver, request

from fenceline.ipc.io_struct import PortArgs
from fenceline.ipc.rank_board import RankBoard, create_rank_board
from fenceline.scheduler.ranks import TURN_DECODER, FollowingRank, LeadingRank, Turn

PAGE = 16
NUM_RANKS = 2


class _Over(Exception):
    """No turn follows."""


def prompts() -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(5, 200) for _ in range(400 + PAGE * i)] for i in range(3)]


def engine_flags(directory: Path, **flags: object) -> dict[str, object]:
    """A pool of 60 pages, a host tier four times as large, and storage."""
    return {
        "max_total_tokens": 60 * PAGE,
        "page_size": PAGE,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_storage_backend": "file",
        "hicache_storage_dir": str(directory),
        "hicache_storage_prefetch_policy": "wait_complete",
        **flags,
    }


def serve(
    folder: Path, directory: Path, meddle: Callable[[int, Driver], None] = lambda rank, driver: None, **flags: object
) -> list[tuple[list[int], int]]:
    """What a server of two ranks answers to each prompt, and how many tokens of it came from storage. It stores
    everything before it ends. ``meddle`` with a rank's driver before the first request."""
    folder.mkdir()
    ports = PortArgs(scheduler=f"ipc://{folder}/scheduler", detokenizer="", tokenizer="")
    create_rank_board(ports, NUM_RANKS)
    ranks = Ranks(NUM_RANKS)
    turns: queue.Queue[bytes | None] = queue.Queue()

    def receive() -> Turn:
        data = turns.get(timeout=60)
        if data is None:
            raise _Over
        return TURN_DECODER.decode(data)

    def lead(driver: Driver) -> list[tuple[list[int], int]]:
        link = LeadingRank(RankBoard(ports, 0, NUM_RANKS), driver.worker, driver.drain, [turns.put])
        driver.scheduler.ranks = link
        answers = []
        for index, prompt in enumerate(prompts()):
            driver.send(request(f"r{index}", prompt, max_new_tokens=6, temperature=0.0, ignore_eos=True))
            driver.run(max_steps=200_000)
            answer = driver.answers[f"r{index}"]
            assert answer.last is not None and answer.last.cached_tokens_details is not None
            answers.append((answer.output_ids, answer.last.cached_tokens_details.storage))
        while driver.scheduler.memory.num_outstanding:
            driver.step()
        return answers

    def follow(driver: Driver) -> None:
        link = FollowingRank(RankBoard(ports, 1, NUM_RANKS), driver.worker, receive)
        driver.scheduler.ranks = link
        try:
            while True:
                driver.flight = driver.scheduler.step(driver.flight)
        except _Over:
            return

    def run(rank: int) -> list[tuple[list[int], int]]:
        driver = make_model_driver(rank=(ranks.devices[rank], ranks.shards[rank]), **engine_flags(directory, **flags))
        meddle(rank, driver)
        try:
            answers = lead(driver) if rank == 0 else follow(driver)
        finally:
            if rank == 0:
                turns.put(None)
            driver.scheduler.close()
        driver.scheduler.memory.check_memory(every_page=True)
        return answers or []

    return ranks.run(run)[0]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one rank without tiers answers."""
    driver = make_model_driver(max_total_tokens=60 * PAGE, page_size=PAGE)
    reqs = [
        request(f"r{index}", prompt, max_new_tokens=6, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts())
    ]
    driver.send(*reqs)
    driver.run()
    return [driver.answers[req.rid].output_ids for req in reqs]


def whole(prompt: list[int]) -> int:
    """Tokens of ``prompt`` that storage may have."""
    return (len(prompt) - 1) // PAGE * PAGE


def stored_pages(directory: Path) -> dict[str, list[Path]]:
    """Files of pages by the folder of those who can read them, a rank."""
    return {
        folder.name: sorted(folder.rglob("*.page"))
        for folder in directory.iterdir()
        if folder.is_dir() and len(folder.name) == 32
    }


def test_each_rank_stores_its_own_part_and_finds_it_again(tmp_path: Path, expected: list[list[int]]) -> None:
    assert serve(tmp_path / "first", tmp_path / "pages") == [(tokens, 0) for tokens in expected]
    pages = stored_pages(tmp_path / "pages")
    assert len(pages) == NUM_RANKS and len({len(files) for files in pages.values()}) == 1
    again = serve(tmp_path / "again", tmp_path / "pages")
    assert again == [(tokens, whole(prompt)) for tokens, prompt in zip(expected, prompts(), strict=True)]


def _fails(which: str, rank: int, driver: Driver) -> None:
    """The storage of rank 1 fails."""
    assert driver.worker.storage is not None
    backend = driver.worker.storage.controller._backend
    if rank == 0:
        return
    if which == "raises":
        backend.get = _raise  # type: ignore[method-assign]
    elif which == "finds nothing":
        backend.exists = lambda keys: [False] * len(keys)  # type: ignore[method-assign]
    else:  # it reads four pages in five
        get = backend.get
        backend.get = lambda keys, pages: [  # type: ignore[method-assign]
            there and number % 5 < 4 for number, there in enumerate(get(keys, pages))
        ]


def _raise(*args: object) -> list[bool]:
    raise OSError("the disk of rank 1 is gone")


@pytest.mark.parametrize("which", ["raises", "finds nothing", "reads some"])
@pytest.mark.parametrize("policy", ["wait_complete", "best_effort"])
def test_a_failure_of_one_rank_s_storage_is_a_miss_on_all(
    which: str, policy: str, tmp_path: Path, expected: list[list[int]]
) -> None:
    serve(tmp_path / "first", tmp_path / "pages")
    flags = {"hicache_storage_prefetch_policy": policy}
    again = serve(tmp_path / "again", tmp_path / "pages", partial(_fails, which), **flags)
    assert [tokens for tokens, _ in again] == expected
    most = 4 * PAGE if which == "reads some" else 0
    assert all(num_stored <= most for _, num_stored in again)
    if policy == "wait_complete":
        assert all(num_stored == most for _, num_stored in again)


def test_pages_of_another_number_of_ranks_are_not_found(tmp_path: Path, expected: list[list[int]]) -> None:
    serve(tmp_path / "first", tmp_path / "pages")
    alone = make_model_driver(**engine_flags(tmp_path / "pages"))
    for index, prompt in enumerate(prompts()):
        alone.send(request(f"r{index}", prompt, max_new_tokens=6, temperature=0.0, ignore_eos=True))
        alone.run(max_steps=200_000)
        answer = alone.answers[f"r{index}"]
        assert answer.output_ids == expected[index]
        assert answer.last is not None and answer.last.cached_tokens_details is not None
        assert answer.last.cached_tokens_details.storage == 0
    alone.scheduler.close()
