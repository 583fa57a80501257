"""Prefill in pieces on a GPU: every replay is bit-identical to its pieces submitted kernel by kernel on the same padded
arena, near to the same step without padding, and undisturbed by loads in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from demo_requests import greedy_requests, sampled_requests
from guarded_runs import SPIN_CYCLES, EagerCudaDevice
from late_loads import differences
from msgspec.structs import replace
from scheduler_driver import make_model_driver
from step_traces import FULL, PLAIN, TraceShape, random_trace
from trace_runner import check_same, clear, first_difference, make_runner, play, prefill_stats

from fenceline.memory_order import Device, open_device
from fenceline.model_executor.graph_runner import GraphStats
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.step import StepBatch, StepOutput

pytestmark = pytest.mark.gpu

SIZES = (4, 16, 48, 128)
BOUNDARIES = tuple(size + more for size in SIZES for more in (-1, 0, 1)) + (300,)
NUM_STEPS = 1000


def trace_shape(page_size: int, **fields: object) -> TraceShape:
    """Prompts of every length around the captured sizes, whole and in chunks, and all that may be asked of them."""
    defaults: dict[str, object] = {
        "outputs": (1, 6),
        "steady": 1,
        "batches": (1, 2, 3),
        "prompts": (1, *BOUNDARIES),
        "chunk": 150,
        "sampling": PLAIN + FULL,
        "logprob_share": 0.2,
    }
    return TraceShape(page_size, num_pages=6400 // page_size, **(defaults | fields))  # type: ignore[arg-type]


def runner_of(device: Device, page_size: int = 16, **flags: object) -> ModelRunner:
    shape = trace_shape(page_size)
    return make_runner(device, shape, piecewise_cuda_graph_tokens=SIZES, **flags)


def check_counts(stats: GraphStats, batches: Sequence[StepBatch]) -> None:
    nums = [batch.num_prompt_tokens for batch in batches if not batch.is_decode]
    assert stats.replays == stats.eligible_steps == sum(num <= SIZES[-1] for num in nums)
    assert stats.fallbacks == stats.repairs == {} and all(stats.replays_by_size.values())


@pytest.mark.parametrize("page_size", [1, 16])
def test_random_steps_are_bit_identical_to_their_pieces(page_size: int) -> None:
    batches = random_trace(300 + page_size, NUM_STEPS, trace_shape(page_size))
    guarded = runner_of(open_device("cuda"), page_size)
    check_same(runner_of(EagerCudaDevice(), page_size), guarded, batches)
    check_counts(prefill_stats(guarded), batches)


def test_flashinfers_steps_are_bit_identical_too() -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    batches = random_trace(320, 200, trace_shape(16))
    flags = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"}
    guarded = runner_of(open_device("cuda"), **flags)
    check_same(runner_of(EagerCudaDevice(), **flags), guarded, batches)
    check_counts(prefill_stats(guarded), batches)


def test_every_replay_equals_its_step_without_the_graphs() -> None:
    """--debug-cuda-graph compares what each step leaves, bit by bit."""
    runner = runner_of(open_device("cuda"), debug_cuda_graph=True)
    batches = random_trace(330, 200, trace_shape(16))
    play(runner, batches)
    check_counts(prefill_stats(runner), batches)


@pytest.mark.parametrize("backends", ["triton triton", "flashinfer triton", "flashinfer flashinfer"])
def test_mixed_steps_are_bit_identical_to_their_pieces(backends: str) -> None:
    """--debug-cuda-graph again, where rows decode behind prompts. Their attention is a call of its own, unless both
    would be FlashInfer's."""
    if "flashinfer" in backends:
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    prefill, decode = backends.split()
    driver = make_model_driver(
        device="cuda", dtype="bfloat16", enable_mixed_chunk=True, debug_cuda_graph=True, chunked_prefill_size=128,
        piecewise_cuda_graph_tokens=SIZES, prefill_attention_backend=prefill, decode_attention_backend=decode,
    )  # fmt: skip
    for req in (*greedy_requests(40), *[replace(req, rid=f"s{req.rid}") for req in sampled_requests()]):
        driver.send(req)
        for _ in range(3):
            driver.step()
    driver.run()
    stats = prefill_stats(driver.worker)
    assert driver.scheduler.stats.num_mixed_steps > 5
    assert stats.replays == stats.eligible_steps > 0 and stats.fallbacks == stats.repairs == {}


def test_padding_costs_no_precision() -> None:
    """Other kernels multiply other numbers of rows and round otherwise: from float32 both are equally far."""
    shape = trace_shape(16, logprob_share=1.0, sampling=PLAIN[:1], outputs=(1, 1))
    batches = [batch for batch in random_trace(340, 200, shape) if not batch.is_decode]
    exact = _best_logprobs(make_runner(open_device("cuda"), shape, dtype="float32"), batches)
    plain = _best_logprobs(make_runner(open_device("cuda"), shape), batches)
    padded = _best_logprobs(runner_of(open_device("cuda")), batches)
    assert len(exact) > 1000
    assert np.abs(padded - exact).mean() < 1.2 * np.abs(plain - exact).mean()


def _best_logprobs(runner: ModelRunner, batches: Sequence[StepBatch]) -> np.ndarray:
    """The largest logprob of every position that is asked for."""
    clear(runner)
    outputs = play(runner, batches)
    parts = [values.top[:, 0] for out in outputs for values in (out.logprobs, out.prompt_logprobs) if values]
    return np.concatenate(parts)


def test_without_pads_an_earlier_step_shows() -> None:
    """F7: out_slots of an earlier, longer step name pages that are somebody's by now."""
    batches = random_trace(350, 200, trace_shape(16))
    expected = play(runner_of(EagerCudaDevice()), batches, overlap=False)
    assert first_difference(expected, play(runner_of(open_device("cuda", frozenset({"arena_pad"}))), batches))


def test_answers_do_not_depend_on_when_pages_arrive() -> None:
    """F4: FORWARD waits between the pieces, layer by layer."""
    sizes = {"piecewise_cuda_graph_tokens": (16, 64, 128)}
    assert differences("", 50, SPIN_CYCLES // 10, **sizes) == []


def test_without_the_wait_between_the_pieces_answers_do() -> None:
    assert differences("forward_after_load", 5, SPIN_CYCLES, piecewise_cuda_graph_tokens=(16, 64, 128))


def test_other_graphs_leave_the_pieces_memory_alone() -> None:
    """F17: two runners take turns while others use and free memory."""
    shape = trace_shape(16)
    batches = random_trace(360, 300, shape)
    expected = play(runner_of(EagerCudaDevice()), batches, overlap=False)
    runner, other = runner_of(open_device("cuda")), runner_of(open_device("cuda"))
    got: list[StepOutput] = []
    for batch in batches:
        got += play(runner, [batch])
        if not batch.is_decode:
            other.launch(batch).wait()
        with runner.device.forward.active():
            torch.full((1 << 20,), torch.nan, device="cuda")
    assert first_difference(expected, got) == ""
