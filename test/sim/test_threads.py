"""Host threads take turns by the seed, and are ordered by start, join and messages alone."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from fenceline_sim import DeadlockError, RaceError, VgpuError, VirtualGpu, use
from fenceline_sim.threads import Channel

SEEDS = range(8)


def store_pages(seed: int, wait_for_the_copy: bool, policy: str = "random") -> list[list[float]]:
    """F15: a worker reads pinned pages that the device writes; the scheduler tells it when to."""
    gpu = VirtualGpu(seed=seed, policy=policy)
    device = use(gpu)
    pages = gpu.pinned.buffer(3 * 16).view(torch.float32).view(3, 4)
    kv = torch.zeros(3, 4, device=device)
    store = gpu.stream("store")
    todo: Channel[tuple[int, object] | None] = gpu.channel()
    stored: list[list[float]] = []

    def worker() -> None:
        while (item := todo.get()) is not None:
            page, copied = item
            if wait_for_the_copy:
                gpu.synchronize(copied)
            gpu.host_access(pages[page], False, "write of a page to storage")
            stored.append(pages[page].tolist())

    thread = gpu.spawn("storage", worker)
    for page in range(3):
        kv[page].fill_(page + 1)
        gpu.wait(store, gpu.record(gpu.default_stream))
        with gpu.on(store):
            pages[page].copy_(kv[page], non_blocking=True)
        todo.put((page, gpu.record(store)))
    todo.put(None)
    thread.join()
    gpu.synchronize_all()
    return stored


@pytest.mark.parametrize("policy", ["laziest", "random", "pct"])
def test_a_worker_that_waits_for_the_copy_is_silent(policy: str) -> None:
    for seed in SEEDS:
        assert store_pages(seed, True, policy) == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


@pytest.mark.parametrize("policy", ["laziest", "random", "pct"])
def test_a_worker_that_does_not_wait_is_reported(policy: str) -> None:
    for seed in SEEDS:
        with pytest.raises(RaceError, match=r"copy to host writes it on store(.|\n)*reads it on host:storage"):
            store_pages(seed, False, policy)


def test_threads_touching_one_page_without_a_message_race() -> None:
    def run(seed: int, told: bool) -> None:
        gpu = VirtualGpu(seed=seed)
        page = gpu.pinned.buffer(64)
        done: Channel[int] = gpu.channel()

        def write(what: str) -> None:
            gpu.host_access(page, True, what)
            done.put(1)

        threads = [gpu.spawn("one", lambda: write("write of one"))]
        if told:
            done.get()
        threads.append(gpu.spawn("two", lambda: write("write of two")))
        for thread in threads:
            thread.join()

    for seed in SEEDS:
        run(seed, told=True)
        with pytest.raises(RaceError, match="WAW"):
            run(seed, told=False)


def test_turns_depend_on_the_seed_and_nothing_else() -> None:
    def order(seed: int) -> list[str]:
        gpu = VirtualGpu(seed=seed)
        said: list[str] = []

        def talk(name: str) -> None:
            for _ in range(4):
                said.append(name)
                gpu.rotation.maybe_switch()

        threads = [gpu.spawn(name, lambda name=name: talk(name)) for name in "ab"]
        for thread in threads:
            thread.join()
        return said

    orders = [order(seed) for seed in range(12)]
    assert orders == [order(seed) for seed in range(12)]
    assert len({tuple(o) for o in orders}) > 3


def test_each_thread_has_its_own_current_stream() -> None:
    gpu = VirtualGpu()
    mine = gpu.stream("mine")
    seen = []
    with gpu.on(mine):
        gpu.spawn("other", lambda: seen.append(gpu.thread.current)).join()
        assert gpu.thread.current is mine
    assert seen == [gpu.default_stream]


def test_a_message_that_never_comes_is_a_deadlock() -> None:
    gpu = VirtualGpu()
    channel: Channel[int] = gpu.channel()
    with pytest.raises(DeadlockError, match="waits for a message"):
        channel.get()
    thread = gpu.spawn("waiting", lambda: print(channel.get()))
    with pytest.raises(DeadlockError):
        thread.join()


def test_an_error_in_a_thread_is_raised_by_join() -> None:
    gpu = VirtualGpu()

    def fail() -> None:
        raise KeyError("storage")

    with pytest.raises(KeyError, match="storage"):
        gpu.spawn("failing", fail).join()


def test_a_thread_that_the_gpu_did_not_start_is_refused() -> None:
    gpu = VirtualGpu()
    errors: list[Exception] = []

    def touch() -> None:
        try:
            gpu.record(gpu.default_stream)
        except VgpuError as error:
            errors.append(error)

    thread = threading.Thread(target=touch, name="stranger")
    thread.start()
    thread.join()
    assert "start it with spawn" in str(errors[0])


def test_threads_of_a_run_that_is_over_end() -> None:
    """One in the middle of its work, one that waits for a message, one that has not begun."""
    gpu = VirtualGpu(seed=1, policy="random")
    others = threading.enumerate()  # which may end meanwhile
    done: list[str] = []

    def works() -> None:
        while True:
            gpu.synchronize_all()

    def waits() -> None:
        try:
            gpu.channel().get()
        finally:
            done.append("waits")

    for name, run in (("works", works), ("waits", waits), ("late", works)):
        gpu.spawn(name, run)
    for _ in range(200):
        if not done:
            gpu.synchronize_all()
    gpu.rotation.abandon()
    ours = [thread for thread in threading.enumerate() if thread not in others]
    for thread in ours:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in ours) and done == ["waits"]
    gpu.synchronize_all()


def test_a_thread_runs_with_as_many_threads_as_its_starter() -> None:
    """Otherwise the bytes of a product depend on which thread lets the device go on. OpenMP is asked (of torch: another
    package may have mapped a second one), since torch, when asked, tells OpenMP its own number first."""
    of_torch = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not of_torch:
        pytest.skip("torch uses another OpenMP than GNU's")
    openmp = ctypes.CDLL(str(of_torch[0]))
    gpu = VirtualGpu(seed=1, policy="random")
    before, seen = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            gpu.spawn(f"of {number}", lambda: seen.append(openmp.omp_get_max_threads())).join()
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3]
