"""The model runner with a host tier: tokens do not depend on where pages have been, and decode graphs never notice."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from model_tiers import PAGE, SHAPE, STORE, Tiers, hicache_runner, ids, prompt, through_the_host
from trace_runner import make_runner

from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.forward_batch import ForwardMode
from fenceline.mem_cache.transfer import Ticket
from fenceline.memory_order import OrderError, Points, open_device
from fenceline.model_executor.model_runner import ModelRunner


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_a_prefix_that_went_to_the_host_and_back_is_the_same(layout: str, io_backend: str) -> None:
    runner = hicache_runner(
        open_device("cpu"), hicache_mem_layout=layout, hicache_io_backend=io_backend, dtype="float32"
    )
    expected, got = through_the_host(Tiers(runner))
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    assert got.logprobs is not None and expected.logprobs is not None
    np.testing.assert_allclose(got.logprobs.chosen, expected.logprobs.chosen, rtol=1e-4, atol=1e-5)


def test_a_page_that_was_not_loaded_shows() -> None:
    """The test above can fail: the same without the bytes."""
    tiers = Tiers(hicache_runner(open_device("cpu")))
    tiers.hicache._copier.to_device = lambda *args: None  # type: ignore[method-assign]
    expected, got = through_the_host(tiers)
    assert got.logprobs is not None and expected.logprobs is not None
    assert not np.allclose(got.logprobs.chosen, expected.logprobs.chosen, rtol=1e-4, atol=1e-5)


def test_the_host_tier_is_as_large_as_asked() -> None:
    by_ratio = hicache_runner(open_device("cpu"))
    by_size = hicache_runner(open_device("cpu"), hicache_ratio=2.0, hicache_size=0.01)
    assert by_ratio.hicache is not None and by_size.hicache is not None
    assert by_ratio.hicache.host_pool.num_pages == SHAPE.num_pages // 2
    pool = by_size.hicache.host_pool
    assert pool.num_pages == 10**7 // pool.page_nbytes
    assert by_size.memory_bytes["host_kv_cache"] == pool.nbytes == pool.num_pages * pool.page_nbytes


def test_without_the_flag_there_is_none() -> None:
    runner = make_runner(open_device("cpu"), SHAPE, ())
    assert runner.hicache is None and "host_kv_cache" not in runner.memory_bytes


def test_a_host_tier_without_room_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="raise --hicache-size"):
        hicache_runner(open_device("cpu"), hicache_ratio=0.001)


# --- --memory-check order ----------------------------------------------------------------------------


def checked_runner(severed: str = "", **flags: object) -> ModelRunner:
    device = open_device("cpu", frozenset({severed} if severed else ()))
    return hicache_runner(device, memory_check="order", **flags)


def test_the_checker_is_silent() -> None:
    tiers = Tiers(checked_runner())
    for _ in range(2):
        expected, got = through_the_host(tiers)
        np.testing.assert_array_equal(got.tokens, expected.tokens)


@pytest.mark.parametrize(
    ("edge", "where"),
    [
        ("store_after_forward", "RAW on kv_pool pages 11-15"),
        ("load_after_forward", "kv_pool pages 21-23, 25"),
        ("load_after_store", "RAW on host_pool pages 2-6"),
        ("forward_after_load", "RAW on kv_pool.layer0 pages 21-23, 25, 28"),
    ],
)
def test_the_checker_names_the_edge_that_is_missing(edge: str, where: str) -> None:
    with pytest.raises(OrderError, match=where) as caught:
        through_the_host(Tiers(checked_runner(edge)))
    assert edge in caught.value.edges


def test_the_checker_sees_a_backup_of_loading_pages() -> None:
    tiers = Tiers(checked_runner("store_after_load"))
    tiers.load([1, 2], [0, 1], Points.none())
    with pytest.raises(OrderError, match="RAW on kv_pool page 2") as caught:
        tiers.store([2], [5])
    assert caught.value.edge == "store_after_load"


def test_the_checker_sees_a_step_on_pages_whose_backup_runs() -> None:
    tiers = Tiers(checked_runner("forward_after_store"))
    tiers.extend(1, prompt(1, 2 * PAGE), [1, 2, 3])
    tiers.store([1, 2], [0, 1])
    with pytest.raises(OrderError, match="WAR on kv_pool pages 1-2") as caught:
        tiers.extend(2, prompt(2, 2 * PAGE), [1, 2, 3])
    assert caught.value.edge == "forward_after_store"


def test_the_checker_sees_what_is_decoded_beside_a_prompt() -> None:
    """It reads the request's pages, whose backups may run, and writes that of its next token."""
    tiers = Tiers(checked_runner("forward_after_store"))
    tiers.extend(1, prompt(1, 2 * PAGE + 3), [1, 2, 3])
    tiers.store([1, 2], [0, 1])
    result = tiers.launch(2, prompt(2, PAGE), [5], decodes=tiers.decode_batch(1, 2 * PAGE + 4, 1))
    assert len(result.wait().tokens) == 2
    tiers.store([3], [2])
    with pytest.raises(OrderError, match="WAR on kv_pool page 3") as caught:
        tiers.launch(3, prompt(3, PAGE), [6], decodes=tiers.decode_batch(1, 2 * PAGE + 5, 2))
    assert caught.value.edge == "forward_after_store"


@pytest.mark.parametrize("mixed", [False, True])
def test_a_mixed_step_holds_the_sms_as_decode_does(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the attention of decode is persistent, a step with prompts keeps apart from backups if it is mixed."""
    monkeypatch.setattr(CpuAttentionBackend, "persistent", lambda self, mode: mode is ForwardMode.DECODE)
    tiers = Tiers(checked_runner("sm_exclusive", hicache_io_backend="kernel", enable_mixed_chunk=mixed))
    with pytest.raises(OrderError, match="exclusive on resource sm") if mixed else nullcontext():
        tiers.extend(1, prompt(1, PAGE), [1])
        tiers.store([1], [0])
        tiers.launch(2, prompt(2, PAGE), [3])


@pytest.mark.parametrize("first", ["backup", "step"])
def test_the_checker_sees_attention_beside_a_backup_on_sms(first: str) -> None:
    """Both ways: whichever of the two comes first."""
    hicache = checked_runner("sm_exclusive", hicache_io_backend="kernel").hicache
    assert hicache is not None

    def backup() -> None:
        hicache.store(Ticket(1, STORE), ids([1]), ids([0]), Points.none())

    both = [backup, hicache.before_persistent_forward]
    with pytest.raises(OrderError, match="exclusive on resource sm") as caught:
        for submit in both if first == "backup" else reversed(both):
            submit()
    assert caught.value.edge == "sm_exclusive"
