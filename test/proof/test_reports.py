"""Reports: of what is left over, of exceptions, and of what is declared, each with a fault."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from fenceline.memory_order import staging
from fenceline.memory_order.edges import StreamName
from fenceline.model_executor import decode_runner
from fenceline.scheduler.request_memory import RequestMemory
from fenceline_proof.everything import _ARRANGEMENTS
from fenceline_proof.runs import Outcome, Trial, run
from fenceline_sim.device import VgpuDevice

torch.set_num_threads(1)


def first_failure(*workloads: str, seeds: range = range(8)) -> Outcome:
    """The first run of these that fails."""
    outcomes = (run(Trial(name, seed)) for seed in seeds for name in workloads)
    return next(outcome for outcome in outcomes if not outcome.clean)


def nothing(self: Any, *args: Any) -> None:
    """In the place of a method that does something."""


def never_retires(self: RequestMemory, req: Any) -> None:
    retire, self.pages.retire = self.pages.retire, lambda *args, **named: None  # type: ignore[method-assign]
    release(self, req)
    self.pages.retire = retire  # type: ignore[method-assign]


release = RequestMemory.release


def test_reports_name_the_lines_that_have_leased_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestMemory, "release", never_retires)
    found = first_failure("gone")
    says = "is leased at fenceline/scheduler/request_memory.py"
    assert found.checker == "ownership" and says in found.report, found.report


def test_a_report_of_an_exception_has_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_pack", None)
    found = first_failure("mixed")
    assert "fenceline/memory_order/staging.py" in found.report and "in upload: _pack(" in found.report
    assert "fenceline/model_executor/model_runner.py" in found.report


def test_a_report_of_a_kernel_that_fails_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = dataclasses.replace(decode_runner.DECODE_PROLOGUE, reference=lambda *args: 1 // 0)
    monkeypatch.setattr(decode_runner, "DECODE_PROLOGUE", failing)
    found = first_failure("mixed")
    assert "by zero" in found.report and "failed at test_reports.py" in found.report, found.report


@pytest.mark.long
def test_a_plan_that_is_said_to_be_read_is_the_one_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise who waits for a plan's reader would wait for a later step too."""
    declare, former = VgpuDevice.declare, []

    def of_the_plan_before(self: VgpuDevice, stream: StreamName, label: str, names: Any, *args: Any) -> None:
        if label == "step that reads its plan":
            former.append(args)
            args = former[-2:][0]
        declare(self, stream, label, names, *args)

    monkeypatch.setattr(VgpuDevice, "declare", of_the_plan_before)
    found = first_failure("everything", seeds=range(len(_ARRANGEMENTS), 2 * len(_ARRANGEMENTS)))  # engines that plan
    assert found.checker == "footprint", found.report
    assert re.search(r"reads plan_ring\.(layer\d\.)?device", found.report), found.report


def test_a_run_with_the_order_check_has_its_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VgpuDevice, "check_order", nothing)
    found = first_failure("mixed")
    assert found.checker == "footprint" and "--memory-check is not what the device has" in found.report
