"""Prefill in pieces, on the CPU, whose graphs run their body again: sizes, padding, loads between the pieces, the
comparison, and answers that do not depend on whether there are graphs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from demo_requests import check_logprobs_equal_transformers, sampled_reference, sampled_requests
from model_tiers import Tiers, hicache_runner, through_the_host
from scheduler_driver import answers, make_model_driver
from step_traces import FULL, PLAIN, TraceShape, random_trace
from trace_runner import make_runner, play, same_tokens

from fenceline.layers.forward_batch import AuxHiddenStates, ForwardBatch
from fenceline.memory_order import open_device
from fenceline.memory_order.checker import OrderError
from fenceline.memory_order.device import CpuGraph
from fenceline.model_executor.graph_runner import GraphMismatch
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from fenceline.model_executor.step import StepBatch

SIZES = (4, 16, 40)
SHAPE = TraceShape(
    num_pages=400,
    outputs=(1, 4),
    steady=1,
    batches=(1, 2, 3),
    prompts=(1, 3, 4, 5, 15, 16, 17, 39, 40, 41, 90),
    chunk=41,
    sampling=PLAIN + FULL,
    logprob_share=0.3,
)


def runner_of(*severed: str, sizes: tuple[int, ...] = SIZES, **flags: object) -> ModelRunner:
    pieces = {"piecewise_cuda_graph_tokens": sizes} if sizes else {}
    return make_runner(open_device("cpu", frozenset(severed)), SHAPE, (1, 4, 8), **pieces, **flags)


def pieces_of(runner: ModelRunner) -> PiecewiseCudaGraphRunner:
    assert runner.prefill_graphs is not None
    return runner.prefill_graphs


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_the_pieces(seed: int) -> None:
    """Prompts, chunks and prefixes of every length around the captured sizes, prompt logprobs among them."""
    batches = random_trace(seed, 120, SHAPE)
    runner = runner_of()
    assert same_tokens(play(runner_of(sizes=()), batches), play(runner, batches)) == ""
    lens = [batch.num_prompt_tokens for batch in batches if not batch.is_decode]
    stats = pieces_of(runner).stats
    assert stats.replays == stats.eligible_steps == sum(num <= SIZES[-1] for num in lens) > 20
    assert len(lens) > stats.replays, "some steps are too large for graphs"
    assert stats.fallbacks == stats.repairs == {}
    assert all(stats.replays_by_size.values()), "every size is used"


@pytest.mark.parametrize(
    "flags", [{}, {"page_size": 1}, {"chunked_prefill_size": 16}, {"disable_overlap_schedule": True}], ids=str
)
def test_the_demo_model_says_the_same(flags: dict[str, object]) -> None:
    """Prompts together and in chunks, then again with cached prefixes; every sampling feature."""
    sizes = (4, 16) if "chunked_prefill_size" in flags else (4, 32, 128, 512)
    driver = make_model_driver(piecewise_cuda_graph_tokens=sizes, **flags)
    for _ in range(2):
        assert answers(driver, sampled_requests()) == sampled_reference()
        driver.answers.clear()
    runner = driver.scheduler.worker
    assert isinstance(runner, ModelRunner)
    stats = pieces_of(runner).stats
    assert stats.replays == stats.eligible_steps > 1 and not stats.fallbacks


def test_logprobs_of_the_demo_model_equal_transformers() -> None:
    check_logprobs_equal_transformers(piecewise_cuda_graph_tokens=(8, 32))


def test_counting_begins_after_the_warm_up() -> None:
    runner = runner_of()
    play(runner, random_trace(1, 20, SHAPE))
    stats = pieces_of(runner).stats
    assert stats.eligible_steps == stats.replays > 0
    stats.restart()
    assert (stats.eligible_steps, stats.replays) == (0, 0)
    assert stats.replays_by_size == {str(size): 0 for size in SIZES}


def test_every_step_has_an_answer() -> None:
    pieces = pieces_of(runner_of())
    sizes = [pieces.size_for(num) for num in (1, 3, 4, 5, 15, 16, 17, 39, 40, 41, 5000)]
    assert sizes == [4, 4, 4, 16, 16, 16, 40, 40, 40, None, None]
    assert pieces.stats.eligible_steps == 9


def test_memory_that_has_moved_is_not_replayed_on() -> None:
    batches = random_trace(1, 30, SHAPE)
    expected = play(runner_of(sizes=()), batches)
    runner = runner_of()
    runner.kv_pool.rows[0]["k"] = runner.kv_pool.row(0, "k").clone()
    assert same_tokens(expected, play(runner, batches)) == ""
    stats = pieces_of(runner).stats
    assert stats.replays == 0 and stats.fallbacks == {"address": stats.eligible_steps} and stats.eligible_steps


def test_a_step_leaves_the_hidden_states_that_a_draft_reads() -> None:
    """By replay as without graphs, those of the step's own tokens alone."""
    runner = runner_of(sizes=())
    pieces = PiecewiseCudaGraphRunner(runner.parts, SIZES, aux_layers=(0, 2, 0))
    pieces.capture(show_progress=False)
    kept: list[int] = []
    hidden_size = runner.model.config.hidden_size

    def keeping(batch: ForwardBatch) -> torch.Tensor:
        outs = []
        for model in (runner.model, pieces):
            aux = AuxHiddenStates((0, 2, 0), torch.full((batch.num_tokens, 3 * hidden_size), torch.nan))
            x = model.hidden_states(dataclasses.replace(batch, aux_hidden=aux))
            outs.append((x.clone(), aux.out))
        (plain, plain_aux), (replayed, replayed_aux) = outs
        torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=1e-4)  # rows of padding change the rounding
        torch.testing.assert_close(replayed_aux, plain_aux, atol=1e-4, rtol=1e-4)
        kept.append(batch.num_tokens)
        return replayed

    runner.extend.graphs = SimpleNamespace(hidden_states=keeping)  # type: ignore[assignment]
    play(runner, random_trace(1, 30, SHAPE))
    assert pieces.stats.replays > 3 and len(set(kept)) > 2, kept


def test_without_pads_padded_tokens_overwrite_live_pages() -> None:
    """F7: out_slots of an earlier step are those of live pages by now."""
    batches = random_trace(1, 120, SHAPE)
    expected = play(runner_of(sizes=()), batches)
    assert same_tokens(expected, play(runner_of("arena_pad"), batches)) != ""


def test_what_attention_leaves_out_is_zeroed_before_each_step() -> None:
    runner = runner_of()
    arena = pieces_of(runner).arena
    (attended,) = (arena[name] for name in arena.fields if name.startswith("attended"))

    def check(batch: StepBatch) -> None:
        num = batch.num_prompt_tokens
        if 0 < num <= SIZES[-1]:
            size = next(size for size in SIZES if size >= num)
            assert (attended[num:size] == 0).all() and not arena["hidden"][:size].isnan().any()
        attended.fill_(torch.nan)
        arena["hidden"].fill_(torch.nan)

    play(runner, random_trace(2, 40, SHAPE), check)


def test_debug_compares_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = random_trace(3, 30, SHAPE)
    runner = runner_of(debug_cuda_graph=True)
    assert same_tokens(play(runner_of(sizes=()), batches), play(runner, batches)) == ""
    replay = CpuGraph._replay

    def wrong(graph: CpuGraph) -> None:
        replay(graph)
        if graph.name.endswith(".1"):
            pieces_of(runner).arena["hidden"][0].add_(1)

    monkeypatch.setattr(CpuGraph, "_replay", wrong)
    with pytest.raises(GraphMismatch, match=r"prefill\[\d+\]: hidden of rows \[0"):
        play(runner, batches)


@pytest.mark.parametrize("memory_check", ["off", "order"])
def test_pages_that_are_loaded_are_waited_for_before_their_piece(memory_check: str) -> None:
    runner = hicache_runner(open_device("cpu"), piecewise_cuda_graph_tokens=(64, 128), memory_check=memory_check)
    for _ in range(2):
        expected, got = through_the_host(Tiers(runner))
        np.testing.assert_array_equal(got.tokens, expected.tokens)
    stats = pieces_of(runner).stats
    assert stats.replays == stats.eligible_steps > 0


def test_the_checker_names_the_edge_that_is_missing() -> None:
    device = open_device("cpu", frozenset({"forward_after_load"}))
    runner = hicache_runner(device, piecewise_cuda_graph_tokens=(64, 128), memory_check="order")
    with pytest.raises(OrderError, match=r"RAW on kv_pool.layer0 pages 21-23, 25, 28") as caught:
        through_the_host(Tiers(runner))
    assert "forward_after_load" in caught.value.edges
