"""StorageDirectory: the number of bytes is never too low, whatever happens between two of its steps."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from storage_cases import check_usage, contents, file_nbytes, fingerprint, key, path_of, read_checked

from fenceline.mem_cache.storage.directory import StorageDirectory
from fenceline.mem_cache.storage.file_backend import FileBackend

PAGE = 1000
BOUND = 10 * file_nbytes(PAGE)


def test_a_page_published_during_a_scan_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever folder the scan is: not missed, not counted twice."""
    size, scandir = file_nbytes(PAGE), os.scandir
    backend = FileBackend(tmp_path, fingerprint(PAGE), BOUND)
    backend.set([key(1)], contents([key(1)], PAGE))
    directory = StorageDirectory(tmp_path, 1.0)
    final = path_of(tmp_path, fingerprint(PAGE), key(2))
    final.parent.mkdir(exist_ok=True)
    num_folders = 0
    for moment in range(1, 20):
        temp, num_folders = directory.make_temp(size), 0

        def publishing(folder: Any, now: int = moment, path: str = temp.path) -> Any:
            nonlocal num_folders
            num_folders += 1
            if num_folders == now:
                os.rename(tmp_path / path, final)
            return scandir(folder)

        monkeypatch.setattr(os, "scandir", publishing)
        total, _ = directory.scan()
        monkeypatch.undo()
        assert total == 2 * size, f"published at folder {moment}"
        os.close(temp.fd)
        if num_folders < moment:
            break
        final.unlink()
    assert num_folders >= 4, "the scan has several moments"


def test_a_lock_on_a_file_that_was_replaced_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is removed and made again between open and flock."""
    directory, flock = StorageDirectory(tmp_path, 1.0), fcntl.flock

    def replacing(fd: int, operation: int) -> None:
        monkeypatch.undo()
        (tmp_path / "usage").unlink()
        (tmp_path / "usage").touch()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replacing)
    with directory.locked() as usage:
        usage.write(123)
        assert (tmp_path / "usage").stat().st_size == 12
    with directory.locked() as usage:
        assert usage.used == 123


@pytest.mark.parametrize("length", [10, 3 * file_nbytes(PAGE)])
@pytest.mark.parametrize("rescanned", [False, True])
def test_removing_a_file_of_another_length(tmp_path: Path, length: int, rescanned: bool) -> None:
    """What a damaged file gives back is never more than was counted for it."""
    backend = FileBackend(tmp_path, fingerprint(PAGE), BOUND)
    names = [key(n) for n in range(4)]
    backend.set(names, contents(names, PAGE))
    os.truncate(path_of(tmp_path, fingerprint(PAGE), names[2]), length)
    if rescanned:
        backend = FileBackend(tmp_path, fingerprint(PAGE), BOUND)
    assert read_checked(backend, names) == [True, True, False, True]
    assert check_usage(tmp_path, BOUND) == 3 * file_nbytes(PAGE)


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    """Two locks of one process: a lock belongs to an open file."""
    directory = StorageDirectory(tmp_path, 0.0)
    with directory.locked():
        with pytest.raises(Exception, match="locked by another process"):
            with directory.locked():
                pass
    with directory.locked():
        pass


def test_a_directory_that_is_made_again_keeps_its_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is about to use it when another finds that the directory is gone, and makes it again."""
    root, rename = tmp_path / "root", os.rename
    directory = StorageDirectory(root, 1.0)
    temp = directory.make_temp(PAGE)
    os.close(temp.fd)

    def remaking(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        monkeypatch.undo()
        shutil.rmtree(root)
        with directory.locked():
            pass
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    path = directory.page_path("0" * 32, key(1))
    monkeypatch.setattr(os, "rename", remaking)
    with pytest.raises(FileNotFoundError):  # of what it was to give a name, and no bad descriptor
        directory.publish(temp.path, path)
    temp = directory.make_temp(PAGE)
    os.close(temp.fd)
    directory.publish(temp.path, path)
    assert directory.holds(path)


def test_a_temporary_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, and somebody removes the directory at the same moment."""
    directory = StorageDirectory(tmp_path / "root", 1.0)

    def failing(fd: int, length: int) -> None:
        shutil.rmtree(tmp_path / "root")
        raise OSError(errno.ENOSPC, "full")

    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "ftruncate", failing)
    with pytest.raises(OSError, match="full"):
        directory.make_temp(PAGE)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_clear_goes_on_after_a_page_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removes a page while all are being removed."""
    backend = FileBackend(tmp_path, fingerprint(PAGE), BOUND)
    names, pages_of = [key(n) for n in range(4)], StorageDirectory.pages_of
    backend.set(names, contents(names, PAGE))

    def removing(directory: StorageDirectory, model: str) -> Any:
        pages = pages_of(directory, model)
        directory.unlink(pages[1].path)
        return pages

    monkeypatch.setattr(StorageDirectory, "pages_of", removing)
    assert backend.clear() == 3
    assert read_checked(backend, names) == [False] * 4
    assert check_usage(tmp_path, BOUND) == 0
