"""What is declared is compared with what is accessed, the checker with a plain record, and figures with counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fenceline.mem_cache.host import page_copy
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.memory_order import access, checker
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.step_accesses import StepAccesses
from fenceline_proof.runs import Outcome, Trial, run, verdict_of
from fenceline_sim.device import VgpuDevice

torch.set_num_threads(1)


def first_failure(*workloads: str, seeds: range = range(6)) -> Outcome:
    """The first run of these that fails."""
    outcomes = (run(Trial(name, seed)) for seed in seeds for name in workloads)
    return next(outcome for outcome in outcomes if not outcome.clean)


def without(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    """Nothing whose label begins so is declared."""
    declare = VgpuDevice.declare

    def declared(self: VgpuDevice, stream: StreamName, said: str, *args: Any, **kwargs: Any) -> None:
        if not said.startswith(label):
            declare(self, stream, said, *args, **kwargs)

    monkeypatch.setattr(VgpuDevice, "declare", declared)


@pytest.mark.parametrize(
    ("label", "workload", "says"),
    [
        ("decode step", "mixed", "a decode step has declared no pages"),
        ("prefill step", "mixed", "a prefill step has declared no pages"),
        ("upload of", "mixed", "reads input_ring.pinned[0], which is not declared"),
        ("FORWARD's own copy", "mixed", "reads input_ring.device[0], which is not declared"),
        ("read of the step's results", "mixed", "the host has not since"),
        ("copy of the step's results", "graphs", "which is not declared"),
        ("load of KV pages", "spill", "a load declares []"),
        ("backup of KV pages", "spill", "a store declares []"),
    ],
)
def test_what_is_not_declared_is_found(monkeypatch: pytest.MonkeyPatch, label: str, workload: str, says: str) -> None:
    without(monkeypatch, label)
    found = first_failure(workload)
    assert found.checker == "footprint" and says in found.report


def _all_layers_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = page_copy.WatchedPools.copy

    def copied(self: Any, *args: Any, layers: Any = None, **kwargs: Any) -> None:
        copy(self, *args, **kwargs)

    monkeypatch.setattr(page_copy.WatchedPools, "copy", copied)


def _sms_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copy, "occupies_sm", lambda op: None)


@pytest.mark.parametrize(
    ("plant", "workload", "says"),
    [
        (_all_layers_each_time, "conversations", "bytes, its pages have"),
        (_sms_not_taken, "persistent", "a backup by SMs does not occupy them"),
    ],
)
def test_the_copies_of_a_transfer_are_compared(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], workload: str, says: str
) -> None:
    plant(monkeypatch)
    found = first_failure(workload)
    assert says in found.report, found.report


def test_memory_that_nothing_uses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    declare = VgpuDevice.declare

    def declared(self: VgpuDevice, stream: StreamName, label: str, *args: Any) -> None:
        declare(self, stream, label, *args)
        if label.startswith("copy of the step's results"):
            other = next(one for one in self.whole_memories.values() if one.name.startswith("input_ring.device"))
            declare(self, stream, label, access.writes, other)

    monkeypatch.setattr(VgpuDevice, "declare", declared)
    found = first_failure("mixed")
    assert (
        found.checker == "footprint" and "input_ring.device[0] is declared on copy, and nothing uses it" in found.report
    )


def test_pages_of_a_step_and_of_a_transfer_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = StepAccesses.extend

    def beginning(self: StepAccesses, op: Any, batch: Any) -> None:
        extend(self, op, batch)
        op.write(self.pages, np.array([1, 2]))

    with monkeypatch.context() as patch:
        patch.setattr(StepAccesses, "extend", beginning)
        found = first_failure("mixed")
        assert found.checker == "footprint" and "a prefill step declares pages" in found.report

    def shorter(self: HiCacheController, op: Any, layers: range, device_pages: Any, host_pages: Any) -> None:
        op.read(self._host_memory, host_pages)
        op.write(self._device_memory, device_pages[1:])

    monkeypatch.setattr(HiCacheController, "_load_accesses", shorter)
    found = first_failure("spill")
    assert found.checker == "footprint" and "a load declares kv_pool" in found.report


def test_the_layers_of_loads_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a load writes, and those that a step reads while they are being loaded."""

    def of_all(self: HiCacheController, op: Any, layers: range, device_pages: Any, host_pages: Any) -> None:
        op.read(self._host_memory, host_pages)
        op.write(self._device_memory, device_pages)

    with monkeypatch.context() as patch:
        patch.setattr(HiCacheController, "_load_accesses", of_all)
        found = first_failure("spill")
        assert found.checker == "footprint" and "a load declares [(" in found.report
    monkeypatch.setattr(HiCacheController, "_layer_accesses", lambda *args: None)
    found = first_failure("spill")
    assert found.checker == "footprint" and "a step declares [] of a layer, [(" in found.report


def one_by_one(rows: Any) -> str:
    more = f" and {len(rows) - 6} more runs" if len(rows) > 6 else ""
    return ", ".join(map(str, rows.tolist()[:6])) + more


def test_a_race_that_the_checker_finds_names_its_edge() -> None:
    error = checker.OrderError("memory order: RAW", ("forward_after_load",), checker.Hazard.RAW, "kv_pool")
    verdict = verdict_of(error)
    assert (verdict.checker, verdict.edges) == ("memory-check", ("forward_after_load",))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("_write_table", "a step says that it writes req_pool.page_table []"),
        ("extend", "a step says that it reads req_pool.page_table"),
    ],
)
def test_rows_that_a_step_declares_are_compared(monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> None:
    declare = StepAccesses.extend

    def reads_another_row(self: StepAccesses, op: Any, batch: Any) -> None:
        declare(self, op, batch)
        op.read(self.page_table, np.zeros(1, np.int64))

    def writes_no_row(self: StepAccesses, op: Any, batch: Any) -> None:
        writes = batch.page_writes
        op.write_table(self.pages, writes.rows, writes.columns, writes.pages)

    fault = reads_another_row if name == "extend" else writes_no_row
    monkeypatch.setattr(StepAccesses, name, fault)
    found = first_failure("mixed")
    assert found.checker == "footprint" and says in found.report, found.report
