"""Several ranks over three tiers with a real model: each has its own pages, and answers are those of one rank."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from draft_checkpoints import save_appended_mtp
from model_parity import save_checkpoint
from ranks import Ranks
from scheduler_driver import Driver, make_model_driver, request

from fenceline.ipc.io_struct import CachedTokensDetails, PortArgs
from fenceline.ipc.rank_board import RankBoard, create_rank_board
from fenceline.mem_cache.storage.page_file import HEADER_NBYTES
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.scheduler.ranks import TURN_DECODER, FollowingRank, LeadingRank, Turn

PAGE = 16
NUM_RANKS = 2

Answered = tuple[list[int], CachedTokensDetails]  # the tokens, and from where the prompt's came
_NOTHING = CachedTokensDetails(device=0, host=0, storage=0)


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


def ask(driver: Driver, texts: list[list[int]]) -> list[Answered]:
    """What a server answers to each of ``texts``, one after the other."""
    answers = []
    for prompt in texts:
        rid = f"r{len(driver.answers)}"
        driver.send(request(rid, prompt, max_new_tokens=6, temperature=0.0, ignore_eos=True))
        driver.run(max_steps=200_000)
        answer = driver.answers[rid]
        assert answer.last is not None
        answers.append((answer.output_ids, answer.last.cached_tokens_details or _NOTHING))
    while driver.scheduler.memory.num_outstanding:
        driver.step()
    return answers


def serve(
    folder: Path,
    directory: Path,
    meddle: Callable[[int, Driver], None] = lambda rank, driver: None,
    texts: list[list[int]] | None = None,
    num_ranks: int = NUM_RANKS,
    **flags: object,
) -> list[Answered]:
    """What a server of several ranks answers to each of ``texts``, or to ``prompts()``. It stores everything before it
    ends. ``meddle`` with a rank's driver before the first request."""
    folder.mkdir()
    ports = PortArgs(scheduler=f"ipc://{folder}/scheduler", detokenizer="", tokenizer="")
    create_rank_board(ports, num_ranks)
    ranks = Ranks(num_ranks)
    turns: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(num_ranks - 1)]

    def lead(driver: Driver) -> list[Answered]:
        put = [each.put for each in turns]
        driver.scheduler.ranks = LeadingRank(RankBoard(ports, 0, num_ranks), driver.worker, driver.drain, put)
        return ask(driver, texts or prompts())

    def follow(rank: int, driver: Driver) -> None:
        def receive() -> Turn:
            data = turns[rank - 1].get(timeout=60)
            if data is None:
                raise _Over
            return TURN_DECODER.decode(data)

        driver.scheduler.ranks = FollowingRank(RankBoard(ports, rank, num_ranks), driver.worker, receive)
        try:
            while True:
                driver.flight = driver.scheduler.step(driver.flight)
        except _Over:
            return

    def run(rank: int) -> list[Answered]:
        driver = make_model_driver(rank=(ranks.devices[rank], ranks.shards[rank]), **engine_flags(directory, **flags))
        meddle(rank, driver)
        try:
            answers = lead(driver) if rank == 0 else follow(rank, driver)
        finally:
            for each in turns if rank == 0 else ():
                each.put(None)
            driver.scheduler.close()
        driver.scheduler.memory.check_memory(every_page=True)
        return answers or []

    return ranks.run(run)[0]


def from_storage(answers: list[Answered]) -> list[tuple[list[int], int]]:
    """The answers, and how many tokens of each prompt came from storage."""
    return [(tokens, details.storage) for tokens, details in answers]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one rank without tiers answers."""
    driver = make_model_driver(max_total_tokens=60 * PAGE, page_size=PAGE)
    return [tokens for tokens, _ in ask(driver, prompts())]


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
    first = serve(tmp_path / "first", tmp_path / "pages")
    assert from_storage(first) == [(tokens, 0) for tokens in expected]
    pages = stored_pages(tmp_path / "pages")
    assert len(pages) == NUM_RANKS and len({len(files) for files in pages.values()}) == 1
    again = from_storage(serve(tmp_path / "again", tmp_path / "pages"))
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "policy"),
    [*((which, "wait_complete") for which in ("raises", "finds nothing", "reads some")), ("reads some", "best_effort")],
)
def test_a_failure_of_one_rank_s_storage_is_a_miss_on_all(
    which: str, policy: str, tmp_path: Path, expected: list[list[int]]
) -> None:
    serve(tmp_path / "first", tmp_path / "pages")
    flags = {"hicache_storage_prefetch_policy": policy}
    again = from_storage(serve(tmp_path / "again", tmp_path / "pages", partial(_fails, which), **flags))
    assert [tokens for tokens, _ in again] == expected
    most = 4 * PAGE if which == "reads some" else 0
    assert all(num_stored <= most for _, num_stored in again)
    if policy == "wait_complete":
        assert all(num_stored == most for _, num_stored in again)


def test_pages_of_another_number_of_ranks_are_not_found(tmp_path: Path, expected: list[list[int]]) -> None:
    serve(tmp_path / "first", tmp_path / "pages")
    alone = make_model_driver(**engine_flags(tmp_path / "pages"))
    assert from_storage(ask(alone, prompts())) == [(tokens, 0) for tokens in expected]
    alone.scheduler.close()


@pytest.mark.parametrize(
    ("name", "num_ranks", "mem_layout"), [("deepseek-v2-lite", 4, "layer_first"), ("glm-5-shared", 2, "page_first")]
)
def test_a_row_that_all_ranks_have_is_kept_once(name: str, num_ranks: int, mem_layout: str, tmp_path: Path) -> None:
    """Latents, and an indexer's keys, the target's and its draft's, from the host and from storage: each rank keeps a
    share there, and has the whole rows after a load."""
    sizes = {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 512}
    drafts: dict[str, object] = {}
    if name == "glm-5-shared":
        save_appended_mtp(name, tmp_path / "model", {**sizes, "num_key_value_heads": 4})
        drafts["speculative_algorithm"] = "NEXTN"
    else:
        save_checkpoint(name, tmp_path / "model", sizes)
    texts = [[3 + token % 90 for token in prompt] for prompt in prompts()]
    flags: dict[str, object] = {
        "model_path": str(tmp_path / "model"),
        "chunked_prefill_size": 64,
        "hicache_mem_layout": mem_layout,
        "hicache_write_policy": "write_through",
        "memory_check": "order",
        **drafts,
    }
    alone = make_model_driver(model_path=str(tmp_path / "model"), page_size=PAGE)
    expected = [tokens for tokens, _ in ask(alone, texts)]
    drivers: dict[int, Driver] = {}
    first = serve(tmp_path / "first", tmp_path / "pages", drivers.__setitem__, [*texts, *texts], num_ranks, **flags)
    assert [tokens for tokens, _ in first] == expected * 2
    assert all(details.host == whole(text) for (_, details), text in zip(first[3:], texts, strict=True))

    def check_ranks(drivers: dict[int, Driver]) -> None:
        """Every page in the tree has the same rows on all ranks."""
        nodes = [node for node in drivers[0].scheduler.memory.tree._nodes() if node.on_device]
        pages = np.concatenate([node.pages for node in nodes])
        pools = [driver.worker.kv_pool for _, driver in sorted(drivers.items())]  # type: ignore[attr-defined]
        assert len(pages) > 20
        for (name, one), *others in zip(*(pool.tensors() for pool in pools), strict=True):
            of_first = one.view(-1, PAGE, *one.shape[1:])[pages]
            for _, other in others:
                assert torch.equal(other.view(-1, PAGE, *one.shape[1:])[pages], of_first), name

    check_ranks(drivers)
    worker = drivers[0].worker
    assert isinstance(worker, ModelRunner) and worker.hicache is not None
    page_nbytes, host = worker.kv_pool.layout.page_nbytes, worker.hicache.host_pool
    assert num_ranks * host.page_nbytes == page_nbytes and host.nbytes == host.num_pages * host.page_nbytes
    files = [file for files in stored_pages(tmp_path / "pages").values() for file in files]
    num_pages = sum(len(text) + 5 for text in texts) // PAGE
    assert len(files) <= num_ranks * num_pages
    assert {num_ranks * (file.stat().st_size - HEADER_NBYTES) for file in files} == {page_nbytes}
    drivers.clear()
    again = serve(tmp_path / "again", tmp_path / "pages", drivers.__setitem__, texts, num_ranks, **flags)
    assert from_storage(again) == [(tokens, whole(text)) for tokens, text in zip(expected, texts, strict=True)]
    check_ranks(drivers)
