"""What the declarations, rings, arenas and graphs of memory_order promise, each with a fault."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch

from fenceline.memory_order import (
    Communicator,
    ResultRing,
    access,
    device,
    edges,
    graph,
    staging,
    stream,
)
from fenceline.memory_order.access import Memory, PagedMemory
from fenceline.memory_order.all_reduce import Launch
from fenceline.memory_order.arena import Arena, ArenaOutputs
from fenceline.memory_order.device import CpuDevice, Device
from fenceline.memory_order.staging import MaskTable, PlanRing, ResultLease, Slot
from fenceline.model_executor.decode_runner import DecodeRunner
from fenceline.scheduler.request_memory import RequestMemory
from fenceline.vgpu.mutate import is_by_name
from fenceline.vgpu.proving import order_promises
from fenceline.vgpu.proving.mutants import all_mutants
from fenceline.vgpu.proving.order_promises import compare_order
from fenceline.vgpu.proving.runs import ANSWERS, INVARIANTS, Outcome, Trial, run

torch.set_num_threads(1)


def first_failure(*workloads: str, seeds: range = range(8)) -> Outcome:
    """The first run of these that fails."""
    outcomes = (run(Trial(name, seed)) for seed in seeds for name in workloads)
    return next(outcome for outcome in outcomes if not outcome.clean)


def nothing(self: Any, *args: Any, **named: Any) -> None:
    """In the place of a method that does something."""


def unnamed(self: Device, name: str, tensor: torch.Tensor) -> Memory:
    return Memory(name, tensor=tensor)


def all_rows(self: Arena, sources: Any, num_live: int, num_rows: int | None = None) -> None:
    fill(self, sources, num_live)


def of_no_stream(self: ResultRing, *args: Any, **named: Any) -> ResultLease:
    forward = self._device.forward
    active, forward.active = forward.active, lambda: staging.nullcontext()  # type: ignore[attr-defined, method-assign]
    try:
        return download(self, *args, **named)
    finally:
        forward.active = active  # type: ignore[method-assign]


def first_slot(self: PlanRing) -> Any:
    self.num_plans = 0
    return planning(self)


def forgets(self: PagedMemory, rows: Any, columns: Any, pages: Any) -> None:
    self._page_table[rows, columns] = pages


def passes_before(self: Any, point: Any, edge: Any) -> None:
    self.note_passed(point)
    self._block(point)


def unsaid(self: Arena) -> ArenaOutputs:
    self.generation += 1
    return ArenaOutputs(self, self.generation)


fill, download, planning = Arena.fill, ResultRing.download, PlanRing.planning


@pytest.mark.parametrize(
    ("owner", "name", "fault", "says"),
    [
        (access, "_MAX_RUNS", None, "are named as"),
        (Device, "memory", unnamed, "has no name for reports"),
        (device.fill_rows, "accesses", nothing, "a fill of . fields"),
        (order_promises, "joined", lambda a, b: b, "joined are"),
        (device.CpuStream, "synchronize", passes_before, "has passed: True, waited for as"),
        (Memory, "note", nothing, "that of agent"),
        (PagedMemory, "write_table", forgets, "--memory-check order"),
        (order_promises, "edges_markdown", lambda: "", "the page about edges has too few rows"),
        (CpuDevice, "protect_from_graphs", None, "missing guard: plan_source"),
        (Arena, "fill", all_rows, "an arena of . rows filled with"),
        (Arena, "begin_replay", unsaid, "missing guard: total_buckets"),
        (order_promises, "table_of_step", lambda device, table: lambda: table, "steps get the page tables"),
        (graph.Graph, "_check_replayable", nothing, "a graph that is CAPTURED is replayed"),
        (Slot, "begin_write", nothing, "declares"),
        (ResultRing, "download", of_no_stream, "results that FORWARD packs"),
        (MaskTable, "begin", None, "memory for masks is written before"),
        (PlanRing, "planning", first_slot, "a plan declares|plans of a ring"),
        (Launch, "share", lambda self, block, thread, count: range(thread, count), "handle the vectors"),
        (Communicator, "_require_stream", nothing, "a sum with its norm is made on another stream"),
        (Communicator, "give_up", nothing, "the back end of a communicator is asked"),
    ],
)  # fmt: skip
def test_promises_to_any_caller_are_kept(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, says: str
) -> None:
    if name == "_MAX_RUNS":
        numbers = access.row_numbers
        owner, name, fault = order_promises, "row_numbers", lambda rows: numbers(rows[:-1])
    elif name == "accesses":
        owner, name, fault = order_promises, "fill_rows", device.declare_kernel(fault)
    elif name == "protect_from_graphs":
        owner, fault = order_promises._Noting, nothing
    elif name == "begin":
        begin = MaskTable.begin

        def cleared(self: MaskTable, *args: Any) -> Any:
            masks = begin(self, *args)
            masks[:] = -1
            return masks

        fault = cleared
    elif name == "download":
        monkeypatch.setattr(staging, "nullcontext", __import__("contextlib").nullcontext, raising=False)
    monkeypatch.setattr(owner, name, fault)
    found = next(filter(None, (compare_order(Random(seed)) for seed in range(60))))
    assert re.search(says, found), found


def test_a_run_asks_for_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "give_up", nothing)
    found = first_failure("mixed")
    assert found.checker == ANSWERS and "contracts: the back end" in found.report


def test_a_promise_that_is_not_kept_is_reported_before_the_assertion_that_it_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream.Stream, "learn", nothing)
    found = first_failure("gone")
    assert found.checker == INVARIANTS and found.report.startswith("contracts: a Point on"), found.report
    assert "is finished before it is done" in found.report
    mutant = next(one for one in all_mutants() if one.path == "memory_order/stream.py" and one.rule == "drop")
    assert is_by_name(mutant, found.checker, found.edges, found.report)


def test_a_missing_guard_is_named_by_what_is_said_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_replay = DecodeRunner.replay

    def silent(self: Any, *args: Any) -> Any:
        own = self._device.begin_fill
        self._device.begin_fill = lambda tensors, guard: (
            None if guard is edges.TOTAL_BUCKETS else own(tensors, guard)
        )
        try:
            return begin_replay(self, *args)
        finally:
            self._device.begin_fill = own

    monkeypatch.setattr(DecodeRunner, "replay", silent)
    found = first_failure("graphs")
    assert "captures: 0 times new values" in found.report and "total_buckets" in found.edges, found


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [
        (RequestMemory, "release", "KV pages . is leased at"),
    ],
)
def test_a_run_that_does_not_end_names_the_lines_that_hold_its_memory(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, says: str
) -> None:
    monkeypatch.setattr(owner, name, nothing)
    found = first_failure("gone")
    assert re.search(says, found.report), found.report
