"""benchmark/hostile: what is late, and what misses the mark."""

from __future__ import annotations

import argparse
import json
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmark" / "hostile"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_late_is_what_ends_late() -> None:
    from beside import Sample, usual, worst

    samples = [Sample(0.0, 0.01), Sample(1.0, 0.03), Sample(2.0, 5.0), Sample(8.0, 0.02)]
    assert usual(samples, until=6.0) == 0.02
    assert worst(samples, since=3.0, less=1.0) == 4.0
    assert worst(samples, since=7.5) == 0.02


def test_looking_costs_the_observer_little() -> None:
    """As objects the samples of a minute took it half a second to send, which counted as the age of a token."""
    from beside import Observed, Sample

    seen = Observed(seen_at=7.5, pending={"next_tokens": 7.0})
    for index in range(40_000):
        seen.next_tokens.add(index / 1000, 0.003)
    sent = pickle.dumps(seen)
    assert len(sent) < 20 * 40_000
    arrived: Observed = pickle.loads(sent)
    arrived.count_pending()
    assert list(arrived.next_tokens)[:2] == [Sample(0.0, 0.003), Sample(0.001, 0.003)]
    assert list(arrived.next_tokens)[-1] == Sample(7.0, 0.5)


def test_what_misses_the_mark_and_what_is_known_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attacks import ATTACKS

    import hostile

    row = hostile.Row(
        attack="nothing", tree="0", outcomes={}, took_s=5.0, health_ms=1.0, kept_health_ms=1.0, token_late_ms=1.0,
        memory_peak_mb=0.0, memory_kept_mb=0.0, log_kb=0.0, tracebacks=0, failures=[], serves=True,
        usual_health_ms=1.0, usual_token_ms=1.0, observer_lag_ms=0.0,
    )  # fmt: skip
    rows = [row] + [replace(row, attack=name, **late) for name, late in (
        ("within", {}), ("late", {"token_late_ms": 101.0}), ("big", {"memory_kept_mb": 101.0}),
    )]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert hostile.read_rows(file) == rows
    hostile.print_table(argparse.Namespace(file=file, outside=True))
    names = [line.split(" | ")[0].strip("| ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == ["nothing", "late", "big"]
    known = argparse.Namespace(
        only="nothing", list=False, python_path=["."], label=None, output=file, resume=True, ahead=4,
        flags=[],
    )  # fmt: skip
    file.write_text("".join(json.dumps(asdict(replace(row, attack=name))) + "\n" for name in ATTACKS))
    assert hostile.run_attacks(known) == 0, "nothing is left to do"
