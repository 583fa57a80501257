"""How many prompts a prefill step takes: no more than keep the GPU busy, so that first tokens do not wait for a later
prompt's; small models' steps are as large as ever."""

from __future__ import annotations

import dataclasses

import pytest
from scheduler_driver import Driver, make_driver, request
from test_scheduler import assert_right

import fenceline
from fenceline.config.resolve import resolve
from fenceline.config.server_args import ServerArgs
from fenceline.managers.prefill import PrefillPlanner
from fenceline.managers.schedule_policy import shared_step_tokens
from fenceline.model_executor.forward_result import ForwardResult
from fenceline.model_executor.schedule_batch import ExtendBatch, ScheduleBatch


def sharing_driver(shared_tokens: int, **flags: object) -> tuple[Driver, list[list[int]]]:
    """A driver whose steps take further prompts up to ``shared_tokens``, and its steps' prompts' tokens."""
    driver = make_driver(num_pages=400, page_size=4, num_rows=16, **flags)
    config, memory = driver.config, driver.scheduler.memory
    driver.scheduler.planner = PrefillPlanner(
        memory, config.chunked_prefill_size, config.max_prefill_tokens, shared_tokens
    )
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
    driver, steps = sharing_driver(32, chunked_prefill_size=64)
    reqs = [request(f"r{i}", [i + 1] * n, max_new_tokens=4, ignore_eos=True) for i, n in enumerate(lens)]
    driver.send(*reqs)
    driver.run()
    assert steps == expected
    assert_right(driver, reqs)


def test_without_chunks_too() -> None:
    driver, steps = sharing_driver(32, chunked_prefill_size=-1)
    reqs = [request(f"r{i}", [i + 1] * n, max_new_tokens=4) for i, n in enumerate([90, 16, 16, 16])]
    driver.send(*reqs)
    driver.run()
    assert steps == [[90], [16, 16], [16]]
    assert_right(driver, reqs)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "tokens"),
    [
        (1024, 3072, 28, 16, 8, 128, 32768),  # Qwen3-0.6B
        (4096, 12288, 36, 32, 8, 128, 2048),  # Qwen3-8B
        (8192, 28672, 80, 64, 8, 128, 512),  # Llama-3.3-70B
    ],
)
def test_large_models_have_short_steps(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, tokens: int
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
    assert shared_step_tokens(model) == tokens
