"""The proof's checks of the model runner, its graphs and its draws, each with a fault that the others do not report."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from msgspec import structs

from fenceline.memory_order.arena import Arena
from fenceline.memory_order.kernel import Kernel
from fenceline.memory_order.staging import ResultRing
from fenceline.model_executor import decode_runner, extend_runner, speculative_runner
from fenceline.model_executor.decode_runner import DecodeRunner
from fenceline.model_executor.graph_runner import GraphRunner, GraphStats
from fenceline.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.model_executor.step import ForwardResult
from fenceline.sampling import gumbel, sampling_batch
from fenceline.sampling.rank_sampler import RankSampler
from fenceline.vgpu.device import VgpuGraph
from fenceline.vgpu.proving import runner_parts
from fenceline.vgpu.proving.runner_parts import compare_runner_parts
from fenceline.vgpu.proving.runs import ANSWERS, Outcome, Trial, run
from fenceline.vgpu.proving.sampled_batches import compare_sampling

torch.set_num_threads(1)


def first_failure(workload: str, seeds: range = range(8)) -> Outcome:
    """The first run that fails."""
    outcomes = (run(Trial(workload, seed)) for seed in seeds)
    return next(outcome for outcome in outcomes if not outcome.clean)


# --- graphs


def other_pads(self: Arena, device: Any, name: str, num_rows: int, fields: Any) -> None:
    fields = [replace(field, pad=1) if field.name == "positions" else field for field in fields]
    make_arena(self, device, name, num_rows, fields)


def without_waiting(self: DecodeRunner, *args: Any) -> None:
    synchronize, self._device.synchronize = self._device.synchronize, lambda: None  # type: ignore[method-assign]
    warm_up(self, *args)
    self._device.synchronize = synchronize  # type: ignore[method-assign]


def one_token_more(self: SpeculativeRunner, max_seq_len: int, show_progress: bool) -> None:
    capture_drafts(self, max_seq_len + 1, show_progress)


def one_token_less(self: DecodeRunner, max_seq_len: int, show_progress: bool) -> None:
    capture(self, max_seq_len - 1, show_progress)


def leaves_a_mark(*args: Any) -> None:
    begin_step(*args[:-1], args[-1]._replace(is_bad=args[-1].is_bad[:-1]))


def counts_on(self: DecodeRunner, *args: Any) -> None:
    warm_up(self, *args)
    self.arena["num_steps"].add_(1)
    self._device.synchronize()


def says_one_more(self: PiecewiseCudaGraphRunner, *args: Any) -> Any:
    for graph in self._captured[min(self._captured)].graphs:
        if isinstance(graph, VgpuGraph):
            graph.raw.num_replays += 1
    return hidden_states(self, *args)


def wrong_result_ring(self: ResultRing, device: Any, depth: int = 2, small_by_forward: bool = False) -> None:
    make_ring(self, device, depth, not small_by_forward)


make_arena, warm_up, begin_step = Arena.__init__, DecodeRunner._warm_up, speculative_runner.begin_step
capture, capture_drafts = DecodeRunner.capture, SpeculativeRunner.capture
hidden_states, make_ring = PiecewiseCudaGraphRunner.hidden_states, ResultRing.__init__


@pytest.mark.parametrize(
    ("owner", "name", "fault", "workload", "says"),
    [
        (
            Arena,
            "__init__",
            other_pads,
            "graphs",
            "captures: rows of decode.positions without a request hold 1",
        ),
        (DecodeRunner, "_warm_up", without_waiting, "graphs", r"captures: decode\[4\] begins before"),
        (DecodeRunner, "_draw_under_masks", lambda *args: None, "graphs", "captures: .*masked does nothing"),
        (DecodeRunner, "capture", one_token_less, "graphs", "attention is planned for requests of"),
        (SpeculativeRunner, "capture", one_token_more, "speculation", "attention is planned for requests of"),
        (speculative_runner, "begin_step", leaves_a_mark, "speculation", "before it has written all of it"),
        (DecodeRunner, "_warm_up", counts_on, "graphs", "steps are counted before the first"),
        (
            DecodeRunner,
            "_count_repair",
            lambda *args: None,
            "graphs",
            "is not noticed to be of other lengths",
        ),
        (
            PiecewiseCudaGraphRunner,
            "hidden_states",
            says_one_more,
            "everything",
            r"prefill.* is replayed \d+ t",
        ),
        (ResultRing, "__init__", wrong_result_ring, "spill", "small results are"),
    ],
)
def test_graphs_and_what_the_runner_chooses_are_compared(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, workload: str, says: str
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = first_failure(workload)
    assert found.checker == ANSWERS and re.search(says, found.report), found.report


# --- declarations


def without_steps(op: Any, rows: Any, plan_seq_lens: Any, num_steps: Any, *others: Any) -> None:
    page_table, last_tokens, _, *outputs = others
    op.read(plan_seq_lens)
    op.read(page_table, rows)
    op.read(last_tokens, rows)
    for output in outputs:
        op.write(output)


def without_outputs(op: Any, *operands: Any) -> None:
    for operand in operands[:5]:
        op.read(operand)


@pytest.mark.parametrize("accesses", [without_steps, without_outputs])
def test_launches_are_audited(monkeypatch: pytest.MonkeyPatch, accesses: Callable[..., None]) -> None:
    monkeypatch.setattr(decode_runner, "DECODE_PROLOGUE", Kernel("decode_prologue", accesses))
    found = first_failure("aborts")
    assert found.checker == "audit" and "decode_prologue" in found.report, found.report


# --- parts of the runner and of the sampler


def targets_twice(batch: Any) -> Any:
    arrays = extend_arrays(batch)
    if "prompt_targets" in arrays:
        arrays["prompt_targets"] = arrays["prompt_targets"][::-1].copy()
    return arrays


def in_halves(num_rows: int, num_columns: int) -> list[slice]:
    return [slice(row, row + 1) for row in range(num_rows)]


def at_the_same_place(self: RankSampler, *args: Any) -> Any:
    return best(self, *args[:-1], 0)


def never_removed(self: GraphRunner, capture: Any, show_progress: bool) -> None:
    sizes = list(self._sizes)
    capture_sizes(self, capture, show_progress)
    self._sizes[:] = sizes


def goes_on_counting(self: GraphStats) -> None:
    self.repairs = {**self.repairs}


def unchecked(self: ForwardResult) -> Any:
    self._check = None
    return wait(self)


def masks_all(arrays: Any, reqs: Any) -> None:
    params = [replace(req, params=with_a_minimum(req)) for req in reqs]
    add_min_tokens(arrays, params)


def with_a_minimum(req: Any) -> Any:
    return structs.replace(req.params, min_new_tokens=max(req.params.min_new_tokens, 1))


extend_arrays, best, capture_sizes = (
    extend_runner._extend_arrays,
    RankSampler._best,
    GraphRunner._capture_sizes,
)
wait, add_min_tokens = ForwardResult.wait, sampling_batch._add_min_tokens


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (runner_parts, "_extend_arrays", targets_twice, "is right"),
        (gumbel, "row_chunks", in_halves, "are split into"),
        (gumbel, "uniform", lambda keys, positions: positions / 2**31, "the numbers of seeds"),
        (RankSampler, "_best", at_the_same_place, "ranks draw"),
        (GraphRunner, "_capture_sizes", never_removed, "are captured"),
        (GraphRunner, "fits", lambda self: True, "runs in"),
        (GraphStats, "restart", goes_on_counting, "counts begin again"),
        (ForwardResult, "wait", unchecked, "results are taken"),
    ],
)
def test_random_questions_show_the_fault(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    assert not any(compare_runner_parts(Random(seed)) for seed in range(40))
    monkeypatch.setattr(owner, name, fault)
    found = [compare_runner_parts(Random(seed)) for seed in range(40)]
    assert any(says in one for one in found), found
    outcomes = (run(Trial("mixed", seed)) for seed in range(60))
    assert next(outcome for outcome in outcomes if not outcome.clean)


def test_requests_without_a_minimum_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(compare_sampling(Random(seed)) for seed in range(10))
    monkeypatch.setattr(sampling_batch, "_add_min_tokens", masks_all)
    assert any("must not end yet" in compare_sampling(Random(seed)) for seed in range(10))


# --- trees of drafts


def noise_of_the_root(self: SpeculativeRunner, logits: Any, size: int, positions: Any) -> Any:
    return best_drafts(self, logits, size, self.arena["lens"][:size])


best_drafts = SpeculativeRunner._best


def test_nodes_deep_in_a_tree_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeRunner, "_best", noise_of_the_root)
    found = first_failure("speculation_trees", seeds=range(12, 20))
    assert found.checker == ANSWERS and "a step of depth 3" in found.report, found.report
