"""Speculation in the proof: faults that change no token, because a draft changes none, are named where they happen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fenceline.memory_order.access import PagedMemory
from fenceline.model_executor.speculative_runner import SpeculativeRunner
from fenceline.vgpu.errors import OwnershipError, TagError
from fenceline.vgpu.proving.runs import Trial, run
from fenceline.vgpu.proving.script import Scenario, Script, Workload
from fenceline.vgpu.proving.workloads import WORKLOADS

torch.set_num_threads(1)

TAGS, OWNERSHIP = TagError.checker, OwnershipError.checker


def _row_computed_again(patch: pytest.MonkeyPatch) -> None:
    """A whole model as a draft computes the token before the last one in every step, though it mostly has it."""
    right = SpeculativeRunner._propose_from_two

    def wrong(self: SpeculativeRunner, plans: Any) -> torch.Tensor:
        self.state.is_behind.fill_(True)
        return right(self, plans)

    patch.setattr(SpeculativeRunner, "_propose_from_two", wrong)


def _row_left_out(patch: pytest.MonkeyPatch) -> None:
    """It does not compute that token after all of its proposals have been accepted."""
    right = SpeculativeRunner._propose_from_two

    def wrong(self: SpeculativeRunner, plans: Any) -> torch.Tensor:
        self.state.is_behind.fill_(False)
        return right(self, plans)

    patch.setattr(SpeculativeRunner, "_propose_from_two", wrong)


def _one_page_declared(patch: pytest.MonkeyPatch) -> None:
    """Of the pages that a step may write the last one is declared."""
    patch.setattr(
        PagedMemory,
        "pages_between",
        lambda self, rows, first, lengths: self.last_pages_of(rows, lengths),
    )


def _draft_not_extended(patch: pytest.MonkeyPatch) -> None:
    """The draft keeps the rows that it has computed while it proposed."""
    patch.setattr(SpeculativeRunner, "_extend_draft", lambda *args: None)


def _rows_one_too_late(patch: pytest.MonkeyPatch) -> None:
    right = SpeculativeRunner._begin

    def wrong(self: SpeculativeRunner, size: int) -> None:
        right(self, size)
        slots = self.arena["out_slots"][:size]
        slots.copy_(slots.roll(-1, 1))

    patch.setattr(SpeculativeRunner, "_begin", wrong)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = {
    "a row computed again": (_row_computed_again, "ITSELF", TAGS, r"computes token \d+ of r\d again"),
    "a row left out": (_row_left_out, "ITSELF", TAGS, r"layer2\.k page 0, .* stores token \d+ of r\d here"),
    "one page declared": (_one_page_declared, "EAGLE3", TAGS, "writes a page that it has not declared"),
    "a draft not extended": (_draft_not_extended, "NEXTN", TAGS, r"holds .* from its own hidden states"),
    "rows one too late": (_rows_one_too_late, "EAGLE3", TAGS, r"stores token \d+ of r\d here"),
}


def _two_requests(draft: str) -> Callable[[Any], Scenario]:
    def make(random: Any) -> Scenario:
        script = Script(random)
        for _ in range(2):
            script.add(0, script.prompt(5, 5), 14, ignore_eos=True, temperature=1.0)
        return script.scenario(
            max_total_tokens=64,
            max_running_requests=2,
            chunked_prefill_size=16,
            page_size=4,
            draft=draft,
            speculative_num_steps=2,
            cuda_graph_bs=(2,),
            context_length=64,
        )

    return make


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_changes_no_token_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault, draft, checker, report = FAULTS[name]
    monkeypatch.setitem(WORKLOADS, "two", Workload("two", "", _two_requests(draft)))
    assert run(Trial("two", 2)).clean
    fault(monkeypatch)
    outcome = run(Trial("two", 2))
    assert outcome.checker == checker, outcome.report
    assert re.search(report, outcome.report), outcome.report
