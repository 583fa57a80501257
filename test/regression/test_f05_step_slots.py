"""F5: the slots of a speculative step's rows follow from the page table of that step, not of an earlier one."""

from __future__ import annotations

from pathlib import Path

from guarded_runs import both_page_sizes
from speculative_driver import EAGLE, STANDALONE, models, plain_answers, requests, target_of
from speculative_guards import by_kind, run

from fenceline.config.draft_config import SpeculativeAlgorithm

__all__ = ["models"]  # a fixture


@by_kind((EAGLE, "eagle"), (STANDALONE, "near"))
@both_page_sizes
def test_tokens_are_those_without_speculation(
    kind: str, algorithm: SpeculativeAlgorithm, draft: str, page_size: int, models: dict[str, Path]
) -> None:
    plain = plain_answers(models, requests(3, num=12), target_of(draft))
    assert run(models, kind, algorithm=algorithm, draft=draft, page_size=page_size)[0] == plain
    if draft != "near":
        assert run(models, kind, "step_slots", algorithm=algorithm, draft=draft, page_size=page_size)[0] != plain
