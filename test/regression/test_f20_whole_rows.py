"""F20: an indexer's keys go wherever the latents of their tokens go, to the host and to storage and back, and so do the
means by which blocks are selected. Without them prompts of more tokens than are selected go wrong, shorter ones do
not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from model_parity import save_checkpoint
from sala_reference import save_sala
from scheduler_driver import Driver, answers, request

from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import CachedTokensDetails
from fenceline.memory_order import open_device
from fenceline.model_executor.model_runner import ModelRunner

SHORT, LONG = [[(7 * i + 3) % 101 for i in range(num)] for num in (13, 60)]  # an indexer selects 16 tokens


@pytest.fixture(scope="module", params=["deepseek-v3.2", "glm-5-shared"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_checkpoint(request.param, directory)
    return directory


@contextmanager
def serving(model: Path, storage: Path, severed: str = "") -> Iterator[Driver]:
    """An engine of three tiers, which takes prefixes of any length from them."""
    args = ServerArgs(
        model_path=str(model), device="cpu", random_seed=1, page_size=4, max_total_tokens=256, chunked_prefill_size=32,
        max_running_requests=2, enable_hierarchical_cache=True, hicache_ratio=4.0, hicache_write_policy="write_through",
        hicache_storage_backend="file", hicache_storage_dir=str(storage),
        hicache_storage_prefetch_policy="wait_complete",
    )  # fmt: skip
    config = resolve(args)
    assert config.hicache is not None and config.hicache.storage is not None
    storage_tier = replace(config.hicache.storage, prefetch_threshold=4)
    config = replace(config, hicache=replace(config.hicache, load_back_threshold=4, storage=storage_tier))
    device = open_device("cpu", frozenset({severed} if severed else ()))
    driver = Driver(config, ModelRunner(config, device, show_progress=False))
    yield driver
    driver.scheduler.close()


def settle(driver: Driver) -> None:
    """Until everything is on the host and in storage."""
    while driver.scheduler.memory.num_outstanding:
        driver.step()


def serve(driver: Driver, prompt: list[int], label: str) -> tuple[list[int], CachedTokensDetails | None]:
    """The answer, and from where the prompt came."""
    (ids,) = answers(driver, [request(label, prompt, temperature=0.0, max_new_tokens=12, ignore_eos=True)])
    settle(driver)
    last = driver.answers[label].last
    assert last is not None
    return ids, last.cached_tokens_details


def to_the_host(driver: Driver) -> None:
    """Everything leaves the device, whose pages hold something else meanwhile."""
    tree = driver.scheduler.memory.tree
    tree.evict(tree.num_evictable_pages)
    settle(driver)
    for number in range(3):
        serve(driver, [(11 * i + number) % 101 for i in range(60)], f"other {number}")
    tree.evict(tree.num_evictable_pages)
    settle(driver)


def after_tiers(model: Path, storage: Path, prompt: list[int], severed: str = "") -> list[list[int]]:
    """The answers to ``prompt`` when it is computed, when it comes from the host, into pages that have held something
    else, and when it comes from storage."""
    found = []
    with serving(model, storage) as driver:
        found.append(serve(driver, prompt, "computed")[0])
    for tier in ("storage", "host"):
        with serving(model, storage, severed) as driver:
            if tier == "host":
                serve(driver, prompt, "first")
                to_the_host(driver)
            ids, details = serve(driver, prompt, tier)
            assert details is not None and getattr(details, tier) == (len(prompt) - 1) // 4 * 4
            found.append(ids)
    return found


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_answers_are_the_same_from_every_tier(model: Path, prompt: list[int], tmp_path: Path) -> None:
    computed, stored, hosted = after_tiers(model, tmp_path, prompt)
    assert computed == stored == hosted


def test_without_the_indexers_rows_long_prompts_go_wrong(model: Path, tmp_path: Path) -> None:
    computed, stored, hosted = after_tiers(model, tmp_path, LONG, "whole_rows")
    assert computed != stored and computed != hosted


@pytest.mark.parametrize("severed", ["", "whole_rows"])
def test_blocks_are_selected_by_what_comes_from_every_tier(severed: str, tmp_path: Path) -> None:
    """The means of MiniCPM-SALA's keys are such rows too. A state is at 128 of the prompt's tokens."""
    (model := tmp_path / "model").mkdir()
    save_sala(model)
    prompt = [(7 * i + 3) % 101 for i in range(140)]
    with serving(model, tmp_path / "storage") as driver:
        computed, _ = serve(driver, prompt, "computed")
    for tier in ("storage", "host"):
        with serving(model, tmp_path / "storage", severed) as driver:
            if tier == "host":
                serve(driver, prompt, "first")
                to_the_host(driver)
            loaded, details = serve(driver, prompt, "loaded")
        assert details is not None and getattr(details, tier) == 128
        assert (loaded == computed) == (not severed), tier
