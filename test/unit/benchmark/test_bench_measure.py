"""benchmark/h200/measure.py: jobs end at their limits, nothing that they start is left, and what they wrote is kept."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmark" / "h200" / "measure.py"


def _job(name: str, use: str, seconds: float, command: str, show: str = "") -> str:
    return (
        f'[[job]]\nname = "{name}"\nuse = "{use}"\nseconds = {seconds}\ncommand = "{command}"\n'
        f'show = "{show}"\ndecides = "{name}s"\n'
    )


def _measure(tmp_path: Path, jobs: str, *args: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "jobs.toml").write_text(jobs)
    command = [sys.executable, SCRIPT, "--jobs", tmp_path / "jobs.toml", "--out", tmp_path / "out", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_job_ends_in_time_and_its_files_are_kept(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    jobs = (
        _job("waits", "timed", 1, f"sleep 1000 & echo $! > {pid}; sleep 1000")
        + _job("fails", "cpu", 60, "echo 17 runs; echo x > {out}/file; exit 3", "runs")
        + _job("long", "gpu", 10_000, "touch {out}/file")
        + _job("compares", "gpu", 60, "ls {before}")
        + _job("works", "gpu", 60, "{python} -c 'print(6 * 7)'", "42")
    )
    done = _measure(tmp_path, jobs, "--seconds", "300")
    assert done.returncode == 1, done.stderr
    ends = dict(re.findall(r"^(\w+) +(not begun|stopped|\d+) ", done.stdout, re.MULTILINE))
    right = {"waits": "stopped", "fails": "3", "long": "not begun", "compares": "not begun", "works": "0"}
    assert ends == right
    assert "    17 runs\n" in done.stdout and "    42\n" in done.stdout
    assert not _runs(int(pid.read_text())), "what a job has started ends with it"
    with tarfile.open(tmp_path / "out" / "logs.tar.xz") as archive:
        file = archive.extractfile("logs/fails/file")
        assert file is not None and file.read() == b"x\n"
        assert "logs/waits.log" in archive.getnames()


def test_the_list_names_files_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import measure

    for job in measure.read_list(measure.LIST):
        files = re.findall(r"(?:benchmark|test|scripts|python)/[\w/]+(?:\.\w+)?", job.command)
        missing = [file for file in files if not (ROOT / file).exists()]
        assert not missing, f"{job.name}: {missing}"
        assert files or "-m fenceline" in job.command, job.name


def test_a_job_without_a_limit_of_its_own_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof would go on for hours. One that is stopped prints no result."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import measure

    jobs = [job for job in measure.read_list(measure.LIST) if "fenceline_proof" in job.command]
    assert len(jobs) >= 2
    for job in jobs:
        found = re.search(r"--budget ([\d.]+)", job.command)
        assert found is not None, job.name
        assert float(found[1]) < job.seconds, job.name
