"""F14: a page is a page of all layers, the target's and the draft's, on its way to the host and back."""

from __future__ import annotations

from pathlib import Path
from random import Random

from draft_checkpoints import VOCAB
from scheduler_driver import Driver, request
from speculative_driver import EAGLE, models
from speculative_guards import Drafts, by_kind, make_guarded

from fenceline.config.draft_config import SpeculativeAlgorithm

__all__ = ["models"]  # a fixture


def evict(driver: Driver) -> None:
    """The tree's pages leave the device, and are on the host."""
    tree = driver.scheduler.memory.tree
    tree.evict(tree.num_evictable_pages)
    while driver.scheduler.memory.num_outstanding:
        driver.step()


def drafts_before_and_after_the_host(
    models: dict[str, Path], kind: str, algorithm: SpeculativeAlgorithm, draft: str, severed: str = ""
) -> list[Drafts]:
    """Of one request, served twice: its prefix is computed, and then it comes from the host, into pages that have held
    something else meanwhile."""
    driver, drafts = make_guarded(
        models,
        kind,
        severed,
        algorithm,
        draft,
        page_size=16,
        enable_hierarchical_cache=True,
        hicache_ratio=4.0,
        hicache_write_policy="write_through",
    )
    rng, served = Random(5), list[Drafts]()
    prompt = [rng.randrange(3, VOCAB) for _ in range(60)]
    sampling = {"seed": 1, "temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
    for turn in range(2):
        before = len(drafts)
        driver.send(request(f"turn {turn}", prompt, **sampling))  # type: ignore[arg-type]
        driver.run(max_steps=100_000)
        served.append(drafts[before:])
        evict(driver)
        if turn == 0:
            for index in range(5):
                others = [rng.randrange(3, VOCAB) for _ in range(100)]
                driver.send(request(f"other {index}", others, **sampling))  # type: ignore[arg-type]
            driver.run(max_steps=100_000)
            evict(driver)
    last = driver.answers["turn 1"].last
    assert last is not None and last.cached_tokens_details is not None and last.cached_tokens_details.host == 48
    assert driver.answers["turn 0"].output_ids == driver.answers["turn 1"].output_ids
    driver.scheduler.close()
    return served


@by_kind((EAGLE, "eagle"))
def test_drafts_are_the_same_after_a_load_from_the_host(
    kind: str, algorithm: SpeculativeAlgorithm, draft: str, models: dict[str, Path]
) -> None:
    computed, loaded = drafts_before_and_after_the_host(models, kind, algorithm, draft)
    assert computed == loaded and len(computed) > 5


@by_kind((EAGLE, "eagle"))
def test_without_the_drafts_layers_it_proposes_something_else(
    kind: str, algorithm: SpeculativeAlgorithm, draft: str, models: dict[str, Path]
) -> None:
    computed, loaded = drafts_before_and_after_the_host(models, kind, algorithm, draft, "whole_page")
    assert computed != loaded
