"""Names of the storage directory that are taken by what is not ours: nothing is followed, waited for or overwritten."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from storage_cases import contents, file_nbytes, fingerprint, key, path_of, read_checked, temp_files, usage_of

from fenceline.config import private_files
from fenceline.config.private_files import ForeignEntryError, foreign_file, foreign_folder, open_file
from fenceline.mem_cache.storage.backend import Reason
from fenceline.mem_cache.storage.directory import StorageDirectory
from fenceline.mem_cache.storage.file_backend import FileBackend

PAGE = 500
BOUND = 10 * file_nbytes(PAGE)
NAMES = [key(n) for n in range(4)]
PRECIOUS = b"somebody's file, of more than twelve bytes"
Plant = Callable[[Path, Path], None]


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.parent / "nowhere")


def hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path, victim: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def directory(path: Path, victim: Path) -> None:
    path.mkdir()


def open_to_all(path: Path, victim: Path) -> None:
    path.write_bytes(PRECIOUS)
    path.chmod(0o666)


PLANTS: list[Plant] = [link, dangling_link, hard_link, fifo, a_socket, directory, open_to_all]
plants = pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside of the storage, which must stay as it is."""
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    os.utime(path, ns=(1, 1))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "storage"


def backend_at(root: Path) -> FileBackend:
    return FileBackend(root, fingerprint(PAGE), BOUND, lock_timeout_s=30.0)


def is_untouched(victim: Path) -> bool:
    return victim.read_bytes() == PRECIOUS and victim.stat().st_mtime_ns == 1


def put(backend: FileBackend, names: list[bytes]) -> list[bool]:
    return backend.set(names, contents(names, PAGE))


@plants
def test_the_number_of_bytes_is_written_to_a_file_of_ours_alone(root: Path, victim: Path, plant: Plant) -> None:
    put(backend_at(root), NAMES[:2])
    (root / "usage").unlink()
    plant(root / "usage", victim)
    backend = backend_at(root)
    assert put(backend, NAMES) == [True] * 4
    assert is_untouched(victim)
    usage = (root / "usage").lstat()
    assert stat.S_ISREG(usage.st_mode) and usage.st_nlink == 1 and stat.S_IMODE(usage.st_mode) == 0o600
    assert usage_of(root) == (4 * file_nbytes(PAGE),) * 2
    assert backend.stats().errors == {Reason.FOREIGN: 1}


@plants
@pytest.mark.parametrize("call", ["get", "set", "exists", "start"])
def test_a_page_that_is_none_of_ours_is_removed_and_heals(root: Path, victim: Path, plant: Plant, call: str) -> None:
    backend = backend_at(root)
    put(backend, NAMES)
    path = path_of(root, fingerprint(PAGE), NAMES[1])
    path.unlink()
    plant(path, victim)
    if call == "get":
        assert read_checked(backend, NAMES) == [True, False, True, True]
    elif call == "exists":
        backend.exists(NAMES)  # judges nothing; of what a link leads to, not even the times change
        assert plant is hard_link or is_untouched(victim)
        os.utime(victim, ns=(1, 1))
        assert read_checked(backend, NAMES) == [True, False, True, True]
    elif call == "set":
        assert put(backend, NAMES[1:2]) == [True]
    else:
        backend = backend_at(root)
    assert backend.stats().errors == {Reason.FOREIGN: 1}
    assert put(backend, NAMES[1:2]) == [True]
    assert read_checked(backend, NAMES) == [True] * 4
    assert is_untouched(victim)


@plants
def test_an_unfinished_file_that_is_none_of_ours_is_swept(root: Path, victim: Path, plant: Plant) -> None:
    backend_at(root)
    plant(root / "tmp" / f"{'a' * 32}.tmp", victim)
    backend = backend_at(root)
    assert temp_files(root) == []
    assert backend.stats().errors == {Reason.FOREIGN: 1}
    assert is_untouched(victim)


@pytest.mark.parametrize("plant", [link, dangling_link, fifo, open_to_all], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("where", ["tmp", "model", "fan"])
def test_a_folder_that_leads_elsewhere_is_made_anew(root: Path, victim: Path, plant: Plant, where: str) -> None:
    outside = victim.parent / "outside"
    outside.mkdir()
    page = path_of(root, fingerprint(PAGE), NAMES[0])
    folder = {"tmp": root / "tmp", "model": page.parent.parent, "fan": page.parent}[where]
    folder.parent.mkdir(mode=0o700, parents=True)
    root.chmod(0o700)
    plant(folder, outside if plant is link else victim)
    backend = backend_at(root)
    assert put(backend, NAMES) == [True] * 4
    assert read_checked(backend, NAMES) == [True] * 4
    assert backend.stats().errors == {Reason.FOREIGN: 1}
    assert not folder.is_symlink() and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(outside.iterdir()) == [] and is_untouched(victim)


def test_a_directory_with_something_in_it_stays_and_is_a_miss(root: Path) -> None:
    backend = backend_at(root)
    path = path_of(root, fingerprint(PAGE), NAMES[0])
    put(backend, NAMES)
    path.unlink()
    path.mkdir()
    (path / "thesis.tex").write_bytes(PRECIOUS)
    assert read_checked(backend, NAMES) == [False, True, True, True]
    assert put(backend, NAMES[:1]) == [False]
    assert (path / "thesis.tex").read_bytes() == PRECIOUS
    assert backend.stats().errors[Reason.FOREIGN] >= 1
    assert usage_of(root) == (3 * file_nbytes(PAGE), 4 * file_nbytes(PAGE)), "too high until the next scan"


@pytest.mark.parametrize("name", ["usage", "tmp"])
def test_what_cannot_be_removed_ends_the_start_with_a_remedy(root: Path, name: str) -> None:
    root.mkdir(mode=0o700)
    (root / name).mkdir(mode=0o777)
    (root / name).chmod(0o777)
    (root / name / "thesis.tex").write_bytes(PRECIOUS)
    with pytest.raises(ValueError, match=f"{name} .*; name one that this user alone may write"):
        backend_at(root)


def test_a_directory_that_others_may_write_to_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ValueError, match=r"may be written to by other users \(mode 777\)"):
        backend_at(root)
    assert list(root.iterdir()) == []


def test_a_directory_exchanged_for_a_link_while_it_is_used(root: Path, victim: Path) -> None:
    """Files go on where they are; nothing is written where the link leads."""
    backend = backend_at(root)
    put(backend, NAMES[:2])
    elsewhere = victim.parent / "elsewhere"
    elsewhere.mkdir()
    root.rename(root.with_name("moved"))
    root.symlink_to(elsewhere)
    assert put(backend, NAMES[2:]) == [True, True]
    assert read_checked(backend, NAMES) == [True] * 4
    assert list(elsewhere.iterdir()) == []


def test_two_servers_replace_a_foreign_number_once(root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have seen the link; the second must not remove the file that the first has put there and locked."""
    first, second = StorageDirectory(root, 30.0), StorageDirectory(root, 0.0)
    (root / "usage").symlink_to(victim)
    lock = threading.Event()
    replace = second._replace_usage

    def late(flags: int, deadline: float) -> int:
        with first.locked() as usage:
            usage.write(123)
            try:
                return replace(flags, deadline)
            finally:
                lock.set()

    monkeypatch.setattr(second, "_replace_usage", late)
    with second.locked(30.0) as usage:
        assert lock.is_set()
        assert usage.used == 123, "the same file"
    assert is_untouched(victim)


def test_whose_an_entry_is() -> None:
    def status(mode: int, uid: int = os.geteuid(), links: int = 1) -> os.stat_result:
        return os.stat_result((mode, 1, 1, links, uid, 0, 10, 0, 0, 0))

    assert foreign_file(status(stat.S_IFREG | 0o600)) is None
    assert foreign_file(status(stat.S_IFREG | 0o644)) is None
    assert foreign_file(status(stat.S_IFREG | 0o600, os.geteuid() + 1)) is not None
    assert foreign_file(status(stat.S_IFREG | 0o620)) is not None
    assert foreign_file(status(stat.S_IFREG | 0o602)) is not None
    assert foreign_file(status(stat.S_IFREG | 0o600, links=2)) is not None
    assert foreign_file(status(stat.S_IFREG | 0o600, links=0)) is None, "removed while it was opened"
    assert foreign_file(status(stat.S_IFBLK | 0o600)) == "is a device"
    assert foreign_folder(status(stat.S_IFDIR | 0o755, links=5)) is None
    assert foreign_folder(status(stat.S_IFDIR | 0o1777)) is not None
    assert foreign_folder(status(stat.S_IFDIR | 0o700, os.geteuid() + 1)) == f"belongs to user {os.geteuid() + 1}"


def test_another_users_file_is_judged_where_it_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is open is judged by its descriptor; what could not be opened, by what it is."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 1)
    num_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    with pytest.raises(ForeignEntryError, match="belongs to user"):
        open_file(str(path), os.O_RDONLY)
    assert num_open in (None, len(os.listdir("/proc/self/fd"))), "the descriptor is closed"

    def refusing(*args: object, **kwargs: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ForeignEntryError, match="belongs to user"):
        open_file(str(path), os.O_RDONLY)
    monkeypatch.setattr(private_files.os, "geteuid", os.getuid)
    with pytest.raises(PermissionError, match="Permission denied"):
        open_file(str(path), os.O_RDONLY)
