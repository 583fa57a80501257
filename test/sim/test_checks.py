"""What happens-before cannot see: stale rows, outlived views, plans that graphs write, wrong indices, lost memory."""

from __future__ import annotations

import pytest
import torch
from conformance_vgpu import make_gpu

from fenceline.memory_order.kernel import declared
from fenceline_sim import RaceError, VirtualGpu, use
from fenceline_sim.errors import (
    BoundsError,
    CheckError,
    FreshnessError,
    GenerationError,
    ProtectionError,
    StaleMemoryError,
)
from fenceline_sim.memory import whole

POLICIES = ("fifo", "eager", "laziest", "random", "pct")


def field(gpu: VirtualGpu, device: torch.device, name: str = "field", rows: int = 6) -> torch.Tensor:
    tensor = torch.zeros(rows, dtype=torch.int64, device=device)
    gpu.name_memory(tensor, name, row_bytes=8)
    return tensor


# --- freshness -------------------------------------------------------------------------------------------


def test_pads_of_the_beginning_are_fresh_until_a_fill_begins() -> None:
    gpu, device = make_gpu()
    x = field(gpu, device)
    assert x.sum() == 0
    gpu.checks.begin_fill([x], "pads")
    x[:2].fill_(1)
    assert x[:2].sum() == 2, "what was filled may be read"
    with pytest.raises(FreshnessError) as caught:
        x[1:4].sum().item()
    error = caught.value
    assert error.memory == "field rows 2-3" and error.guard == "pads" and error.checker == "freshness"
    assert "missing guard: pads" in str(error) and "x[1:4].sum()" in error.places[-1]
    assert "x[:2]" not in str(error), "the stale rows were never written since anybody watched"


def test_the_stale_writer_is_named() -> None:
    gpu, device = make_gpu()
    x = field(gpu, device)
    gpu.checks.begin_fill([x])
    x.fill_(3)
    gpu.checks.begin_fill([x])
    x[:5].zero_()
    with pytest.raises(FreshnessError, match=r"row 5 (.|\n)*last written by fill_ on default(.|\n)*x\.fill_\(3\)"):
        x.sum().item()


@pytest.mark.parametrize("policy", POLICIES)
def test_each_reader_is_held_to_the_fill_before_it(policy: str) -> None:
    """Work may run long after the host has begun the next fill."""
    for seed in range(4):
        gpu = VirtualGpu(policy=policy, seed=seed)
        x = field(gpu, use(gpu))
        seen = []
        for value in range(1, 4):
            gpu.checks.begin_fill([x])
            x.fill_(value)
            seen.append(x.clone())
        assert [t.sum().item() for t in seen] == [6, 12, 18]


def test_rows_named_by_an_index_are_looked_at_alone() -> None:
    gpu, device = make_gpu()
    x = field(gpu, device)
    fresh, stale = torch.tensor([0, 2], device=device), torch.tensor([2, 3], device=device)
    gpu.checks.begin_fill([x])
    x.index_fill_(0, fresh, 1)
    assert x[fresh].sum() == 2
    with pytest.raises(FreshnessError, match="field row 3 read"):
        x[stale].sum().item()


def test_a_replay_reads_and_writes_like_everybody() -> None:
    gpu, device = make_gpu()
    x, y = field(gpu, device, "x"), field(gpu, device, "y")
    graph = gpu.graph("advance")
    with gpu.capture(graph):
        y[:4].copy_(x[:4] + 1)
    gpu.checks.begin_fill([x, y])
    x[:4].fill_(1)
    graph.replay()
    assert y[:4].sum() == 8, "the replay wrote what is read"
    gpu.checks.begin_fill([x, y])
    x[:3].fill_(2)
    graph.replay()
    with pytest.raises(FreshnessError, match=r"x row 3 read(.|\n)*read by add in advance on default"):
        gpu.synchronize_all()


def test_memory_without_rows_is_named_by_bytes() -> None:
    gpu, device = make_gpu()
    x = torch.zeros(16, device=device)
    gpu.name_memory(x, "blob")
    gpu.checks.begin_fill([x])
    x[:8].fill_(1)
    with pytest.raises(FreshnessError, match=r"blob bytes 32\.\.64"):
        x.sum().item()


def test_a_race_that_makes_memory_stale_is_the_news() -> None:
    """Without order the reader may come before the fill: that it finds old rows is an effect."""
    for seed in range(8):
        gpu = VirtualGpu(seed=seed)
        x = field(gpu, use(gpu))
        reader = gpu.stream("reader")
        gpu.synchronize_all()
        gpu.checks.begin_fill([x])
        x.fill_(1)
        with gpu.on(reader), pytest.raises(RaceError, match="RAW on field"):
            x.sum().item()
            gpu.synchronize_all()


# --- generations -----------------------------------------------------------------------------------------


def test_a_leased_view_ends_with_the_next_fill() -> None:
    gpu, device = make_gpu()
    x = field(gpu, device)
    gpu.checks.begin_fill([x])
    x.fill_(1)
    view = x[:4]
    gpu.checks.lease(view)
    part = view.view(2, 2)[1]
    assert part.sum() == 2
    gpu.checks.begin_fill([x])
    x.fill_(2)
    assert x[:4].sum() == 8, "others may look"
    for old in (view, part):
        with pytest.raises(GenerationError, match="leased in generation 1, is used in generation 2"):
            old.clone()


def test_a_copy_to_the_host_of_an_outlived_view_is_refused() -> None:
    gpu, device = make_gpu()
    x, host = field(gpu, device), gpu.pinned.buffer(48).view(torch.int64)
    gpu.checks.begin_fill([x])
    x.fill_(1)
    view = x[:]
    gpu.checks.lease(view)
    host.copy_(view, non_blocking=True)
    gpu.checks.begin_fill([x])
    with pytest.raises(GenerationError):
        host.copy_(view, non_blocking=True)


# --- protection ------------------------------------------------------------------------------------------


def test_a_graph_may_read_what_is_protected() -> None:
    gpu, device = make_gpu()
    plan, out = field(gpu, device, "plan"), field(gpu, device, "out")
    gpu.checks.protect_from_graphs(plan)
    graph = gpu.graph()
    with gpu.capture(graph):
        out.copy_(plan + 1)
    plan.fill_(4)
    graph.replay()
    assert out.sum() == 30


def test_a_capture_that_writes_what_is_protected_is_refused() -> None:
    gpu, device = make_gpu()
    plan = field(gpu, device, "plan")
    gpu.checks.protect_from_graphs(plan, "own_plan")
    with pytest.raises(ProtectionError, match=r"no graph may write plan(.|\n)*add_(.|\n)*missing guard: own_plan"):
        with gpu.capture(gpu.graph("step")):
            plan.add_(1)


def test_memory_protected_after_the_capture_is_found() -> None:
    gpu, device = make_gpu()
    plan = field(gpu, device, "plan")
    graph = gpu.graph("step")
    with gpu.capture(graph):
        plan.add_(1)
    graph.replay()
    gpu.checks.protect_from_graphs(plan)
    with pytest.raises(ProtectionError, match="every replay of step"):
        graph.replay()


# --- bounds ----------------------------------------------------------------------------------------------

INDEXING = {
    "index": lambda x, i: x[i],
    "index_put": lambda x, i: x.index_put_((i,), torch.ones(4, device=x.device)),
    "second axis": lambda x, i: x[torch.zeros_like(i), i],
    "index_select": lambda x, i: x.index_select(1, i),
    "index_copy": lambda x, i: x.index_copy_(0, i, x[: len(i)].clone()),
    "gather": lambda x, i: x.gather(1, i[:, None]),
    "scatter_add": lambda x, i: x.scatter_add_(1, i[:, None], torch.ones(2, 1, device=x.device)),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "kernel": lambda x, i: declared("kernel", "x i", "x[i] ->").launch(lambda x, i: None, x, i),
}


@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize("name", INDEXING)
def test_an_index_outside_is_reported_by_name(name: str, wrong: int) -> None:
    gpu, device = make_gpu()
    x = torch.zeros(4, 4, device=device)
    gpu.name_memory(x, "table", row_bytes=16)
    index = torch.tensor([1, wrong], device=device)
    gpu.name_memory(index, "rows")
    INDEXING[name](x, torch.tensor([0, 3], device=device))
    gpu.synchronize_all()
    INDEXING[name](x, index)
    with pytest.raises(BoundsError) as caught:
        gpu.synchronize_all()
    text = str(caught.value)
    assert "table" in text and f"indexed with {wrong}" in text and "the index is rows, element 1" in text
    assert "test_checks.py" in text and caught.value.guard == ("sink" if wrong < 0 else "")


def test_an_index_is_looked_at_each_time_it_is_replayed() -> None:
    gpu, device = make_gpu()
    x, index = field(gpu, device), torch.tensor([1, 2], device=device)
    graph = gpu.graph("put")
    with gpu.capture(graph):
        x.index_fill_(0, index, 1)
    graph.replay()
    gpu.synchronize_all()
    index.fill_(-2)
    graph.replay()
    with pytest.raises(BoundsError, match=r"indexed with -2, -2\n  written by index_fill_ in put"):
        gpu.synchronize_all()


# --- lifetimes -------------------------------------------------------------------------------------------


def test_memory_of_a_graph_stays_its_own() -> None:
    for private in (True, False):
        gpu, device = make_gpu()
        x = torch.ones(64, device=device)
        graph = gpu.graph("step", pool=None if private else gpu.default_stream)
        with gpu.capture(graph):
            y = (x + 1) * 2
        graph.replay()
        gpu.synchronize_all()
        mine = torch.zeros(64, device=device)
        gpu.name_memory(mine, "mine")
        if private:
            graph.replay()
            assert y[0] == 4 and mine.sum() == 0
        else:
            with pytest.raises(StaleMemoryError, match=r"step writes mine(.|\n)*guard: graph_pool"):
                graph.replay()


def test_a_graph_may_go_on_when_whoever_had_its_memory_is_gone() -> None:
    gpu, device = make_gpu()
    x = torch.ones(64, device=device)
    graph = gpu.graph(pool=gpu.default_stream)
    with gpu.capture(graph):
        y = (x + 1) * 2
    mine = torch.zeros(64, device=device)
    del mine
    graph.replay()
    assert y[0] == 4


# --- resources, and what is done with findings ---------------------------------------------------------------


def test_a_replay_occupies_what_its_capture_did() -> None:
    for ordered in (True, False):
        gpu, _ = make_gpu()
        sm, other = gpu.resource("sm"), gpu.stream("other")
        graph = gpu.graph("attention")
        with gpu.capture(graph):
            gpu.submit("attention", lambda: None, writes=[whole(sm)])
        graph.replay()
        if ordered:
            gpu.wait(other, gpu.record(gpu.default_stream))
        with gpu.on(other):
            gpu.submit("copy", lambda: None, writes=[whole(sm)])
        if ordered:
            gpu.synchronize_all()
        else:
            with pytest.raises(RaceError, match="exclusive on resource sm"):
                gpu.synchronize_all()


def broken(gpu: VirtualGpu, device: torch.device) -> None:
    x = field(gpu, device)
    gpu.checks.begin_fill([x])
    x[torch.tensor([-1], device=device)] = 5
    x.sum()
    gpu.synchronize_all()


def test_collected_findings_do_not_stop_the_program() -> None:
    gpu, device = make_gpu(collect=True)
    broken(gpu, device)
    assert [error.checker for error in gpu.findings.errors] == ["bounds", "freshness"]


def test_a_finding_is_raised_again() -> None:
    gpu, device = make_gpu()
    with pytest.raises(CheckError):
        broken(gpu, device)
    with pytest.raises(BoundsError):
        torch.zeros(1, device=device).item()


def test_without_the_detector_nothing_is_checked() -> None:
    gpu, device = make_gpu(detect=False)
    broken(gpu, device)
