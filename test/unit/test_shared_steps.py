"""How many prompts a prefill step takes: as many as let first tokens come soonest, on the mean of all that wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, assert_right, make_driver, request

import fenceline
from fenceline.config.engine_config import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.model_executor.step import ExtendBatch, ForwardResult, ScheduleBatch
from fenceline.scheduler.schedule_policy import StepSharing, num_waiting_tokens


def sharing_driver(sharing: StepSharing, **flags: object) -> tuple[Driver, list[list[int]]]:
    """A driver whose prompts share steps like that, and its steps' prompts' tokens."""
    driver = make_driver(num_pages=400, page_size=4, num_rows=16, **flags)
    driver.scheduler.planner.sharing = sharing
    steps: list[list[int]] = []
    launch = driver.worker.launch

    def noted(batch: ScheduleBatch) -> ForwardResult:
        if isinstance(batch, ExtendBatch):
            steps.append([len(seq.token_ids) for seq in batch.seqs])
        return launch(batch)

    driver.worker.launch = noted  # type: ignore[method-assign]
    return driver, steps


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([10] * 8, [[10] * 4, [10] * 4]),
        ([32, 10, 60], [[32], [10, 54], [6]]),  # 64 tokens are a step's most: 6 of the last are left
        ([100, 20, 20], [[64], [36], [20, 20]]),
        ([5], [[5]]),
    ],
)
def test_a_step_takes_prompts_until_it_is_long_enough(lens: list[int], expected: list[list[int]]) -> None:
    driver, steps = sharing_driver(StepSharing(0, 32), chunked_prefill_size=64)
    reqs = [request(f"r{i}", [i + 1] * n, max_new_tokens=4, ignore_eos=True) for i, n in enumerate(lens)]
    driver.send(*reqs)
    driver.run()
    assert steps == expected
    assert_right(driver, *reqs)


def test_without_chunks_too() -> None:
    driver, steps = sharing_driver(StepSharing(0, 32), chunked_prefill_size=-1)
    reqs = [request(f"r{i}", [i + 1] * n, max_new_tokens=4) for i, n in enumerate([90, 16, 16, 16])]
    driver.send(*reqs)
    driver.run()
    assert steps == [[90], [16, 16], [16]]
    assert_right(driver, *reqs)


def test_a_burst_begins_with_long_steps_and_ends_with_short_ones() -> None:
    driver, steps = sharing_driver(StepSharing(10, 8))
    reqs = [request(f"r{i}", [i + 1] * 10, max_new_tokens=4, ignore_eos=True) for i in range(15)]
    driver.send(*reqs)
    driver.run()
    # 150 tokens wait: 38 in a step; 110: 33; 70: 26; 40: 20; 20: 14.
    assert [len(step) for step in steps] == [4, 4, 3, 2, 2]
    assert_right(driver, *reqs)


def mean_wait(num_prompts: int, prompt_len: int, cost: int, size: Callable[[int], int]) -> float:
    """Of a burst's prompts, in the time of a token, with steps of ``size`` tokens while so many tokens wait."""
    now = total = 0.0
    while num_prompts:
        prompts = min(max(1, -(-size(num_prompts * prompt_len) // prompt_len)), num_prompts)
        now += cost + prompts * prompt_len
        total += prompts * now
        num_prompts -= prompts
    return total


@settings(max_examples=30)
@given(num=st.integers(1, 300), length=st.sampled_from([64, 128, 256]), cost=st.integers(50, 400))
def test_no_fixed_length_of_steps_is_much_better(num: int, length: int, cost: int) -> None:
    sharing = StepSharing(cost, 1)
    best = min(mean_wait(num, length, cost, lambda _, s=s: s) for s in range(length, 16384, length))
    ours = mean_wait(num, length, cost, sharing.tokens)
    assert ours <= 1.03 * best


def test_a_cached_prefix_is_no_work_that_waits() -> None:
    """The prompts of the burst above, each behind the same 80 tokens: the same steps."""
    driver, steps = sharing_driver(StepSharing(10, 8))
    prefix = [99] * 80
    driver.send(request("first", [*prefix, 1], max_new_tokens=1))
    driver.run()
    steps.clear()
    reqs = [request(f"r{i}", [*prefix, *[i + 1] * 10], max_new_tokens=4, ignore_eos=True) for i in range(15)]
    driver.send(*reqs)
    driver.run()
    assert [len(step) for step in steps] == [4, 4, 3, 2, 2]
    assert all(sum(step) == 10 * len(step) for step in steps), "the prefix was cached"
    assert_right(driver, *reqs)


@pytest.mark.parametrize("num", [0, 1, 256, 257, 1000])
def test_a_long_queue_is_taken_to_be_like_its_beginning(num: int) -> None:
    waiting = [SimpleNamespace(num_tokens=100) for _ in range(num)]
    assert num_waiting_tokens(waiting, num) == 100 * num  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "cost"),
    [
        (1024, 3072, 28, 16, 8, 128, 1952),  # Qwen3-0.6B
        (4096, 12288, 36, 32, 8, 128, 357),  # Qwen3-8B
        (8192, 28672, 80, 64, 8, 128, 260),  # Llama-3.3-70B
    ],
)
def test_what_a_step_costs_of_real_models(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, cost: int
) -> None:
    model = resolve(ServerArgs(model_path=fenceline.demo_model_path(), device="cpu")).model
    model = dataclasses.replace(
        model,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
    assert StepSharing.of(model).cost_tokens == cost
