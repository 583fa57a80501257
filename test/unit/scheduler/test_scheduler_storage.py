"""The scheduler over three tiers with a real model: what storage brings back is right, what it loses costs a miss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from scheduler_driver import Driver, make_model_driver, request

from fenceline.ipc.io_struct import FlushCacheReq, HiCacheState
from fenceline.mem_cache.page_hash import PageKey
from fenceline.mem_cache.storage.backend import PageParts
from fenceline.mem_cache.storage.file_backend import FileBackend

PAGE = 16


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    """Engines made by a test; their workers end with it."""
    made: list[Driver] = []
    yield made
    for driver in made:
        driver.scheduler.close()


def engine(made: list[Driver], directory: Path | None, policy: str = "wait_complete", **flags: object) -> Driver:
    """A pool of 60 pages; with ``directory`` a host tier as large and storage below."""
    if directory is not None:
        flags |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 4.0,  # writes may hold a quarter of it
            "hicache_storage_backend": "file",
            "hicache_storage_dir": str(directory),
            "hicache_storage_prefetch_policy": policy,
        }
    driver = make_model_driver(max_total_tokens=60 * PAGE, page_size=PAGE, **flags)
    made.append(driver)
    return driver


def prompts() -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(5, 200) for _ in range(400 + 16 * i)] for i in range(3)]


def answer(driver: Driver, rid: str, prompt: Sequence[int], extra_key: str = "") -> list[int]:
    params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    driver.send(request(rid, list(prompt), extra_key=extra_key, **params))
    driver.run(max_steps=200_000)
    return driver.answers[rid].output_ids


def settle(driver: Driver) -> None:
    """Until every worker has done its jobs and every transfer is noticed."""
    while driver.scheduler.memory.num_outstanding:
        driver.step()
    driver.scheduler.memory.check_memory(every_page=True)


def state(driver: Driver) -> HiCacheState:
    found = driver.scheduler.control.state().hicache
    assert found is not None
    return found


@pytest.fixture
def expected(drivers: list[Driver]) -> list[list[int]]:
    """What an engine without tiers answers."""
    plain = engine(drivers, None)
    return [answer(plain, f"plain-{i}", prompt) for i, prompt in enumerate(prompts())]


def fill(driver: Driver) -> list[list[int]]:
    outputs = [answer(driver, f"fill-{i}", prompt) for i, prompt in enumerate(prompts())]
    settle(driver)
    return outputs


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_new_engine_finds_what_the_old_one_stored(
    tmp_path: Path, drivers: list[Driver], expected: list[list[int]], layout: str
) -> None:
    assert fill(engine(drivers, tmp_path)) == expected
    again = engine(drivers, tmp_path, hicache_mem_layout=layout)
    for index, prompt in enumerate(prompts()):
        assert answer(again, f"again-{index}", prompt) == expected[index]
        details = again.answers[f"again-{index}"].last.cached_tokens_details
        assert details is not None and details.storage == (len(prompt) - 1) // PAGE * PAGE
    settle(again)
    assert state(again).prefetches["complete"] == 3
    assert state(again).cached_tokens["storage"] == sum((len(p) - 1) // PAGE * PAGE for p in prompts())
    assert state(again).num_locked_nodes == 0


def test_storage_gives_a_prefix_to_its_own_namespace_alone(tmp_path: Path, drivers: list[Driver]) -> None:
    first = engine(drivers, tmp_path)
    prompt = prompts()[0]
    whole = (len(prompt) - 1) // PAGE * PAGE
    tokens = answer(first, "mine", prompt, "mine")
    settle(first)
    again = engine(drivers, tmp_path)
    for rid, key, stored in (("none", "", 0), ("other", "other", 0), ("mine", "mine", whole)):
        assert answer(again, rid, prompt, key) == tokens
        details = again.answers[rid].last.cached_tokens_details
        assert details is not None and (details.device, details.host, details.storage) == (0, 0, stored), rid
    settle(again)


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_nobody_waits_longer_than_the_policy_says(
    tmp_path: Path, drivers: list[Driver], expected: list[list[int]], policy: str
) -> None:
    fill(engine(drivers, tmp_path))
    again = engine(drivers, tmp_path, policy)
    assert [answer(again, f"a-{i}", prompt) for i, prompt in enumerate(prompts())] == expected
    settle(again)


class _Trouble:
    """What befalls a FileBackend."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind = kind
        self.num_calls = 0
        get, put = FileBackend.get, FileBackend.set
        trouble = self

        def bad_get(self: FileBackend, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
            trouble.num_calls += 1
            found = get(self, keys, pages)
            if kind == "lost":
                return [False] * len(found)
            if kind == "half":
                return [there and i % 3 != 2 for i, there in enumerate(found)]
            if kind == "raises":
                raise RuntimeError("the network is gone")
            return found

        def bad_set(self: FileBackend, keys: Sequence[PageKey], pages: Sequence[PageParts]) -> list[bool]:
            trouble.num_calls += 1
            return [False] * len(keys) if kind == "full" else put(self, keys, pages)

        monkeypatch.setattr(FileBackend, "get", bad_get)
        monkeypatch.setattr(FileBackend, "set", bad_set)


@pytest.mark.parametrize("kind", ["lost", "half", "raises", "full"])
def test_whatever_storage_does_the_answers_are_right(
    tmp_path: Path, drivers: list[Driver], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind != "full":
        fill(engine(drivers, tmp_path))
    trouble = _Trouble(kind, monkeypatch)
    again = engine(drivers, tmp_path)
    assert [answer(again, f"a-{i}", prompt) for i, prompt in enumerate(prompts())] == expected
    settle(again)
    assert trouble.num_calls > 0
    if kind == "full":
        assert state(again).storage_write.num_tokens == 0
    else:
        assert state(again).prefetches["short"] > 0


def test_torn_files_are_misses(tmp_path: Path, drivers: list[Driver], expected: list[list[int]]) -> None:
    fill(engine(drivers, tmp_path))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    assert files
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if number % 2:
            data[len(data) // 2] ^= 1
        path.write_bytes(data if number % 2 else data[: len(data) // 2])
    again = engine(drivers, tmp_path)
    assert [answer(again, f"a-{i}", prompt) for i, prompt in enumerate(prompts())] == expected
    assert state(again).cached_tokens["storage"] == 0
    assert sum(state(again).storage_errors.values()) > 0


def test_flush_with_storage_leaves_nothing(tmp_path: Path, drivers: list[Driver]) -> None:
    driver = engine(drivers, tmp_path)
    fill(driver)
    driver.send(FlushCacheReq(id="flush", storage=True))
    driver.step()
    assert driver.replies[-1].success
    again = engine(drivers, tmp_path)
    answer(again, "again", prompts()[0])
    assert again.answers["again"].last.cached_tokens == 0


def test_nothing_is_fetched_that_has_to_be_computed(
    tmp_path: Path, drivers: list[Driver], expected: list[list[int]]
) -> None:
    """A prompt whose logprobs are wanted is computed from there on, whoever has its pages."""
    fill(engine(drivers, tmp_path))
    again = engine(drivers, tmp_path)
    for rid, start, stored in (("all", 0, 0), ("rest", 330, 320)):
        logprobs = {"return_logprob": True, "logprob_start_len": start}
        params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True} | logprobs
        again.send(request(rid, prompts()[0], **params))
        again.run(max_steps=200_000)
        assert again.answers[rid].output_ids == expected[0]
        settle(again)
        assert state(again).storage_read.num_tokens == stored
        again.send(FlushCacheReq(id=rid))
        again.step()


def test_misses_are_counted(tmp_path: Path, drivers: list[Driver]) -> None:
    driver = engine(drivers, tmp_path)
    answer(driver, "new", prompts()[0])
    settle(driver)
    assert state(driver).num_storage_misses == (len(prompts()[0]) - 1) // PAGE
    assert 0 < state(driver).storage_write.num_transfers < state(driver).storage_write.num_tokens // PAGE
