"""DecodeRunner and DecodeRunner on the CPU, whose graphs run their body again: sizes, fallbacks, repairs, the
comparison, and tokens that do not depend on whether there are graphs."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_traces import FULL, PLAIN, TraceShape, random_trace, steady_trace, swap_trace
from trace_runner import first_difference, make_runner, play, record_steps, same_tokens

from fenceline.layers.attention.cpu_backend import CpuAttentionBackend
from fenceline.layers.forward_batch import AttentionPlan, GraphDecodeInputs
from fenceline.memory_order import LeaseError, Points, open_device
from fenceline.memory_order.device import CpuDevice, CpuGraph
from fenceline.memory_order.edges import TOTAL_BUCKETS, Guard
from fenceline.model_executor.decode_runner import DecodeRunner, RepairError
from fenceline.model_executor.graph_runner import GraphMismatch
from fenceline.model_executor.model_runner import ModelRunner
from fenceline.model_executor.parts import Parts
from fenceline_proof.steps import Loop, make_config
from fenceline_proof.workloads import WORKLOADS

SHAPE = TraceShape(num_rows=12, num_pages=100)
SIZES = (1, 2, 4, 8)


def runner_of(*severed: str, shape: TraceShape = SHAPE, sizes: tuple[int, ...] = SIZES, **flags: object) -> ModelRunner:
    return make_runner(open_device("cpu", frozenset(severed)), shape, sizes, context_length=128, **flags)


def graphs_of(runner: ModelRunner) -> DecodeRunner:
    assert runner.decode.has_graphs
    return runner.decode


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return runner_of()


# --- which size a batch is replayed in (F11) ---------------------------------------------------------


def bare(runner: ModelRunner, sizes: tuple[int, ...], padding: bool) -> DecodeRunner:
    """One that has captured nothing yet."""
    return DecodeRunner(parts_with(runner, sizes[-1], sizes, padding))


def parts_with(runner: ModelRunner, max_batch: int, sizes: tuple[int, ...], padding: bool = True) -> Parts:
    config = runner.parts.config
    args = replace(config.server_args, disable_cuda_graph_padding=not padding)
    config = replace(config, server_args=args, max_running_requests=max_batch, cuda_graph_bs=sizes)
    return replace(runner.parts, config=config)


def test_a_size_that_the_arena_has_no_rows_for_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="a graph of 4 requests needs an arena of as many rows, not 3"):
        DecodeRunner(parts_with(runner, 3, (1, 4)))


@given(st.sets(st.integers(1, 300), min_size=1, max_size=8), st.booleans(), st.integers(1, 5000))
def test_every_batch_has_an_answer(runner: ModelRunner, chosen: set[int], padding: bool, beyond: int) -> None:
    sizes = tuple(sorted(chosen))
    graphs = bare(runner, sizes, padding)
    boundaries = {n for size in sizes for n in (size - 1, size, size + 1) if n > 0} | {sizes[-1] + beyond}
    expected = {"size": 0, "padding": 0}
    for num_reqs in sorted(boundaries):
        fitting = [size for size in sizes if size >= num_reqs]
        if not fitting:
            expected["size"] += 1
            assert graphs.size_for(num_reqs) is None
        elif padding or fitting[0] == num_reqs:
            assert graphs.size_for(num_reqs) == fitting[0]
        else:
            expected["padding"] += 1
            assert graphs.size_for(num_reqs) is None
    assert graphs.stats.fallbacks == {reason: n for reason, n in expected.items() if n}


def test_without_the_guard_a_large_batch_is_cut_to_fit() -> None:
    graphs = graphs_of(runner_of("total_buckets"))
    assert [graphs.size_for(n) for n in (8, 9, 5000)] == [8, 8, 8]


def test_a_size_that_attention_cannot_plan_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = bare(runner_of(), SIZES, padding=True)
    original = CpuAttentionBackend.plan_graph

    def plan_graph(self: CpuAttentionBackend, inputs: GraphDecodeInputs) -> AttentionPlan | None:
        return None if len(inputs.rows) > 4 else original(self, inputs)

    monkeypatch.setattr(CpuAttentionBackend, "plan_graph", plan_graph)
    with caplog.at_level("WARNING"):
        graphs.capture(128, show_progress=False)
    assert graphs.sizes == (1, 2, 4)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["--cuda-graph-bs 8 is left out"]
    assert "a smaller --context-length" in caplog.text


def test_the_logits_of_each_replay_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that watches memory is told, so that rows that the replay does not write do not pass as its own."""
    begun: list[int] = []

    def begin_fill(_: CpuDevice, tensors: Sequence[torch.Tensor], guard: Guard) -> None:
        begun.extend(tensor.data_ptr() for tensor in tensors if guard is TOTAL_BUCKETS)

    runner = runner_of()
    monkeypatch.setattr(CpuDevice, "begin_fill", begin_fill)
    graphs = graphs_of(runner)
    num_before = graphs.stats.replays
    play(runner, random_trace(3, 8, SHAPE))
    assert begun.count(graphs.logits(1).data_ptr()) == graphs.stats.replays - num_before > 0


# --- fallbacks and repairs ---------------------------------------------------------------------------


@pytest.mark.parametrize(("no_padding", "reason"), [(False, "size"), (True, "padding")], ids=["padding", "no padding"])
def test_steps_without_a_graph_are_counted_and_right(no_padding: bool, reason: str) -> None:
    shape = TraceShape(num_rows=12, num_pages=100, batches=(3, 4, 8, 9, 12))
    batches = random_trace(3, 60, shape)
    replayed = runner_of(disable_cuda_graph_padding=no_padding)
    assert same_tokens(play(runner_of(sizes=()), batches), play(replayed, batches)) == ""
    stats = graphs_of(replayed).stats
    counts = [len(batch.rows) for batch in batches if batch.is_decode]
    fits = (lambda n: n <= 8) if reason == "size" else (lambda n: n in SIZES)
    assert stats.eligible_steps == len(counts)
    assert stats.replays == sum(map(fits, counts)) > 0
    assert sum(stats.fallbacks.values()) == len(counts) - stats.replays
    assert stats.fallbacks[reason] > 0 and stats.fallbacks["size"] == sum(n > 8 for n in counts)
    assert stats.repairs == {}


MOVES: dict[str, Callable[[ModelRunner], None]] = {
    "keys": lambda r: r.kv_pool.rows[0].__setitem__("k", r.kv_pool.row(0, "k").clone()),
    "values": lambda r: r.kv_pool.rows[0].__setitem__("v", r.kv_pool.row(0, "v").clone()),
    "page table": lambda r: setattr(r.req_pool, "page_table", r.req_pool.page_table.clone()),
    "last tokens": lambda r: setattr(r.req_pool, "last_tokens", r.req_pool.last_tokens.clone()),
}


@pytest.mark.parametrize("moved", MOVES)
def test_memory_that_has_moved_is_not_replayed_on(moved: str) -> None:
    batches = steady_trace(4, 12)
    expected = play(runner_of(), batches)
    runner = runner_of()
    outputs = play(runner, batches[:6])
    MOVES[moved](runner)
    outputs += play(runner, batches[6:])
    assert same_tokens(expected, outputs) == ""
    stats = graphs_of(runner).stats
    assert (stats.replays, stats.fallbacks, stats.repairs) == (5, {"address": 7}, {})


def tamper(runner: ModelRunner) -> None:
    """As if a step had not been counted, neither by the host nor on the device."""
    filled = runner.decode._filled
    assert filled is not None
    filled.num_steps -= 1
    runner.decode.arena["num_steps"].sub_(1)


def play_tampered(runner: ModelRunner) -> str:
    """Where the answers of a steady batch differ that is tampered with after its sixth step."""
    batches = steady_trace(4, 12)
    launched = 0

    def after_launch(batch: object) -> None:
        nonlocal launched
        launched += 1
        if launched == 6:
            tamper(runner)

    return first_difference(play(runner_of(), batches), play(runner, batches, after_launch))


def test_an_arena_that_holds_other_lengths_is_filled_again() -> None:
    runner = runner_of()
    assert play_tampered(runner) == ""
    stats = graphs_of(runner).stats
    assert stats.repairs == {"arena": 1} and stats.replays == stats.eligible_steps == 12
    assert runner.decode.arena.num_fills == 2


def test_where_repairs_are_not_tolerated_they_raise() -> None:
    class Strict(CpuDevice):
        tolerates_repairs = False

    with pytest.raises(RepairError, match="the arena's lengths are .* the batch's"):
        play_tampered(make_runner(Strict(), SHAPE, SIZES, context_length=128))


# --- leases ------------------------------------------------------------------------------------------


def test_outputs_of_a_replay_end_with_the_next(runner: ModelRunner) -> None:
    batches = steady_trace(5, 4)
    play(runner, batches)
    last = batches[-1]
    assert last.is_decode
    graphs = graphs_of(runner)
    with torch.inference_mode():
        first = graphs.replay(4, last.seq_lens + 1)
        assert first.take("next_tokens", 4).shape == (4,)
        graphs.replay(4, last.seq_lens + 2)
        with pytest.raises(LeaseError, match=r"decode\.next_tokens of replay \d+ is gone"):
            first.take("next_tokens", 4)


# --- --debug-cuda-graph ------------------------------------------------------------------------------


def test_comparing_finds_nothing_where_nothing_is_wrong() -> None:
    batches = random_trace(6, 30, SHAPE)
    compared = runner_of(debug_cuda_graph=True)
    assert first_difference(play(runner_of(), batches), play(compared, batches)) == ""
    assert graphs_of(compared).stats.replays > 10


@pytest.mark.parametrize(
    "field", ["num_steps", "seq_lens", "positions", "out_slots", "input_ids", "next_tokens", "logits"]
)
def test_comparing_names_the_field_that_differs(field: str) -> None:
    runner = runner_of(debug_cuda_graph=True)
    graphs, arena = graphs_of(runner), runner.decode.arena
    graph = graphs._captured[4].graph
    assert isinstance(graph, CpuGraph)
    body = graph._body

    def wrong() -> None:
        body()
        (graphs.logits(4) if field == "logits" else arena[field])[2].add_(1)

    graph._body = wrong
    with pytest.raises(GraphMismatch, match=rf"decode\[4\]: {field} of rows \[2\] differs"):
        play(runner, steady_trace(7, 3))


# --- the same tokens, and nothing uploaded -----------------------------------------------------------


@pytest.mark.parametrize(("page_size", "seed"), [(1, 1), (16, 2)])
def test_tokens_do_not_depend_on_graphs(page_size: int, seed: int) -> None:
    shape = TraceShape(
        page_size, 12, 1600 // page_size, tuple(range(1, 12)), chunk=20, sampling=PLAIN + FULL, logprob_share=0.1
    )
    batches = random_trace(seed, 120, shape)
    replayed = runner_of(shape=shape)
    assert same_tokens(play(runner_of(shape=shape, sizes=()), batches), play(replayed, batches)) == ""
    stats = graphs_of(replayed).stats
    assert stats.replays > 40 and stats.fallbacks["size"] > 0 and not stats.repairs


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("workload", ["mixed", "aborts", "retraction", "graphs"])
def test_the_schedulers_steps_do_not_depend_on_graphs(workload: str, seed: int) -> None:
    scenario = WORKLOADS[workload].make(Random(f"{workload} {seed}"))
    flags = {**scenario.flags, "context_length": 256}
    loop = Loop(make_config({**flags, "cuda_graph_bs": (1, 3)}, "cpu"), open_device("cpu"), scenario=scenario)
    taken = record_steps(loop.runner)
    loop.run()
    assert graphs_of(loop.runner).stats.replays > 0
    plain = ModelRunner(
        make_config({name: flag for name, flag in flags.items() if name != "cuda_graph_bs"}, "cpu"),
        open_device("cpu"),
        show_progress=False,
    )
    assert not plain.decode.has_graphs
    batches = [dataclasses.replace(step.batch, after=Points.none()) for step in taken]
    published = [step.output for step in taken]
    assert same_tokens(play(plain, batches), [output for output in published if output is not None]) == ""


@pytest.mark.parametrize("sizes", [SIZES, ()], ids=["graphs", "eager"])
def test_steady_decode_uploads_nothing(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    runner, batches = runner_of(sizes=sizes), steady_trace(8, 40)
    uploads: list[set[str]] = []
    upload = runner._inputs.upload

    def recording(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        uploads.append(set(arrays))
        return upload(arrays)

    monkeypatch.setattr(runner._inputs, "upload", recording)
    play(runner, batches)
    pages = {"page_rows", "page_columns", "page_ids"}
    new_pages = sum(len(batch.page_writes) > 0 for batch in batches[2:])
    assert "plan_rows" in uploads[1] and uploads[2:] == [pages] * new_pages
    assert runner.decode.arena.num_fills == 1 and 0 < new_pages < 5


def test_a_changed_batch_is_filled_once() -> None:
    runner, batches = runner_of(shape=TraceShape(1, 12, 400)), swap_trace(9, 20)
    play(runner, batches)
    assert runner.decode.arena.num_fills == 20 and graphs_of(runner).stats.replays == 20


@pytest.mark.parametrize("is_new", [True, False])
def test_the_kernels_of_all_sizes_are_compiled_before_the_first_capture(
    monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """Those of the largest size tell whether the model's kernels are new to the machine; if not, the others are left
    to the captures. What is walked ahead changes no result."""
    expected = play(runner_of(), batches := random_trace(3, 12, SHAPE))
    order: list[object] = []
    warm_up, capture = DecodeRunner._warm_up, CpuDevice.capture

    def walked(self: DecodeRunner, size: int, plan: AttentionPlan) -> None:
        order.append(size)
        warm_up(self, size, plan)

    def compile_ahead(self: CpuDevice, walk: Callable[[], object]) -> bool:
        walk()
        return is_new

    def captured(self: CpuDevice, name: str, *rest: object) -> object:
        order.append(name)
        return capture(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeRunner, "_warm_up", walked)
    monkeypatch.setattr(CpuDevice, "compile_ahead", compile_ahead)
    monkeypatch.setattr(CpuDevice, "capture", captured)
    runner = runner_of()
    first = order.index("decode[8]")
    assert order[:first] == [8, *([4, 2, 1] if is_new else []), 8]
    assert graphs_of(runner).is_new is is_new
    assert first_difference(expected, play(runner, batches)) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_capture_shows_its_progress_on_a_terminal(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    with torch.inference_mode():
        graphs = bare(runner, (1, 3), True)
        graphs.capture(128, show_progress=True)
    shown = stderr.getvalue()
    if not terminal:
        assert shown == ""
        return
    assert "Capturing decode graphs" in shown and "2/2" in shown
    assert re.search(r"1 requests, \d+\.\d\d GiB", shown)  # on a CPU: of the machine's, which others use too
    assert graphs.sizes == (1, 3) and graphs.stats.capture_s >= 0
