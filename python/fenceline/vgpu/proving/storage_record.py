"""What a storage directory must hold and answer, by what it was asked to do; and the bad days that it may have.

The record does what docs/storage.md promises of a directory: pages by key, the size bound, who leaves first, what a
failure costs. It looks at no code of the storage. Each answer of the storage is compared with the record's, and at the
end so are the files and the counts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from fenceline.config.engine_config import EngineConfig
from fenceline.mem_cache.storage import controller
from fenceline.mem_cache.storage.backend import Reason, StorageStats
from fenceline.mem_cache.storage.directory import TempFile
from fenceline.mem_cache.storage.file_backend import FileBackend

Keys = Sequence[bytes]
Pages = Sequence[Sequence[npt.NDArray[np.uint8]]]

_HEADER_NBYTES, _KEYED_HEADER_NBYTES = 64, 96
_LEFT_SHARE = 0.9  # of the bound, when the least recently used pages have made room
_TICK_NS = 10**6
_OTHER_MODEL = "0123456789abcdef" * 2
_ALWAYS = ("gone", "books", "folder", "crash", "crash", "slow", "slow")
_BAD_DAYS = {
    "exists": ("damage", *_ALWAYS),
    "get": ("refusal", "refusal", "damage", "damage", "exchange", *_ALWAYS),
    "set": (
        "full",
        "refusal",
        "refusal",
        "no lock",
        "no lock",
        "no file",
        "foreign",
        "foreign",
        "damage",
        *_ALWAYS,
    ),
}
# Where the system refuses something: at a page's file, at the directory's lock, at the file that becomes a page.
_REFUSALS = {"refusal": "page", "no lock": "lock", "no file": "temp"}
_LOGGER = logging.getLogger("fenceline.mem_cache.storage")


class CrashError(Exception):
    """What a backend raises, which it promises not to do."""


@dataclass(slots=True)
class _File:
    """A page's file. ``used``: the number of the call that used it last, and its place in it, the first the latest."""

    nbytes: int
    used: tuple[int, int]
    fault: str = ""  # what reading it will say, "" if it is sound


class StorageRecord:
    """Compares ``backend`` with what it must do. With ``bad_days`` it fails as disks and people make it fail, at random
    calls: full, unreadable, damaged or gone pages, links in their place, lost books, calls that take long or raise.
    In half of these runs most pages are damaged when they are read. ``wrong``: what it did that it must not do."""

    def __init__(
        self,
        backend: FileBackend,
        config: EngineConfig,
        bad_days: Random | None,
        pause: Callable[[int], None] = lambda num_polls: None,
    ) -> None:
        """``backend`` is that of a server with ``config`` and has not been asked for anything yet. ``pause`` holds the
        calling thread up until the scheduler has looked for news so many times."""
        assert config.hicache is not None and config.hicache.storage is not None, "there is storage"
        has_key = config.server_args.hicache_storage_key is not None
        max_bytes = config.hicache.storage.max_bytes
        self.wrong: list[str] = []
        self.events: set[str] = set()
        # Pages that writes have tried and stored, and those that reads have brought in front of a missing one; calls by
        # method, those that have not stored all, and those that have raised.
        self.num_tried = self.num_stored = self.num_read = 0
        self.num_calls: Counter[str] = Counter()
        self.num_failed_writes = self.num_crashes = 0
        self._backend = backend
        self._root = Path(config.hicache.storage.directory)
        self._payload = backend.page_nbytes
        self._nbytes = (_KEYED_HEADER_NBYTES if has_key else _HEADER_NBYTES) + self._payload
        self._max_bytes, self._has_key, self._bad_days = max_bytes, has_key, bad_days
        self._files: dict[str, _File] = {}  # by path in the directory
        self._num_calls = 0
        self._expected = StorageStats()
        self._before = backend.stats()  # of the start
        self._books_are_exact = True
        self._is_full = False  # the disk, during a call
        self._refuses: frozenset[int] = (
            frozenset()
        )  # pages of a call that the system refuses to write or read
        self._refusal = ""  # where: one of _REFUSALS
        self._num_refusals = 0
        self._pause = pause
        self._decays = bad_days is not None and bad_days.random() < 0.5
        self._start_ns = time.time_ns()
        for path, status in self._pages().items():  # another model's
            # A time in the future comes from a clock that was wrong: the page goes before all others.
            age = status.st_mtime_ns - self._start_ns
            self._files[path] = _File(status.st_size, (age if age <= 0 else -self._start_ns, 0))
            self._check(
                stat.S_ISREG(status.st_mode), f"leaves {path} behind, which is no file, when it starts"
            )
        self._check(self._num_bytes() <= max_bytes, "holds more than its bound allows when it starts")
        self._compare_books()
        self._compare_description(config)
        self._attach()

    # --- calls ---------------------------------------------------------------------------------------

    def _attach(self) -> None:
        backend = self._backend
        # Times of use must have an order, and the machine's clock may stand still between two calls.
        backend._clock = lambda: self._start_ns + self._num_calls * _TICK_NS
        for name, expected in (("exists", self._exists), ("get", self._get), ("set", self._set)):
            setattr(backend, name, self._compared(name, getattr(backend, name), expected))
        clear = backend.clear

        def cleared() -> int:
            num = self._clear()
            got = clear()
            self._check(got == num, f"clears {got} pages of {num}")
            return got

        backend.clear = cleared  # type: ignore[method-assign]
        if self._bad_days is not None:
            self._break(backend)

    def _compared(
        self, name: str, call: Callable[..., list[bool]], expected: Callable[[Keys], list[bool]]
    ) -> Callable[..., list[bool]]:
        def compared(keys: Keys, *pages: Pages) -> list[bool]:
            self.num_calls[name] += 1
            self._begin_bad_day(name, keys)
            self._num_calls += 1  # after that: other threads may have made calls meanwhile
            most = max(1, controller._BATCH_BYTES // self._payload)
            self._check(
                name == "exists" or len(keys) <= most, f"{name} of {len(keys)} pages, {most} are the most"
            )
            right = expected(keys)
            got = call(keys, *pages)
            self._check(got == right, f"{name} of {len(keys)} pages answers {got}, {right} is right")
            self._is_full, self._refuses, self._refusal = False, frozenset(), ""
            self._check(self._num_bytes() <= self._max_bytes, "holds more than its bound allows")
            return got

        return compared

    def _exists(self, keys: Keys) -> list[bool]:
        found = [self._path(key) in self._files for key in keys]
        for index, key in enumerate(keys):
            if found[index]:
                self._touch(key, index)
        return found

    def _get(self, keys: Keys) -> list[bool]:
        found = []
        for index, key in enumerate(keys):
            file = self._files.get(self._path(key))
            if index in self._refuses:
                self._expected.errors[Reason.IO] += 1
                found.append(False)
            elif file is None:
                found.append(False)
            elif file.fault:
                self._expected.errors[Reason(file.fault)] += 1
                del self._files[self._path(key)]
                found.append(False)
            else:
                self._touch(key, index)
                found.append(True)
        self._expected.hits += sum(found)
        self._expected.misses += len(found) - sum(found)
        self._expected.read_bytes += sum(found) * self._payload
        self.num_read += found.index(False) if False in found else len(found)
        return found

    def _set(self, keys: Keys) -> list[bool]:
        stored = [False] * len(keys)
        num_new = 0
        for index, key in enumerate(keys):
            if self._path(key) in self._files:
                self._touch(key, index)
                self._expected.duplicates += 1
                stored[index] = True
                continue
            if not self._is_full and self._refusal == "lock" and num_new in self._refuses:
                self._expected.errors[Reason.IO] += 1
                num_new += 1
                continue
            reason = Reason.NO_SPACE if self._is_full else None if self._make_room() else Reason.FULL
            if reason is not None:
                self._expected.errors[reason] += len(keys) - index
                self.events.add("the disk is full" if self._is_full else "nothing may leave storage")
                break
            if num_new in self._refuses:
                self._expected.errors[Reason.IO] += 1
                self.events.add("storage refuses a write")
            else:
                self._files[self._path(key)] = _File(self._nbytes, (self._num_calls, -index))
                self._expected.writes += 1
                self._expected.written_bytes += self._payload
                stored[index] = True
            num_new += 1
        self._expected.unwritten += len(keys) - sum(stored)
        self.num_tried += len(keys)
        self.num_stored += sum(stored)
        self.num_failed_writes += not all(stored)
        return stored

    def _make_room(self) -> bool:
        """Whether one page more fits, after the least recently used have left. None leaves of those that this call has
        used, and none before it must."""
        if self._num_bytes() + self._nbytes > self._max_bytes:
            low = max(int(self._max_bytes * _LEFT_SHARE), self._nbytes)
            old = [path for path, file in self._files.items() if file.used[0] < self._num_calls]
            for path in sorted(old, key=lambda path: (self._files[path].used, path)):
                if self._num_bytes() + self._nbytes <= low:
                    break
                self._expected.evictions += 1
                self._expected.evicted_bytes += self._files.pop(path).nbytes
                self.events.add("eviction from storage")
        return self._num_bytes() + self._nbytes <= self._max_bytes

    def _clear(self) -> int:
        mine = [path for path in self._files if self._is_mine(path)]
        for path in mine:
            del self._files[path]
        return len(mine)

    def _touch(self, key: bytes, index: int) -> None:
        self._files[self._path(key)].used = (self._num_calls, -index)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._backend._model}/{name[:2]}/{name}.page"

    def _is_mine(self, path: str) -> bool:
        return not path.startswith(_OTHER_MODEL)

    def _num_bytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    # --- bad days ------------------------------------------------------------------------------------

    def _begin_bad_day(self, name: str, keys: Keys) -> None:
        """Something may go wrong before or during a call."""
        random = self._bad_days
        if random is None:
            return
        if name == "get" and self._decays and random.random() < 0.7:
            kind = random.choice(("damage", "damage", "exchange"))
        elif random.random() > 0.5:
            return
        else:
            kind = random.choice(_BAD_DAYS[name])
        # What is about to be read, or anything.
        named = {self._path(key) for key in keys} if name == "get" else self._files
        mine = sorted(path for path in named if path in self._files and self._is_mine(path))
        mine = [path for path in mine if not self._files[path].fault]
        self._num_refusals = 0
        if kind == "full":
            self._is_full = True
        elif kind in _REFUSALS:
            self._refusal = _REFUSALS[kind]
            self._refuses = frozenset(random.sample(range(len(keys)), random.randint(1, len(keys))))
        elif kind == "damage" and mine:
            self._damage(random.choice(mine), random)
        elif kind == "exchange" and mine:
            self._exchange(random.choice(mine), random)
        elif kind == "foreign":
            self._place_foreign(keys, random)
        elif kind == "slow":
            self._pause(random.randint(1, 16))
        elif kind == "gone" and mine:
            path = random.choice(mine)
            os.unlink(self._root / path)
            del self._files[path]
            self._books_are_exact = False
        elif kind == "books" and self._root.exists():
            self._lose_books(random)
        elif kind == "folder":
            self._remove_folder(random)
        elif kind == "crash":
            self.num_crashes += 1
            self.events.add("storage raises")
            if name == "set":
                self.num_tried += len(keys)
                self.num_failed_writes += 1
            raise CrashError("a call of the storage raises")

    def _damage(self, path: str, random: Random) -> None:
        """Cut a page's file off, or change one byte of it."""
        file, place = self._files[path], self._root / path
        data, status = bytearray(place.read_bytes()), place.stat()
        index = random.randrange(len(data))
        if random.random() < 0.3:
            del data[index:]
            file.fault = "length"
            self._books_are_exact = False
        else:
            data[index] ^= random.randrange(1, 256)
            payload = "mac" if self._has_key else "checksum"
            file.fault = "header" if index < _HEADER_NBYTES else payload
        place.write_bytes(data)
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
        file.nbytes = len(data)

    def _exchange(self, path: str, random: Random) -> None:
        """A page's file has the bytes of another page."""
        others = [other for other in self._files if self._is_mine(other) and not self._files[other].fault]
        source, place = self._root / random.choice(sorted(others)), self._root / path
        if source == place:
            return
        status = place.stat()
        place.write_bytes(source.read_bytes())
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
        self._files[path].fault = "key"

    def _place_foreign(self, keys: Keys, random: Random) -> None:
        """In the place of the first page that is new, or of its folder, there is a link to somewhere else. Folders that
        the engine has checked stay folders: nobody else may exchange them."""
        path = next((path for path in map(self._path, keys) if path not in self._files), None)
        if path is None or not self._root.exists():
            return
        folder = (self._root / path).parent
        folder.parent.mkdir(exist_ok=True, mode=stat.S_IRWXU)
        is_known = str(folder.relative_to(self._root)) in self._backend._directory._folders
        if random.random() < 0.7 or is_known:
            folder.mkdir(exist_ok=True, mode=stat.S_IRWXU)
        (self._root / path if folder.exists() else folder).symlink_to("/dev/null")
        self._expected.errors[Reason.FOREIGN] += 1

    def _lose_books(self, random: Random) -> None:
        """The number of bytes in use is lost: its file is gone, has other bytes, or is a link to another file."""
        usage, kind = self._root / "usage", random.randrange(3)
        usage.unlink(missing_ok=True)
        if kind == 1:
            usage.write_bytes(random.randbytes(random.randrange(24)))
            usage.chmod(0o600)
        elif kind == 2:
            usage.symlink_to("/dev/null")
            self._expected.errors[Reason.FOREIGN] += 1
            with self._backend._directory.locked():
                self._check(not usage.is_symlink(), "follows a link in the place of its books")
        self.events.add("the books of storage are lost")
        self._books_are_exact = False

    def _remove_folder(self, random: Random) -> None:
        """Somebody removes the directory, or one of its folders with all that is in it."""
        folders = sorted(path.name for path in self._root.glob("*") if path.is_dir())
        name = random.choice(("", *folders)) if folders else ""
        shutil.rmtree(self._root / name, ignore_errors=True)
        for path in [path for path in self._files if path.startswith(name)]:
            del self._files[path]
        self.events.add("a folder of storage is removed")
        self._books_are_exact = False

    def _break(self, backend: FileBackend) -> None:
        directory = backend._directory
        publish, open_page = directory.publish, directory.open
        is_usage, make_temp = directory._is_usage, directory.make_temp

        def free_bytes() -> int:
            """As much as a page needs, or a little less."""
            return self._nbytes - self._is_full

        def refuses(where: str) -> bool:
            if where != self._refusal:
                return False
            self._num_refusals += 1
            return self._num_refusals - 1 in self._refuses

        def refuse(where: str) -> None:
            if refuses(where):
                raise OSError(errno.EIO, "refused")

        def published(temp: str, path: str) -> None:
            refuse("page")
            publish(temp, path)

        def opened(path: str) -> int:
            refuse("page")
            return open_page(path)

        def locked(fd: int) -> bool:
            refuse("lock")
            return is_usage(fd)

        def made(nbytes: int) -> TempFile:
            return make_temp(-1 if refuses("temp") else nbytes)  # no file can have that length

        directory._is_usage = locked  # type: ignore[method-assign]
        directory.make_temp = made  # type: ignore[method-assign]
        directory.num_free_bytes = free_bytes  # type: ignore[method-assign]
        directory.publish = published  # type: ignore[method-assign]
        directory.open = opened  # type: ignore[method-assign]

    # --- the end -------------------------------------------------------------------------------------

    def finish(self) -> str:
        """What is wrong at the end, when no call is left; "" if nothing is."""
        pages = self._pages()
        files = {path: status.st_size for path, status in pages.items()}
        right = {path: file.nbytes for path, file in self._files.items()}
        self._check(files == right, f"holds {_some(files, right)} too many, and lacks {_some(right, files)}")
        if files == right:
            mine = [path for path in files if self._is_mine(path)]
            # Pages of one call are less than a tick apart, the first the latest.
            calls = [-(-(pages[path].st_mtime_ns - self._start_ns) // _TICK_NS) for path in mine]
            used = [self._files[path].used[0] for path in mine]
            self._check(calls == used, f"says that pages were last used by calls {calls}, {used} is right")
        self._compare_books()
        self._check_descriptors()
        said = self._backend.stats()
        for name in (entry.name for entry in fields(said)):
            mine, before = getattr(self._expected, name), getattr(self._before, name)
            got = getattr(said, name) - before
            self._check(got == mine, f"counts {name}: {got}, {mine} is right")
        return "\n".join(self.wrong)

    def _compare_description(self, config: EngineConfig) -> None:
        """The folder of the model tells people whose pages it has."""
        file = self._root / self._backend._model / "fingerprint.json"
        text = file.read_text() if file.exists() else ""
        facts = json.loads(text) if text else {}
        right = facts.get("page_nbytes") == self._payload and config.model.model_path in text
        self._check(right, f"says {text!r} of the pages in its folder")

    def _compare_books(self) -> None:
        """The number of bytes in use is never less than the truth, and no more either if nothing went wrong."""
        num_bytes = self._num_bytes()
        usage = self._root / "usage"
        data = usage.read_bytes()[:12] if usage.exists() else b""
        used = int.from_bytes(data[:8], "little")
        if self._books_are_exact:
            self._check(used == num_bytes, f"says that {used} bytes are in use, {num_bytes} are")
        elif len(data) == 12 and zlib.crc32(data[:8]) == int.from_bytes(data[8:], "little"):
            # The number has its checksum, so it is not one that was lost: it may be too high, never too low.
            self._check(used >= num_bytes, f"says that {used} bytes are in use, and at least {num_bytes} are")
        temps = sorted((self._root / "tmp").glob("*"))
        self._check(not temps, f"leaves {len(temps)} files that nobody writes any more")

    def _check_descriptors(self) -> None:
        """When no call runs, the directory itself is open and nothing in it."""
        names = []
        for number in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ():
            with suppress(OSError):  # that of the list itself is closed again
                names.append(os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)"))
        root = str(self._root.absolute())
        mine = [name for name in names if name == root or name.startswith(f"{root}/")]
        self._check(mine in ([], [root]), f"leaves files open: {mine}")

    def _pages(self) -> dict[str, os.stat_result]:
        """The pages' files that are there, by path."""
        paths = sorted(self._root.glob("*/*/*.page"))
        return {path.relative_to(self._root).as_posix(): path.lstat() for path in paths}

    def _check(self, holds: bool, text: str) -> None:
        if not holds and len(self.wrong) < 10:
            self.wrong.append(f"storage: call {self._num_calls}: {text}")


def _some(these: dict[str, int], others: dict[str, int]) -> list[str]:
    return [path for path, size in these.items() if others.get(path) != size][:3]


def leave_behind(folder: str, random: Random) -> None:
    """What others have left in a directory: pages of another model, some of them from a clock that was wrong, a file
    that was being written when its writer died, and links that have the names of such files, of a page or a folder."""
    root = Path(folder)
    root.chmod(stat.S_IRWXU)
    now_ns = time.time_ns()
    for _ in range(random.randrange(4)):
        name = random.randbytes(32).hex()
        page = root / _OTHER_MODEL / name[:2] / f"{name}.page"
        page.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        page.parent.parent.chmod(stat.S_IRWXU)
        page.write_bytes(bytes(random.choice((100, 600))))
        page.chmod(stat.S_IRUSR | stat.S_IWUSR)
        used_ns = now_ns + random.choice((-1, -1, 1)) * random.randrange(10**12, 10**13)
        os.utime(page, ns=(used_ns, used_ns))
    if random.random() < 0.5:
        temp = root / "tmp" / f"{random.randbytes(16).hex()}.tmp"
        temp.parent.mkdir(mode=stat.S_IRWXU)
        temp.write_bytes(bytes(300))
        temp.chmod(stat.S_IRUSR | stat.S_IWUSR)
        if random.random() < 0.5:
            temp.with_name(f"{random.randbytes(16).hex()}.tmp").symlink_to("/dev/null")
    elif random.random() < 0.5:
        (root / "tmp").symlink_to("/dev/null")
    if random.random() < 0.3:
        name = random.randbytes(32).hex()
        page = root / _OTHER_MODEL / name[:2] / f"{name}.page"
        page.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        page.symlink_to("/dev/null")


@contextmanager
def without_logs() -> Iterator[None]:
    """Inside, the storage's warnings of what goes wrong in it are not printed."""
    handler, propagates = logging.NullHandler(), _LOGGER.propagate
    _LOGGER.addHandler(handler)
    _LOGGER.propagate = False
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.propagate = propagates
