"""Storage directories and processes: kill -9 at any moment, and several servers in one directory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import storage_processes as processes
from storage_cases import check_usage, fingerprint, key, read_checked, temp_files

from fenceline.mem_cache.storage.file_backend import FileBackend


def start(mode: str, root: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, processes.__file__, mode, str(root), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_killed_at_every_system_call(tmp_path: Path) -> None:
    assert result(start("die", tmp_path / "storage", 0))["deaths"] > 80


def test_writers_killed_at_random_moments(tmp_path: Path) -> None:
    """Two at a time, of which one dies while the other goes on. What they publish is always whole."""
    random = Random(0)
    names = [key(n) for n in range(16)]
    writers = [start("write", tmp_path, 0)]
    try:
        for round_ in range(1, 7):
            writers.append(start("write", tmp_path, round_))
            for writer in writers:
                if writer is writers[-1]:
                    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            time.sleep(random.uniform(0.0, 0.02))  # the moment; nothing depends on it
            victim = writers.pop(random.randrange(2))
            victim.kill()
            victim.communicate()
            check_usage(tmp_path, processes.WRITER_BOUND)
            backend = FileBackend(
                tmp_path, fingerprint(processes.WRITER_PAGE), processes.WRITER_BOUND, lock_timeout_s=30.0
            )
            assert any(read_checked(backend, names))
            assert backend.stats().errors == {}, "a torn page under a page's name"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    FileBackend(tmp_path, fingerprint(processes.WRITER_PAGE), processes.WRITER_BOUND)
    assert temp_files(tmp_path) == []


def test_servers_share_a_directory(tmp_path: Path) -> None:
    """Four processes of two models in a directory too small for them."""
    usage = tmp_path / "usage"
    servers = [start("share", tmp_path, seed) for seed in range(4)]
    try:
        while any(server.poll() is None for server in servers):
            if usage.exists() and usage.stat().st_size:
                check_usage(tmp_path, processes.SHARED_BOUND)
        answers = [result(server) for server in servers]
        for answer in answers:
            # Whoever lost the CPU for a while may find nothing older than its own call. Nothing else goes wrong.
            assert set(answer["errors"]) <= {"full"}, answer
        assert sum(answer["hits"] for answer in answers) > 0
        assert sum(answer["evictions"] for answer in answers) > 0
    finally:
        for server in servers:
            server.kill()
    assert len(list(tmp_path.glob("*/fingerprint.json"))) == 2
    assert temp_files(tmp_path) == []
