"""The warm-up before serving touches nothing but the sink, and leaves the answers what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scheduler_driver import answers, make_model_driver, request

from fenceline.ipc.io_struct import TokenizedGenerateReq
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepBatch
from fenceline.model_executor.warm_up import warm_up
from fenceline.sampling import logprobs

torch.set_num_threads(1)


def greetings() -> list[TokenizedGenerateReq]:
    return [request(f"r{i}", [5, 9 + i, 7], temperature=0.7 * i, seed=3, max_new_tokens=6) for i in range(3)]


@pytest.mark.parametrize("flags", [{"chunked_prefill_size": 1024}, {"chunked_prefill_size": 48, "num_rows": 3}])
def test_only_the_sink_is_touched(flags: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_model_driver(memory_check="order", max_total_tokens=4096, **flags)
    expected = answers(make_model_driver(max_total_tokens=4096, **flags), greetings())
    runner, config = driver.worker, driver.config
    assert isinstance(runner, ModelRunner)
    batches: list[StepBatch] = []

    def launch(batch: StepBatch):  # type: ignore[no-untyped-def]
        batches.append(batch)
        return runner.launch(batch)

    page_size = config.server_args.page_size
    for layer in range(config.model.num_layers):
        runner.kv_pool.row(layer, "k")[page_size:].fill_(7)
        runner.kv_pool.row(layer, "v")[page_size:].fill_(7)
    runner.req_pool.last_tokens[1:].fill_(-3)
    page_table = runner.req_pool.page_table.clone()
    ahead: list[int] = []

    def compile_ahead(walk: Callable[[], object]) -> bool:  # of a device whose kernels are new to the machine
        walk()
        ahead.append(len(batches))
        return True

    monkeypatch.setattr(runner.device, "compile_ahead", compile_ahead)
    warm_up(runner.device, config, launch, is_new=True)
    assert len(batches) == 2 * ahead[0] > 0, "what is launched is compiled ahead"

    most = config.chunked_prefill_size or config.max_prefill_tokens
    sizes = {batch.num_prompt_tokens for batch in batches}
    assert max(sizes) == most and 1 in sizes
    assert all(any(size <= one < size + 128 for one in sizes) for size in range(512, most, 128))
    assert any(batch.starts.any() for batch in batches) or most < 100
    for layer in range(config.model.num_layers):
        assert bool((runner.kv_pool.row(layer, "k")[page_size:] == 7).all())
        assert bool((runner.kv_pool.row(layer, "v")[page_size:] == 7).all())
        assert bool(runner.kv_pool.row(layer, "k").isfinite().all())
    assert bool((runner.req_pool.last_tokens[1:] == -3).all())
    assert torch.equal(runner.req_pool.page_table, page_table)
    assert answers(driver, greetings()) == expected


def test_logprobs_of_prompts_and_of_draws_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's are computed from logits in the model's dtype, a draw's in float32. On a GPU these are two kernels."""
    driver = make_model_driver(dtype="bfloat16", chunked_prefill_size=48, num_rows=3)
    seen: list[torch.dtype] = []
    compute = logprobs._log_softmax

    def log_softmax(logits: torch.Tensor, fixed_order: bool) -> torch.Tensor:
        seen.append(logits.dtype)
        return compute(logits, fixed_order)

    monkeypatch.setattr(logprobs, "_log_softmax", log_softmax)
    assert isinstance(driver.worker, ModelRunner)
    warm_up(driver.worker.device, driver.config, driver.worker.launch)
    assert set(seen) == {torch.bfloat16, torch.float32}
