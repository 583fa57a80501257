"""What storage promises to any caller: its files and directories, asked with what runs of an engine hardly meet.

Pages of many parts, calls of the system that transfer a few bytes, entries that are not the server's, files that leave
while others look for them, a directory that is locked, and times at which a decision changes. What is right is computed
here from docs/storage.md and from the bytes and files themselves.
"""

from __future__ import annotations

import errno
import gc
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from fenceline.config import private_files
from fenceline.mem_cache.page_hash import PageFingerprint
from fenceline.mem_cache.storage import directory as directory_module
from fenceline.mem_cache.storage import file_backend, page_file
from fenceline.mem_cache.storage.backend import Reason, StorageError, StorageStats
from fenceline.mem_cache.storage.directory import Cleaner, PageFile, StorageDirectory
from fenceline.mem_cache.storage.file_backend import FileBackend
from fenceline.vgpu.proving.contracts import raises

_SECOND_NS = 10**9
_STEP_NS = 1000  # between the times of two pages of a call
_HEADER_NBYTES = 64
_MOST_CALLS = 1000  # for a page, each of which transfers a byte
_NUM_PARTS = 2  # that a run asks for, since they take milliseconds


def compare_storage_contracts(random: Random) -> str:
    """The first promise that is not kept, "" if all are, of a few that are chosen at random."""
    with (
        TemporaryDirectory(prefix="fenceline-prove-") as root,
        patch.object(directory_module.logger, "warning", lambda *args: None),
    ):
        for part in random.sample(_PARTS, _NUM_PARTS):
            folder = Path(root) / part.__name__
            folder.mkdir(mode=0o700)
            for wrong in part(random, folder):
                return f"storage's files: {wrong}"
    return ""


def _num_open() -> int:
    """Open files of this process, where the system tells."""
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


# --- a page's file


class _System:
    """Reads and writes of at most ``most_parts`` buffers in a call, which transfer at most ``most_bytes``."""

    def __init__(self, most_parts: int, most_bytes: int) -> None:
        self.most_parts, self.most_bytes, self.num_calls = most_parts, most_bytes, 0
        self.fstat = os.fstat

    def _begin(self, parts: Sequence[memoryview]) -> int:
        self.num_calls += 1
        if len(parts) > self.most_parts or self.num_calls > _MOST_CALLS:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return min(sum(part.nbytes for part in parts), self.most_bytes)

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int:
        return os.write(fd, b"".join(parts)[: self._begin(parts)])

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        data = os.pread(fd, self._begin(parts), offset)
        start = 0
        for part in parts:
            some = data[start : start + part.nbytes]
            part[: len(some)] = some
            start += part.nbytes
        return len(data)


def _page_files(random: Random, root: Path) -> Iterator[str]:
    """A page is written and read whole, however few bytes a call transfers, and by as few calls as the number of parts
    in one allows."""
    lengths = [random.randint(1, 9) for _ in range(random.randint(1, 9))]
    parts = [memoryview(bytearray(random.randbytes(length))) for length in lengths]
    most_parts, is_slow = random.randint(2, 4), random.random() < 0.5
    key, secret = random.randbytes(32), random.choice((None, b"contract" * 4))
    most_bytes = random.choice((1, 1, 1, 70)) if is_slow else 1 << 20
    path, found = root / "page", [memoryview(bytearray(length)) for length in lengths]
    with patch.object(page_file, "_MAX_PARTS", most_parts):
        for name, flags, mine in (("write", os.O_WRONLY | os.O_CREAT, parts), ("read", os.O_RDONLY, found)):
            system, fd = _System(most_parts, most_bytes), os.open(path, flags, 0o600)
            try:
                with patch.object(page_file, "os", system):
                    getattr(page_file, f"{name}_page")(fd, key, mine, secret)
            except (OSError, StorageError) as error:
                yield f"a page of parts of {lengths} bytes is not {name}: {error}"
            finally:
                os.close(fd)
            fewest = math.ceil((len(parts) + 1) / most_parts)
            if not is_slow and system.num_calls != fewest:
                yield f"{system.num_calls} calls {name} {len(parts) + 1} buffers, {fewest} are enough"
    if [bytes(part) for part in found] != [bytes(part) for part in parts]:
        yield f"a page of parts of {lengths} bytes comes back as other bytes"


# --- a directory


def _counts(random: Random, root: Path) -> Iterator[str]:
    """The number of bytes in use goes down by those of removed files, not below zero; a damaged one stays damaged."""
    with StorageDirectory(root, 0.0).locked() as usage:
        used, nbytes = random.randrange(100), random.randrange(100)
        usage.write(used)
        usage.subtract(nbytes)
        if usage.used != max(used - nbytes, 0):
            yield f"{usage.used} bytes are in use after {nbytes} of {used} have gone"
        (root / "usage").write_bytes(b"damaged")
        usage.subtract(nbytes)
        if usage.used is not None:
            yield "a damaged number of bytes is taken as one"


def _entries(random: Random, root: Path) -> Iterator[str]:
    """Folders are looked for once. What has the name of a folder or a page and is a link is removed, what it points to
    is left alone, and a page that comes is kept in the directory itself. No file stays open."""
    model, key = random.randbytes(16).hex(), random.randbytes(32)
    outside = root / "outside"
    (outside / key.hex()[:2]).mkdir(parents=True)
    precious = outside / "precious"
    precious.write_bytes(b"precious")
    place = root / "storage"
    num_open = _num_open()
    reasons: list[Reason] = []
    folder = StorageDirectory(place, 0.0, reasons.append)
    path = folder.page_path(model, key)
    if not (place / "tmp").is_dir():
        yield "a new directory has no folder for files that are being written"
    fan = os.path.dirname(path)
    for what in ("page", "fan", "model", "model of a page that comes", "fan of a page that comes", "tmp"):
        _publish(folder, path)
        link = place / {"page": path, "fan": fan, "model": model, "tmp": "tmp"}[what.split()[0]]
        if link.is_dir():
            for entry in sorted(link.rglob("*"), reverse=True):
                entry.rmdir() if entry.is_dir() else entry.unlink()
            link.rmdir()
        else:
            link.unlink()
        link.symlink_to(precious if what == "page" else outside)
        folder = StorageDirectory(place, 0.0, reasons.append)  # which knows no folder yet
        reasons.clear() if what != "tmp" else None
        if what == "page" and not raises(FileNotFoundError, folder.open, path):
            yield "a link in the place of a page is read"
        if what in ("fan", "model") and folder.holds(path):
            yield f"a page is found through a link in the place of its {what}"
        if what.endswith("comes"):
            _publish(folder, path)
            if not os.path.isfile(place / path):
                yield "a page that is kept is not there"
        if link.is_symlink():
            yield f"a link in the place of a {what} stays"
        if what == "tmp" and not link.is_dir():
            yield "a link in the place of tmp is removed, and no folder is made"
        if not reasons:
            yield f"a link in the place of a {what} is not counted"
    if precious.read_bytes() != b"precious" or [*(outside / key.hex()[:2]).iterdir()]:
        yield "a file outside the directory has been changed"
    _publish(folder, path)
    with patch.object(directory_module, "open_folder", wraps=private_files.open_folder) as opened:
        folder = StorageDirectory(place, 0.0)
        for _ in range(2):
            folder.holds(path)
        _publish(folder, path)
        made = folder.page_path(random.randbytes(16).hex(), key)
        _publish(folder, made)
        _publish(folder, made)
    # The two folders of the first page, and for the other one to see that they are not there.
    if opened.call_count != 4:
        yield f"{opened.call_count} folders are looked for, 4 are needed"
    descriptor, status = folder._root_fd, os.fstat(folder._root_fd)
    del folder
    gc.collect(0)
    if _is_open(descriptor, status):
        yield "a directory that nobody uses stays open"
    if _num_open() > num_open:
        yield f"{_num_open() - num_open} files stay open"


def _is_open(descriptor: int, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), status)
    except OSError:
        return False


def _publish(folder: StorageDirectory, path: str, data: bytes = b"page") -> None:
    temp = folder.make_temp(len(data))
    os.write(temp.fd, data)
    os.close(temp.fd)
    folder.publish(temp.path, path)


class _Clock:
    """Seconds that pass in sleep, and a few with each look at the clock."""

    def __init__(self) -> None:
        self.now, self.num_naps = 0.0, 0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.num_naps += 1
        self.now += seconds


def _locks(random: Random, root: Path) -> Iterator[str]:
    """One has the directory at a time; who waits for it sleeps meanwhile, and gives up in time. A lock that the system
    refuses leaves no file open."""
    first, second, clock = StorageDirectory(root, 0.0), StorageDirectory(root, 0.0), _Clock()
    num_open = _num_open()
    with first.locked(), patch.object(directory_module, "time", clock):
        clock_s = random.choice((0.0, 0.01))
        try:
            with second.locked(clock_s):
                yield "two have the directory's lock"
        except StorageError as error:
            if error.reason is not Reason.BUSY:
                yield f"a lock that another one has is {error.reason}"
        if (clock.num_naps > 0) != (clock_s > 0) or clock.num_naps > 20 or clock.now > 4 * clock_s + 1e-3:
            yield f"{clock.num_naps} naps of {clock.now} seconds are taken to wait for {clock_s}"

    def refuses(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with patch("fcntl.flock", refuses):
        if not raises(OSError, _use_locked, first):
            yield "a lock that the system refuses is had"
    if _num_open() > num_open:  # there may be fewer: older directories are closed when they are collected
        yield "a lock that is refused leaves a file open"
    with patch("os.statvfs", lambda _: SimpleNamespace(f_bavail=3, f_frsize=512)):
        if first.num_free_bytes() != 3 * 512:
            yield f"3 blocks of 512 bytes are free, and {first.num_free_bytes()} bytes are said to be"


def _use_locked(folder: StorageDirectory) -> None:
    with folder.locked():
        pass


def _scans(random: Random, root: Path) -> Iterator[str]:
    """A scan counts each of our files once, also one that is renamed while it looks, and removes the files of writers
    that have gone, not of those that still write. No page leaves that need not, though another process removes some."""
    folder, other = StorageDirectory(root, 0.0), StorageDirectory(root, 0.0)
    model, nbytes = random.randbytes(16).hex(), random.randint(1, 9)
    paths = [folder.page_path(model, random.randbytes(32)) for _ in range(5)]
    for number, path in enumerate(paths[1:], 1):
        _publish(folder, path, b"x" * nbytes)
        os.utime(root / path, ns=(number, number))
    written, left = folder.make_temp(nbytes), folder.make_temp(3)
    os.close(left.fd)
    sweep = other.sweep_temps

    def renames_one() -> dict[int, int]:
        seen = sweep()
        folder.publish(written.path, paths[0])
        return seen

    with other.locked() as usage:
        used, pages = other.scan()
        if used != 5 * nbytes or len(pages) != 4:
            yield f"{used} bytes and {len(pages)} pages are counted, {5 * nbytes} and 4 are there"
        if (root / left.path).exists() or not (root / written.path).exists():
            yield "the files of a writer that has gone stay, or those of one that has not are removed"
            return
        with patch.object(other, "sweep_temps", renames_one):
            used, pages = other.scan()
        os.close(written.fd)
        if used != 5 * nbytes or len(pages) != 5:
            yield f"{used} bytes of {len(pages)} pages are counted, {5 * nbytes} of 5 are there"
        os.utime(root / paths[0], ns=(9, 9))  # the others are older
        unlink, gone = other.unlink, paths[1]

        def not_there(path: str) -> int:
            if path == gone:
                os.unlink(root / path)
                raise FileNotFoundError(errno.ENOENT, path)
            return unlink(path)

        stats, cleaner = StorageStats(), Cleaner(other, 5 * nbytes, 4 * nbytes)
        with patch.object(other, "unlink", not_there):
            fits = cleaner.clean(usage, nbytes, 10, None, stats)
        kept = [path for path in paths if (root / path).exists()]
        right = [paths[0], *paths[3:]]
        if not fits or kept != right or usage.used != 3 * nbytes or stats.evictions != 1:
            yield f"{len(kept)} pages of {usage.used} bytes stay, {stats.evictions} are evicted; 3 and 1 are right"


def _ages(random: Random, root: Path) -> Iterator[str]:
    """The least recently used leave first. A time more than a second in the future says nothing, so these are first; up
    to a second is another process's clock, and counts as new."""
    now = random.randrange(10 * _SECOND_NS, 20 * _SECOND_NS)
    times = {
        now + _SECOND_NS,
        now + _SECOND_NS + 1,
        now,
        now - 1,
        random.randrange(now),
        now + 9 * _SECOND_NS,
    }
    pages = [
        PageFile(f"{number:03}", 1, used)
        for number, used in enumerate(random.sample(sorted(times), len(times)))
    ]
    ahead = [page for page in pages if page.mtime_ns - now > _SECOND_NS]
    others = sorted((page for page in pages if page not in ahead), key=lambda page: page.mtime_ns)
    got = directory_module._oldest_first(pages, now, None)
    if got != sorted(ahead, key=lambda page: page.path) + others:
        yield f"pages of {[page.mtime_ns - now for page in got]} ns from now on leave in this order"


# --- pages by key


def _fingerprint(nbytes: int) -> PageFingerprint:
    return PageFingerprint("contract", "contract", nbytes)


def _pages(random: Random, num: int, nbytes: int) -> list[list[np.ndarray[Any, Any]]]:
    return [[np.frombuffer(bytearray(random.randbytes(nbytes)), np.uint8)] for _ in range(num)]


class _Lock:
    """Notes who has it."""

    def __init__(self) -> None:
        self.is_held = False

    def __enter__(self) -> None:
        self.is_held = True

    def __exit__(self, *args: object) -> None:
        self.is_held = False


def _batches(random: Random, root: Path) -> Iterator[str]:
    """A call never evicts its own pages, but all that were used before; counts are read and changed under a lock."""
    nbytes, now = random.randint(1, 9), [10**15]
    most = random.randint(1, 3)
    backend = FileBackend(
        root, _fingerprint(nbytes), most * (_HEADER_NBYTES + nbytes), clean_to=1.0, clock=lambda: now[0]
    )
    lock = _Lock()
    backend._stats_lock = lock  # type: ignore[assignment]
    held: list[bool] = []

    class Counts(StorageStats):
        def add(self, other: StorageStats) -> None:
            held.append(lock.is_held)

    keys = [random.randbytes(32) for _ in range(most + random.randint(1, 2))]
    stored = backend.set(keys, _pages(random, len(keys), nbytes))
    if stored != [number < most for number in range(len(keys))]:
        yield f"a call with {len(keys)} pages for a directory of {most} keeps {stored}"
    # The next call's pages would take the place of these, which are older than all of its own.
    others = [random.randbytes(32) for _ in range(most)]
    now[0] = 10**15 + most * _STEP_NS + 1
    stored = backend.set(others, _pages(random, most, nbytes))
    if not all(stored):
        yield f"{stored} of a call are kept, and all other pages are older"
    with patch.object(backend, "_stats", Counts()), patch.object(file_backend, "StorageStats", Counts):
        backend.get(others[:1], _pages(random, 1, nbytes))
        backend.stats()
    if held != [True, True]:
        yield f"counts are changed under their lock: {held}"


def _failures(random: Random, root: Path) -> Iterator[str]:
    """A page that could not be written costs no bytes; a directory that is not cleared is counted; with fsync a page is
    on the disk before it has its name."""
    nbytes = random.randint(1, 9)
    backend = FileBackend(root, _fingerprint(nbytes), 10**6, fsync=True, lock_timeout_s=0.0)
    directory, said = backend._directory, []
    publish = directory.publish

    def noted(*args: str) -> None:
        said.append("publish")
        publish(*args)

    with (
        patch("os.fsync", lambda fd: said.append("fsync")),
        patch.object(directory, "publish", noted),
    ):
        backend.set([random.randbytes(32)], _pages(random, 1, nbytes))
    if said != ["fsync", "publish"]:
        yield f"a page is written by {said}"

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(directory, "make_temp", full):
        backend.set([random.randbytes(32)], _pages(random, 1, nbytes))
    with directory.locked() as usage:
        if usage.used != directory.scan()[0]:
            yield f"{usage.used} bytes are said to be in use, {directory.scan()[0]} are"
        num_busy = backend.stats().errors[Reason.BUSY]
        if backend.clear() != 0 or backend.stats().errors[Reason.BUSY] != num_busy + 1:
            yield "a directory that is locked is cleared, or this is not counted"


def _openings(random: Random, root: Path) -> Iterator[str]:
    """Who opens a directory that is larger than the bound makes room, and counts that; what it could not write there
    does not stay."""
    nbytes = random.randint(1, 9)
    size, num = _HEADER_NBYTES + nbytes, random.randint(2, 4)
    first = FileBackend(root, _fingerprint(nbytes), num * size)
    first.set([random.randbytes(32) for _ in range(num)], _pages(random, num, nbytes))
    second = FileBackend(root, _fingerprint(nbytes), size, clean_to=1.0)
    if (second.stats().evictions, second.stats().evicted_bytes) != (num - 1, (num - 1) * size):
        yield f"{second.stats().evictions} pages are said to make room, {num - 1} have"

    def refuses(*args: object) -> None:
        raise OSError(reason, os.strerror(reason))

    for reason in (errno.ENOSPC, errno.EACCES):
        with patch.object(StorageDirectory, "publish", refuses):
            is_refused = raises(ValueError, FileBackend, root, _fingerprint(nbytes), size)
        if is_refused != (reason != errno.ENOSPC):
            yield f"a directory is {'' if is_refused else 'not '}refused because of {os.strerror(reason)}"
        if list((root / "tmp").iterdir()):
            yield "a file that could not be renamed stays"


_PARTS = (_page_files, _counts, _entries, _locks, _scans, _ages, _batches, _failures, _openings)
