"""What is declared is compared with what is accessed, the checker with a plain record, and figures with counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fenceline.layers.attention import reference
from fenceline.layers.attention.reference import ReferenceAttentionBackend
from fenceline.layers.attention.shared_prefixes import _Grouping
from fenceline.mem_cache.host import page_copy
from fenceline.mem_cache.host.cache_controller import HiCacheController
from fenceline.memory_order import access, checker
from fenceline.memory_order.access import Memory, PagedMemory
from fenceline.memory_order.checker import OrderChecker
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor.step_accesses import StepAccesses
from fenceline_proof.limits import small_limits
from fenceline_proof.runs import ANSWERS, Outcome, Trial, run, verdict_of
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
def test_what_is_not_declared_is_found(
    monkeypatch: pytest.MonkeyPatch, label: str, workload: str, says: str
) -> None:
    without(monkeypatch, label)
    found = first_failure(workload)
    assert found.checker == "footprint" and says in found.report


def _each_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(device_pages: Any, host_pages: Any) -> Any:
        return [page_copy.Run(int(a), int(b), 1) for a, b in zip(device_pages, host_pages, strict=True)]

    monkeypatch.setattr(page_copy, "runs_of", one_by_one)


def _all_layers_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = page_copy.WatchedPools.copy

    def copied(self: Any, *args: Any, layers: Any = None, **kwargs: Any) -> None:
        copy(self, *args, **kwargs)

    monkeypatch.setattr(page_copy.WatchedPools, "copy", copied)


def _no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copy, "_has_pairs", lambda rows: False)


def _sms_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copy, "occupies_sm", lambda op: None)


@pytest.mark.parametrize(
    ("plant", "workload", "says"),
    [
        (_each_page_alone, "spill", "copies, "),
        (_all_layers_each_time, "conversations", "bytes, its pages have"),
        (_no_pairs, "conversations", "footprint: a "),
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
            other = next(
                one for one in self.whole_memories.values() if one.name.startswith("input_ring.device")
            )
            declare(self, stream, label, access.writes, other)

    monkeypatch.setattr(VgpuDevice, "declare", declared)
    found = first_failure("mixed")
    assert (
        found.checker == "footprint"
        and "input_ring.device[0] is declared on copy, and nothing uses it" in found.report
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


def forgets(self: Memory, agent: int, tick: int, write: bool, rows: Any) -> None:
    """Only of memory used as a whole is anything noted."""
    if self.num_rows == 1:
        (self.last_writes if write else self.last_reads)[agent] = tick


def forgets_the_last_batch(self: PagedMemory, *args: Any) -> None:
    self._latest = None
    note_rows(self, *args)


def moves_the_last_batch(self: PagedMemory, rows: Any, columns: Any, pages: Any) -> None:
    self._page_table[rows, columns] = pages


def writes_out_late(self: PagedMemory, agent: int, tick: int, write: bool, rows: Any) -> None:
    self._write_log()
    Memory.note(self, agent, tick, write, rows)


def reads_no_pages(self: OrderChecker, op: Any, memory: PagedMemory, rows: Any, lengths: Any) -> None:
    memory.note_rows(op.tick, rows, lengths, False)


def one_by_one(rows: Any) -> str:
    more = f" and {len(rows) - 6} more runs" if len(rows) > 6 else ""
    return ", ".join(map(str, rows.tolist()[:6])) + more


note_rows = PagedMemory.note_rows


def knows_too_much(self: OrderChecker, name: StreamName, clock: Any) -> None:
    wait(self, name, tuple(tick + 1 for tick in clock))


wait = OrderChecker.wait


def blind(stream: StreamName, is_write: bool) -> Callable[..., Any]:
    """Nothing is found too early of one agent's reads, or of its writes."""

    def found(self: Memory, agent: int, clock: Any, write: bool, rows: Any) -> access.Past | None:
        if agent == access.NUMBERS[stream] and write is is_write:
            return None
        return unordered(self, agent, clock, write, rows)

    return found


unordered = Memory.unordered


def other_report(self: OrderChecker, op: Any, memory: Memory, write: bool, past: Any) -> Exception:
    return checker.OrderError(f"race on {memory.name}", (), checker.Hazard.RAW, memory.name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Memory, "note", forgets),
        (PagedMemory, "_settle", lambda self, rows: None),
        (PagedMemory, "_write_log", lambda self: self._log.clear()),
        (OrderChecker, "wait", knows_too_much),
        (OrderChecker, "_compare", lambda self, op, memory, write, rows: None),
        (OrderChecker, "_error", other_report),
        (OrderChecker, "begin_step", lambda self: None),
        (access, "row_numbers", lambda rows: "0-9"),
        (access, "row_numbers", one_by_one),
        (PagedMemory, "note_rows", forgets_the_last_batch),
        (PagedMemory, "write_table", moves_the_last_batch),
        (PagedMemory, "note", writes_out_late),
        (OrderChecker, "read_pages", reads_no_pages),
        *((Memory, "unordered", blind(stream, write)) for stream in StreamName for write in (False, True)),
    ],
)
def test_the_checker_is_held_against_a_plain_record(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, fault)
    found = first_failure("spill", "mixed", "retraction", "together", seeds=range(1, 12))
    assert found.checker == "footprint", found.report


def test_a_race_that_the_checker_finds_names_its_edge() -> None:
    error = checker.OrderError("memory order: RAW", ("forward_after_load",), checker.Hazard.RAW, "kv_pool")
    verdict = verdict_of(error)
    assert (verdict.checker, verdict.edges, verdict.memory) == (
        "memory-check",
        ("forward_after_load",),
        "kv_pool",
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("_write_table", "a step says that it writes req_pool.page_table []"),
        ("extend", "a step says that it reads req_pool.page_table"),
    ],
)
def test_rows_that_a_step_declares_are_compared(
    monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
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


def test_small_limits_reach_what_large_batches_alone_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests attend in groups, of which the last one leaves out the last token."""
    together = ReferenceAttentionBackend._together

    def all_but_one(*args: Any) -> list[reference.Requests]:
        *groups, last = together(*args)
        return [*groups, replace(last, max_seq_len=last.max_seq_len - 1) if groups else last]

    monkeypatch.setattr(ReferenceAttentionBackend, "_together", all_but_one)
    assert first_failure("mixed", seeds=range(8)).trial.has_small_limits
    before = reference._GATHER_BYTES
    with small_limits():
        assert before > reference._GATHER_BYTES
    assert before == reference._GATHER_BYTES


def test_with_small_limits_the_engine_runs_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests share a prefix, and some of them a longer one, only the CPU's attention reads it once for all."""
    trial = Trial("prefixes", 23)
    assert trial.has_small_limits and run(trial).clean
    num_alike = _Grouping._num_alike

    def too_many(self: _Grouping, requests: Any, first: int, last: int) -> int:
        return num_alike(self, requests, first, last) + 2 * first

    monkeypatch.setattr(_Grouping, "_num_alike", too_many)
    found = run(trial)
    assert found.checker == ANSWERS and found.report.startswith("on the CPU: "), found.report
