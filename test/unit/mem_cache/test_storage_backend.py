"""FileBackend: size bound, order of eviction, models side by side, and what it does when the system refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from storage_cases import (
    check_usage,
    contents,
    empty,
    file_nbytes,
    fingerprint,
    key,
    page_files,
    path_of,
    read_checked,
    temp_files,
    usage_of,
)

from fenceline.mem_cache.storage.backend import Reason, StorageBackend, num_leading
from fenceline.mem_cache.storage.file_backend import FileBackend

PAGE = 5000
TEN = 10 * file_nbytes(PAGE)
NAMES = [key(n) for n in range(30)]


class Clock:
    """Nanoseconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        return self.now

    def tick(self) -> None:
        self.now += 10**9


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(tmp_path: Path, clock: Clock) -> FileBackend:
    return FileBackend(tmp_path, fingerprint(PAGE), TEN, clock=clock, lock_timeout_s=0.02)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Let a call into the system fail with an errno."""

    def patch(name: str, code: int) -> None:
        def failing(*args: Any, **kwargs: Any) -> Any:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, name, failing)

    yield patch


def put(backend: FileBackend, names: list[bytes]) -> list[bool]:
    return backend.set(names, contents(names, backend.page_nbytes))


def test_round_trip_and_stats(backend: FileBackend) -> None:
    assert backend.exists(NAMES[:3]) == [False] * 3
    assert put(backend, NAMES[:3]) == [True] * 3
    assert put(backend, NAMES[1:4]) == [True] * 3
    assert backend.exists(NAMES[:6]) == [True] * 4 + [False] * 2
    assert read_checked(backend, NAMES[2:6]) == [True, True, False, False]
    stats = backend.stats()
    assert (stats.hits, stats.misses, stats.writes, stats.duplicates, stats.unwritten) == (2, 2, 4, 2, 0)
    assert (stats.read_bytes, stats.written_bytes) == (2 * PAGE, 4 * PAGE)
    assert (stats.evictions, stats.errors) == (0, {})
    assert num_leading(backend.exists([NAMES[0], NAMES[9], NAMES[1]])) == 1
    assert num_leading([]) == 0
    assert num_leading([True, True]) == 2


def test_empty_calls(backend: FileBackend) -> None:
    assert backend.exists([]) == backend.get([], []) == backend.set([], []) == []


def test_as_many_pages_as_keys(backend: FileBackend) -> None:
    with pytest.raises(ValueError, match="zip"):
        backend.get(NAMES[:2], empty(1, PAGE))


# --- the bound -----------------------------------------------------------------------------------------


def test_a_prefix_loses_its_last_pages_first(backend: FileBackend, clock: Clock) -> None:
    put(backend, NAMES[:10])
    clock.tick()
    assert put(backend, [NAMES[20]]) == [True]
    assert backend.exists(NAMES[:10]) == [True] * 8 + [False] * 2
    assert (backend.stats().evictions, backend.stats().evicted_bytes) == (2, 2 * file_nbytes(PAGE))


@pytest.mark.parametrize("use", ["exists", "get", "set"])
def test_use_keeps_a_page(backend: FileBackend, clock: Clock, use: str) -> None:
    for name in NAMES[:10]:
        clock.tick()
        put(backend, [name])
    clock.tick()
    calls = {"exists": FileBackend.exists, "get": read_checked, "set": put}
    assert calls[use](backend, [NAMES[0]]) == [True]
    clock.tick()
    put(backend, [NAMES[20]])
    assert backend.exists(NAMES[:4]) == [True, False, False, True]


def test_a_batch_larger_than_the_directory_keeps_its_head(backend: FileBackend, tmp_path: Path) -> None:
    assert put(backend, NAMES[:14]) == [True] * 10 + [False] * 4
    assert backend.stats().errors == {Reason.FULL: 4}
    assert backend.stats().unwritten == 4
    assert check_usage(tmp_path, TEN) == TEN


def test_times_in_the_future_do_not_stay_for_ever(backend: FileBackend, clock: Clock) -> None:
    clock.now += 10**15
    put(backend, NAMES[:10])
    clock.now -= 10**15 - 10**9  # the clock was set back
    assert put(backend, NAMES[10:18]) == [True] * 8
    assert backend.exists(NAMES[10:18]) == [True] * 8


def test_a_smaller_bound_holds_from_the_start(backend: FileBackend, tmp_path: Path, clock: Clock) -> None:
    put(backend, NAMES[:10])
    clock.tick()
    half = TEN // 2
    again = FileBackend(tmp_path, fingerprint(PAGE), half, clock=clock)
    assert check_usage(tmp_path, half) <= half
    assert num_leading(again.exists(NAMES[:10])) >= 4


def test_a_dead_writers_file_is_swept_and_a_living_ones_counts(backend: FileBackend, tmp_path: Path) -> None:
    size = file_nbytes(PAGE)
    alive, dead = (tmp_path / "tmp" / f"{digit * 32}.tmp" for digit in "ad")
    for path in (alive, dead):
        path.write_bytes(bytes(size))
    with alive.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        FileBackend(tmp_path, fingerprint(PAGE), TEN)
        assert temp_files(tmp_path) == [alive]
        assert put(backend, NAMES[:10]) == [True] * 9 + [False]


# --- neighbours ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"model_id": "another"}, {"tp_rank": 1}])
def test_models_and_shards_do_not_mix(
    backend: FileBackend, tmp_path: Path, clock: Clock, other: dict[str, Any]
) -> None:
    second = FileBackend(tmp_path, fingerprint(PAGE, **other), TEN, clock=clock)
    put(backend, NAMES[:3])
    assert second.exists(NAMES[:3]) == [False] * 3
    put(second, NAMES[:2])
    assert second.clear() == 2
    assert backend.exists(NAMES[:3]) == [True] * 3


def test_the_bound_is_of_all_models_together(backend: FileBackend, tmp_path: Path, clock: Clock) -> None:
    """Pages of a model that nobody serves any more must not stay for ever."""
    second = FileBackend(tmp_path, fingerprint(PAGE, model_id="another"), TEN, clock=clock)
    put(backend, NAMES[:10])
    clock.tick()
    assert put(second, NAMES[:9]) == [True] * 9
    assert check_usage(tmp_path, TEN) <= TEN
    assert not any(backend.exists(NAMES[:10]))


def test_other_peoples_files_are_left_alone(backend: FileBackend, tmp_path: Path, clock: Clock) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    (outside / "ab").mkdir(parents=True)
    precious = [
        tmp_path / "thesis.tex", tmp_path / "tmp" / "notes.txt", tmp_path / "models" / "ab" / f"{'0' * 64}.page",
        outside / "ab" / f"{'1' * 64}.page",
    ]  # fmt: skip
    for path in precious:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100_000))
        os.utime(path, ns=(1, 1))
    (tmp_path / ("c" * 32)).symlink_to(outside)
    again = FileBackend(tmp_path, fingerprint(PAGE), TEN, clock=clock)
    for number in range(30):
        clock.tick()
        assert put(again, [NAMES[number]]) == [True]
    again.clear()
    assert all(path.exists() for path in precious)


def test_a_symbolic_link_to_the_directory_is_refused(tmp_path: Path) -> None:
    """Anybody can put one into a folder for temporary files; one further up in the path is the user's own affair."""
    (tmp_path / "disk" / "pages").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with pytest.raises(ValueError, match="link is a symbolic link; name one that this user alone may write"):
        FileBackend(tmp_path / "link", fingerprint(PAGE), TEN)
    assert list((tmp_path / "disk").rglob("*")) == [tmp_path / "disk" / "pages"]
    first = FileBackend(tmp_path / "link" / "pages", fingerprint(PAGE), TEN)
    put(first, NAMES[:2])
    second = FileBackend(tmp_path / "disk" / "pages", fingerprint(PAGE), TEN)
    assert read_checked(second, NAMES[:2]) == [True, True]


def test_pages_are_for_the_owner_alone(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, NAMES[:1])
    (page,) = page_files(tmp_path)
    assert page.stat().st_mode & 0o077 == 0


def test_threads_share_a_backend(tmp_path: Path) -> None:
    backend = FileBackend(tmp_path, fingerprint(PAGE), TEN, lock_timeout_s=30.0)
    problems: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for turn in range(60):
                names = [NAMES[(start + turn + i) % 16] for i in range(3)]
                put(backend, names)
                read_checked(backend, names)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(4 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    stats = backend.stats()
    assert stats.hits + stats.misses == 4 * 60 * 3
    assert stats.writes + stats.duplicates + stats.unwritten == 4 * 60 * 3
    assert set(stats.errors) <= {Reason.FULL}
    check_usage(tmp_path, TEN)
    assert temp_files(tmp_path) == []


# --- bad days ------------------------------------------------------------------------------------------


def assert_nothing_happened(backend: FileBackend, root: Path, reason: Reason, num_pages: int = 3) -> None:
    """The call failed as a count, left no file and no debt, and what was there before is there still."""
    assert backend.stats().errors == {reason: num_pages}
    assert backend.stats().unwritten == 3
    assert temp_files(root) == []
    assert usage_of(root) == (2 * file_nbytes(PAGE), 2 * file_nbytes(PAGE))
    assert read_checked(backend, NAMES[:2]) == [True, True]


def test_a_disk_that_fills_up_while_writing(
    backend: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, NAMES[:2])
    writev, calls = os.writev, []

    def half(fd: int, parts: list[memoryview]) -> int:
        calls.append(fd)
        if len(calls) % 2 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(fd, [parts[0], parts[1][: PAGE // 2]])

    monkeypatch.setattr(os, "writev", half)
    assert put(backend, NAMES[2:5]) == [False] * 3
    assert len(calls) == 2, "pages after the first that did not fit are not tried"
    assert_nothing_happened(backend, tmp_path, Reason.NO_SPACE)
    monkeypatch.undo()
    assert put(backend, NAMES[2:5]) == [True] * 3


def test_a_full_disk_is_not_even_tried(backend: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(backend, NAMES[:2])
    full = os.statvfs_result((4096, 4096, 1000, 500, 0, 100, 100, 100, 0, 255))  # the last blocks are root's
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(os, "writev", None)
    assert put(backend, NAMES[2:5]) == [False] * 3
    assert_nothing_happened(backend, tmp_path, Reason.NO_SPACE)


def test_the_systems_own_limit(backend: FileBackend, tmp_path: Path) -> None:
    """No patch: the kernel itself refuses files of this size."""
    put(backend, NAMES[:2])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE // 2, hard))
    try:
        stored = put(backend, NAMES[2:5])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stored == [False] * 3
    assert_nothing_happened(backend, tmp_path, Reason.NO_SPACE)


@pytest.mark.parametrize("name", ["writev", "rename", "ftruncate", "statvfs"])
def test_a_failing_disk(
    backend: FileBackend, tmp_path: Path, refuse: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put(backend, NAMES[:2])
    refuse(name, errno.EIO)
    assert put(backend, NAMES[2:5]) == [False] * 3
    monkeypatch.undo()
    assert_nothing_happened(backend, tmp_path, Reason.IO)


def test_fsync_that_fails_keeps_nothing(
    tmp_path: Path, refuse: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    careful = FileBackend(tmp_path, fingerprint(PAGE), TEN, fsync=True)
    put(careful, NAMES[:2])
    refuse("fsync", errno.EIO)
    assert put(careful, NAMES[2:5]) == [False] * 3
    monkeypatch.undo()
    assert_nothing_happened(careful, tmp_path, Reason.IO)


@pytest.mark.parametrize("name", ["open", "preadv", "fstat"])
def test_a_read_error_is_a_miss_and_removes_nothing(
    backend: FileBackend, refuse: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put(backend, NAMES[:2])
    refuse(name, errno.EIO)
    assert backend.get(NAMES[:2], empty(2, PAGE)) == [False, False]
    monkeypatch.undo()
    assert backend.stats().errors == {Reason.IO: 2}
    assert read_checked(backend, NAMES[:2]) == [True, True]


def test_a_directory_that_may_only_be_read(
    backend: FileBackend, refuse: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, NAMES[:2])
    refuse("utime", errno.EROFS)
    assert backend.exists(NAMES[:3]) == [True, True, False]
    assert read_checked(backend, NAMES[:3]) == [True, True, False]


def test_a_damaged_page_that_cannot_be_removed_stays_a_miss(
    backend: FileBackend, tmp_path: Path, refuse: Callable[[str, int], None]
) -> None:
    put(backend, NAMES[:1])
    os.truncate(path_of(tmp_path, fingerprint(PAGE), NAMES[0]), 50)
    refuse("unlink", errno.EACCES)
    assert read_checked(backend, NAMES[:1]) == [False]
    assert read_checked(backend, NAMES[:1]) == [False]
    assert backend.stats().errors == {Reason.LENGTH: 2}


def test_a_process_that_never_gives_the_lock_back(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, NAMES[:2])
    with (tmp_path / "usage").open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert put(backend, NAMES[2:5]) == [False] * 3
        assert read_checked(backend, NAMES[:2]) == [True, True], "readers need no lock"
    assert_nothing_happened(backend, tmp_path, Reason.BUSY)


def test_a_directory_that_vanishes(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, NAMES[:2])
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    tmp_path.rmdir()
    assert read_checked(backend, NAMES[:2]) == [False, False]
    assert put(backend, NAMES[:2]) == [True, True]
    assert read_checked(backend, NAMES[:2]) == [True, True]


@pytest.mark.parametrize("damage", [b"", b"short", bytes(12), b"\xff" * 12])
def test_lost_books_are_made_anew(backend: FileBackend, tmp_path: Path, damage: bytes) -> None:
    put(backend, NAMES[:9])
    (tmp_path / "usage").write_bytes(damage)
    assert put(backend, NAMES[9:11]) == [True] * 2
    assert check_usage(tmp_path, TEN) <= TEN


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make it larger"):
        FileBackend(tmp_path, fingerprint(PAGE), PAGE)
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="name one that this user (alone )?may write"):
            FileBackend(root, fingerprint(PAGE), TEN)


def test_an_unwritable_directory_is_refused(tmp_path: Path, refuse: Callable[[str, int], None]) -> None:
    refuse("open", errno.EACCES)
    with pytest.raises(ValueError, match="Permission denied.*name one that this user may write"):
        FileBackend(tmp_path, fingerprint(PAGE), TEN)


def test_a_server_starts_on_a_full_disk(
    backend: FileBackend, tmp_path: Path, refuse: Callable[[str, int], None]
) -> None:
    """What is stored can still be read."""
    put(backend, NAMES[:2])
    refuse("write", errno.ENOSPC)
    again = FileBackend(tmp_path, fingerprint(PAGE), TEN)
    assert read_checked(again, NAMES[:2]) == [True, True]
    assert temp_files(tmp_path) == []


def test_the_room_imports_no_torch() -> None:
    modules = [f"fenceline.mem_cache.{name}" for name in ("storage.file_backend", "page_hash")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_file_backend_is_a_backend(backend: FileBackend) -> None:
    as_backend: StorageBackend = backend
    assert as_backend.page_nbytes == PAGE
