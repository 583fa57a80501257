"""A storage directory that several processes share: its files, its lock, and how many bytes it holds.

    ROOT/usage                       bytes in use; its lock is the directory's
    ROOT/tmp/UNIQUE.tmp              files being written; each is locked by its writer for as long as that lives
    ROOT/MODEL/xx/KEY.page           pages; MODEL 32, KEY 64 hex digits, xx the key's first two

The number in ``usage`` is never less than the truth: bytes are added before a file is made, files are removed and bytes
subtracted only under the lock, and a process that dies between two steps leaves the number too high. A scan corrects
it. A file is renamed from ``tmp`` without the lock, so a scan reads ``tmp`` first: it may see a file twice, never miss
it. The system drops the locks of a process however that ends.

An entry that has one of our names but is not ours (see ``config.private_files``) is never followed, read, written or
waited for: it is removed and counted as ``foreign``. Only a directory that is not empty stays. Names are looked up from
a descriptor of ROOT. The folders below it are checked when they are first used; nobody else can exchange them later,
because nobody else may write to the folders above them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fenceline.config.private_files import (
    ForeignEntryError,
    foreign_file,
    make_folder,
    make_private_folder,
    open_file,
    open_folder,
)
from fenceline.mem_cache.storage.backend import Reason, StorageError, StorageStats

logger = logging.getLogger(__name__)

_USAGE_FILE = "usage"
_TEMPS = "tmp"
_USAGE = struct.Struct("<QI")
_MODEL = re.compile(r"[0-9a-f]{32}")
_FAN = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"[0-9a-f]{64}\.page")
_TEMP = re.compile(r"[0-9a-f]{32}\.tmp")
# Processes on one machine share a clock, so a time further in the future than this comes from a clock that was wrong.
_FUTURE_NS = 10**9


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page that a scan found."""

    path: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class TempFile:
    """A file that is being written; its writer closes ``fd``."""

    fd: int
    path: str


class UsageCount:
    """The number of bytes in use. Only the holder of the directory's lock may use it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def used(self) -> int | None:
        """Bytes in use; None if the file is damaged, so that a scan is needed."""
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
        """Subtract ``nbytes`` of files that have been removed."""
        used = self.used
        if used is not None:
            self.write(max(0, used - nbytes))


class StorageDirectory:
    """``root`` and everything in it that is ours. Files of other names are left alone. Paths are relative to it."""

    def __init__(
        self, root: Path, lock_timeout_s: float, report: Callable[[Reason], None] = lambda reason: None
    ) -> None:
        """Makes the directories. ``report`` is called for each foreign entry. Raises ``OSError``."""
        self.root = root.absolute()
        self._lock_timeout_s = lock_timeout_s
        self._report = report
        self._has_warned = False
        self.on_removed: Callable[[Sequence[str]], None] = lambda paths: None
        """Called with the paths of pages that this process has removed."""
        # Pages contain users' conversations, so only the owner may read them.
        self._root_fd = make_private_folder(str(self.root))
        self._folders: set[str] = set()  # those below ``root`` that are known to be ours
        self._make_folder(_TEMPS)

    def __del__(self) -> None:
        if hasattr(self, "_root_fd"):
            os.close(self._root_fd)

    def _make_again(self) -> None:
        """Make the directory and ``tmp`` in it again, after one of them has been removed."""
        fd = make_private_folder(str(self.root))
        # The descriptor keeps its number. Other threads may be in the middle of a call with it, and must find neither a
        # closed descriptor nor another file that was given the number.
        os.dup2(fd, self._root_fd, inheritable=False)
        os.close(fd)
        self._folders = set()
        self._make_folder(_TEMPS)

    @contextlib.contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[UsageCount]:
        """Lock the directory against all other threads and processes. Raises ``StorageError`` if another one holds the
        lock for longer than ``timeout_s``."""
        fd = self._lock(self._lock_timeout_s if timeout_s is None else timeout_s)
        try:
            yield UsageCount(fd)
        finally:
            os.close(fd)

    def _lock(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            # Opened again each time: a lock belongs to an open file, so threads exclude each other too, and there are
            # never two locks if the directory is removed and made again.
            fd = self._open_usage(deadline)
            try:
                if _try_lock(fd, deadline) and self._is_usage(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() >= deadline:
                raise StorageError(Reason.BUSY, f"{self.root / _USAGE_FILE} is locked by another process")

    def _open_usage(self, deadline: float) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return open_file(_USAGE_FILE, flags, self._root_fd)
        except FileNotFoundError:
            self._make_again()
            return open_file(_USAGE_FILE, flags, self._root_fd)
        except ForeignEntryError:
            return self._replace_usage(flags, deadline)

    def _replace_usage(self, flags: int, deadline: float) -> int:
        # ROOT itself is locked meanwhile, and the file is checked again. Otherwise a server might remove the file
        # that another server has just made in its place and locked.
        lock_fd = open_folder(".", self._root_fd)
        try:
            if not _try_lock(lock_fd, deadline):
                raise StorageError(Reason.BUSY, f"{self.root} is locked by another process")
            with contextlib.suppress(ForeignEntryError):
                return open_file(_USAGE_FILE, flags, self._root_fd)
            self._remove_foreign(_USAGE_FILE)
            return open_file(_USAGE_FILE, flags, self._root_fd)
        finally:
            os.close(lock_fd)

    def _is_usage(self, fd: int) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            now = os.stat(_USAGE_FILE, dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), now)

    def make_temp(self, nbytes: int) -> TempFile:
        """A new file of ``nbytes``. The directory must be locked. Raises ``OSError``, leaving nothing behind."""
        path = f"{_TEMPS}/{secrets.token_hex(16)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = open_file(path, flags, self._root_fd)
        except FileNotFoundError:  # ``tmp`` was removed
            self._make_again()
            fd = open_file(path, flags, self._root_fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes)  # so that a scan counts it in full
        except BaseException:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path, dir_fd=self._root_fd)
            raise
        return TempFile(fd, path)

    def num_free_bytes(self) -> int:
        """Bytes that the file system has left for this user."""
        vfs = os.statvfs(self._root_fd)
        return vfs.f_bavail * vfs.f_frsize

    # --- one file ------------------------------------------------------------------------------------

    def page_path(self, model: str, key: bytes) -> str:
        """The path that the page has if it is stored."""
        name = key.hex()
        return f"{model}/{name[:2]}/{name}.page"

    @staticmethod
    def keys_of(model: str, paths: Sequence[str]) -> list[bytes]:
        """The keys of those pages among ``paths`` that are the model's."""
        return [bytes.fromhex(Path(path).stem) for path in paths if path.startswith(f"{model}/")]

    def open(self, path: str) -> int:
        """Open the file for reading; returns the descriptor. Raises ``FileNotFoundError`` if there is none, or if it
        was not ours and has been removed, and ``OSError``."""
        if not self._has_folders(path):
            raise FileNotFoundError
        try:
            return open_file(path, os.O_RDONLY, self._root_fd)
        except ForeignEntryError as error:
            self._remove_foreign(path)
            raise FileNotFoundError from error

    def touch(self, path: str, used_ns: int) -> bool:
        """Set the time of a file's last use. Returns whether there is an entry of its name. A link is not followed."""
        try:
            if not self._has_folders(path):
                return False
            os.utime(path, ns=(used_ns, used_ns), dir_fd=self._root_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # a directory that we may only read
            return self.holds(path)
        return True

    def holds(self, path: str) -> bool:
        """Whether a file of ours is there."""
        try:
            if not self._has_folders(path):
                return False
            status = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
        except OSError:
            return False
        if foreign_file(status) is None:
            return True
        self._remove_foreign(path)
        return False

    def publish(self, temp: str, path: str) -> None:
        """Rename the finished file ``temp`` to ``path``, replacing what is there. Raises ``OSError``."""
        fd = self._root_fd
        try:
            self._make_folders(path)
            os.rename(temp, path, src_dir_fd=fd, dst_dir_fd=fd)
        except FileNotFoundError:  # the folders have been removed meanwhile
            self._folders = set()
            self._make_folders(path)
            os.rename(temp, path, src_dir_fd=fd, dst_dir_fd=fd)

    def unlink(self, path: str) -> int:
        """Remove a file. Returns its bytes. Raises ``OSError``."""
        nbytes = os.stat(path, dir_fd=self._root_fd, follow_symlinks=False).st_size
        os.unlink(path, dir_fd=self._root_fd)
        return nbytes

    # --- folders and what is not ours ----------------------------------------------------------------

    def _has_folders(self, path: str) -> bool:
        """Whether the folders that lead to a file exist and are ours. An entry of such a name that is not ours goes."""
        return all(self._has_folder(folder) for folder in _folders(path))

    def _has_folder(self, folder: str) -> bool:
        known = self._folders
        if folder in known:
            return True
        try:
            os.close(open_folder(folder, self._root_fd))
        except FileNotFoundError:
            return False
        except ForeignEntryError:
            self._remove_foreign(folder)
            return False
        known.add(folder)
        return True

    def _make_folders(self, path: str) -> None:
        for folder in _folders(path):
            if not self._has_folder(folder):
                self._make_folder(folder)

    def _make_folder(self, folder: str) -> None:
        known = self._folders
        try:
            os.close(make_folder(folder, self._root_fd))
        except ForeignEntryError:
            self._remove_foreign(folder)
            os.close(make_folder(folder, self._root_fd))
        known.add(folder)

    def _remove_foreign(self, path: str) -> None:
        """Remove an entry that has one of our names but is not ours, and of a link only the link. A directory that is
        not empty stays."""
        fd = self._root_fd
        removed = True
        try:
            mode = os.stat(path, dir_fd=fd, follow_symlinks=False).st_mode
            (os.rmdir if stat.S_ISDIR(mode) else os.unlink)(path, dir_fd=fd)
        except FileNotFoundError:
            return
        except OSError:
            removed = False
        self._report(Reason.FOREIGN)
        if not self._has_warned:  # the others are only counted
            self._has_warned = True
            what = "it was removed" if removed else "it cannot be removed: do so by hand"
            logger.warning("%s is not a file of this server's: %s", self.root / path, what)

    # --- all files -----------------------------------------------------------------------------------

    def sweep_temps(self) -> dict[int, int]:
        """Remove the files of dead writers. Returns the bytes of other temporary files by inode. Needs the lock."""
        alive: dict[int, int] = {}
        for name, seen in self._entries(_TEMPS):
            path = f"{_TEMPS}/{name}"
            if not _TEMP.fullmatch(name):
                continue
            try:
                fd = open_file(path, os.O_RDWR, self._root_fd)
            except FileNotFoundError:  # published meanwhile
                continue
            except ForeignEntryError:
                self._remove_foreign(path)
                continue
            except OSError:  # its owner may be alive, so its bytes count
                alive[seen.st_ino] = seen.st_size
                continue
            try:
                if _try_lock(fd, 0.0):
                    os.unlink(path, dir_fd=self._root_fd)
                else:
                    status = os.fstat(fd)
                    alive[status.st_ino] = status.st_size
            except FileNotFoundError:  # published between open and unlink
                pass
            finally:
                os.close(fd)
        return alive

    def scan(self) -> tuple[int, list[PageFile]]:
        """Bytes of all our files, and the pages of all models. Removes those of dead writers. Needs the lock."""
        alive = self.sweep_temps()
        pages: list[PageFile] = []
        for model, _ in self._entries("."):
            if not _MODEL.fullmatch(model):
                continue
            for inode, page in self._pages(model):
                pages.append(page)
                alive.pop(inode, None)
        return sum(alive.values()) + sum(page.nbytes for page in pages), pages

    def pages_of(self, model: str) -> list[PageFile]:
        """The pages of one model."""
        return [page for _, page in self._pages(model)]

    def _pages(self, model: str) -> Iterator[tuple[int, PageFile]]:
        """The pages of one model with their inodes."""
        for fan, _ in self._entries(model):
            if not _FAN.fullmatch(fan):
                continue
            for name, status in self._entries(f"{model}/{fan}"):
                path = f"{model}/{fan}/{name}"
                if not _PAGE.fullmatch(name):
                    continue
                if foreign_file(status) is not None:
                    self._remove_foreign(path)
                    continue
                yield status.st_ino, PageFile(path, status.st_size, status.st_mtime_ns)

    def _entries(self, folder: str) -> list[tuple[str, os.stat_result]]:
        """The entries of a folder with their status; none if the folder is not ours. Links are not followed."""
        try:
            fd = open_folder(folder, self._root_fd)
        except (FileNotFoundError, ForeignEntryError):
            return []
        found: list[tuple[str, os.stat_result]] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
        finally:
            os.close(fd)
        return found


def _folders(path: str) -> list[str]:
    """The folders that a path leads through: ``a`` and ``a/b`` for ``a/b/c``."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


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
        # A blocking flock has no time limit, and a stopped process may hold the lock forever.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)


@dataclass(frozen=True, slots=True)
class Cleaner:
    """Evicts the least recently used pages, of any model, when a directory is full. Keeps ``directory`` within
    ``max_bytes``. A scan costs about 9 us a page, so each one makes room down to ``low_bytes``."""

    directory: StorageDirectory
    max_bytes: int
    low_bytes: int

    def make_room(
        self, usage: UsageCount, nbytes: int, now_ns: int, keep_since_ns: int | None, stats: StorageStats
    ) -> bool:
        """Whether ``nbytes`` more fit, if necessary after evicting pages that were last used before ``keep_since_ns``
        (None: any page): without that bound a batch larger than the directory would evict its own first pages. The
        caller has locked the directory and so has ``usage``. Raises ``OSError``."""
        used = usage.used
        if used is not None and used + nbytes <= self.max_bytes:
            return True
        return self.clean(usage, nbytes, now_ns, keep_since_ns, stats)

    def clean(
        self, usage: UsageCount, nbytes: int, now_ns: int, keep_since_ns: int | None, stats: StorageStats
    ) -> bool:
        """Like ``make_room``, but it always scans, which corrects the number of bytes in use."""
        used, pages = self.directory.scan()
        if used + nbytes > self.max_bytes:
            used = self._evict(used, nbytes, _oldest_first(pages, now_ns, keep_since_ns), stats)
        usage.write(used)
        return used + nbytes <= self.max_bytes

    def _evict(self, used: int, nbytes: int, pages: list[PageFile], stats: StorageStats) -> int:
        removed: list[str] = []
        for page in pages:
            if used + nbytes <= max(self.low_bytes, nbytes):
                break
            try:
                self.directory.unlink(page.path)
            except FileNotFoundError:
                used -= page.nbytes
                continue
            except OSError:  # the file stays, so its bytes count
                continue
            used -= page.nbytes
            removed.append(page.path)
            stats.evictions += 1
            stats.evicted_bytes += page.nbytes
        self.directory.on_removed(removed)
        return used


def _oldest_first(pages: list[PageFile], now_ns: int, keep_since_ns: int | None) -> list[PageFile]:
    """The pages that may be evicted, in that order. If the clock was set back, a page's time may be in the future and
    says nothing about its age. Such a page is evicted first; otherwise it would stay for ever."""
    limit = now_ns + _FUTURE_NS

    def age(page: PageFile) -> tuple[int, str]:
        return (0 if page.mtime_ns > limit else page.mtime_ns, page.path)

    if keep_since_ns is not None:
        pages = [page for page in pages if not keep_since_ns <= page.mtime_ns <= limit]
    return sorted(pages, key=age)
