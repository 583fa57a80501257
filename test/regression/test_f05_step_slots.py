"""F5: the slots of a speculative step's rows follow from the page table of that step, not of an earlier one."""

from __future__ import annotations

from pathlib import Path

from guarded_runs import kinds, page_sizes
from speculative_driver import EAGLE, STANDALONE, models, plain_answers, requests
from speculative_guards import run

__all__ = ["models"]  # a fixture


@kinds
@page_sizes
def test_tokens_are_those_without_speculation(kind: str, page_size: int, models: dict[str, Path]) -> None:
    reqs = requests(3, num=12)
    plain = plain_answers(models, reqs)
    for algorithm, draft in ((EAGLE, "eagle"), (STANDALONE, "near")):
        assert run(models, kind, algorithm=algorithm, draft=draft, page_size=page_size)[0] == plain


@kinds
@page_sizes
def test_slots_of_the_last_steps_table_show(kind: str, page_size: int, models: dict[str, Path]) -> None:
    expected, _ = run(models, kind, page_size=page_size)
    assert run(models, kind, "step_slots", page_size=page_size)[0] != expected
