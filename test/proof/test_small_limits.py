"""Small limits of the proof reach who keeps to them; each case fails if its limit is bound before it is changed."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scheduler_driver import make_driver, prefills, request

import fenceline
from fenceline.memory_order import open_device
from fenceline.memory_order.staging import InputRing
from fenceline_proof.limits import SMALL, small_limits
from fenceline_proof.runs import Trial, run

PACKAGE = Path(fenceline.__file__).parent

both = pytest.mark.parametrize("small", [False, True])


@both
def test_a_ring_begins_with_small_slots(monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    with small_limits() if small else nullcontext():
        device = open_device("cpu")
        ring, stops = InputRing(device), []
        monkeypatch.setattr(device, "full_stop", stops.append)
        ring.upload({"values": np.zeros(600, dtype=np.uint8)})
    assert bool(stops) is small


@both
def test_few_prompt_tokens_are_scored_in_a_step(small: bool) -> None:
    with small_limits() if small else nullcontext():
        driver = make_driver()
        steps = prefills(driver)
        driver.send(request("r", [5] * 40, max_new_tokens=2, return_logprob=True, logprob_start_len=0))
        driver.run()
    assert steps == ([[6]] * 6 + [[4]] if small else [[40]])


@both
def test_a_newcomer_is_short_if_its_tokens_are_scored_in_one_step(small: bool) -> None:
    with small_limits() if small else nullcontext():
        driver = make_driver(num_rows=1)
        driver.send(request("runs", [5] * 4, max_new_tokens=40, ignore_eos=True))
        driver.step()
        scored = request("scored", [6] * 30, max_new_tokens=2, return_logprob=True, logprob_start_len=0)
        driver.send(scored)
        driver.step()
        found = driver.scheduler.short_newcomer(1000)
    assert (found is None) is small


@both
def test_prompts_share_short_steps(small: bool) -> None:
    with small_limits() if small else nullcontext():
        driver = make_driver()
        steps = prefills(driver)
        driver.send(*(request(f"r{n}", [n + 1] * 7, max_new_tokens=2) for n in range(8)))
        driver.run()
    assert (len(steps) > 1) is small
    assert [tokens for step in steps for tokens in step] == [7] * 8


@both
def test_little_is_kept_for_answers(small: bool) -> None:
    """What the planner takes a newcomer to need, and what the scheduler keeps for those that run."""
    with small_limits() if small else nullcontext():
        driver = make_driver(num_pages=20)
        driver.send(*(request(f"r{n}", [n + 1] * 4, max_new_tokens=60, ignore_eos=True) for n in range(2)))
        for _ in range(3):
            driver.step()
        num_before = len(driver.scheduler.running)
        driver.send(request("last", [9] * 4, max_new_tokens=60, ignore_eos=True))
        for _ in range(3):
            driver.step()
        num_after = len(driver.scheduler.running)
        driver.run()
    assert (num_before, num_after) == ((2, 3) if small else (1, 1))


def test_a_prompt_that_is_scored_may_get_less_than_half_of_a_step() -> None:
    """In this run half of a step is 32 tokens, and half of the tokens that a step scores is 3."""
    trial = Trial("windows", 126)
    assert trial.has_small_limits
    assert run(trial).clean


@pytest.mark.parametrize(("name", "limit"), [(name, limit) for name in SMALL for limit in SMALL[name]])
def test_a_limit_is_read_when_it_is_used(name: str, limit: str) -> None:
    """By functions of its module: a default, or a name imported from there, keeps the value that it had before."""
    path = PACKAGE / f"{name.replace('.', '/')}.py"
    reads = _reads(ast.parse(path.read_text()), limit)
    assert reads and all(reads)
    assert (f"fenceline.{name}", limit) not in imported()


@cache
def imported() -> set[tuple[str | None, str]]:
    """Every name that a file of the package imports from a module, with that module."""
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {(node.module, alias.name) for node in nodes for alias in node.names}


@pytest.mark.parametrize("workload", ["everything", "refill", "gone"])
def test_each_policy_meets_small_limits_and_the_check_of_order(workload: str) -> None:
    trials = [Trial(workload, seed) for seed in range(64)]
    met = {(trial.policy, trial.has_small_limits, trial.may_check_order) for trial in trials}
    assert met == set(product({trial.policy for trial in trials}, (False, True), (False, True)))
    assert sum(trial.has_small_limits for trial in trials) == 16
    assert sum(trial.may_check_order for trial in trials) == 32


def _reads(node: ast.AST, limit: str, called: bool = False) -> list[bool]:
    """Of each place that reads the name, whether it is one that runs when a function is called."""
    if isinstance(node, ast.Name):
        return [called] if node.id == limit and isinstance(node.ctx, ast.Load) else []
    found: list[bool] = []
    for part, value in ast.iter_fields(node):
        runs = called or (isinstance(node, ast.FunctionDef | ast.Lambda) and part == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                found += _reads(child, limit, runs)
    return found
