"""Known races of inference servers, as small programs: each is reported on every schedule, its repair is silent."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
POLICIES = ("fifo", "eager", "laziest", "random", "pct")
SEEDS = 4


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


races = load(ROOT / "docs" / "examples" / "races.py")
stale = load(ROOT / "docs" / "examples" / "stale.py")

FOUND = {
    "f1_backup_reads_what_forward_writes": ("RAW", "kv rows 4-7"),
    "f3_load_fills_what_forward_reads": ("WAR", "kv row 6"),
    "f12_staging_is_rewritten": ("WAR", "staging bytes 0..64"),
    "f13_row_is_refilled": ("WAW", "last_tokens row 3"),
    "f16_tensor_is_freed_while_used_elsewhere": ("WAR", "result bytes"),
}

OBJECTED = {
    "f7_padding_is_stale": ("freshness", "inputs rows 2-3"),
    "f8_output_is_overwritten": ("generation", "next_tokens"),
    "f9_plan_is_overwritten": ("protection", "plan.seq_lens"),
    "f17_graph_writes_what_it_gave_back": ("lifetime", "token_counts"),
    "f18_padding_is_minus_one": ("bounds", "kv rows"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", stale.PROGRAMS, ids=lambda program: program.__name__)
def test_stale_memory_is_reported_on_every_schedule(program: stale.Program, policy: str) -> None:  # type: ignore[name-defined]
    for seed in range(SEEDS):
        error = stale.run(program, False, seed, policy)
        assert error is not None, f"{policy} {seed}: silent"
        assert (error.checker, error.memory) == OBJECTED[program.__name__], str(error)
        assert "stale.py" in error.places[-1]
        assert stale.run(program, True, seed, policy) is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", races.PROGRAMS, ids=lambda program: program.__name__)
def test_the_race_is_reported_on_every_schedule(program: races.Program, policy: str) -> None:  # type: ignore[name-defined]
    hazard, memory = FOUND[program.__name__]
    for seed in range(SEEDS):
        race = races.run(program, False, seed, policy)
        assert race is not None, f"{policy} {seed}: silent"
        assert race.hazard == hazard and race.memory.startswith(memory), str(race)
        assert all("races.py" in place for place in race.places)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", races.PROGRAMS, ids=lambda program: program.__name__)
def test_the_repaired_program_is_silent(program: races.Program, policy: str) -> None:  # type: ignore[name-defined]
    for seed in range(SEEDS):
        race = races.run(program, True, seed, policy)
        assert race is None, str(race)


def test_a_report_names_both_operations_and_the_missing_order() -> None:
    text = str(races.run(races.f13_row_is_refilled, False))
    assert "index_put_ writes it on forward" in text and "index_put_ writes it on schedule" in text
    assert "last_tokens[rows] = rows * 10" in text
    assert "schedule has to wait, before 2, for forward after 1" in text
