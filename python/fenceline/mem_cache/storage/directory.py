"""A storage directory that several processes share: its files, its lock, and how many bytes it holds.

    ROOT/usage                       bytes in use; its lock is the directory's
    ROOT/tmp/UNIQUE.tmp              files being written; each is locked by its writer for as long as that lives
    ROOT/MODEL/xx/KEY.page           pages; MODEL 32, KEY 64 hex digits, xx the key's first two

The number in ``usage`` is never less than the truth: bytes are added before a file is made, files are removed and bytes
subtracted under the lock alone, and whoever dies between two steps leaves the number too high. A scan puts it right.
A file is renamed from ``tmp`` without the lock, so a scan reads ``tmp`` first: it may see a file twice, never miss it.
The system drops the locks of a process however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fenceline.mem_cache.storage.base import Reason, StorageError

_USAGE = struct.Struct("<QI")
_MODEL = re.compile(r"[0-9a-f]{32}")
_FAN = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"[0-9a-f]{64}\.page")
_TEMP = re.compile(r"[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page that a scan found."""

    path: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class TempFile:
    """A file being written by its owner, who closes ``fd``."""

    fd: int
    path: str


class Books:
    """The number of bytes in use, for whoever holds the lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def used(self) -> int | None:
        """Bytes in use; None where the number is lost and only a scan can tell."""
        data = os.pread(self._fd, _USAGE.size, 0)
        if len(data) != _USAGE.size:
            return None
        used, crc = _USAGE.unpack(data)
        return int(used) if crc == zlib.crc32(data[:8]) else None

    def write(self, used: int) -> None:
        """Replace the number."""
        data = used.to_bytes(8, "little")
        os.pwrite(self._fd, data + zlib.crc32(data).to_bytes(4, "little"), 0)

    def subtract(self, nbytes: int) -> None:
        """Bytes that were given back."""
        used = self.used
        if used is not None:
            self.write(max(0, used - nbytes))


class StorageDirectory:
    """``root`` and everything in it that is ours. Other files are left alone."""

    def __init__(self, root: Path, lock_timeout_s: float) -> None:
        """Makes the directories. Raises ``OSError``."""
        self.root = root.resolve()
        self._temps = self.root / "tmp"
        self._usage = self.root / "usage"
        self._lock_timeout_s = lock_timeout_s
        self._make()

    def _make(self) -> None:
        # Pages are somebody's conversations: for the owner's eyes only.
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._temps.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[Books]:
        """Keep all other threads and processes out. Raises ``StorageError`` if they do not leave in time."""
        fd = self._lock(self._lock_timeout_s if timeout_s is None else timeout_s)
        try:
            yield Books(fd)
        finally:
            os.close(fd)

    def _lock(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            # Opened anew each time: a lock belongs to an open file, so threads exclude each other too, and a
            # directory that somebody removed and made again does not go on with two locks.
            fd = self._open_usage()
            try:
                if _try_lock(fd, deadline) and _is_at(fd, self._usage):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() >= deadline:
                raise StorageError(Reason.BUSY, f"{self._usage} is locked by another process")

    def _open_usage(self) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return os.open(self._usage, flags, 0o600)
        except FileNotFoundError:
            self._make()
            return os.open(self._usage, flags, 0o600)

    def make_temp(self, nbytes: int) -> TempFile:
        """A new file of ``nbytes``. The directory must be locked. Raises ``OSError``, leaving nothing behind."""
        path = f"{self._temps}/{secrets.token_hex(16)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = os.open(path, flags, 0o600)
        except FileNotFoundError:  # ``tmp`` was removed
            self._make()
            fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes)  # so that a scan counts it in full
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise
        return TempFile(fd, path)

    def num_free_bytes(self) -> int:
        """What the file system has left for us."""
        try:
            vfs = os.statvfs(self.root)
        except FileNotFoundError:  # somebody removed it: begin anew
            self._make()
            vfs = os.statvfs(self.root)
        return vfs.f_bavail * vfs.f_frsize

    def page_path(self, model: str, key: bytes) -> str:
        """Where the page lies, if it is there."""
        name = key.hex()
        return f"{self.root}/{model}/{name[:2]}/{name}.page"

    def sweep_temps(self) -> dict[int, int]:
        """Remove what dead writers left; bytes of the others' files by inode. The directory must be locked."""
        alive: dict[int, int] = {}
        for entry in _entries(self._temps):
            if not _TEMP.fullmatch(entry.name):
                continue
            try:
                fd = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:  # published meanwhile
                continue
            except OSError:  # cannot tell: it counts
                alive[entry.inode()] = entry.stat(follow_symlinks=False).st_size
                continue
            try:
                if _try_lock(fd, 0.0):
                    os.unlink(entry.path)
                else:
                    status = os.fstat(fd)
                    alive[status.st_ino] = status.st_size
            except FileNotFoundError:  # published between open and unlink
                pass
            finally:
                os.close(fd)
        return alive

    def scan(self) -> tuple[int, list[PageFile]]:
        """Bytes of all our files, and the pages of all models. Removes what dead writers left. Must be locked."""
        alive = self.sweep_temps()
        pages: list[PageFile] = []
        for model in _entries(self.root):
            if not _MODEL.fullmatch(model.name):
                continue
            for entry, status in self._page_entries(model.path):
                pages.append(PageFile(entry.path, status.st_size, status.st_mtime_ns))
                alive.pop(status.st_ino, None)
        return sum(alive.values()) + sum(page.nbytes for page in pages), pages

    def pages_of(self, model: str) -> list[PageFile]:
        """The pages of one model."""
        found = self._page_entries(f"{self.root}/{model}")
        return [PageFile(entry.path, status.st_size, status.st_mtime_ns) for entry, status in found]

    def _page_entries(self, folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for fan in _entries(folder):
            if not _FAN.fullmatch(fan.name):
                continue
            for entry in _entries(fan.path):
                with contextlib.suppress(FileNotFoundError):
                    if _PAGE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        yield entry, entry.stat(follow_symlinks=False)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """What lies in ``folder``, nothing if it is none. Links are not followed out of the storage directory."""
    if os.path.islink(folder):
        return []
    try:
        with os.scandir(os.fspath(folder)) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _try_lock(fd: int, deadline: float) -> bool:
    """Lock the open file, trying until ``deadline`` (monotonic seconds)."""
    pause_s = 20e-6
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        # A blocking flock has no time limit, and a stopped process may hold the lock for ever.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
