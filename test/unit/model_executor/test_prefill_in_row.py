"""Who decodes waits for a bounded number of prompt tokens between two of its steps, whoever sends which prompts."""

from __future__ import annotations

import dataclasses
from itertools import groupby

import pytest
from scheduler_driver import Driver, assert_right, make_driver, request

import fenceline
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.ipc.io_struct import AbortReq
from fenceline.model_executor.step import ForwardResult, StepBatch
from fenceline.scheduler.req import Req
from fenceline.scheduler.schedule_policy import StepSharing, max_prefills_in_row

CHUNK = 32


def watched_driver(most: int = 1, **flags: object) -> tuple[Driver, list[tuple[bool, int]]]:
    """A driver in which ``most`` full prefill steps may follow one another, and its steps: whether somebody waits to
    decode, and the prompts' tokens, 0 for a decode step."""
    driver = make_driver(
        **{"num_pages": 800, "num_rows": 64, "context_length": 1024, "chunked_prefill_size": CHUNK} | flags
    )  # type: ignore[arg-type]
    scheduler, launch = driver.scheduler, driver.worker.launch
    scheduler.planner.max_in_row = most * scheduler.planner.prefill.step_tokens
    steps: list[tuple[bool, int]] = []

    def recording(batch: StepBatch) -> ForwardResult:
        steps.append((len(scheduler.running) > 0, batch.num_prompt_tokens))
        return launch(batch)

    driver.worker.launch = recording  # type: ignore[method-assign]
    return driver, steps


def waits(steps: list[tuple[bool, int]]) -> list[list[int]]:
    """The prompts' tokens of the steps between two decode steps, where somebody waited for them."""
    runs = [(is_wait, list(run)) for is_wait, run in groupby(steps, lambda step: step[0] and step[1] > 0)]
    return [[tokens for _, tokens in run] for is_wait, run in runs if is_wait]


def decoding(driver: Driver) -> None:
    """A request that decodes from here to the end."""
    driver.send(request("neighbour", [5, 6, 7], max_new_tokens=400, ignore_eos=True))
    for _ in range(4):
        driver.step()


@pytest.mark.parametrize(("most", "lens"), [(1, [20] * 50), (1, [900]), (4, [3] * 60), (4, [100, 2] * 20)], ids=str)
def test_a_backlog_lets_others_decode(most: int, lens: list[int]) -> None:
    driver, steps = watched_driver(most)
    decoding(driver)
    steps.clear()
    reqs = [
        request(f"r{i}", [i % 60 + 1, i % 7 + 1] * (n // 2) + [9] * (n % 2), max_new_tokens=3)
        for i, n in enumerate(lens)
    ]
    driver.send(*reqs)
    driver.run()
    assert max(sum(run) for run in waits(steps)) <= most * CHUNK
    assert max(len(run) for run in waits(steps)) <= 4 * most
    if sum(lens) > 8 * CHUNK:
        assert max(sum(run) for run in waits(steps)) > (most - 1) * CHUNK, "they have their share, too"
    assert_right(driver, *reqs)


def test_short_steps_of_a_backlog_count_a_quarter_of_a_full_one() -> None:
    """Those that leave somebody waiting: they are a burst, which is not to be cut into pieces."""
    most = 4
    driver, steps = watched_driver(most)
    driver.scheduler.planner.prefill.sharing = StepSharing(0, 4)
    decoding(driver)
    steps.clear()
    reqs = [request(f"r{i}", [i % 60 + 1, i % 7 + 1], max_new_tokens=3) for i in range(60)]
    driver.send(*reqs)
    driver.run()
    assert [tokens for run in waits(steps) for tokens in run] == [4] * 30
    assert max(len(run) for run in waits(steps)) == 4 * (most - 1) + 1
    assert_right(driver, *reqs)


@pytest.mark.parametrize(("most", "leaves"), [(1, True), (4, False), (16, True)])
def test_clients_that_come_and_go_let_others_decode(most: int, leaves: bool) -> None:
    """A new prompt in each step, which is not waited for by who sent it."""
    driver, steps = watched_driver(most)
    decoding(driver)
    steps.clear()
    for number in range(60):
        driver.send(request(f"r{number}", [number + 1, 9], max_new_tokens=40 if leaves else 1))
        if leaves and number:
            driver.send(AbortReq(rid=f"r{number - 1}"))
        driver.step()
    assert max(len(run) for run in waits(steps)) == (1 if most == 1 else 4)
    assert len(waits(steps)) > 60 // 6, "newcomers have their turns, too"
    driver.run()


def test_where_nobody_decodes_prompts_go_one_after_the_other() -> None:
    driver, steps = watched_driver()
    reqs = [request(f"r{i}", [i + 1] * 24, max_new_tokens=1) for i in range(20)]
    driver.send(*reqs)
    driver.run()
    assert [tokens for _, tokens in steps] == [CHUNK] * 15
    assert_right(driver, *reqs)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("rank", "num_running", "num_pages"), [(-1, 1, 28), (-1, 2, 35), (0, 2, 35), (1, 1, 28)])
def test_a_prompt_left_half_way_gives_its_memory_back(
    monkeypatch: pytest.MonkeyPatch, rank: int, num_running: int, num_pages: int, overlap: bool
) -> None:
    """Nobody can decode without a page more, and no request that ends will give it. ``rank``: the half-way prompt's."""
    driver, _ = watched_driver(
        num_pages=num_pages,
        num_rows=6,
        context_length=256,
        chunked_prefill_size=4,
        schedule_conservativeness=0.01,
        disable_overlap_schedule=not overlap,
    )
    scheduler = driver.scheduler
    half_way: list[str] = []
    retract = scheduler.population.retract

    def recording(req: Req, cause: str) -> None:
        half_way.append(
            "half-way"
            if req is scheduler.population.chunked
            else "running while"
            if scheduler.population.chunked
            else "running"
        )
        retract(req, cause)

    monkeypatch.setattr(scheduler.population, "retract", recording)
    running = [request(f"r{i}", [i + 1] * 5, max_new_tokens=60, ignore_eos=True) for i in range(num_running)]
    driver.send(*running)
    for _ in range(12):
        driver.step()
    long = request("long", [40, 41] * 40, max_new_tokens=8, ignore_eos=True)
    driver.send(long)
    for _ in range(3):
        driver.step()
    assert scheduler.population.chunked is scheduler.reqs["long"]
    scheduler.reqs["long"].rank = rank
    driver.run()
    assert ("half-way" if rank >= 0 else "running while") in half_way
    assert_right(driver, long, *running)


@pytest.mark.parametrize(("device", "drafts", "most"), [("cpu", False, 1), ("cuda", False, 16), ("cuda", True, 1)])
def test_how_many_full_steps_follow_one_another(device: str, drafts: bool, most: int) -> None:
    assert max_prefills_in_row(device, drafts) == most


def test_a_default_server_on_a_cpu_lets_decode_after_each_step() -> None:
    config = resolve(ServerArgs(model_path=fenceline.demo_model_path(), device="cpu"))
    driver = make_driver(chunked_prefill_size=config.chunked_prefill_size)
    assert dataclasses.replace(driver.config, chunked_prefill_size=128) == driver.config
    assert driver.scheduler.planner.max_in_row == 128
