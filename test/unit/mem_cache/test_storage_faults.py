"""The faulty backend keeps the contract of a backend, so that what its users are tested with can happen."""

from __future__ import annotations

from pathlib import Path

import pytest
from storage_cases import contents, empty, fingerprint, flip, key, path_of
from storage_faults import FaultyBackend

from fenceline.mem_cache.storage.backend import Reason, StorageBackend, num_leading
from fenceline.mem_cache.storage.file_backend import FileBackend

PAGE = 64
NAMES = [key(n) for n in range(100)]


@pytest.fixture
def inner(tmp_path: Path) -> FileBackend:
    return FileBackend(tmp_path, fingerprint(PAGE), 1 << 20)


def read(backend: StorageBackend) -> list[bool]:
    """Get all pages; a hit must be right."""
    pages = empty(len(NAMES), PAGE)
    found = backend.get(NAMES, pages)
    right = contents(NAMES, PAGE)
    assert all((mine[0] == its[0]).all() for hit, mine, its in zip(found, pages, right, strict=True) if hit)
    return found


def test_without_faults_it_is_the_backend_itself(inner: FileBackend) -> None:
    backend = FaultyBackend(inner)
    assert backend.set(NAMES, contents(NAMES, PAGE)) == [True] * 100
    assert num_leading(backend.exists(NAMES)) == 100
    assert read(backend) == [True] * 100
    assert backend.stats() == inner.stats()
    assert backend.clear() == 100


def test_failing(inner: FileBackend) -> None:
    backend = FaultyBackend(inner, fail=0.3, seed=1)
    stored = backend.set(NAMES, contents(NAMES, PAGE))
    assert stored == inner.exists(NAMES)
    assert 50 < sum(stored) < 90
    found = read(backend)
    assert all(there for hit, there in zip(found, stored, strict=True) if hit)
    assert 20 < sum(found) < sum(stored)
    assert 20 < sum(backend.exists(NAMES)) < sum(stored)
    stats = backend.stats()
    assert stats.hits + stats.misses == 100
    assert stats.writes + stats.unwritten == 100
    assert stats.errors[Reason.IO] >= 100 - sum(stored)
    twins = [FaultyBackend(inner, fail=0.3, seed=9).exists(NAMES) for _ in range(2)]
    assert twins[0] == twins[1]


def test_corrupting(inner: FileBackend, tmp_path: Path) -> None:
    def damage(name: bytes) -> None:
        flip(path_of(tmp_path, fingerprint(PAGE), name), 80, 4)

    backend = FaultyBackend(inner, corrupt=0.5, damage=damage)
    assert backend.set(NAMES, contents(NAMES, PAGE)) == [True] * 100
    assert 25 < sum(read(backend)) < 75
    assert backend.stats().errors == {Reason.CHECKSUM: backend.stats().misses}


def test_full(inner: FileBackend) -> None:
    backend = FaultyBackend(inner, full=True)
    assert backend.set(NAMES, contents(NAMES, PAGE)) == [False] * 100
    assert backend.stats().errors == {Reason.FULL: 100}
    assert not any(read(backend))


def test_slow_and_crashing(inner: FileBackend) -> None:
    pauses: list[int] = []
    backend = FaultyBackend(inner, pause=lambda: pauses.append(1), crash=1.0)
    with pytest.raises(OSError, match="broke its promise"):
        read(backend)
    assert pauses == [1]
